"""Whatever stands in the file or on the command line, the user gets lines, not a traceback."""

import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.config.checks import check_config
from megappo.config.import_verl import import_verl
from megappo.config.load import read_config
from megappo.config.validate import key_names
from megappo.config.verl_keys import CONVERTED, RENAMED
from megappo.errors import UserError

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**6),
    st.floats(),
    st.sampled_from(["", "gae", "a:b", "1e-6", "{"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "lr", "x"]), inner),
    max_leaves=4,
)
SETTINGS = st.dictionaries(st.sampled_from(key_names()), VALUES, max_size=5)


def overrides(pairs: dict) -> list[str]:
    texts = {key: yaml.safe_dump(value, default_flow_style=True) for key, value in pairs.items()}
    return [f"{key}={text.removesuffix('...' + chr(10)).strip()}" for key, text in texts.items()]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(tree=st.dictionaries(st.sampled_from([*key_names(), "zzz"]), VALUES, max_size=4), extra=SETTINGS)
def test_loading_gives_a_configuration_or_a_user_error(tree, extra):
    nested: dict = {"model": {"path": "m"}}
    for dotted, value in tree.items():
        here = nested
        *sections, name = dotted.split(".")
        for part in sections:
            here[part] = here[part] if isinstance(here.get(part), dict) else {}
            here = here[part]
        here[name] = value
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "exp.yaml"
        file.write_text(yaml.safe_dump(nested))
        try:
            config, sources = read_config(file, overrides(extra))
        except UserError as error:
            assert all(line.strip() for line in str(error).splitlines())
            return
        sources.lines(check_config(config, world_size=4))
        assert config.resolved() == config


JUNK = ("x", "[]", "[{}]", "{a: 1}", "-1", "1e30", ".nan", "true", "null")
SPECIAL = (
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "actor_rollout_ref.actor.optim.min_lr",
    "critic.ppo_micro_batch_size",
    "actor_rollout_ref.rollout.prompt_length",
    "actor_rollout_ref.rollout.do_sample",
    "custom_reward_function.path",
    "actor_rollout_ref.rollout.val_kwargs.temperature",
    "actor_rollout_ref.rollout.val_kwargs.do_sample",
    "actor_rollout_ref.actor.tis_imp_ratio_cap",
    "algorithm.rollout_correction.rollout_is",
    "custom_reward_function.name",
    "algorithm.rollout_correction.rollout_is_threshold",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
    "actor_rollout_ref.actor.strategy",
    "critic.grad_clip",
    "unknown.key",
    "actor_rollout_ref.actor.profiler.x",
    "actor_rollout_ref.actor",
    "actor_rollout_ref",
    "critic.optim",
    "data",
    "algorithm",
    "rewards",
    "custom_reward_function.reward_kwargs",
)
BASE = (
    "trainer.n_gpus_per_node=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size=8",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "algorithm.rollout_correction.rollout_is=token",
    "custom_reward_function.path=/r.py",
)


@pytest.mark.parametrize("key", sorted([*RENAMED, *CONVERTED, *SPECIAL]))
def test_importing_any_value_gives_a_translation_or_a_user_error(key):
    for value in JUNK:
        try:
            text = import_verl(None, [*BASE, f"{key}={value}"]).yaml()
        except UserError:
            continue
        assert isinstance(yaml.safe_load(text), dict)


@pytest.mark.parametrize("key", key_names())
def test_overriding_any_key_by_any_value_gives_a_configuration_or_a_user_error(key, exp):
    loaded = 0
    for value in JUNK:
        try:
            config, _ = read_config(exp.yaml, [f"{key}={value}"])
        except UserError as error:
            assert "Traceback" not in str(error) and key.split(".")[0] in str(error)
            continue
        loaded += 1
        check_config(config, world_size=4)
        assert config.resolved() == config
    assert loaded < len(JUNK), "some of these values must be wrong for every key"
