"""Vocabulary-parallel log-probs, entropy and fused token losses against log_softmax in float64."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megappo.parallel.vocab import fused_token_loss, token_logprobs

T, V, H, PADDED = 37, 45, 8, 50
TEMPERATURE = 0.7
KWARGS = {"vocab_size": V, "temperature": TEMPERATURE}


class Problem:
    """Inputs, weights of a linear loss in log-probs (a) and entropy (b), and expected results in float64."""

    def __init__(self, dtype=torch.float64, scale=1.0) -> None:
        g = torch.Generator().manual_seed(0)
        hidden, weight = (torch.randn(n, H, generator=g, dtype=torch.float64) for n in (T, PADDED))
        self.hidden = (scale * hidden).to(dtype).requires_grad_()
        self.weight = weight.to(dtype).requires_grad_()
        self.targets = torch.randint(V, (T,), generator=g)
        self.a, self.b = torch.randn(2, T, generator=g, dtype=torch.float64)

    def expected(self, entropy=True):
        """(logprobs, entropy, d hidden, d weight)"""
        h, w = (x.detach().double().requires_grad_() for x in (self.hidden, self.weight))
        everything = torch.log_softmax((h @ w.t())[:, :V] / TEMPERATURE, -1)
        logprobs = everything.gather(1, self.targets[:, None]).squeeze(1)
        ent = -(everything.exp() * everything).sum(-1)
        loss = (self.a * logprobs).sum() + ((self.b * ent).sum() if entropy else 0)
        return logprobs.detach(), ent.detach(), *torch.autograd.grad(loss, (h, w))

    def token_loss(self, logprobs, entropy, start, stop):
        total = (self.a[start:stop] * logprobs).sum()
        return total if entropy is None else total + (self.b[start:stop] * entropy).sum()

    def fused(self, want_entropy=True, loss=None, **kwargs):
        """(loss, logprobs, entropy, d hidden, d weight)"""
        out = fused_token_loss(
            self.hidden,
            self.weight,
            self.targets,
            loss or self.token_loss,
            want_entropy=want_entropy,
            **KWARGS,
            **kwargs,
        )
        return *out, *torch.autograd.grad(out[0], (self.hidden, self.weight))

    def recomputed(self, want_entropy=True, **kwargs):
        logprobs, entropy = token_logprobs(
            self.hidden, self.weight, self.targets, want_entropy=want_entropy, **KWARGS, **kwargs
        )
        loss = self.token_loss(logprobs, entropy, 0, T)
        return loss, logprobs, entropy, *torch.autograd.grad(loss, (self.hidden, self.weight))


def assert_close(actual, expected, tolerance) -> None:
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=tolerance, rtol=tolerance)


both = pytest.mark.parametrize("method", ["fused", "recomputed"])


@both
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("chunk", [None, 1, 10, 37, 1000])
def test_matches_log_softmax_whatever_the_chunk(method, dtype, tolerance, chunk):
    problem = Problem(dtype)
    loss, *results = getattr(problem, method)(chunk_size=chunk)
    expected = problem.expected()
    assert_close(results, expected, tolerance)
    torch.testing.assert_close(loss.double(), problem.token_loss(*expected[:2], 0, T), atol=tolerance, rtol=tolerance)


@both
def test_without_entropy(method):
    problem = Problem()
    _, logprobs, entropy, *grads = getattr(problem, method)(want_entropy=False, chunk_size=10)
    expected = problem.expected(entropy=False)
    assert entropy is None
    assert_close((logprobs, *grads), (expected[0], *expected[2:]), 1e-12)


def test_entropy_may_be_wanted_without_being_in_the_loss():
    problem = Problem()
    results = problem.fused(loss=lambda l, e, i, j: (problem.a[i:j] * l).sum(), chunk_size=10)
    assert_close(results[1:], problem.expected(entropy=False), 1e-12)


@both
def test_bf16_input_has_fp32_softmax_and_accumulation(method):
    problem = Problem(torch.bfloat16)
    _, logprobs, entropy, *grads = getattr(problem, method)(chunk_size=4)
    expected = problem.expected()  # of the rounded inputs: only outputs are rounded again
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert {x.dtype for x in grads} == {torch.bfloat16}
    assert_close((logprobs, entropy), expected[:2], 1e-5)
    assert_close(grads, expected[2:], 2**-8)


def test_gradients_pass_gradcheck():
    problem = Problem()

    def run(hidden, weight):
        return token_logprobs(hidden, weight, problem.targets, want_entropy=True, chunk_size=10, **KWARGS)

    assert torch.autograd.gradcheck(run, (problem.hidden, problem.weight), fast_mode=True)


@both
def test_padding_takes_no_probability_and_gets_no_gradient(method):
    problem = Problem()
    with torch.no_grad():
        problem.weight[V:] = 1e4
    *_, grad = getattr(problem, method)()
    assert_close((grad,), (Problem().expected()[3],), 1e-12)
    assert (grad[V:] == 0).all()


@both
def test_large_logits_do_not_overflow(method):
    problem = Problem(torch.float32, scale=200.0)
    _, *results = getattr(problem, method)(chunk_size=10)
    assert all(x.isfinite().all() for x in results)
    torch.testing.assert_close(results[0].double(), problem.expected()[0], atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_fused_backward_scales_by_the_incoming_scalar(scale):
    problem = Problem()
    out = fused_token_loss(
        problem.hidden, problem.weight, problem.targets, problem.token_loss, want_entropy=True, **KWARGS
    )
    (scale * out[0]).backward()
    expected = problem.expected()[2:]
    assert_close((problem.hidden.grad, problem.weight.grad), [scale * x for x in expected], 1e-12)
    assert not out[1].requires_grad and not out[2].requires_grad


def test_fused_loss_goes_backward_once():
    problem = Problem()
    loss = fused_token_loss(
        problem.hidden, problem.weight, problem.targets, problem.token_loss, want_entropy=True, **KWARGS
    )[0]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward only"):
        loss.backward()


@pytest.mark.parametrize("rows", [slice(0, 5), slice(3, 30), slice(0, T)])
@pytest.mark.parametrize("want_entropy", [False, True])
def test_rows_without_gradient_contribute_nothing_even_as_nan(rows, want_entropy):
    problem = Problem()
    mask = torch.ones(T, dtype=torch.bool)
    mask[rows] = False

    def masked(logprobs, entropy, start, stop):
        keep = mask[start:stop]
        clean = [None if x is None else torch.where(keep, x, 0.0) for x in (logprobs, entropy)]
        return problem.token_loss(*clean, start, stop)

    expected = problem.fused(want_entropy, masked, chunk_size=10)
    with torch.no_grad():
        problem.hidden[rows] = torch.nan
    loss, _, _, d_hidden, d_weight = problem.fused(want_entropy, masked, chunk_size=10)
    assert (d_hidden[rows] == 0).all()
    assert_close((loss, d_hidden, d_weight), (expected[0], *expected[3:]), 1e-12)


@both
def test_no_tokens_give_zero_loss_and_gradient(method):
    problem = Problem()
    hidden = torch.empty(0, H, dtype=torch.float64, requires_grad=True)
    kwargs = {"want_entropy": True, **KWARGS}
    if method == "fused":
        zero = lambda l, e, i, j: l.sum()  # noqa: E731
        loss, logprobs, entropy = fused_token_loss(hidden, problem.weight, problem.targets[:0], zero, **kwargs)
    else:
        logprobs, entropy = token_logprobs(hidden, problem.weight, problem.targets[:0], **kwargs)
        loss = logprobs.sum()
    loss.backward()
    assert loss == 0 and logprobs.shape == entropy.shape == (0,) and hidden.grad.shape == (0, H)
    assert (problem.weight.grad == 0).all()


@both
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_input_gets_no_gradient(method, frozen):
    problem = Problem()
    getattr(problem, frozen).requires_grad_(False)
    other = "weight" if frozen == "hidden" else "hidden"
    args = (problem.hidden, problem.weight, problem.targets)
    kwargs = {"want_entropy": True, **KWARGS}
    if method == "fused":
        loss = fused_token_loss(*args, problem.token_loss, **kwargs)[0]
    else:
        loss = problem.token_loss(*token_logprobs(*args, **kwargs), 0, T)
    loss.backward()
    assert getattr(problem, frozen).grad is None
    assert_close((getattr(problem, other).grad,), (problem.expected()[2 if other == "hidden" else 3],), 1e-12)


def test_without_grad_mode_nothing_is_saved_and_no_gradient_asked_for():
    problem = Problem()
    asked = []

    def loss(logprobs, entropy, start, stop):
        asked.append(logprobs.requires_grad)
        return problem.token_loss(logprobs, entropy, start, stop)

    kwargs = {"want_entropy": True, **KWARGS}
    args = (problem.hidden, problem.weight, problem.targets)
    with torch.no_grad():
        fused = fused_token_loss(*args, loss, **kwargs)
        plain = token_logprobs(*args, **kwargs)
    assert asked == [False]
    assert all(x.grad_fn is None for x in (*fused, *plain))
    assert_close((*fused[1:], *plain), problem.expected()[:2] * 2, 1e-12)


def test_autograd_takes_the_gradient_buffers_without_a_copy():
    problem = Problem()
    loss = fused_token_loss(*(problem.hidden, problem.weight, problem.targets), problem.token_loss, **KWARGS)[0]
    held = [x.data_ptr() for x in (loss.grad_fn.grads.hidden, loss.grad_fn.grads.weight)]
    loss.backward()
    assert [problem.hidden.grad.data_ptr(), problem.weight.grad.data_ptr()] == held


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": PADDED + 1}, "vocab_size"),
        ({"temperature": 0.0}, "temperature"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"targets": torch.full((T,), V)}, "targets must be in 0..44"),
        ({"targets": torch.full((T,), -100)}, "targets must be"),
        ({"targets": torch.zeros(T - 1, dtype=torch.int64)}, "expected hidden"),
        ({"hidden": torch.zeros(T, H + 1)}, "do not fit"),
        ({"hidden": torch.zeros(T, H, dtype=torch.bfloat16)}, "do not fit"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, message):
    problem = Problem()
    args = {"hidden": problem.hidden, "weight": problem.weight, "targets": problem.targets, **KWARGS}
    with pytest.raises(ValueError, match=message):
        token_logprobs(**{**args, **change})


# --- tensor parallel ---


def _worker(rank: int, world: int, path: str, vocab_rows: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        problem = Problem()
        expected = {want_entropy: problem.expected(want_entropy) for want_entropy in (True, False)}
        full = torch.zeros(vocab_rows * world, H, dtype=torch.float64)
        full[:PADDED] = problem.weight.detach()
        problem.weight = full[rank * vocab_rows : (rank + 1) * vocab_rows].clone().requires_grad_()
        for method in (problem.fused, problem.recomputed):
            for want_entropy in (True, False):
                want = expected[want_entropy]
                _, logprobs, entropy, d_hidden, d_weight = method(want_entropy, chunk_size=10, group=dist.group.WORLD)
                dist.all_reduce(d_hidden)
                shards = [torch.empty_like(d_weight) for _ in range(world)]
                dist.all_gather(shards, d_weight.contiguous())
                d_full = torch.cat(shards)
                assert_close((logprobs, d_hidden, d_full[:PADDED]), (want[0], *want[2:]), 1e-12)
                assert (d_full[V:] == 0).all()
                assert entropy is None if not want_entropy else torch.allclose(entropy, want[1], atol=1e-12)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("world", "vocab_rows"), [(2, 25), (4, 16)])  # 4 x 16: the last rank is padding only
def test_tensor_parallel_ranks_agree_with_one(tmp_path, world, vocab_rows):
    context = mp.spawn(
        _worker, (world, str(tmp_path / "init"), vocab_rows), nprocs=world, join=False, start_method="spawn"
    )
    for _ in range(60):
        if context.join(timeout=3):
            return
    for process in context.processes:
        process.kill()
    pytest.fail("tensor-parallel workers did not finish")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_agrees_with_float64(method, dtype):
    problem = Problem(dtype)
    expected = problem.expected()
    for name in ("hidden", "weight"):
        setattr(problem, name, getattr(problem, name).detach().cuda().requires_grad_())
    for name in ("targets", "a", "b"):
        setattr(problem, name, getattr(problem, name).cuda())
    _, *results = getattr(problem, method)(chunk_size=10)
    assert_close([x.cpu() for x in results], expected, 3e-2 if dtype == torch.bfloat16 else 1e-3)
