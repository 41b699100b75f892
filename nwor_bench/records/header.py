"""What run.json must look like: damage and edits are refused by the name of the part.

A part may be missing or null (older versions, engines that never started), but not of another
kind. Going on with a run takes more of its header than reading it does.
"""

from collections.abc import Mapping
from typing import Any

from nwor_bench.errors import StoreError
from nwor_bench.records.json_text import parse_json

_OBJECTS = (
    *("scenario", "pair", "choice", "spec", "engine", "environment", "parity", "warmup"),
    "kv_gate",
    *("environment.packages", "environment.cpu", "environment.git", "environment.memory"),
    *("environment.settings", "spec.scenario", "spec.engine_args"),
)
_LISTS = ("blocks", "cells", "findings", "warnings", "violations", "environment.gpus")

_TO_GO_ON = (
    *("spec", "spec.scenario", "pair", "choice", "blocks"),
    *("environment", "environment.packages", "environment.cpu"),
)
"""Parts that say what a run was begun with."""


def read_object(text: str | bytes, place: object) -> dict[str, Any]:
    """The JSON object in a file's text; {} for JSON that is none. Raises StoreError otherwise."""
    try:
        found = parse_json(text)
    except ValueError as error:
        raise StoreError(f"{place}: not valid JSON ({error})") from error
    return found if isinstance(found, dict) else {}


def check_kinds(header: Mapping[str, Any], place: object) -> None:
    """Raises StoreError for a part of another kind than nwor-bench writes."""
    for names, kind, word in ((_OBJECTS, dict, "an object"), (_LISTS, list, "a list")):
        for name in names:
            value = part(header, name)
            if value is not None and not isinstance(value, kind):
                raise _damaged(place, name, f"is {_short(value)}, not {word}")


def check_complete(header: Mapping[str, Any], place: object) -> None:
    """Raises StoreError if a part that a run needs to go on is missing, or says it twice."""
    for name in _TO_GO_ON:
        if part(header, name) is None:
            raise _damaged(place, name, "is missing")
    told, twice = part(header, "spec.scenario"), header.get("scenario")
    if twice is not None and twice != told:
        fields = {*told, *twice}
        name = min(field for field in fields if told.get(field) != twice.get(field))
        raise _damaged(
            place,
            f"scenario.{name}",
            f"is {_short(twice.get(name))} and spec.scenario.{name} {_short(told.get(name))}",
        )


def part(header: Mapping[str, Any], name: str) -> Any:
    """The part of a dotted name; None where it or what holds it is missing."""
    found: Any = header
    for step in name.split("."):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _damaged(place: object, name: str, what: str) -> StoreError:
    return StoreError(
        f"{place}: {name} {what}: the file was changed since nwor-bench wrote it; restore it"
    )
