"""A measurement's rows and facts as NAME.csv and NAME.json, and NAME.md, the page made of them."""

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_bench.instruments import environment
from nwor_bench.records.json_part import to_json

Facts = dict[str, Any]
"""How it was measured: `command`, `environment`, and what the script adds."""


def save_measured(output: Path, name: str, rows: pd.DataFrame, **more: object) -> None:
    """Write NAME.csv and NAME.json into a folder, made if it is not there."""
    output.mkdir(parents=True, exist_ok=True)
    rows.to_csv(output / f"{name}.csv", index=False)
    facts = {"command": shlex.join(sys.argv), "environment": to_json(environment.collect()), **more}
    (output / f"{name}.json").write_text(json.dumps(facts), encoding="utf-8")


def note_of(facts: Facts) -> str:
    """What a reader must know of how it was measured, as a paragraph; '' for nothing."""
    return f"{facts['note']}\n\n" if "note" in facts else ""


def write_page(
    description: str, name: str, text_of: Callable[[pd.DataFrame, Facts, Path], str]
) -> None:
    """The command of a script that makes a page: `DIR --output FOLDER`.

    What was measured is kept beside the page, so that it can be made again from there.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    folder, output = arguments.folder, arguments.output
    rows, facts = (f"{name}{ending}" for ending in (".csv", ".json"))
    if folder.resolve() != output.resolve():
        output.mkdir(parents=True, exist_ok=True)
        for kept in (rows, facts):
            shutil.copyfile(folder / kept, output / kept)
    known = json.loads((output / facts).read_text(encoding="utf-8"))
    text = text_of(pd.read_csv(output / rows), known, folder)
    (output / f"{name}.md").write_text(text, encoding="utf-8")
