"""The gate's block: compare every cell's greedy tokens, acceptance and K/V with off x off."""

import time
from collections.abc import Callable

import psutil

from nwor_bench.analysis.parity.kv_result import KvResult, kv_event
from nwor_bench.analysis.parity.kv_verdict import KvVerdict
from nwor_bench.analysis.parity.write_check import write_fault
from nwor_bench.engine.protocol import Engine
from nwor_bench.records.engine_status import EngineStatus
from nwor_bench.records.store import RunStore
from nwor_bench.records.types import Cell, Phase
from nwor_bench.run.batch import BatchRunner, RanBatch
from nwor_bench.run.gate.kv import KvGate, rows_budget
from nwor_bench.run.gate.parity import Answer, ParityGate, broken_event
from nwor_bench.run.progress import Progress
from nwor_bench.workload.schedule import Block


class GateBlock:
    """Runs the gate's block and stores the results.

    Args:
        block: the plan's, off x off first.
        batches: runs and stores the batches.
        parity: checks tokens and acceptance, and remembers the cells that broke parity.
        kv: checks the cache.
        store: receives the results.
        progress: receives progress messages.
        tell: called with every batch once its results are stored.
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
    ):
        self._block = block
        self._batches = batches
        self._parity = parity
        self._kv = kv
        self._store = store
        self._progress = progress
        self._tell = tell

    def run(self) -> None:
        """A batch of every cell; the cells that differ are in `parity.broken` afterwards."""
        reference: Answer | None = None
        began = time.perf_counter()
        with self._kv.watching():
            for order, cell in enumerate(self._block.order):
                answer = self._run_batch(cell, order, reference)
                reference = reference or answer
        found = self._kv.results.values()
        if found:
            facts = self._kv.facts(time.perf_counter() - began)
            self._store.update(kv_gate=facts)
            compared = sum(result.verdict is not KvVerdict.NOT_RUN for result in found)
            self._progress.say(
                f"K/V gate: the cache of {compared} of {len(found)} staging cells compared with "
                f"mode off's, {facts.seconds:.1f} s"
            )

    def _run_batch(self, cell: Cell, order: int, reference: Answer | None) -> Answer:
        kv_result: KvResult | None = None

        def check(prompts: list[list[int]], answer: Answer) -> Answer:
            # The cache first: the tie check runs batches that overwrite these blocks.
            nonlocal kv_result
            kv_result = self._kv.check(cell, prompts, answer)
            return self._parity.check(cell, answer, reference, self._block)

        batch = self._batches.run(cell, Phase.GATE, self._block, order, check)
        committed = sum(window.committed_tokens for window in batch.windows)
        fault = write_fault(batch.written, committed)
        if fault is not None:
            self._break(cell, fault)
        self._keep(cell, kv_result)
        self._tell(batch)
        return batch.answer

    def _keep(self, cell: Cell, found: KvResult | None) -> None:
        """Record the K/V gate's result; BROKEN makes the cell INVALID."""
        if found is None:
            return
        self._store.append_event(kv_event(cell, found))
        if found.verdict is KvVerdict.BROKEN:
            self._break(cell, found.reason or "K/V rows differ")

    def _break(self, cell: Cell, reason: str) -> None:
        every = self._parity.break_cell(cell, reason)
        self._store.append_event(broken_event(cell, self._block, every))


def kv_gate(engine: Engine, status: EngineStatus, baseline: Cell) -> KvGate:
    """The K/V gate, with a memory budget for rows from the host's free memory."""
    budget = rows_budget(psutil.virtual_memory().available, len(status.ranks or (0,)))
    return KvGate(engine.kv_cache(), engine.set_modes, status, baseline, budget)
