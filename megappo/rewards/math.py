"""Reward for mathematical answers: `math-verify` decides whether response and ground truth mean the same.

Both are parsed to sympy expressions, so 1/2, 0.5 and \\frac{1}{2} are equal.
"""

from __future__ import annotations

import logging
from typing import Any

from megappo.errors import UserError

INSTALL = "install the extra: pip install 'megappo[math]'"
LIBRARY_TIMEOUT_S = 5  # whole seconds for parsing, and again for comparing; the library ends the step by a signal


def load_library() -> Any:
    """The `math_verify` module, or a UserError that says how to install it."""
    try:
        import math_verify
    except ImportError as error:
        raise UserError(f"math_verify cannot be imported ({error}): {INSTALL}") from None
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # a line for each response that takes too long
    return math_verify


class MathScorer:
    """1.0 where the response's answer equals `ground_truth`, otherwise 0.0; used inside a reward process.

    The library looks for `\\boxed{…}` first (several close together are a set), then for other LaTeX, then for plain
    expressions and numbers, from the end. A response without any scores 0 and is counted in the extra `unparsable`;
    one that takes longer than 5 s to parse or compare scores 0, too. The ground truth is LaTeX (with or without
    `\\boxed{}` or `$…$`), a number, or text to compare.

    Args:
        strict: variables must have the same names, and sets are not tuples.
        float_rounding: decimal places to which numbers are compared.
    """

    def __init__(self, strict: bool = True, float_rounding: int = 6) -> None:
        self._library = load_library()
        self._rules = {"strict": bool(strict), "float_rounding": int(float_rounding)}

    def __call__(self, sample: Any) -> dict[str, float]:
        """{score, unparsable}. UserError when there is no ground truth: the data row is at fault."""
        library = self._library
        gold = self._gold(sample.ground_truth)
        targets = [library.LatexExtractionConfig(), library.ExprExtractionConfig()]
        answer = library.parse(sample.response_text, targets, parsing_timeout=LIBRARY_TIMEOUT_S)
        if not answer:
            return {"score": 0.0, "unparsable": 1.0}
        equal = library.verify(gold, answer, timeout_seconds=LIBRARY_TIMEOUT_S, **self._rules)
        return {"score": float(equal), "unparsable": 0.0}

    def _gold(self, truth: Any) -> list[Any]:
        text = "" if truth is None else str(truth).strip()
        marked = text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}"
        gold = self._library.parse(marked, [self._library.LatexExtractionConfig()], parsing_timeout=LIBRARY_TIMEOUT_S)
        if not text or not gold:
            raise UserError(f"ground truth {truth!r} holds no answer: fix reward_model.ground_truth of that row")
        return gold
