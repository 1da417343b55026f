"""Tasks of the `reasoning_gym` package to train.parquet and test.parquet in verl's layout.

    python -m megappo.data.prepare.reasoning_gym --task basic_arithmetic \\
        --config max_terms=2 --config 'operators=["+"]' --train-size 4000 --test-size 500 --seed 1 \\
        --out data/arithmetic --sft-out data/arithmetic/sft.parquet

Rows keep the generated entry and the task's configuration, so the reward `reasoning_gym` can call the
task's scorer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megappo.data.prepare.files import INSTRUCTION, prompt_column, question_key, run_command, write_parquet
from megappo.errors import UserError
from megappo.rewards.reasoning_gym import DATA_SOURCE, dump_json, load_json, load_library

CHAT_TEMPLATE, CHAT_RESPONSE = "{question}\n" + INSTRUCTION, "#### {answer}"
PLAIN_TEMPLATE, PLAIN_RESPONSE = "{question}\n", "{answer}"
MAX_TRIES_PER_ROW, MIN_TRIES = 20, 1000  # entries generated in the search for new questions


def parse_config(items: list[str]) -> dict[str, Any]:
    """`key=value` items; values are JSON where they parse as JSON, otherwise strings."""
    config: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise UserError(f"--config {item}: write key=value")
        try:
            config[key] = json.loads(value)
        except json.JSONDecodeError:
            config[key] = value
    return config


def create_dataset(task: str, config: Mapping[str, Any], seed: int, size: int) -> Any:
    """A reasoning_gym data set. UserError for an unknown task or key, or a value that the task refuses."""
    library = load_library()
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise UserError(f"--task {task}: unknown to reasoning_gym; it has: {', '.join(sorted(DATASETS))}")
    known = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"seed", "size"}
    for key in config:
        if key not in known:
            raise UserError(f"--config {key}: task '{task}' has no such key (known: {', '.join(sorted(known))})")
    try:
        return library.create_dataset(task, seed=seed, size=size, **config)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"--task {task} --config {dict(config)}: refused by the task: {reason}") from None


def _entries(task: str, config: Mapping[str, Any], seed: int, size: int, limit: int) -> Iterator[dict[str, Any]]:
    """Entries 0, 1, … of one seed, up to `limit`. Not of two seeds: entry 1 of seed s is entry 0 of s+1."""
    start = 0
    while start < limit:
        end = min(max(size, 2 * start), limit)
        dataset = create_dataset(task, config, seed, end)
        for index in range(start, end):
            yield dataset[index]
        start = end


def distinct_entries(task: str, config: Mapping[str, Any], seed: int, count: int) -> tuple[list[dict[str, Any]], int]:
    """(`count` entries with different questions, number of repeated ones skipped on the way).

    Raises UserError when the task does not have so many questions.
    """
    limit = max(MIN_TRIES, MAX_TRIES_PER_ROW * count)
    found: dict[str, dict[str, Any]] = {}
    tried = 0
    for entry in _entries(task, config, seed, count, limit):
        tried += 1
        found.setdefault(question_key(entry["question"]), entry)
        if len(found) == count:
            return list(found.values()), tried - count
    raise UserError(
        f"--task {task}: only {len(found)} different questions in {tried} tries, {count} are needed for "
        "--train-size and --test-size: lower them or widen the task with --config"
    )


def make_row(
    task: str,
    config: Mapping[str, Any],
    entry: dict[str, Any],
    split: str,
    index: int,
    template: str,
    plain: bool,
) -> dict[str, Any]:
    """One row in verl's layout. UserError when the entry cannot be stored as JSON."""
    try:
        stored = dump_json(entry)
    except (TypeError, ValueError) as error:
        raise UserError(f"--task {task}: its entries cannot be stored as JSON ({error}): use another task") from None
    answer = None if entry["answer"] is None else str(entry["answer"])
    return {
        "data_source": f"{DATA_SOURCE}/{task}",
        "prompt": prompt_column(template.replace("{question}", entry["question"]), plain),
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {
            "split": split,
            "index": index,
            "task": task,
            "config": dump_json(dict(config)),
            "entry": stored,
        },
    }


