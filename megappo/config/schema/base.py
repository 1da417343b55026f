"""What all configuration sections share: strict types, no unknown keys, and a short way to declare a key."""

from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, Strict
from pydantic.fields import FieldInfo

Dtype = Literal["fp32", "bf16"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
FloatPair = Annotated[tuple[float, float], Strict(False)]  # a YAML list of two numbers


def ordered(pair: tuple[float, float]) -> tuple[float, float]:
    """A validator for [low, high]."""
    if pair[0] >= pair[1]:
        raise ValueError("low must be below high; swap them")
    return pair


class Section(BaseModel):
    """One mapping of the YAML file. Unknown keys and wrong types are errors, never converted."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=False, allow_inf_nan=False)

    #: other spellings of a key that mean the same: alias -> key
    ALIASES: ClassVar[dict[str, str]] = {}
    #: a name that an entry may have, for sections that stand in a mapping under names of their own
    EXAMPLE: ClassVar[str] = "name"

    @classmethod
    def wrong_name(cls, name: str) -> str | None:
        """Why an entry of a mapping of such sections cannot have this name, or None."""
        return None


def key(default: Any, description: str, *, path: bool = False, **limits: Any) -> Any:
    """Declare a key: default (``...`` = required), its meaning and unit, limits (gt, ge, lt, le).

    `path` marks file-system paths; the loader makes them absolute.
    """
    extra = {"is_path": True} if path else None
    return Field(default, description=description, json_schema_extra=extra, **limits)


def sub(factory: type[Section], description: str) -> Any:
    """Declare a nested section that is present with its defaults when the file leaves it out."""
    return Field(default_factory=factory, description=description)


def is_path_field(field: FieldInfo) -> bool:
    """True if the key holds a path (or a list of paths)."""
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("is_path"))


def section_type(field: FieldInfo) -> tuple[type[Section] | None, bool]:
    """The section class a key holds (None: a plain value), and whether it holds a list of them.

    A key may also hold a mapping of them, from free names: see `is_mapping`.
    """
    annotation = field.annotation
    is_list = get_origin(annotation) is list
    for option in (annotation, *get_args(annotation)):
        if isinstance(option, type) and issubclass(option, Section):
            return option, is_list
    return None, False


def is_mapping(field: FieldInfo) -> bool:
    """True if the key holds entries under names of their own."""
    return get_origin(field.annotation) is dict
