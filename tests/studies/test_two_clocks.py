"""New runs add to the table of step and work."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

HEAD = "pair,gpu,requests,drafts,context,cache,cell,groups,step_ms\n"
KEPT = HEAD + (
    "a,H200,8,4,1024,auto,off x off,,4.80\n"
    "a,H200,8,4,1024,auto,stage x adaptive,64.0,4.70\n"
    "a,H200,8,4,8192,auto,off x off,,9.10\n"
    "text,H200,8,4,,auto,off x off,,1.20\n"
    "text,H200,8,4,,fp8,off x off,,1.30\n"
)


def test_rows_of_the_same_setting_are_replaced_and_others_stay_as_written(
    study: Callable[[str, str], ModuleType], tmp_path: Path
) -> None:
    """The context tells settings apart, and real text has none."""
    file = tmp_path / "cells.csv"
    file.write_text(KEPT)
    shared = {"gpu": "H200", "requests": 8, "drafts": 4, "cache": "auto", "cell": "off x off"}
    rows = [
        {"pair": "a", "context": 1024, "groups": None, "step_ms": 4.61234567},
        {"pair": "text", "context": None, "groups": None, "step_ms": 1.1},
        {"pair": "a", "context": 1024, "groups": 12, "step_ms": 4.5, "cell": "stage x adaptive"},
    ]
    study("two-clocks", "measure").add([shared | row for row in rows], file)
    assert file.read_text() == HEAD + (
        "a,H200,8,4,8192,auto,off x off,,9.10\n"
        "text,H200,8,4,,fp8,off x off,,1.30\n"
        "a,H200,8,4,1024,auto,off x off,,4.612346\n"
        "text,H200,8,4,,auto,off x off,,1.1\n"
        "a,H200,8,4,1024,auto,stage x adaptive,12.0,4.5\n"
    )
