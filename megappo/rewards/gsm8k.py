"""Rule reward for GSM8K: the last number after the last `####` equals the ground truth."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from megappo.errors import UserError
from megappo.rewards.base import RewardSample

METHODS = ("strict", "flexible")
MARK = "####"
# A minus sign counts unless something stands directly before it (`12-5` is a difference). Commas only where
# they separate thousands: `1,2,3` are three numbers. A trailing dot ends the sentence.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]])-)?(?:\$\s?(?P<sign2>-)?)?"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
)


def last_number(text: str) -> Decimal | None:
    """The last number of a text, exact; None when it has none."""
    found = None
    for match in _NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")):
        found = match
    if found is None:
        return None
    value = Decimal(found["digits"].replace(",", ""))
    return -value if found["sign"] or found["sign2"] else value


def extract_answer(response: str, method: str = "strict") -> Decimal | None:
    """The answer in a response: the last number after the last `####`.

    "strict": None without `####`. "flexible": falls back to the last number anywhere.
    """
    _, mark, after = response.rpartition(MARK)
    answer = last_number(after) if mark else None
    return last_number(response) if answer is None and method == "flexible" else answer


class Gsm8kReward:
    """1.0 where the extracted answer equals the ground truth as a number, otherwise 0.0.

    Runs in the calling process: a fixed regular expression, linear in the text, cannot hang.
    """

    def __init__(self, method: str = "strict", name: str = "gsm8k") -> None:
        if method not in METHODS:
            raise UserError(f"rewards: gsm8k kwargs.method is '{method}': use one of {', '.join(METHODS)}")
        self.method, self.name = method, name

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        """Raises UserError for a sample whose ground truth holds no number."""
        return [float(extract_answer(sample.response_text, self.method) == self._truth(sample)) for sample in samples]

    def _truth(self, sample: RewardSample) -> Decimal:
        truth: Any = sample.ground_truth
        number = None if truth is None else last_number(str(truth).rpartition(MARK)[2])
        if number is None:
            raise UserError(
                f"reward '{self.name}': {sample}: ground truth {truth!r} holds no number: "
                "fix reward_model.ground_truth of that row"
            )
        return number
