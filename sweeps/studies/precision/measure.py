"""Detection of a known delay in every window of one cell, and coverage of its interval.

    python sweeps/studies/precision/measure.py --folder /tmp/injection [--delays 1,2,5]

Each run is a whole sweep of off x off, its A/A arm, and off x off with a wait planted in the
runner inside the time that a window is given, so that the true ratio is known: the cell's window
times over the same less the waits that were measured in them. On a CPU the host waits; on a GPU
the device does (a kernel that spins, between CUDA events), since the host runs ahead of it. The
injected cell gets its verdict by the usual rules: Holm's correction, the noise floor of the A/A
arm. Prints every run, and for each delay how many were SLOWER and how many intervals held the
truth; FOLDER/injection.csv has a row a run. Ends with 1 if fewer than nine in ten of the delays of
2 % and more were found.

A run ends when every interval is within +- 0.45 of the delay, or at --max-blocks. If batches
scatter by a tenth, as on a shared CPU, it takes a thousand short blocks to see 2 %. On a GPU with a
slow or shared host a 3B shape is host-bound, which hides the delay; deep-3b-shape.toml, three times
as deep, is device-bound:

    python sweeps/studies/precision/measure.py --delays 1 --folder /tmp/injection
        --pair sweeps/studies/precision/deep-3b-shape.toml --scenario ctx-1k --requests 8
        --draft-tokens 4 --max-new-tokens 96 --max-blocks 24
        --engine-args '{"compilation_config": ...}'
"""

import argparse
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from nwor_bench.engine.preload import run_under_one_openmp

run_under_one_openmp()

import pandas as pd  # noqa: E402
from delayed_engine import INJECTED, DelayedEngine  # noqa: E402
from rich.console import Console  # noqa: E402

from nwor_bench.analysis.analyse import analyse  # noqa: E402
from nwor_bench.engine.engine import VllmEngine  # noqa: E402
from nwor_bench.engine.protocol import Engine  # noqa: E402
from nwor_bench.instruments.environment import collect  # noqa: E402
from nwor_bench.records.store import RunData, read_run  # noqa: E402
from nwor_bench.records.types import AA, Cell, CellResult, NworMode, ScvMode, Verdict  # noqa: E402
from nwor_bench.run.execute import run_prepared  # noqa: E402
from nwor_bench.run.prepare import PairChoice, prepare  # noqa: E402
from nwor_bench.workload.config import RunSpec, load_scenario, resolve  # noqa: E402
from nwor_bench.workload.experiment import Grid  # noqa: E402

NEEDED = 0.45
"""Half-width that a run seeks, as a share of the delay."""

SIZES: dict[str, Any] = {
    "requests": 1, "draft_tokens": None, "max_new_tokens": 6, "batches": 20, "max_blocks": 1500,
    "ci_width": "5%", "engine_args": None,
}  # fmt: skip
"""Flags of `nwor-bench sweep` that a run takes, and their defaults here."""


def one_thread() -> None:
    """On a CPU, run the kernels on one thread, unless the environment says otherwise.

    A small model's threads wait for each other at every operator, and on a shared machine that
    wait is most of the noise (seen: 12 % a batch on two threads, 5 % on one). Call it before
    vLLM is imported. A GPU's host is left as any sweep has it.
    """
    if not collect().gpus:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(min(os.sched_getaffinity(0))))


class InjectedGrid(Grid):
    """off x off, its A/A arm, and the cell with the delay."""

    def cells(self, pair: str) -> tuple[Cell, ...]:
        """The cells of the base class and the injected one."""
        return (*super().cells(pair), Cell(pair, NworMode.OFF, ScvMode.OFF, INJECTED))


@dataclass(frozen=True)
class InjectedSpec(RunSpec):
    """A configuration with the injected cell."""

    @property
    def experiment(self) -> InjectedGrid:
        """The grid of modes and the injected cell."""
        return InjectedGrid.of(self)


class ManyRuns:
    """Runs one after the other on one engine; each with a seed, and so an order, of its own."""

    def __init__(self, folder: Path, pair: str, spec: RunSpec):
        self.folder, self.spec, self.pair = folder, spec, PairChoice(pair)
        folder.mkdir(parents=True)
        self._quiet = Console(file=(folder / "console.log").open("w"), width=100)
        ready = prepare(spec, self.pair, Console())
        self.engine = DelayedEngine(VllmEngine(ready.pair, spec, folder / "engine.log"))

    def run(self, number: int, name: str, **more: Any) -> tuple[RunData, list[CellResult]]:
        """One whole sweep: warm-up, gate, blocks, reports."""

        @contextmanager
        def source(_: Path | None) -> Iterator[Engine]:
            yield self.engine

        prepared = prepare(replace(self.spec, seed=number, **more), self.pair, self._quiet)
        run_prepared(prepared, self.folder / name, source, self._quiet)
        data = read_run(self.folder / name)
        if data.header.status != "complete":
            raise KeyboardInterrupt
        return data, list(analyse(data).cells)


