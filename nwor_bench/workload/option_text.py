"""Options as text and JSON have them, by the type of their field. Pure."""

from collections.abc import Sequence
from enum import Enum, StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from nwor_bench.errors import ConfigError
from nwor_bench.records.files import parse_json


def bare(kind: Any) -> Any:
    """The type without its None: `int | None` is int."""
    if get_origin(kind) in (Union, UnionType):
        return next(each for each in get_args(kind) if each is not type(None))
    return kind


def parse_as(kind: Any, flag: str, given: Any) -> Any:
    """What a flag or a file says, whether its words are known or not. Raises ConfigError."""
    if get_origin(kind) is tuple:
        words = given.split(",") if isinstance(given, str) else given
        return tuple(word.strip() for word in words)
    if get_origin(kind) is dict:
        return json_object(flag, given)
    return Path(given) if kind is Path else given


def known_words(kind: Any, flag: str, value: Any) -> Any:
    """The value with its words as members of the type. Raises ConfigError for unknown ones."""
    if get_origin(kind) is tuple:
        return _modes(get_args(kind)[0], flag, value)
    if get_origin(kind) is Literal:
        return _word(flag, value, get_args(kind))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(_word(flag, value, list(kind)))
    return value


def _word(flag: str, word: str, known: Sequence[str]) -> str:
    if word not in known:
        raise ConfigError.unknown(flag, word, [str(each) for each in known])
    return word


def _modes(kind: type[StrEnum], flag: str, words: Sequence[str]) -> tuple[StrEnum, ...]:
    text = ",".join(words)
    for word in words:
        if not word:
            raise ConfigError.for_field(flag, text, f"write for example {','.join(kind)}")
        _word(flag, word, list(kind))
    if len(set(words)) < len(words):
        raise ConfigError.for_field(flag, text, "write each mode once")
    return tuple(kind(word) for word in words)


def json_object(flag: str, given: str | dict[str, Any]) -> dict[str, Any]:
    """The object that a flag's JSON text holds, or that a file gives. Raises ConfigError."""
    if isinstance(given, dict):
        return given
    try:
        value = parse_json(given)
    except ValueError as error:
        reason = f"it is not JSON ({error}); write an object such as '{{\"name\": 1}}'"
        raise ConfigError.for_field(flag, given, reason) from error
    if not isinstance(value, dict):
        raise ConfigError.for_field(flag, given, "write a JSON object such as '{\"name\": 1}'")
    return value


def to_plain(value: Any) -> Any:
    """A field's value as JSON has it."""
    if isinstance(value, tuple):
        return [to_plain(each) for each in value]
    return value.value if isinstance(value, Enum) else value


def from_plain(kind: Any, value: Any) -> Any:
    """A field's value from what JSON has. Raises ValueError or TypeError for what is none."""
    if value is None and bare(kind) is not kind:
        return None
    kind = bare(kind)
    if get_origin(kind) is tuple:
        return tuple(from_plain(get_args(kind)[0], each) for each in value)
    return kind(value) if isinstance(kind, type) and issubclass(kind, Enum) else value
