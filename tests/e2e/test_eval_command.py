"""A command of the user's evaluates the policy: what it is given, what is logged, and that it cannot end a run."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist
from ppo_case import config_of, read_metrics, write_case
from warm_ranks import on_ranks

from megappo.config.checks import check_config
from megappo.trainer.external_eval import run_command
from megappo.trainer.ppo import run_ppo

BENCH = """
import json, os, sys
from transformers import AutoModelForCausalLM
model, iteration = sys.argv[1], int(sys.argv[2])
assert "WORLD_SIZE" not in os.environ
total = sum(float(p.abs().sum()) for p in AutoModelForCausalLM.from_pretrained(model).parameters())
print("some noise")
if iteration == 2:
    sys.exit("no such benchmark")
print(json.dumps({"mt_bench": total, "name": "text is left out"}))
"""


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    file = write_case(tmp_path_factory.mktemp("external"), layers=2)
    (file.parent / "bench.py").write_text(BENCH)
    return file


def go(yaml_file, out: str) -> None:
    command = f"{sys.executable} '{yaml_file.parent / 'bench.py'}' {{model}} {{iteration}}"
    changes = {"trainer__eval_command": command, "trainer__test_freq": 1, "trainer__val_before_train": True}
    places = {"trainer__output_dir": str(yaml_file.parent / out), "actor__ppo_epochs": 1}
    run_ppo(config_of(yaml_file, dist.get_world_size(), **changes, **places))


@pytest.mark.parametrize("world", [1, 2])
def test_the_command_sees_the_policy_and_its_numbers_are_logged(case, world):
    on_ranks(world, go, case, f"run{world}", timeout=250)
    before, first, second, third = read_metrics(case.parent / f"run{world}")
    assert before["step"] == 0 and before["val/external/failed"] == 0
    assert [line["val/external/failed"] for line in (first, second, third)] == [0, 1, 0]
    assert "val/external/mt_bench" not in second  # a failure costs its numbers, not the run
    sums = [line["val/external/mt_bench"] for line in (before, first, third)]
    assert len(set(sums)) == 3 and "val/external/name" not in first
    assert (case.parent / f"run{world}/eval_hf/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("'{python}' -c 'print(3)'", "last line is no JSON object"),
        ("'{python}' -c ''", "last line is no JSON object"),
        ("'{python}' -c 'raise SystemExit(4)'", "exit code 4"),
        ("/no/such/program", "cannot be started"),
        ("'{python}' -c 'while True: pass'", "not done after 0.5 s"),
    ],
)
def test_what_goes_wrong_is_said(command, said):
    numbers, trouble = run_command(command, {"python": sys.executable}, 0.5 if "while" in command else 60)
    assert numbers == {} and said in trouble and "\n" not in trouble


def test_words_are_replaced_in_arguments_of_their_own():
    code = "import json, sys; print(json.dumps({'n': len(sys.argv), 'same': sys.argv[1] == 'a b'}))"
    command = f"'{sys.executable}' -c \"{code}\" {{model}}"
    assert run_command(command, {"model": "a b"}, 60) == ({"n": 2.0, "same": 1.0}, None)


def test_settings_that_cannot_work_are_found(case):
    def problems(**changes):
        config = config_of(case).model_copy(deep=True)
        for name, value in changes.items():
            setattr(config.trainer, name, value)
        return [f"{problem}" for problem in check_config(config)]

    assert any("mind the quotes" in line for line in problems(eval_command="bench 'x"))
    assert any("is empty" in line for line in problems(eval_command=" "))
    assert any("distributed_timeout_s (600)" in x for x in problems(eval_command="a", eval_command_timeout_s=600))
    assert any("is never run" in line for line in problems(eval_command="a"))
