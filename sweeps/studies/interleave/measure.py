"""How narrow is the interval of off x off against itself, and is a planted slow-down found?

    python sweeps/studies/interleave/measure.py 8 64 256 8:device 8:host --output DIR
    python sweeps/studies/interleave/measure.py 8:none+device --runs 20 --seconds 30 --output DIR

Off x off is interleaved with other arms of itself, with the given number of requests. In the
windows of arm `device` the device spins, in those of `host` the host waits, for a share of a
window's time. If an arm spins, all other windows launch a spin of almost no cycles. The length of a
spin is measured with CUDA events before each batch. Needs a GPU. Writes a CSV for each part, one
row a group.
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

from nwor_bench.analysis.groups import find_groups
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import Sampling
from nwor_bench.plugin.interleaving import ModeSwitch
from nwor_bench.records.types import Cell, NworMode, Phase, ScvMode, WindowRecord
from nwor_bench.records.window_order import WindowOrder
from nwor_bench.run.batch import BatchPlace, window_records
from nwor_bench.run.prepare import prepare
from nwor_bench.workload.config import load_scenario, resolve
from nwor_bench.workload.run_spec import PairChoice

MIN_CYCLES = 200
"""Cycles of a spin that plants no delay, so that both arms have its launch."""

SPINS = 200
LONG_SPIN = 1_000_000
"""Cycles of the spin that measures the length of a cycle."""


class Planted:
    """Slows down the windows of some arms.

    Args:
        kinds: what each cell behind the first has: `none`, `device` or `host`.
    """

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self._kinds = ("none", *kinds)
        self._spins = "device" in kinds
        self._cycles = 0
        self._wait_s = 0.0

    def before_window(self, place: Any) -> None:
        """Spin or wait, as the window begins."""
        kind = "none" if place is None else self._kinds[place.cell]
        if self._spins:
            torch.cuda._sleep(MIN_CYCLES + self._cycles * (kind == "device"))
        if kind == "host":
            end = time.perf_counter() + self._wait_s
            while time.perf_counter() < end:
                pass

    def seconds(self) -> dict[str, float]:
        """How long each kind takes now."""
        # By a long spin, as launches take longer than short ones.
        spin_s = self._cycles * _spin_s(LONG_SPIN) / LONG_SPIN if self._spins else 0.0
        return {"none": 0.0, "device": spin_s, "host": self._wait_s}

    def aim(self, seconds: float) -> None:
        """Let each kind take so long."""
        self._wait_s = seconds
        self._cycles = int(LONG_SPIN * seconds / _spin_s(LONG_SPIN)) if self._spins else 0


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
    original = ModeSwitch.next

    def slowed(self: ModeSwitch, scheduler_output: Any, only_verifies: bool) -> Any:
        place = original(self, scheduler_output, only_verifies)
        planted.before_window(place)
        return place

    ModeSwitch.next = slowed  # type: ignore[method-assign]
    try:
        yield
    finally:
        ModeSwitch.next = original  # type: ignore[method-assign]


@dataclass(frozen=True)
class Part:
    """One stretch of measuring: so many requests, and what is planted in which arm."""

    requests: int
    kinds: tuple[str, ...]
    """One an arm beside off x off."""

    @classmethod
    def of(cls, text: str) -> "Part":
        """`8:device`, `8:none+device` and so on; without a kind no delay is planted."""
        requests, _, kinds = text.partition(":")
        return cls(int(requests), tuple((kinds or "none").split("+")))

    @property
    def name(self) -> str:
        """For a file."""
        return f"{self.requests}-{'+'.join(self.kinds)}"


class InterleavedEngine:
    """One engine that interleaves off x off with itself, with any number of requests."""

    def __init__(self, arguments: argparse.Namespace):
        requests = sorted({part.requests for part in arguments.parts})
        graphs = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [5 * number for number in requests],
        }
        engine_args: dict[str, Any] = {
            "max_num_batched_tokens": 16384,
            **({"enforce_eager": True} if arguments.eager else {"compilation_config": graphs}),
        }
        spec = resolve(
            load_scenario("ctx-1k"),
            requests=requests[-1],
            max_new_tokens=arguments.tokens,
            max_model_len=max(1024, arguments.context or 0) + arguments.tokens + 512,
            interleave="windows",
            cache_dtype=arguments.cache_dtype,
            engine_args=json.dumps(engine_args),
        )
        prepared = prepare(spec, PairChoice(pair="llama-3b-shape"), Console())
        self._engine = VllmEngine(prepared.pair, prepared.spec, arguments.output / "engine.log")
        self._blocks = prepared.plan.blocks
        self._prompts = [prepared.encode(block.prompts) for block in self._blocks[:4]]
        self._pair = prepared.pair.name
        self._sampling = Sampling(arguments.tokens, 0.0, 1.0, 0, True)
        self._context: int | None = arguments.context
        self._number = 0

    def context(self, part: Part) -> int:
        """Tokens of a prompt: 256 of 256 requests, 1,024 of fewer, if none are asked for."""
        return self._context or (256 if part.requests > 64 else 1024)

    def batch(self, part: Part) -> list[WindowRecord]:
        """The windows of one batch."""
        requests, context = part.requests, self.context(part)
        number, self._number = self._number, self._number + 1
        whole = [ids * -(-context // len(ids)) for ids in self._prompts[number % 4][:requests]]
        prompts = [ids[:context] for ids in whole]
        arms = (None, *part.kinds)
        cells = tuple(Cell(self._pair, NworMode.OFF, ScvMode.OFF, arm) for arm in arms)
        pairs = tuple((0, arm) for arm in range(1, len(cells)))
        order = WindowOrder(cells, pairs, f"planted:{number}")
        block = replace(self._blocks[0], number=1 + number)
        place = BatchPlace(cells[0], Phase.INTERLEAVED, block, number, 0, "", order)
        self._engine.interleave(order)
        try:
            output = self._engine.generate(prompts, self._sampling)
        finally:
            self._engine.stop_interleaving()
        return window_records(place, output, None)


def typical_s(windows: list[WindowRecord]) -> float:
    """A window's time without a planted delay, in seconds."""
    own = [w.device_ms for w in windows if w.arm is None and w.device_ms is not None]
    return median(own) / 1e3


