"""Losses as the engine sees them: per-token weights times per-token terms, summed. The formulas are in
`megappo.algorithms`; here they meet the columns of a batch and the metrics that are reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megappo.algorithms.aggregate import weighted_sum
from megappo.algorithms.kl import kl_penalty
from megappo.algorithms.policy_loss import PolicyLossConfig, is_token_local, policy_loss
from megappo.algorithms.preference import bradley_terry, preferred
from megappo.algorithms.value_loss import value_loss

Rows = dict[str, Tensor]  # columns at the trained tokens of a micro-batch (or of one chunk of it)


@dataclass
class LossOutput:
    """`loss` is this part's share of the global loss; `sums` add up over parts and ranks, `maxima` by maximum."""

    loss: Tensor
    sums: Rows = field(default_factory=dict)
    maxima: Rows = field(default_factory=dict)


class Loss:
    """One loss. Every part receives rows that carry `weights`: see `algorithms.aggregate.token_weights`.

    Attributes:
        columns: batch columns that the loss reads.
        sums, maxima: names that `LossOutput` always carries, so that every rank reduces the same list.
        want_entropy: the entropy has to be computed.
        token_local: a part may be any subset of tokens; otherwise it must be whole sequences.
        at: where the loss reads output and columns: at the trained tokens, or at the last token of every sample, in
            the order of the micro-batch. The latter is for a scalar head; every context-parallel rank then sees all
            samples.
    """

    columns: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()
    want_entropy = False
    token_local = True
    at: Literal["rows", "last"] = "rows"

    def __call__(self, output: Tensor, entropy: Tensor | None, rows: Rows, cu_seqlens: Tensor | None) -> LossOutput:
        raise NotImplementedError


def _total(values: Tensor, weights: Tensor) -> Tensor:
    return (values.detach().double() * weights.double()).sum()


class PolicyLoss(Loss):
    """Clipped policy loss, entropy bonus and KL loss of the actor.

    `token_share` rows are 1/N over the trained tokens of the mini-batch: metrics are token means whatever the
    aggregation of the loss. With `sft_coef`, rows whose `sft_weights` are not 0 are examples to imitate: they add
    `sft_coef` times their negative log-likelihood, and nothing else (their other weights are 0).
    """

    maxima = ("actor/ratio_max", "actor/ratio_min_neg")

    def __init__(
        self,
        config: PolicyLossConfig,
        *,
        entropy_coeff: float = 0.0,
        kl_coef: float | None = None,
        kl_type: str = "low_var_kl",
        corrected: bool = False,
        sft_coef: float | None = None,
    ):
        self.config = config
        self.entropy_coeff = entropy_coeff
        self.kl_coef = kl_coef
        self.kl_type = kl_type
        self.corrected = corrected
        self.sft_coef = sft_coef
        self.want_entropy = True
        self.token_local = is_token_local(config)
        self.columns = ("old_logprobs", "advantages")
        self.columns += ("ref_logprobs",) if kl_coef is not None else ()
        self.columns += ("correction",) if corrected else ()
        self.columns += ("sft_weights",) if sft_coef is not None else ()
        self.sums = ("actor/pg_loss", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl")
        self.sums += ("actor/entropy", "actor/loss")
        self.sums += ("actor/kl_loss",) if kl_coef is not None else ()
        self.sums += ("actor/sft_loss", "actor/sft_tokens") if sft_coef is not None else ()

    def __call__(self, output, entropy, rows, cu_seqlens) -> LossOutput:
        weights, share = rows["weights"], rows["token_share"]
        mask = torch.ones_like(output, dtype=torch.bool)
        terms = policy_loss(
            output, rows["old_logprobs"], rows["advantages"], self.config, loss_mask=mask, cu_seqlens=cu_seqlens
        )
        pg = terms.loss * rows["correction"] if self.corrected else terms.loss
        loss = weighted_sum(pg, weights)
        sums = {
            "actor/pg_loss": loss.detach().double(),
            "actor/pg_clipfrac": _total(terms.clipped, share),
            "actor/pg_clipfrac_lower": _total(terms.clipped_dual, share),
            "actor/ppo_kl": _total(terms.approx_kl, share),
            "actor/entropy": _total(entropy, share),
        }
        if self.entropy_coeff:
            loss = loss - self.entropy_coeff * weighted_sum(entropy, weights)
        if self.kl_coef is not None:
            kl = weighted_sum(kl_penalty(output, rows["ref_logprobs"], self.kl_type), weights)
            loss = loss + self.kl_coef * kl
            sums["actor/kl_loss"] = kl.detach().double()
        unused = torch.zeros_like(mask)
        if self.sft_coef is not None:
            unused = rows["sft_weights"] != 0
            nll = weighted_sum(-output, rows["sft_weights"])
            loss = loss + self.sft_coef * nll
            sums |= {"actor/sft_loss": nll.detach().double(), "actor/sft_tokens": unused.sum().double()}
        sums["actor/loss"] = loss.detach().double()
        low = torch.tensor(-torch.inf, dtype=torch.float64, device=output.device)
        ratio = terms.ratio.detach().double()
        maxima = {
            "actor/ratio_max": ratio.masked_fill(unused, -torch.inf).max() if len(ratio) else low,
            "actor/ratio_min_neg": (-ratio).masked_fill(unused, -torch.inf).max() if len(ratio) else low,
        }
        return LossOutput(loss, sums, maxima)


class ValueLoss(Loss):
    """Clipped value regression of the critic."""

    columns = ("values", "returns")
    sums = ("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean")

    def __init__(self, cliprange_value: float | None):
        self.cliprange_value = cliprange_value

    def __call__(self, output, entropy, rows, cu_seqlens) -> LossOutput:
        terms = value_loss(output, rows["values"], rows["returns"], self.cliprange_value)
        loss = weighted_sum(terms.loss, rows["weights"])
        share = rows["token_share"]
        return LossOutput(
            loss,
            {
                "critic/vf_loss": loss.detach().double(),
                "critic/vf_clipfrac": _total(terms.clipped, share),
                "critic/vpred_mean": _total(output, share),
            },
        )


class NLLLoss(Loss):
    """Negative log-likelihood of the response tokens, for supervised fine-tuning."""

    sums = ("train/loss",)

    def __call__(self, output, entropy, rows, cu_seqlens) -> LossOutput:
        loss = weighted_sum(-output, rows["weights"])
        return LossOutput(loss, {"train/loss": loss.detach().double()})


class PreferenceLoss(Loss):
    """Bradley-Terry loss of a reward model; samples 2i and 2i + 1 of a micro-batch are a pair, chosen first.

    Weights are those of the samples' last tokens: a pair has that of both.
    """

    at = "last"
    columns = ("margin",)
    sums = ("train/loss", "train/accuracy", "train/margin", "reward_model/chosen_mean", "reward_model/rejected_mean")

    def __init__(self, center_coef: float = 0.0):
        self.center_coef = center_coef

    def __call__(self, output, entropy, rows, cu_seqlens) -> LossOutput:
        chosen, rejected = output.view(-1, 2).unbind(1)
        weights = rows["weights"].view(-1, 2).sum(1)
        terms = bradley_terry(chosen, rejected, rows["margin"].view(-1, 2)[:, 0], self.center_coef)
        loss = weighted_sum(terms, weights)
        return LossOutput(
            loss,
            {
                "train/loss": loss.detach().double(),
                "train/accuracy": _total(preferred(chosen, rejected), weights),
                "train/margin": _total(chosen - rejected, weights),
                "reward_model/chosen_mean": _total(chosen, weights),
                "reward_model/rejected_mean": _total(rejected, weights),
            },
        )
