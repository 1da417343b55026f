"""A small but complete experiment on disk: model folder, data file, YAML."""

import json
from pathlib import Path

import pytest
import yaml

HF_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 4096,
}


class Experiment:
    """Files of one experiment; `tree` is what stands in exp.yaml."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.yaml = root / "exp.yaml"
        self.model("model")
        (root / "train.parquet").touch()
        self.write(
            {
                "model": {"path": "model"},
                "data": {"train_files": ["train.parquet"]},
                "rewards": [{"type": "gsm8k"}],
            }
        )

    def model(self, name: str, **changes: object) -> Path:
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(HF_CONFIG | changes))
        (folder / "model.safetensors").touch()
        (folder / "tokenizer.json").touch()
        return folder

    def write(self, tree: dict | str) -> Path:
        self.yaml.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
        return self.yaml


@pytest.fixture
def exp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    monkeypatch.chdir(tmp_path)
    return Experiment(tmp_path)
