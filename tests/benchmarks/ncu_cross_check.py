"""Nsight Compute's bytes a window beside those that were sampled in the process (PM sampling).

    nwor-bench profile ncu --read REPORT.ncu-rep
    python tests/benchmarks/ncu_cross_check.py REPORT.windows.csv RUN --output FILE.md

RUN holds sampled windows of the same engine arguments and the same drafts (sweep --dram-counters,
or dram_table.py). A window of the report is compared with the mean of the sampled off x off windows
of its number in a batch; FILE.csv beside FILE.md has every window.
"""

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from run_machine import machine_of

from nwor_bench.records.json_part import to_json
from nwor_bench.records.store import RunData, read_run
from nwor_bench.records.types import SETTLING, BatchRecord, NworMode, Phase, ScvMode, WindowRecord

SECTOR = 32
"""Bytes of one of L2's sectors."""

WANTED = 0.03
"""What the two ways may differ by."""

TEXT = """# Nsight Compute against PM sampling, window by window

    {profile}
    python tests/benchmarks/ncu_cross_check.py {report} {run} --output {output}

{machine}; an eager engine, {requests} requests x
{drafts} drafts, off x off. Sampled: the run {run}, {batches} batches (the A/A arm's among them),
acceptance {acceptance:.2f}. Nsight Compute measured {measured} windows, in one pass.

{table}

Each window is compared with the mean of the sampled ones of its number in a batch; all of them
stand in {every}. Here are those with at least {settling} windows of their batch before them.
MB are 10^6 bytes. L2 is sectors read and written x {sector} for Nsight Compute, and all operations
(`lts__t_bytes`) for sampling.

{verdict}
"""


def sampled(run: RunData) -> dict[int, list[WindowRecord]]:
    """Sampled windows of off x off, the A/A arm's too, by number in their batch."""
    batches = {
        batch.batch for batch in run.batches if batch.phase == Phase.COUNTERS and _is_off(batch)
    }
    found: dict[int, list[WindowRecord]] = {}
    for window in run.windows:
        if window.batch in batches and window.dram_read_bytes is not None:
            found.setdefault(window.window, []).append(window)
    return found


def _is_off(batch: BatchRecord) -> bool:
    return batch.nwor_mode == NworMode.OFF and batch.scv_mode == ScvMode.OFF


def rows_of(windows: pd.DataFrame, peers: dict[int, list[WindowRecord]]) -> pd.DataFrame:
    """A row for each window and counter."""
    rows: list[dict[str, Any]] = []
    for _, window in windows.iterrows():
        own = peers[int(window["window"])]
        l2 = SECTOR * (window["l2_read_sectors"] + window["l2_write_sectors"])
        pairs = (
            ("DRAM read", window["dram_read_bytes"], [w.dram_read_bytes for w in own]),
            ("DRAM written", window["dram_write_bytes"], [w.dram_write_bytes for w in own]),
            ("L2", l2, [w.l2_bytes for w in own]),
        )
        for name, ncu, others in pairs:
            known = [float(value) for value in others if value is not None]
            if pd.isna(ncu) or not known:
                continue
            mean = fmean(known)
            rows.append(
                {
                    "batch": int(window["batch"]),
                    "window": int(window["window"]),
                    "counter": name,
                    "ncu MB": ncu / 1e6,
                    "sampled MB, mean": mean / 1e6,
                    "sampled MB, range": f"{min(known) / 1e6:.2f} to {max(known) / 1e6:.2f}",
                    "sampled windows": len(known),
                    "ncu / sampled": ncu / mean,
                }
            )
    return pd.DataFrame(rows)


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each counter, over the windows that can be compared: those behind no prefill."""
    fair = rows[rows["window"] >= SETTLING]
    ratio = fair.groupby("counter", sort=False)["ncu / sampled"]
    means = fair.groupby("counter", sort=False)[["ncu MB", "sampled MB, mean"]].mean()
    spread = ratio.agg(windows="size", mean="mean", lowest="min", highest="max")
    return means.join(spread).reset_index()


def verdict(table: pd.DataFrame) -> str:
    """Do DRAM bytes of windows that can be compared lie within what is wanted?"""
    dram = table[table["counter"].str.startswith("DRAM")]
    apart = (dram[["lowest", "highest"]] - 1).abs().max(axis=1)
    words = ", ".join(
        f"{name} {100 * off:.2f} %" for name, off in zip(dram["counter"], apart, strict=True)
    )
    within = "within" if (apart <= WANTED).all() else "NOT within"
    return f"The two differ by at most {words}: {within} the {100 * WANTED:.0f} % wanted."


def text_of(report: Path, run_folder: Path, output: Path, profile: str) -> str:
    """The whole note."""
    windows = pd.read_csv(report)
    run = read_run(run_folder)
    peers = sampled(run)
    rows = rows_of(windows, peers)
    rows.to_csv(output.with_suffix(".csv"), index=False, float_format="%.6g")
    table = summary(rows)
    all_sampled = [window for own in peers.values() for window in own]
    taken = sum(window.accepted_tokens for window in all_sampled)
    return TEXT.format(
        profile=profile,
        report=report.name,
        run=run_folder.name,
        output=output,
        machine=machine_of(to_json(run.header)),
        requests=max(window.num_reqs for window in all_sampled),
        drafts=max(w.draft_tokens // w.num_reqs for w in all_sampled),
        batches=len({window.batch for window in all_sampled}),
        acceptance=taken / sum(window.draft_tokens for window in all_sampled),
        measured=len(windows),
        table=table.to_markdown(index=False, floatfmt=("", ",.2f", ",.2f", "", *(".4f",) * 3)),
        every=output.with_suffix(".csv").name,
        settling=SETTLING,
        sector=SECTOR,
        verdict=verdict(table),
    )


def main() -> None:
    """Write the note."""
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path, help="table of profile ncu")
    parser.add_argument("run", type=Path)
    parser.add_argument("--profile", default="", help="the command that made the report")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    text = text_of(given.report, given.run, given.output, given.profile)
    given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
