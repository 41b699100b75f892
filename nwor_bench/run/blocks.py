"""Run a plan: warm-up, gate, timed blocks; every batch is stored as it ends.

A run that was cut short goes on behind its last finished block: finished blocks are neither run
nor judged again, and the order and the seeds are the plan's. The block that was cut is run again
whole, since its cells are compared with each other and two engine processes break ties in
different ways. Warm-up is always done anew, for the engine is cold.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from nwor_bench.engine.engine import Engine
from nwor_bench.instruments.conditions import ConditionMonitor
from nwor_bench.instruments.nvtx_ranges import ranges_if_wanted, span
from nwor_bench.records.finished_blocks import (
    BlockKey,
    block_of,
    cut_blocks,
    finished_event,
    superseded_event,
)
from nwor_bench.records.store import RunData, RunStore, read_run
from nwor_bench.records.types import BatchRecord, Cell, Phase, WindowRecord
from nwor_bench.run.batch import BatchRunner, RanBatch
from nwor_bench.run.gate.block import GateBlock, kv_gate
from nwor_bench.run.gate.parity import Answer, ParityGate, broken_event
from nwor_bench.run.gate.ties import TieCheck
from nwor_bench.run.looks import half_widths
from nwor_bench.run.progress import Progress
from nwor_bench.run.warmup import warm_up
from nwor_bench.workload.config import RunSpec
from nwor_bench.workload.prompts import Encode
from nwor_bench.workload.schedule import Block, Plan

OnBatch = Callable[[BatchRecord, Iterable[WindowRecord]], None]
"""Is told of every batch once it is stored, with its windows."""

PROBED_BLOCKS = 2
"""Blocks that run once more with each window's phases timed, where the engine has a probe."""


