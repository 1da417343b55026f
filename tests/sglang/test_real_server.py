"""The real SGLang server on the CPU: log-probs are the model's, before and after each way of sending weights.

`make sglang-env` builds the servers' environment, `make test-sglang` runs this. A server takes a minute to start, so
each test asks one for much.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ppo_case import config_of, read_metrics, write_case
from support import make_hf_model
from warm_ranks import on_ranks

from megappo.config.schema.rollout import SGLangConfig
from megappo.data.prepare.tiny_model import build_tokenizer
from megappo.models.spec import load_spec
from megappo.rollout.base import GenerateRequest, SamplingParams
from megappo.rollout.sglang.build import cpu_starter
from megappo.rollout.sglang.engine import SGLangEngine
from megappo.rollout.sglang.group import GroupWay
from megappo.rollout.sglang.servers import Pool
from megappo.rollout.sglang.shards import ShardWay
from megappo.rollout.sglang.weights import DiskWay, TensorWay
from megappo.trainer.ppo import run_ppo

pytestmark = pytest.mark.sglang
PYTHON = Path(__file__).parents[2] / ".venv-sglang/bin/python"
LAUNCH = [str(PYTHON), "-P", str(cpu_starter())]
CPU = ["--device", "cpu", "--sleep-on-idle", "--skip-server-warmup", "--max-total-tokens", "8192"]
EOS = (1, 2)  # the tokenizer's, the model's


@pytest.fixture(scope="module", autouse=True)
def environment():
    assert PYTHON.exists(), "no .venv-sglang: run make sglang-env first"


def model_folder(folder: Path, family: str, seed: int):
    # On a CPU SGLang pads a narrower MLP for tp 2, which `shards` does not know.
    model = make_hf_model(folder, family, seed, intermediate_size=128)
    build_tokenizer(["one two three"]).save_pretrained(folder)
    return model


def named(model):
    tied = model.config.tie_word_embeddings
    return [(n, p) for n, p in model.state_dict().items() if not (tied and n == "lm_head.weight")]


def requests(groups=3, n=4):
    return [GenerateRequest(g * n + k, g, [5 + g, 30, 70, 9 + g], g * n + k) for g in range(groups) for k in range(n)]


@torch.no_grad()
def furthest(model, samples, temperature=1.0) -> float:
    """Largest difference between a sample's log-probs and the model's own."""
    worst = 0.0
    for sample in samples:
        ids = sample.prompt_ids + sample.response_ids
        logits = model(torch.tensor([ids])).logits[0, len(sample.prompt_ids) - 1 : -1].float() / temperature
        own = logits.log_softmax(-1).gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        worst = max(worst, (own - torch.tensor(sample.logprobs)).abs().max().item())
    return worst


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("family", "tp"), [("qwen2_tied", 1), ("qwen2", 2)])
def test_log_probs_are_the_model_s_after_every_way_of_sending_weights(tmp_path, family, tp):
    old, new = (model_folder(tmp_path / name, family, seed) for seed, name in enumerate(("old", "new")))
    before = set(os.listdir("/dev/shm"))
    settings = SGLangConfig(start_timeout_s=600, health_timeout_s=120, health_interval_s=20)

    def command(port, index):
        words = ["--model-path", str(tmp_path / "old"), "--port", str(port), "--tp-size", str(tp)]
        return [*LAUNCH, *words, "--dtype", "float32", *CPU]

    pool = Pool(settings, [], tmp_path / "logs", command)
    tensors = TensorWay(100_000)  # several buckets
    shapes = {name: tuple(tensor.shape) for name, tensor in named(old)}
    disk = DiskWay(tmp_path / "sync", shapes, tmp_path / "old", torch.float32)
    group = GroupWay(100_000, 120.0, torch.device("cpu"))
    shards = ShardWay(load_spec(tmp_path / "old"), 60_000)
    current = [old]
    engine = SGLangEngine(settings, pool, tensors, lambda: named(current[0]), 131)
    sampling = SamplingParams(max_new_tokens=12, stop_token_ids=(*EOS, 40, 41, 42, 43))
    asked = requests()
    updates = [(old, tensors), (new, tensors), (old, disk), (new, group), (old, group)]
    updates += [(new, shards), (old, shards), (new, disk)]
    try:
        for version, (model, way) in enumerate(updates):
            engine.way, current[0] = way, model
            report = engine.update_weights(named(model), version)
            assert report.version == version and report.bytes > 0, (way, [s.reason for s in pool.servers])
            samples = engine.generate(asked, sampling)
            other = new if model is old else old
            assert furthest(model, samples) < 1e-3 < 0.1 < furthest(other, samples)
            assert {sample.weight_version for sample in samples} == {version}
            assert [sample.sample_id for sample in samples] == [request.sample_id for request in asked]
        assert len({tuple(sample.response_ids) for sample in samples}) > 6  # a group's samples differ
        for sample in samples:
            stopped = sample.response_ids[-1] in sampling.stop_token_ids
            assert sample.finish_reason == ("stop" if stopped else "length")
            assert stopped or len(sample.response_ids) == 12
        cool = engine.generate(asked, SamplingParams(max_new_tokens=6, temperature=0.6, stop_token_ids=EOS))
        assert furthest(new, cool, 0.6) < 1e-3
        greedy = engine.generate(asked[:2], SamplingParams(max_new_tokens=6, temperature=0, stop_token_ids=EOS))
        assert furthest(new, greedy) < 1e-3
        assert greedy[0].response_ids == greedy[1].response_ids
        if tp == 1:
            engine.way = group
            check_a_restart(engine, pool, asked, sampling, new)
    finally:
        engine.close()
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("sglang_loads_")]


def check_a_restart(engine, pool, asked, sampling, model):
    """Killed between two iterations, it comes back with its starting weights, gets the current ones, and serves."""
    os.killpg(pool.servers[0].process._process.pid, signal.SIGKILL)
    pool.servers[0].process._process.wait()
    samples = engine.generate(asked, sampling)
    assert furthest(model, samples) < 1e-3
    assert engine.metrics()["rollout/sglang/restarts"] == 1


def train(yaml_file: Path, changes: dict) -> None:
    run_ppo(config_of(yaml_file, dist.get_world_size(), **changes))


@pytest.mark.timeout(1500)
def test_a_ppo_run_sees_the_same_log_probs_as_its_actor(tmp_path):
    case = write_case(tmp_path, layers=2)
    changes = {
        "rollout__engine": "sglang",
        "rollout__sglang__launch": LAUNCH,
        "rollout__sglang__extra_args": CPU[-2:],
        "actor__optim__lr": 1e-2,
        "trainer__output_dir": str(tmp_path / "out"),
    }
    on_ranks(1, train, case, changes, timeout=900)
    lines = read_metrics(tmp_path / "out")
    assert len(lines) == 3
    for line in lines:
        assert line["rollout_corr/logprob_abs_diff_mean"] < 1e-4 and line["rollout_corr/ess"] > 0.9999
        assert line["rollout/sglang/servers"] == 1 and line["rollout/sglang/dead_servers"] == 0
    assert lines[0]["actor/grad_norm"] > 0
