"""PPO where the batch is odd: few prompts, aborted or empty answers, a mismatch, a warm-up, several data sources."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import torch.distributed as dist
from ppo_case import config_of, read_metrics, write_case
from safetensors.numpy import load_file
from warm_ranks import on_ranks

from megappo.trainer import phases
from megappo.trainer.ppo import run_ppo


def run(yaml_file, out: str, world: int = 1, **changes) -> list[dict]:
    folder = yaml_file.parent / out
    run_ppo(config_of(yaml_file, world, trainer__output_dir=str(folder), **changes))
    return read_metrics(folder)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return write_case(tmp_path_factory.mktemp("edges"), layers=2)


def record(yaml_file, folder) -> None:
    run(yaml_file, "recording", rollout__record_dir=str(folder), trainer__total_iterations=1)


@pytest.fixture(scope="module")
def recorded(case):
    """A folder with the rollouts of one iteration: 6 prompts, 12 samples."""
    on_ranks(1, record, case, case.parent / "recorded")
    return case.parent / "recorded"


def edited(recorded, name: str, change):
    """A copy of the recording with `change(sample)` applied to each sample's JSON."""
    folder = recorded.parent / name
    shutil.copytree(recorded, folder)
    file = folder / "rollouts_000000.jsonl"
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    for sample in samples:
        change(sample)
    file.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return folder


# --- untrainable samples ---------------------------------------------------------------------------------


def abort_one_of_each(sample: dict) -> None:
    """Of the first prompt one answer is aborted, of the second one is empty, of the third both are aborted."""
    if sample["sample_id"] in (0, 4, 5):
        sample.update(finish_reason="abort")
    if sample["sample_id"] == 2:
        sample.update(response_ids=[], logprobs=[], finish_reason="stop")


def watch_updates(yaml_file, out: str, changes: dict) -> tuple[list[dict], list[dict]]:
    """The metrics of a run, and what each of its actor updates saw."""
    seen = []
    real = phases.update_actor

    def update(run, batch, plan):
        columns = {name: column.numpy().copy() for name, column in batch.columns.items()}
        rows = np.repeat(batch.indices, np.diff(batch.cu_seqlens.numpy()))
        seen.append(columns | {"row": rows, "truncated": batch.info.truncated[rows]})
        return real(run, batch, plan)

    phases.update_actor = update
    try:
        return run(yaml_file, out, **changes), seen
    finally:
        phases.update_actor = real


def replay(yaml_file, folder, changes: dict) -> tuple[dict, dict]:
    """The metrics of one iteration on recorded rollouts, and what its actor update saw."""
    replayed = {"rollout__engine": "recorded", "rollout__replay_dir": str(folder), "trainer__total_iterations": 1}
    out = "_".join(["out", folder.name, *map(str, changes.values())])
    metrics, seen = on_ranks(1, watch_updates, yaml_file, out, replayed | changes)
    return metrics[0], seen[0]


@pytest.mark.parametrize("estimator", ["gae", "grpo", "rloo"])
def test_aborted_and_empty_answers_train_nothing_and_are_no_baseline(case, recorded, estimator):
    folder = edited(recorded, f"aborted_{estimator}", abort_one_of_each)
    changes = {"algorithm__adv_estimator": estimator, "algorithm__use_kl_in_reward": False}
    metrics, seen = replay(case, folder, changes)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["response/aborted_ratio"] == 3 / 12
    trained = set(seen["row"][seen["loss_mask"]])
    assert trained == set(range(12)) - {0, 2, 4, 5}
    if estimator != "gae":  # whoever is left alone in its group has nothing to be compared with
        lonely = np.isin(seen["row"], (1, 3)) & seen["loss_mask"]
        assert (seen["advantages"][lonely] == 0).all()
        others = (seen["row"] > 5) & seen["loss_mask"]
        assert (seen["advantages"][others] != 0).any()


def all_aborted(sample: dict) -> None:
    sample.update(finish_reason="abort")


def test_a_batch_of_aborted_answers_only_is_survived(case, recorded):
    folder = edited(recorded, "all_aborted", all_aborted)
    metrics, _ = replay(case, folder, {})
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["actor/loss"] == 0 and metrics["actor/grad_norm"] == 0 and "critic/score/mean" not in metrics


# --- mismatch between rollout and training ---------------------------------------------------------------


def doubtful(sample: dict) -> None:
    """The first prompt's answers are said to be e times less probable than they are."""
    if sample["group_id"] == 0:
        sample["logprobs"] = [x - 1.0 for x in sample["logprobs"]]


