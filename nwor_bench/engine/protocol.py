"""The engine as a run sees it: its protocol, requests and answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nwor_bench.engine.readings import VllmCounters
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.types import Cell, RequestTimes, WindowRecord
from nwor_bench.records.window_order import WindowOrder

Span = tuple[int, int]
"""First position of a request and the one behind the last."""

KeptPair = tuple[int, str, int, int]
"""(request of this set, other set, its request there, length of its prompt, 0 for states)."""


@dataclass(frozen=True)
class Kept:
    """What was kept of a batch's requests."""

    unreadable: str | None = None
    """Why nothing could be kept; None if it was."""
    tokens: Mapping[int, int] = field(default_factory=dict)
    """By number of a request whose states were kept, for how many of its tokens they stand."""


class KeptTensors(Protocol):
    """Tensors of finished requests, kept in the engine's workers under a name."""

    def keep(self, name: str, spans: Sequence[Span] = ()) -> Kept:
        """Keep those of the last batch's requests: K/V rows of these spans, or copied states."""

    def compare(self, name: str, pairs: Sequence[KeptPair]) -> list[dict[str, Any]]:
        """One dict per rank: `errors` per layer, and of rows `checked` and `unknown` positions."""

    def drop(self, names: Sequence[str]) -> None:
        """Forget kept tensors."""


class KvCache(Protocol):
    """The engine's KV cache, for the K/V gate."""

    @property
    def rows(self) -> KeptTensors:
        """K/V rows, one a position."""

    @property
    def states(self) -> KeptTensors:
        """Recurrent states of a sample of requests."""

    def watch(self, on: bool) -> None:
        """Note the blocks of every request from now on, or stop and forget all that was kept."""

    def prefill(
        self, sequences: Sequence[Sequence[int]], *, nudged: bool = False, outputs: int = 1
    ) -> None:
        """Compute these tokens' K/V from an empty prefix cache, in the mode that is on.

        Args:
            nudged: every layer's attention returns values that are off by one rounding step.
            outputs: tokens to be sampled; states are kept only if a step follows the prefill.
        """


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a batch. The random stream restarts from `seed` every batch."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    ignore_eos: bool


@dataclass(frozen=True)
class BatchOutput:
    """Output and counts of one batch.

    `windows` are the first rank's; `rank_disagreement` names a count in which another rank differs.
    """

    token_ids: tuple[tuple[int, ...], ...]
    latency_ms: float
    windows: list[WindowRecord]
    counters: VllmCounters
    scv_counters: dict[str, int] = field(default_factory=dict)
    rank_disagreement: str | None = None
    request_times: RequestTimes | None = None
    request_acceptance: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class GreedyOutput:
    """One request of a batch that is not measured."""

    token_ids: tuple[int, ...]

    top: tuple[dict[int, float], ...] = ()
    """At each output position the log probabilities, in nats, of the likeliest tokens and of the
    one that was chosen, by token id; empty unless asked for."""


class Engine(Protocol):
    """Engine of a run: mode switches, batches, counters and cache."""

    def status(self) -> EngineStatus:
        """Facts for run.json: device, layers, block size, what is attached."""

    def set_modes(self, cell: Cell) -> None:
        """Switch both modes live."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        keep_prefix_cache: bool = False,
    ) -> BatchOutput:
        """Run one batch to its end, from an empty prefix cache unless it is kept."""

    def interleave(self, order: WindowOrder) -> None:
        """Interleave the cells in the next batch, window by window."""

    def stop_interleaving(self) -> list[dict[str, dict[str, int]]]:
        """Return to mode off; each cell's SCV counters and fallbacks, in the order's cells."""

    def decode_greedily(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        *,
        ignore_eos: bool,
        top: int = 0,
        keep_prefix_cache: bool = False,
        nudged: bool = False,
    ) -> Sequence[GreedyOutput]:
        """Greedy outputs in the present modes, beside the measured batches."""

    def set_counters(self, on: bool) -> None:
        """Count each window's DRAM bytes, or stop."""

    def watch_writes(self, on: bool) -> list[dict[str, int]]:
        """Watch staging's writes, or stop and return each rank's counts (see `write_check`)."""

    def check_layers(self, requests: int | None) -> list[list[dict[str, Any]]]:
        """Check layers of some windows of the next batch, of so many requests; None: no longer.

        Call it in the cell's modes. Returns what each rank measured since the last call.
        """

    def kv_cache(self) -> KvCache:
        """The engine's KV cache, to be read back between batches."""

    def close(self) -> None:
        """Release the engine's memory."""
