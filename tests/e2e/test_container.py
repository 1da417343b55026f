"""The Dockerfile cannot be built in a test: its pins must agree with the package's, and nothing needed is left out."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from megappo.parallel.backend import TESTED_MEGATRON

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SETUP = (ROOT / "setup.py").read_text()


def test_pins_agree_with_the_package():
    assert f'"megatron-core=={TESTED_MEGATRON}"' in SETUP
    torch = re.search(r"pip install torch==(\S+)", DOCKERFILE)[1]
    assert f"torch=={torch}" in (ROOT / "README.md").read_text()
    assert Version(torch) in Requirement(re.search(r'"(torch>=[^"]+)"', SETUP)[1]).specifier
    server = re.search(r"pip install sglang==(\S+)", DOCKERFILE)[1]
    assert Version(server) in Requirement(re.search(r'"(sglang[^"]+)"', SETUP)[1]).specifier
    for image in re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE):
        assert image == "gpu" or re.search(r":\d+\.\d+", image), f"{image} is not pinned"


def test_images_run_megappo_as_an_ordinary_user():
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]:
        assert re.findall(r"^USER (\S+)", stage, re.MULTILINE)[-1] == "1000"
    assert DOCKERFILE.count('ENTRYPOINT ["megappo"]') == 2  # the third stage inherits it


def test_the_packages_are_not_ignored():
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    for package in ("megappo", "megappo_cli", "checkpoints_tools"):
        for file in (ROOT / package).rglob("*.py"):
            parts = file.relative_to(ROOT).parts
            prefixes = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
            assert not any(fnmatchcase(prefix, p) for prefix in prefixes for p in patterns if "**" not in p), file
    assert {"setup.py", "README.md"}.isdisjoint(patterns)
