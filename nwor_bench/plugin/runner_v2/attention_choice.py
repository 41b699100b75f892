"""Who chooses how each captured window attends: measurement, the store, or a table.

Which contender is the fastest depends on heads, head dim, cache dtype, requests, drafts and
contexts. So they are timed as a set of graphs is captured (`attention_timing`), at a few lengths,
`attention_decision` chooses, and the result is kept in a file for later starts.

A captured graph has one staged contender. Unless it is surely faster than stock with its write, no
graph is captured, or a step of about that length replays stock's: its windows are written directly,
with the reason `slower_than_stock`.

The gate's contexts are shorter than those that are timed, so in its batches the context does not
choose: windows of a size of which both may be timed are staged, but for a random GATE_DIRECT.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, Protocol

from nwor_bench.instruments.conditions import throttle_names
from nwor_bench.plugin.runner_v2.attention_decision import (
    ALWAYS,
    NEVER,
    TILINGS,
    Choice,
    Contender,
    DirectLengths,
    decide,
    direct_lengths,
)
from nwor_bench.records import fallback_reasons as reasons
from nwor_bench.records.user_cache import cache_root
from nwor_kernels import mla_verify_attention, verify_attention, window_merge
from nwor_kernels.verify_attention.tuning import fastest_tiling


@dataclass(frozen=True)
class AttentionShape:
    """Layers that attend alike."""

    implementation: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    cache_dtype: str
    block_size: int
    sliding_window: int = -1
    plain: bool = True
    """Neither softcap, sinks nor chunks."""
    latent: bool = False
    """MLA: all heads share a cached row."""

    def __str__(self) -> str:
        seen = "" if self.sliding_window < 0 else f" window {self.sliding_window}"
        return f"{self.heads}/{self.kv_heads}x{self.head_dim}{seen}"

    @property
    def cache_bytes(self) -> int:
        """Bytes of an element of the cache."""
        return 1 if self.cache_dtype.startswith("fp8") else 4 if self.dtype == "float32" else 2

    @property
    def ratio(self) -> int:
        """Query heads of a K/V head."""
        return self.heads // self.kv_heads


def from_table(shape: AttentionShape, requests: int, rows: int, processors: int) -> Contender:
    """Our kernel in the tiling that was the fastest on an H200."""
    if shape.latent:
        return Contender.OURS  # its kernel has one
    fastest = fastest_tiling(
        rows,
        shape.ratio,
        max(shape.head_dim, shape.value_dim),
        shape.cache_bytes,
        requests * shape.kv_heads,
        processors,
    )
    return next(contender for contender, tiling in TILINGS.items() if tiling is fastest)


def kernels_digest() -> str:
    """Digest of our contenders' sources: other kernels take other times."""
    digest = sha256()
    for package in (mla_verify_attention, verify_attention, window_merge):
        for source in sorted(Path(package.__path__[0]).glob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:8]


class ChoiceStore:
    """Choices on disk: a JSON file a machine and shape, each size an entry.

    A file that cannot be read or written is ignored: the contenders are timed again.

    Args:
        facts: everything that the times depend on besides a window's size.
    """

    VERSION = 3

    def __init__(self, facts: Mapping[str, object], folder: Path | None = None):
        self._facts = {"version": self.VERSION, **facts}
        name = "-".join(str(value) for value in self._facts.values())
        safe = "".join(c if c.isalnum() or c in ".-" else "_" for c in name)
        self._path = (folder or cache_root() / "attention") / f"{safe[:180]}.json"

    def read(self) -> dict[str, Choice]:
        """Choices by size, without disturbed ones; none if there is no file of these facts."""
        try:
            stored = json.loads(self._path.read_text())
            if stored["facts"] != self._facts:
                return {}
            every = {size: _choice_of(entry) for size, entry in stored["sizes"].items()}
            return {size: choice for size, choice in every.items() if not _is_disturbed(choice)}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def write(self, choices: Mapping[str, Choice]) -> None:
        """Replace the file."""
        content = {"facts": self._facts, "sizes": {s: asdict(c) for s, c in choices.items()}}
        beside = self._path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(content, indent=1))
            beside.replace(self._path)


def _choice_of(entry: Mapping[str, Any]) -> Choice:
    told = {name: tuple(times) for name, times in entry["all_us"].items()}
    known: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in entry.items()}
    known |= {"contender": Contender(entry["contender"]), "all_us": told}
    return Choice(**known)


