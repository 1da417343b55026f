"""Triton kernels against float64 formulas and the torch version.

Not collected by itself: `test_gpu_kernels.py` runs these on a GPU, `../parallel/test_vocab_triton.py` on the CPU
through Triton's interpreter (TRITON_INTERPRET=1), in a process of its own.
"""

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (CUDA builds of torch bring it)")
from megappo.parallel import vocab, vocab_triton

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
VOCABS = [1, 5, 16, 45]  # less than a block, ragged, a whole one, several
both = pytest.mark.parametrize("want_entropy", [False, True])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(vocab_triton, "STATS_BLOCK", 16)
    monkeypatch.setattr(vocab_triton, "GRADIENT_BLOCK", 16)


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def targets_of(rows: int, columns: int) -> torch.Tensor:
    """A column for each row; every third target is on another rank."""
    target = torch.randint(columns, (rows,), generator=torch.Generator().manual_seed(9))
    target[::3] = -1
    return target.to(DEVICE)


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance, equal_nan=True)


def formulas(z, target):
    """m, S, z of the target and U in float64."""
    z = z.double()
    m = z.amax(-1)
    centred = z - m[:, None]
    at_target = torch.where(target >= 0, z.gather(1, target.clamp(min=0)[:, None]).squeeze(1), 0.0)
    return torch.stack([m, centred.exp().sum(-1), at_target, (centred.exp() * centred).sum(-1)])


