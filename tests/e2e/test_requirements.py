"""docs/requirements.md: every requirement has its keys and tests, and these exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from ppo_case import config_of, read_metrics, write_case
from warm_ranks import on_ranks

from megappo.config.validate import key_names
from megappo.trainer.ppo import run_ppo

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/requirements.md").read_text(encoding="utf-8")
ROWS = [line.strip("|").split(" | ") for line in re.findall(r"^\| (?!requirement)(?!---).*\|$", PAGE, re.MULTILINE)]


def test_every_section_of_the_request_has_a_table():
    sections = re.findall(r"^## (\d)\.", PAGE, re.MULTILINE)
    assert sections == list("1234567") and len(ROWS) > 60
    assert all(len(row) == 3 and all(cell.strip() for cell in row) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip()[:50])
def test_its_keys_and_tests_exist(row):
    requirement, keys, tests = (cell.strip() for cell in row)
    for name in re.findall(r"`([a-z0-9_.]+)`", keys):
        assert name in key_names(), f"{requirement}: no key {name}"
    for name in tests.split(", "):
        file, _, function = name.partition("::")
        assert function in functions_of(ROOT / file), f"{requirement}: no test {name}"


@cache
def functions_of(file: Path) -> frozenset[str]:
    if not file.is_file():
        return frozenset()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


# --- what each iteration logs ------------------------------------------------------------------------------

ASKED_FOR = {
    "KL": ("actor/reward_kl_penalty", "actor/ppo_kl", "actor/kl_loss"),
    "entropy": ("actor/entropy",),
    "gradient norms": ("actor/grad_norm", "critic/grad_norm"),
    "clip fraction": ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "critic/vf_clipfrac"),
    "losses": ("actor/pg_loss", "critic/vf_loss"),
    "rewards": ("critic/score/mean", "critic/score/median", "critic/score/std"),
    "lengths": ("response_length/mean", "prompt_length/mean"),
    "throughput": ("perf/throughput", "perf/time_per_step"),
}


def go(yaml_file) -> None:
    run_ppo(config_of(yaml_file, trainer__output_dir=str(yaml_file.parent / "out"), trainer__total_iterations=1))


def test_an_iteration_logs_what_was_asked_for(tmp_path):
    file = write_case(tmp_path, layers=2)
    on_ranks(1, go, file)
    (line,) = read_metrics(tmp_path / "out")
    for what, names in ASKED_FOR.items():
        assert all(name in line for name in names), what


def test_a_run_keeps_its_configuration_beside_its_metrics(tmp_path):
    from megappo.config.load import read_config

    file = write_case(tmp_path, layers=2)
    on_ranks(1, go, file)
    kept, _ = read_config(tmp_path / "out/config.yaml")
    places = {"trainer__output_dir": str(tmp_path / "out"), "trainer__total_iterations": 1}
    assert kept == config_of(file, **places)
