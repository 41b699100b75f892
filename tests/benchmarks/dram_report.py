"""dram.csv and dram.md from runs with DRAM counters: what was measured, and what it is made of."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from attention_dram_table import medians
from dram_explained import (
    TESTS,
    error,
    half,
    is_outside,
    levels,
    mb,
    memory,
    read_left,
    reads,
    unexplained,
    without_splits,
)
from dram_parts import SPILLED, Parts, parts_of, split_bytes
from dram_text import TEXT
from run_machine import machine_of

from nwor_bench.analysis.comparing.stored_run import BATCHES_TABLE, WINDOWS_TABLE
from nwor_bench.analysis.dram.rows import csv_rows
from nwor_bench.models.config_json import read_shape
from nwor_bench.models.pairs import read_model_config, resolve_pair
from nwor_bench.models.shape import ModelShape
from nwor_bench.records.csv_tables import read_table
from nwor_bench.records.json_part import to_json
from nwor_bench.records.store import RECORDS_FILE, RunData, read_header, read_run
from nwor_bench.records.types import BatchRecord, WindowRecord
from nwor_kernels.verify_attention.tuning import WHOLE_PAIRS

SCRIPT = "python tests/benchmarks/dram_table.py"
HOLD = "python tests/benchmarks/dram_hold.py"


def write_report(
    roots: list[Path], output: Path, before: Path | None = None, alone: Path | None = None
) -> None:
    """Read run folders, or folders that hold some; write dram.csv and dram.md.

    Runs that did not end are named and left out. `before` is the dram.csv of an older table,
    `alone` the attention-dram.csv with what the kernels read by themselves.
    """
    found = [p.parent for root in roots for p in sorted(root.glob("**/run.json"))]
    folders = sorted(found, key=_place)
    ended = [folder for folder in folders if read_header(folder).status == "complete"]
    runs = {folder.name: read_kept(folder) for folder in ended}
    rows = [{"run": name, **row} for name, run in runs.items() for row in csv_rows(run)]
    output.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(output / "dram.csv", index=False)
    shape = _shape(rows[0]["pair"])
    kernels = medians(pd.read_csv(alone), "read_mb") if alone else {}
    staged = [row for row in rows if row["nwor_mode"] == "stage"]
    parts = [parts_of(runs[row["run"]], row, shape) for row in staged]
    pairs = list(zip(staged, parts, strict=True))
    text = TEXT.format(
        commands="\n".join(f"    {line}" for line in _commands(runs, output)),
        machine=machine_of(to_json(next(iter(runs.values())).header), ("vllm", "torch", "triton")),
        left_out=_left_out([folder.name for folder in folders if folder not in ended]),
        measured=_markdown([_measured(row) for row in rows]),
        parts=_markdown([_parts(row, part) for row, part in pairs]),
        tile=split_bytes(8 * 5 * shape.heads * len(shape.layers), shape, 2) / 2e6,
        spilled=_named([_spilled(rows, size) for rows, size in SPILLED.items()]),
        whole=WHOLE_PAIRS,
        jump=_jump(parts),
        over_tenth=_named([row["run"] for row, part in pairs if _share(row, part) > 0.1]),
        outside=_named([row["run"] for row, part in pairs if is_outside(row, part)]),
        memory=_markdown(memory(rows, pairs)),
        **levels(rows, pairs, shape),
        **without_splits(pairs),
        **read_left(staged, kernels),
        kept=_markdown(_kept(staged)),
        reads=_markdown([reads(row, kernels) for row in staged]),
        slopes=_markdown(_slopes(pairs, shape)),
        before=_markdown(_before(before, staged)) if before else "Not given.",
    )
    (output / "dram.md").write_text(text, encoding="utf-8")


def read_kept(folder: Path) -> RunData:
    """A run folder, or what `dram_table.py keep` left of one: its tables instead of its records."""
    if (folder / RECORDS_FILE).is_file():
        return read_run(folder)
    batches = read_table(folder / BATCHES_TABLE, BatchRecord)
    windows = read_table(folder / WINDOWS_TABLE, WindowRecord)
    return RunData(read_header(folder), tuple(batches), tuple(windows))


def _place(folder: Path) -> tuple[bool, str]:
    """By name; runs that only test an explanation come last."""
    return bool(TESTS.search(folder.name)), folder.name


def _commands(runs: Mapping[str, RunData], output: Path) -> list[str]:
    """Those that were run, one for each engine, and that of the table."""
    said = []
    for name, run in runs.items():
        script = HOLD if "-hold-" in name else SCRIPT
        said.append(str(run.header.command).replace("nwor-bench", script, 1))
    return [
        *dict.fromkeys(said),
        f"{SCRIPT} table {output}/dram --before {output}/dram-before.csv "
        f"--alone {output}/attention-dram.csv --output {output}",
    ]


def _left_out(names: list[str]) -> str:
    return f"\nLeft out, since they did not end: {_named(names)}." if names else ""


def _named(names: list[str]) -> str:
    return ", ".join(names) or "nothing"


def _shape(pair: str) -> ModelShape:
    target = resolve_pair(pair).target
    config = read_model_config(target)
    assert config is not None
    return read_shape(config, "target", target)


def _measured(row: dict[str, Any]) -> dict[str, str]:
    shown = {"run": row["run"], "cell": _cell(row), "in L2": _in_l2(row)}
    for name in ("write", "read"):
        field = f"dram_{name}_bytes"
        low, high = row[f"{field}_minus_off_low"], row[f"{field}_minus_off_high"]
        found = mb(row[f"{field}_minus_off_mean"], sign=True)
        shown[f"{name} MB"] = mb(row[f"{field}_mean"])
        interval = "" if low is None else f" [{mb(low, sign=True)}, {mb(high, sign=True)}]"
        shown[f"{name} - off"] = found + interval
    return {name: text for name, text in shown.items() if name != "in L2" or text}


def _cell(row: dict[str, Any]) -> str:
    arm = f" ({row['arm']})" if row["arm"] else ""
    how = f" by {row['stage_by']}" if row["nwor_mode"] == "stage" and row["stage_by"] else ""
    return f"{row['nwor_mode']}{how} x {row['scv_mode']}{arm}"


def _in_l2(row: dict[str, Any]) -> str:
    """Share of the copies' window that L2 was to keep; why not; empty where nobody asked."""
    if row["nwor_mode"] != "stage" or row["stage_l2"] != "persist":
        return ""
    if row["stage_l2_unavailable"] or row["stage_l2_hit_ratio"] is None:
        return str(row["stage_l2_unavailable"] or "not known")
    kept = f"{100 * row['stage_l2_hit_ratio']:.0f} %"
    return f"{kept} of {row['stage_l2_window_bytes'] / 1e6:.1f} MB"


