"""The state gate: compare recurrent states after a staging cell's gate batch with off x off's.

The K/V gate's part for hybrids, end to end. States cannot be read back after a batch as K/V can:
the engine copies those of at most 8 requests, spread over the batch, before the last window or two
of each. A request that has off x off's tokens up to there, and was copied after as many, is
compared with off x off; another one with mode off's prefill of its own tokens. Inputs of a layer
differ from off x off's by the roundings of all layers before it, so no bound of 1e-6 holds: each
layer's tolerance is a multiple of what mode off's own states differ by, decoded or prefilled, and
with attention moved by a rounding step.

In a mixture of experts a rounding can send a token to another expert, in mode off too. That moves
all later states of one request. So other measures decide there (ROUTED_MULTIPLES): a router's
choice hits all heads of one request, by chance; a fault hits several, or some heads, or stays.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median, median_low
from typing import Any

from nwor_bench.analysis.parity.kv import (
    MULTIPLES,
    TOO_BLUNT,
    WRONG_ROW,
    KvVerdict,
    LayerKey,
    StateResult,
    Tolerance,
    compare_within,
    compared_layers,
    tolerances,
)
from nwor_bench.engine.protocol import KvCache

NONE_COPIED = "no request of off x off came within a window of its last token"
NONE_OF_CELL = "no sampled request came within a window of its last token"
NOT_REPEATED = "states of mode off's prefill of the same tokens were not copied"

MIN_REQUESTS = 8
"""Requests with which those of a router's choice are told from those of a fault. With fewer, the
largest error decides, of which mode off's own in any layer is the measure."""

OF_FEW = {"largest": MULTIPLES["largest"], "median": MULTIPLES["median"]}
"""Measures with fewer requests: one that went to other experts moves the rms."""

FEW = f"a mixture of experts needs states of {MIN_REQUESTS} requests"

RECURRENT, CONVOLUTION = "recurrent state", "convolution state"
"""What the engine calls them."""

BLUNT = 0.5
"""A layer of which so large an error would be allowed is not compared: a state of one token more
or less is often no further off."""

