"""Which blocks of a run are finished, and which of them an earlier start left unfinished.

A run that was cut short goes on behind its last finished block: finished blocks are neither run
nor checked again. The block that was cut is run again whole, since its cells are compared with each
other and two engine processes break ties in different ways.
"""

from datetime import UTC, datetime

from nwor_bench.records.finished_blocks import (
    BlockKey,
    cut_blocks,
    finished_event,
    superseded_event,
)
from nwor_bench.records.store import RunData, RunStore
from nwor_bench.records.types import Phase
from nwor_bench.workload.schedule import Block


class BlockLog:
    """Notes each block's begin and end in the run's store.

    Args:
        store: receives the events.
        run: what is stored already.

    Attributes:
        finished_before: blocks that an earlier start finished.
    """

    def __init__(self, store: RunStore, run: RunData):
        self.finished_before = run.finished
        self._store = store
        self._cut = cut_blocks(run.batches, run.finished)

    def is_cut(self, phase: Phase, block: Block) -> bool:
        """True for a block that an earlier start began, until it begins again."""
        return (phase, block.number) in self._cut

    def begin(self, phase: Phase, block: Block) -> bool:
        """False if the block is finished; what it had before it was cut is set aside."""
        key: BlockKey = (phase, block.number)
        if key in self.finished_before:
            return False
        if key in self._cut:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._store.append_event(superseded_event(key, self._cut.pop(key), now))
        return True

    def finish(self, phase: Phase, block: Block) -> None:
        """Note that the block was run and checked to its end."""
        self._store.append_event(finished_event((phase, block.number)))
