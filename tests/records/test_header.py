"""run.json as a RunHeader: what is written is read back, and damage is refused by its name."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nwor_bench.errors import StoreError
from nwor_bench.records.facts import JsonPart, to_json
from nwor_bench.records.files import RUN_FILE
from nwor_bench.records.header import RunHeader, StoredSpec, parse_header
from nwor_bench.records.store import RunStore, read_header
from nwor_bench.records.types import Interleave
from nwor_bench.workload.run_spec import RunSpec

CHECKOUT = Path(__file__).resolve().parents[2]
STORED = sorted(
    path.parent
    for root in ("tests/golden", "sweeps/results")
    for path in (CHECKOUT / root).rglob(RUN_FILE)
)

TEXTS = st.text(max_size=5)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | st.integers() | FINITE | TEXTS


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(TEXTS, values, max_size=2)


JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2) | objects(inner), max_leaves=3
)


@cache
def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if type(None) in arguments:
        return st.none() | values_of(arguments[0])
    if kind is tuple:
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if kind is Mapping:
        return objects(JSON if arguments[1] is Any else values_of(arguments[1]))
    if isinstance(kind, type) and issubclass(kind, JsonPart):
        return parts(kind)
    known = {str: TEXTS, float: FINITE}
    return known[kind] if kind in known else st.from_type(kind)


@st.composite
def parts(draw: st.DrawFn, kind: type[JsonPart]) -> JsonPart:
    """A part with some fields absent, and with keys of another version."""
    hints = get_type_hints(kind)
    present = draw(st.sets(st.sampled_from(sorted(kind.model_fields))))
    known = {name: draw(values_of(hints[name])) for name in present}
    others = draw(st.dictionaries(TEXTS.map("x-{}".format), JSON, max_size=1))
    return kind(**{kind.model_fields[name].alias or name: v for name, v in known.items()}, **others)


@settings(examples(120), suppress_health_check=list(HealthCheck))
@given(parts(RunHeader))
def test_a_header_written_and_read_back_is_equal(header: RunHeader) -> None:
    text = json.dumps(to_json(header), allow_nan=False)
    assert parse_header(json.loads(text), "run.json") == header


@pytest.mark.parametrize("folder", STORED, ids=lambda folder: str(folder.relative_to(CHECKOUT)))
def test_a_stored_header_keeps_its_keys(folder: Path) -> None:
    """None of them is missing, null or new, whichever version wrote them."""
    assert to_json(read_header(folder)) == json.loads((folder / RUN_FILE).read_text())


def test_a_run_begins_with_what_is_known(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", RunHeader())
    begun = json.loads((store.folder / RUN_FILE).read_text())
    assert begun == {"format_version": 2, "status": "partial"}
    store.update(measuring_s=1.5)
    assert read_header(store.folder) == store.header
    assert "measuring_s" in store.header.model_fields_set


@pytest.mark.parametrize(
    ("values", "found", "wanted"),
    [
        ({"engine": "x"}, "engine is 'x'", "an object"),
        ({"environment": {"cpu": []}}, "environment.cpu is []", "an object"),
        ({"environment": {"gpus": {}}}, "environment.gpus is {}", "a valid array"),
        ({"environment": {"gpus": [{"name": 7}]}}, "environment.gpus.0.name is 7",
         "a valid string"),
        ({"environment": {"memory": {"total_bytes": "4 GB"}}},
         "environment.memory.total_bytes is '4 GB'", "a valid integer"),
        ({"spec": {"scenario": "short"}}, "spec.scenario is 'short'", "an object"),
        ({"spec": {"engine_args": 3}}, "spec.engine_args is 3", "an object"),
        ({"blocks": "x"}, "blocks is 'x'", "a valid array"),
        ({"blocks": [{"order": "x"}]}, "blocks.0.order is 'x'", "a valid array"),
        ({"findings": {}}, "findings is {}", "a valid array"),
        ({"measuring_s": True}, "measuring_s is True", "a valid number"),
        ({"engine": {"attached": 1}}, "engine.attached is 1", "a valid boolean"),
        ({"status": "done"}, "status is 'done'", "'complete', 'partial' or 'failed'"),
        ({"command": [60 * "x"]}, f"command is ['{35 * 'x'}...", "a valid string"),
    ],
)  # fmt: skip
def test_another_kind_is_refused_by_name(values: dict[str, Any], found: str, wanted: str) -> None:
    with pytest.raises(StoreError) as refusal:
        parse_header({"format_version": 2, **values}, "run.json")
    assert str(refusal.value) == (
        f"run.json: {found}, but input should be {wanted}: "
        "the file was changed since nwor-bench wrote it; restore it"
    )


@settings(deadline=None)
@given(st.sampled_from(STORED), JSON, st.data())
def test_any_damage_is_read_or_refused(folder: Path, value: Any, data: st.DataObject) -> None:
    """Whatever stands in place of a part: a StoreError, never another error."""
    header = json.loads((folder / RUN_FILE).read_text())
    place = header
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if not (isinstance(place[key], dict) and place[key] and data.draw(st.booleans())):
            break
        place = place[key]
    place[key] = value
    with suppress(StoreError):
        parse_header(header, "run.json")


def test_the_stored_configuration_reads_fields_of_the_run_spec() -> None:
    assert set(StoredSpec.model_fields) <= {field.name for field in fields(RunSpec)}


def test_the_configuration_stays_as_it_was_written() -> None:
    """In its order and with options that are no more: report writes run.json anew."""
    spec = {"gone": 1, "seed": 3, "draft_counts": [0, 1], "nwor_modes": ["off"]}
    header = parse_header({"format_version": 2, "spec": spec}, "run.json")
    assert header.spec.draft_counts == (0, 1)
    assert header.spec.interleave is Interleave.BATCHES  # older runs have no other
    assert json.dumps(to_json(header)) == json.dumps({"format_version": 2, "spec": spec})


@pytest.mark.parametrize("unknown", [{}, {"engine": None}])
def test_a_part_that_is_not_known_is_empty(unknown: dict[str, Any]) -> None:
    known = {"format_version": 2, "pair": {"name": "tiny"}, "measuring_s": 3}
    header = parse_header({**known, **unknown}, "run.json")
    assert (bool(header.engine), header.engine.dtype, header.pair.name) == (False, None, "tiny")
    assert header.measuring_s == 3  # a whole number is a number
    assert to_json(header) == known
    assert to_json(None) == {}
