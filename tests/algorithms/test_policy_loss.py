import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import assert_close, from_rows, quick, ragged

from megappo.algorithms.policy_loss import POLICY_LOSSES, PolicyLossConfig, is_token_local, policy_loss

SYMMETRIC = PolicyLossConfig("ppo", 0.2, 0.2, None)
DUAL = PolicyLossConfig("ppo", 0.2, 0.2, 3.0)


def naive_token_loss(l, o, advantage, cfg, sequence_log_ratio):
    """One token, float64 scalars, straight from the formulas; differentiable in l."""
    low, high = 1 - cfg.clip_ratio_low, 1 + cfg.clip_ratio_high
    ratio = torch.exp(torch.clamp(l - o, -20, 20))
    if cfg.kind == "reinforce":
        return -advantage * l
    if cfg.kind == "cispo":
        return -min(max(ratio.item(), low), high) * advantage * l
    if cfg.kind == "gspo":
        ratio = torch.exp(l - l.detach()) * math.exp(min(sequence_log_ratio, 10))
    free, bounded = -advantage * ratio, -advantage * torch.clamp(ratio, low, high)
    loss = free if free.item() >= bounded.item() else bounded
    if cfg.kind == "ppo" and cfg.clip_ratio_c is not None and advantage < 0:
        ceiling = torch.tensor(-cfg.clip_ratio_c * advantage, dtype=torch.float64)
        loss = loss if loss.item() <= ceiling.item() else ceiling
    return loss


def naive_losses(batch, l, o, advantages, cfg):
    leaf = l.double().detach().requires_grad_()
    losses = [torch.zeros((), dtype=torch.float64)] * batch.total
    for _, index in batch.rows():
        mean = sum(float(l[t]) - float(o[t]) for t in index) / max(len(index), 1)
        for t in index:
            losses[t] = naive_token_loss(leaf[t], float(o[t]), float(advantages[t]), cfg, mean)
    losses = torch.stack(losses) if losses else torch.zeros(0, dtype=torch.float64)
    if losses.requires_grad:
        losses.sum().backward()
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return losses.detach(), gradient


configs = st.builds(
    PolicyLossConfig,
    st.sampled_from(POLICY_LOSSES),
    st.sampled_from([0.2, 0.0, 0.0003]),
    st.sampled_from([0.2, 0.28]),
    st.sampled_from([None, 1.5, 3.0]),
)


@quick
@given(ragged(), configs, st.sampled_from([0.05, 0.7, 3.0]))
def test_value_and_gradient_equal_the_definition(batch, cfg, spread):
    l, o, advantages = batch.column("l", spread), batch.column("o", spread), batch.column("a")
    leaf = l.clone().requires_grad_()
    result = policy_loss(leaf, o, advantages, cfg, loss_mask=batch.mask, cu_seqlens=batch.cu)
    result.loss.sum().backward()
    expected, gradient = naive_losses(batch, l, o, advantages, cfg)
    assert_close(result.loss.detach(), expected, 1e-4)
    assert_close(leaf.grad, gradient, 1e-4)
    for statistic in (result.ratio, result.clipped, result.clipped_dual, result.approx_kl):
        assert statistic.shape == (batch.total,) and not statistic.requires_grad


@pytest.mark.parametrize("kind", POLICY_LOSSES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_lies_outside_the_mask_reaches_no_value_and_no_gradient(kind, bad):
    batch = from_rows([[False, True, True], [False]])
    columns = [batch.column(name, 0.1, poison=bad) for name in ("l", "o", "a")]
    clean = [batch.column(name, 0.1, poison=0.0) for name in ("l", "o", "a")]
    results = []
    for l, o, a in (columns, clean):
        leaf = l.clone().requires_grad_()
        result = policy_loss(leaf, o, a, PolicyLossConfig(kind), loss_mask=batch.mask, cu_seqlens=batch.cu)
        result.loss.sum().backward()
        results.append((result.loss.detach(), leaf.grad, result.ratio, result.approx_kl))
    for poisoned, expected in zip(*results, strict=True):
        assert torch.equal(poisoned, expected)


def one_token(log_ratio, advantage, cfg, dtype=torch.float32):
    leaf = torch.tensor([log_ratio], dtype=dtype, requires_grad=True)
    result = policy_loss(leaf, torch.zeros(1, dtype=dtype), torch.tensor([advantage]), cfg)
    result.loss.sum().backward()
    return result, float(result.loss.detach()), float(leaf.grad)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [1e3, -1e3])
