import math

import pytest
import torch

from megappo.errors import UserError
from megappo.rollout import sampling as module
from megappo.rollout.base import SamplingParams
from megappo.rollout.sampling import keep_mask, race_times, row_keys, sample_tokens, seeds_tensor

MASK = (1 << 64) - 1


def keys_for(n: int, seed: int = 0, position: int = 0) -> torch.Tensor:
    return row_keys(torch.arange(n) + seed, torch.tensor(position))


def params(**changes) -> SamplingParams:
    return SamplingParams(max_new_tokens=1, **changes)


def counts(logits: torch.Tensor, n: int, sampling: SamplingParams, seed: int = 0) -> torch.Tensor:
    tokens, _ = sample_tokens(logits.expand(n, -1), keys_for(n, seed), sampling)
    return torch.bincount(tokens, minlength=logits.shape[-1]).double()


def assert_drawn_from(observed: torch.Tensor, probs: torch.Tensor) -> None:
    """Chi-square within six standard deviations of its mean."""
    expected = observed.sum() * probs.double()
    assert observed[expected == 0].sum() == 0
    live = expected > 0
    degrees = int(live.sum()) - 1
    chi2 = ((observed - expected)[live] ** 2 / expected[live]).sum()
    assert chi2 < degrees + 6 * math.sqrt(2 * degrees)


def test_row_keys_are_splitmix64_of_seed_and_position():
    def splitmix64(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    seeds, positions = [0, 1, -3, 1 << 63, (1 << 200) + 5], [0, 1, 511, 1 << 20]
    got = row_keys(seeds_tensor(seeds).unsqueeze(1), torch.tensor(positions))
    for i, seed in enumerate(seeds):
        first = splitmix64((seed + golden) & MASK)
        for j, position in enumerate(positions):
            want = splitmix64((first + (position + 1) * golden) & MASK)
            assert int(got[i, j]) & MASK == want


def test_race_times_are_exponential_and_uncorrelated():
    times = -race_times(keys_for(1000), 1000).double()
    assert times.min() > 0 and times.isfinite().all()
    assert times.mean().item() == pytest.approx(1, abs=0.005)
    assert times.var().item() == pytest.approx(1, abs=0.02)
    for x in (1e-4, 1e-3, 1.0):
        share = -math.expm1(-x)
        assert (times < x).sum().item() == pytest.approx(1e6 * share, abs=6 * math.sqrt(1e6 * share))
    for matrix in (times, times.T):
        correlation = torch.corrcoef(matrix).fill_diagonal_(0).abs().max()
        assert correlation * math.sqrt(1000) < 7


@pytest.mark.parametrize("vocab", [2, 7, 60, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_follow_the_distribution(vocab, temperature):
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab))
    observed = counts(logits, 40_000, params(temperature=temperature))
    assert_drawn_from(observed, (logits / temperature).softmax(-1)[0])


def test_tokens_follow_the_distribution_along_positions_of_one_sample():
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(1))
    keys = row_keys(torch.tensor([7]), torch.arange(40_000))
    tokens, _ = sample_tokens(logits.expand(40_000, -1), keys, params())
    assert_drawn_from(torch.bincount(tokens, minlength=20).double(), logits.softmax(-1)[0])
    repeats = (tokens[1:] == tokens[:-1]).double().mean().item()
    assert repeats == pytest.approx(logits.softmax(-1).square().sum().item(), abs=0.02)


def test_rare_tokens_appear_as_often_as_they_should():
    logits = torch.full((1, 2000), -14.0)
    logits[0, 0] = 0.0
    rare = 100_000 * (1 - logits.softmax(-1)[0, 0].double().item())
    observed = sum(100_000 // 4 - counts(logits, 25_000, params(), seed=s * 25_000)[0].item() for s in range(4))
    assert observed == pytest.approx(rare, abs=5 * math.sqrt(rare))


def test_draws_do_not_depend_on_order_or_batch(monkeypatch):
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(2))
    keys = keys_for(64)
    tokens, logprobs = sample_tokens(logits, keys, params())
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    shuffled, _ = sample_tokens(logits[order], keys[order], params())
    assert torch.equal(shuffled, tokens[order])
    alone = [sample_tokens(logits[i : i + 1], keys[i : i + 1], params())[0].item() for i in range(64)]
    assert alone == tokens.tolist()
    monkeypatch.setattr(module, "_CPU_CHUNK", 150)
    chunked = sample_tokens(logits, keys, params())
    assert torch.equal(chunked[0], tokens) and torch.equal(chunked[1], logprobs)


