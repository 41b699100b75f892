"""Shipped data files, and TOML files as strict models: faults name file, table, key and remedy."""

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from nwor_bench.errors import ConfigError, nearest
from nwor_bench.records.files import read_text
from nwor_bench.workload.options import bare, remedy


class StrictModel(BaseModel):
    """Base of all file schemas: frozen, no unknown fields, no conversion between types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class NamedFile(StrictModel):
    """Base of files with a name of their own; without one it is the file's."""

    name: str = Field(default="", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")
    description: str = ""


PACKAGE_DIR = Path(__file__).resolve().parents[1]

M = TypeVar("M", bound=StrictModel)


def resource_dir(name: str) -> Path:
    """The folder of shipped data called `name`, for example "scenarios".

    An installed wheel carries it inside the package; a checkout has it beside the package.
    Raises ConfigError when it is in neither place.
    """
    places = (PACKAGE_DIR / name, PACKAGE_DIR.parent / name)
    for place in places:
        if place.is_dir():
            return place
    looked = " and ".join(str(place) for place in places)
    problem = f"is missing (looked in {looked}); reinstall nwor-bench"
    raise ConfigError.at(f"data folder {name!r}", problem, joint=" ")


def read_toml(path: str | Path, model: type[M]) -> M:
    """Parse the file at `path` and validate it as `model`.

    Raises ConfigError when the file cannot be read, is not TOML, or has unknown, missing or
    mistyped fields; all faulty fields are named.
    """
    path = Path(path)
    text = text_of(path, "TOML")
    data = _parse(path, text)
    try:
        # Through JSON, because then a list may become a tuple and a string an enum or a path
        # although the model is strict.
        return model.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        faults = error.errors(include_url=False)
        faults.sort(key=lambda fault: fault["type"] != "extra_forbidden")  # they explain the rest
        errors = [_describe(data, model, fault).within(path) for fault in faults]
        raise ConfigError.all_of(errors) from error


def text_of(path: Path, kind: str) -> str:
    """The text of a file of this kind. Raises ConfigError if it cannot be read."""
    try:
        return read_text(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError.at(path, f"cannot be read ({reason}); name a {kind} file") from error
    except ValueError as error:
        raise ConfigError.at(path, f"is {error}") from error


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, and integers too long to convert
        lines = text.rstrip().split("\n")
        match = re.search(r"\(at line (\d+)", str(error))
        number = min(int(match.group(1)) if match else len(lines), len(lines))
        reason = re.sub(r" \(at .*\)$", "", str(error))
        line = lines[number - 1].strip()
        raise ConfigError.at(
            f"{path}:{number}",
            f"{line!r} is not valid TOML ({reason}); "
            'write `field = value`, with text in "double quotes"',
            line,
        ) from error


def _describe(data: dict[str, Any], model: type[StrictModel], fault: ErrorDetails) -> ConfigError:
    loc = fault["loc"]
    known = _known_path(data, loc)
    if fault["type"] == "missing":
        known += (loc[-1],)
    field = dotted(known) or "the file"
    if fault["type"] == "missing":
        return ConfigError.at(field, f"is missing; add `{loc[-1]} = ...`")
    if fault["type"] == "extra_forbidden":
        names = sorted(_field_names(model, loc[:-1]))
        offer, near = nearest(str(loc[-1]), names)
        problem = f"unknown field; {offer}"
        value = fault["input"]
        return ConfigError.at(field, problem, value, joint=f"{_value(value)}: ", near=near)
    return ConfigError.for_field(field, fault["input"], remedy(fault))


def _known_path(data: Any, loc: Sequence[str | int]) -> tuple[str | int, ...]:
    """The parts of `loc` that the file holds, in order; leaves out the names of union members."""
    path: tuple[str | int, ...] = ()
    for part in loc:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            continue
        path += (part,)
    return path


def _value(value: object) -> str:
    """` = 3` for a message; nothing for a whole table."""
    return "" if isinstance(value, dict) else f" = {value!r}"


def dotted(path: Sequence[str | int]) -> str:
    """A field's path in messages: ("a", 0, "b") is `a[0].b`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _field_names(model: type[BaseModel], loc: Sequence[str | int]) -> set[str]:
    """Names that the table at `loc` may hold."""
    for part in loc:
        field = model.model_fields.get(str(part))
        inner = None if field is None else bare(field.annotation)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            model = inner
    return set(model.model_fields)
