"""A measurement's rows and facts in one CSV, and the page made of them.

The facts stand in lines before the table, `# name: JSON`: the command, the machine, and what the
script adds.
"""

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_bench.instruments import environment
from nwor_bench.records.json_part import to_json

Facts = dict[str, Any]
"""How it was measured: `command`, `environment`, and what the script adds."""

PACKAGES = ("vllm", "torch", "triton")


def save_measured(table: Path, rows: pd.DataFrame, **more: object) -> None:
    """Write the CSV with its facts; the folder is made if it is not there."""
    table.parent.mkdir(parents=True, exist_ok=True)
    known = environment.collect()
    machine = {
        "gpus": [{"name": gpu.name, "driver": gpu.driver} for gpu in known.gpus],
        "packages": {name: known.packages[name] for name in PACKAGES},
        "git": to_json(known.git),
        "collected_at": known.collected_at,
    }
    facts = {"command": shlex.join(sys.argv), "environment": machine, **more}
    lines = [f"# {name}: {json.dumps(value)}\n" for name, value in facts.items()]
    table.write_text("".join(lines) + rows.to_csv(index=False), encoding="utf-8")


def read_measured(table: Path) -> tuple[pd.DataFrame, Facts]:
    """The rows and the facts."""
    text = table.read_text(encoding="utf-8")
    told = [line for line in text.splitlines() if line.startswith("# ")]
    named = (line.removeprefix("# ").partition(": ") for line in told)
    facts = {name: json.loads(value) for name, _, value in named}
    return pd.read_csv(StringIO(text), comment="#"), facts


def note_of(facts: Facts) -> str:
    """The measurement's note as a paragraph; '' if there is none."""
    return f"{facts['note']}\n\n" if "note" in facts else ""


def machine_of(facts: Facts, packages: Sequence[str]) -> str:
    """GPU, driver and these packages' versions."""
    machine = facts["environment"]
    gpu = machine["gpus"][0]
    versions = ", ".join(f"{name} {machine['packages'][name]}" for name in packages)
    return f"One {gpu['name']}, driver {gpu['driver']}, {versions}"


def write_page(table: Path, page: Path, text_of: Callable[[pd.DataFrame, Facts], str]) -> None:
    """The page of one CSV."""
    page.write_text(text_of(*read_measured(table)), encoding="utf-8")
