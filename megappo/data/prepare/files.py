"""Writing prepared data sets: whole files or none, no question in both train and test."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megappo.errors import UserError

INSTRUCTION = "Let's think step by step and output the final answer after ####"


def write_parquet(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write rows beside `path` and rename: a reader sees the old file or the whole new one.

    Raises UserError when the place cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as out:
                pq.write_table(pa.Table.from_pylist(list(rows)), out)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}): choose another --out") from None


def question_key(question: str) -> str:
    """Questions with the same words are the same question, however they are spaced."""
    return " ".join(question.split())


def prompt_column(text: str, plain: bool) -> str | list[dict[str, str]]:
    """A prompt as a plain string, or as a chat with one user turn."""
    return text if plain else [{"role": "user", "content": text}]


def run_command(main: Callable[[list[str] | None], None]) -> None:
    """Run a prepare command: a UserError becomes one line and exit code 2."""
    try:
        main(None)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
