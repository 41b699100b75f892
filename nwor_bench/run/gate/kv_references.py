"""Positions that the K/V gate checks, and reference rows of mode off: prefilled once and reused."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nwor_bench.engine.protocol import KvCache, Pair, Span
from nwor_bench.records.facts import EngineStatus


def committed_positions(prompt_length: int, output_length: int) -> int:
    """Positions whose K/V the cache must hold: all tokens but the last, which is only sampled."""
    return max(prompt_length + output_length - 1, 0)


def choose_spans(lengths: Sequence[tuple[int, int]], room: int) -> list[Span]:
    """The last positions of each request, `room` of them in all.

    Output positions of all requests come first, since staging writes those; then the prompts',
    from their ends. If room is short, the shortest requests are covered completely.

    Args:
        lengths: (prompt, output) tokens of each request.
        room: most positions of all requests together.
    """
    committed = [committed_positions(*each) for each in lengths]
    outputs = [
        max(total - prompt, 0) for total, (prompt, _) in zip(committed, lengths, strict=True)
    ]
    shares = _evenly(outputs, room)
    prompts = [total - output for total, output in zip(committed, outputs, strict=True)]
    if shares == outputs:
        more = _evenly(prompts, room - sum(shares))
        shares = [share + extra for share, extra in zip(shares, more, strict=True)]
    return [(total - share, total) for total, share in zip(committed, shares, strict=True)]


def _evenly(wanted: Sequence[int], room: int) -> list[int]:
    """Split `room` evenly: no request gets more than it wants; the rest goes to the others."""
    shares = [0] * len(wanted)
    left = max(room, 0)
    by_size = sorted(range(len(wanted)), key=lambda i: wanted[i])
    for place, i in enumerate(by_size):
        shares[i] = min(wanted[i], left // (len(wanted) - place))
        left -= shares[i]
    return shares


def groups_that_fit(lengths: Sequence[int], block_size: int, blocks: int) -> list[list[int]]:
    """Indices of sequences in order, in groups whose blocks fit into the cache together.

    Otherwise vLLM would reuse a finished sequence's blocks before its K/V is checked. A sequence
    that is too large for the cache is a group of its own.

    Args:
        lengths: tokens of each sequence, drafts that vLLM reserves room for included.
        block_size: tokens a block.
        blocks: blocks that the cache can give away.
    """
    groups: list[list[int]] = []
    free = 0
    for number, length in enumerate(lengths):
        needed = -(-length // block_size)
        if not groups or needed > free:
            groups.append([])
            free = blocks
        groups[-1].append(number)
        free -= needed
    return groups


def halves(numbers: Sequence[int]) -> list[list[int]]:
    """The same indices in two groups; none for a single one, which has no other batch shape."""
    middle = len(numbers) // 2
    return [list(numbers[:middle]), list(numbers[middle:])] if middle else []


Ids = tuple[int, ...]


@dataclass(frozen=True)
class KvBatch:
    """Token ids and kept positions of one finished batch's requests."""

    prompt_lengths: tuple[int, ...]
    ids: tuple[Ids, ...]
    """Prompt and output of each request without the last token, which has no K/V yet."""
    spans: tuple[Span, ...]
    """The positions that are kept."""

    @property
    def committed(self) -> int:
        """Positions of all requests."""
        return sum(len(ids) for ids in self.ids)

    @property
    def beyond_budget(self) -> int:
        """Positions that are not kept."""
        return self.committed - sum(stop - start for start, stop in self.spans)


def kv_batch(
    prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], room: int
) -> KvBatch:
    """A batch of which at most `room` positions are kept."""
    lengths = [(len(prompt), len(output)) for prompt, output in zip(prompts, outputs, strict=True)]
    ids = [
        tuple([*prompt, *output][: committed_positions(len(prompt), len(output))])
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    spans = choose_spans(lengths, room)
    return KvBatch(tuple(prompt for prompt, _ in lengths), tuple(ids), tuple(spans))


class KvReferences:
    """Rows of mode off for token ids, kept on every rank.

    Args:
        cache: the engine's KV cache.
        to_off: switches the engine to off x off.
        status: the engine's facts, of which the number and size of blocks are read.
    """

    def __init__(self, cache: KvCache, to_off: Callable[[], None], status: EngineStatus):
        self._cache = cache
        self._to_off = to_off
        self._status = status
        self._places: dict[Ids, tuple[str, int]] = {}
        self._lasting: set[str] = set()
        self._sets = 0

    def pairs(self, batch: KvBatch, *, lasting: bool = False) -> list[Pair]:
        """Each request with its reference, which is prefilled unless it is kept already.

        References that are not `lasting` are dropped when others need room.
        """
        missing = [i for i, ids in enumerate(batch.ids) if ids not in self._places]
        if missing:
            self._forget_all_but(batch.ids)
        for group in self._groups(batch, missing):
            name = self._prefill(batch, group)
            if lasting:
                self._lasting.add(name)
            self._places |= {batch.ids[i]: (name, at) for at, i in enumerate(group)}
        return self._pairs(batch, range(len(batch.ids)))

    def own_errors(self, batch: KvBatch) -> list[list[dict[str, Any]]]:
        """Mode off against itself: the references of `batch` against other prefills.

        These run in two halves, which is another batch shape (a single request has none), and with
        attention moved by one rounding step in every layer. One comparison per group of requests.
        Call `pairs` first.
        """
        everybody = list(range(len(batch.ids)))
        found = []
        for numbers in halves(everybody) or [everybody]:
            for group in self._groups(batch, numbers):
                name = self._prefill(batch, group, nudged=True)
                found.append(self._cache.compare(name, self._pairs(batch, group)))
                self._cache.drop([name])
        return found

    def _pairs(self, batch: KvBatch, numbers: Sequence[int]) -> list[Pair]:
        return [
            (at, *self._places[batch.ids[i]], batch.prompt_lengths[i])
            for at, i in enumerate(numbers)
        ]

    def _forget_all_but(self, wanted: Sequence[Ids]) -> None:
        shared = {self._places[ids][0] for ids in wanted if ids in self._places}
        stale = {name for name, _ in self._places.values()} - shared - self._lasting
        self._places = {ids: place for ids, place in self._places.items() if place[0] not in stale}
        self._cache.drop(sorted(stale))

    def _prefill(self, batch: KvBatch, numbers: Sequence[int], *, nudged: bool = False) -> str:
        """Prefill these requests' tokens in mode off; returns the name of the kept rows."""
        self._to_off()
        self._sets += 1
        name = f"prefill-{self._sets}"
        self._cache.prefill([batch.ids[i] for i in numbers], nudged=nudged)
        self._cache.keep(name, [batch.spans[i] for i in numbers])
        return name

    def _groups(self, batch: KvBatch, numbers: Sequence[int]) -> list[list[int]]:
        """Requests that fit into the cache together, with one more block each."""
        size, blocks = self._status.block_size, self._status.num_gpu_blocks
        assert size is not None
        assert blocks is not None
        lengths = [len(batch.ids[i]) + size for i in numbers]
        groups = groups_that_fit(lengths, size, blocks - 1)  # vLLM keeps one empty
        return [[numbers[at] for at in group] for group in groups]
