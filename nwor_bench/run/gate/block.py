"""The gate's block: compare every cell's greedy tokens, acceptance and K/V with off x off."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import psutil

from nwor_bench.analysis.parity.kv import KvResult, KvVerdict, kv_event, write_fault
from nwor_bench.analysis.parity.local import local_event, local_result
from nwor_bench.engine.protocol import Engine
from nwor_bench.records.cell import INTERLEAVED, NworMode, ScvMode
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.store import RunStore
from nwor_bench.records.types import Cell, Phase
from nwor_bench.records.window_order import WindowOrder
from nwor_bench.run.batch import AnswerCheck, BatchRunner, RanBatch
from nwor_bench.run.gate.kv import KvGate, rows_budget
from nwor_bench.run.gate.parity import BatchAnswer, ParityGate, broken_event
from nwor_bench.run.progress import Progress
from nwor_bench.workload.schedule import Block

MAX_INTERLEAVED = 4
"""Most interleaved batches of a gate: a short batch has windows for a few pairs of cells only, so
the next one has the cells that did not run yet."""

OrderOf = Callable[[Block, Sequence[Cell]], WindowOrder]
"""The order of these cells in an interleaved batch of the block."""


class GateBlock:
    """Runs the gate's block and stores the results.

    Args:
        block: the plan's, off x off first.
        batches: runs and stores the batches; its engine checks single layers.
        parity: checks tokens and acceptance, and remembers the cells that broke parity.
        kv: checks the cache.
        store: receives the results.
        progress: receives progress messages.
        tell: called with every batch once its results are stored.
        order_of: gives the order of interleaved batches; None if the run has none.
    """

    def __init__(
        self,
        block: Block,
        batches: BatchRunner,
        parity: ParityGate,
        kv: KvGate,
        store: RunStore,
        progress: Progress,
        tell: Callable[[RanBatch], None],
        order_of: OrderOf | None = None,
    ):
        self._block = block
        self._batches = batches
        self._parity = parity
        self._kv = kv
        self._store = store
        self._progress = progress
        self._tell = tell
        self._order_of = order_of
        self._stages = any(cell.nwor_mode is not NworMode.OFF for cell in block.order)

    def run(self) -> None:
        """A batch of every cell; the cells that differ are in `parity.broken` afterwards."""
        reference: BatchAnswer | None = None
        answers: dict[Cell | None, BatchAnswer] = {}
        began = time.perf_counter()
        with self._kv.watching():
            for order, cell in enumerate(self._block.order):
                expected = answers.get(cell.stock_twin, reference)
                answers[cell] = self._run_batch(cell, order, expected)
                reference = reference or answers[cell]
            if self._order_of is not None and reference is not None:
                self._run_interleaved(reference, self._order_of)
            self._batches.engine.check_layers(None)
            self._batches.watches = False
            if reference is not None:
                self._run_unwatched(answers, reference)
        results = [result for cell, result in self._kv.results.items() if cell.arm != INTERLEAVED]
        if results:
            facts = self._kv.facts(time.perf_counter() - began)
            self._store.update(kv_gate=facts)
            compared = sum(result.verdict is not KvVerdict.NOT_RUN for result in results)
            self._progress.say(
                f"K/V gate: the cache of {compared} of {len(results)} staging cells compared with "
                f"mode off's, {facts.seconds:.1f} s"
            )

    def _sound_cells(self) -> list[Cell]:
        return [cell for cell in self._block.order if cell not in self._parity.broken]

    def _run_unwatched(
        self, answers: Mapping[Cell | None, BatchAnswer], reference: BatchAnswer
    ) -> None:
        """The last batch, as timed ones are: without instruments, interleaved if the run is."""
        if self._order_of is not None:
            self._run_interleaved(reference, self._order_of)
            return
        for cell in _last_cells(self._sound_cells()):
            expected = answers.get(cell.stock_twin, reference)
            self._run_batch(cell, self._block.order.index(cell), expected)

    def _run_batch(self, cell: Cell, order: int, reference: BatchAnswer | None) -> BatchAnswer:
        """A batch of one cell."""
        self._progress.doing(f"gate: {cell.label}")

        def compare(answer: BatchAnswer) -> BatchAnswer:
            return self._parity.check(cell, answer, reference, self._block)

        def run(check: AnswerCheck) -> RanBatch:
            return self._batches.run(cell, Phase.GATE, self._block, order, check)

        batch, faults = self._checked(cell, run, compare)
        for fault in faults:
            every = self._parity.break_cell(cell, fault)
            self._store.append_event(broken_event(cell, self._block, every))
        self._tell(batch)
        return batch.answer

    def _run_interleaved(self, reference: BatchAnswer, order_of: OrderOf) -> None:
        """Interleaved batches of the cells that passed, until all that stage have run."""
        baseline, cells = reference.record.cell, self._sound_cells()
        waiting = [cell for cell in cells if cell.nwor_mode is not NworMode.OFF or cell.drafts]
        if not self._batches.watches:
            waiting = _last_cells(cells)
        for _ in range(MAX_INTERLEAVED):
            if not waiting:
                return
            order = replace(order_of(self._block, cells), untimed=True)
            ran, faults = self._interleaved(reference, order)
            for fault in faults:
                for cell, every in self._parity.break_interleaved(cells, fault):
                    self._store.append_event(broken_event(cell, self._block, every))
            self._tell(ran)
            if faults:
                return
            seen = {window.cell for window in ran.windows}
            waiting = [cell for cell in waiting if cell not in seen]
            # A window between two groups counts as its draft count's in mode off: the twin's.
            wanted = {baseline, *waiting, *(cell.stock_twin for cell in waiting)}
            cells = [cell for cell in cells if cell in wanted]
        if waiting:
            labels = ", ".join(cell.label for cell in waiting)
            self._progress.say(f"gate: not run in {MAX_INTERLEAVED} interleaved batches: {labels}")

    def _interleaved(
        self, reference: BatchAnswer, order: WindowOrder
    ) -> tuple[RanBatch, list[str]]:
        """One interleaved batch, and the faults in it."""
        baseline = reference.record.cell
        differences: list[str | None] = []

        def compare(answer: BatchAnswer) -> BatchAnswer:
            difference = self._parity.interleaved_difference(answer, reference, self._block)
            differences.append(difference)
            return answer

        def run(check: AnswerCheck) -> RanBatch:
            return self._batches.run_interleaved(
                baseline, Phase.INTERLEAVED_GATE, self._block, order, check
            )

        batch, faults = self._checked(replace(baseline, arm=INTERLEAVED), run, compare)
        return batch, [*(difference for difference in differences if difference), *faults]

    def _checked(
        self,
        cell: Cell,
        run: Callable[[AnswerCheck], RanBatch],
        compare: Callable[[BatchAnswer], BatchAnswer],
    ) -> tuple[RanBatch, list[str]]:
        """Run a batch of the gate and check it; the faults that `compare` does not find.

        Every check of a gate's batch is called here, of a cell's own and of interleaved ones.

        Args:
            cell: whose batch it is; with the arm INTERLEAVED that of all interleaved cells.
            run: runs the batch and calls its check while the K/V is in the cache.
            compare: checks tokens and acceptance.
        """
        kv_result: KvResult | None = None

        def check(prompts: list[list[int]], answer: BatchAnswer) -> BatchAnswer:
            # The cache first: the tie check runs batches that overwrite these blocks.
            nonlocal kv_result
            if answer.record.cell.drafts is None or self._stages:  # else no K/V is held back
                kv_result = self._kv.check(cell, prompts, answer)
            return compare(answer)

        batch = run(check)
        accepted = sum(w.accepted_tokens for w in batch.windows if w.staged_tokens)
        faults = [write_fault(batch.written, accepted)]
        if kv_result is not None:
            self._store.append_event(kv_event(cell, kv_result, batch.answer.record.batch))
            if kv_result.verdict is KvVerdict.BROKEN:
                faults.append(kv_result.reason or "K/V rows differ")
            states = kv_result.states
            if states is not None and states.verdict is KvVerdict.BROKEN:
                faults.append(states.reason or "states differ")
        if batch.layers or (self._batches.watches and cell.nwor_mode is not NworMode.OFF):
            local = local_result(batch.layers)
            self._store.append_event(local_event(cell, local))
            if local.verdict is KvVerdict.BROKEN:
                faults.append(local.reason or "a layer is not stock's")
        return batch, [fault for fault in faults if fault is not None]


def _last_cells(cells: Iterable[Cell]) -> list[Cell]:
    """Cells that must run in the last batch: those of SCV adaptive, one an engine and draft count,
    whose windows are ready only without instruments. Without one, the last cell that stages."""
    staging = [cell for cell in cells if cell.nwor_mode is not NworMode.OFF]
    adaptive = [cell for cell in staging if cell.scv_mode is ScvMode.ADAPTIVE]
    return adaptive or staging[-1:]


def kv_gate(engine: Engine, status: EngineStatus, baseline: Cell) -> KvGate:
    """The K/V gate, with a memory budget for rows from the host's free memory."""
    budget = rows_budget(psutil.virtual_memory().available, len(status.ranks or (0,)))
    return KvGate(engine.kv_cache(), engine.set_modes, status, baseline, budget)
