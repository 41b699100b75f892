"""Is a slow-down that was planted in the A/A arm found, and is the truth inside the interval?

    python sweeps/studies/interleave/measure_planted.py --kind device --percent 1 --output DIR

Off x off takes turns with itself. In the windows of one arm the device spins (`--kind device`), or
the host waits (`--kind host`), for a per cent of a window's time; the other arm is launched the
same spin with no cycles. How long a spin takes is measured with CUDA events before each batch.
Needs a GPU. Writes one row a group: planted.csv.
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch
from rich.console import Console

from nwor_bench.analysis.interleaved.groups import find_groups
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import Sampling
from nwor_bench.plugin.interleaving import Interleaving
from nwor_bench.records.types import AA, Cell, NworMode, Phase, ScvMode, WindowRecord
from nwor_bench.run.batch_records import BatchPlace, window_records
from nwor_bench.run.prepare import prepare
from nwor_bench.workload.config import load_scenario, resolve
from nwor_bench.workload.pair_choice import PairChoice
from nwor_bench.workload.window_order import WindowOrder

LEAST_CYCLES = 200
"""Of a spin that plants nothing: its launch is what both arms share."""

SPINS = 200


class Planted:
    """Slows down the windows of the second cell."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.extra = 0.0
        """Cycles of the device, or seconds of the host."""

    def before_window(self, turn: Any) -> None:
        """Spin or wait, as the window begins."""
        slow = turn is not None and turn.cell == 1
        if self.kind == "device":
            torch.cuda._sleep(LEAST_CYCLES + int(self.extra) * slow)
        elif slow:
            end = time.perf_counter() + self.extra
            while time.perf_counter() < end:
                pass

    def seconds(self) -> float:
        """How long it takes now."""
        if self.kind == "host":
            return self.extra
        return _spin_s(LEAST_CYCLES + int(self.extra)) - _spin_s(LEAST_CYCLES)

    def aim(self, seconds: float) -> None:
        """Let it take so long."""
        self.extra = seconds
        if self.kind == "device":
            self.extra = 1e6 * seconds / _spin_s(1_000_000)


def _spin_s(cycles: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(SPINS):
        torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / SPINS


@contextmanager
def planting(planted: Planted) -> Iterator[None]:
    """Plant in every interleaved window of this process's workers."""
    original = Interleaving.next

    def slowed(self: Interleaving, scheduler_output: Any) -> Any:
        turn = original(self, scheduler_output)
        planted.before_window(turn)
        return turn

    Interleaving.next = slowed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Interleaving.next = original  # type: ignore[method-assign]


def measure(arguments: argparse.Namespace) -> pd.DataFrame:
    """One row a group, with the truth of its batch."""
    graphs = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [5 * arguments.requests],
    }
    engine_args = {"max_num_batched_tokens": 16384, "compilation_config": graphs}
    spec = resolve(
        load_scenario("ctx-1k"),
        requests=arguments.requests,
        max_new_tokens=512,
        max_model_len=2048,
        interleave="windows",
        engine_args=json.dumps(engine_args),
    )
    prepared = prepare(spec, PairChoice(pair="llama-3b-shape"), Console())
    engine = VllmEngine(prepared.pair, prepared.spec, arguments.output / "engine.log")
    cells = tuple(Cell(prepared.pair.name, NworMode.OFF, ScvMode.OFF, arm) for arm in (None, AA))
    sampling = Sampling(512, 0.0, 1.0, 0, True)
    planted, rows = Planted(arguments.kind), []

    def windows_of(number: int) -> list[WindowRecord]:
        block = prepared.plan.blocks[number % len(prepared.plan.blocks)]
        order = WindowOrder(cells, ((0, 1),), f"planted:{number}")
        place = BatchPlace(cells[0], Phase.INTERLEAVED, block, number, 0, "", order)
        engine.interleave(order)
        try:
            output = engine.generate(prepared.encode(block.prompts), sampling)
        finally:
            engine.stop_interleaving()
        return window_records(place, output, None)

    def typical_s(windows: list[WindowRecord]) -> float:
        own = [w.device_ms for w in windows if w.arm is None and w.device_ms is not None]
        return median(own) / 1e3

    with planting(planted):
        for number in range(3):
            before = typical_s(windows_of(number))
        planted.aim(arguments.percent / 100 * before)
        began, number = time.perf_counter(), 3
        while time.perf_counter() - began < arguments.seconds:
            planted_s = planted.seconds()
            windows = windows_of(number)
            truth = planted_s / typical_s(windows)
            rows += [
                {"kind": arguments.kind, "requests": arguments.requests, "truth": truth,
                 "batch": number, "group": group.number, "run_length": group.run_length,
                 "device": group.device, "host": group.host}
                for group in find_groups(windows).counted
            ]  # fmt: skip
            number += 1
    engine.close()
    return pd.DataFrame(rows)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", choices=["device", "host"], required=True)
    parser.add_argument("--percent", type=float, default=0.3, help="of a window's time")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    measure(arguments).to_csv(arguments.output / "planted.csv", index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
