"""README.md from dram.csv.gz: measured DRAM bytes and their parts.

    python sweeps/studies/dram-bytes/page.py

before.csv beside it is what the former attention kernel moved.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from compact import TESTS, shape_of
from explained import (
    Row,
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
from parts import SPILLED, Parts, split_bytes
from text import TEXT

from nwor_bench.models.shape import ModelShape
from nwor_kernels.verify_attention.tuning import WHOLE_PAIRS

FOLDER = "sweeps/studies/dram-bytes"


def read_rows(table: Path) -> list[Row]:
    """The CSV's rows; an empty field is None."""
    frame = pd.read_csv(table).astype(object)
    return [dict(row) for row in frame.where(frame.notna(), None).to_dict("records")]


def parts_in(row: Row) -> Parts:
    """The parts of a row of mode stage."""
    return Parts(**{name: row[f"part_{name}"] for name in Parts.__dataclass_fields__})


def text_of(table: Path, before: Path) -> str:
    """The whole page."""
    found = read_rows(table)
    rows = [row for row in found if row["status"] == "complete"]
    shape = shape_of(rows[0]["pair"])
    staged = [row for row in rows if row["nwor_mode"] == "stage"]
    parts = [parts_in(row) for row in staged]
    pairs = list(zip(staged, parts, strict=True))
    slopes = _slopes(pairs, shape)
    return TEXT.format(
        answer=_answer(slopes),
        commands="\n".join(f"    {line}" for line in _commands(rows)),
        machine=_machine(rows[0]),
        left_out=_left_out([row["run"] for row in found if row["status"] != "complete"]),
        stock=_markdown(_stock(rows)),
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
        **read_left(staged),
        kept=_markdown(_kept(staged)),
        reads=_markdown([reads(row) for row in staged]),
        slopes=_markdown(slopes),
        before=_markdown(_before(before, staged)),
    )


def _answer(slopes: list[dict[str, str]]) -> str:
    """What one rejected token saves in full graphs at 8 requests."""
    found = [line for line in slopes if line["runs"] == "full-8x4"]
    if not found:
        return "No run in full CUDA graphs at 8 requests x 4 drafts was measured."
    measured, model = (found[0][name] for name in ("measured KB", "model KB"))
    return (
        f"Each rejected token saves {measured} KB of DRAM writes (predicted: {model}), "
        "measured at 8\nrequests x 4 drafts in full CUDA graphs. The rest of the difference is the "
        "attention kernel that\nstaging brings along."
    )


def _machine(row: Row) -> str:
    versions = ", ".join(f"{name} {row[name]}" for name in ("vllm", "torch", "triton"))
    return f"One {row['gpu']}, driver {row['driver']}, {versions}"


def _commands(rows: Iterable[Row]) -> list[str]:
    """Those that were run, one for each engine, and those of the table."""
    said = []
    for row in rows:
        if row["command"]:
            script = "measure_held.py" if "-hold-" in row["run"] else "measure.py"
            arguments = row["command"].removeprefix("nwor-bench").removeprefix(" run")
            said.append(f"python {FOLDER}/{script}{arguments}")
    alone = "--alone sweeps/studies/dram-kernels/attention.csv"
    return [
        *dict.fromkeys(said),
        f"python {FOLDER}/compact.py /tmp/runs/dram /tmp/runs/dramA /tmp/runs/dramB {alone}",
        f"python {FOLDER}/page.py",
    ]


def _left_out(names: list[str]) -> str:
    return f"\nLeft out, since they did not end: {_named(names)}." if names else ""


def _named(names: list[str]) -> str:
    return ", ".join(names) or "nothing"


def _stock(rows: Iterable[Row]) -> list[dict[str, str]]:
    """A line a run: what off x off moves, and the A/A arm's difference from it."""
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        if row["nwor_mode"] != "off":
            continue
        line = lines.setdefault(row["run"], {"run": row["run"]})
        for name in ("write", "read"):
            field = f"dram_{name}_bytes"
            if not row["arm"]:
                line[f"{name} MB"] = mb(row[f"{field}_mean"])
                continue
            change, low, high = (
                mb(row[f"{field}_minus_off_{part}"], sign=True) for part in ("mean", "low", "high")
            )
            line[f"{name} - off, A/A"] = f"{change} [{low}, {high}]"
    return list(lines.values())


def _in_l2(row: dict[str, Any]) -> str:
    """Share of the copies' window that L2 may keep, or why none; empty if not requested."""
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
        "cut": f"{part.cut_windows:g} of {part.windows:g} ({part.simulated_cuts:.1f})",
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
    """A table without padding: a wide one is mostly that."""
    frame = pd.DataFrame(lines).fillna("")
    header = [" | ".join(frame.columns), "|".join([" --- "] * len(frame.columns)).strip()]
    return "\n".join(f"| {row} |" for row in [*header, *map(" | ".join, frame.to_numpy())])


def main() -> None:
    """Write the page beside the CSV."""
    here = Path(__file__).parent
    text = text_of(here / "dram.csv.gz", here / "before.csv")
    (here / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
