"""Which cache blocks each request was given, noted from the scheduler's output.

After a request has finished its blocks keep their contents until they are given away again. vLLM
gives a request's last, partly filled block away first, within the same batch: blocks about to be
lost are reported in time to copy their rows.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from nwor_bench.plugin.patching import Patch
from nwor_bench.plugin.scheduler_output import external_request_id

NULL_BLOCK = 0
"""vLLM's empty block, in place of blocks that a layer no longer needs."""

Held = tuple[int, int]
"""A block, and how often it had been reused when the request got it."""


class BlockTables:
    """Block tables of one KV-cache group for every request since `clear`.

    Args:
        block_sizes: tokens a block, one for each KV-cache group; all share one pool of blocks.
    """

    def __init__(self, block_sizes: Sequence[int], group: int):
        self.block_size = block_sizes[group]
        self._block_sizes = tuple(block_sizes)
        self._group = group
        self._given: Counter[int] = Counter()
        self._tables: dict[str, list[Held]] = {}
        self._held: set[Held] = set()

    def clear(self) -> None:
        """Forget all requests."""
        self._given.clear()
        self._tables.clear()
        self._held.clear()

    def note(self, output: Any) -> list[Held]:
        """Take over the blocks of one step's scheduler output.

        Returns the noted blocks that are given away again in this step: their request has finished,
        or they have left its sliding window. Their contents are lost once the step runs.

        A block counts as given away before any table is written down: a request may hit a block
        that another one gets in the same step, and both then hold the same contents.
        """
        changes = list(_changes(output))
        lost = [held for held in self._given_now(changes) if held in self._held]
        for req_id, blocks, computed in changes:
            name = external_request_id(req_id)
            if computed is not None:
                self._tables[name] = []
            if name in self._tables:  # else it began before this was switched on
                held = [(block, self._given[block]) for block in blocks[self._group]]
                self._tables[name] += held
                self._held.update(held)
        return lost

    def _given_now(
        self, changes: Iterable[tuple[str, Sequence[list[int]], int | None]]
    ) -> Iterator[Held]:
        """Count the blocks that are given away; each as it was held until now."""
        for _, blocks, computed in changes:
            for size, ids in zip(self._block_sizes, blocks, strict=True):
                hits = 0 if computed is None else computed // size
                for block in ids[hits:]:
                    yield block, self._given[block]
                    self._given[block] += 1

    def held(self, name: str, start: int, stop: int) -> list[Held | None]:
        """The block of each position from `start` to `stop`; None if there is none."""
        table = self._tables.get(name, [])
        blocks = [position // self.block_size for position in range(start, stop)]
        found = [table[block] if block < len(table) else None for block in blocks]
        return [held if held and held[0] != NULL_BLOCK else None for held in found]

    def is_current(self, held: Held) -> bool:
        """True if the block has not been given to another request since."""
        block, times = held
        return self._given[block] == times


def _changes(output: Any) -> Iterator[tuple[str, Sequence[list[int]], int | None]]:
    """(request, its blocks of each group, tokens that were in the cache already).

    The last is None for blocks that come on top of those which the request has.
    """
    for new in output.scheduled_new_reqs:  # V2 sends resumed requests as new ones, too
        yield new.req_id, new.block_ids, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    for i, req_id in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[i]
        if blocks is not None:
            resumed = req_id in cached.resumed_req_ids
            yield req_id, blocks, cached.num_computed_tokens[i] if resumed else None


class BlockWatch:
    """Notes the blocks of every step of a runner while it is on; nothing is wrapped otherwise.

    Args:
        groups: numbers of the KV-cache groups whose blocks are noted.
    """

    def __init__(self, runner: Any, groups: Iterable[int]):
        specs = [each.kv_cache_spec for each in runner.kv_cache_config.kv_cache_groups]
        sizes = [spec.block_size for spec in specs]
        self.tables = {group: BlockTables(sizes, group) for group in groups}
        self.before_loss: dict[int, Callable[[list[Held]], None]] = {}
        """By group: called with blocks whose contents are lost once the step runs."""
        self._patch = Patch(runner, "execute_model", self._wrap)

    def switch(self, on: bool) -> None:
        """Start with empty tables, again if already on; or stop and forget them."""
        for tables in self.tables.values():
            tables.clear()
        if on and not self._patch.applied:
            self._patch.apply()
        elif not on:
            self._patch.undo()

    def _wrap(self, original: Any) -> Any:
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("dummy_run"):
                for group, tables in self.tables.items():
                    lost = tables.note(scheduler_output)
                    if lost and group in self.before_loss:
                        self.before_loss[group](lost)
            return original(scheduler_output, *args, **kwargs)

        return execute_model
