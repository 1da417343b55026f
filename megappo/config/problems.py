"""What is wrong with a configuration: one line a problem, naming file or override, key, value, remedy."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from megappo.errors import UserError

_ABSENT: Any = object()


@dataclass(frozen=True)
class Problem:
    """`key` is dotted; `text` says what is wrong and what to do; `note`: worth saying, but not an error."""

    key: str
    text: str
    value: Any = _ABSENT
    note: bool = False

    def __str__(self) -> str:
        value = "" if self.value is _ABSENT else f" = {show_value(self.value)}"
        return f"{self.key}{value}: {self.text}"


@dataclass
class Sources:
    """Which keys came from the file and which from an override on the command line."""

    file: str
    overrides: dict[str, str] = field(default_factory=dict)  # dotted key -> the override as typed

    def where(self, key: str) -> str:
        """The override that set the key, a section around it or something inside it; else the file."""
        parts = key.split(".")
        for end in range(len(parts), 0, -1):
            text = self.overrides.get(".".join(parts[:end]))
            if text is not None:
                return f"override {text}"
        inside = (text for name, text in self.overrides.items() if name.startswith(key + "."))
        return next((f"override {text}" for text in inside), self.file)

    def lines(self, problems: Iterable[Problem]) -> list[str]:
        """One line for each problem, each said once."""
        return list(dict.fromkeys(f"{self.where(p.key)}: {p}" for p in problems))

    def raise_if_any(self, problems: Iterable[Problem]) -> None:
        """Raise one UserError with all errors among the problems; notes do not count."""
        lines = self.lines(p for p in problems if not p.note)
        if lines:
            raise UserError("\n".join(lines))


def show_value(value: Any, limit: int = 80) -> str:
    """A value as it would stand in YAML, on one line, shortened."""
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, str):
        text = repr(value)
    else:
        text = str(list(value)) if isinstance(value, tuple) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
