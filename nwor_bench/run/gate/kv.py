"""The K/V gate: compare the cache after a staging cell's gate batch with mode off's.

`ParityGate` checks tokens and acceptance. With synthetic acceptance the output does not follow the
target's logits, and this gate is the only check of values.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nwor_bench.analysis.parity.kv import (
    MULTIPLES,
    TOO_BLUNT,
    KvMismatch,
    KvResult,
    KvVerdict,
    LayerKey,
    Tolerance,
    compare_exactly,
    compare_within,
    compared_layers,
    only_rounding,
    tolerances,
)
from nwor_bench.engine.protocol import KeptPair, KvCache, Span
from nwor_bench.records.cell import INTERLEAVED
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.header import KvGateFacts
from nwor_bench.records.types import Cell, NworMode
from nwor_bench.run.gate.parity import BatchAnswer
from nwor_bench.run.gate.states import Ids, StateGate

BUDGET_BYTES = 4 << 30
"""Most memory for kept rows on each rank."""

HOST_SHARE = 0.25
"""Largest share of the host's free memory for the kept rows of all ranks."""

SETS_AT_ONCE = 4
"""Sets of rows kept at a time: off x off's own, its prefill, a cell's, one more."""

BIT_FOR_BIT = "the rows that off x off left, bit for bit"
WITH_PREFILL = "mode off's prefill of the same tokens"
NOTHING_CHECKED = (
    "no position could be checked in every layer: other requests were given their blocks"
)
NOTHING_STAGED = "nothing was staged"


def choose_spans(lengths: Sequence[tuple[int, int]], room: int) -> list[Span]:
    """The last positions of each request, `room` of them in all.

    Output positions of all requests come first, since staging writes those; then the prompts',
    from their ends. If room is short, the shortest requests are covered completely.

    Args:
        lengths: (prompt, output) tokens of each request.
        room: most positions of all requests together.
    """
    committed = [max(sum(tokens) - 1, 0) for tokens in lengths]  # the last is only sampled
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
    ids = [tuple([*prompt, *output][:-1]) for prompt, output in zip(prompts, outputs, strict=True)]
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

    def pairs(self, batch: KvBatch, *, lasting: bool = False) -> list[KeptPair]:
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
        errors = []
        middle = len(everybody) // 2
        for numbers in filter(None, (everybody[:middle], everybody[middle:])):
            for group in self._groups(batch, numbers):
                name = self._prefill(batch, group, nudged=True)
                errors.append(self._cache.rows.compare(name, self._pairs(batch, group)))
                self._cache.rows.drop([name])
        return errors

    def _pairs(self, batch: KvBatch, numbers: Sequence[int]) -> list[KeptPair]:
        return [
            (at, *self._places[batch.ids[i]], batch.prompt_lengths[i])
            for at, i in enumerate(numbers)
        ]

    def _forget_all_but(self, wanted: Sequence[Ids]) -> None:
        shared = {self._places[ids][0] for ids in wanted if ids in self._places}
        stale = {name for name, _ in self._places.values()} - shared - self._lasting
        self._places = {ids: place for ids, place in self._places.items() if place[0] not in stale}
        self._cache.rows.drop(sorted(stale))

    def _prefill(self, batch: KvBatch, numbers: Sequence[int], *, nudged: bool = False) -> str:
        """Prefill these requests' tokens in mode off; returns the name of the kept rows."""
        self._to_off()
        self._sets += 1
        name = f"prefill-{self._sets}"
        self._cache.prefill([batch.ids[i] for i in numbers], nudged=nudged)
        self._cache.rows.keep(name, [batch.spans[i] for i in numbers])
        return name

    def _groups(self, batch: KvBatch, numbers: Sequence[int]) -> list[list[int]]:
        """Requests that fit into the cache together, with one more block each."""
        size, blocks = self._status.block_size, self._status.num_gpu_blocks
        assert size is not None
        assert blocks is not None
        lengths = [len(batch.ids[i]) + size for i in numbers]
        groups = groups_that_fit(lengths, size, blocks - 1)  # vLLM keeps one empty
        return [[numbers[at] for at in group] for group in groups]