def percent(value: float | None) -> str:
    """A fraction with two decimals."""
    return "-" if value is None else f"{100 * value:+.2f} %"


def main() -> int:
    """Run, print, count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in SIZES.items():
        kind = str if name in ("ci_width", "engine_args") else int
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    parser.add_argument("--pair", default="tiny")
    parser.add_argument("--scenario", default="short")
    parser.add_argument("--runs", type=int, default=10, help="of each delay")
    parser.add_argument("--delays", default="5,2", help="per cent of the window, by commas")
    parser.add_argument("--folder", type=Path, required=True, help="for the runs; a new one")
    args = parser.parse_args()
    one_thread()
    sizes = {name: getattr(args, name) for name in SIZES}
    base = resolve(load_scenario(args.scenario), nwor_modes="off", scv_modes="off", **sizes)
    spec = InjectedSpec(**{f.name: getattr(base, f.name) for f in fields(RunSpec)})
    runs = ManyRuns(args.folder, args.pair, spec)
    engine = runs.engine
    _, cells = runs.run(999, "pilot")
    window_ms = next(c.window_ms_mean for c in cells if c.verdict == "reference")
    assert window_ms is not None
    print(f"window: {window_ms:.3f} ms")
    good, rows = True, list[dict[str, Any]]()
    for number, share in enumerate(float(text) / 100 for text in args.delays.split(",")):
        found = held = 0
        for run in range(args.runs):
            engine.delay_s, engine.waited_ms = share * window_ms / 1e3, []
            name = f"{100 * share:g}-{run:02d}"
            data, cells = runs.run(1000 * number + run, name, ci_width=NEEDED * share)
            row = report(data, cells, engine.waited_ms)
            found, held = found + (row["verdict"] == Verdict.SLOWER), held + row["holds"]
            rows.append({"window_ms": round(window_ms, 3), "delay": share, "run": run, **row})
            # All rows so far: a run takes minutes, and the machine may stop after any.
            table = args.folder / "injection.csv"
            pd.DataFrame(rows).to_csv(table, index=False, float_format="%.6g")
        print(f"{100 * share:g} %: SLOWER in {found} of {args.runs}, truth held in {held}")
        good &= share < 0.02 or found >= 0.9 * args.runs
    engine.close()
    return int(not good)


def report(data: RunData, cells: list[CellResult], waited_ms: list[float]) -> dict[str, Any]:
    """Print one run; its row of injection.csv."""
    cell = next(c for c in cells if c.cell.arm == INJECTED)
    arm = next(c for c in cells if c.arm == AA)
    truth = true_ratio(data, waited_ms)
    assert cell.ratio_ci_low is not None
    assert cell.ratio_ci_high is not None
    assert arm.ratio_to_off is not None
    holds = cell.ratio_ci_low <= truth <= cell.ratio_ci_high
    print(
        f"  truth {percent(truth - 1)}  {cell.batches:4d} blocks  "
        f"{cell.ratio_to_off:.4f} [{cell.ratio_ci_low:.4f}, {cell.ratio_ci_high:.4f}] "
        f"{'holds it' if holds else 'misses it'}  A/A {percent(arm.ratio_to_off - 1)} "
        f"+- {percent(arm.half_width)}  {cell.verdict}",
        flush=True,
    )
    return {
        "n": cell.batches,
        "truth": truth,
        "ratio": cell.ratio_to_off,
        "ratio_low": cell.ratio_ci_low,
        "ratio_high": cell.ratio_ci_high,
        "holds": holds,
        "aa_ratio": arm.ratio_to_off,
        "aa_half_width": arm.half_width,
        "verdict": str(cell.verdict),
    }


def true_ratio(data: RunData, waited_ms: list[float]) -> float:
    """The injected cell's window times over the same times without their waits.

    The geometric mean over blocks: the time of a block's windows, over that time less the waits
    measured in them.
    """
    times: dict[int, list[float]] = defaultdict(list)
    for window in data.windows:
        if window.cell.arm == INJECTED and window.block and window.wall_ms is not None:
            times[window.block].append(window.wall_ms)
    means = [fmean(times[block]) for block in sorted(times)]
    waits = waited_ms[-len(means) :]  # the gate's batch comes before them
    logs = [math.log(ms / (ms - wait)) for ms, wait in zip(means, waits, strict=True)]
    return math.exp(fmean(logs))


if __name__ == "__main__":
    sys.exit(main())