def test_correction_uses_the_recorded_logprobs(case, recorded):
    folder = edited(recorded, "doubtful", doubtful)
    results = {}
    for mode in ("none", "token", "sequence", "geometric_rejection", "band"):
        changes = {"algorithm__correction__mode": mode, "algorithm__correction__clip_max": 5.0}
        results[mode] = replay(case, folder, changes)
    first = results["none"][1]["row"] < 2
    mask = results["none"][1]["loss_mask"]
    share = (first & mask).sum() / mask.sum()
    for metrics, _ in results.values():
        assert metrics["rollout_corr/logprob_abs_diff_mean"] == pytest.approx(share, rel=1e-4)
        assert metrics["rollout_corr/ess"] < 0.95
    weights = {mode: seen["correction"] for mode, (_, seen) in results.items() if mode != "none"}
    assert np.allclose(weights["token"][first & mask], math.e) and np.allclose(weights["token"][~first & mask], 1.0)
    assert np.allclose(weights["sequence"][first & mask], 5.0)  # e to the power of the length, cut
    assert np.allclose(weights["band"][first & mask], 0.0)  # e is above band_high
    assert not results["geometric_rejection"][1]["loss_mask"][first].any()
    kept = results["geometric_rejection"][0]["rollout_corr/kept_share"]
    assert kept == pytest.approx(1 - share, rel=1e-6)
    losses = [metrics["actor/pg_loss"] for metrics, _ in results.values()]
    assert len({round(loss, 6) for loss in losses}) == len(losses)


# --- warm-up, sampling limits, sources -------------------------------------------------------------------


def warmup(yaml_file) -> list[dict]:
    changes = {"trainer__critic_warmup": 1, "trainer__total_iterations": 2}
    return run(yaml_file, "warm", actor__optim__lr_scheduler="linear", **changes)


