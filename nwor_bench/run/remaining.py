"""What of a plan is still to be run: the batches that the budget has room for, and when to stop."""

from pathlib import Path

from nwor_bench.records.store import read_run
from nwor_bench.records.types import Phase
from nwor_bench.run.block_log import BlockLog
from nwor_bench.run.budget import Budget
from nwor_bench.run.looks import half_widths
from nwor_bench.workload.config import RunSpec
from nwor_bench.workload.schedule import Block, Plan


class RemainingWork:
    """The rest of one run's blocks; `cells` are always those that are still measured.

    Args:
        plan: what to run.
        spec: when to stop, and which counters are wanted.
        budget: the run's clock.
        log: the blocks that are finished.
        folder: the run's, for the intervals at each look.
        has_probe: the engine can time each window's phases.
    """

    def __init__(
        self,
        plan: Plan,
        spec: RunSpec,
        budget: Budget,
        log: BlockLog,
        folder: Path,
        has_probe: bool,
    ):
        self._plan = plan
        self._spec = spec
        self._budget = budget
        self._log = log
        self._folder = folder
        self._has_probe = has_probe

    def untimed_blocks(self, cells: int) -> dict[Phase, int]:
        """Blocks that run once more behind the last, by what is on in them."""
        probed = self._budget.probed_blocks(cells) if self._has_probe else 0
        return {Phase.PROBE: probed, **self._spec.counted_blocks}

    def has_whole_batches(self, block: Block, cells: int) -> bool:
        """True if every cell has a batch of its own; a check only where it has room."""
        if not self._plan.has_whole_batches(block):
            return False
        if not self._plan.interleaved or self._log.is_cut(Phase.TIMED, block):
            return True
        return self._budget.has_room_to_check(cells)

    def why_stop(self, done: int, cells: int) -> str | None:
        """What the stopping rule says after `done` blocks."""
        rule, blocks = self._spec.stopping, self._plan.blocks
        widths = half_widths(read_run(self._folder), done) if done in rule.looks else []
        if self._log.finished_before & {(Phase.TIMED, done + 1), (Phase.INTERLEAVED, done + 1)}:
            return rule.stop(done, widths, 0.0, 0.0)  # the clock let an earlier try go on
        # With one more block the untimed ones behind the last must fit in too.
        whole_s = self._budget.block_s(Phase.TIMED, cells)
        next_s = whole_s * sum(self.untimed_blocks(cells).values())
        if done == len(blocks) or self.has_whole_batches(blocks[done], cells):
            next_s += whole_s
        if self._plan.interleaved:
            next_s += self._budget.block_s(Phase.INTERLEAVED, 1)
        return rule.stop(done, widths, self._budget.spent_s, next_s)