@both
@pytest.mark.parametrize("columns", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics(columns, dtype, want_entropy):
    z, target = rand(7, columns, dtype=dtype) * 5, targets_of(7, columns)
    expected = formulas(z, target)
    stats = vocab_triton.row_stats(z, target, want_entropy=want_entropy)
    assert stats.dtype == torch.float32
    close(stats[: 4 if want_entropy else 3], expected[: 4 if want_entropy else 3])


def test_statistics_of_logits_that_overflow_and_of_a_first_block_of_minus_infinity():
    z = rand(3, 40) * 1e4
    z[1, :20] = -torch.inf
    target = targets_of(3, 40)
    stats = vocab_triton.row_stats(z, target, want_entropy=False)
    close(stats[:2], formulas(z, target)[:2])


def test_a_row_with_nan_is_nan_and_leaves_the_others_alone():
    z, target = rand(5, 40), targets_of(5, 40)
    expected = formulas(z, target)
    z[2, 17] = torch.nan
    stats = vocab_triton.row_stats(z, target, want_entropy=True)
    assert stats[1, 2].isnan() and stats[3, 2].isnan()
    others = [0, 1, 3, 4]
    close(stats[:, others], expected[:, others])


def test_statistics_of_ranks_add_up_to_those_of_the_whole():
    """Three ranks: ordinary columns, columns far below the maximum, nothing but padding."""
    z = rand(6, 30)
    z[:, 20:] -= 1e4
    target = targets_of(6, 30)
    expected = formulas(z, target)
    parts = []
    for start, stop in ((0, 20), (20, 30), (30, 30)):
        local = torch.where((target >= start) & (target < stop), target - start, -1)
        parts.append(vocab_triton.row_stats(z[:, start:stop].contiguous(), local, want_entropy=True))
    m = torch.stack([part[0] for part in parts]).amax(0)
    close(m, expected[0])
    close(sum(vocab_triton.rebase(part, m) for part in parts), expected[1:])


def expected_gradient(z, target, g, g_h):
    z = z.detach().double().requires_grad_()
    logprobs = z.log_softmax(-1)
    picked = torch.where(target >= 0, logprobs.gather(1, target.clamp(min=0)[:, None]).squeeze(1), 0.0)
    missing = torch.where(target < 0, z.logsumexp(-1), 0.0)  # of a target elsewhere: only the normaliser is ours
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    loss = (g.double() * (picked - missing)).sum() + (0 if g_h is None else (g_h.double() * entropy).sum())
    return z.logsumexp(-1).detach().float(), entropy.detach().float(), torch.autograd.grad(loss, z)[0]


@both
@pytest.mark.parametrize("columns", VOCABS)
@pytest.mark.parametrize(("out", "tolerance"), [("in place", 1e-5), (torch.bfloat16, 2**-8)])
def test_gradient(columns, out, tolerance, want_entropy):
    z, target, g = rand(7, columns) * 3, targets_of(7, columns), rand(7, seed=1)
    g_h = rand(7, seed=2) if want_entropy else None
    normaliser, entropy, expected = expected_gradient(z, target, g, g_h)
    buffer = z if out == "in place" else torch.empty_like(z, dtype=out)
    result = vocab_triton.logit_gradient_(z, target, normaliser, entropy, g, g_h, buffer)
    assert result is buffer
    close(result, expected, tolerance)


def test_gradient_of_bf16_logits():
    z, target, g = rand(7, 45, dtype=torch.bfloat16), targets_of(7, 45), rand(7, seed=1)
    normaliser, entropy, expected = expected_gradient(z, target, g, g)
    close(vocab_triton.logit_gradient_(z, target, normaliser, entropy, g, g, torch.empty_like(z)), expected, 2**-8)


@both
def test_rows_without_gradient_become_zero_even_as_nan(want_entropy):
    z, target, g = rand(4, 45), targets_of(4, 45), rand(4, seed=1)
    g_h = rand(4, seed=2) if want_entropy else None
    for x in (g, g_h) if want_entropy else (g,):
        x[1:3] = 0
    normaliser, entropy, expected = expected_gradient(z, target, g, g_h)
    z[1] = normaliser[1] = entropy[1] = torch.nan
    close(vocab_triton.logit_gradient_(z, target, normaliser, entropy, g, g_h, z), expected)
    assert (z[1:3] == 0).all()


def test_no_rows():
    z, target = rand(0, 9), targets_of(1, 9)[:0]
    assert vocab_triton.row_stats(z, target, want_entropy=True).shape == (4, 0)
    assert vocab_triton.logit_gradient_(z, target, z[:, 0], z[:, 0], z[:, 0], z[:, 0], z) is z


# --- the whole head ---

T, V, H, PADDED = 23, 45, 16, 50


def run_head(monkeypatch, use_triton, method, want_entropy, dtype=torch.float32, nan_rows=slice(0, 0)):
    """(log-probs, entropy or None, d hidden, d weight); the rows `nan_rows` are NaN and have no part in the loss."""
    monkeypatch.setattr(vocab, "USE_TRITON", use_triton)
    calls = []
    real = vocab_triton.row_stats
    monkeypatch.setattr(vocab_triton, "row_stats", lambda *a, **k: calls.append(1) or real(*a, **k))
    hidden, weight = rand(T, H, seed=3, dtype=dtype).requires_grad_(), rand(PADDED, H, seed=4, dtype=dtype)
    with torch.no_grad():
        hidden[nan_rows] = torch.nan
        weight[V:] = 100.0  # padding
    weight.requires_grad_()
    targets = torch.randint(V, (T,), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    a, b = rand(T, seed=6), rand(T, seed=7)
    keep = torch.ones(T, dtype=torch.bool, device=DEVICE)
    keep[nan_rows] = False

    def token_loss(logprobs, entropy, start, stop):
        kept = keep[start:stop]
        total = (a[start:stop] * torch.where(kept, logprobs, 0.0)).sum()
        return total if entropy is None else total + (b[start:stop] * torch.where(kept, entropy, 0.0)).sum()

    kwargs = {"vocab_size": V, "temperature": 0.7, "want_entropy": want_entropy, "chunk_size": 10}
    if method == "fused":
        loss, logprobs, entropy = vocab.fused_token_loss(hidden, weight, targets, token_loss, **kwargs)
    else:
        logprobs, entropy = vocab.token_logprobs(hidden, weight, targets, **kwargs)
        loss = token_loss(logprobs, entropy, 0, T)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert bool(calls) == use_triton
    return logprobs.detach(), None if entropy is None else entropy.detach(), *grads


@both
@pytest.mark.parametrize("method", ["fused", "recomputed"])
@pytest.mark.parametrize("nan_rows", [slice(0, 0), slice(2, 5), slice(8, 22)])
def test_head_agrees_with_the_torch_version(monkeypatch, method, want_entropy, nan_rows):
    with monkeypatch.context() as m:
        want = run_head(m, False, method, want_entropy, nan_rows=nan_rows)
    got = run_head(monkeypatch, True, method, want_entropy, nan_rows=nan_rows)
    for x, y in zip(got, want, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            close(x, y)
    assert (got[2][nan_rows] == 0).all() and (got[3][V:] == 0).all() and got[3].isfinite().all()


@both
@pytest.mark.parametrize("method", ["fused", "recomputed"])
def test_head_in_bf16_agrees_with_the_torch_version(monkeypatch, method, want_entropy):
    with monkeypatch.context() as m:
        want = run_head(m, False, method, want_entropy, torch.bfloat16)
    got = run_head(monkeypatch, True, method, want_entropy, torch.bfloat16)
    close(got[0], want[0], 1e-4)
    for x, y in zip(got[2:], want[2:], strict=True):
        assert x.dtype == torch.bfloat16
        close(x, y, 2**-6)


def test_entropy_that_is_not_in_the_loss(monkeypatch):
    """Asked for as a metric only: log-probs and gradients are those without it."""
    want = run_head(monkeypatch, True, "fused", False)
    hidden, weight = rand(T, H, seed=3).requires_grad_(), rand(PADDED, H, seed=4)
    targets = torch.randint(V, (T,), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    a = rand(T, seed=6)
    loss, logprobs, entropy = vocab.fused_token_loss(
        hidden,
        weight,
        targets,
        lambda logprobs, entropy, i, j: (a[i:j] * logprobs).sum(),
        vocab_size=V,
        temperature=0.7,
        want_entropy=True,
        chunk_size=10,
    )
    assert entropy.isfinite().all()
    close(logprobs, want[0])
    close(torch.autograd.grad(loss, hidden)[0], want[2])


def test_float64_stays_with_torch(monkeypatch):
    monkeypatch.setattr(vocab_triton, "row_stats", None)
    hidden, weight = rand(3, H, dtype=torch.float64), rand(V, H, dtype=torch.float64)
    logprobs, _ = vocab.token_logprobs(hidden, weight, targets_of(3, V).clamp(min=0), vocab_size=V)
    assert logprobs.dtype == torch.float64
