"""Host time of each part of the hooks: in its place in a window, and repeated immediately.

    python sweeps/studies/hook-cost/measure_parts.py [--requests 8] [--output FILE.csv]

The 3B shape under full CUDA graphs. First the hooks as they are, in every cell. Then stage x
adaptive with a clock around each part (which adds to the time of any enclosing part). Parts that
can be repeated are repeated immediately: a plan is the same, a commit writes the same rows. The
second call's time is the work. The first call's extra time, also seen in a loop over two numbers,
is cold CPU caches: vLLM's other code has run since the last window. Needs a GPU.
"""

import argparse
import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import Sampling
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.workload.config import load_scenario, resolve
from nwor_kernels import direct_launch
from nwor_kernels.direct_launch import load_driver

PAIR = "llama-3b-shape"

CALLS = ("in a window", "again")

Row = dict[str, object]


class Parts:
    """Seconds of each part, first and again."""

    def __init__(self) -> None:
        self.first: defaultdict[str, list[float]] = defaultdict(list)
        self.again: defaultdict[str, list[float]] = defaultdict(list)
        self._repeating = False

    def timed(
        self, name: str, call: Callable[..., Any], repeats: bool = False
    ) -> Callable[..., Any]:
        """The call with a clock around it, and once more if it may be repeated."""

        def run(*args: Any, **kwargs: Any) -> Any:
            began = perf_counter()
            result = call(*args, **kwargs)
            ended = perf_counter()
            seconds = self.again if self._repeating else self.first
            seconds[name].append(ended - began)
            if repeats and not self._repeating:
                self._repeating = True  # what the call holds is then repeated too
                run(*args, **kwargs)
                self._repeating = False
            return result

        return run

    def clear(self) -> None:
        """Forget what was timed while the engine warmed up."""
        self.first.clear()
        self.again.clear()

    def rows(self) -> list[Row]:
        """A row a part and call."""
        taken = [
            (name, call, seconds[name])
            for name in self.first
            for call, seconds in zip(CALLS, (self.first, self.again), strict=True)
            if name in seconds
        ]
        return [row_of("part", *each) for each in taken]


def row_of(kind: str, name: str, call: str, seconds: list[float]) -> Row:
    """Median, 10 % and 90 % quantile in microseconds."""
    quantiles = zip(
        ("p10_us", "median_us", "p90_us"), np.quantile(seconds, [0.1, 0.5, 0.9]) * 1e6, strict=True
    )
    return {"kind": kind, "name": name, "call": call} | {k: round(v, 1) for k, v in quantiles}


def loop() -> int:
    """Work of a known size that needs next to no memory."""
    total = 0
    for number in range(100):
        total += number * number
    return total


def put_clocks(hook: Any, parts: Parts) -> None:
    """Put a clock around every part; there is no way back."""
    for name in ("begin", "replayed", "accept", "commit", "close"):
        setattr(hook.window, name, parts.timed(f"window.{name}", getattr(hook.window, name)))
    planner, staging, validator = hook._parts.planner, hook.buffers, hook.validator
    planner.plan = parts.timed("plan", planner.plan, repeats=True)
    validator.run = parts.timed("validator.run", validator.run)
    driver = load_driver()
    watched = parts.timed("cuLaunchKernelEx", driver.cuLaunchKernelEx)
    stand_in = SimpleNamespace(
        cuLaunchKernelEx=watched,
        cuFuncGetParamInfo=driver.cuFuncGetParamInfo,
        cuGetErrorName=driver.cuGetErrorName,
    )
    vars(direct_launch)["load_driver"] = lambda: stand_in
    staging._bound.clear()  # bound again, with the clock inside
    find = staging._launch

    def launch_of(*args: Any) -> Callable[..., Any]:
        return parts.timed("launch of the commit", find(*args), repeats=True)

    staging._launch = launch_of
    begin, commit = hook._begin, hook._validate_and_commit
    numbers = torch.zeros(8, dtype=torch.int32, device="cuda")
    timed_loop = parts.timed("loop", loop, repeats=True)
    torch_kernel = parts.timed("torch kernel", lambda: numbers.add_(1), repeats=True)

    def begin_and_loop(*args: Any) -> None:
        timed_loop()
        begin(*args)

    def commit_after_a_kernel(*args: Any) -> None:
        torch_kernel()
        commit(*args)

    hook._begin, hook._validate_and_commit = begin_and_loop, commit_after_a_kernel


def hook_times(engine: VllmEngine, prompts: list[list[int]], sampling: Sampling) -> list[float]:
    """Seconds of the hooks in each window of the second of two batches."""
    engine.generate(prompts, sampling)
    windows = engine.generate(prompts, sampling).windows
    return [1e-3 * w["hook_ms"] for w in windows if w["hook_ms"] is not None]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8)
    here = Path(__file__).with_name("hook-parts.csv")
    parser.add_argument("--output", type=Path, default=here)
    args = parser.parse_args()
    graphs = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [5, 5 * args.requests],
    }
    spec = resolve(
        load_scenario("ctx-1k"),
        requests=args.requests,
        draft_tokens=4,
        max_new_tokens=256,
        engine_args=json.dumps({"max_num_batched_tokens": 65536, "compilation_config": graphs}),
    )
    engine = VllmEngine(resolve_pair(PAIR), spec, Path(mkdtemp()) / "engine.log")
    random = np.random.default_rng(0)
    prompts = random.integers(1000, 100_000, (args.requests, 1024)).tolist()
    sampling = Sampling(spec.scenario.max_new_tokens, 0.0, 1.0, 0, True)
    rows: list[Row] = []
    for nwor in NworMode:
        for scv in ScvMode:
            engine.set_modes(Cell(PAIR, nwor, scv))
            seconds = hook_times(engine, prompts, sampling)
            rows.append(row_of("cell", f"{nwor} x {scv}", CALLS[0], seconds))
    parts = Parts()
    core = engine._llm.llm_engine.engine_core.engine_core
    put_clocks(core.model_executor.driver_worker.worker.nwor_hook, parts)
    engine.set_modes(Cell(PAIR, NworMode.STAGE, ScvMode.ADAPTIVE))
    engine.generate(prompts, sampling)
    parts.clear()
    engine.generate(prompts, sampling)
    rows += parts.rows()
    facts = {"requests": args.requests, "gpu": torch.cuda.get_device_name()}
    facts["torch"] = torch.__version__
    commands = [shlex.join(["python", *sys.argv])] + [""] * (len(rows) - 1)
    pd.DataFrame(rows).assign(**facts, command=commands).to_csv(args.output, index=False)
    engine.close()


if __name__ == "__main__":
    main()
