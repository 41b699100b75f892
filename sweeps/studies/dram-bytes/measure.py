"""DRAM bytes a window, off against stage, at several acceptances: runs on few engines.

    python sweeps/studies/dram-bytes/measure.py --requests 8 --draft-tokens 4 --output DIR
    python sweeps/studies/dram-bytes/measure.py --requests 64 --draft-tokens 8 --eager --output DIR
    python sweeps/studies/dram-bytes/measure.py ... --stage reference copy --output DIR

Cells: off x off, stage x graph, and the A/A arm; an engine for each way to stage (--stage), in a
process of its own: reference (the default) and copy. Acceptance
is synthetic; between the runs of one engine the rates are set in place, which an engine start each
would do as well and take 10 s longer. Needs a GPU whose counters may be read; LD_LIBRARY_PATH must
name cupti-python's libcupti (`nwor-bench sweep --dram-counters` does that by itself). `compact.py`
makes dram.csv.gz of the run folders.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from nwor_bench.engine.engine import VllmEngine, check_arguments
from nwor_bench.instruments.cupti_library import run_under_own_cupti
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.run.execute import run_prepared
from nwor_bench.run.prepare import PairChoice, prepare
from nwor_bench.workload.config import RunSpec, load_scenario, resolve
from nwor_bench.workload.schedule import Block, Plan

PAIR = "llama-3b-shape"
STAGES = ("reference", "copy")
"""Values of --stage-by."""


def spec_of(arguments: argparse.Namespace, acceptance: float, stage: str) -> RunSpec:
    """One run: prefill in one step, a full graph for windows of all requests, or none at all.

    Launches are counted in a process's last run: PyTorch's profiler changes CUPTI's clock.
    """
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
        dram_counters=True,
        launch_counts=arguments.launches and acceptance == arguments.acceptance[-1],
        stage_by=stage,
    )


def is_compared(cell: Cell) -> bool:
    """off x off, stage x graph and the A/A arm; no other cell is run."""
    is_stage = cell.nwor_mode is NworMode.STAGE and cell.scv_mode is ScvMode.GRAPH
    return cell.is_baseline or cell.arm is not None or is_stage


def only(plan: Plan, wanted: Callable[[Cell], bool]) -> Plan:
    """The plan with the wanted cells alone."""

    def cut(block: Block) -> Block:
        return replace(block, order=tuple(filter(wanted, block.order)))

    cells = tuple(filter(wanted, plan.cells))
    return replace(plan, cells=cells, gate=cut(plan.gate), blocks=tuple(map(cut, plan.blocks)))


class EmptiedEngine(VllmEngine):
    """Stock vLLM in this process; each batch begins with no memory in PyTorch's cache.

    Which memory an eager step is given depends on what ran before, in other batches too; this
    takes the other batches away.
    """

    def set_modes(self, cell: Cell) -> None:
        """Switch, and give the cached memory back."""
        super().set_modes(cell)
        torch.cuda.empty_cache()


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
    """Every way to stage on an engine of its own."""
    run_under_own_cupti()
    arguments.output.mkdir(parents=True, exist_ok=True)
    each_in_a_process(partial(run_stage, arguments), arguments.stage)


def each_in_a_process(do: Callable[[str], Any], items: Sequence[str]) -> list[Any]:
    """Call `do` with one item after the other, each in a fresh process; the first error ends it.

    A process that has counted launches cannot count DRAM bytes any more.
    """
    context = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        # Not map: it would start the second although the first had failed.
        return [pool.submit(do, item).result() for item in items]


def run_stage(arguments: argparse.Namespace, stage: str) -> None:
    """All acceptances for one way to stage."""
    kind = "eager" if arguments.eager else "full"
    kind += "" if arguments.max_splits is None else f"-{arguments.max_splits}split"
    kind += "-emptied" if arguments.empty_cache else ""
    kind += "" if stage == "reference" else f"-{stage}"
    engine = EmptiedEngine if arguments.empty_cache else VllmEngine
    run_kind(arguments, stage, kind, make_engine=engine)


def run_kind(
    arguments: argparse.Namespace,
    stage: str,
    kind: str,
    wanted: Callable[[Cell], bool] = is_compared,
    make_engine: Callable[..., VllmEngine] = VllmEngine,
) -> None:
    """All acceptances on one engine, each in a run folder of its own, as it ends."""
    console = Console(width=150)
    engine: VllmEngine | None = None
    specs = [(value, spec_of(arguments, value, stage)) for value in arguments.acceptance]
    largest = max((spec for _, spec in specs), key=lambda spec: spec.scenario.max_new_tokens)
    try:
        for acceptance, spec in specs:
            began = time.monotonic()
            prepared = prepare(spec, PairChoice(pair=PAIR), console)
            prepared = replace(prepared, plan=only(prepared.plan, wanted))
            if engine is None:
                check_arguments(prepared.pair, largest)
                engine = make_engine(prepared.pair, largest, arguments.output / f"{kind}.log")
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


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for a run's work and its folder."""
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--draft-tokens", type=int, required=True)
    parser.add_argument("--acceptance", type=lambda t: [float(x) for x in t.split(",")],
                     default=[0.5, 0.1, 0.9])  # fmt: skip
    parser.add_argument("--windows", type=int, default=24, help="a request, about")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--launches", action="store_true", help="count CUDA calls, too")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--empty-cache", action="store_true", help="PyTorch's, before each batch")
    parser.add_argument("--max-splits", type=int, help="FlashAttention's, in full graphs")
    parser.add_argument("--output", type=Path, required=True)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_run_arguments(parser)
    parser.add_argument("--stage", nargs="+", choices=list(STAGES), default=["reference"])
    run(parser.parse_args())


if __name__ == "__main__":
    main()
