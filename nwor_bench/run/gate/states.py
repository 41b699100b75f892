"""The state gate: compare recurrent states after a staging cell's gate batch with off x off's.

The K/V gate's part for hybrids, end to end. States cannot be read back after a batch as K/V can:
the engine copies those of at most 8 requests, spread over the batch, before the last window or two
of each. A request that has off x off's tokens up to there, and was copied after as many, is
compared with off x off; another one with mode off's prefill of its own tokens. Inputs of a layer
differ from off x off's by the roundings of all layers before it, so no bound of 1e-6 holds: each
layer's tolerance is a multiple of what mode off's own states differ by, decoded or prefilled, and
with attention moved by a rounding step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nwor_bench.analysis.parity.kv import (
    ENOUGH_ROWS,
    MULTIPLES,
    TOO_BLUNT,
    KvVerdict,
    LayerKey,
    StateResult,
    Tolerance,
    compare_within,
    tolerances,
)
from nwor_bench.engine.protocol import KvCache

NONE_COPIED = "no request of off x off came within a window of its last token"
NONE_OF_CELL = "no sampled request came within a window of its last token"
FEW = f"medians decide, and a layer has fewer than {ENOUGH_ROWS} states of heads in these requests"
NOT_REPEATED = "states of mode off's prefill of the same tokens were not copied"

RECURRENT = "recurrent state"
"""What the engine calls it, beside the convolution state."""

BLUNT = 0.5
"""A layer of which so large an error would be allowed is not compared: a state of one token more
or less is often no further off."""

MEDIAN = ("median",)
"""What decides for a mixture of experts with enough states, and if mode off differs from itself
that much in one layer or more. A router sends some token to other experts, by chance: a few states
are far off, those of other requests and layers in each run. A fault of the kernels or of the commit
moves most of them. Seen on an H200 (Qwen3-Next-80B, 32 requests): the largest error 3.3 times mode
off's own."""

CHAOTIC = 4.0
"""Allowed median in multiples of mode off's own, then: the median of 8 requests scatters with what
their routers did. Seen on an H200 (Qwen3-Next's layers with 512 experts): 2.4 times."""

Ids = tuple[int, ...]
"""Token ids of one request, from its prompt's first."""


