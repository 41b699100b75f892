"""Host microseconds of the hook in a window, by vLLM's call, and of a switch between cells.

    python sweeps/studies/hook-cost/measure_host.py --code after [--output FILE.csv]

The 3B shape under full CUDA graphs, 8 requests x 4 drafts. Clocks stand on both sides of each
wrapper: the hook's part is the outer time less the inner. Of `run_fullgraph` and
`postprocess_sampled` all is taken, because staging replays graphs of its own, and a commit may run
vLLM's update: compare with `stock`, whose hook is detached. In a server and in interleaved windows
the hook also records CUDA events: `stage x adaptive, timed`. To compare two versions, run each on
the same host, with its own tree on PYTHONPATH. Needs a GPU.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from time import perf_counter
from typing import Any

import pandas as pd
import torch
import vllm

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import Sampling
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.plugin.attaching import HOOK
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.records.window_order import WindowOrder, compared_pairs
from nwor_bench.workload.config import load_scenario, resolve

PAIR = "llama-3b-shape"
CELLS = tuple(
    Cell(PAIR, NworMode(nwor), ScvMode(scv))
    for nwor, scv in (("off", "off"), ("stage", "graph"), ("stage", "adaptive"))
)
PARTS = ("execute_model", "dispatch", "prepare_attn", "sample")
"""Calls that the hook wraps: its own time is taken."""
WHOLE = ("run_fullgraph", "postprocess_sampled")
"""Calls of which all is taken."""
OF_GRAPHS = ("dispatch", "run_fullgraph")
GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [5, 20, 40],
}


Calls = list[tuple[float, float]]
"""When each call began, and its seconds."""


class Clocks:
    """Every call of each part, inside and outside of the hook's wrapper."""

    def __init__(self, hook: Any):
        self._hook = hook
        self._inner: defaultdict[str, Calls] = defaultdict(list)
        self._outer: defaultdict[str, Calls] = defaultdict(list)

    @contextmanager
    def running(self, attached: bool) -> Iterator[None]:
        """With clocks on both sides of the hook, or on stock's own methods."""
        hook = self._hook
        inner, outer = self._around(PARTS, self._inner), self._around(PARTS + WHOLE, self._outer)
        hook.detach()
        if attached:
            inner.apply()
            hook.attach()
        outer.apply()
        try:
            yield
        finally:
            outer.undo()
            if attached:
                hook.detach()
                inner.undo()
            hook.attach()

    def _around(self, names: tuple[str, ...], taken: defaultdict[str, Calls]) -> PatchSet:
        graphs, runner = self._hook.runner.cudagraph_manager, self._hook.runner
        owners = {name: graphs if name in OF_GRAPHS else runner for name in names}
        return PatchSet(
            Patch(owner, name, partial(timed, taken=taken[name])) for name, owner in owners.items()
        )

    def take(self) -> dict[str, float]:
        """Median microseconds in each part since the last call, their sum, and a window's time."""
        seconds = {name: [s for _, s in self._outer[name]] for name in WHOLE}
        for name in PARTS:
            if inner := self._inner[name]:
                both = zip(self._outer[name], inner, strict=True)
                seconds[name] = [outer - own for (_, outer), (_, own) in both]
        parts = {f"{name}_us": 1e6 * median(each) for name, each in seconds.items()}
        starts = [began for began, _ in self._outer["run_fullgraph"]]
        window = median(after - before for before, after in pairwise(starts))
        for calls in (*self._inner.values(), *self._outer.values()):
            calls.clear()
        return {
            **{name: round(us, 1) for name, us in parts.items()},
            "sum_us": round(sum(parts.values()), 1),
            "window_ms": round(1e3 * window, 3),
            "windows": len(starts),
        }


def timed(call: Callable[..., Any], taken: Calls) -> Callable[..., Any]:
    """The call with a clock around it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        result = call(*args, **kwargs)
        taken.append((began, perf_counter() - began))
        return result

    return run


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--code", required=True, help="name of this version, e.g. before")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("host.csv"))
    args = parser.parse_args()
    sizes = {"requests": 8, "draft_tokens": 4, "max_new_tokens": 300, "max_model_len": 2048}
    more = {"compilation_config": GRAPHS, "gpu_memory_utilization": 0.4}
    spec = resolve(load_scenario("short"), engine_args=json.dumps(more), **sizes)
    engine = VllmEngine(resolve_pair(PAIR), spec, Path(mkdtemp()) / "engine.log")
    core = engine._llm.llm_engine.engine_core.engine_core
    hook = getattr(core.model_executor.driver_worker.worker, HOOK)
    clocks = Clocks(hook)
    prompts = [[(37 * r + 11 * i) % 30_000 + 32 for i in range(900 + r)] for r in range(8)]
    sampling = Sampling(300, 0.0, 1.0, 7, True)
    settings: list[tuple[str, Cell | None, bool]] = [
        ("stock", None, False),
        *((f"{cell.nwor_mode} x {cell.scv_mode}", cell, False) for cell in CELLS),
        ("stage x adaptive, timed", CELLS[-1], True),
    ]
    rows: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for name, cell, is_timed in settings:
            hook.clock.on = is_timed
            with clocks.running(attached=cell is not None):
                if cell is not None:
                    engine.set_modes(cell)
                engine.generate(prompts, sampling)
                clocks.take()
                engine.generate(prompts, sampling)
                rows.append({"round": number + 1, "cell": name, **clocks.take()})
    switches: Calls = []
    hook.switch_to = timed(hook.switch_to, switches)
    engine.interleave(WindowOrder(CELLS, compared_pairs(CELLS), "a"))
    switches.clear()
    engine.generate(prompts, sampling)
    engine.stop_interleaving()
    us = round(1e6 * median(seconds for _, seconds in switches), 1)
    rows.append({"cell": "switch", "windows": len(switches), "switch_us": us})
    engine.close()
    facts = {"gpu": torch.cuda.get_device_name(), "vllm": vllm.__version__}
    table = pd.DataFrame([{"code": args.code, **row, **facts} for row in rows])
    print(table.to_string())
    table.to_csv(args.output, mode="a", header=not args.output.exists(), index=False)


if __name__ == "__main__":
    main()
