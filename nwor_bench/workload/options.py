"""An option is declared once: as a field, annotated with how it is written.

    block_size: Annotated[int | None, Option("Tokens a cache block.", Panel.VLLM)] = None

Such a field gives `nwor-bench sweep` its flag, sweep files their entry, run.json its key, --resume
and `compare` what they hold runs against, and vLLM's workers their environment variable. Classes
with such fields: `RunSpec`, `ScenarioValues`, `VllmEntries`, `PairChoice`, `RunOptions`.
`nwor-bench --help` reads them, so their modules import no pydantic."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum, StrEnum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from nwor_bench.errors import ConfigError
from nwor_bench.records.files import parse_json

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def fraction(text: str) -> float | None:
    """`16%`, `16 %` and `0.16` are 0.16; None if it is not a number. `16` is 16."""
    found = _number_and_unit(text)
    if found is None or found[1] not in ("", "%"):
        return None
    return found[0] / 100 if found[1] else found[0]


def seconds(text: str) -> float | None:
    """`60`, `60s`, `1m` and `1min` are 60; None if it is not a duration."""
    found = _number_and_unit(text)
    if found is None or found[1] not in _UNITS:
        return None
    return found[0] * _UNITS[found[1]]


def _number_and_unit(text: str) -> tuple[float, str] | None:
    found = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*(%|[a-z]*)\s*", text)
    return None if found is None else (float(found.group(1)), found.group(2))


def bare(kind: Any) -> Any:
    """The type without its None: `int | None` is int."""
    if get_origin(kind) in (Union, UnionType):
        return next(each for each in get_args(kind) if each is not type(None))
    return kind


def parse_as(kind: Any, flag: str, given: Any) -> Any:
    """The value that a flag or a file gives; unknown words are kept. Raises ConfigError."""
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
    """A field's value from what JSON has. Raises ValueError or TypeError if it is not one."""
    if value is None and bare(kind) is not kind:
        return None
    kind = bare(kind)
    if get_origin(kind) is tuple:
        return tuple(from_plain(get_args(kind)[0], each) for each in value)
    return kind(value) if isinstance(kind, type) and issubclass(kind, Enum) else value


Check = Callable[[Any], str | None]
"""What to write instead of a value; None if it is fine."""


class Panel(StrEnum):
    """The groups of `nwor-bench sweep --help`, in their order."""

    GENERAL = "Options"
    MODELS = "Models"
    MODES = "Modes"
    WORKLOAD = "Workload (default: the scenario's value)"
    PRECISION = "When to stop"
    VLLM = "vLLM"
    FILES = "Files"
    PROFILING = "Profiling"


class Compare(StrEnum):
    """What `compare` does if two runs differ in an option."""

    REFUSE = "refuse"
    TELL = "tell"


@dataclass(frozen=True)
class Axis:
    """How a sweep file varies an option: it lists values there, and each makes a run."""

    place: int
    """Its place among the axes, from 1: in labels, folder names and tables."""
    label: str
    """What a run's label says, with {} for the value."""
    folder: str
    """What the name of a run's folder says."""
    is_slow: bool = False
    """Its values change after those of all other axes."""
    shares_engine: bool = False
    """Runs that differ only in it share an engine."""


@dataclass(frozen=True)
class Option:
    """How a field is written and checked; the field itself says name, type and default."""

    help: str
    """One sentence for --help."""
    panel: Panel = Panel.GENERAL
    """The group of --help that it stands in."""
    name: str | None = None
    """Name in flags and sweep files, if it is not the field's."""
    aliases: tuple[str, ...] = ()
    """Further flags of the same meaning, such as -v."""
    has_flag: bool = True
    """False if only files have it."""
    flag_variable: str | None = None
    """Environment variable that stands for the flag."""
    written: type | None = None
    """Type in flags and sweep files, if not the field's; then their default is None."""
    read: Callable[[str, Any], Any] | None = None
    """From flag and text to the value, if the field's type is not enough."""
    check: Check | None = None
    """Refuses values that the type allows."""
    table: Literal["settings", "axes"] | None = None
    """The table of a sweep file that has it."""
    axis: Axis | None = None
    """How a sweep file varies it; None if all of its runs share one value."""
    entry: tuple[str, str] | None = None
    """The field that holds it, and its key there: for entries of what vLLM takes as JSON."""
    engine_argument: str | None = None
    """vLLM's argument that it decides; --engine-args must not say it too."""
    worker_variable: str | None = None
    """Environment variable with its value for the plugin in vLLM's workers."""
    compare: Compare | None = None
    """What `compare` does if two runs differ in it."""
    is_local: bool = False
    """It concerns this process, in which no engine runs with --ray."""


