"""Draft counts of vLLM's scheduler, set step by step: stock code looks k up by batch size.

The lookup (`num_speculative_tokens_per_batch_size`) gives the drafts that a step proposes; the next
step verifies them. So it is set one place ahead. What a step verifies is read from its
SchedulerOutput, never taken from what was asked for, and its place travels to the workers with it:
they switch NWOR's mode by it if a cell stages. A group that was cut is left; the next one begins
once its first count is verified, which takes a step or two.

In a server times and tokens need windows of different kinds. Times come from groups of twelve
neighbouring windows that only decode, A B B A with k = 0. Tokens come from the spans between them,
of some windows at one k: a window begins where the one before it ended, and right behind another k
that is at other places of the text. A span goes on through prefills, and no span has k = 0, whose
tokens are known: a server under test speculates in most of its steps.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle
from math import ceil
from typing import Any

from nwor_bench.errors import EngineError
from nwor_bench.instruments.contract import Feature, Need, installed_source, lost, problem
from nwor_bench.records.types import SETTLING, NworMode
from nwor_bench.records.window_order import (
    PLACE,
    SERVER_DRAFT_RUN_LENGTHS,
    SERVER_SEED,
    Order,
    WindowOrder,
    WindowPlace,
    only_verifies,
    places_of,
)

CHANGES_COUNT = frozenset({"eagle", "eagle3", "mtp", "draft_model"})
"""Methods whose drafter proposes as many drafts as the scheduler says, for every request, and keeps
its cache filled at k = 0. vLLM 0.32 asserts a constant number for suffix and ngram_gpu, dflash and
dspark draft a block in one pass, and ngram finds drafts for some requests only."""

WHICH_CHANGE = f"only {', '.join(sorted(CHANGES_COUNT))} change their draft count step by step"

WHY_NOT_ADAPTIVE = (
    "with it vLLM decides on the device how many drafts each request verifies, by graphs of their "
    "own: no count can alternate with it in one engine; leave it out"
)

SKIPS_AT_ZERO = Need(
    "v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator", "has", ("_store_hidden_states",)
)
"""With this (vLLM 0.33) dflash keeps its cache filled at k = 0 without drafting. At other counts it
drafts a block in one pass, and vLLM verifies the first k."""


def changes_count(method: str) -> bool:
    """True if a drafter of this method may get another draft count in each step."""
    source = installed_source() if method == "dflash" else None
    return method in CHANGES_COUNT or (
        source is not None and problem(source, SKIPS_AT_ZERO) is None
    )


SAFE_GRAPHS = "FULL_DECODE_ONLY"
UNSAFE_GRAPHS = "FULL_AND_PIECEWISE"
"""vLLM's default cudagraph_mode. With several draft counts, vLLM 0.32's V2 runner runs a batch
that no full graph of its count fits in pieces, padded in tokens only. Its drafter then finds a full
graph of the padded size, and replays it over metadata made for fewer requests: FlashAttention 3
reads an illegal address (`sweeps/studies/worth/stock_crash.py`). Without piecewise graphs both find
the same graph or none."""

GRAPH_STEP = 16
"""Above 256 tokens vLLM captures multiples of it."""

WHY_UNSAFE = (
    "with several draft counts vLLM 0.32 may then replay a drafter's graph over the metadata of "
    f"fewer requests, and die; write {SAFE_GRAPHS}"
)

SPAN = 36
"""Steps of a server between two groups, all at one k."""

PATIENCE = 16
"""Steps that a group may take to begin: where each step has a prefill only spans are left."""

MAX_KEPT = 1024
"""Groups and spans of a class of batch sizes and draft count that a server keeps: the latest. Of so
many an estimate takes 2 ms of a core."""


def schedule_of(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """A value of num_speculative_tokens_per_batch_size that names every count; vLLM captures CUDA
    graphs for these, if `max_num_seqs` is no less than their number. The lookup made from it is
    replaced before the first batch."""
    return [(size, size, count) for size, count in enumerate(counts, start=1)]


def capture_size(tokens: int) -> int:
    """The `max_cudagraph_capture_size` with which vLLM captures a window of so many tokens."""
    return GRAPH_STEP * ceil(tokens / GRAPH_STEP)


def window_sizes(requests: Iterable[int], most: int) -> list[int]:
    """Tokens of windows of these batch sizes with 0 to `most` drafts: the graphs that they need."""
    return sorted({size * (k + 1) for size in requests for k in range(most + 1)})


def verifies(output: Any) -> int | None:
    """Drafts of every request of a step; None if they differ."""
    drafts = output.scheduled_spec_decode_tokens
    counts = {len(drafts.get(req_id, ())) for req_id in output.num_scheduled_tokens}
    return counts.pop() if len(counts) == 1 else None


def server_counts(most: int) -> tuple[int, ...]:
    """Draft count of each cell of a server: 0 to `most`, and 0 again for the A/A groups."""
    return (*range(most + 1), 0)


class CountSwitch:
    """Sets the draft counts of one scheduler: those of an order's places, or one for all steps.

    Args:
        counts: that have graphs, so all of `schedule_of` must be in the scheduler's lookup.

    Raises EngineError if vLLM's scheduler has no lookup, or not these counts in it.
    """

    def __init__(self, scheduler: Any, counts: Sequence[int]):
        if (reason := lost(Feature.COUNTS)) is not None:
            raise EngineError(f"draft counts cannot change in one engine: {reason}")
        lookup = getattr(scheduler, "dynamic_sd_lookup", None)
        if lookup is None:
            raise EngineError(
                "vLLM's scheduler has no num_speculative_tokens_per_batch_size: this configuration "
                "cannot change the number of drafts (vLLM switches it off with data parallelism)"
            )
        if not set(counts) <= set(lookup[1:]):
            raise EngineError(
                f"max_num_seqs is {len(lookup) - 1}: vLLM captures CUDA graphs for as many draft "
                f"counts, and there are {len(counts)}; write at least that"
            )
        self._scheduler = scheduler
        self._order: Order | None = None
        self._counts: Sequence[int] = ()
        self._staging: frozenset[int] = frozenset()
        self._staged_group: int | None = None
        self._spans: Iterator[int] | None = None
        self._span_left = self._patience = 0
        self._drafted = 0
        self._original: Callable[..., Any] = scheduler.schedule
        scheduler.schedule = self._schedule

    def fix(self, count: int) -> None:
        """Draft as many from the next step on; call it between batches."""
        self._order = None
        self._set(count)

    def interleave(self, order: WindowOrder) -> None:
        """Draft by this order from the next batch on."""
        assert order.drafts is not None
        self._counts, self._order = order.drafts, Order(order.places(), wait=SETTLING)
        self._staged_group = None
        self._staging = frozenset(
            n for n, cell in enumerate(order.cells) if cell.nwor_mode is not NworMode.OFF
        )
        self._set(self._counts[self._order.at.cell])

    def interleave_for_good(self, most: int) -> None:
        """Draft 0 to `most` in a server, with spans at one count between groups."""
        self._counts = server_counts(most)
        pairs = [(0, cell) for cell in range(1, len(self._counts))]
        places = places_of(pairs, SERVER_SEED, SERVER_DRAFT_RUN_LENGTHS)
        self._order = Order(places, wait=SETTLING)
        self._spans = cycle(range(1, most + 1))
        self._begin_span(self._spans)

    def _begin_span(self, counts: Iterator[int]) -> None:
        self._span_left, self._patience = SPAN, PATIENCE
        self._set(next(counts))

    def _set(self, count: int) -> None:
        self._drafted = count
        lookup = self._scheduler.dynamic_sd_lookup
        lookup[:] = [count] * len(lookup)

    def _schedule(self, *args: Any, **kwargs: Any) -> Any:
        order = self._order
        if order is not None and not self._span_left:
            return self._schedule_place(order, *args, **kwargs)
        output = self._original(*args, **kwargs)
        setattr(output, PLACE, None)
        if order is not None:
            order.settles(only_verifies(output))
            self._span_left -= bool(output.num_scheduled_tokens)
        return output

    def _schedule_place(self, order: Order, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step of a group, and give it its place if it verifies that place's count."""
        at = order.at
        count = self._counts[at.cell]
        fits = not order.settling and self._drafted == count
        held = not fits or self._holds_count(at)
        self._set(count if held else self._counts[order.coming.cell])
        output = self._original(*args, **kwargs)
        setattr(output, PLACE, None)
        settles = order.settles(only_verifies(output))
        if fits and not settles and verifies(output) == count:
            setattr(output, PLACE, order.take())
        else:
            order.skip()
        if self._spans is not None:
            has_begun = order.at.run or order.at.position
            self._patience -= not has_begun
            if order.at.group != at.group or not self._patience:
                self._begin_span(self._spans)
        return output

    def _holds_count(self, at: WindowPlace) -> bool:
        """True if this window's drafter works for the group's own count although the group ends.

        Both cells of a group that stages have one count, and all windows but the first of each run
        are compared: one more, which has no place, verifies what the last one drafts.
        """
        if at.cell in self._staging:
            self._staged_group = at.group
        return at.is_last and self._staged_group == at.group
