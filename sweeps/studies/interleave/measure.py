"""How narrow is the interval of off x off against itself, and is a planted slow-down found?

    python sweeps/studies/interleave/measure.py 8 64 256 8:device 8:host --output DIR

Off x off takes turns with itself, window by window, with so many requests. In a part such as
`8:device` the device spins in the windows of one arm, in `8:host` the host waits, for a share of a
window's time; the other arm is launched the same spin with next to no cycles. How long a spin takes
is measured with CUDA events before each batch. Needs a GPU. Writes a CSV a part, one row a group.
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
LONG_SPIN = 1_000_000
"""Cycles of the spin that tells how long a cycle takes."""


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
        elif slow and self.kind == "host":
            end = time.perf_counter() + self.extra
            while time.perf_counter() < end:
                pass

    def seconds(self) -> float:
        """How long it takes now."""
        if self.kind != "device":
            return self.extra if self.kind == "host" else 0.0
        # By a long spin, as launches take longer than short ones.
        return int(self.extra) * _spin_s(LONG_SPIN) / LONG_SPIN

    def aim(self, seconds: float) -> None:
        """Let it take so long."""
        self.extra = seconds
        if self.kind == "device":
            self.extra = LONG_SPIN * seconds / _spin_s(LONG_SPIN)


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


@dataclass(frozen=True)
class Part:
    """One stretch of measuring: so many requests, and what is planted."""

    requests: int
    kind: str

    @classmethod
    def of(cls, text: str) -> "Part":
        """`8:device` and the like; without a kind nothing is planted."""
        requests, _, kind = text.partition(":")
        return cls(int(requests), kind or "none")


class InterleavedEngine:
    """One engine on which off x off takes turns with itself, with any number of requests."""

    def __init__(self, arguments: argparse.Namespace):
        requests = sorted({part.requests for part in arguments.parts})
        graphs = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [5 * number for number in requests],
        }
        engine_args: dict[str, Any] = {"max_num_batched_tokens": 16384}
        spec = resolve(
            load_scenario("ctx-1k"),
            requests=requests[-1],
            max_new_tokens=arguments.tokens,
            max_model_len=2048,
            interleave="windows",
            cache_dtype=arguments.cache_dtype,
            engine_args=json.dumps({**engine_args, "compilation_config": graphs}),
        )
        prepared = prepare(spec, PairChoice(pair="llama-3b-shape"), Console())
        self._engine = VllmEngine(prepared.pair, prepared.spec, arguments.output / "engine.log")
        self._blocks = prepared.plan.blocks
        self._prompts = [prepared.encode(block.prompts) for block in self._blocks[:4]]
        self._cells = tuple(
            Cell(prepared.pair.name, NworMode.OFF, ScvMode.OFF, arm) for arm in (None, AA)
        )
        self._sampling = Sampling(arguments.tokens, 0.0, 1.0, 0, True)
        self._number = 0

    def batch(self, requests: int) -> list[WindowRecord]:
        """The windows of one batch; 256 requests have 256 tokens of context, fewer have 1,024."""
        number, self._number = self._number, self._number + 1
        context = 256 if requests > 64 else 1024
        prompts = [ids[:context] for ids in self._prompts[number % 4][:requests]]
        order = WindowOrder(self._cells, ((0, 1),), f"planted:{number}")
        block = replace(self._blocks[0], number=1 + number)
        place = BatchPlace(self._cells[0], Phase.INTERLEAVED, block, number, 0, "", order)
        self._engine.interleave(order)
        try:
            output = self._engine.generate(prompts, self._sampling)
        finally:
            self._engine.stop_interleaving()
        return window_records(place, output, None)


def typical_s(windows: list[WindowRecord]) -> float:
    """A window's time where nothing is planted, in seconds."""
    own = [w.device_ms for w in windows if w.arm is None and w.device_ms is not None]
    return median(own) / 1e3


def measure(engine: InterleavedEngine, part: Part, arguments: argparse.Namespace) -> pd.DataFrame:
    """One row a group, with the truth of its batch."""
    planted = Planted(part.kind)
    rows: list[dict[str, Any]] = []
    with planting(planted):
        for _ in range(3):
            before = typical_s(engine.batch(part.requests))
        planted.aim(arguments.percent / 100 * before)
        began = time.perf_counter()
        while time.perf_counter() - began < arguments.seconds:
            planted_s, clock = planted.seconds(), torch.cuda.clock_rate()
            windows = engine.batch(part.requests)
            window_s = typical_s(windows)
            shared = {
                "kind": part.kind, "requests": part.requests, "cache": arguments.cache_dtype,
                "seconds": time.perf_counter() - began, "window_ms": 1e3 * window_s,
                "sm_clock_mhz": clock, "truth": planted_s / window_s,
            }  # fmt: skip
            for group in find_groups(windows).counted:
                effects = {"device": group.device, "host": group.host}
                numbers = {"batch": group.batch, "group": group.number}
                rows.append({**shared, **numbers, "run_length": group.run_length, **effects})
    return pd.DataFrame(rows)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", type=Part.of, nargs="+", help="REQUESTS[:device|:host]")
    parser.add_argument("--percent", type=float, default=0.3, help="of a window's time")
    parser.add_argument("--cache-dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=512, help="a request")
    parser.add_argument("--seconds", type=float, default=60.0, help="a part")
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    engine = InterleavedEngine(arguments)
    for number, part in enumerate(arguments.parts):
        name = f"{arguments.cache_dtype}-{number}-{part.requests}-{part.kind}.csv"
        found = measure(engine, part, arguments)
        found.to_csv(arguments.output / name, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
