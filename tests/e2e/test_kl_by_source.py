"""The KL to the reference of each data source, against a naive loop over the samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist
from ppo_case import config_of, read_metrics, write_case
from warm_ranks import on_ranks

from megappo.trainer import phases
from megappo.trainer.ppo import run_ppo


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return write_case(tmp_path_factory.mktemp("kl"), layers=2)


def measured(yaml_file, out: str) -> list[dict[str, list[float]]]:
    """Run; of every iteration the token-mean KL of each sample held by this rank, by data source."""
    real, seen = phases.kl_by_source, []

    def kl_by_source(run, batch, kl):
        parts = zip(batch.indices, kl.split(batch.cu_seqlens.diff().tolist()), strict=True)
        masks = batch["loss_mask"].split(batch.cu_seqlens.diff().tolist())
        found: dict[str, list[float]] = {}
        for (sample, part), mask in zip(parts, masks, strict=True):
            found.setdefault(batch.info.source[sample], []).append(float(part[mask].double().mean()))
        seen.append(found)
        return real(run, batch, kl)

    phases.kl_by_source = kl_by_source
    try:
        run_ppo(config_of(yaml_file, dist.get_world_size(), trainer__output_dir=str(yaml_file.parent / out)))
    finally:
        phases.kl_by_source = real
    return seen


def test_each_source_has_its_mean_kl_and_together_they_are_the_whole(case):
    seen = on_ranks(1, measured, case, "one")
    lines = read_metrics(case.parent / "one")
    for found, line in zip(seen, lines, strict=True):
        assert sorted(found) == ["task0", "task1"]
        for source, values in found.items():
            assert line[f"actor/kl/{source}"] == pytest.approx(np.mean(values), rel=1e-5, abs=1e-8)
        everything = [value for values in found.values() for value in values]
        assert line["actor/reward_kl_penalty"] == pytest.approx(np.mean(everything), rel=1e-5, abs=1e-8)
    assert abs(lines[-1]["actor/kl/task0"] - lines[-1]["actor/kl/task1"]) > 1e-6
    on_ranks(2, measured, case, "two", timeout=200)
    for a, b in zip(lines, read_metrics(case.parent / "two"), strict=True):
        for name in ("actor/kl/task0", "actor/kl/task1"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5)
