"""What the SGLang client costs: 2,000 requests at a time on 4 stub servers that only wait.

The stub answers each request after a fixed time, so everything beyond it is overhead: the client's, and the stub's own
(a Python server, one process each; all of them share the machine's cores with the client). Run: python
benchmarks/bench_sglang_client.py
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from megappo.config.schema.rollout import SGLangConfig  # noqa: E402
from megappo.rollout.base import GenerateRequest, SamplingParams  # noqa: E402
from megappo.rollout.sglang import client  # noqa: E402
from megappo.rollout.sglang.engine import SGLangEngine  # noqa: E402
from megappo.rollout.sglang.servers import Pool  # noqa: E402
from megappo.rollout.sglang.weights import TensorWay  # noqa: E402

SERVERS, REQUESTS, GROUP, PROMPT, RESPONSE, DELAY_S = 4, 2000, 8, 200, 128, 5.0


def main() -> None:
    settings = SGLangConfig(num_servers=SERVERS, max_concurrency=REQUESTS)

    def command(port: int, index: int) -> list[str]:
        return [sys.executable, str(ROOT / "tests/sglang_stub.py"), "--port", str(port), "--delay", str(DELAY_S)]

    logs = Path(tempfile.mkdtemp())
    weights = [("w", torch.zeros(4))]
    engine = SGLangEngine(settings, Pool(settings, [], logs, command), TensorWay(1000), lambda: weights, 32000)
    latencies: list[float] = []
    plain = client.Round._attempt

    async def timed(self, server, item) -> None:
        started = time.perf_counter()
        await plain(self, server, item)
        latencies.append(time.perf_counter() - started)

    client.Round._attempt = timed
    asked = [GenerateRequest(i, i // GROUP, [5 + i % 9] * PROMPT, i) for i in range(REQUESTS)]
    try:
        engine.update_weights(weights, 0)
        engine.generate(asked[:8], SamplingParams(2))
        latencies.clear()
        cpu, started = time.process_time(), time.perf_counter()
        samples = engine.generate(asked, SamplingParams(RESPONSE))
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    finally:
        engine.close()
    assert [s.sample_id for s in samples] == list(range(REQUESTS))
    added = sorted(latency - DELAY_S for latency in latencies)
    print(f"{os.cpu_count()} cores, {SERVERS} servers, {REQUESTS} requests at a time, {RESPONSE} tokens each")
    beyond = wall - DELAY_S
    print(f"wall {wall:.2f} s, {DELAY_S:g} s of them the servers wait: {REQUESTS / beyond:.0f} requests/s beyond")
    print(f"client CPU {cpu / REQUESTS * 1e3:.2f} ms a request")
    print(f"added latency: median {added[REQUESTS // 2]:.2f} s, p99 {added[REQUESTS * 99 // 100]:.2f} s")


if __name__ == "__main__":
    main()