ROUTED_MULTIPLES = {"second request": 1.5, "worst head": 1.5, "every request": 4.0}
"""Measures of a layer in a mixture of experts, with the multiple of mode off's own error by which
they are blunt. That is what is allowed of the last one, too; of the others BLUNT is, since routers
hit other layers and requests in each run.

second request: each request by the median of its heads; of mode off's, the largest. worst head: by
how much a head is further off than its request's median, by the median of requests. every request:
the smallest of requests; it scatters with what routers did (on an H200, with Qwen3-Next's 512
experts, the median of states was 2.4 times mode off's own)."""

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
        self._measures = MULTIPLES
        self._why_not: str | None = None

    def keep_off(self, ids: Sequence[Ids]) -> None:
        """Keep the states of the batch that has just run as off x off's."""
        self._off = self._keep("off", ids)

    def keep_cell(self, ids: Sequence[Ids]) -> None:
        """Keep the states of the batch that has just run as a cell's; `compare` comes later."""
        self._cell = self._keep("cell", ids)

    def _keep(self, name: str, ids: Sequence[Ids]) -> dict[int, Ids]:
        """The tokens that each copied state stands for, by number of its request."""
        copied = self._cache.states.keep(name).tokens
        # A request that ended early was copied behind its end, or not at all.
        return {i: ids[i][:n] for i, n in copied.items() if n <= len(ids[i])}

    def compare(self) -> StateResult:
        """The cell's states against mode off's after the same tokens."""
        sampled = len(self._cell)
        self._measure_tolerances()
        if self._why_not is not None or not sampled:
            return StateResult(KvVerdict.NOT_RUN, self._why_not or NONE_OF_CELL, sampled)
        states = self._cache.states
        alike = [(i, "off", i, 0) for i, ids in self._cell.items() if self._off.get(i) == ids]
        comparisons = [states.compare("cell", alike)] if alike else []
        others = {i: ids for i, ids in self._cell.items() if self._off.get(i) != ids}
        pairs = [(i, "own", j, 0) for j, i in self._prefill("own", others)]
        if pairs:
            comparisons.append(states.compare("cell", pairs))
        if not comparisons:
            return StateResult(KvVerdict.NOT_RUN, NOT_REPEATED, sampled)
        return self._result(comparisons, sampled, len(alike), len(alike) + len(pairs))

    def _result(
        self, results: Sequence[Sequence[dict[str, Any]]], sampled: int, alike: int, requests: int
    ) -> StateResult:
        if self._measures is ROUTED_MULTIPLES:
            if requests < MIN_REQUESTS:
                return StateResult(KvVerdict.NOT_RUN, FEW, sampled)
            _add_routed(results, -2)
        ranks = [
            {"errors": [entry for comparison in of_rank for entry in comparison["errors"]]}
            for of_rank in zip(*results, strict=True)
        ]
        finding, broken = compare_within(ranks, self._tolerances)
        compared = compared_layers(self._tolerances, (RECURRENT,))
        layers, verdict = len(compared), KvVerdict.WITHIN
        convolutions = len(compared_layers(self._tolerances, (CONVOLUTION,)))
        reason = _stays_wrong(ranks, compared)
        if broken and finding is not None:
            reason = finding.sentence(len(ranks))
        if reason is not None:
            verdict = KvVerdict.BROKEN
        elif not layers:
            verdict, reason = KvVerdict.NOT_RUN, TOO_BLUNT
        return StateResult(
            verdict,
            reason,
            sampled,
            requests,
            alike,
            layers,
            requests * layers,
            finding,
            requests * convolutions,
            len({layer for _, layer, what in self._tolerances if what == RECURRENT}),
        )

    def _measure_tolerances(self) -> None:
        """Measure mode off against itself, once."""
        if self._tolerances or self._why_not is not None:
            return
        once = self._prefill("once", self._off)
        again = {i: j for j, i in self._prefill("again", self._off, nudged=True)}
        if not once or not again:
            self._why_not = NOT_REPEATED if self._off else NONE_COPIED
            return
        nudged = [(again[i], "once", j, 0) for j, i in once if i in again]
        comparisons = [
            self._cache.states.compare("once", [(j, "off", i, 0) for j, i in once]),
            self._cache.states.compare("again", nudged),
        ]
        self._cache.states.drop(["once", "again"])
        if self._routed and min(len(once), len(nudged)) >= MIN_REQUESTS:
            self._measures = ROUTED_MULTIPLES
            for comparison in comparisons:
                _add_routed([comparison], -1)
        elif self._routed:
            self._measures = OF_FEW
        self._tolerances, self._why_not = tolerances(
            comparisons, self._measures, BLUNT, routed=self._measures is OF_FEW
        )
        for tolerance in self._tolerances.values():
            of_routers = {"second request", "worst head"} & tolerance.allowed.keys()
            tolerance.allowed.update(dict.fromkeys(of_routers, BLUNT))

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
        copied = self._cache.states.keep(name).tokens
        return [(j, i) for j, (i, ids) in enumerate(tokens.items()) if copied.get(j) == len(ids)]


def _add_routed(comparisons: Sequence[Sequence[dict[str, Any]]], request: int) -> None:
    """Add ROUTED_MULTIPLES' measures over the requests of all these comparisons, to the first's
    entries. `request` is the place of the one that counts, the largest last."""
    for of_rank in zip(*comparisons, strict=True):
        for entries in zip(*(comparison["errors"] for comparison in of_rank), strict=True):
            rows = [row for entry in entries for row in entry["each"]]
            middles = [median(row) for row in rows]
            beyond = ([e - m for e in row] for row, m in zip(rows, middles, strict=True))
            worst = max(map(median_low, zip(*beyond, strict=True)))
            measured = zip(
                ROUTED_MULTIPLES, (sorted(middles)[request], worst, min(middles)), strict=True
            )
            entries[0].update(measured, middles=middles)


def _stays_wrong(ranks: Sequence[Mapping[str, Any]], layers: set[int]) -> str | None:
    """Why one request's states are wrong that are far off in most of these layers: no router's
    choice is that large. None if there is none, or the measures are not those of routers."""
    for rank in ranks:
        errors = [e for e in rank["errors"] if e["what"] == RECURRENT and e["layer"] in layers]
        of_layers = [e["middles"] for e in errors if "middles" in e]
        largest = max((median(request) for request in zip(*of_layers, strict=True)), default=0.0)
        if largest >= WRONG_ROW:
            return f"states: one request's are off by {largest:.2g} of a norm in most layers"
    return None