def _is_disturbed(choice: Choice) -> bool:
    """True if another process, or a lowered clock, was beside the times: the next start takes them
    again."""
    seen = choice.conditions
    names = ("gpu_other_processes", "gpu_throttled_ms")
    return any(seen.get(n) for n in names) or bool(throttle_names(seen.get("gpu_throttle_reasons")))


Size = tuple[int, int]
"""Requests, and rows of each."""

NEAR = 1.2
"""Sizes up to this ratio of requests share a measurement."""


GATE_DIRECT, GATE_STAGED = 0.25, 3
"""Share of a gate's windows that are written directly, of sizes that are so at some contexts only,
and how many are staged first: these are checked by layer. At random: cells are interleaved."""


class Measurement(Protocol):
    """Times the contenders of one shape of layers (`attention_timing`)."""

    def lengths(self, size: Size) -> tuple[int, ...]:
        """Contexts that the cache has room for; none if this shape is not measured."""

    def times(self, size: Size, length: int) -> dict[Contender, list[float]]:
        """Seconds of one layer by contender, a block each."""

    def conditions(self) -> Mapping[str, float]:
        """The GPU's since the last call."""


class AttentionKind:
    """The choices of layers of one shape.

    Args:
        can_merge: stock's attention over the committed tokens returns its log-sum-exp, and the
            merge is exact.
        forced: takes the place of any choice; None: none does.
    """

    def __init__(
        self,
        shape: AttentionShape,
        processors: int,
        *,
        can_merge: bool = False,
        forced: Contender | None = None,
    ):
        self.shape, self.can_merge = shape, can_merge
        self._processors = processors
        self._forced = None if forced is Contender.MERGE and not can_merge else forced
        self.chosen: dict[Size, Choice] = {}
        """Sizes that were measured, or read."""
        self._by_table: dict[Size, Contender] = {}

    def choose(
        self, sizes: Sequence[Size], store: ChoiceStore, measurement: Measurement, commit: float
    ) -> int:
        """Settle these sizes from the store, or by measurement; how many were measured.

        Args:
            commit: seconds that a layer's share of a commit takes.
        """
        known, measured = store.read(), 0
        for size in sorted(sizes, reverse=True):
            name, lengths = f"{size[0]}x{size[1]}", measurement.lengths(size)
            if not lengths:
                continue
            if name not in known or known[name].lengths != lengths:
                near = self._near(size, lengths)
                if near is None:
                    times = [measurement.times(size, length) for length in lengths]
                    timed = set.intersection(*map(set, times))
                    both = {c: [entry[c] for entry in times] for c in times[0] if c in timed}
                    near, measured = decide(both, lengths, commit), measured + 1
                    near = replace(near, conditions=measurement.conditions())
                known[name] = near
            self.chosen[size] = known[name]
        if measured:
            store.write(known)
        return measured

    def _near(self, size: Size, lengths: tuple[int, ...]) -> Choice | None:
        """The choice of a size that was settled before and has about as many requests."""
        for (requests, rows), choice in self.chosen.items():
            close = size[0] > 2 and requests / size[0] <= NEAR
            if rows == size[1] and close and choice.lengths == lengths:
                return choice
        return None

    def contender(self, size: Size) -> Contender:
        """What attends a staged step of equal windows."""
        if self._forced is Contender.OURS:
            return self.tiling(size)
        if self._forced is not None:
            return self._forced
        if size in self.chosen:
            return self.chosen[size].contender
        return Contender.MERGE if self.shape.latent and self.can_merge else self.tiling(size)

    def tiling(self, size: Size) -> Contender:
        """Our kernel in its tiling of the table, for any step."""
        if size not in self._by_table:
            self._by_table[size] = from_table(self.shape, *size, self._processors)
        return self._by_table[size]


