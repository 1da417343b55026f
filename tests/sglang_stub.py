"""A stand-in for an SGLang server: the same endpoints, fields and refusals, in plain asyncio, and it can misbehave.

In a thread of the test (`serving`), with tokens from a pseudo-model; or as a process of its own that takes SGLang's
command line (`python sglang_stub.py --model-path M --port P …`) and runs the model in M, with the weights it is sent.
What the real server does was noted from version 0.5.23, see megappo/rollout/sglang/contract.py.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import hashlib
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a process of its own it runs this checkout
VERSION = "0.5.23"
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error", 503: "Service Unavailable"}


class PseudoModel:
    """Tokens and log-probs that follow from (weights, prompt, seed) by a hash; about 1 in `stop_every` ends it."""

    def __init__(self, vocab: int = 50, stop_every: int = 6) -> None:
        self.vocab, self.stop_every, self.weights = vocab, stop_every, "initial"

    def generate(self, prompt: list[int], params: dict[str, Any]) -> tuple[list[int], list[float], str]:
        ids: list[int] = []
        logprobs: list[float] = []
        stops = set(params["stop_token_ids"])
        for at in range(params["max_new_tokens"]):
            key = f"{self.weights}/{prompt}/{params.get('sampling_seed')}/{at}".encode()
            number = int.from_bytes(hashlib.sha256(key).digest()[:6], "big")
            ids.append(min(stops) if stops and number % self.stop_every == 0 else 3 + number % (self.vocab - 3))
            logprobs.append(-1e-3 * (number % 5000))
            if ids[-1] in stops:
                return ids, logprobs, "stop"
        return ids, logprobs, "length"

    def load_tensors(self, named: list[tuple[str, Any]]) -> None:
        """Names and checksums stand for the weights."""
        self.weights = "/".join(f"{name}={float(tensor.double().sum()):.6f}" for name, tensor in sorted(named))

    def load_folder(self, folder: str) -> None:
        self.load_tensors(list(_read_folder(folder).items()))


def _read_folder(folder: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    named: dict[str, Any] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        named |= load_file(file)
    if not named:
        raise ValueError(f"no weights in {folder}")
    return named


class RealModel:
    """The embedded engine on a model folder: what a server would generate with these weights."""

    def __init__(self, folder: str, dtype: str) -> None:
        import torch
        from transformers import AutoConfig

        from megappo.rollout.embedded import EmbeddedEngine

        torch.set_num_threads(1)
        self._engine = EmbeddedEngine(
            AutoConfig.from_pretrained(folder),
            dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype],
            device="cpu",
            max_batch_tokens=4096,
            pad_token_id=0,
        )
        self.load_folder(folder)

    def generate(self, prompt: list[int], params: dict[str, Any]) -> tuple[list[int], list[float], str]:
        from megappo.rollout.base import GenerateRequest, SamplingParams

        sampling = SamplingParams(
            params["max_new_tokens"],
            params["temperature"],
            params["top_p"],
            params["top_k"],
            tuple(params["stop_token_ids"]),
        )
        (sample,) = self._engine.generate([GenerateRequest(0, 0, prompt, params["sampling_seed"])], sampling)
        return sample.response_ids, sample.logprobs, sample.finish_reason

    def load_tensors(self, named: list[tuple[str, Any]]) -> None:
        self._engine.update_weights(named, 0)

    def load_folder(self, folder: str) -> None:
        self.load_tensors(list(_read_folder(folder).items()))


class Stub:
    """One server. `fault(path, body, number)`: how request `number` to that path goes wrong; None: it does not.

    Faults: "503", "400", "hang" (no answer), "half" (the connection breaks inside the answer), "drop" (it breaks before
    it), "die" (the process, or this server, ends), "counts" (a token too few), "other" (the answer to another request),
    "twice" (two answers), "version" (other weights), "abort" (ended by the server), "short" (cut before the limit).
    """

    def __init__(self, model: Any = None, *, version: str = VERSION, tp: int = 1) -> None:
        self.model, self.server_version, self.tp = model or PseudoModel(), version, tp
        self.fault: Callable[[str, dict, int], str | None] = lambda path, body, number: None
        self.weight_version = "default"
        self.session = self.paused = self.dead = False
        self.healthy = True
        self.delay = 0.0
        self.group: Any = None
        self.bucket: list[tuple[str, Any]] = []
        self.stale = False  # the prefix cache holds keys and values of older weights
        self.calls: list[tuple[str, Any]] = []
        self.running = self.most_running = 0
        self._numbers: dict[str, int] = {}
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task] = set()
        self.exit: Callable[[], None] = self._stop

    # ------------------------------------------------------------ HTTP
    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        self._server = await asyncio.start_server(self._connection, host, port, backlog=4096)
        return self._server.sockets[0].getsockname()[1]

    def _stop(self) -> None:
        """As if the process had died: nobody listens, all connections break."""
        self.dead = True
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def end(self) -> None:
        self._stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self._tasks.add(asyncio.current_task())
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split("\r\n")[0].split(" ")
                lengths = [line.split(":")[1] for line in head.lower().split("\r\n") if line.startswith("content-len")]
                content = await reader.readexactly(int(lengths[0])) if lengths else b""
                await self._request(method, path, json.loads(content) if content else {}, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            self._tasks.discard(asyncio.current_task())
            writer.close()

    async def _request(self, method: str, path: str, body: dict, writer: asyncio.StreamWriter) -> None:
        number = self._numbers[path] = self._numbers.get(path, 0) + 1
        self.calls.append((path, body))
        fault = self.fault(path, body, number - 1)
        if fault in ("503", "400"):
            await _reply(writer, int(fault), {"error": {"message": f"told to answer {fault}"}})
        elif fault == "hang":
            await asyncio.sleep(3600)
        elif fault == "die":
            self.exit()
            raise ConnectionError
        elif fault == "drop":
            raise ConnectionError
        else:
            status, answer = await self._answer(method, path, body)
            if path == "/generate" and status == 200:
                answer = _spoilt(answer, fault)
            await _reply(writer, status, answer, half=fault == "half")

    # ------------------------------------------------------------ endpoints
    async def _answer(self, method: str, path: str, body: dict) -> tuple[int, Any]:
        handler = getattr(self, f"_{method.lower()}_{path[1:]}", None)
        if handler is None:
            return 404, {"detail": "Not Found"}
        out = handler(body)
        return await out if asyncio.iscoroutine(out) else out

    def _get_model_info(self, body: dict) -> tuple[int, Any]:
        return 200, {"model_path": "stub", "weight_version": self.weight_version}

    def _get_server_info(self, body: dict) -> tuple[int, Any]:
        return 200, {"version": self.server_version, "tp_size": self.tp}

    def _get_health_generate(self, body: dict) -> tuple[int, Any]:
        return (200 if self.healthy and not self.paused else 503), ""

    def _post_flush_cache(self, body: dict) -> tuple[int, Any]:
        self.stale = False
        return 200, "Cache flushed.\n"

    def _post_abort_request(self, body: dict) -> tuple[int, Any]:
        return 200, ""

    def _post_pause_generation(self, body: dict) -> tuple[int, Any]:
        if body.get("mode") not in ("abort", "retract", "in_place"):
            return 400, {"error": "mode"}
        self.paused = True
        return 200, {"status": "ok"}

    def _post_continue_generation(self, body: dict) -> tuple[int, Any]:
        self.paused = False
        return 200, {"status": "ok"}

    def _post_begin_weight_update(self, body: dict) -> tuple[int, Any]:
        if self.session:
            return _refuse("a session is open")
        self.session, self.bucket = True, []
        return 200, {"success": True, "message": "ok"}

    def _post_end_weight_update(self, body: dict) -> tuple[int, Any]:
        if not self.session:
            return _refuse("no session is open")
        self.session = False
        if self.bucket:
            self.model.load_tensors(self.bucket)
        self.bucket = []
        return 200, {"success": True, "message": "ok"}

    def _post_update_weights_from_tensor(self, body: dict) -> tuple[int, Any]:
        payloads = body["serialized_named_tensors"]
        if not self.session:
            return _refuse("update_weights_from_tensor outside of a session")
        if len(payloads) != self.tp:
            return _refuse(f"{len(payloads)} payloads for tp {self.tp}")
        # The test's own data, from a server that it has started itself.
        self.bucket += pickle.loads(base64.b64decode(payloads[0]))
        return self._updated(body)

    def _post_update_weights_from_disk(self, body: dict) -> tuple[int, Any]:
        try:
            self.model.load_folder(body["model_path"])
        except Exception as error:
            return _refuse(str(error))
        return self._updated(body)

    async def _post_init_weights_update_group(self, body: dict) -> tuple[int, Any]:
        self.group = await asyncio.to_thread(_join_group, body)
        return 200, {"success": True, "message": "ok"}

    def _post_destroy_weights_update_group(self, body: dict) -> tuple[int, Any]:
        self.group = None
        return 200, {"success": True, "message": "ok"}

    async def _post_update_weights_from_distributed(self, body: dict) -> tuple[int, Any]:
        import torch

        if not self.session or self.group is None or body["load_format"] != "flattened_bucket":
            return _refuse("update_weights_from_distributed outside of a session or without a group")
        dtypes = [getattr(torch, name) for name in body["dtypes"]]
        parts = list(zip(body["names"], dtypes, body["shapes"], strict=True))
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in parts]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        await asyncio.to_thread(lambda: self.group.broadcast([flat]).wait())
        pieces = zip(parts, flat.split(sizes), strict=True)
        self.bucket += [(name, piece.view(dtype).reshape(shape)) for (name, dtype, shape), piece in pieces]
        return self._updated(body)

    def _updated(self, body: dict) -> tuple[int, Any]:
        self.stale = not body.get("flush_cache", True)
        if body.get("weight_version") is not None:
            self.weight_version = body["weight_version"]
        return 200, {"success": True, "message": "Succeeded."}

    async def _post_generate(self, body: dict) -> tuple[int, Any]:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await asyncio.sleep(self.delay)
            while self.paused or self.session:
                await asyncio.sleep(0.01)
            ids, logprobs, reason = self.model.generate(body["input_ids"], body["sampling_params"])
            if self.stale:
                logprobs = [x - 1 for x in logprobs]
        finally:
            self.running -= 1
        finish = {"type": reason} | ({"matched": ids[-1]} if reason == "stop" else {"length": len(ids)})
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": self.weight_version,
            "output_token_logprobs": [[x, token, None] for x, token in zip(logprobs, ids, strict=True)],
        }
        return 200, {"text": "", "output_ids": ids, "meta_info": meta}


def _join_group(body: dict) -> Any:
    """Rank 1 of the group; in a process of its own only, for torch knows one group of a name in each."""
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper

    name, world, limit = body["group_name"], body["world_size"], timedelta(seconds=60)
    assert world == 2 and body["rank_offset"] == 1
    store = PrefixStore(name, dist.TCPStore(body["master_address"], body["master_port"], world, False, limit))
    group, _ = _new_process_group_helper(
        world, 1, [], Backend(body["backend"]), store, group_name=name, backend_options=None, timeout=limit
    )
    return group


def _refuse(message: str) -> tuple[int, Any]:
    return 400, {"success": False, "message": message}


def _spoilt(answer: dict, fault: str | None) -> Any:
    meta = answer["meta_info"]
    if fault == "counts":
        meta["output_token_logprobs"].pop()
    elif fault == "other":
        meta["id"] = "somebody-else"
    elif fault == "twice":
        return [answer, answer]
    elif fault == "version":
        meta["weight_version"] = "stale"
    elif fault == "abort":
        meta["finish_reason"] = {"type": "abort", "message": "out of memory"}
    elif fault == "short":
        meta["finish_reason"] = {"type": "length", "length": 1}
        answer["output_ids"] = answer["output_ids"][:1]
        meta["output_token_logprobs"] = meta["output_token_logprobs"][:1]
        meta["completion_tokens"] = 1
    return answer


async def _reply(writer: asyncio.StreamWriter, status: int, answer: Any, *, half: bool = False) -> None:
    content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
    lines = (
        f"HTTP/1.1 {status} {REASONS[status]}",
        "content-type: application/json",
        f"content-length: {len(content)}",
    )
    writer.write("\r\n".join((*lines, "", "")).encode() + (content[: len(content) // 2] if half else content))
    await writer.drain()
    if half:
        raise ConnectionError


@contextlib.contextmanager
def serving(*stubs: Stub) -> Iterator[list[str]]:
    """The stubs on an event loop in a thread of their own; their URLs."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def on_loop(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)

    try:
        yield [f"http://127.0.0.1:{on_loop(stub.start())}" for stub in stubs]
    finally:
        for stub in stubs:
            on_loop(stub.end())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _main(options: argparse.Namespace) -> None:
    model = RealModel(options.model_path, options.dtype) if options.model_path else PseudoModel(32000, 1 << 40)
    stub = Stub(model, tp=options.tp_size)
    stub.delay = options.delay
    stub.exit = lambda: os._exit(9)
    if options.die_once:
        marker, _, count = options.die_once.rpartition(":")

        def fault(path: str, body: dict, number: int) -> str | None:
            if path != "/generate" or number < int(count) or Path(marker).exists():
                return None
            Path(marker).touch()
            return "die"

        stub.fault = fault
    await stub.start(options.host, options.port)
    print("stub is ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("--model-path", "--tokenizer-path", "--host", "--dtype", "--die-once", "--device"):
        parser.add_argument(name)
    parser.add_argument("--port", type=int)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--delay", type=float, default=0.0)
    for name in ("--sleep-on-idle", "--skip-server-warmup", "--enable-deterministic-inference"):
        parser.add_argument(name, action="store_true")
    asyncio.run(_main(parser.parse_args()))
