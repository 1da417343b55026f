"""`megappo report RUN_DIR …`: a page about finished or running runs. Reads files only; imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

RunDirs = Annotated[list[Path], typer.Argument(metavar="RUN_DIR", help="Run folders (trainer.output_dir).")]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE.html", help="The page (default: report.html in the run's folder)."),
]
Png = Annotated[Path | None, typer.Option("--png", metavar="DIR", help="Write every chart as a PNG file, too.")]


def report(run_dirs: RunDirs, out: Out = None, png: Png = None) -> Callable[[], int]:
    """Write one HTML page with the curves, samples and events of one or several runs."""

    def work() -> int:
        from megappo.observe.report import write_report

        page = write_report(run_dirs, out, png)
        print(f"report: {page}" + (f"\ncharts: {png}" if png else ""))
        return 0

    return work
