"""Reward for tasks of the `reasoning_gym` package: the task's own `score_answer`.

Rows carry the task's name, its configuration and the generated entry as JSON in `extra_info`
(`megappo.data.prepare.reasoning_gym` writes them), so any machine can score them without generating data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from megappo.errors import UserError

DATA_SOURCE = "reasoning_gym"  # rows say "reasoning_gym/<task>"
MARK = "####"
_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TUPLE, _SET, _ITEMS = "__tuple__", "__set__", "__items__"


def load_library() -> Any:
    """The `reasoning_gym` module, or a UserError that says how to install it."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(
            f"reasoning_gym cannot be imported ({error}): install the extra: pip install 'megappo[reasoning]'"
        ) from None
    return reasoning_gym


def dump_json(value: Any) -> str:
    """JSON that keeps what scorers depend on and JSON forgets: tuples, sets and keys that are not strings.

    Raises TypeError for values that JSON cannot hold.
    """
    return json.dumps(_pack(value))


def load_json(text: str) -> Any:
    """Inverse of `dump_json`; plain JSON is read as it is."""
    return json.loads(text, object_hook=_unpack)


def _pack(value: Any) -> Any:
    if isinstance(value, tuple):
        return {_TUPLE: [_pack(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {_SET: sorted((_pack(item) for item in value), key=repr)}
    if isinstance(value, list):
        return [_pack(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _pack(item) for key, item in value.items()}
        return {_ITEMS: [[_pack(key), _pack(item)] for key, item in value.items()]}
    if hasattr(value, "tolist"):  # numpy numbers and arrays
        return _pack(value.tolist())
    return value


def _unpack(value: dict[str, Any]) -> Any:
    if len(value) == 1:
        (key, items), *_ = value.items()
        if key == _TUPLE:
            return tuple(items)
        if key == _SET:
            return set(items)
        if key == _ITEMS:
            return dict(items)
    return value


def extract_answer(response: str) -> str:
    """The last `<answer>…</answer>`, else what follows the last `####`, else the whole response; stripped."""
    tagged = _TAGS.findall(response)
    if tagged:
        return tagged[-1].strip()
    return response.rpartition(MARK)[2].strip()


class ReasoningGymScorer:
    """Called with a sample, returns the score of its task, usually in [0, 1].

    A scorer of the library that trips over a malformed answer (some call `int()` on it) counts as 0.0 when
    it accepts the entry's correct answer; the number of those is the extra `unparsable`.
    """

    def __init__(self) -> None:
        self._library = load_library()
        self._tasks: dict[tuple[str, str], Any] = {}

    def __call__(self, sample: Any) -> dict[str, float]:
        entry, dataset = self._entry_and_dataset(sample.extra_info)
        try:
            score = dataset.score_answer(extract_answer(sample.response_text), entry)
        except Exception:
            if entry.get("answer") is not None:
                dataset.score_answer(entry["answer"], entry)  # raises when the data, not the answer, is at fault
            return {"score": 0.0, "unparsable": 1.0}
        return {"score": float(score), "unparsable": 0.0}

    def _entry_and_dataset(self, extra_info: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        for key in ("task", "config", "entry"):
            if not isinstance(extra_info.get(key), str):
                raise UserError(
                    f"extra_info has no '{key}': write the data with python -m megappo.data.prepare.reasoning_gym"
                )
        task, config = extra_info["task"], extra_info["config"]
        if (task, config) not in self._tasks:
            self._tasks[task, config] = self._library.create_dataset(task, seed=0, size=1, **load_json(config))
        return load_json(extra_info["entry"]), self._tasks[task, config]
