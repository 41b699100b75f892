"""DRAM bytes a window, off against stage, at several acceptances: runs on few engines.

    python sweeps/studies/dram-bytes/measure.py --requests 8 --draft-tokens 4 --output DIR
    python sweeps/studies/dram-bytes/measure.py --rows DIR --output dram.csv

Cells: off x off, stage x graph, and the A/A arm; an engine for each way to stage (--stage), in a
process of its own. Acceptance is synthetic and set in place between the runs of one engine, which
saves an engine start of 10 s each. Needs a GPU whose counters may be read; LD_LIBRARY_PATH must
name cupti-python's libcupti (`nwor-bench sweep --counters dram` does that by itself).
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from nwor_bench.analysis.dram import COUNTERS, cell_bytes
from nwor_bench.engine.engine import VllmEngine, check_arguments
from nwor_bench.instruments.pm_sampling import run_under_own_cupti
from nwor_bench.records.store import RunData, read_run
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.run.execute import run_prepared
from nwor_bench.run.prepare import PairChoice, prepare
from nwor_bench.stats.interval import flat
from nwor_bench.workload.config import RunSpec, load_scenario, resolve
from nwor_bench.workload.schedule import Block, Plan

PAIR = "llama-3b-shape"
PACKAGES = ("vllm", "torch", "triton")
PARTS = ("mean", "low", "high")


def spec_of(arguments: argparse.Namespace, acceptance: float, stage_by: str) -> RunSpec:
    """One run: prefill in one step, a full graph for windows of all requests, or none at all."""
    engine_args: dict[str, Any] = {"max_num_batched_tokens": 65536}
    if arguments.max_splits is not None:
        most = {"flash_attn_max_num_splits_for_cuda_graph": arguments.max_splits}
        engine_args["attention_config"] = most
    if arguments.eager:
        engine_args["enforce_eager"] = True
    else:
        length = arguments.draft_tokens + 1
        engine_args["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [length, length * arguments.requests],
        }
    drafts = {"synthetic_acceptance_length": round(1 + arguments.draft_tokens * acceptance, 6)}
    # As many windows at every acceptance: tokens to generate follow from it.
    new = int(arguments.windows * (1 + arguments.draft_tokens * acceptance))
    return resolve(
        load_scenario("ctx-1k"),
        requests=arguments.requests,
        batches=arguments.blocks,
        warmup=2,
        draft_tokens=arguments.draft_tokens,
        max_new_tokens=new,
        nwor_modes="off,stage",
        scv_modes="off,graph",
        speculative_config=json.dumps(drafts),
        engine_args=json.dumps(engine_args),
        max_warmup=2,
        counters="dram",
        stage_by=stage_by,
    )


def compared(plan: Plan) -> Plan:
    """The plan with off x off, stage x graph and the A/A arm only."""

    def wanted(cell: Cell) -> bool:
        is_stage = cell.nwor_mode is NworMode.STAGE and cell.scv_mode is ScvMode.GRAPH
        return cell.is_baseline or cell.arm is not None or is_stage

    def cut(block: Block) -> Block:
        return replace(block, order=tuple(filter(wanted, block.order)))

    cells = tuple(filter(wanted, plan.cells))
    return replace(plan, cells=cells, gate=cut(plan.gate), blocks=tuple(map(cut, plan.blocks)))


def set_acceptance(engine: VllmEngine, spec: RunSpec) -> None:
    """Give a living engine the run's synthetic acceptance (V2 runner, same process)."""
    from vllm.config.speculative import SpeculativeConfig
    from vllm.v1.spec_decode.utils import unconditional_to_conditional_rates

    core = engine._llm.llm_engine.engine_core.engine_core
    rates = core.model_executor.driver_worker.worker.model_runner.rejection_sampler
    rates = rates.synthetic_conditional_rates
    assert spec.speculative_config is not None
    length = spec.speculative_config["synthetic_acceptance_length"]
    plain = SpeculativeConfig._acceptance_length_to_rates(length, spec.scenario.draft_tokens)
    rates.copy_(rates.new_tensor(unconditional_to_conditional_rates(plain)))


def run(arguments: argparse.Namespace) -> None:
    """Run every way to stage in a fresh process; the first error ends it."""
    run_under_own_cupti()
    arguments.output.mkdir(parents=True, exist_ok=True)
    context = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for stage_by in arguments.stage:
            pool.submit(run_stage, arguments, stage_by).result()