def test_critic_warmup_leaves_the_actor_and_its_schedule_alone(case):
    first, second = on_ranks(1, warmup, case)
    assert not [key for key in first if key.startswith(("actor/pg", "actor/lr", "actor/grad", "sync/"))]
    assert first["critic/vf_loss"] > 0 and first["critic/grad_norm"] > 0
    assert second["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)  # still the reference
    assert second["sync/version"] == 1 and second["actor/grad_norm"] > 0
    # The schedule counts the actor's own 2 epochs x 2 mini-batches: the last of four steps is at 1/4.
    assert second["actor/lr"] == pytest.approx(1e-3 / 4)


def test_bootstrapping_continues_cut_answers_with_the_value_at_the_cut(case):
    changes = {"algorithm__bootstrap_truncated": True, "algorithm__use_kl_in_reward": False}
    changes |= {"trainer__total_iterations": 2}
    _, (_, seen) = on_ranks(1, watch_updates, case, "bootstrapped", changes)
    last = np.append(np.diff(seen["row"]) != 0, True)
    carried = (seen["returns"] - seen["rewards"])[last]  # the value of what would have come next
    cut = seen["truncated"][last]
    assert cut.any() and not cut.all()
    assert np.allclose(carried[~cut], 0, atol=1e-6)
    assert np.allclose(carried[cut], seen["values"][last][cut], rtol=0.5) and (carried[cut] > 0.01).all()


def evaluations(yaml_file) -> list[dict]:
    """Validation before training, with answers drawn two a prompt: all at once and prompt by prompt."""
    changes = {"trainer__val_before_train": True, "trainer__total_iterations": 1}
    changes |= {"rollout__val__n": 2, "rollout__val__temperature": 1.0, "rollout__val__sampled": True}
    changes |= {"data__val_files": [str(yaml_file.parent / "val.jsonl")]}
    return [run(yaml_file, f"val_{size}", data__val_batch_size=size, **changes)[0] for size in (None, 1, 2)]


def test_evaluation_does_not_depend_on_its_batch_size(case):
    whole, *others = on_ranks(1, evaluations, case)
    names = {f"val/task{i}/{what}" for i in (0, 1) for what in ("acc", "reward/mean", "acc_sampled")}
    assert names <= whole.keys() and all(other == whole for other in others)


def stop_strings(yaml_file) -> list[tuple[str, str]]:
    from transformers import AutoTokenizer

    folder = yaml_file.parent / "stopped"
    settings = {"rollout__stop": ["7", "="], "trainer__total_iterations": 1}
    run(yaml_file, "out_stopped", rollout__record_dir=str(folder), **settings)
    tokenizer = AutoTokenizer.from_pretrained(yaml_file.parent / "model")
    samples = [json.loads(line) for line in (folder / "rollouts_000000.jsonl").read_text().splitlines()]
    return [(tokenizer.decode(s["response_ids"]), s["finish_reason"]) for s in samples]


def test_stop_strings_end_answers(case):
    answers = on_ranks(1, stop_strings, case)
    assert any(text[-1] in "7=" for text, _ in answers)
    for text, reason in answers:
        assert not set(text[:-1]) & set("7=") and (reason == "stop" or text[-1] not in "7=")


def test_the_exported_model_is_what_the_last_update_left(case, recorded):
    """The folder loads in transformers, keeps the tokenizer and differs from the start."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = case.parent / "recording" / "final_hf"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).get_vocab()
    stored, start = load_file(folder / "model.safetensors"), load_file(case.parent / "model/model.safetensors")
    assert stored.keys() == start.keys()
    name = "model.layers.0.mlp.up_proj.weight"
    assert np.array_equal(model.state_dict()[name].numpy(), stored[name])
    assert not np.array_equal(stored[name], start[name])


# --- numbers that are not finite ---------------------------------------------------------------------------


def broken(yaml_file, world: int, broken_id: int) -> tuple[list[dict], list[list[str]]]:
    """Two iterations; in the second the advantages of one sample are NaN. Metrics, and every rank's notes."""
    real, skipped, notes = phases.add_advantages, phases.skipped_steps, []

    def poison(run_, batch, last_values, baseline):
        real(run_, batch, last_values, baseline)
        hit = batch.info.sample_id == broken_id
        batch["advantages"] = batch["advantages"] + batch.sample_values(np.where(hit, math.nan, 0.0)).repeat_interleave(
            batch.cu_seqlens.diff()
        )

    def note(update, count):
        notes.append(skipped(update, count))
        return notes[-1]

    phases.add_advantages, phases.skipped_steps = poison, note
    changes = {"actor__ppo_mini_batch_size": 3, "actor__ppo_micro_batch_size_per_gpu": 1, "actor__ppo_epochs": 1}
    try:
        lines = run(yaml_file, f"broken_{world}", world, trainer__total_iterations=2, **changes)
    finally:
        phases.add_advantages, phases.skipped_steps = real, skipped
    everyone: list = [None] * world
    dist.all_gather_object(everyone, notes)
    return lines, everyone


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_that_is_not_finite_is_skipped_by_all_ranks_and_its_sample_named(case, world):
    lines, notes = on_ranks(world, broken, case, world, 12 + 5)
    assert [line["actor/skipped_steps"] for line in lines] == [0, 1]
    assert [line["critic/skipped_steps"] for line in lines] == [0, 0]
    assert math.isfinite(lines[1]["actor/grad_norm"])  # of the other step
    expected = "actor: 1 optimizer steps skipped on all ranks, not finite in the micro-batches of samples 17"
    assert notes == [[expected]] * world


# --- few prompts for many ranks --------------------------------------------------------------------------

FEW = {
    "data__train_batch_size": 2,
    "actor__ppo_mini_batch_size": 2,
    "rollout__n": 1,
    "trainer__total_iterations": 2,
    "trainer__val_before_train": True,
}
UNEVEN = {"data__train_batch_size": 3, "actor__ppo_mini_batch_size": 3, "trainer__total_iterations": 2}
TP2_PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


def few_and_uneven(yaml_file, world: int, few_changes: dict) -> tuple[list[dict], list[dict]]:
    few = FEW | {"data__val_files": [str(yaml_file.parent / "val.jsonl")]} | few_changes
    return run(yaml_file, f"few_{world}", world, **few), run(yaml_file, f"uneven_{world}", world, **UNEVEN)


def test_ranks_without_a_prompt_or_a_sample_and_shares_that_do_not_divide_change_nothing(case):
    """Two prompts and three validation prompts on four ranks; the reference has four replicas for two samples."""
    alone = on_ranks(1, few_and_uneven, case, 1, {})
    together = on_ranks(4, few_and_uneven, case, 4, {"actor__parallel": TP2_PP2, "reference__parallel": {}})
    assert [len(lines) for lines in together] == [len(lines) for lines in alone] == [3, 2]
    for got, want in zip(together, alone, strict=True):
        for line, expected in zip(got, want, strict=True):
            assert line.keys() == expected.keys()
            for key, value in expected.items():
                if not key.startswith(("timing_s/", "perf/", "sync/seconds")):
                    assert line[key] == pytest.approx(value, rel=1e-4, abs=1e-6), (line["step"], key)
