"""Draft counts of vLLM's scheduler, set step by step: stock code looks k up by batch size.

The lookup (`num_speculative_tokens_per_batch_size`) gives the drafts that a step proposes; the next
step verifies them. So it is set one place ahead. What a step verifies is read from its
SchedulerOutput, never taken from what was asked for, and its place travels to the workers with it:
they switch NWOR's mode by it if a cell stages.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil
from typing import Any

from nwor_bench.errors import EngineError
from nwor_bench.records.types import SETTLING, NworMode
from nwor_bench.records.window_order import PLACE, WindowOrder, WindowPlace

CHANGES_COUNT = frozenset({"eagle", "eagle3", "mtp", "draft_model"})
"""Methods whose drafter proposes as many drafts as the scheduler says, for every request, and keeps
its cache filled at k = 0. vLLM 0.32 asserts a constant number for medusa, suffix and ngram_gpu,
dflash and dspark draft a block in one pass, and ngram finds drafts for some requests only."""

WHICH_CHANGE = f"only {', '.join(sorted(CHANGES_COUNT))} change their draft count step by step"

WHY_NOT_ADAPTIVE = (
    "with it vLLM decides on the device how many drafts each request verifies, by graphs of their "
    "own: no count can alternate with it in one engine; leave it out"
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

KEPT = 1024
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


def decodes_only(output: Any) -> bool:
    """True if each request runs only its drafts and the token before; also without any draft."""
    if output.scheduled_new_reqs or not output.num_scheduled_tokens:
        return False
    drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
    return bool(output.total_num_scheduled_tokens == drafts + len(output.num_scheduled_tokens))


def verifies(output: Any) -> int | None:
    """Drafts of every request of a step; None if they differ."""
    drafts = output.scheduled_spec_decode_tokens
    found = {len(drafts.get(req_id, ())) for req_id in output.num_scheduled_tokens}
    return found.pop() if len(found) == 1 else None


class DraftSwitch:
    """Sets the draft counts of one scheduler, from the order or all alike.

    Args:
        counts: that have graphs, so all of `schedule_of` must be in the scheduler's lookup.

    Raises EngineError if the scheduler has no lookup, or not these counts in it.
    """

    def __init__(self, scheduler: Any, counts: Sequence[int]):
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
        self._places: Iterator[WindowPlace] = iter(())
        self._counts: tuple[int, ...] = ()
        self._staging: frozenset[int] = frozenset()
        self._staged_group: int | None = None
        self._at: WindowPlace | None = None
        self._coming: WindowPlace | None = None
        self._settling = 0
        self._drafted = 0
        self._original: Callable[..., Any] = scheduler.schedule
        scheduler.schedule = self._schedule

    def fix(self, count: int) -> None:
        """Draft as many from the next step on; call it between batches."""
        self._at = self._coming = None
        self._set(count)

    def interleave(self, order: WindowOrder) -> None:
        """Draft by this order from the next batch on."""
        assert order.drafts is not None
        self._counts, self._places = order.drafts, order.places()
        self._staged_group = None
        self._staging = frozenset(
            n for n, cell in enumerate(order.cells) if cell.nwor_mode is not NworMode.OFF
        )
        self._at, self._coming = next(self._places), next(self._places)
        self._set(self._counts[self._at.cell])

    def _set(self, count: int) -> None:
        self._drafted = count
        lookup = self._scheduler.dynamic_sd_lookup
        lookup[:] = [count] * len(lookup)

    def _schedule(self, *args: Any, **kwargs: Any) -> Any:
        at, coming = self._at, self._coming
        if at is None or coming is None:
            output = self._original(*args, **kwargs)
            if decodes_only(output):
                setattr(output, PLACE, None)
            return output
        count = self._counts[at.cell]
        fits = not self._settling and self._drafted == count
        held = not fits or self._holds_count(at)
        self._set(count if held else self._counts[coming.cell])
        output = self._original(*args, **kwargs)
        decodes = self._settle(output)
        is_own = fits and decodes and verifies(output) == count
        if decodes:
            setattr(output, PLACE, at if is_own else None)
        self._at, self._coming = self._after(at, coming, ran=is_own)
        return output

    def _settle(self, output: Any) -> bool:
        """True if a step only decodes; counts the steps since one that did not."""
        decodes = decodes_only(output)
        self._settling = max(self._settling - 1, 0) if decodes else SETTLING
        return decodes

    def _holds_count(self, at: WindowPlace) -> bool:
        """True if this window's drafter works for the group's own count although the group ends.

        Both cells of a group that stages have one count, and all windows but the first of each run
        are compared: one more, which has no place, verifies what the last one drafts.
        """
        if at.cell in self._staging:
            self._staged_group = at.group
        return at.is_last and self._staged_group == at.group

    def _after(
        self, at: WindowPlace, coming: WindowPlace, *, ran: bool
    ) -> tuple[WindowPlace, WindowPlace]:
        """The next place and the one behind it. A group that was cut is left; the next one begins
        once its first count is verified, which takes a step or two."""
        if ran:
            return coming, next(self._places)
        group, begun = at.group, at.run or at.position
        while begun and at.group == group:
            at, coming = coming, next(self._places)
        return at, coming
