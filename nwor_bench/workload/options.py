"""An option is declared once: as a field, annotated with how it is written.

    max_warmup: Annotated[int, Option("Untimed batches.", Panel.PRECISION), Ge(1)] = 15

Such a field gives a command its flag. Those of `RunSpec`, `ScenarioValues`, `VllmEntries` and
`PairChoice` give sweep files their entry, run.json its key, --resume and `compare` the values that
they compare, and vLLM's workers their environment variable too. Pydantic checks values by the
field's type. `--help` reads them, so their modules import no pydantic.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum, StrEnum
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from nwor_bench.errors import ConfigError
from nwor_bench.records.files import parse_json

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def fraction(text: str) -> float | None:
    """`16%`, `16 %` and `0.16` are 0.16; None if it is not a number. `16` is 16."""
    parsed = _number_and_unit(text)
    if parsed is None or parsed[1] not in ("", "%"):
        return None
    return parsed[0] / 100 if parsed[1] else parsed[0]


def seconds(text: str) -> float | None:
    """`60`, `60s`, `1m` and `1min` are 60; None if it is not a duration."""
    parsed = _number_and_unit(text)
    if parsed is None or parsed[1] not in _UNITS:
        return None
    return parsed[0] * _UNITS[parsed[1]]


def quantity(
    read: Callable[[str], float | None], fits: Callable[[float], bool], wanted: str
) -> Callable[[str, str], float]:
    """A reader of a flag's text; it raises ConfigError with `wanted` if the value does not fit."""

    def parse(flag: str, text: str) -> float:
        value = read(text)
        if value is None or not fits(value):
            raise ConfigError.for_field(flag, text, wanted)
        return value

    return parse


def _number_and_unit(text: str) -> tuple[float, str] | None:
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*(%|[a-z]*)\s*", text)
    return None if match is None else (float(match.group(1)), match.group(2))


def bare(kind: Any) -> Any:
    """The type without its None: `int | None` is int."""
    if get_origin(kind) in (Union, UnionType):
        return next(member for member in get_args(kind) if member is not type(None))
    return kind


_WORDINGS = (
    (r"^Input should be ", "write "),
    (r"greater than or equal to (\S+)", r"\1 or more"),
    (r"less than or equal to (\S+)", r"\1 or less"),
    (r"^write (greater|less) than", r"write a number \1 than"),
    (r"\ban object\b", "a table"),
    (r"\ba valid array\b", "a list in [brackets]"),
    (r"\ba valid string\b", 'text in "double quotes"'),
    (r"^(Tuple|List) should have at least 1 item.*", "write one value or more"),
)


def remedy(fault: "ErrorDetails") -> str:
    """The remedy for a validator's message."""
    message = re.sub(r"^(Value error|Assertion failed), ", "", fault["msg"])
    for pattern, words in _WORDINGS:
        message = re.sub(pattern, words, message)
    return message


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter  # imports must leave --help fast

    return TypeAdapter(kind)


def read_as(kind: Any, flag: str, given: Any) -> Any:
    """A value of this type from what a flag or a file gives. Raises ConfigError."""
    from pydantic import ValidationError

    plain = bare(get_args(kind)[0] if get_origin(kind) is Annotated else kind)
    value = given
    if get_origin(plain) is tuple and isinstance(given, str):
        value = [word.strip() for word in given.split(",")]
    elif get_origin(plain) is dict and isinstance(given, str):
        value = _json_of(flag, given)
    try:
        parsed = _adapter(kind).validate_python(value)
    except ValidationError as error:
        fault = error.errors()[0]
        word = get_args(plain)[0] if get_origin(plain) is tuple else plain
        known = get_args(word) if get_origin(word) is Literal else word
        if fault["type"] not in ("enum", "literal_error"):
            raise ConfigError.for_field(flag, fault["input"], remedy(fault)) from error
        if get_origin(plain) is tuple and not fault["input"]:
            wanted = f"write for example {','.join(known)}"
            raise ConfigError.for_field(flag, given, wanted) from None
        raise ConfigError.unknown(flag, str(fault["input"]), map(str, known)) from None
    if parsed == ():
        raise ConfigError.for_field(flag, value, "write one or more, or leave it out")
    if isinstance(parsed, tuple) and len(set(parsed)) < len(parsed):
        raise ConfigError.for_field(flag, ",".join(value), "write each mode once")
    return parsed


