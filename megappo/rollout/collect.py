"""One batch of rollouts: requests spread over all ranks, generated, scored, and assembled into a RolloutBatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megappo.data.batch import FINISH_REASONS, Placement, RolloutBatch, SampleInfo
from megappo.data.prompts import PromptRow
from megappo.parallel.layout import ParallelLayout
from megappo.parallel.reduce import gather_objects
from megappo.rewards.base import RewardSample
from megappo.rollout.base import GeneratedSample, GenerateRequest


def sample_seed(seed: int, sample_id: int) -> int:
    """Seed of one sample's random numbers: depends on nothing but the run's seed and the sample."""
    return (seed * 1_000_003 + sample_id) % (1 << 62)


def make_requests(
    prompts: Sequence[PromptRow],
    n: int,
    first_id: int,
    seed: int,
    *,
    first_group: int = 0,
    groups: Sequence[int] | None = None,
) -> list[tuple[GenerateRequest, PromptRow]]:
    """`n` requests for each prompt; ids count up from `first_id`, groups from `first_group`.

    With `groups`, one for each prompt, ids are those of the groups that would count up from 0.
    """
    pairs = []
    for place, row in enumerate(prompts):
        group = first_group + place if groups is None else groups[place]
        for k in range(n):
            sample_id = first_id + (place if groups is None else group) * n + k
            request = GenerateRequest(sample_id, group, list(row.prompt_ids), sample_seed(seed, sample_id))
            pairs.append((request, row))
    return pairs


def my_share(items: Sequence, group_size: int = 1) -> list:
    """This rank's contiguous share of `items`, cut between groups of `group_size`, as even as can be."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = -(-len(items) // group_size)
    low, high = groups * rank // world, groups * (rank + 1) // world
    return list(items[low * group_size : high * group_size])


def reward_samples(samples: Sequence[GeneratedSample], rows: Sequence[PromptRow], tokenizer) -> list[RewardSample]:
    """What the reward sees: text without special tokens."""
    texts = tokenizer.batch_decode([s.response_ids for s in samples], skip_special_tokens=True)
    return [
        RewardSample(s.sample_id, row.data_source, row.prompt_text, text, row.ground_truth, row.extra_info)
        for s, row, text in zip(samples, rows, texts, strict=True)
    ]


@dataclass
class _Meta:
    """What one rank tells the others about its samples."""

    sample_id: list[int]
    group_id: list[int]
    prompt_len: list[int]
    length: list[int]
    trainable: list[int]
    score: list[float]
    reward: list[float]
    dropped: list[bool]
    finish: list[int]
    version: list[int]
    source: list[str]


def assemble(
    samples: Sequence[GeneratedSample],
    rows: Sequence[PromptRow],
    scores: Sequence[float],
    rewards: Sequence[float],
    dropped: Sequence[bool],
) -> RolloutBatch:
    """Build the batch from every rank's samples: metadata goes everywhere, tokens stay where they were generated.

    Aborted and dropped samples keep their place (ids stay aligned) but train on nothing. Collective.
    """
    meta = _Meta(
        [s.sample_id for s in samples],
        [s.group_id for s in samples],
        [len(s.prompt_ids) for s in samples],
        [len(s.prompt_ids) + len(s.response_ids) for s in samples],
        [len(s.response_ids) if s.loss_mask is None else sum(s.loss_mask) for s in samples],
        list(scores),
        list(rewards),
        list(dropped),
        [FINISH_REASONS.index(s.finish_reason) for s in samples],
        [s.weight_version for s in samples],
        [row.data_source for row in rows],
    )
    everyone = gather_objects(meta)
    owner = np.concatenate([np.full(len(m.sample_id), rank) for rank, m in enumerate(everyone)])
    merged = {name: [x for m in everyone for x in getattr(m, name)] for name in vars(meta)}
    order = np.argsort(np.array(merged["sample_id"]), kind="stable")

    def column(name: str, dtype) -> np.ndarray:
        return np.array(merged[name], dtype=dtype)[order]

    finish = column("finish", np.int8)
    prompt_len, length = column("prompt_len", np.int64), column("length", np.int64)
    no_score = column("dropped", bool)
    off = no_score | (finish == FINISH_REASONS.index("abort"))
    info = SampleInfo(
        sample_id=column("sample_id", np.int64),
        group_id=column("group_id", np.int64),
        prompt_len=prompt_len,
        length=length,
        trainable=np.where(off, 0, column("trainable", np.int64)),
        score=column("score", np.float64),
        finish_reason=finish,
        weight_version=column("version", np.int64),
        source=[merged["source"][i] for i in order],
        reward=column("reward", np.float64),
        dropped=no_score,
    )
    placement = Placement(ParallelLayout(world=dist.get_world_size()), owner[order])
    mine = placement.samples_of(dist.get_rank())
    by_id = {s.sample_id: s for s in samples}
    held = [by_id[int(info.sample_id[i])] for i in mine]
    return RolloutBatch(info, placement, mine, _columns(held, off[mine]))


def _columns(samples: Sequence[GeneratedSample], off: np.ndarray) -> dict[str, torch.Tensor]:
    """Columns of the samples held here; of those that are `off` nothing is trained on."""
    tokens = [t for s in samples for t in (*s.prompt_ids, *s.response_ids)]
    mask: list[bool] = []
    for s, unused in zip(samples, off.tolist(), strict=True):
        mask += [False] * len(s.prompt_ids)
        mask += [not unused] * len(s.response_ids) if unused or s.loss_mask is None else s.loss_mask
    logprobs = [x for s in samples for x in (*[0.0] * len(s.prompt_ids), *s.logprobs)]
    return {
        "tokens": torch.tensor(tokens, dtype=torch.int64),
        "loss_mask": torch.tensor(mask, dtype=torch.bool),
        "rollout_logprobs": torch.tensor(logprobs, dtype=torch.float32),
    }
