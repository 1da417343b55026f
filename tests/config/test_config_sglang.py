"""Mistakes in the settings of SGLang servers are found before anything starts."""

import sys

import pytest

from megappo.config.checks import check_config
from megappo.config.load import read_config

STARTED = ["rollout.engine=sglang", f"rollout.sglang.launch=[{sys.executable}]"]
GIVEN = ["rollout.engine=sglang", "rollout.servers=[http://127.0.0.1:30000]"]


def problems(exp, *overrides, notes=False):
    config, _ = read_config(exp.yaml, list(overrides))
    return [p for p in check_config(config) if p.note == notes and p.key != "data.val_files"]


@pytest.mark.parametrize("good", [STARTED, GIVEN])
def test_good_settings_have_no_problems(exp, good):
    assert problems(exp, *good) == [] == problems(exp, *good, notes=True)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["rollout.servers=[http://a:1]"], "rollout.servers"),
        ([*GIVEN[:1], "rollout.servers=[127.0.0.1:30000]"], "rollout.servers.0"),
        ([*GIVEN[:1], "rollout.servers=[http://a:1, http://a:1/]"], "rollout.servers.1"),
        ([*GIVEN[:1], "rollout.servers=[http://a:99999]"], "rollout.servers.0"),
        ([*GIVEN[:1], "rollout.servers=[http://a:1/v1]"], "rollout.servers.0"),
        (["rollout.engine=sglang", "rollout.sglang.launch=[]"], "rollout.sglang.launch"),
        (["rollout.engine=sglang", "rollout.sglang.launch=[no-such-command]"], "rollout.sglang.launch.0"),
        ([*STARTED, "rollout.sglang.extra_args=[--dtype, half]"], "rollout.sglang.extra_args.0"),
        ([*STARTED, "rollout.sglang.extra_args=[--port=1]"], "rollout.sglang.extra_args.0"),
        ([*STARTED, "rollout.sglang.extra_args=[--quantization, fp8]"], "rollout.sglang.extra_args.0"),
        (["trainer.rollout_lag=1"], "trainer.rollout_lag"),
        ([*STARTED, "trainer.rollout_lag=1", "algorithm.adv_estimator=remax"], "trainer.rollout_lag"),
        ([*STARTED, "rollout.sglang.timeout_s=10"], "rollout.sglang.health_timeout_s"),
    ],
)
def test_mistakes_name_their_key(exp, overrides, key):
    assert [p.key for p in problems(exp, *overrides)] == [key]


def test_without_sglang_the_remedies_are_named(exp, monkeypatch):
    monkeypatch.setattr("megappo.config.check_sglang.importlib.util.find_spec", lambda name: None)
    found = {p.key: p.text for p in problems(exp, "rollout.engine=sglang")}
    assert "pip install" in found["rollout.engine"] and "rollout.servers" in found["rollout.sglang.launch"]


@pytest.mark.parametrize(("name", "value"), [("tp", 2), ("num_servers", 2), ("extra_args", "[--x]")])
def test_what_only_a_start_can_change_is_noted_for_given_servers(exp, name, value):
    assert [p.key for p in problems(exp, *GIVEN, f"rollout.sglang.{name}={value}", notes=True)] == [
        f"rollout.sglang.{name}"
    ]


def test_a_folder_is_asked_for_when_servers_are_elsewhere(exp):
    changes = ["rollout.engine=sglang", "rollout.servers=[http://gen0:30000]"]
    assert [p.key for p in problems(exp, *changes, notes=True)] == ["rollout.sglang.sync_dir"]


def test_samples_that_are_an_update_old_are_weighed_unless_the_user_says_otherwise(exp):
    config, _ = read_config(exp.yaml, [*STARTED, "trainer.rollout_lag=1"])
    assert config.resolved().algorithm.correction.mode == "token"
    changes = [*STARTED, "trainer.rollout_lag=1", "algorithm.correction.mode=none"]
    assert read_config(exp.yaml, changes)[0].resolved().algorithm.correction.mode == "none"
    assert [p.key for p in problems(exp, *changes, notes=True)] == ["algorithm.correction.mode"]