def measure(
    engine: InterleavedEngine, part: Part, arguments: argparse.Namespace
) -> Iterator[pd.DataFrame]:
    """One row a group, with the truth of its batch; a table a run."""
    planted = Planted(part.kinds)
    with planting(planted):
        for _ in range(3):
            window_s = typical_s(engine.batch(part))
        for run in range(arguments.runs):
            rows: list[dict[str, Any]] = []
            planted.aim(arguments.percent / 100 * window_s)
            began = time.perf_counter()
            while time.perf_counter() - began < arguments.seconds:
                planted_s, clock = planted.seconds(), torch.cuda.clock_rate()
                windows = engine.batch(part)
                window_s = typical_s(windows)
                shared = {
                    "requests": part.requests, "cache": arguments.cache_dtype,
                    "context": engine.context(part), "run": run,
                    "seconds": time.perf_counter() - began, "window_ms": 1e3 * window_s,
                    "sm_clock_mhz": clock,
                }  # fmt: skip
                rows += [
                    {
                        **shared, "kind": kind, "truth": planted_s[kind] / window_s,
                        "batch": group.batch, "group": group.number,
                        "run_length": group.run_length, "device": group.device, "host": group.host,
                    }
                    for group in find_groups(windows).counted
                    if (kind := group.pair.treated.arm) is not None
                ]  # fmt: skip
            yield pd.DataFrame(rows)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", type=Part.of, nargs="+", help="REQUESTS[:KIND[+KIND...]]")
    parser.add_argument("--percent", type=float, default=0.3, help="of a window's time")
    parser.add_argument("--cache-dtype", default="auto")
    parser.add_argument("--context", type=int, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=512, help="a request")
    parser.add_argument("--seconds", type=float, default=60.0, help="a run")
    parser.add_argument("--runs", type=int, default=1, help="of each part")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    engine = InterleavedEngine(arguments)
    for number, part in enumerate(arguments.parts):
        name = f"{arguments.cache_dtype}-{number}-{part.name}.csv"
        for run, found in enumerate(measure(engine, part, arguments)):
            mode, header = ("a", False) if run else ("w", True)
            found.to_csv(
                arguments.output / name, mode=mode, header=header, index=False, float_format="%.6g"
            )


if __name__ == "__main__":
    main()