def _parts(row: dict[str, Any], part: Parts) -> dict[str, str]:
    found, left = row["dram_write_bytes_minus_off_mean"], unexplained(row, part)
    return {
        "run": row["run"],
        "accepted of staged": f"{row['accepted_tokens_mean']:.1f} of {row['staged_tokens_mean']:g}",
        "write - off": mb(found, sign=True),
        "K/V": mb(part.kv, sign=True),
        "FA splits": mb(part.splits, sign=True),
        "FA lse": mb(part.log_sum_exp, sign=True),
        "spills": mb(part.spills, sign=True),
        "cut windows": mb(part.cut, sign=True),
        "unexplained": f"{mb(left, sign=True)} +- {mb(half(row))}",
        "in %": f"{100 * _share(row, part):.1f}",
        "cut": f"{part.cut_windows} of {part.windows} ({part.simulated_cuts:.1f})",
        "made": mb(part.made),
    }


def _spilled(rows: int, size: int) -> str:
    return f"{size} bytes at {rows} query rows a tile"


def _jump(parts: Iterable[Parts]) -> str:
    """What a cut window writes more, on average; '' where none was cut."""
    cut = [part for part in parts if part.cut_windows]
    count = sum(part.cut_windows for part in cut)
    return mb(sum(part.cut * part.windows for part in cut) / count) if count else ""


def _share(row: dict[str, Any], part: Parts) -> float:
    """What is left unexplained over the measured difference; not a number where unknown."""
    left = unexplained(row, part)
    return math.nan if left is None else abs(left / row["dram_write_bytes_minus_off_mean"])


def _kept(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Copies left to themselves against copies for which L2 was set aside, run by run."""
    by_name = {row["run"]: row for row in rows}
    lines = []
    for name, persist in by_name.items():
        copy = by_name.get(name.replace("persist", "copy"))
        if "persist" not in name or copy is None:
            continue
        line = {"run": name, "to stay in L2": _in_l2(persist)}
        for what in ("write", "read"):
            field = f"dram_{what}_bytes_minus_off"
            for side, row in (("copy", copy), ("persist", persist)):
                line[f"{what} - off, {side} MB"] = mb(row[f"{field}_mean"], sign=True)
            gap = persist[f"{field}_mean"] - copy[f"{field}_mean"]
            spread = mb(error((copy, persist), field))
            model = persist[f"{field}_predicted"] - copy[f"{field}_predicted"]
            line["persist - copy" if what == "write" else "the same, reads"] = (
                f"{mb(gap, sign=True)} +- {spread} (model {mb(model, sign=True)})"
            )
        lines.append(line)
    return lines


def _token_bytes(shape: ModelShape) -> float:
    return float(shape.cache_row_elements() * 2 * len(shape.layers))


def _slopes(pairs: list[tuple[dict[str, Any], Parts]], shape: ModelShape) -> list[dict[str, str]]:
    kinds: dict[str, list[tuple[dict[str, Any], Parts]]] = {}
    for row, part in pairs:
        if not TESTS.search(row["run"]):
            kinds.setdefault(row["run"].rpartition("-")[0], []).append((row, part))
    lines = []
    for kind, group in kinds.items():
        if len(group) < 2:
            continue
        field = "dram_write_bytes_minus_off"
        accepted = [row["accepted_tokens_mean"] for row, _ in group]
        found = [row[f"{field}_mean"] - part.cut for row, part in group]
        ends = [group[accepted.index(end)][0] for end in (min(accepted), max(accepted))]
        spread = error(ends, field) / (max(accepted) - min(accepted))
        slope = np.polyfit(accepted, found, 1)[0]
        lines.append(
            {
                "runs": kind,
                "acceptances": str(len(group)),
                "measured KB": f"{slope / 1e3:.1f} +- {spread / 1e3:.1f}",
                "model KB": f"{_token_bytes(shape) / 1e3:.1f}",
            }
        )
    return lines


def _before(csv: Path, rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    old = pd.read_csv(csv)
    old = old[old["nwor_mode"] == "stage"].set_index("run")["dram_write_bytes_minus_off_mean"]
    now = {row["run"]: row["dram_write_bytes_minus_off_mean"] for row in rows}
    return [
        {"run": str(name), "before": mb(was, sign=True), "now": mb(now.get(name), sign=True)}
        for name, was in old.items()
    ]


def _markdown(lines: list[dict[str, str]]) -> str:
    return str(pd.DataFrame(lines).fillna("").to_markdown(index=False, disable_numparse=True))
