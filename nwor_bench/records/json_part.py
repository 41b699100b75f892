"""Objects in run.json as dataclasses: read with their kinds checked, written with the same keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import lru_cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints


class PartError(Exception):
    """A value whose type differs from its field's, or a missing part.

    Args:
        name: dotted name of the part.
        what: the fault, as the rest of a sentence.
        value: what the part holds; None for a missing one.
    """

    def __init__(self, name: str, what: str, value: object):
        super().__init__(f"{name} {what}")
        self.name = name
        self.what = what
        self.value = value


@dataclass(frozen=True, kw_only=True)
class JsonPart:
    """Base of dataclasses whose fields are the keys of a JSON object; any field may be None."""

    absent: frozenset[str] = frozenset()
    """Fields missing from the object: their None means not recorded."""

    others: Mapping[str, Any] = field(default_factory=dict)
    """Keys of other versions, kept as read."""

    def __post_init__(self) -> None:
        if self.absent:
            without = {name for name in self.absent if getattr(self, name) is None}
            object.__setattr__(self, "absent", frozenset(without))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The keys that this version knows, in their order."""
        return tuple(each.name for each in fields(cls) if each.name not in _OWN)


_OWN = ("absent", "others")

Part = TypeVar("Part", bound=JsonPart)

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def read_part(kind: type[Part], values: Mapping[str, Any], name: str = "") -> Part:
    """The dataclass of a JSON object; `name` is the object's own, "" for the whole.

    Raises PartError for a value whose type differs from its field's.
    """
    hints = _hints(kind)  # type: ignore[arg-type]
    known = {
        key: _read(hints[key], values[key], f"{name}.{key}" if name else key)
        for key in kind.names()
        if values.get(key) is not None
    }
    return kind(
        absent=frozenset(key for key in kind.names() if key not in values),
        others={key: value for key, value in values.items() if key not in kind.names()},
        **known,
    )


def to_json(part: JsonPart | None) -> dict[str, Any]:
    """The JSON object of a part; fields that it did not have when it was read are left out."""
    if part is None:
        return {}
    own = {name: getattr(part, name) for name in part.names() if name not in part.absent}
    return {name: _plain(value) for name, value in own.items()} | dict(part.others)


def short(value: object) -> str:
    """A value in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


@lru_cache
def _hints(kind: type[JsonPart]) -> dict[str, Any]:
    """Each field's type without None, which every field may be."""
    hints = get_type_hints(kind)
    return {name: _without_none(hints[name]) for name in kind.names()}


def _without_none(hint: Any) -> Any:
    choices = [choice for choice in get_args(hint) if choice is not NoneType]
    return choices[0] if NoneType in get_args(hint) else hint


def _read(hint: Any, value: Any, name: str) -> Any:
    kind = get_origin(hint) or hint
    if kind is tuple:
        _require(isinstance(value, list | tuple), name, value, "a list")
        item = get_args(hint)[0]
        return tuple(_read(item, each, f"{name}.{place}") for place, each in enumerate(value))
    if kind is Mapping:
        _require(isinstance(value, Mapping), name, value, "an object")
        return value
    if issubclass(kind, JsonPart):
        _require(isinstance(value, Mapping), name, value, "an object")
        return read_part(kind, value, name)
    if issubclass(kind, StrEnum):
        choices = [str(choice) for choice in kind]
        _require(value in choices, name, value, f"one of {', '.join(choices)}")
        return kind(value)
    right = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    _require(right and isinstance(value, bool) == (kind is bool), name, value, _WORDS[kind])
    return value


def _require(right: bool, name: str, value: object, word: str) -> None:
    if not right:
        raise PartError(name, f"is {short(value)}, not {word}", value)


def _plain(value: Any) -> Any:
    if isinstance(value, JsonPart):
        return to_json(value)
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, StrEnum) else value