class BlockRunner:
    """One pair's sweep on one engine.

    Args:
        plan: what to run.
        spec: how to sample.
        engine: started, in any mode.
        store: receives every batch as it ends; blocks that it holds are not run again.
        encode: prompts to token ids.
        progress: is told what happens.
        monitor: watches the machine during batches; None records no conditions.
        on_batch: is told of every batch once it is stored.
    """

    def __init__(
        self,
        plan: Plan,
        spec: RunSpec,
        engine: Engine,
        store: RunStore,
        encode: Encode,
        progress: Progress,
        monitor: ConditionMonitor | None = None,
        on_batch: OnBatch | None = None,
    ):
        self.plan = plan
        self.spec = spec
        scenario, status = spec.scenario, engine.status()
        self.parity = ParityGate(
            status,
            encode,
            TieCheck(
                engine,
                plan.baseline,
                lambda: encode(plan.gate.prompts),
                scenario.max_new_tokens,
                scenario.ignore_eos,
            ),
            scenario.ignore_eos,
            store.append_event,
        )
        self.kv_gate = kv_gate(engine, status, plan.baseline)
        self.stopped: str | None = None
        self._engine = engine
        self._has_probe = bool(status.has_probe)
        self._store = store
        self._progress = progress
        self._on_batch = on_batch
        self._ranges = ranges_if_wanted()
        self._timed_ms: dict[int, float] = defaultdict(float)
        run = read_run(store.folder)
        self.parity.restore(run)
        self._finished = run.finished
        self._cut = cut_blocks(run.batches, run.finished)
        for batch in run.batches:
            if block_of(batch) in self._finished:
                self._count(batch)
        first = _next_number(run)
        self._batches = BatchRunner(engine, store, encode, spec, self._ranges, monitor, first)

    def run(self) -> None:
        """Warm up, gate, then time; cells that break parity are not run further."""
        with span(self._ranges, "sweep", self.plan.num_batches):
            self._run()

    def _run(self) -> None:
        self._warm_up()
        self.gate()
        for block in self.plan.blocks:
            self._timed_block(block)
            self.stopped = self._why_stop(block.number)
            if self.stopped is not None:
                self._progress.say(f"stopped after {block.number} blocks: {self.stopped}")
                break
        self._count_in(Phase.PROBE, PROBED_BLOCKS if self._has_probe else 0)
        for phase, blocks in self.spec.counted_blocks.items():
            self._count_in(phase, blocks)

    def _warm_up(self) -> None:
        def batch() -> RanBatch:
            return self._run_batch(self.plan.baseline, Phase.WARMUP, self.plan.gate, 0)

        facts = warm_up(batch, self.plan.warmup, self.plan.max_warmup)
        self._store.update(warmup=facts)
        unsteady = facts.not_steady
        how = "window times are steady" if unsteady is None else f"not steady: {unsteady}"
        self._progress.say(f"warm-up: {facts.batches} batches, {how}")

    def gate(self) -> None:
        """Greedy tokens, per-position acceptance and K/V of every cell against off x off."""
        if self._begin(Phase.GATE, self.plan.gate):
            GateBlock(
                self.plan.gate,
                self._batches,
                self.parity,
                self.kv_gate,
                self._store,
                self._progress,
                self._tell,
            ).run()
            self._finish(Phase.GATE, self.plan.gate)
        for cell, reason in self.parity.broken.items():
            self._progress.say(f"gate: {cell.label} is INVALID: {reason}")
        passed = len(self.plan.cells) - len(self.parity.broken)
        self._progress.say(
            f"gate: {passed} of {len(self.plan.cells)} cells give the tokens and the acceptance "
            "of off x off"
        )

    def _timed_block(self, block: Block) -> None:
        if not self._begin(Phase.TIMED, block):
            return
        with span(self._ranges, "block", block.number):
            answers = self._run_block(Phase.TIMED, block)
        if self.spec.scenario.temperature == 0:
            self._recheck(block, answers)
        self._finish(Phase.TIMED, block)

    def _recheck(self, block: Block, answers: dict[Cell, Answer]) -> None:
        """A timed block at temperature 0 is one more gate, at no cost."""
        for cell, reason in self.parity.recheck(block, answers, self.plan.baseline):
            self._store.append_event(broken_event(cell, block, reason))
            self._progress.say(f"block {block.number}: {cell.label} is INVALID: {reason}")

    def _count_in(self, phase: Phase, blocks: int) -> None:
        """The first blocks once more with probe or counters on, which timing never sees."""
        if not blocks:
            return
        self._progress.say(f"{phase}: {blocks} blocks once more, untimed")
        self._switch(phase, True)
        try:
            for block in self.plan.blocks[:blocks]:
                if self._begin(phase, block):
                    self._run_block(phase, block)
                    self._finish(phase, block)
        finally:
            self._switch(phase, False)

    def _switch(self, phase: Phase, on: bool) -> None:
        if phase is Phase.PROBE:
            self._engine.set_probe(on)
        else:
            self._engine.set_counters(phase, on)

    def _run_block(self, phase: Phase, block: Block) -> dict[Cell, Answer]:
        """A batch of every cell that has not broken parity, in the block's order."""
        cells = [(n, cell) for n, cell in enumerate(block.order) if cell not in self.parity.broken]
        return {cell: self._run_batch(cell, phase, block, order).answer for order, cell in cells}

    def _run_batch(self, cell: Cell, phase: Phase, block: Block, order: int) -> RanBatch:
        batch = self._batches.run(cell, phase, block, order)
        self._tell(batch)
        return batch

    def _tell(self, batch: RanBatch) -> None:
        """Tell who listens; everything that was found of the batch is stored before."""
        record = batch.answer.record
        if self._on_batch is not None:
            self._on_batch(record, batch.windows)
        self._count(record)
        self._progress.batch_done(batch.cell, record)

    def _begin(self, phase: Phase, block: Block) -> bool:
        """False if the block is finished; what it had before it was cut is set aside."""
        key: BlockKey = (phase, block.number)
        if key in self._finished:
            return False
        if key in self._cut:
            self._store.append_event(superseded_event(key, self._cut.pop(key), _now()))
        return True

    def _finish(self, phase: Phase, block: Block) -> None:
        """Note that the block was run and judged to its end."""
        self._store.append_event(finished_event((phase, block.number)))

    def _count(self, batch: BatchRecord) -> None:
        if batch.phase == Phase.TIMED:
            self._timed_ms[batch.block] += batch.latency_ms

    def _why_stop(self, done: int) -> str | None:
        """What the stopping rule says after `done` blocks."""
        rule = self.spec.stopping
        spent = sum(ms for block, ms in self._timed_ms.items() if block <= done) / 1e3
        widths = half_widths(read_run(self._store.folder), done) if done in rule.looks else []
        return rule.stop(done, widths, spent)


def _next_number(run: RunData) -> int:
    """The number of the next batch, behind those of cut blocks too."""
    numbers = (batch.batch for batch in (*run.batches, *run.superseded))
    return max(numbers, default=-1) + 1


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
