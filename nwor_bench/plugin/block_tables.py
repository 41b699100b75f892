"""Which cache blocks each request was given, noted from the scheduler's output.

After a request has finished its blocks keep their contents until they are given away again, so
its K/V can be read for as long as no other request was given one of its blocks.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from nwor_bench.plugin.late_counts import outer_name
from nwor_bench.plugin.patching import Patch

NULL_BLOCK = 0
"""vLLM's block of no content: it stands for blocks that a layer does not need any more."""

Held = tuple[int, int]
"""A block, and how often it had been given away when the request got it."""


class BlockTables:
    """Block tables of every request since `clear`, and which of their blocks were reused.

    Args:
        block_sizes: tokens a block, one for each KV-cache group.
    """

    def __init__(self, block_sizes: Sequence[int]):
        self.block_sizes = tuple(block_sizes)
        self._given: Counter[int] = Counter()
        self._tables: dict[str, list[list[Held]]] = {}

    def clear(self) -> None:
        """Forget all requests."""
        self._given.clear()
        self._tables.clear()

    def note(self, scheduler_output: Any) -> None:
        """Take over the blocks of one step.

        A block counts as given away before any table is written down: a request may hit a block
        that another one gets in the same step, and both then hold the same contents.
        """
        changes = list(_changes(scheduler_output))
        for _, blocks, computed in changes:
            for group, ids in enumerate(blocks):
                hits = 0 if computed is None else computed // self.block_sizes[group]
                self._given.update(ids[hits:])
        for req_id, blocks, computed in changes:
            name = outer_name(req_id)
            if computed is not None:
                self._tables[name] = [[] for _ in blocks]
            elif name not in self._tables:  # it began before this was switched on
                continue
            for table, ids in zip(self._tables[name], blocks, strict=True):
                table.extend((block, self._given[block]) for block in ids)

    def slots(self, name: str, group: int, start: int, stop: int) -> list[int]:
        """The cache slot of each position from `start` to `stop`; -1 where it is not known.

        Not known: the block was given to another request since, or the request never had one.
        """
        table = (self._tables.get(name) or [[] for _ in self.block_sizes])[group]
        size = self.block_sizes[group]
        return [_slot(table, position, size, self._given) for position in range(start, stop)]


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


def _slot(table: list[Held], position: int, size: int, given: Counter[int]) -> int:
    index = position // size
    if index >= len(table):
        return -1
    block, times = table[index]
    if block == NULL_BLOCK or given[block] != times:
        return -1
    return block * size + position % size


class BlockWatch:
    """Notes the blocks of every step of a runner while it is on; nothing is wrapped otherwise."""

    def __init__(self, runner: Any):
        groups = runner.kv_cache_config.kv_cache_groups
        self.tables = BlockTables([group.kv_cache_spec.block_size for group in groups])
        self._patch = Patch(runner, "execute_model", self._wrap)

    def switch(self, on: bool) -> None:
        """Begin with empty tables, or stop and forget them; nothing if it is so already."""
        if on == self._patch.applied:
            return
        self.tables.clear()
        if on:
            self._patch.apply()
        else:
            self._patch.undo()

    def _wrap(self, original: Any) -> Any:
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("dummy_run"):
                self.tables.note(scheduler_output)
            return original(scheduler_output, *args, **kwargs)

        return execute_model
