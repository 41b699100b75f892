"""Compare Nsight Compute's bytes per window with those sampled in the process (PM sampling).

    nwor-bench profile ncu ...
    python sweeps/studies/profiler-cross-check/measure.py REPORT.ncu-rep RUN --profile COMMAND

NVIDIA's module `ncu_report` reads the report: put extras/python of Nsight Compute into PYTHONPATH.
RUN holds sampled windows of the same engine arguments and the same drafts (sweep --counters dram,
or `sweeps/studies/dram-bytes/measure.py`). A window of the report is compared with the mean of the
sampled off x off windows of its number in a batch. Writes ncu.csv.
"""

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from nwor_bench.records.store import RunData, read_run
from nwor_bench.records.types import BatchRecord, NworMode, Phase, ScvMode, WindowRecord

METRICS = {
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
}
UNITS = {"sector": 1, "byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9}


def measured(report: Path) -> pd.DataFrame:
    """The report's windows, with the numbers that the ranges around them carry."""
    import ncu_report  # before SciPy and PyTorch, after which it cannot read a report

    results = ncu_report.load_report(str(report))
    rows = []
    for action in (each for number in range(len(results)) for each in results[number]):
        metrics = {name: action.metric_by_name(theirs) for name, theirs in METRICS.items()}
        values = {n: m.value() * UNITS[m.unit()] for n, m in metrics.items() if m is not None}
        rows.append({name: _payload(action, name) for name in ("batch", "window")} | values)
    return pd.DataFrame(rows)


def _payload(action: Any, name: str) -> int | None:
    """Payload of our range around a result."""
    state = action.nvtx_state()
    for domain in map(state.domain_by_id, state):
        if domain.name() == "nwor-bench":
            for depth in range(len(domain.push_pop_ranges())):
                found = domain.push_pop_range(depth)
                if name in (found.name(), found.message()) and found.has_attributes():
                    return int(found.payload_as_uint64())
    return None


def sampled(run: RunData) -> dict[int, list[WindowRecord]]:
    """Sampled windows of off x off, the A/A arm's too, by number in their batch."""
    counted = (batch for batch in run.batches if batch.phase == Phase.COUNTERS)
    batches = {batch.batch for batch in counted if _is_off(batch)}
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
        pairs = (
            ("DRAM read", window["dram_read_bytes"], [w.dram_read_bytes for w in own]),
            ("DRAM written", window["dram_write_bytes"], [w.dram_write_bytes for w in own]),
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


KINDS = ("accepted", "draft")


def facts_of(run: RunData, name: str, measured: int, profile: str) -> dict[str, object]:
    """Facts for the page besides the table."""
    windows = [window for own in sampled(run).values() for window in own]
    environment = run.header.environment
    gpu, packages = environment.gpus[0], environment.packages
    taken, drafts = (sum(getattr(w, f"{what}_tokens") for w in windows) for what in KINDS)
    return {
        "profile": profile,
        "machine": f"One {gpu.name}, driver {gpu.driver}, vllm {packages['vllm']}, torch "
        f"{packages['torch']}",
        "run": name,
        "requests": max(window.num_reqs for window in windows),
        "drafts": max(window.draft_tokens // window.num_reqs for window in windows),
        "batches": len({window.batch for window in windows}),
        "acceptance": f"{taken / drafts:.2f}",
        "measured": measured,
    }


def main() -> None:
    """Read both and write the CSV, its facts in lines before the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="of profile ncu")
    parser.add_argument("run", type=Path)
    parser.add_argument("--profile", default="", help="the command that made the report")
    given = parser.parse_args()
    windows, run = measured(given.report), read_run(given.run)
    rows = rows_of(windows, sampled(run))
    facts = facts_of(run, given.run.name, len(windows), given.profile)
    header = "".join(f"# {name}: {value}\n" for name, value in facts.items())
    text = header + rows.to_csv(index=False, float_format="%.6g")
    Path(__file__).with_name("ncu.csv").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
