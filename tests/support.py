"""What the tests share: tiny models of each family, and groups of spawned gloo ranks."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

FAMILIES = ("llama", "mistral", "qwen2", "qwen2_tied", "qwen3")


def tiny_hf_config(family: str, **changes):
    """A transformers configuration of about 0.1 M parameters."""
    import transformers as tf

    kinds = {
        "llama": (tf.LlamaConfig, {}),
        "llama3_rope": (
            tf.LlamaConfig,
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
        ),
        "mistral": (tf.MistralConfig, {"sliding_window": None}),
        "qwen2": (tf.Qwen2Config, {}),
        "qwen2_tied": (tf.Qwen2Config, {"tie_word_embeddings": True}),
        "qwen3": (tf.Qwen3Config, {"head_dim": 24}),
        "mixtral": (tf.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
        "qwen3_moe": (
            tf.Qwen3MoeConfig,
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 48,
                "head_dim": 24,
                "norm_topk_prob": True,
            },
        ),
    }
    cls, extra = kinds[family]
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 131,  # odd: padded at TP 2
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.08,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return cls(**{**sizes, **extra, **changes})


def make_hf_model(folder: Path, family: str, seed: int = 0, max_shard_size: str = "5GB", **changes):
    """Create a tiny model with random biases and norms (so that a mapping error shows), save and return it."""
    import transformers as tf

    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(tiny_hf_config(family, **changes), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.normal_(0, 0.1)
            if "norm" in name:
                param.add_(torch.randn_like(param) * 0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def rank_context() -> mp.context.BaseContext:
    """How to start ranks. Without a GPU they are forked from a process that has imported everything already, which
    saves each of them several seconds of processor time; a CUDA context would not survive a fork."""
    if os.path.exists("/dev/nvidiactl"):
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["rank_preload"])
    # Python 3.11 gives that process no sys.path and says nothing of a module that it cannot find.
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    with patch.dict(os.environ, PYTHONPATH=paths):
        forkserver.ensure_running()
    return context


def join_group(rank: int, world: int, meeting: str) -> None:
    """Make this process rank `rank` of `world` gloo ranks that meet in a file: no port, no collision."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    from megappo.parallel import backend

    backend.install()
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timeout)


def meeting_file() -> str:
    """A name for `join_group`; the file itself must not exist yet."""
    return os.path.join(tempfile.mkdtemp(prefix="ranks-"), "meeting")


def _rank_main(rank: int, world: int, meeting: str, results, fn, args) -> None:
    try:
        join_group(rank, world, meeting)
        results.put((rank, None, fn(*args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
        raise


def run_ranks(world: int, fn, *args, timeout: float = 280):
    """Run `fn(*args)` on `world` spawned gloo ranks; returns rank 0's result. Any failure fails the test.

    Only processes started here are ended, and always within `timeout` seconds.
    """
    context = rank_context()
    results = context.SimpleQueue()
    meeting = meeting_file()
    ranks = [
        context.Process(target=_rank_main, args=(rank, world, meeting, results, fn, args), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + timeout
    answers: dict[int, object] = {}
    error = None
    try:
        while len(answers) < world and error is None:
            if not results.empty():
                rank, failure, value = results.get()
                answers[rank] = value
                error = failure and f"rank {rank} failed:\n{failure}"
            elif time.monotonic() > deadline:
                error = f"ranks still running after {timeout} s"
            elif any(p.exitcode not in (None, 0) for p in ranks) and results.empty():
                error = f"a rank died: exit codes {[p.exitcode for p in ranks]}"
            else:
                ranks[0].join(0.05)
        for process in ranks if error is None else ():
            process.join(30)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
    assert error is None, error
    return answers[0]