def test_rounding_noise_rarely_changes_a_draw():
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(200, 5000, generator=generator)
    noisy = logits + 1e-6 * torch.randn(logits.shape, generator=generator)
    keys = keys_for(200)
    same = sample_tokens(logits, keys, params())[0] == sample_tokens(noisy, keys, params())[0]
    assert same.sum() >= 199


def test_greedy_takes_the_largest_and_scores_it_at_temperature_one():
    logits = torch.randn(30, 40, generator=torch.Generator().manual_seed(5))
    tokens, logprobs = sample_tokens(logits, keys_for(30), params(temperature=0.0))
    assert torch.equal(tokens, logits.argmax(-1))
    want = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.7, "top_k": 5}])
def test_logprob_is_that_of_the_full_scaled_distribution(changes):
    logits = 3 * torch.randn(200, 40, generator=torch.Generator().manual_seed(6))
    sampling = params(**changes)
    tokens, logprobs = sample_tokens(logits, keys_for(200), sampling)
    want = (logits / sampling.temperature).double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), want, rtol=0, atol=2e-6)


def test_half_precision_logits_are_scored_in_fp32():
    logits = torch.randn(8, 40, generator=torch.Generator().manual_seed(7)).bfloat16()
    tokens, logprobs = sample_tokens(logits, keys_for(8), params())
    assert logprobs.dtype == torch.float32
    want = logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, want, rtol=0, atol=1e-6)


def test_no_rows():
    tokens, logprobs = sample_tokens(torch.empty(0, 9), keys_for(0), params())
    assert tokens.shape == logprobs.shape == (0,)


def kept_by_definition(row: list[float], top_k: int, top_p: float) -> set[int]:
    order = sorted(range(len(row)), key=lambda v: -row[v])
    if top_k > 0:
        order = [v for v in order if row[v] >= row[order[min(top_k, len(row)) - 1]]]
    total, kept = 0.0, set()
    for v in order:
        if kept and total >= top_p * sum(row[v] for v in order):
            break
        kept.add(v)
        total += row[v]
    return kept


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (-1, 0.6), (5, 0.7), (1, 0.9), (99, 1.0), (-1, 1e-9)])
def test_truncation_keeps_the_right_set(top_k, top_p):
    probs = torch.randn(50, 12, generator=torch.Generator().manual_seed(8)).softmax(-1)
    keep = keep_mask(probs, top_k, top_p)
    for row, kept in zip(probs.double().tolist(), keep, strict=True):
        assert set(kept.nonzero()[:, 0].tolist()) == kept_by_definition(row, top_k, top_p)


def test_top_k_keeps_ties_of_the_last():
    probs = torch.tensor([[0.1, 0.3, 0.3, 0.3]])
    assert keep_mask(probs, 2, 1.0).tolist() == [[False, True, True, True]]


@pytest.mark.parametrize(("top_k", "top_p"), [(4, 1.0), (-1, 0.5), (6, 0.8)])
def test_truncated_draws_follow_the_renormalised_set(top_k, top_p):
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(9))
    probs = logits.softmax(-1)
    kept = probs * keep_mask(probs, top_k, top_p)
    observed = counts(logits, 30_000, params(top_k=top_k, top_p=top_p))
    assert_drawn_from(observed, (kept / kept.sum())[0])


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((1, 10), -math.inf)
    logits[0, 4] = 0.0
    assert counts(logits, 1000, params())[4] == 1000
    assert counts(logits, 1000, params(top_p=0.5))[4] == 1000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -1),
        ("temperature", math.nan),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", 0),
        ("top_k", -2),
        ("stop_strings", ("a", "")),
    ],
)
def test_bad_sampling_settings_are_refused(name, value):
    with pytest.raises(UserError, match=name.replace("_strings", " strings")):
        SamplingParams(**{"max_new_tokens": 4, name: value})


def test_truncated_sampling_is_recognised():
    assert params(top_p=0.9).truncated and params(top_k=5).truncated
    assert not params().truncated and not params(temperature=0.0, top_k=5).truncated