def _json_of(flag: str, text: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        reason = f"it is not JSON ({error}); write an object such as '{{\"name\": 1}}'"
        raise ConfigError.for_field(flag, text, reason) from error
    if not isinstance(value, dict):
        raise ConfigError.for_field(flag, text, "write a JSON object such as '{\"name\": 1}'")
    return value


def to_plain(value: Any) -> Any:
    """A field's value as JSON has it."""
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


ValueCheck = Callable[[Any], str | None]
"""What to write instead of a value; None if it is fine."""


def up_to(most: int) -> ValueCheck:
    """A check for numbers from 1 to this one."""
    return lambda value: None if 1 <= value <= most else f"write 1 to {most}"


class Panel(StrEnum):
    """The groups of --help, in their order."""

    GENERAL = "Options"
    WORK = "What to time"
    SHAPE = "The model's shape"
    MODELS = "Models"
    MODES = "Modes"
    WORKLOAD = "Workload (default: the scenario's value)"
    PRECISION = "When to stop"
    VLLM = "vLLM"
    ENGINE = "Engine"
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
    """The axis' place among the axes, from 1: in labels, folder names and tables."""
    label: str
    """What a run's label says, with {} for the value."""
    folder: str
    """What the name of a run's folder says."""
    is_slow: bool = False
    """The axis' values change after those of all other axes."""
    shares_engine: bool = False
    """Runs that differ only in it share an engine."""

    def words(self, value: Any) -> str:
        """The label with a value: `8 requests`, `1 request`."""
        return self.label.format(value).removesuffix("s" if value == 1 else "")


@dataclass(frozen=True)
class Option:
    """How a field is written and checked; the field itself says name, type and default."""

    help: str
    """One sentence for --help."""
    panel: Panel = Panel.GENERAL
    """The group of --help that it stands in."""
    name: str | None = None
    """Name in flags and sweep files, if it is not the field's."""
    flag: str | None = None
    """Flag, if it differs from the name."""
    aliases: tuple[str, ...] = ()
    """Further flags of the same meaning, such as -v."""
    has_flag: bool = True
    """False if only files have it."""
    flag_variable: str | None = None
    """Environment variable that stands for the flag."""
    written: type | None = None
    """Type in flags and sweep files, if not the field's; then their default is None."""
    shown: str | None = None
    """The default as a flag's text, if the field's default is what that is read as."""
    read: Callable[[str, Any], Any] | None = None
    """From flag and text to the value, if the field's type is not enough."""
    check: ValueCheck | None = None
    """Refuses values that the type allows; bounds are annotations of the type (`Ge(1)`)."""
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


@dataclass(frozen=True)
class Declared:
    """An option with the field that declares it."""

    holder: type
    field: str
    kind: Any
    """The field's type."""
    bounds: tuple[Any, ...]
    """Bounds of the field's values, from `annotated_types`."""
    default: Any
    """None if the field replaces a value of another place, such as the scenario's."""
    option: Option

    @property
    def name(self) -> str:
        """The option's name in flags and sweep files."""
        return self.option.name or self.field

    @property
    def flag(self) -> str:
        """The option's flag; the name in sweep files if it has none."""
        return self.option.flag or flag_of(self.name) if self.option.has_flag else self.name

    @property
    def bare_kind(self) -> Any:
        """The field's type without its None."""
        return bare(self.kind)

    @property
    def written(self) -> Any:
        """The option's type in flags and sweep files."""
        kind = self.option.written or (str if self.option.shown else self.kind)
        return kind if self.written_default is not None else kind | None

    @property
    def written_default(self) -> Any:
        """The default of flags and sweep files; None leaves the field's."""
        return self.option.shown or (None if self.option.written else self.default)

    def read(self, given: Any) -> Any:
        """The field's value from what a flag or a sweep file says. Raises ConfigError."""
        value = given if self.option.read is None else self.option.read(self.flag, given)
        kind = Annotated[self.bare_kind, *self.bounds] if self.bounds else self.bare_kind
        value = read_as(kind, self.flag, value)
        remedy = None if self.option.check is None else self.option.check(value)
        if remedy is not None:
            shown = ",".join(given) if isinstance(given, tuple) else given
            raise ConfigError.for_field(self.flag, shown, remedy)
        return value


@cache
def declared(holder: type) -> tuple[Declared, ...]:
    """The options that a class declares, in order."""
    defaults = _defaults(holder)
    options: list[Declared] = []
    for field, annotation in holder.__annotations__.items():
        added = getattr(annotation, "__metadata__", ())  # what Annotated adds to a type
        bounds = tuple(extra for extra in added if not isinstance(extra, Option))
        for option in added:
            if isinstance(option, Option):
                kind = annotation.__origin__
                options.append(Declared(holder, field, kind, bounds, defaults.get(field), option))
    return tuple(options)


def _defaults(holder: type) -> dict[str, Any]:
    if not is_dataclass(holder):
        return {}
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(holder)
    }


def axes_of(*holders: type) -> tuple[tuple[Declared, Axis], ...]:
    """The options that sweep files vary, by their place, and how."""
    options = [entry for holder in holders for entry in declared(holder)]
    varied = [(entry, entry.option.axis) for entry in options if entry.option.axis is not None]
    return tuple(sorted(varied, key=lambda pair: pair[1].place))


def read_all(holder: type, given: dict[str, Any]) -> dict[str, Any]:
    """Fields of a holder and their values, from what was given by name; None gives nothing."""
    return {
        entry.field: entry.read(given[entry.name])
        for entry in declared(holder)
        if given.get(entry.name) is not None
    }


def flag_of(name: str) -> str:
    """The command-line flag of a name: draft_tokens is --draft-tokens."""
    return "--" + name.replace("_", "-")


def names(options: Iterable[Declared]) -> tuple[str, ...]:
    """The names of options in flags and sweep files."""
    return tuple(entry.name for entry in options)
