"""One rank, its GPU if it has one: the engine against transformers in fp32 and bf16, rollout, checkpoints, a PPO run.

Every test also runs on the CPU, where it says nothing about CUDA but keeps the code of the tests alive.
"""

import functools
import math

import bodies
import numpy as np
import pytest
import torch
from parallel.test_engine_layouts import LR, aggregation, reference
from ppo_case import write_case
from support import make_hf_model
from warm_ranks import on_ranks

FP32, BF16 = torch.float32, torch.bfloat16
LONG = [200, 31, 7, 150, 64]  # far positions, where a rounded rotary frequency would show
dtypes = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
run = functools.partial(on_ranks, 1, timeout=280)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for family in ("qwen2_tied", "qwen3", "qwen3_moe"):
        make_hf_model(root / family, family)
    return root


@dtypes
@pytest.mark.parametrize("family", ["qwen2_tied", "qwen3", "qwen3_moe"])
def test_forward_is_as_exact_as_transformers(device, folders, family, dtype):
    errors = run(bodies.forward_errors, folders / family, dtype, LONG)
    if dtype == FP32:
        assert max(errors["packed, largest"], errors["one by one, largest"]) < 2e-4, errors
    else:
        assert max(errors["packed, mean"], errors["one by one, mean"]) < 1.5 * errors["theirs"] + 1e-3, errors


@pytest.fixture(scope="module")
def references(folders):
    return functools.cache(lambda family, kind: reference(folders / family, kind, aggregation(kind)))


CASES = [
    ("qwen2_tied", "actor", {}),
    ("qwen3", "gspo", {"distributed_optimizer": False}),
    ("qwen3", "actor", {"recompute": "full"}),
    ("qwen3", "critic", {"offload": "all"}),
    ("qwen3_moe", "actor", {}),
]


@pytest.mark.parametrize(("family", "kind", "options"), CASES)
def test_train_steps_equal_transformers(device, folders, references, family, kind, options):
    got, want = run(bodies.train, folders / family, kind, FP32, options), references(family, kind)
    for a, b in zip(got["steps"], want["steps"], strict=True):
        for key, value in b.items():
            assert a[key] == pytest.approx(value, rel=2e-4, abs=2e-6), key
    assert got["weights"].keys() == want["weights"].keys()
    for name, weight in want["weights"].items():
        # Adam divides by the root of tiny second moments: a few elements may take another step altogether.
        off = np.abs(got["weights"][name] - weight)
        assert (off > 0.1 * LR).mean() < 2e-3 and off.max() < 5 * LR, name


@pytest.mark.parametrize(("family", "kind", "options"), CASES)
def test_bf16_train_steps_are_close(device, folders, references, family, kind, options):
    got, want = run(bodies.train, folders / family, kind, BF16, options), references(family, kind)
    for a, b in zip(got["steps"], want["steps"], strict=True):
        for key, value in b.items():
            assert a[key] == pytest.approx(value, rel=0.1, abs=0.03), key
    for name, weight in want["weights"].items():
        off = np.abs(got["weights"][name] - weight)
        assert (off > 4 * LR + 2**-8 * np.abs(weight)).mean() < 0.01, name


@dtypes
@pytest.mark.parametrize("distributed", [True, False])
def test_checkpoint_continues_bit_by_bit(device, folders, tmp_path, dtype, distributed):
    out = tmp_path / "checkpoint"
    differing = run(bodies.continue_from_checkpoint, folders / "qwen2_tied", out, dtype, distributed)
    assert differing == []


@dtypes
def test_rollout_and_training_agree_on_logprobs(device, folders, dtype):
    gap = run(bodies.rollout_and_training, folders / "qwen3", dtype)
    assert gap["tokens"] > 40 and gap["bytes"] > 0
    assert gap["mean"] < (1e-5 if dtype == FP32 else 0.05) and gap["largest"] < (1e-3 if dtype == FP32 else 0.5), gap
    if dtype == FP32:
        assert gap["reproduced"] == 1.0


@dtypes
@pytest.mark.parametrize("use_triton", [False, True], ids=["torch", "triton"])
def test_memory_of_the_fused_head_is_a_chunk_and_not_the_logits(device, dtype, use_triton):
    on_gpu = device == "cuda"
    tokens, vocabulary, hidden = (8192, 32768, 256) if on_gpu else (300, 500, 16)
    chunk = 64 << 20 if on_gpu else 1 << 17
    run(bodies.head_memory, 64, vocabulary, hidden, dtype, chunk, use_triton)  # compile, load cuBLAS
    result = run(bodies.head_memory, tokens, vocabulary, hidden, dtype, chunk, use_triton)
    assert result["finite"]
    if on_gpu:
        assert result["kernels"] == use_triton, "Triton cannot run on this GPU machine" if use_triton else ""
        copies = 1 if use_triton else 3  # torch also keeps exp of the block, and a mask
        low = 0.5 if dtype == BF16 else 0
        assert result["extra"] < (copies + low) * chunk + (16 << 20), result
        assert result["extra"] < tokens * vocabulary * 4 / 3


def test_packed_attention_equals_one_sequence_at_a_time(device):
    assert run(bodies.attention_padding, [5, 33, 1, 30, 64, 5]) < 1e-4


def test_an_idle_role_leaves_the_device(device, folders):
    bytes_ = run(bodies.offload, folders / "qwen3")
    assert bytes_["freed"] > 0
    if device == "cuda":
        assert bytes_["asleep"] <= bytes_["before"] - 0.9 * bytes_["freed"], bytes_
        assert bytes_["awake"] >= bytes_["before"] - (1 << 20), bytes_


def test_draws_use_the_same_numbers_on_every_device(device):
    there = run(bodies.sampling_keys)
    here = torch.device("cpu")
    from megappo.rollout.sampling import _token_hashes, race_times, row_keys, seeds_tensor

    keys = row_keys(seeds_tensor([0, 1, -5, 1 << 63, 12345678901234567890])[:, None], torch.arange(4)).reshape(-1)
    assert there["keys"] == keys.tolist() and there["tokens"] == _token_hashes(1000, here).tolist()
    torch.testing.assert_close(torch.tensor(there["race"]), race_times(keys, 1000))


def test_host_and_device_tensors_go_through_the_same_groups(device):
    assert run(bodies.collectives) == {"moments": [1.0, 2.0], "x": 1.0, "y": 2.0}


@pytest.mark.parametrize("model_dtype", ["fp32", "bf16"])
def test_ppo_runs_saves_and_continues(device, tmp_path, model_dtype):
    yaml_file = write_case(tmp_path / "case", layers=2)
    changes = {"model__dtype": model_dtype, "actor__use_dynamic_bsz": True, "actor__ppo_max_token_len_per_gpu": 64}
    lines = run(bodies.ppo, yaml_file, "out", changes)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert all(math.isfinite(value) for value in line.values()), line
        assert line["actor/skipped_steps"] == line["critic/skipped_steps"] == 0
        assert line["actor/grad_norm"] > 0 and line["critic/grad_norm"] > 0
