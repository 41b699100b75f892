"""Run a plan: warm-up, gate, timed blocks; every batch is stored as it ends.

A run that was cut short goes on behind its last finished block: finished blocks are neither run
nor judged again, and the order and the seeds are the plan's. The block that was cut is run again
whole, since its cells are compared with each other and two engine processes break ties in
different ways. Warm-up is always done anew, for the engine is cold.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from statistics import fmean

import psutil

from nwor_bench.analysis.aggregate import summarise
from nwor_bench.analysis.parity.kv_result import KvResult, kv_event
from nwor_bench.analysis.parity.kv_verdict import KvVerdict
from nwor_bench.analysis.parity.write_check import write_fault
from nwor_bench.analysis.trend import WARMUP_LOOKBACK, not_steady
from nwor_bench.engine.engine import BatchOutput, Engine, Sampling
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
from nwor_bench.records.types import BatchRecord, Cell, NworMode, WindowRecord
from nwor_bench.run.batch_records import BatchPlace, batch_record, counter_event, window_records
from nwor_bench.run.gate.kv import KvGate, rows_budget
from nwor_bench.run.gate.parity import Answer, ParityGate, broken_event
from nwor_bench.run.gate.ties import TieCheck
from nwor_bench.run.progress import Progress
from nwor_bench.workload.config import RunSpec
from nwor_bench.workload.prompts import Encode
from nwor_bench.workload.schedule import Block, Plan

OnBatch = Callable[[BatchRecord, Iterable[WindowRecord]], None]
"""Is told of every batch once it is stored, with its windows."""

_BEFORE_A_LOOK = ("warmup", "gate", "timed")
"""Phases of the batches that a look at the intervals may see; the others come after the last."""

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
        scenario = spec.scenario
        self.parity = ParityGate(
            engine.status(),
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
        self.kv_gate = _kv_gate(engine, plan.baseline)
        self.stopped: str | None = None
        self._engine = engine
        self._store = store
        self._encode = encode
        self._progress = progress
        self._monitor = monitor
        self._on_batch = on_batch
        self._ranges = ranges_if_wanted()
        self._finished: frozenset[BlockKey] = frozenset()
        self._cut: dict[BlockKey, list[int]] = {}
        self._num_batches = 0
        self._last_latency_ms = 0.0
        self._timed_ms: dict[int, float] = defaultdict(float)
        self._bytes_per_token = engine.status()["bytes_per_token"]
        self._has_probe = bool(engine.status().get("has_probe"))
        self._restore()

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
        self._count_in("probe", PROBED_BLOCKS if self._has_probe else 0)
        for phase, blocks in self.spec.counted_blocks.items():
            self._count_in(phase, blocks)

    def gate(self) -> None:
        """Greedy tokens, per-position acceptance and K/V of every cell against off x off."""
        if self._begin("gate", self.plan.gate):
            self._run_gate()
            self._finish("gate", self.plan.gate)
        for cell, reason in self.parity.broken.items():
            self._progress.say(f"gate: {cell.label} is INVALID: {reason}")
        passed = len(self.plan.cells) - len(self.parity.broken)
        self._progress.say(
            f"gate: {passed} of {len(self.plan.cells)} cells give the tokens and the acceptance "
            "of off x off"
        )

    def _run_gate(self) -> None:
        reference: Answer | None = None
        began = time.perf_counter()
        with self.kv_gate.watching():
            for order, cell in enumerate(self.plan.gate.order):
                answer = self._run_batch(cell, "gate", self.plan.gate, order, reference)[0]
                reference = reference or answer
        found = self.kv_gate.results.values()
        if found:
            facts = self.kv_gate.facts(time.perf_counter() - began)
            self._store.update({"kv_gate": facts})
            compared = sum(result.verdict is not KvVerdict.NOT_RUN for result in found)
            self._progress.say(
                f"K/V gate: the cache of {compared} of {len(found)} staging cells compared with "
                f"mode off's, {facts['seconds']:.1f} s"
            )

    def _keep_kv_result(self, cell: Cell, found: KvResult | None) -> None:
        """What the K/V gate found, for the records; a break makes the cell INVALID."""
        if found is None:
            return
        self._store.append_event(kv_event(cell, found))
        if found.verdict is KvVerdict.BROKEN:
            self._break(cell, self.plan.gate, found.reason or "K/V rows differ")

    def _break(self, cell: Cell, block: Block, reason: str) -> None:
        every = self.parity.break_cell(cell, reason)
        self._store.append_event(broken_event(cell, block, every))

    def _restore(self) -> None:
        """Take over what the store holds already: verdicts, and the blocks that are finished."""
        run = read_run(self._store.folder)
        self.parity.restore(run)
        self._finished = run.finished
        self._cut = cut_blocks(run.batches, run.finished)
        for batch in (*run.batches, *run.superseded):
            self._num_batches = max(self._num_batches, batch.batch + 1)
        for batch in run.batches:
            if block_of(batch) in self._finished:
                self._count(batch)

    def _begin(self, phase: str, block: Block) -> bool:
        """False if the block is finished; what it had before it was cut is set aside."""
        key = (phase, block.number)
        if key in self._finished:
            return False
        if key in self._cut:
            self._store.append_event(superseded_event(key, self._cut.pop(key), _now()))
        return True

    def _finish(self, phase: str, block: Block) -> None:
        """Note that the block was run and judged to its end."""
        self._store.append_event(finished_event((phase, block.number)))

    def _count(self, batch: BatchRecord) -> None:
        if batch.phase == "timed":
            self._timed_ms[batch.block] += batch.latency_ms

    def _warm_up(self) -> None:
        """Batches of off x off until their window times are steady, within the plan's bounds."""
        times: list[float] = []
        while len(times) < self.plan.max_warmup:
            if len(times) >= self.plan.warmup and not_steady(times) is None:
                break
            windows = self._run_batch(self.plan.baseline, "warmup", self.plan.gate, 0)[1]
            walls = [window.wall_ms for window in windows if window.wall_ms is not None]
            times.append(fmean(walls) if walls else self._last_latency_ms)
        unsteady = not_steady(times)
        facts = {"batches": len(times), "lookback": WARMUP_LOOKBACK, "not_steady": unsteady}
        self._store.update({"warmup": facts})
        how = "window times are steady" if unsteady is None else f"not steady: {unsteady}"
        self._progress.say(f"warm-up: {len(times)} batches, {how}")

    def _timed_block(self, block: Block) -> None:
        if not self._begin("timed", block):
            return
        with span(self._ranges, "block", block.number):
            answers = self._run_block("timed", block)
        if self.spec.scenario.temperature == 0:
            self._recheck(block, answers)
        self._finish("timed", block)

    def _run_block(self, phase: str, block: Block) -> dict[Cell, Answer]:
        """A batch of every cell that has not broken parity, in the block's order."""
        cells = [(n, cell) for n, cell in enumerate(block.order) if cell not in self.parity.broken]
        return {cell: self._run_batch(cell, phase, block, order)[0] for order, cell in cells}

    def _count_in(self, phase: str, blocks: int) -> None:
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

    def _switch(self, phase: str, on: bool) -> None:
        if phase == "probe":
            self._engine.set_probe(on)
        else:
            self._engine.set_counters(phase, on)

    def _recheck(self, block: Block, answers: dict[Cell, Answer]) -> None:
        """A timed block at temperature 0 is one more gate, at no cost."""
        for cell, reason in self.parity.recheck(block, answers, self.plan.baseline):
            self._store.append_event(broken_event(cell, block, reason))
            self._progress.say(f"block {block.number}: {cell.label} is INVALID: {reason}")

    def _why_stop(self, done: int) -> str | None:
        """What the stopping rule says after `done` blocks, from the records up to there alone.

        A resumed run so comes to the same answer as one that was never cut short.
        """
        rule = self.spec.stopping
        spent = sum(ms for block, ms in self._timed_ms.items() if block <= done) / 1e3
        return rule.stop(done, self._half_widths(done) if done in rule.looks else [], spent)

    def _half_widths(self, done: int) -> list[float | None]:
        """Half the interval of every cell that is compared; None for one without."""
        cells = summarise(_as_of(read_run(self._store.folder), done))
        return [cell.half_width for cell in cells if cell.ratio_to_off is not None]

    def _run_batch(
        self, cell: Cell, phase: str, block: Block, order: int, reference: Answer | None = None
    ) -> tuple[Answer, list[WindowRecord]]:
        prompts = self._encode(block.prompts)
        sampling = self._sampling(phase, block)
        place = BatchPlace(cell, phase, block, self._num_batches, order, _now())
        with span(self._ranges, "cell", order, cell.label):
            self._engine.set_modes(cell)
            if self._monitor is not None:
                self._monitor.begin()
            watched = phase == "gate" and cell.nwor_mode is NworMode.STAGE
            with span(self._ranges, "batch", place.batch, cell.label):
                output, written = self._generate(prompts, sampling, watched)
            conditions = {} if self._monitor is None else self._monitor.end()
        self._num_batches += 1
        self._last_latency_ms = output.latency_ms
        record = batch_record(place, output, prompts, sampling, conditions)
        answer = Answer(record, output.token_ids)
        kv_result = None
        if phase == "gate":
            # The cache first: judging runs batches of its own, which take these blocks.
            kv_result = self.kv_gate.check(cell, prompts, answer)
            answer = self.parity.check(cell, answer, reference, block)
        windows = window_records(place, output, self._bytes_per_token)
        self._store.append_batch(answer.record, windows)
        fault = write_fault(written, sum(window.committed_tokens for window in windows))
        if fault is not None:
            self._break(cell, block, fault)
        self._keep_kv_result(cell, kv_result)
        if output.counter_facts is not None:
            self._store.append_event(counter_event(place, output.counter_facts))
        if self._on_batch is not None:
            self._on_batch(answer.record, windows)
        self._count(answer.record)
        self._progress.batch_done(cell, answer.record)
        return answer, windows

    def _generate(
        self, prompts: list[list[int]], sampling: Sampling, watched: bool
    ) -> tuple[BatchOutput, list[dict[str, int]]]:
        """One batch, and what each rank's staging wrote where that is watched."""
        if not watched:
            return self._engine.generate(prompts, sampling), []
        self._engine.watch_writes(True)
        try:
            output = self._engine.generate(prompts, sampling)
        finally:
            written = self._engine.watch_writes(False)
        return output, written

    def _sampling(self, phase: str, block: Block) -> Sampling:
        """The gate is greedy whatever the scenario's temperature; seeds depend on the block."""
        scenario = self.spec.scenario
        greedy = phase == "gate"
        return Sampling(
            max_new_tokens=scenario.max_new_tokens,
            temperature=0.0 if greedy else scenario.temperature,
            top_p=1.0 if greedy else scenario.top_p,
            seed=self.spec.seed + block.number * scenario.requests,
            ignore_eos=scenario.ignore_eos,
        )


def _as_of(run: RunData, done: int) -> RunData:
    """The run as it was after `done` timed blocks, faults included; later ones are left out."""

    def known(batches: Iterable[BatchRecord]) -> tuple[BatchRecord, ...]:
        return tuple(b for b in batches if b.block <= done and b.phase in _BEFORE_A_LOOK)

    batches, superseded = known(run.batches), known(run.superseded)
    numbers = {batch.batch for batch in (*batches, *superseded)}
    return replace(
        run,
        batches=batches,
        superseded=superseded,
        windows=tuple(w for w in run.windows if w.batch in numbers),
        superseded_windows=tuple(w for w in run.superseded_windows if w.batch in numbers),
        events=tuple(event for event in run.events if event.get("block", 0) <= done),
    )


def _kv_gate(engine: Engine, baseline: Cell) -> KvGate:
    """The K/V gate, with as much memory for rows as the host can spare."""
    status = engine.status()
    budget = rows_budget(psutil.virtual_memory().available, len(status.get("ranks") or [0]))
    return KvGate(engine.kv_cache(), engine.set_modes, status, baseline, budget)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
