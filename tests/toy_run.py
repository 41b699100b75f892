"""One run of the toy scenario on a stand-in engine."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine
from synthetic_run import make_header

from nwor_bench.records.store import RunData, RunStore, read_run
from nwor_bench.records.types import BatchRecord, Cell, NworMode, ScvMode
from nwor_bench.run.blocks import BlockRunner
from nwor_bench.workload.config import RunSpec, Scenario, resolve
from nwor_bench.workload.prompts import Prompt
from nwor_bench.workload.schedule import Plan, blocks_for_header, make_plan

SCENARIO = Scenario(
    name="toy", requests=2, batches=3, warmup=1, draft_tokens=4, max_new_tokens=8,
    max_model_len=64, top_p=0.9,
)  # fmt: skip
POOL = [Prompt(f"chat-{i}", "chat", "x" * (i + 1)) for i in range(20)]
FLAGS = {"max_warmup", "ci_width", "max_blocks", "time_budget"}
STAGE = Cell("toy", NworMode.STAGE, ScvMode.OFF)
BASELINE = Cell("toy", NworMode.OFF, ScvMode.OFF)


class Log:
    """Progress that a test reads."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.done: list[tuple[Cell, BatchRecord]] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def doing(self, what: str) -> None:
        """Nothing is shown between two lines."""

    def timed(self, *_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def batch_done(self, label: str, record: BatchRecord) -> None:
        self.done.append((label, record))


class Runner:
    """One sweep of the toy scenario on a stand-in engine."""

    def __init__(self, folder: Path, engine: FakeEngine, **overrides: Any) -> None:
        warmup = overrides.get("warmup", SCENARIO.warmup)
        flags = {"max_warmup": warmup, **{f: overrides.pop(f) for f in FLAGS & overrides.keys()}}
        self.spec: RunSpec = resolve(SCENARIO, **overrides, **flags)
        self.plan: Plan = make_plan(self.spec, "toy", POOL)
        self.engine = engine
        self.log = Log()
        self.folder = folder
        blocks = blocks_for_header(self.plan)
        header = make_header([]).model_copy(update={"blocks": blocks, "engine": engine.status()})
        self.sweep = BlockRunner(
            self.plan, self.spec, engine, RunStore.create(folder, header), encode, self.log
        )

    def run(self) -> RunData:
        self.sweep.run()
        return read_run(self.folder)


def encode(prompts: tuple[Prompt, ...]) -> list[list[int]]:
    return [[len(prompt.text), 1] for prompt in prompts]


def of_phase(run: RunData, phase: str) -> list[BatchRecord]:
    return [batch for batch in run.batches if batch.phase == phase]


def blocks_of(run: RunData, phase: str) -> list[int]:
    return sorted({batch.block for batch in of_phase(run, phase)})
