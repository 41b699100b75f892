"""dram.csv.gz of runs with DRAM counters: a row per run and cell, with the parts of its change.

    python sweeps/studies/dram-bytes/compact.py FOLDER... [--alone attention.csv] [--output FILE]

FOLDER is a run folder of `measure.py`, or a folder of them. Incomplete runs have one row without
figures. `--alone` has the bytes that the kernels read outside an engine
(`sweeps/studies/dram-kernels/measure.py`). `page.py` makes README.md from the CSV.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from parts import parts_of

from nwor_bench.analysis.dram.rows import csv_rows
from nwor_bench.models.config_json import read_shape
from nwor_bench.models.pairs import read_model_config, resolve_pair
from nwor_bench.models.shape import ModelShape
from nwor_bench.records.store import RunData, read_run

TESTS = re.compile("-(1split|emptied|engine[0-9]|hold)-")
"""Runs beside the 24 cases and those of persist: they test what explains a difference."""

NOT_KEPT = re.compile("engine_args|scenario|_smallest|l2_bytes_.*(low|high|off)|bytes_(low|high)")
"""Columns of `csv_rows` that no page shows."""

PACKAGES = ("vllm", "torch", "triton")


def rows_of(folders: Sequence[Path], alone: dict[str, float]) -> list[dict[str, Any]]:
    """Rows of all runs below the folders; runs that only test an explanation come last."""
    found = [path.parent for folder in folders for path in folder.glob("**/run.json")]
    rows: list[dict[str, Any]] = []
    for folder in sorted(found, key=lambda path: (bool(TESTS.search(path.name)), path.name)):
        header = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        complete = header["status"] == "complete"
        cells = cell_rows(read_run(folder), alone) if complete else iter([{}])
        for place, row in enumerate(cells):
            facts = {"run": folder.name, "status": header["status"]}
            origin = _origin(header) | {"command": "" if place else header["command"]}
            rows.append({**facts, **row, **origin})
    return rows


def cell_rows(run: RunData, alone: dict[str, float]) -> Iterator[dict[str, Any]]:
    """A complete run's rows; those of mode stage with their parts."""
    for row in csv_rows(run):
        kept = {name: value for name, value in row.items() if not NOT_KEPT.search(name)}
        if row["nwor_mode"] == "stage":
            parts = asdict(parts_of(run, row, shape_of(str(row["pair"]))))
            kept |= {f"part_{name}": value for name, value in parts.items()}
            case = f"{row['requests']}x{row['draft_tokens']} {row['stage_by']}"
            kept["alone_read_bytes"] = alone.get(case)
        yield kept


def shape_of(pair: str) -> ModelShape:
    """The target's shape."""
    target = resolve_pair(pair).target
    config = read_model_config(target)
    assert config is not None
    return read_shape(config, "target", target)


def read_alone(table: Path) -> dict[str, float]:
    """Bytes that a window's kernels read more than stock's by themselves, `8x4 reference` -> bytes.

    The CSV's ways through a whole layer, medians over rounds.
    """
    ways = {"reference": "nwor, read", "copy": "first, copy, nwor, read"}
    rows = pd.read_csv(table, comment="#")
    found: dict[str, float] = {}
    for (requests, drafts), case in rows.groupby(["requests", "drafts"]):
        medians = case.groupby("way")["read_mb"].median()
        for how, way in ways.items():
            gap = medians[way] - medians["write, attend, read"]
            found[f"{requests}x{drafts} {how}"] = 1e6 * float(gap)
    return found


def _origin(header: dict[str, Any]) -> dict[str, Any]:
    environment = header["environment"]
    gpu = environment["gpus"][0]
    versions = {name: environment["packages"][name] for name in PACKAGES}
    return {"gpu": gpu["name"], "driver": gpu["driver"], **versions}


def main() -> None:
    """Read the folders and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--alone", type=Path)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("dram.csv.gz"))
    options = parser.parse_args()
    alone = read_alone(options.alone) if options.alone else {}
    frame = pd.DataFrame(rows_of(options.folders, alone))
    frame.to_csv(options.output, index=False, float_format="%.12g")


if __name__ == "__main__":
    main()
