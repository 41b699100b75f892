"""Many small runs on one engine, for the scripts that measure the harness itself."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from nwor_bench.analysis.analyse import analyse
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import Engine
from nwor_bench.instruments.environment import collect
from nwor_bench.records.store import RunData, read_run
from nwor_bench.records.types import CellResult
from nwor_bench.run.execute import run_prepared
from nwor_bench.run.prepare import PairChoice, prepare
from nwor_bench.workload.config import RunSpec, load_scenario, resolve


def one_thread() -> None:
    """On a CPU, run the kernels on one thread, unless the environment says otherwise.

    A small model's threads wait for each other at every operator, and on a shared machine that
    wait is most of the noise (seen: 12 % a batch on two threads, 5 % on one). Call it before
    vLLM is imported. A GPU's host is left as any sweep has it.
    """
    if collect().gpus:
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(min(os.sched_getaffinity(0))))


PAIR = ("pair", "target_model", "draft_model", "method")
TEXTS = ("dtype", "speculative_config", "engine_args", "ci_width", "time_budget")
NUMBERS = ("requests", "draft_tokens", "max_new_tokens", "max_model_len", "batches", "max_blocks")


def add_arguments(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """The pair and the size of one run, by the names that `nwor-bench sweep` has for them."""
    for name in (*PAIR, *TEXTS, *NUMBERS, "runs"):
        is_number = name in (*NUMBERS, "runs")
        parser.add_argument(f"--{name.replace('_', '-')}", type=int if is_number else str)
    parser.add_argument("--scenario", default="short")
    parser.add_argument("--folder", type=Path, required=True, help="for the runs; a new one")
    parser.set_defaults(**defaults)


def spec_of(args: argparse.Namespace) -> RunSpec:
    """Only off x off and its A/A arm, with the arguments' sizes."""
    sizes = {name: getattr(args, name) for name in (*TEXTS, *NUMBERS)}
    return resolve(load_scenario(args.scenario), nwor_modes="off", scv_modes="off", **sizes)


def choice_of(args: argparse.Namespace) -> PairChoice:
    """The pair that the arguments name; tiny if they name none."""
    pair = args.pair or (None if args.target_model else "tiny")
    return PairChoice(pair, args.target_model, args.draft_model, args.method)


class ManyRuns:
    """Runs one after the other on one engine; each with a seed, and so an order, of its own."""

    def __init__(self, args: argparse.Namespace, spec: RunSpec):
        self.folder: Path = args.folder
        self.spec = spec
        self.choice = choice_of(args)
        self.folder.mkdir(parents=True)
        self._quiet = Console(file=(self.folder / "console.log").open("w"), width=100)
        ready = prepare(spec, self.choice, Console())
        self.engine = VllmEngine(ready.pair, spec, self.folder / "engine.log")

    def run(
        self, number: int, name: str, engine: Engine | None = None
    ) -> tuple[RunData, list[CellResult]]:
        """One whole sweep: warm-up, gate, blocks, reports."""
        spec = replace(self.spec, seed=number)
        prepared = prepare(spec, self.choice, self._quiet)
        folder = self.folder / name

        @contextmanager
        def source(_: Path | None) -> Iterator[Engine]:
            yield engine or self.engine

        run_prepared(prepared, folder, source, self._quiet)
        data = read_run(folder)
        if data.header.status != "complete":
            raise KeyboardInterrupt
        return data, list(analyse(data).cells)


def percent(value: float | None) -> str:
    """A fraction with two decimals."""
    return "-" if value is None else f"{100 * value:+.2f} %"
