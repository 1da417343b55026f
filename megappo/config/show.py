"""The configuration as YAML: every key, in the schema's order, nothing null that inherits."""

from megappo.config.schema.experiment import ExperimentConfig
from megappo.config.yaml_io import dump_yaml


def dump_config(config: ExperimentConfig) -> str:
    """Resolved YAML that loads back to the same configuration."""
    tree = config.resolved().model_dump(mode="json")
    if config.sft is None:
        del tree["sft"]
    return dump_yaml(tree)
