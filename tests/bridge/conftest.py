"""Tiny models of every family on disk, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import make_hf_model


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory) -> Callable[[str], Path]:
    """`hf_folder(family)`: a read-only model folder; copy it before changing anything."""
    root = tmp_path_factory.mktemp("families")

    def folder(family: str) -> Path:
        if not (root / family).exists():
            make_hf_model(root / family, family)
        return root / family

    return folder
