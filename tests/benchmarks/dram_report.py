"""dram.csv and dram.md from runs with DRAM counters: what was measured, and what it is made of."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nwor_bench.model_config import read_shape
from nwor_bench.model_shape import ModelShape
from nwor_bench.pairs import read_model_config, resolve_pair
from nwor_bench.profiling.dram_counters import csv_rows
from nwor_bench.store import RunData, read_run
from nwor_kernels.verify_attention.partials import partial_bytes
from nwor_kernels.verify_attention.tuning import Tuning, launch_shape, programs_on, row_tiling

PROCESSORS = {"NVIDIA H200": 132, "NVIDIA H100 80GB HBM3": 132}
"""Multiprocessors, from which the attention kernel's grid follows."""

PROMPT_TOKENS = 1024
"""Of scenario ctx-1k, to which a window's context adds what has been generated."""

TEXT = """# DRAM bytes a window, by the GPU's own counters

    {command} run --requests 8 --draft-tokens 4 --stage reference copy --output DIR
    {command} run --requests 64 --draft-tokens 8 --blocks 4 --output DIR
    {command} table DIR --output sweeps/results/h200

{machine}.

Llama-3.2-3B's shape, random weights, drafts accepted by the dice (the run's last number
is the share), prompts of 1,024 tokens. Runs are named graphs-requests x drafts-acceptance. All
columns and intervals are in dram.csv.

## What was measured

{measured}

`- off` is the difference from off x off on the same windows, with its 95 % interval; off x off
against itself (A/A) shows the noise.

## What the difference in writes is made of

{parts}

- `K/V, model`: what the byte model of `nwor-bench plan` says for the drafts' K/V alone: rejected
  ones are not written, and copies into a buffer are.
- `the rest`: measured less model. It is the same at every acceptance.
- `partial results`: what mode stage's attention kernel leaves in its workspace, counted from its
  cut of the contexts (`nwor_kernels/verify_attention/partials.py`, held to the kernel by a test).
  A context that several programs share leaves a float32 tile for each of them; they are merged and
  dead soon after, but the next layer's weights push them out of the L2 cache into DRAM. Stock
  FlashAttention writes such tiles too where it splits contexts: {tile:.2f} MB for each split at
  8 x 4, and two splits would leave the rest as it is there; it has no need to split at 64 x 8.

## Bytes for each accepted token

{slopes}

Measured: the slope of `- off` over the acceptances. Model: K and V of one token in all layers.
"""


def write_report(roots: list[Path], output: Path) -> None:
    """Read run folders, or folders that hold some; write dram.csv and dram.md."""
    folders = [p.parent for root in roots for p in sorted(root.glob("**/run.json"))]
    runs = {folder.name: read_run(folder) for folder in folders}
    rows = [{"run": name, **row} for name, run in runs.items() for row in csv_rows(run)]
    output.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(output / "dram.csv", index=False)
    header = next(iter(runs.values())).header
    shape = _shape(rows[0]["pair"])
    staged = [row for row in rows if row["nwor_mode"] == "stage"]
    text = TEXT.format(
        command="python tests/benchmarks/dram_table.py",
        machine=_machine(header),
        measured=_markdown([_measured(row) for row in rows]),
        parts=_markdown([_parts(row, shape, _gpu(runs[row["run"]])) for row in staged]),
        tile=_split_bytes(shape, 8, 4) / 1e6,
        slopes=_markdown(_slopes(staged, shape)),
    )
    (output / "dram.md").write_text(text, encoding="utf-8")


def _shape(pair: str) -> ModelShape:
    target = resolve_pair(pair).target
    config = read_model_config(target)
    assert config is not None
    return read_shape(config, "target", target)


def _gpu(run: RunData) -> str:
    return str(run.header["environment"]["gpus"][0]["name"])


def _machine(header: dict[str, Any]) -> str:
    environment = header["environment"]
    gpu, packages = environment["gpus"][0], environment["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("vllm", "torch", "triton"))
    return f"One {gpu['name']}, driver {gpu['driver']}, {versions}"


def _measured(row: dict[str, Any]) -> dict[str, str]:
    shown = {"run": row["run"], "cell": _cell(row), "in L2": _in_l2(row)}
    for name in ("write", "read"):
        field = f"dram_{name}_bytes"
        low, high = row[f"{field}_minus_off_low"], row[f"{field}_minus_off_high"]
        found = _mb(row[f"{field}_minus_off_mean"], sign=True)
        shown[f"{name} MB"] = _mb(row[f"{field}_mean"])
        interval = "" if low is None else f" [{_mb(low, sign=True)}, {_mb(high, sign=True)}]"
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


def _parts(row: dict[str, Any], shape: ModelShape, gpu: str) -> dict[str, str]:
    found = row["dram_write_bytes_minus_off_mean"]
    model = row["dram_write_bytes_minus_off_predicted"]
    return {
        "run": row["run"],
        "staged by": row["stage_by"],
        "accepted of staged": f"{row['accepted_tokens_mean']:.1f} of {row['staged_tokens_mean']:g}",
        "write - off MB": _mb(found, sign=True),
        "K/V, model MB": _mb(model, sign=True),
        "the rest MB": _mb(found - model, sign=True),
        "partial results MB": _mb(_partials(row, shape, PROCESSORS[gpu])),
    }


def _partials(row: dict[str, Any], shape: ModelShape, processors: int) -> float:
    """Bytes of a window, all layers; contexts are those in the middle of a batch."""
    requests, drafts = row["requests"], row["draft_tokens"]
    window, ratio = drafts + 1, shape.heads // shape.kv_heads
    rows, _, dim = row_tiling(window, ratio, shape.head_dim)
    tuning = Tuning(programs=programs_on(processors, rows, dim))
    launch = launch_shape(window, ratio, shape.head_dim, 2, None, tuning)  # type: ignore[arg-type]
    lengths = [PROMPT_TOKENS + 12 * window // 2 + window] * requests
    one = partial_bytes(lengths, [window] * requests, shape.kv_heads, launch, launch.programs)
    return float(one * len(shape.layers))


def _split_bytes(shape: ModelShape, requests: int, drafts: int) -> float:
    """What one split of stock FlashAttention leaves: float32 output and log-sum-exp of each row."""
    rows = requests * (drafts + 1) * shape.heads
    return float(rows * (shape.head_dim + 1) * 4 * len(shape.layers))


def _slopes(rows: list[dict[str, Any]], shape: ModelShape) -> list[dict[str, str]]:
    model = shape.cache_row_elements() * 2 * len(shape.layers)
    frame = pd.DataFrame(rows)
    lines = []
    for kind, group in frame.groupby(frame["run"].str.rpartition("-")[0]):
        if len(group) < 2:
            continue
        line = {"runs": kind, "acceptances": str(len(group))}
        for name in ("write", "read"):
            difference = group[f"dram_{name}_bytes_minus_off_mean"].astype(float)
            slope = np.polyfit(group["accepted_tokens_mean"].astype(float), difference, 1)[0]
            line[f"{name} KB, measured"] = f"{slope / 1e3:.1f}"
        lines.append({**line, "model KB": f"{model / 1e3:.1f}"})
    return lines


def _markdown(lines: list[dict[str, str]]) -> str:
    return str(pd.DataFrame(lines).fillna("").to_markdown(index=False, disable_numparse=True))


def _mb(value: float | None, sign: bool = False) -> str:
    if value is None:
        return ""
    return f"{value / 1e6:{'+' if sign else ''}.2f}"
