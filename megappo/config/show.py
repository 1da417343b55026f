"""The configuration as YAML: every key, in the schema's order, nothing null that inherits."""

from typing import Any

from megappo.config.schema.experiment import ExperimentConfig
from megappo.config.schema.guard import GuardRuleConfig
from megappo.config.yaml_io import dump_yaml


def dump_config(config: ExperimentConfig) -> str:
    """Resolved YAML that loads back to the same configuration."""
    resolved = config.resolved()
    tree = resolved.model_dump(mode="json")
    for section in ("sft", "reward_model"):
        if tree[section] is None:
            del tree[section]
    for reward in tree["rewards"]:
        if reward["type"] != "model":
            for name in ("parallel", "micro_batch_size_per_gpu", "max_token_len_per_gpu"):
                del reward[name]
    tree["schedules"] = {k: s.model_dump(mode="json", exclude_defaults=True) for k, s in resolved.schedules.items()}
    tree["guard"]["rules"] = [_rule(rule) for rule in resolved.guard.rules]
    return dump_yaml(tree)


def _rule(rule: GuardRuleConfig) -> dict[str, Any]:
    """A rule without what it does not use. Defaults stay, for they may differ from the preset's values."""
    actions = [action.model_dump(mode="json", exclude_defaults=True) for action in rule.actions]
    return rule.model_dump(mode="json", exclude_none=True) | {"actions": actions}