class AttentionChoices:
    """The choices of all shapes of the target's layers, and which windows are left to stock.

    Args:
        kinds: each shape's choices and its number of layers.
        stock_only: every window of a full graph is left to stock.
    """

    def __init__(self, kinds: Sequence[tuple[AttentionKind, int]], *, stock_only: bool = False):
        self._kinds = kinds
        self._stock_only = stock_only
        self._direct: dict[Size, DirectLengths] = {}
        self._turns: Counter[Size] | None = None  # windows of a gate's batch; None outside of it
        self._random = Random(0)  # equal on all ranks
        self._asked: tuple[Any, bool] = None, False
        self.leaves_none = False
        """The window stages recurrent states too: they gain more than attention could lose."""
        self.failed: str | None = None
        """Why nothing was measured; None if it was, or nobody asked."""

    def settle(self, sizes: Sequence[Size]) -> None:
        """Take over what the kinds have chosen."""
        for size in sizes:
            chosen = [(count, kind.chosen.get(size)) for kind, count in self._kinds]
            known_choices = [(count, choice) for count, choice in chosen if choice is not None]
            alike = len({choice.lengths for _, choice in known_choices}) == 1
            # A shape that was not measured may lose or gain anything.
            known = alike and len(known_choices) == len(chosen) and not self.leaves_none
            self._direct[size] = direct_lengths(known_choices) if known else NEVER

    def given(self) -> list[dict[Size, Choice]]:
        """What each kind has chosen, for other ranks."""
        return [kind.chosen for kind, _ in self._kinds]

    def take(self, given: Sequence[dict[Size, Choice]], sizes: Sequence[Size]) -> None:
        """Take what the first rank has chosen."""
        for (kind, _), chosen in zip(self._kinds, given, strict=True):
            kind.chosen = chosen
        self.settle(sizes)

    def forget(self, reason: str) -> None:
        """Leave every size to the table, because measuring failed."""
        self.failed = reason
        for kind, _ in self._kinds:
            kind.chosen = {}

    def of(self, size: Size) -> DirectLengths:
        """The contexts at which windows of this size are written directly."""
        return ALWAYS if self._stock_only else self._direct.get(size, NEVER)

    def why_direct(self, size: Size, input_batch: Any) -> str | None:
        """Why a step of this captured size is left to stock; None if it is staged."""
        if self._stock_only:
            return reasons.STOCK_ATTENTION
        direct = self._direct.get(size, NEVER)
        is_direct = direct.always
        if direct.sometimes and self._turns is not None:
            if input_batch is not self._asked[0]:  # a step is asked about more than once
                self._turns[size] += 1
                late = self._turns[size] > GATE_STAGED
                self._asked = input_batch, late and self._random.random() < GATE_DIRECT
            is_direct = self._asked[1]
        elif direct.sometimes:
            # Upper bounds, known to the host and equal on all ranks.
            bounds = input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs]
            is_direct = direct.at(float(bounds.numpy().mean()))
        return reasons.SLOWER_THAN_STOCK if is_direct else None

    def gate(self, on: bool) -> None:
        """A batch of the gate begins, in which both forms of such windows run; or none does."""
        self._turns, self._asked = Counter() if on else None, (None, False)

    def attended(self, size: Size, *, equal: bool = True) -> str:
        """What attends a staged step: the kinds' contenders; in unequal windows their tilings."""
        of_kind = (kind.contender if equal else kind.tiling for kind, _ in self._kinds)
        return "+".join(dict.fromkeys(str(contender(size)) for contender in of_kind)) or "ours"

    def in_words(self) -> dict[str, str]:
        """What attends windows of each size that was timed: `ours; stock at 8192, 32768 tokens`."""
        return {f"{size[0]}x{size[1]}": self._told(size) for size in self._sizes}

    def times_us(self) -> dict[str, Any]:
        """By size and shape of layers: contexts, and a layer's times at each of them."""
        return {
            f"{size[0]}x{size[1]}": {
                str(kind.shape): {"context": list(choice.lengths)}
                | {name: list(times) for name, times in choice.all_us.items()}
                for kind, _ in self._kinds
                if (choice := kind.chosen.get(size)) is not None
            }
            for size in self._sizes
        }

    @property
    def _sizes(self) -> list[Size]:
        return sorted({size for kind, _ in self._kinds for size in kind.chosen})

    def _told(self, size: Size) -> str:
        direct = self.of(size)
        if direct.always:
            return "stock"
        names = dict.fromkeys(str(kind.contender(size)) for kind, _ in self._kinds)
        left = [n for n, is_left in zip(direct.lengths, direct.direct, strict=True) if is_left]
        at = f"; stock at {', '.join(map(str, left))} tokens" if left else ""
        return f"{', '.join(names)}{at}"