def check_scorer(task: str, config: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
    """UserError unless the task's scorer accepts the correct answers of some entries in their stored form."""
    dataset = create_dataset(task, config, seed=0, size=1)
    for row in rows[:8]:
        entry = load_json(row["extra_info"]["entry"])
        if entry["answer"] is not None and dataset.score_answer(entry["answer"], entry) < 1.0:
            raise UserError(f"--task {task}: the scorer rejects the correct answer of a stored entry: use another task")


def sft_rows(rows: list[dict[str, Any]], response: str) -> list[dict[str, Any]]:
    """Prompt/response pairs of the rows whose task knows one correct answer. UserError when none does."""
    pairs = [
        {"prompt": row["prompt"], "response": response.replace("{answer}", answer)}
        for row in rows
        if (answer := row["reward_model"]["ground_truth"]) is not None
    ]
    if not pairs:
        raise UserError("--sft-out: this task stores no correct answers, only a scorer: leave --sft-out away")
    return pairs


def check_options(args: argparse.Namespace, template: str, response: str) -> None:
    """UserError for options that cannot work, before anything is generated."""
    if "{question}" not in template:
        raise UserError(f"--template: '{template}' has no {{question}}")
    if "{answer}" not in response:
        raise UserError(f"--sft-template: '{response}' has no {{answer}}")
    if args.train_size < 1 or args.test_size < 1:
        raise UserError("--train-size and --test-size must be at least 1")
    if args.sft_out and args.sft_out.suffix != ".parquet":
        raise UserError(f"--sft-out {args.sft_out}: name a .parquet file")
    taken = [(args.out / name).absolute() for name in ("train.parquet", "test.parquet")]
    if args.sft_out and args.sft_out.absolute() in taken:
        raise UserError(f"--sft-out {args.sft_out}: is also written by --out: use another name")


def prepare(args: argparse.Namespace) -> dict[str, int]:
    """Write the files of the command line. Returns the numbers of rows: train, test, repeated, sft."""
    template = args.template or (PLAIN_TEMPLATE if args.plain else CHAT_TEMPLATE)
    response = args.sft_template or (PLAIN_RESPONSE if args.plain else CHAT_RESPONSE)
    check_options(args, template, response)
    config = parse_config(args.config)
    entries, repeated = distinct_entries(args.task, config, args.seed, args.train_size + args.test_size)
    # The test set comes first, so that another --train-size keeps it.
    splits = {"test": entries[: args.test_size], "train": entries[args.test_size :]}
    rows = {
        split: [make_row(args.task, config, e, split, i, template, args.plain) for i, e in enumerate(entries)]
        for split, entries in splits.items()
    }
    check_scorer(args.task, config, rows["train"])
    pairs = sft_rows(rows["train"], response) if args.sft_out else []
    for split, split_rows in rows.items():
        write_parquet(split_rows, args.out / f"{split}.parquet")
    if pairs:
        write_parquet(pairs, args.sft_out)
    return {"train": len(rows["train"]), "test": len(rows["test"]), "repeated": repeated, "sft": len(pairs)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m megappo.data.prepare.reasoning_gym",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", required=True, help="name of a reasoning_gym task")
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of the task (repeatable; JSON)",
    )
    parser.add_argument("--train-size", type=int, default=4096, help="training questions (default 4096)")
    parser.add_argument("--test-size", type=int, default=256, help="test questions (default 256)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and test.parquet")
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--chat", dest="plain", action="store_false", help="prompts as chats (default)")
    style.add_argument("--plain", dest="plain", action="store_true", help="prompts as plain strings")
    parser.set_defaults(plain=False)
    parser.add_argument("--template", help="prompt text around {question}")
    parser.add_argument("--sft-out", type=Path, help="parquet with prompt/response pairs of the training questions")
    parser.add_argument("--sft-template", help="response text around {answer}")
    args = parser.parse_args(argv)
    counts = prepare(args)
    print(
        f"{args.out}: train.parquet {counts['train']} rows, test.parquet {counts['test']} rows, "
        f"no question twice ({counts['repeated']} repeated ones skipped)"
    )
    if args.sft_out:
        print(f"{args.sft_out}: {counts['sft']} prompt/response pairs")


if __name__ == "__main__":
    run_command(main)