class StateGate:
    """Compares copied states of staging cells with off x off's.

    Args:
        cache: the engine's, which copies the states.
        to_off: switches the engine to off x off.
        routed: the target has experts.
    """

    def __init__(self, cache: KvCache, to_off: Callable[[], None], routed: bool = False):
        self._cache = cache
        self._to_off = to_off
        self._off: dict[int, Ids] = {}
        self._cell: dict[int, Ids] = {}
        self._tolerances: dict[LayerKey, Tolerance] = {}
        self._routed = routed
        self._measures = tuple(MULTIPLES)
        self._why_not: str | None = None

    def keep_off(self, ids: Sequence[Ids]) -> None:
        """Keep the states of the batch that has just run as off x off's."""
        self._off = self._keep("off", ids)

    def keep_cell(self, ids: Sequence[Ids]) -> None:
        """Keep the states of the batch that has just run as a cell's; `compare` comes later."""
        self._cell = self._keep("cell", ids)

    def _keep(self, name: str, ids: Sequence[Ids]) -> dict[int, Ids]:
        """The tokens that each copied state stands for, by number of its request."""
        copied = self._cache.keep_states(name)
        # A request that ended early was copied behind its end, or not at all.
        return {i: ids[i][:n] for i, n in copied.items() if n <= len(ids[i])}

    def compare(self) -> StateResult:
        """The cell's states against mode off's after the same tokens."""
        sampled = len(self._cell)
        self._measure_tolerances()
        if self._why_not is not None or not sampled:
            return StateResult(KvVerdict.NOT_RUN, self._why_not or NONE_OF_CELL, sampled)
        alike = [(i, i) for i, ids in self._cell.items() if self._off.get(i) == ids]
        found = [self._cache.compare_states("cell", "off", alike)] if alike else []
        others = {i: ids for i, ids in self._cell.items() if self._off.get(i) != ids}
        pairs = [(i, j) for j, i in self._prefill("own", others)]
        if pairs:
            found.append(self._cache.compare_states("cell", "own", pairs))
        if not found:
            return StateResult(KvVerdict.NOT_RUN, NOT_REPEATED, sampled)
        return self._result(found, sampled, len(alike), len(alike) + len(pairs))

    def _result(
        self, found: Sequence[Sequence[dict[str, Any]]], sampled: int, alike: int, requests: int
    ) -> StateResult:
        ranks = [
            {"errors": [e for each in of_rank for e in each["errors"] if self._counts(rank, e)]}
            for rank, of_rank in enumerate(zip(*found, strict=True))
        ]
        finding, broken = compare_within(ranks, self._tolerances, self._measures)
        layers = len({e["layer"] for e in ranks[0]["errors"] if e["what"] == RECURRENT})
        if not layers:  # some layer has a tolerance, so medians left out all of them
            return StateResult(KvVerdict.NOT_RUN, FEW, sampled)
        reason = finding.sentence(len(ranks)) if broken and finding is not None else None
        return StateResult(
            KvVerdict.BROKEN if broken else KvVerdict.WITHIN,
            reason,
            sampled,
            requests,
            alike,
            layers,
            requests * layers,
            finding,
        )

    def _counts(self, rank: int, entry: Mapping[str, Any]) -> bool:
        """Whether errors of a layer say anything."""
        known = (rank, entry["layer"], entry["what"]) in self._tolerances
        return known and (self._measures != MEDIAN or entry["rows"] >= ENOUGH_ROWS)

    def _measure_tolerances(self) -> None:
        """Measure mode off against itself, once."""
        if self._tolerances or self._why_not is not None:
            return
        once = self._prefill("once", self._off)
        again = {i: j for j, i in self._prefill("again", self._off, nudged=True)}
        if not once or not again:
            self._why_not = NOT_REPEATED if self._off else NONE_COPIED
            return
        nudged = [(again[i], j) for j, i in once if i in again]
        found = [
            self._cache.compare_states("once", "off", once),
            self._cache.compare_states("again", "once", nudged),
        ]
        self._cache.drop_states(["once", "again"])
        measured, self._why_not = tolerances(found)
        blunt = any(each.allowed["largest"] >= BLUNT for each in measured.values())
        entries = [entry for of_rank in found[0] for entry in of_rank["errors"]]
        if blunt or (self._routed and all(each["rows"] >= ENOUGH_ROWS for each in entries)):
            self._measures = MEDIAN
            measured = {key: _by_median(each) for key, each in measured.items()}
        decides = self._measures[0]
        self._tolerances = {
            key: each for key, each in measured.items() if each.allowed[decides] < BLUNT
        }
        if self._why_not is None and not any(what == RECURRENT for *_, what in self._tolerances):
            self._why_not = TOO_BLUNT

    def _prefill(
        self, name: str, tokens: Mapping[int, Ids], *, nudged: bool = False
    ) -> list[tuple[int, int]]:
        """Prefill these requests' tokens in mode off, with a step behind it, which copies states.

        Returns:
            (its number there, its own) of each request whose states were copied.
        """
        if not tokens:
            return []
        self._to_off()
        self._cache.prefill(list(tokens.values()), nudged=nudged, outputs=2)
        copied = self._cache.keep_states(name)
        return [(j, i) for j, (i, ids) in enumerate(tokens.items()) if copied.get(j) == len(ids)]


def _by_median(tolerance: Tolerance) -> Tolerance:
    """The tolerance of a layer if medians decide."""
    allowed = max(CHAOTIC * tolerance.own["median"], tolerance.allowed["median"])
    return replace(tolerance, allowed={**tolerance.allowed, "median": allowed})