class KvGate:
    """Compares the cache after staging cells' gate batches with mode off's.

    Args:
        cache: the engine's KV cache.
        set_modes: switches the engine's modes.
        status: the engine's facts: device, layers, bytes a token, blocks.
        baseline: the cell off x off.
        budget: bytes of kept rows on each rank.

    Attributes:
        results: result of each cell.
    """

    def __init__(
        self,
        cache: KvCache,
        set_modes: Callable[[Cell], None],
        status: EngineStatus,
        baseline: Cell,
        budget: int = BUDGET_BYTES,
    ):
        self._cache = cache
        self._baseline = baseline
        self._budget = budget
        self._bytes_per_token = status.bytes_per_token or 0
        # Staged states come from another kernel than stock's, and all later layers follow them.
        self._one_attention = str(status.device).startswith("cpu") and not status.state_layers
        to_off = partial(set_modes, baseline)
        self._routed = bool(status.experts)
        self._references = KvReferences(cache, to_off, status)
        self._states = StateGate(cache, to_off, self._routed) if status.state_layers else None
        self._off: tuple[KvBatch, BatchAnswer] | None = None
        self._tolerances: dict[LayerKey, Tolerance] = {}
        self._why_not: str | None = "off x off was not looked at before it"
        self._seconds = 0.0
        self.results: dict[Cell, KvResult] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the blocks of all requests while inside; does nothing if nothing can be staged."""
        if not self._bytes_per_token:
            yield
            return
        self._cache.watch(True)
        try:
            yield
        finally:
            self._cache.watch(False)

    def check(
        self, cell: Cell, prompts: Sequence[Sequence[int]], answer: BatchAnswer
    ) -> KvResult | None:
        """Check the cache after the cell's gate batch; None for a cell of mode off, or of another
        engine, which has a cache of its own.

        Call it right after each batch of the gate, for off x off first; for a draft count in mode
        off right before the same one staged. A cell with the arm INTERLEAVED stands for all
        interleaved cells.
        """
        stages = cell.nwor_mode is not NworMode.OFF or cell.arm == INTERLEAVED
        other_engine = stages and cell.drafts is None and cell.arm not in (None, INTERLEAVED)
        if other_engine or not (stages or cell == self._baseline or cell.drafts is not None):
            return None
        began = time.perf_counter()
        room = self._budget // SETS_AT_ONCE // max(self._bytes_per_token, 1)
        batch = kv_batch(prompts, answer.token_ids, room)
        if not stages:
            self._keep_off(batch, answer)
            self._seconds += time.perf_counter() - began
            return None
        if self._states is not None:
            self._states.keep_cell(batch.ids)  # before a prefill is copied
        result = self._check(batch, answer)
        if self._states is not None and result.reason != NOTHING_STAGED:
            result = replace(result, states=self._states.compare())
        spent = time.perf_counter() - began
        self._seconds += spent
        self.results[cell] = replace(result, seconds=round(spent, 3))
        return self.results[cell]

    def facts(self, gate_seconds: float) -> KvGateFacts:
        """The comparison's tolerances, cost and results, for run.json."""
        return KvGateFacts(
            multiples=MULTIPLES,
            budget_bytes=self._budget,
            seconds=round(self._seconds, 3),
            gate_seconds=round(gate_seconds, 3),
            own_errors=self._own_errors(),
            cells={cell.label: result.to_dict() for cell, result in self.results.items()},
        )

    def _own_errors(self) -> dict[str, dict[str, float]] | None:
        """Mode off against itself, over layers and ranks; None if no cell needed it."""
        if not self._tolerances:
            return None
        every = {name: [t.own[name] for t in self._tolerances.values()] for name in MULTIPLES}
        return {name: {"smallest": min(v), "largest": max(v)} for name, v in every.items()}

    def _keep_off(self, batch: KvBatch, answer: BatchAnswer) -> None:
        if not self._bytes_per_token:
            return
        if self._states is not None:
            self._states.keep_off(batch.ids)
        self._why_not = self._cache.rows.keep("off", batch.spans).unreadable
        self._off = (batch, answer) if self._why_not is None else None

    def _check(self, batch: KvBatch, answer: BatchAnswer) -> KvResult:
        record = answer.record
        if record.nwor_mode is NworMode.STAGE and not record.staged_tokens:
            return KvResult(KvVerdict.NOT_RUN, NOTHING_STAGED)
        if self._off is None:
            return KvResult(KvVerdict.NOT_RUN, self._why_not)
        self._cache.rows.keep("cell", batch.spans)
        try:
            if self._one_attention and _ran_alike(answer, self._off[1]):
                return self._check_exact(batch)
            return self._check_within(batch)
        finally:
            self._cache.rows.drop(["cell"])

    def _check_exact(self, batch: KvBatch) -> KvResult:
        pairs = [(i, "off", i, length) for i, length in enumerate(batch.prompt_lengths)]
        ranks = self._cache.rows.compare("cell", pairs)
        finding = compare_exactly(ranks)
        if finding is not None and only_rounding(ranks):
            # A busy CPU's libraries may sum in another order: the rule of a GPU decides.
            return self._check_within(batch)
        verdict = KvVerdict.EXACT if finding is None else KvVerdict.BROKEN
        return _result(batch, ranks, verdict, finding, BIT_FOR_BIT)

    def _check_within(self, batch: KvBatch) -> KvResult:
        why_not = self._measure_tolerances()
        if why_not is not None:
            return KvResult(KvVerdict.NOT_RUN, why_not)
        ranks = self._cache.rows.compare("cell", self._references.pairs(batch))
        finding, broken = compare_within(ranks, self._tolerances)
        verdict = KvVerdict.BROKEN if broken else KvVerdict.WITHIN
        layers = len(compared_layers(self._tolerances, "KV"))
        return _result(batch, ranks, verdict, finding, WITH_PREFILL, layers)

    def _measure_tolerances(self) -> str | None:
        """Measure mode off against itself, once; returns why that failed, else None.

        Compares off x off's rows with a prefill of the same tokens, and that prefill with one in
        another batch shape and with attention moved by one rounding step.
        """
        if self._tolerances:
            return None
        assert self._off is not None
        batch, _ = self._off
        pairs = self._references.pairs(batch, lasting=True)
        compared = [self._cache.rows.compare("off", pairs), *self._references.own_errors(batch)]
        self._tolerances, why_not = tolerances(compared, routed=self._routed)
        if why_not is None and not self._tolerances:
            return "no row of off x off could be compared with mode off itself"
        return why_not


