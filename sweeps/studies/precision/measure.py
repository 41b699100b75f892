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
import sys
from collections import defaultdict
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from nwor_bench.engine.preload import run_under_one_openmp

run_under_one_openmp()

import pandas as pd  # noqa: E402
from many_runs import ManyRuns, add_arguments, one_thread, percent, spec_of  # noqa: E402
from waits import DeviceWait, HostWait, Wait  # noqa: E402

from nwor_bench.engine.engine import VllmEngine  # noqa: E402
from nwor_bench.engine.protocol import (  # noqa: E402
    BatchOutput,
    KvCache,
    Sampling,
)
from nwor_bench.records.cell import Arguments  # noqa: E402
from nwor_bench.records.facts import EngineStatus  # noqa: E402
from nwor_bench.records.store import RunData  # noqa: E402
from nwor_bench.records.types import AA, Cell, CellResult, NworMode, ScvMode, Verdict  # noqa: E402
from nwor_bench.workload.config import RunSpec  # noqa: E402
from nwor_bench.workload.experiment import Grid  # noqa: E402

INJECTED = Arguments("injected")
NEEDED = 0.45
"""Half-width that a run seeks, as a share of the delay."""


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


class DelayedEngine:
    """The engine, whose windows take longer in the injected cell.

    The wait stands around the runner's `sample_tokens`, outside of the plugin's hook and within
    the window's time, which ends when the hook's `sample_tokens` does.
    """

    def __init__(self, engine: VllmEngine):
        self._engine = engine
        self._injected = False
        self.delay_s = 0.0
        self.waited_ms: list[float] = []
        core = engine._llm.llm_engine.engine_core.engine_core
        worker = core.model_executor.driver_worker.worker
        self._runner, self._hook = worker.model_runner, worker.nwor_hook
        self._wait: Wait = HostWait() if self._runner.device.type == "cpu" else DeviceWait()
        self._plant()

    def _plant(self) -> None:
        execute_model, sample_tokens = self._runner.execute_model, self._runner.sample_tokens
        is_window = False

        def watched(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_window
            is_window = bool(scheduler_output.scheduled_spec_decode_tokens)
            return execute_model(scheduler_output, *args, **kwargs)

        def delayed(*args: Any, **kwargs: Any) -> Any:
            if self._injected and is_window:
                self._wait.wait(self.delay_s)
            return sample_tokens(*args, **kwargs)

        self._runner.execute_model, self._runner.sample_tokens = watched, delayed

    def status(self) -> EngineStatus:
        """The engine's."""
        return self._engine.status()

    def set_modes(self, cell: Cell) -> None:
        """Switch the delay on in the injected cell."""
        self._injected = cell.arm == INJECTED
        self._engine.set_modes(cell)

    def generate(self, prompts: Any, sampling: Sampling, **more: Any) -> BatchOutput:
        """The engine's; remembers how long the windows of this batch waited."""
        output = self._engine.generate(prompts, sampling, **more)
        waits = self._wait.take()
        if self._injected:
            self.waited_ms.append(1e3 * sum(waits) / max(1, len(waits)))
        return output

    def kv_cache(self) -> KvCache:
        """The engine's."""
        return self._engine.kv_cache()

    def close(self) -> None:
        """Nothing: the engine serves the next run."""


def main() -> int:
    """Run, print, count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(
        parser, runs=10, batches=20, requests=1, max_new_tokens=6, ci_width="5%",
        max_blocks=1500,
    )  # fmt: skip
    parser.add_argument("--delays", default="5,2", help="per cent of the window, by commas")
    args = parser.parse_args()
    one_thread()
    base = spec_of(args)
    spec = InjectedSpec(**{f.name: getattr(base, f.name) for f in fields(RunSpec)})
    runs = ManyRuns(args, spec)
    engine = DelayedEngine(runs.engine)
    _, cells = runs.run(999, "pilot", engine)
    window_ms = next(c.window_ms_mean for c in cells if c.verdict == "reference")
    assert window_ms is not None
    print(f"window: {window_ms:.3f} ms")
    good, rows = True, list[dict[str, Any]]()
    for number, share in enumerate(float(text) / 100 for text in args.delays.split(",")):
        found = held = 0
        runs.spec = replace(spec, ci_width=NEEDED * share)
        for run in range(args.runs):
            engine.delay_s, engine.waited_ms = share * window_ms / 1e3, []
            data, cells = runs.run(1000 * number + run, f"{100 * share:g}-{run:02d}", engine)
            row = report(data, cells, engine.waited_ms)
            found, held = found + (row["verdict"] == Verdict.SLOWER), held + row["holds"]
            rows.append({"window_ms": round(window_ms, 3), "delay": share, "run": run, **row})
            write_rows(rows, args.folder / "injection.csv")
        print(f"{100 * share:g} %: SLOWER in {found} of {args.runs}, truth held in {held}")
        good &= share < 0.02 or found >= 0.9 * args.runs
    runs.engine.close()
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


def write_rows(rows: list[dict[str, Any]], table: Path) -> None:
    """Write all rows so far: a run takes minutes, and the machine may stop after any run."""
    pd.DataFrame(rows).to_csv(table, index=False, float_format="%.6g")


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