def run_stage(arguments: argparse.Namespace, stage_by: str) -> None:
    """All acceptances on one engine, each in a run folder of its own."""
    kind = "eager" if arguments.eager else "full"
    kind += "" if arguments.max_splits is None else f"-{arguments.max_splits}split"
    kind += "" if stage_by == "reference" else f"-{stage_by}"
    console = Console(width=150)
    engine: VllmEngine | None = None
    specs = [(value, spec_of(arguments, value, stage_by)) for value in arguments.acceptance]
    largest = max((spec for _, spec in specs), key=lambda spec: spec.scenario.max_new_tokens)
    try:
        for acceptance, spec in specs:
            began = time.monotonic()
            prepared = prepare(spec, PairChoice(pair=PAIR), console)
            prepared = replace(prepared, plan=compared(prepared.plan))
            if engine is None:
                check_arguments(prepared.pair, largest)
                engine = VllmEngine(prepared.pair, largest, arguments.output / f"{kind}.log")
            set_acceptance(engine, spec)
            name = f"{kind}-{arguments.requests}x{arguments.draft_tokens}-{acceptance:g}"

            @contextmanager
            def source(log: Path | None, engine: VllmEngine = engine) -> Iterator[VllmEngine]:
                yield engine

            run_prepared(prepared, arguments.output / name, source, console)
            console.print(f"{name}: {time.monotonic() - began:.1f} s")
    finally:
        if engine is not None:
            engine.close()


def cell_rows(run: RunData) -> list[dict[str, Any]]:
    """One row per cell; None if not measured."""
    scenario, spec = run.header.scenario or {}, run.header.spec
    rows = []
    for cell in cell_bytes(run):
        row: dict[str, Any] = {
            "pair": cell.cell.pair,
            "scenario": scenario.get("name"),
            "requests": scenario.get("requests"),
            "draft_tokens": scenario.get("draft_tokens"),
            "engine_args": dict(spec.engine_args),
            "stage_by": spec.stage_by,
            "nwor_mode": str(cell.cell.nwor_mode),
            "scv_mode": str(cell.cell.scv_mode),
            "arm": cell.cell.arm,
            "blocks": cell.blocks,
            "windows": cell.windows,
            "matched_windows": cell.matched,
            "staged_tokens_mean": cell.staged,
            "accepted_tokens_mean": cell.accepted,
        }
        for name in COUNTERS:
            less = f"{name}_minus_off"
            row |= flat(cell.amounts.get(name), [f"{name}_{part}" for part in PARTS])
            row |= flat(cell.differences.get(name), [f"{less}_{part}" for part in PARTS])
            row[f"{less}_smallest"] = cell.visible.get(name)
            row[f"{less}_predicted"] = cell.predicted.get(name)
        rows.append(row)
    return rows


def rows_of(roots: Sequence[Path]) -> list[dict[str, Any]]:
    """A row a run and cell of all complete runs below the folders; the command is in the first."""
    rows: list[dict[str, Any]] = []
    for path in sorted(path for root in roots for path in root.rglob("run.json")):
        header = json.loads(path.read_text(encoding="utf-8"))
        if header["status"] != "complete":
            continue
        environment = header["environment"]
        gpu = environment["gpus"][0]
        origin = {"gpu": gpu["name"], "driver": gpu["driver"]}
        origin |= {name: environment["packages"][name] for name in PACKAGES}
        for place, row in enumerate(cell_rows(read_run(path.parent))):
            command = "" if place else header["command"]
            rows.append({"run": path.parent.name, **row, **origin, "command": command})
    return rows


def main() -> None:
    """Parse, and run or write rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int)
    parser.add_argument("--draft-tokens", type=int)
    parser.add_argument("--acceptance", type=lambda t: [float(x) for x in t.split(",")],
                     default=[0.5, 0.1, 0.9])  # fmt: skip
    parser.add_argument("--windows", type=int, default=24, help="a request, about")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--max-splits", type=int, help="FlashAttention's, in full graphs")
    parser.add_argument("--stage", nargs="+", choices=("reference", "copy"), default=["reference"])
    parser.add_argument("--rows", type=Path, nargs="+", help="run folders; runs nothing")
    parser.add_argument("--output", type=Path, required=True, help="a folder; with --rows a CSV")
    arguments = parser.parse_args()
    if arguments.rows:
        frame = pd.DataFrame(rows_of(arguments.rows))
        frame.to_csv(arguments.output, index=False, float_format="%.12g")
    else:
        run(arguments)


if __name__ == "__main__":
    main()
