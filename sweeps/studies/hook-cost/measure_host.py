"""Host microseconds of the hook in a window, by vLLM's call, and of a switch between cells.

    python sweeps/studies/hook-cost/measure_host.py --code after [--output FILE.csv]

The 3B shape under full CUDA graphs, 8 requests x 4 drafts. Clocks stand on both sides of each
wrapper: the hook's part is the outer time less the inner. Of `postprocess_sampled` all is taken,
because a commit may run vLLM's update there: compare sums with that of off x off. To compare two
versions, run each on the same host, with its own tree on PYTHONPATH. Needs a GPU.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
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
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.records.window_order import WindowOrder, compared_pairs
from nwor_bench.workload.config import load_scenario, resolve

PAIR = "llama-3b-shape"
CELLS = tuple(
    Cell(PAIR, NworMode(nwor), ScvMode(scv))
    for nwor, scv in (("off", "off"), ("stage", "graph"), ("stage", "adaptive"))
)
PARTS = ("execute_model", "dispatch", "prepare_attn", "sample")
UPDATE = "postprocess_sampled"
GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [5, 20, 40],
}


class Clocks:
    """Seconds of every call of each part, inside and outside of the hook's wrapper."""

    def __init__(self, hook: Any):
        self.inner: defaultdict[str, list[float]] = defaultdict(list)
        self.outer: defaultdict[str, list[float]] = defaultdict(list)
        runner = hook.runner
        owners = dict.fromkeys(PARTS, runner) | {"dispatch": runner.cudagraph_manager}
        hook.detach()
        for name, owner in owners.items():
            setattr(owner, name, timed(getattr(owner, name), self.inner[name]))
        hook.attach()
        for name, owner in {**owners, UPDATE: runner}.items():
            setattr(owner, name, timed(getattr(owner, name), self.outer[name]))

    def take(self) -> dict[str, float]:
        """Median microseconds of the hook in each part since the last call, and their sum."""
        parts = {
            f"{name}_us": median(
                a - b for a, b in zip(self.outer[name], self.inner[name], strict=True)
            )
            for name in PARTS
        }
        parts["update_us"] = median(self.outer[UPDATE])
        for taken in (*self.inner.values(), *self.outer.values()):
            taken.clear()
        return {
            name: round(1e6 * each, 1)
            for name, each in (parts | {"sum_us": sum(parts.values())}).items()
        }


def timed(call: Callable[..., Any], taken: list[float]) -> Callable[..., Any]:
    """The call with a clock around it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        result = call(*args, **kwargs)
        taken.append(perf_counter() - began)
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
    rows: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for cell in CELLS:
            engine.set_modes(cell)
            engine.generate(prompts, sampling)
            clocks.take()
            windows = [
                w["wall_ms"] for w in engine.generate(prompts, sampling).windows if w["wall_ms"]
            ]
            row = {
                "round": number + 1,
                "cell": f"{cell.nwor_mode} x {cell.scv_mode}",
                **clocks.take(),
            }
            rows.append({**row, "window_ms": round(median(windows), 3), "windows": len(windows)})
    switches: list[float] = []
    hook.switch_to = timed(hook.switch_to, switches)
    engine.interleave(WindowOrder(CELLS, compared_pairs(CELLS), "a"))
    switches.clear()
    engine.generate(prompts, sampling)
    engine.stop_interleaving()
    us = round(1e6 * median(switches), 1)
    rows.append({"cell": "switch", "windows": len(switches), "switch_us": us})
    engine.close()
    facts = {"gpu": torch.cuda.get_device_name(), "vllm": vllm.__version__}
    table = pd.DataFrame([{"code": args.code, **row, **facts} for row in rows])
    print(table.to_string())
    table.to_csv(args.output, mode="a", header=not args.output.exists(), index=False)


if __name__ == "__main__":
    main()
