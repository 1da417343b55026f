import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import assert_close, from_rows, quick, ragged

from megappo.algorithms.correction import (
    CORRECTION_MODES,
    correction,
    mismatch_from,
    mismatch_moments,
)

C, LOW, HIGH = 1.5, 0.7, 1.4


def bounded_exp(x: float) -> float:
    return math.exp(min(max(x, -20.0), 20.0))


def naive_correction(batch, old, rollout, mode):
    weights, keep = torch.zeros(batch.total, dtype=torch.float64), torch.zeros(batch.total, dtype=torch.bool)
    for _, index in batch.rows():
        gaps = [float(old[t]) - float(rollout[t]) for t in index]
        for t, gap in zip(index, gaps, strict=True):
            ratio, kept = bounded_exp(gap), True
            if mode == "none":
                weight = 1.0
            elif mode == "token":
                weight = min(ratio, C)
            elif mode == "sequence":
                weight = min(bounded_exp(sum(gaps)), C)
            elif mode == "band":
                weight = ratio if LOW <= ratio <= HIGH else 0.0
            else:
                kept = LOW <= bounded_exp(sum(gaps) / len(gaps)) <= HIGH
                weight = float(kept)
            weights[t], keep[t] = weight, kept
    return weights, keep


@quick
@given(ragged(), st.sampled_from(CORRECTION_MODES), st.sampled_from([0.05, 0.5, 30.0]))
def test_weights_equal_the_definition(batch, mode, spread):
    old, rollout = batch.column("old", spread), batch.column("rollout", spread)
    result = correction(old.requires_grad_(), rollout, batch.mask, batch.cu, mode, C, LOW, HIGH)
    weights, keep = naive_correction(batch, old.detach(), rollout, mode)
    assert result.weights.dtype == torch.float32 and not result.weights.requires_grad
    assert_close(result.weights, weights, 1e-4)
    assert torch.equal(result.keep, keep)


@pytest.mark.parametrize("mode", CORRECTION_MODES)
def test_equal_log_probs_need_no_correction(mode):
    batch = from_rows([[False, True, False, True], [], [True]])
    logprobs = batch.column("x")
    result = correction(logprobs, logprobs, batch.mask, batch.cu, mode)
    assert torch.equal(result.weights, batch.mask.float()) and torch.equal(result.keep, batch.mask)


@pytest.mark.parametrize("mode", CORRECTION_MODES)
@pytest.mark.parametrize("gap", [1e3, -1e3])
def test_an_overflowing_gap_stays_finite(mode, gap):
    batch = from_rows([[True, True]])
    result = correction(torch.full((2,), gap), torch.zeros(2), batch.mask, batch.cu, mode)
    assert bool(result.weights.isfinite().all()) and float(result.weights.max()) <= 2.0


def test_ratios_are_bounded_even_without_a_cap():
    batch = from_rows([[True, True]])
    for mode in ("token", "sequence"):
        gap = torch.full((2,), 1e3)
        result = correction(gap, torch.zeros(2), batch.mask, batch.cu, mode, clip_max=math.inf)
        assert result.weights.tolist() == pytest.approx([math.exp(20)] * 2)


def test_without_correction_rollout_log_probs_may_be_missing():
    batch = from_rows([[True, True]])
    missing = torch.full((2,), float("nan"))
    assert correction(missing, missing, batch.mask, batch.cu, "none").weights.tolist() == [1.0, 1.0]


def test_geometric_rejection_drops_whole_sequences_and_band_single_tokens():
    batch = from_rows([[True, True], [True, True]])
    old = torch.tensor([0.0, 3.0, 0.1, -0.1])
    rejected = correction(old, torch.zeros(4), batch.mask, batch.cu, "geometric_rejection")
    assert rejected.keep.tolist() == [False, False, True, True]
    banded = correction(old, torch.zeros(4), batch.mask, batch.cu, "band")
    assert (banded.weights > 0).tolist() == [True, False, True, True]
    assert bool(banded.keep.all())


def test_wrong_settings_are_refused():
    batch = from_rows([[True]])
    x = torch.zeros(1)
    with pytest.raises(ValueError, match=r"'tis'.*none, token"):
        correction(x, x, batch.mask, batch.cu, "tis")
    with pytest.raises(ValueError, match="clip_max"):
        correction(x, x, batch.mask, batch.cu, "token", clip_max=0.0)
    with pytest.raises(ValueError, match="band"):
        correction(x, x, batch.mask, batch.cu, "band", band_low=2.0, band_high=1.0)


@quick
@given(ragged(), st.integers(0, 5))
def test_mismatch_from_shards_equals_the_definition(batch, cut):
    old, rollout, cut = batch.column("old", 0.3), batch.column("rollout", 0.3), min(cut, batch.n)
    parts = [batch.part(0, cut)[0], batch.part(cut, batch.n)[0]]
    summed = sum(mismatch_moments(old[p], rollout[p], batch.mask[p]) for p in parts)
    gaps = (old[batch.mask].double() - rollout[batch.mask].double()).tolist()
    if not gaps:
        assert mismatch_from(summed) == {}
        return
    ratios = [math.exp(gap) for gap in gaps]
    expected = {
        "rollout_corr/ess": sum(ratios) ** 2 / (len(gaps) * sum(r * r for r in ratios)),
        "rollout_corr/logprob_abs_diff_mean": sum(map(abs, gaps)) / len(gaps),
        "rollout_corr/kl": -sum(gaps) / len(gaps),
        "rollout_corr/k3_kl": sum(r - 1 - g for r, g in zip(ratios, gaps, strict=True)) / len(gaps),
    }
    assert mismatch_from(summed) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_effective_sample_size_is_one_without_mismatch_and_small_with_an_outlier():
    mask, rollout = torch.ones(100, dtype=torch.bool), torch.zeros(100)
    assert mismatch_from(mismatch_moments(rollout, rollout, mask))["rollout_corr/ess"] == pytest.approx(1)
    old = rollout.clone()
    old[3] = 15.0
    assert mismatch_from(mismatch_moments(old, rollout, mask))["rollout_corr/ess"] == pytest.approx(0.01, rel=0.01)
