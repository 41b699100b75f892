"""An error's attributes say what its message begins with, wherever it travels."""

import pickle
from typing import Any

import pytest
from refusals import refused

from nwor_bench.errors import BenchError, ConfigError, StoreError, UnsupportedVllmError

UNKNOWN = ConfigError.unknown("--pair", "tinny", ["smollm2", "tiny"])


@pytest.mark.parametrize(
    ("error", "message", "field", "value", "near"),
    [
        (ConfigError("no field"), "no field", "", None, ""),
        (StoreError.at("f.csv", "is cut", 3), "f.csv: is cut", "f.csv", 3, ""),
        (StoreError.at("f.csv", "is cut", joint=" "), "f.csv is cut", "f.csv", None, ""),
        (
            ConfigError.for_field("--seed", -1, "write 0 or more"),
            "--seed: -1 is invalid; write 0 or more",
            *("--seed", -1, ""),
        ),
        (
            UNKNOWN,
            "--pair: unknown name 'tinny'; did you mean 'tiny'?",
            *("--pair", "tinny", "tiny"),
        ),
        (
            ConfigError.unknown("--pair", "?", ["tiny"]),
            "--pair: unknown name '?'; known: tiny",
            *("--pair", "?", ""),
        ),
        (
            ConfigError.unknown("--pair", "?", map(str, range(31))),
            "--pair: unknown name '?'; there are 31 names",
            *("--pair", "?", ""),
        ),
        (
            ConfigError.unknown("--pair", "?", ["tiny"], "nwor-bench list"),
            "--pair: unknown name '?'; `nwor-bench list` shows all 1",
            *("--pair", "?", ""),
        ),
        (
            ConfigError.unknown("--pair", "TINY", ["tiny-a", "tiny-b", "tiny-mtp-c", "tiny"]),
            "--pair: unknown name 'TINY'; did you mean 'tiny', 'tiny-b' or 'tiny-a'?",
            *("--pair", "TINY", "tiny"),
        ),
        (
            ConfigError.unknown("--pair", "llama", ["llama-3b-shape", "mla"]),
            "--pair: unknown name 'llama'; did you mean 'llama-3b-shape'?",
            *("--pair", "llama", "llama-3b-shape"),
        ),
        (UNKNOWN.within("run 2"), f"run 2: {UNKNOWN}", *("run 2: --pair", "tinny", "tiny")),
        (BenchError("lost").within("run 2"), "run 2: lost", "run 2", None, ""),
        (
            ConfigError.all_of([UNKNOWN, ConfigError.at("--seed", "is none", 5)]),
            f"{UNKNOWN}\n--seed: is none",
            *("--pair", "tinny", "tiny"),
        ),
    ],
)
def test_attributes_are_those_of_the_message(
    error: BenchError, message: str, field: str, value: object, near: str
) -> None:
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert type(each) is type(error)
        assert (str(each), each.field, each.value, each.near) == (message, field, value, near)


@pytest.mark.parametrize(
    ("field", "kind", "wanted"),
    [
        ("pair", ConfigError, {}),
        ("--pair: tinny", ConfigError, {}),
        ("", ConfigError, {}),
        ("--pair", BenchError, {}),
        ("--pair", ConfigError, {"value": "tiny"}),
        ("--pair", ConfigError, {"near": ""}),
        ("--pair", ConfigError, {"naming": "--seed"}),
        ("--pair", ConfigError, {"cause": ValueError}),
    ],
)
def test_another_refusal_is_seen(
    field: str, kind: type[BenchError], wanted: dict[str, Any]
) -> None:
    """What the tests' own helper asks is asked."""
    with pytest.raises(AssertionError), refused(field, kind, **wanted):
        raise UNKNOWN


def test_the_last_parts_of_a_field_are_enough() -> None:
    for field in ("/tmp/s.toml:3: --pair", "s.toml:3: --pair", "--pair"):
        with refused(field, cause=None):
            raise UNKNOWN.within("/tmp/s.toml:3")
    with refused("--pair", UnsupportedVllmError, cause=OSError):
        raise UnsupportedVllmError.at("--pair", "is lost") from FileNotFoundError()