@pytest.mark.parametrize("kind", ["ppo", "cispo", "reinforce"])
def test_an_overflowing_log_ratio_stays_finite(log_ratio, advantage, kind):
    result, loss, gradient = one_token(log_ratio, advantage, PolicyLossConfig(kind, 0.2, 0.2, None))
    assert math.isfinite(loss) and math.isfinite(gradient) and bool(result.ratio.isfinite().all())


@pytest.mark.parametrize("log_ratio", [1e3, -1e3])
def test_an_overflowing_sequence_ratio_stays_finite(log_ratio):
    batch = from_rows([[True, True]])
    leaf = torch.full((2,), log_ratio, requires_grad=True)
    cfg = PolicyLossConfig("gspo", 3e-4, 4e-4)
    result = policy_loss(leaf, torch.zeros(2), -torch.ones(2), cfg, loss_mask=batch.mask, cu_seqlens=batch.cu)
    result.loss.sum().backward()
    assert bool(result.loss.isfinite().all()) and bool(leaf.grad.isfinite().all())
    assert float(result.ratio.max()) <= math.exp(10) * 1.001


def test_the_dual_clip_bounds_negative_advantages_only():
    log_ratio = math.log(10.0)
    result, loss, gradient = one_token(log_ratio, -2.0, DUAL)
    assert loss == pytest.approx(6.0) and gradient == 0 and bool(result.clipped_dual)
    assert one_token(log_ratio, -2.0, SYMMETRIC)[1] == pytest.approx(20.0)
    result, loss, gradient = one_token(log_ratio, 2.0, DUAL)
    assert loss == pytest.approx(-2.4) and gradient == 0
    assert bool(result.clipped) and not bool(result.clipped_dual)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 1.0, -1.0, False),
        (1.5, 1.0, -1.2, True),  # moved far enough in the good direction
        (1.5, -1.0, 1.5, False),  # moved in the bad direction: pulled back in full
        (0.5, 1.0, -0.5, False),
        (0.5, -1.0, 0.8, True),
    ],
)
def test_the_clip_is_pessimistic(ratio, advantage, loss, clipped):
    result, value, gradient = one_token(math.log(ratio), advantage, DUAL)
    assert value == pytest.approx(loss, rel=1e-5)
    assert bool(result.clipped) is clipped
    assert gradient == pytest.approx(0.0 if clipped else -advantage * ratio, rel=1e-5)


def test_a_clipped_token_keeps_its_gradient_under_cispo():
    _, _, gradient = one_token(math.log(5.0), 1.0, PolicyLossConfig("cispo", 0.2, 0.28))
    assert gradient == pytest.approx(-1.28)


def test_half_precision_log_probs_are_compared_in_fp32():
    l, o = torch.tensor([-3.0], dtype=torch.bfloat16), torch.tensor([-3.015625], dtype=torch.bfloat16)
    result = policy_loss(l, o, torch.ones(1), SYMMETRIC)
    assert result.ratio.dtype == torch.float32
    assert float(result.ratio) == pytest.approx(math.exp(0.015625), rel=1e-6)
    assert float(result.approx_kl) == pytest.approx(-0.015625)


def test_only_gspo_needs_the_whole_sequence():
    assert [kind for kind in POLICY_LOSSES if not is_token_local(PolicyLossConfig(kind))] == ["gspo"]
    with pytest.raises(ValueError, match="cu_seqlens"):
        policy_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), PolicyLossConfig("gspo"))


def test_token_local_losses_may_be_cut_anywhere():
    l, o, a = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    for kind in ("ppo", "cispo", "reinforce"):
        cfg = PolicyLossConfig(kind)
        whole = policy_loss(l, o, a, cfg).loss
        pieces = [policy_loss(l[s], o[s], a[s], cfg).loss for s in (slice(0, 7), slice(7, 20))]
        assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("c", [1.0, 0.5, 0.0, -3.0, float("nan")])
def test_a_dual_clip_of_one_or_less_is_refused(c):
    with pytest.raises(ValueError, match="clip_ratio_c"):
        PolicyLossConfig("ppo", 0.2, 0.2, c)


def test_unknown_kinds_and_negative_ranges_are_refused():
    with pytest.raises(ValueError, match=r"'pppo'.*ppo, gspo"):
        PolicyLossConfig("pppo")
    with pytest.raises(ValueError, match="clip ratios"):
        PolicyLossConfig("ppo", -0.1)
