"""Run a plan: warm-up, gate, timed blocks; every batch is stored as it ends.

A run that was cut short goes on behind its last finished block (`block_log`), with the plan's order
and seeds. Warm-up is always done anew, for the engine is cold.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from nwor_bench.analysis.cell_data import CellData, gather_cells, idle_reason
from nwor_bench.engine.protocol import Engine
from nwor_bench.instruments.conditions import ConditionMonitor
from nwor_bench.instruments.nvtx_ranges import ranges_if_wanted, span
from nwor_bench.records.header import GATE, INTERLEAVED, WARM_UP, WHOLE
from nwor_bench.records.store import RunData, RunStore, read_run
from nwor_bench.records.types import AA, Cell, NworMode, Phase
from nwor_bench.report.text import plural
from nwor_bench.run.batch import BatchRunner, RanBatch
from nwor_bench.run.batch_sizes import BatchSizes, NoTimeLeft, timed_batches
from nwor_bench.run.budget import BlockLog, Budget, half_widths, warm_up
from nwor_bench.run.gate.block import GateBlock, kv_gate
from nwor_bench.run.gate.parity import BatchAnswer, ParityGate, broken_event
from nwor_bench.run.gate.size import GateSize
from nwor_bench.run.gate.ties import CPU_POSITIONS, MAX_POSITIONS, TieCheck
from nwor_bench.run.progress import Progress
from nwor_bench.workload.config import RunSpec
from nwor_bench.workload.prompts import Encode
from nwor_bench.workload.schedule import Block, Plan


class BlockRunner:
    """One pair's sweep on one engine.

    Args:
        plan: what to run.
        spec: how to sample.
        engine: started, in any mode.
        store: receives every batch as it ends; blocks that it holds are not run again.
        encode: prompts to token ids.
        progress: receives progress messages.
        monitor: watches the machine during batches; None records no conditions.
        check: called after every batch; raises to end the run.
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
        check: Callable[[], None] = lambda: None,
    ):
        self.plan = plan
        self.spec = spec
        scenario, status = spec.scenario, engine.status()
        self._size = GateSize(plan, encode, spec)
        self._warmed: RanBatch | None = None
        self.parity = ParityGate(
            status,
            encode,
            TieCheck(
                engine,
                plan.baseline,
                lambda: self._size.block.token_ids(encode),
                self._size.block.new_tokens or scenario.max_new_tokens,
                scenario.ignore_eos,
                CPU_POSITIONS if status.device == "cpu" else MAX_POSITIONS,
                same_kernel=all(cell.nwor_mode is NworMode.OFF for cell in plan.cells),
            ),
            scenario.ignore_eos,
            store.append_event,
            by_drafts=plan.baseline.drafts is not None,
        )
        self.kv_gate = kv_gate(engine, status, plan.baseline)
        self.stopped: str | None = None
        seconds = spec.time_budget_s
        self.sizes = None if seconds is None else BatchSizes(seconds, [scenario.requests])
        """Batch sizes of the time budget; a sweep sets those of its runs."""
        self._idle: frozenset[Cell] = frozenset()
        self._interleaved: tuple[int, BatchAnswer] | None = None
        self._engine = engine
        self._store = store
        self._progress = progress
        self._check = check
        self._ranges = ranges_if_wanted()
        run = read_run(store.folder)
        self.parity.restore(run)
        self._log = BlockLog(store, run)
        self._budget = Budget(spec.time_budget_s, run, plan.interleaved)
        first = _next_number(run)
        self._batches = BatchRunner(engine, store, encode, spec, self._ranges, monitor, first)

    def run(self) -> None:
        """Warm up, gate, then time; cells that break parity, and those whose SCV mode cannot fire
        on this machine, are not run further."""
        self._budget.begin()
        timed = self._progress.timed(self._clock)
        with span(self._ranges, "sweep", self.plan.num_batches), timed:
            self._run()

    def _clock(self) -> tuple[float, float | None]:
        """Seconds spent, and about how many it takes in all: the time budget with all of its batch
        sizes, or by the batches that ran; None if that is not known."""
        own_s, share = self._budget.spent_s, len(self._budget.batches) / self.plan.num_batches
        if self.sizes is not None:
            return self.sizes.spent_s + own_s, self.sizes.seconds
        return own_s, None if self.spec.ci_width or not share else own_s / min(share, 1.0)

    def _run(self) -> None:
        with self._budget.part(WARM_UP):
            self._warm_up()
        with self._budget.part(GATE):
            self.gate()
        done = 0
        self.stopped = self._why_stop(done)
        for block in self.plan.blocks:
            if self.stopped is not None:
                self._progress.say(f"stopped after {plural(done, 'block')}: {self.stopped}")
                break
            self._timed_block(block)
            done = block.number
            self.stopped = self._why_stop(done)
        with self._budget.part("counters"):
            self._count(self.spec.counted_blocks if done else 0)

    @property
    def spent_s(self) -> dict[str, float]:
        """Seconds of each part of the run, over all tries."""
        return {part: round(seconds, 3) for part, seconds in self._budget.parts.items()}

    def _warm_up(self) -> None:
        # The windows of whole batches must be warm as they are timed, so none of these is cut.
        block = self._size.block if self.plan.interleaved else self.plan.gate

        def batch() -> RanBatch:
            *others, baseline = self.plan.warmed
            for cell in others:
                self._run_batch(cell, Phase.WARMUP, block, 0)
            self._warmed = self._run_batch(baseline, Phase.WARMUP, block, 0)
            return self._warmed

        if self.plan.max_warmup == 0:
            return
        facts = warm_up(batch, self.plan.warmup, self.plan.max_warmup, self._budget)
        self._store.update(warmup=facts)
        unsteady = facts.not_steady
        how = ", window times are steady" if facts.lookback else ""
        how = how if unsteady is None else f", not steady: {unsteady}"
        self._progress.say(f"warm-up: {plural(facts.batches or 0, 'batch')}{how}")

    def gate(self) -> None:
        """Tokens, acceptance by position, K/V and writes of every cell against off x off, in whole
        batches and, if the run interleaves cells, in interleaved windows."""
        if self._log.begin(Phase.GATE, self.plan.gate):
            self._size.fit_into(self._budget.gate_room_s(), self._warmed)
            self._store.update(gate=self._size.facts())
            GateBlock(
                self._size.block,
                self._batches,
                self.parity,
                self.kv_gate,
                self._store,
                self._progress,
                self._tell,
                self.plan.window_order if self.plan.interleaved else None,
            ).run()
            self._log.finish(Phase.GATE, self.plan.gate)
        for cell, reason in self.parity.broken.items():
            self._progress.say(f"gate: {cell.label} gives another output: {reason}")
        cells = gather_cells(read_run(self._store.folder))
        self._idle = frozenset(data.cell for data in cells if data.cannot_fire)
        self._tell_passed([data for data in cells if not (data.is_baseline or data.is_aa)])

    def _forecast(self, batch: RanBatch) -> None:
        """Say what the time has room for, by the gate's first batch, and take this run's part.
        Raises NoTimeLeft if that is none."""
        if self.sizes is None:
            return
        requests = self.spec.scenario.requests
        timed_s = timed_batches(self.plan, self.spec) * self._size.whole_s(batch)
        said = self.sizes.forecast(requests, self._size.gate_s(batch), timed_s)
        if said is not None:
            self._progress.say(said)
        if not self.sizes.has_room(requests):
            raise NoTimeLeft(f"--time-budget has no room for {plural(requests, 'request')}")
        self._budget.seconds = round(self.sizes.share_s(requests), 1)

    def _tell_passed(self, cells: Sequence[CellData]) -> None:
        """Say which cells did nothing, and how many of the others passed."""
        idle = {cell.cell: why for cell in cells if (why := idle_reason(cell)) is not None}
        for reason in sorted(set(idle.values())):
            labels = ", ".join(c.label for c in self.plan.cells if idle.get(c) == reason)
            self._progress.say(f"gate: INEFFECTIVE {labels}: {reason}")
        passed = {cell.cell for cell in cells} - idle.keys() - self.parity.broken.keys()
        is_check = self.spec.checks_only and self.spec.engines  # its answer says so
        if cells and not is_check:
            self._progress.say(
                f"gate: {len(passed)} of {plural(len(cells), 'cell')} acted and passed the checks "
                f"against {self.plan.baseline.label}"
            )

    def _has_whole_batches(self, block: Block) -> bool:
        """True if every cell has a batch of its own. A check only if it has room; the first block
        of draft counts at a temperature always, since the gate is greedy and gives no tokens."""
        if not self.plan.has_whole_batches(block):
            return False
        if not self.plan.interleaved or self._log.is_cut(Phase.TIMED, block):
            return True
        if block.number == 1 and self.spec.experiment.counts and self.spec.scenario.temperature:
            return True
        return self._budget.has_room_to_check(len(self._live_cells()))

    def _why_stop(self, done: int) -> str | None:
        """What the stopping rule says after `done` blocks."""
        rule = replace(self.spec.stopping, time_budget_s=self._budget.seconds)
        blocks = self.plan.blocks
        widths = half_widths(read_run(self._store.folder), done) if done in rule.looks else []
        if self._is_finished(done + 1):
            return rule.stop(done, widths, 0.0, 0.0)  # the clock let an earlier try go on
        # With one more block the untimed ones after the last must fit in too.
        whole_s = self._budget.block_s(Phase.TIMED, len(self._live_cells()))
        next_s = whole_s * self.spec.counted_blocks
        if done == len(blocks) or self._has_whole_batches(blocks[done]):
            next_s += whole_s
        if self.plan.interleaved:
            shares = done < len(blocks) and self.plan.shares_contexts(blocks[done])
            next_s += self._budget.block_s(Phase.INTERLEAVED, 1, longest=not shares)
        return rule.stop(done, widths, self._budget.spent_s, next_s)

    def _is_finished(self, number: int) -> bool:
        """True for a timed block that an earlier start finished."""
        blocks = {(Phase.TIMED, number), (Phase.INTERLEAVED, number)}
        return bool(self._log.finished_before & blocks)

    def _timed_block(self, block: Block) -> None:
        if self.plan.interleaved:
            with self._budget.part(INTERLEAVED):
                self._interleaved_batch(block)  # first: a short budget has room for little else
        if self._has_whole_batches(block):
            with self._budget.part(WHOLE):
                self._whole_batches(block)

    def _interleaved_batch(self, block: Block) -> None:
        """One interleaved batch of the cells that are still measured."""
        live = self._live_cells()
        if len(live) < 2 or not self._log.begin(Phase.INTERLEAVED, block):
            return
        began = self._budget.spent_s
        cells = [cell for cell in self.plan.cells if cell in live]
        self._progress.doing(f"block {block.number}")
        with span(self._ranges, "block", block.number):
            window_order = self.plan.window_order(block, cells)
            baseline = self.plan.baseline
            batch = self._batches.run_interleaved(
                baseline,
                Phase.INTERLEAVED,
                block,
                window_order,
                keep_prefix_cache=self.plan.shares_contexts(block),
            )
        self._tell(batch)
        self._interleaved = (block.number, batch.answer)
        self._log.finish(Phase.INTERLEAVED, block)
        self._budget.block(Phase.INTERLEAVED, block.number, self._budget.spent_s - began)

    def _whole_batches(self, block: Block) -> None:
        """A batch of every cell that is still measured."""
        if not self._log.begin(Phase.TIMED, block):
            return
        began = self._budget.spent_s
        with span(self._ranges, "block", block.number):
            answers = self._run_block(Phase.TIMED, block)
        if self.spec.scenario.temperature == 0:
            self._recheck(block, answers)
        self._log.finish(Phase.TIMED, block)
        self._budget.block(Phase.TIMED, block.number, self._budget.spent_s - began)

    def _recheck(self, block: Block, answers: dict[Cell, BatchAnswer]) -> None:
        """A timed block at temperature 0 is one more gate, at no cost."""
        live = self._live_cells()
        in_order = [cell for cell in self.plan.cells if cell in live]
        broken = list(self.parity.recheck(block, answers, self.plan.baseline))
        number, answer = self._interleaved or (None, None)
        if number == block.number and answer is not None:  # a resumed run may lack it
            reference = answers[self.plan.baseline]
            difference = self.parity.interleaved_difference(answer, reference, block)
            if difference is not None:
                broken += self.parity.break_interleaved(in_order, difference)
        for cell, reason in broken:
            self._store.append_event(broken_event(cell, block, reason))
            self._progress.say(f"block {block.number}: {cell.label} is INVALID: {reason}")

    def _count(self, blocks: int) -> None:
        """The first blocks once more with counters on, which timing never sees."""
        if not blocks:
            return
        self._progress.say(f"counters: {plural(blocks, 'block')} once more, untimed")
        self._engine.set_counters(True)
        try:
            for block in self.plan.blocks[:blocks]:
                if self._log.begin(Phase.COUNTERS, block):
                    self._run_block(Phase.COUNTERS, block)
                    self._log.finish(Phase.COUNTERS, block)
        finally:
            self._engine.set_counters(False)

    def _run_block(self, phase: Phase, block: Block) -> dict[Cell, BatchAnswer]:
        """A batch of every cell that is still measured, in the block's order."""
        live = self._live_cells()
        cells = [(n, cell) for n, cell in enumerate(block.order) if cell in live]
        return {cell: self._run_batch(cell, phase, block, order).answer for order, cell in cells}

    def _run_batch(self, cell: Cell, phase: Phase, block: Block, order: int) -> RanBatch:
        self._progress.doing("warm-up" if phase is Phase.WARMUP else f"block {block.number}")
        batch = self._batches.run(cell, phase, block, order)
        self._tell(batch)
        return batch

    def _tell(self, batch: RanBatch) -> None:
        """Count and show a batch; everything that was found of it is stored before."""
        self._check()
        record = batch.answer.record
        self._budget.batch(self._size.whole_s(batch))
        arm = f"{self.plan.baseline.label} (A/A)"
        self._progress.batch_done(arm if batch.cell.arm is AA else batch.cell.label, record)
        if record.phase is Phase.GATE and batch.cell == self.plan.baseline:
            self._forecast(batch)

    def _live_cells(self) -> frozenset[Cell]:
        """The cells that are still measured."""
        return frozenset(self.plan.cells) - self._idle - self.parity.broken.keys()


def _next_number(run: RunData) -> int:
    """The number of the next batch, behind those of cut blocks too."""
    numbers = (batch.batch for batch in (*run.batches, *run.superseded))
    return max(numbers, default=-1) + 1
