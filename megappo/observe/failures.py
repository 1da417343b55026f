"""How a command ends: one-line errors, exit codes, and a note for whoever launched this rank.

Exit codes: 0 done, 1 unexpected error (with its traceback), 2 a mistake in what the user supplied,
3 stopped by the guard, 4 no rollout server left (saved), 128 + n stopped on request by signal n (130 for Ctrl-C).
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from megappo.errors import Interrupted, UserError

#: set by `megappo_cli.launcher` for each rank: the rank writes its error there and the launcher prints it
ERROR_FILE = "MEGAPPO_ERROR_FILE"
#: set by torchrun for each rank: torchrun shows the earliest error as the root cause
TORCHRUN_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def rank() -> int:
    """This process's global rank; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def run_app(app: Callable[..., Any], argv: list[str]) -> int:
    """Run a typer application and return the exit code.

    A command may return a callable, which is then run here: outside typer, which swallows some exceptions
    (EOFError, BrokenPipeError) together with their traceback.

    Raises:
        Exception: an unexpected error, so that Python prints its traceback (unless a launcher prints it).
    """
    try:
        result = app(argv, standalone_mode=False)
        if callable(result):
            result = result()
        return result if isinstance(result, int) else 0
    except KeyboardInterrupt:
        return 130
    except Interrupted as err:
        if rank() == 0:
            print(err, file=sys.stderr, flush=True)
        return err.code
    except UserError as err:
        _report(err, user_lines(err), exit_code=2)
        return 2
    except Exception as err:
        if type(err).__name__ == "Abort":  # typer's word for Ctrl-D at a prompt
            return 130
        if type(err).__name__ == "NoArgsIsHelpError":
            print(err)
            return 0
        if hasattr(err, "format_message"):  # typer's usage errors; their class moved between typer's versions
            print(f"error: {err.format_message()} (see --help)", file=sys.stderr)
            return getattr(err, "exit_code", 2)
        if _report(err, traceback.format_exc().splitlines(), exit_code=1):
            return 1
        raise


def user_lines(err: UserError) -> list[str]:
    """`error: …` for each problem that the error names (one a line of its message)."""
    return [f"error: {line}" for line in str(err).splitlines() if line.strip()]


def _report(err: Exception, lines: list[str], exit_code: int) -> bool:
    """Tell the launcher; True if it will show the error. If not, print a user's mistake.

    A UserError with a true attribute `said_elsewhere` is not printed: another rank prints the same one.
    torchrun is told all the same, for it may end that other rank before it could speak.
    """
    note = {
        "message": {
            "message": f"{type(err).__name__}: {err}",
            "extraInfo": {"py_callstack": "\n".join(lines), "timestamp": str(int(time.time()))},
        },
        "rank": rank(),
        "time": time.time(),
        "lines": lines,
        "exit_code": exit_code,
    }
    _write(TORCHRUN_ERROR_FILE, note)
    if _write(ERROR_FILE, note):
        return True
    if isinstance(err, UserError) and not getattr(err, "said_elsewhere", False):
        prefix = f"[rank {rank()}] " if rank() else ""
        print("\n".join(prefix + line for line in lines), file=sys.stderr, flush=True)
    return False


def _write(variable: str, note: dict[str, Any]) -> bool:
    """Write the note at once to the file that the variable names; False if there is none or it failed."""
    path = os.environ.get(variable)
    if not path:
        return False
    try:
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            json.dump(note, file)
        os.replace(f"{path}.part", path)
    except OSError:
        return False
    return True