@dataclass(frozen=True)
class Declared:
    """An option with the field that declares it."""

    holder: type
    field: str
    kind: Any
    """The field's type."""
    default: Any
    """None where the holder's fields replace values that stand elsewhere."""
    option: Option

    @property
    def name(self) -> str:
        """Its name in flags and sweep files."""
        return self.option.name or self.field

    @property
    def flag(self) -> str:
        """Its flag; the name in sweep files if it has none."""
        return flag_of(self.name) if self.option.has_flag else self.name

    @property
    def bare_kind(self) -> Any:
        """The field's type without its None."""
        return bare(self.kind)

    @property
    def written(self) -> Any:
        """Its type in sweep files, and in flags where these have it."""
        kind = self.option.written or self.kind
        return kind if self.written_default is not None else kind | None

    @property
    def written_default(self) -> Any:
        """The default of flags and sweep files; None leaves the field's."""
        return None if self.option.written else self.default

    def parse(self, given: Any) -> Any:
        """What a flag or a sweep file says, whether its words are known or not.

        Raises ConfigError.
        """
        if self.option.read is not None:
            return self.option.read(self.flag, given)
        return parse_as(self.bare_kind, self.flag, given)

    def read(self, given: Any) -> Any:
        """The field's value from what a flag or a sweep file says. Raises ConfigError."""
        value = known_words(self.bare_kind, self.flag, self.parse(given))
        remedy = None if self.option.check is None else self.option.check(value)
        if remedy is not None:
            shown = ",".join(given) if isinstance(given, tuple) else given
            raise ConfigError.for_field(self.flag, shown, remedy)
        return value


@cache
def declared(holder: type) -> tuple[Declared, ...]:
    """The options that a class declares, in order."""
    defaults = _defaults(holder)
    found: list[Declared] = []
    for field, annotation in holder.__annotations__.items():
        for option in getattr(annotation, "__metadata__", ()):  # what Annotated adds to a type
            kind = annotation.__origin__
            found.append(Declared(holder, field, kind, defaults.get(field), option))
    return tuple(found)


def _defaults(holder: type) -> dict[str, Any]:
    if not is_dataclass(holder):
        return {}
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(holder)
    }


def axes_of(*holders: type) -> tuple[tuple[Declared, Axis], ...]:
    """The options that sweep files vary, by their place, and how."""
    options = [each for holder in holders for each in declared(holder)]
    found = [(each, each.option.axis) for each in options if each.option.axis is not None]
    return tuple(sorted(found, key=lambda pair: pair[1].place))


def read_all(holder: type, given: dict[str, Any]) -> dict[str, Any]:
    """Fields of a holder and their values, from what was given by name; None gives nothing."""
    return {
        each.field: each.read(given[each.name])
        for each in declared(holder)
        if given.get(each.name) is not None
    }


def flag_of(name: str) -> str:
    """The command-line flag of a name: draft_tokens is --draft-tokens."""
    return "--" + name.replace("_", "-")


def within(low: float, high: float | None = None) -> Check:
    """A check of a number's bounds, both included."""

    def check(value: float) -> str | None:
        if value < low:
            return f"write {low} or more"
        return f"write {high} or less" if high is not None and value > high else None

    return check


def in_range(low: int, high: int) -> Check:
    """A check that names both bounds."""
    return lambda value: None if low <= value <= high else f"write {low} to {high}"


def names(options: Iterable[Declared]) -> tuple[str, ...]:
    """The names of options in flags and sweep files."""
    return tuple(each.name for each in options)
