"""The Triton kernels on the CPU, through Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import run_ranks

from megappo.parallel import vocab, vocab_triton

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (CUDA builds of torch bring it; pip install triton to test its kernels on the CPU)",
)
CASES = Path(__file__).parent.parent / "gpu" / "kernel_cases.py"


@needs_triton
def test_kernels_in_the_interpreter():
    """In a process of its own, because Triton decides at import whether to interpret."""
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(CASES)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, cwd=CASES.parents[2])
    assert result.returncode == 0 and "passed" in result.stdout, result.stdout[-4000:] + result.stderr[-2000:]


@needs_triton
def test_kernels_compile_for_a_gpu(monkeypatch, tmp_path):
    """The interpreter accepts more than the compiler, which needs no GPU either."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megappo.parallel import vocab_kernels

    pointers = {"target_ptr": "*i64", "out_ptr": "*fp32", "log_normaliser_ptr": "*fp32", "entropy_ptr": "*fp32"}
    pointers |= {"g_ptr": "*fp32", "g_h_ptr": "*fp32", "ENTROPY": "constexpr", "BLOCK": "constexpr"}
    for kernel, out in ((vocab_kernels.row_stats_kernel, "*fp32"), (vocab_kernels.logit_gradient_kernel, "*bf16")):
        for z in ("*fp32", "*bf16"):
            types = pointers | {"z_ptr": z, "out_ptr": out}
            signature = {name: types.get(name, "i32") for name in kernel.arg_names}
            source = ASTSource(kernel, signature, {"ENTROPY": True, "BLOCK": vocab_triton.STATS_BLOCK})
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
            assert compiled.asm["cubin"]


def heads_on_two_ranks(choices: list[tuple[bool, bool]]) -> list:
    """For each choice of who uses the kernels: loss, log-probs, entropy and gradients of one head on two ranks."""
    results = []
    for choice in choices:
        vocab.USE_TRITON = choice[dist.get_rank()]
        assert vocab_triton.usable(torch.device("cpu"))
        results.append(head_on_two_ranks())
    return results


def head_on_two_ranks() -> list:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 8, generator=g), torch.randn(40, 8, generator=g)
    targets = torch.randint(33, (9,), generator=g)
    rows = weight[dist.get_rank() * 20 :][:20].clone().requires_grad_()
    hidden.requires_grad_()
    out = vocab.fused_token_loss(
        hidden,
        rows,
        targets,
        lambda logprobs, entropy, i, j: (logprobs * torch.arange(i, j)).sum() + (entropy**2).sum(),
        vocab_size=33,
        want_entropy=True,
        group=dist.group.WORLD,
        chunk_size=4,
    )
    d_hidden, d_weight = torch.autograd.grad(out[0], (hidden, rows))
    dist.all_reduce(d_hidden)
    shards = [torch.empty_like(d_weight) for _ in range(2)]
    dist.all_gather(shards, d_weight)
    return [x.detach().tolist() for x in (*out, d_hidden, torch.cat(shards))]


@needs_triton
def test_tensor_parallel_ranks_may_differ_in_their_arithmetic(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # of the ranks, which are new processes
    want, *others = run_ranks(2, heads_on_two_ranks, [(False, False), (True, True), (True, False)])
    for got in others:
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(torch.tensor(x), torch.tensor(y), atol=1e-5, rtol=1e-5)


def test_cpu_tensors_stay_with_torch(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not vocab_triton.usable(torch.device("cpu"))


def test_without_triton_torch_does_the_work(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(vocab_triton, "_kernels", lambda: None)
    assert not vocab_triton.usable(torch.device("cpu"))
    assert not vocab_triton.usable(torch.device("cuda"))


def test_kernels_that_cannot_be_compiled_are_reported_once_and_left_out(monkeypatch):
    def no_compiler(*args, **kwargs):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(vocab_triton, "_kernels", lambda: object())
    monkeypatch.setattr(vocab_triton, "row_stats", no_compiler)
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: torch.ones(1))
    vocab_triton._works.cache_clear()
    with pytest.warns(UserWarning, match="Triton cannot run here.*C compiler. Please"):
        assert not vocab_triton.usable(torch.device("cuda", 0))
    assert not vocab_triton.usable(torch.device("cuda", 0))
    vocab_triton._works.cache_clear()
