"""Whole runs with supervised examples in the actor's update: layouts, resuming, bad files."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch.distributed as dist
from ppo_case import config_of, read_metrics, write_case
from warm_ranks import on_ranks

from megappo.errors import Interrupted, UserError
from megappo.trainer import phases
from megappo.trainer.ppo import run_ppo

TP = "actor__parallel__tensor_model_parallel_size"


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    file = write_case(tmp_path_factory.mktemp("mix"), layers=2)
    rows = [
        {"prompt": "7 + 2", "response": "= 9"},
        {"prompt": "9", "response": "+ 4 = 2"},
        {"prompt": "7", "response": "7"},
    ]
    (file.parent / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 3))
    return file


def settings(yaml_file, out: str, changes: dict):
    mix = {"actor__sft_mix__files": [str(yaml_file.parent / "sft.jsonl")], "actor__sft_mix__fraction": 0.4}
    places = {"trainer__output_dir": str(yaml_file.parent / out)}
    return config_of(yaml_file, dist.get_world_size(), **{**mix, **places, **changes})


def go(yaml_file, out: str, changes: dict) -> None:
    run_ppo(settings(yaml_file, out, changes))


def steady(line: dict) -> dict:
    return {key: value for key, value in line.items() if not key.startswith(("timing_s/", "perf/", "sync/seconds"))}


def test_the_examples_are_learnt_and_every_layout_agrees(case):
    folder = case.parent / "recorded"
    six = {"trainer__total_iterations": 6}
    on_ranks(1, go, case, "live", {**six, "rollout__record_dir": str(folder)})
    live = read_metrics(case.parent / "live")
    assert all(line["actor/sft_tokens"] > 3 * 3 for line in live)  # three examples for six samples, EOS included
    assert live[-1]["actor/sft_loss"] < 0.8 * live[0]["actor/sft_loss"]
    replay = {"rollout__engine": "recorded", "rollout__replay_dir": str(folder), "trainer__total_iterations": 2}
    for out, changes in {
        "dp2": {},
        "tp2": {TP: 2},
        "packed": {"actor__use_dynamic_bsz": True, "actor__ppo_max_token_len_per_gpu": 40},
        "apart": {"actor__parallel": {"num_ranks": 1}, "critic__parallel": {"first_rank": 1}},
    }.items():
        on_ranks(2, go, case, out, {**replay, **changes}, timeout=200)
        for line, expected in zip(read_metrics(case.parent / out), live[:2], strict=True):
            for key, value in expected.items():
                if key.startswith(("actor/", "critic/")):
                    assert line[key] == pytest.approx(value, rel=1e-3, abs=1e-5), (out, key)


def interrupted(yaml_file, out: str, changes: dict) -> None:
    real = phases.generate

    def generate(run, *args):
        if run.iteration == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(run, *args)

    phases.generate = generate
    try:
        go(yaml_file, out, changes)
    except Interrupted:
        return
    finally:
        phases.generate = real
    raise AssertionError("the run was not interrupted")


def test_a_resumed_run_goes_on_with_the_same_examples(case):
    ramp = {"start": 0.0, "end": 1.0, "shape": "linear"}
    changes = {"trainer__save_freq": 10, "schedules": {"actor.sft_mix.coef": ramp}}
    on_ranks(1, go, case, "straight", changes)
    on_ranks(1, interrupted, case, "resumed", changes)
    on_ranks(1, go, case, "resumed", changes)
    lines, again = read_metrics(case.parent / "straight"), read_metrics(case.parent / "resumed")
    assert [steady(line) for line in again] == [steady(line) for line in lines]
    assert [line["schedule/actor.sft_mix.coef"] for line in lines] == pytest.approx([0, 0.5, 1])


def refused(yaml_file, changes: dict) -> str:
    try:
        go(yaml_file, "refused", changes)
    except UserError as error:
        return str(error)
    raise AssertionError("it started")


def test_bad_files_are_refused_with_one_line(case):
    missing = on_ranks(1, refused, case, {"actor__sft_mix__files": [str(case.parent / "none.jsonl")]})
    assert "actor.sft_mix.files.0" in missing and "no such file" in missing
    assert "no column 'question'" in on_ranks(1, refused, case, {"actor__sft_mix__prompt_key": "question"})
    path = case.parent / "long.jsonl"
    path.write_text(json.dumps({"prompt": "7 + 2 = 9 7 + 2", "response": "9"}) + "\n")
    changes = {"actor__sft_mix__files": [str(path)], "actor__sft_mix__max_length": 4}
    said = on_ranks(1, refused, case, changes)
    assert "no example is left" in said and "\n" not in said
    dynamic = {"actor__use_dynamic_bsz": True, "actor__ppo_max_token_len_per_gpu": 20, "actor__sft_mix__max_length": 30}
    assert "actor.sft_mix.max_length" in on_ranks(1, refused, case, dynamic)
