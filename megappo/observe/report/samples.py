"""Sample texts by reward quantile, from `samples.jsonl` and from recorded rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.observe.report.runs import Run, json_lines, number

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
_LONGEST = 4000  # characters of a text that are shown
_NAMES = {0.0: "lowest", 0.25: "25 %", 0.5: "median", 0.75: "75 %", 1.0: "highest"}


@dataclass(frozen=True)
class Sample:
    """One response. `score` is what it is sorted by: None where the record has no number."""

    prompt: str
    response: str
    score: float | None
    source: str = ""
    truth: str = ""


@dataclass(frozen=True)
class SampleGroup:
    """The samples of one iteration: the chosen ones with their quantile, out of `total`. `by`: what sorts them."""

    title: str
    by: str
    total: int
    chosen: list[tuple[str, Sample]]


def sample_groups(run: Run) -> list[SampleGroup]:
    """Of each kind of samples the last iteration, then the first: what the model does now, and did before."""
    groups: list[SampleGroup] = []
    for tag, (first, last) in _logged(run).items():
        steps = [last] if first[0] == last[0] else [last, first]
        groups += [_group(f"{tag}, iteration {step}", "score", samples) for step, samples in steps]
    return groups + _recorded(run)


def by_quantile(samples: Sequence[Sample]) -> list[tuple[str, Sample]]:
    """Up to five samples from the lowest to the highest score, with the name of their quantile.

    Samples without a score are shown only if none has one.
    """
    scored = sorted((s for s in samples if s.score is not None and math.isfinite(s.score)), key=lambda s: s.score)
    if not scored:
        return [("", sample) for sample in samples[: len(QUANTILES)]]
    if len(scored) == 1:
        return [("only one", scored[0])]
    last = len(scored) - 1
    if last < len(QUANTILES):
        return [(_NAMES.get(i / last, f"{i / last:.0%}".replace("%", " %")), s) for i, s in enumerate(scored)]
    return [(_NAMES[q], scored[round(q * last)]) for q in QUANTILES]


def _group(title: str, by: str, samples: Sequence[Sample]) -> SampleGroup:
    distinct = list(dict.fromkeys(samples))
    return SampleGroup(title, by, len(distinct), by_quantile(distinct))


def _logged(run: Run) -> dict[str, tuple[tuple[int, list[Sample]], tuple[int, list[Sample]]]]:
    """By tag: (step, samples) of the first and of the last iteration of samples.jsonl. Keeps only these two."""
    found: dict[str, tuple[tuple[int, list[Sample]], tuple[int, list[Sample]]]] = {}
    file = run.folder / "samples.jsonl"
    for record in json_lines(file, run.notes) if file.is_file() else ():
        step, tag = number(record.get("step")), str(record.get("tag", "samples"))
        if step is None or not math.isfinite(step):
            continue
        first, last = found.get(tag, ((int(step), []), (int(step), [])))
        if int(step) != last[0]:
            last = (int(step), [])
        for at, samples in (first, last):
            if at == int(step):
                samples.append(_sample(record))
        found[tag] = (first, last)
    return found


def _sample(record: dict[str, Any]) -> Sample:
    return Sample(
        _text(record.get("prompt")),
        _text(record.get("response")),
        number(record.get("score", record.get("reward"))),
        _text(record.get("source")),
        _text(record.get("ground_truth")),
    )


def _text(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} … ({len(text) - _LONGEST} more characters)"


# ------------------------------------------------------------------ recorded rollouts
def _recorded(run: Run) -> list[SampleGroup]:
    """Rollouts of `rollout.record_dir`. They hold token ids; where a score is absent the log-prob sorts them."""
    files = _record_files(run)
    if not files:
        return []
    decode = _decoder(run)
    groups = []
    for file in dict.fromkeys((files[-1], files[0])):
        records = list(json_lines(file, run.notes))
        scored = any(number(r.get("score", r.get("reward"))) is not None for r in records)
        samples = [_rollout(record, decode, scored) for record in records]
        by = "score" if scored else "mean log-prob (no score is recorded)"
        groups.append(_group(f"recorded rollouts, iteration {int(file.stem.split('_')[-1]) + 1}", by, samples))
    return groups


def _record_files(run: Run) -> list[Path]:
    given = run.setting("rollout.record_dir")
    for folder in (Path(str(given)), run.folder / str(given)) if given else ():
        files = sorted(f for f in folder.glob("rollouts_*.jsonl") if f.stem.split("_")[-1].isdigit())
        if files:
            return files
    return []


def _rollout(record: dict[str, Any], decode: Callable[[Any], str], scored: bool) -> Sample:
    score = number(record.get("score", record.get("reward")))
    if not scored:
        logprobs = [p for p in map(number, record.get("logprobs") or []) if p is not None]
        score = sum(logprobs) / len(logprobs) if logprobs else None
    prompt, response = record.get("prompt"), record.get("response")
    return Sample(
        _text(prompt if prompt is not None else decode(record.get("prompt_ids"))),
        _text(response if response is not None else decode(record.get("response_ids"))),
        score,
        _text(record.get("source")),
        _text(record.get("ground_truth")),
    )


def _decoder(run: Run) -> Callable[[Any], str]:
    """Token ids to text with the run's tokenizer; without it the ids are the text."""
    folder = run.setting("model.tokenizer_path") or run.setting("model.path")
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(Path(str(folder)) / "tokenizer.json"))
    except Exception:  # no package, no file (the library raises a bare Exception): ids are better than nothing
        run.notes.append("Recorded rollouts are shown as token ids: the run's tokenizer.json was not found.")
        return lambda ids: " ".join(map(str, ids or []))
    return lambda ids: tokenizer.decode(list(ids or []), skip_special_tokens=False)