def _result(
    batch: KvBatch,
    ranks: Sequence[Mapping[str, Any]],
    verdict: KvVerdict,
    finding: KvMismatch | None,
    compared_with: str,
    layers: int | None = None,
) -> KvResult:
    """The result; `layers` are those that were compared, None: all."""
    first = ranks[0]
    of_layers = len({entry["layer"] for entry in first["errors"]})
    result = KvResult(
        verdict,
        compared_with=compared_with,
        committed=batch.committed,
        checked=first["checked"],
        unknown=first["unknown"],
        beyond_budget=batch.beyond_budget,
        layers=of_layers if layers is None else layers,
        of_layers=of_layers,
        ranks=len(ranks),
        finding=finding,
    )
    if verdict is KvVerdict.BROKEN and finding is not None:
        return replace(result, reason=finding.sentence(len(ranks)))
    # `checked` is that of the group that knows the fewest: the others' errors may be BROKEN.
    if not first["checked"]:
        return replace(result, verdict=KvVerdict.NOT_RUN, reason=NOTHING_CHECKED)
    if not result.layers:
        return replace(result, verdict=KvVerdict.NOT_RUN, reason=TOO_BLUNT)
    return result


def _ran_alike(answer: BatchAnswer, off: BatchAnswer) -> bool:
    """True if tokens and windows are equal: with one attention kernel, so is the arithmetic."""
    ours, theirs = answer.record, off.record
    return answer.token_ids == off.token_ids and (
        (ours.windows, ours.draft_tokens, ours.vllm_accepted_per_position)
        == (theirs.windows, theirs.draft_tokens, theirs.vllm_accepted_per_position)
    )


def rows_budget(free_bytes: int, ranks: int) -> int:
    """Bytes for kept rows on each rank, with `free_bytes` free on the host."""
    return min(BUDGET_BYTES, int(free_bytes * HOST_SHARE / ranks))
