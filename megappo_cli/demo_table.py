"""`python -m megappo_cli.demo_table RUN/metrics.jsonl`: what PPO changed, as the quickstart prints it.

Accuracies are those of the first and the last evaluation. The other numbers are means over the samples of the first
and the last iteration, whose updates have moved the policy a little already.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megappo.errors import UserError

Record = Mapping[str, float]

#: (label, metric, decimals)
ROWS = (
    ("mean reward of the training answers", "critic/score/mean", 3),
    ("mean response length (tokens)", "response_length/mean", 2),
    ("entropy (nats a token)", "actor/entropy", 3),
    ("KL to the warm start (nats a token)", "actor/kl_loss", 4),
)


def read_records(path: Path) -> list[Record]:
    """The lines of a metrics.jsonl.

    Raises:
        UserError: the file is missing or is not one.
    """
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: no metrics of a run ({error}): give the metrics.jsonl of `megappo train`") from None


def accuracy(record: Record, suffix: str) -> float | None:
    """Mean over the data sources of `val/<source>/acc<suffix>`, or None without an evaluation."""
    found = [value for name, value in record.items() if name.startswith("val/") and name.endswith(f"/acc{suffix}")]
    return statistics.fmean(found) if found else None


def table(records: Sequence[Record]) -> str:
    """Before and after, aligned.

    Raises:
        UserError: the run has no iteration, or was not evaluated before and after training.
    """
    iterations = [record for record in records if "actor/entropy" in record]
    evaluated = [record for record in records if accuracy(record, "") is not None]
    if not iterations or len(evaluated) < 2:
        raise UserError("the run has no iteration between two evaluations: nothing to compare")
    lines = [("", "before PPO", f"after {iterations[-1]['step']:.0f} iterations")]
    for label, suffix in (("accuracy, greedy", ""), ("accuracy, sampled", "_sampled")):
        values = [accuracy(record, suffix) for record in (evaluated[0], evaluated[-1])]
        if None not in values:
            lines.append((f"held-out {label}", *(f"{value:.3f}" for value in values)))
    for label, name, decimals in ROWS:
        if name in iterations[0]:
            lines.append((label, *(f"{record[name]:.{decimals}f}" for record in (iterations[0], iterations[-1]))))
    return "\n".join(f"{label:<38}{before:>12}{after:>22}" for label, before, after in lines)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 1:
        sys.exit("usage: python -m megappo_cli.demo_table RUN/metrics.jsonl")
    try:
        print(table(read_records(Path(arguments[0]))))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
