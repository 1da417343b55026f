"""GSM8K from a local raw copy to train.parquet and test.parquet in verl's layout.

    python -m megappo.data.prepare.gsm8k --raw gsm8k_raw/ --out data/gsm8k

The raw copy is the JSONL or parquet of either public release (columns `question` and `answer`). The set:
Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021 (arXiv:2110.14168).
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from megappo.data.prepare.files import INSTRUCTION, prompt_column, question_key, run_command, write_parquet
from megappo.data.prompts import JSON_LINES, PARQUET, SourceRow, read_source_rows
from megappo.errors import UserError

DATA_SOURCE = "openai/gsm8k"
_ANSWER = re.compile(r"####\s*\$?\s*(-?[0-9][0-9.,]*)\s*$")


def find_raw_files(raw: list[Path]) -> dict[str, list[Path]]:
    """Raw files of each split, told apart by `train` or `test` in the file's name.

    A folder is searched with its subfolders; the "socratic" variant of the set is left out.
    Raises UserError when a path or a split is missing.
    """
    found: dict[str, list[Path]] = {"train": [], "test": []}
    for path in raw:
        if not path.exists():
            raise UserError(f"{path}: not found: --raw takes the folder or the files of a local GSM8K copy")
        inside = path.is_dir()
        for file in sorted(path.rglob("*")) if inside else [path]:
            if file.suffix not in PARQUET + JSON_LINES or not file.is_file():
                continue
            if inside and "socratic" in str(file.relative_to(path)).lower():
                continue
            for split in found:
                if re.search(rf"(?<![a-z]){split}(?![a-z])", file.name.lower()):
                    found[split].append(file)
    for split, files in found.items():
        if not files:
            names = ", ".join(map(str, raw))
            raise UserError(
                f"--raw {names}: no {split} file: a .jsonl or .parquet with '{split}' in its name is needed"
            )
    return found


def extract_answer(answer: str, where: str) -> str:
    """The number after `####` in a GSM8K solution, without commas. UserError when there is none."""
    match = _ANSWER.search(answer.strip())
    if match is None:
        raise UserError(f"{where}: 'answer' does not end in '#### number': not a GSM8K solution")
    return match.group(1).replace(",", "").rstrip(".")


def make_row(source: SourceRow, split: str, index: int, plain: bool) -> dict[str, Any]:
    """One row in verl's layout. The raw question and solution stay in extra_info."""
    question, answer = source.data["question"], source.data["answer"]
    for name, value in (("question", question), ("answer", answer)):
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{source.where}: '{name}' must be a non-empty string")
    return {
        "data_source": DATA_SOURCE,
        "prompt": prompt_column(f"{question} {INSTRUCTION}", plain),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": extract_answer(answer, source.where)},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def prepare(raw: list[Path], out: Path, plain: bool = False) -> dict[str, int]:
    """Write both files; no question is in both, or twice in one.

    Returns the numbers of rows: train, test, overlap (dropped from train), repeated (dropped from either).
    """
    files = find_raw_files(raw)
    seen: set[str] = set()
    in_test: set[str] = set()
    rows: dict[str, list[dict[str, Any]]] = {"test": [], "train": []}  # test first: it loses nothing to train
    counts = {"train": 0, "test": 0, "overlap": 0, "repeated": 0}
    for split, kept in rows.items():
        for index, source in enumerate(read_source_rows(files[split], required=("question", "answer"))):
            row = make_row(source, split, index, plain)
            key = question_key(source.data["question"])
            if key in seen:
                counts["overlap" if split == "train" and key in in_test else "repeated"] += 1
                continue
            seen.add(key)
            kept.append(row)
        in_test = in_test or set(seen)
        counts[split] = len(kept)
    if not rows["train"]:
        raise UserError(f"{files['train'][0]}: every training question is also in the test set: wrong file?")
    for split, kept in rows.items():
        write_parquet(kept, out / f"{split}.parquet")
    return counts


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m megappo.data.prepare.gsm8k", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--raw", type=Path, nargs="+", required=True, help="folder or files of the raw set (.jsonl, .parquet)"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and test.parquet")
    parser.add_argument("--plain", action="store_true", help="prompts as plain strings instead of chats")
    args = parser.parse_args(argv)
    counts = prepare(args.raw, args.out, args.plain)
    print(
        f"{args.out}: train.parquet {counts['train']} rows, test.parquet {counts['test']} rows; dropped: "
        f"{counts['overlap']} from train that are also in test, {counts['repeated']} repeated"
    )


if __name__ == "__main__":
    run_command(main)
