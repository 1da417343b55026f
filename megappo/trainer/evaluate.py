"""Held-out evaluation: generate answers to the validation prompts, score them, report by data source."""

from __future__ import annotations

from dataclasses import dataclass

from megappo.parallel.reduce import gather_objects
from megappo.rewards.base import SUCCESS_SCORE
from megappo.rollout.base import SamplingParams
from megappo.rollout.collect import make_requests, my_share
from megappo.trainer.scoring import measure
from megappo.trainer.setup import PPORun

_VAL_ID = 1 << 41  # ids of validation samples, apart from training


@dataclass(frozen=True)
class Answer:
    """One validation answer, small enough to send around."""

    source: str
    prompt: str
    response: str
    ground_truth: str
    score: float


def evaluate(run: PPORun) -> tuple[dict[str, float], list[Answer]]:
    """Metrics and all answers, on every rank. Collective.

    For each data source: `val/<source>/acc` (share of scores >= 0.8) and `val/<source>/reward/mean`. With
    `rollout.val.sampled` also `…_sampled`, at the training temperature.
    """
    val = run.config.rollout.val
    greedy = _answers(run, _sampling(run, val.temperature, val.top_p, val.top_k), val.n)
    metrics = _metrics(greedy, "")
    if val.sampled:
        sampling = _sampling(run, run.sampling.temperature, run.sampling.top_p, run.sampling.top_k)
        metrics |= _metrics(_answers(run, sampling, 1), "_sampled")
    return metrics, greedy


def _sampling(run: PPORun, temperature: float, top_p: float, top_k: int) -> SamplingParams:
    base = run.sampling
    return SamplingParams(
        max_new_tokens=base.max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop_token_ids=base.stop_token_ids,
        stop_strings=base.stop_strings,
    )


def _answers(run: PPORun, sampling: SamplingParams, n: int) -> list[Answer]:
    rows = list(run.val_data)
    batch = run.config.data.val_batch_size or len(rows)
    out: list[Answer] = []
    for start in range(0, len(rows), batch):
        first = _VAL_ID + start * n
        pairs = my_share(make_requests(rows[start : start + batch], n, first, run.config.trainer.seed), n)
        samples = run.rollout.generate([request for request, _ in pairs], sampling)
        prompts = [row for _, row in pairs]
        scored = measure(run, samples, prompts)  # raw scores; validation changes no statistics
        mine = [
            Answer(s.data_source, s.prompt_text, s.response_text, str(s.ground_truth), score)
            for s, score, dropped in zip(scored.samples, scored.scores.tolist(), scored.dropped, strict=True)
            if not dropped
        ]
        out += [answer for part in gather_objects(mine) for answer in part]
    return out


def _metrics(answers: list[Answer], suffix: str) -> dict[str, float]:
    out: dict[str, float] = {}
    for source in sorted({a.source for a in answers}):
        scores = [a.score for a in answers if a.source == source]
        out[f"val/{source}/acc{suffix}"] = sum(s >= SUCCESS_SCORE for s in scores) / len(scores)
        out[f"val/{source}/reward{suffix}/mean"] = sum(scores) / len(scores)
    return out
