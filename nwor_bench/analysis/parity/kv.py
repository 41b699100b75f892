"""Compare a staging cell's K/V rows with those of mode off, layer by layer. Pure.

On a CPU all modes share one attention kernel: with equal tokens, rows must be bit-identical.
Elsewhere each layer has its own tolerance: a fixed multiple of mode off's error against itself in
that layer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from nwor_bench.records.types import Cell

MULTIPLES = {"largest": 3.0, "rms": 2.0, "median": 2.0}
"""Largest allowed error of a cell, in multiples of mode off's error against itself.

Staging uses another attention kernel, which rounds differently. Mode off with every layer's
attention moved by one rounding step shows how much. On an H200 sound cells (SmolLM2, 3B and Qwen
shapes, bf16 and fp8, eager and full graphs) had at most 1.26 times mode off's largest error and
1.01 times its rms and median; V of one layer rounded to fp8 in a bf16 cache had 2.3 times its rms.
The largest error finds one wrong row; rms and median find a small fault in every row.
"""

MIN_ROWS = 100
"""Fewest rows for which rms and median are compared: with fewer they are too uncertain."""

TOO_BLUNT = "mode off itself differs so much from run to run that a wrong value would pass"
"""Reason of a comparison through the whole model that was not made in any layer."""

WRONG_ROW = 0.75
"""A measure that would have to allow so large an error is blunt, and not compared. A row of zeros
is off by 1, an unrelated one by 1.4, by 1 if half of its square is common to all rows; a quarter is
left for shorter rows. Seen on gpt-oss: mode off itself is off by 0.84."""

LayerKey = tuple[int, int, str]
"""(rank, layer, "K" or "V")."""


class KvVerdict(StrEnum):
    """The K/V gate's verdict on one cell."""

    EXACT = "equal bit for bit"
    WITHIN = "within tolerance"
    BROKEN = "INVALID"
    NOT_RUN = "not run"


NO_RECORD = "it did not run"


def is_sound(event: Mapping[str, Any] | None) -> bool:
    """True for the record of a check that compared something and found no fault."""
    return event is not None and event["verdict"] in (KvVerdict.EXACT, KvVerdict.WITHIN)


def why_missing(event: Mapping[str, Any] | None, *, equal_tokens: bool, layers: bool) -> str | None:
    """Why a comparison through the whole model is missing, with nothing instead of it; None if it
    is there, or something stands in for it.

    Args:
        event: its record, or None.
        equal_tokens: float32 tokens are equal, which wrong values would change.
        layers: each layer passed on its own inputs, which counts if the model is too unstable for
            a comparison (`TOO_BLUNT`).
    """
    if is_sound(event) or equal_tokens:
        return None
    reason = (event or {}).get("reason") or NO_RECORD
    return None if layers and reason == TOO_BLUNT else reason


@dataclass(frozen=True)
class Tolerance:
    """Errors of mode off against itself in one layer, and the limits that follow.

    All are fractions of the layer's row norm, by measure; `allowed` has only those that are not
    blunt.
    """

    own: dict[str, float]
    allowed: dict[str, float]

    @property
    def compares(self) -> bool:
        """True if one wrong row would show: the first measure is not blunt."""
        return next(iter(self.own)) in self.allowed


@dataclass(frozen=True)
class KvMismatch:
    """The error that decides: its layer, measure, size and limit.

    `error` is None if it is not finite. `allowed` is 0 if rows must be bit-identical.
    """

    measure: str
    error: float | None
    allowed: float
    own: float
    rank: int
    layer: int
    name: str
    what: str
    part: str
    request: int
    position: int
    head: int

    @property
    def ratio(self) -> float:
        """Error over its limit; infinite for an error that is not finite."""
        if self.error is None:
            return float("inf")
        if self.allowed == 0:
            return float("inf") if self.error else 0.0
        return self.error / self.allowed

    def sentence(self, ranks: int) -> str:
        """A sentence with layer, request, position, K or V, head, error and limit."""
        rank = f" of rank {self.rank}" if ranks > 1 else ""
        kind = "K/V" if self.what in "KV" else "states"
        place = (
            f"{kind}: layer {self.layer} ({self.name}), request {self.request}, position "
            f"{self.position} (of its {self.part}), {self.what}, head {self.head}{rank}"
        )
        if self.error is None:
            return f"{place}: not a finite number"
        if self.allowed == 0:
            return (
                f"{place} is not equal to off x off's, bit for bit; the layer's largest error is "
                f"{self.error:.3g} of a row's norm"
            )
        return (
            f"{place}: the layer's {self.measure} error is {self.error:.3g} of a row's norm, "
            f"{self.allowed:.3g} is allowed (mode off against itself: {self.own:.3g})"
        )


def tolerances(
    comparisons: Iterable[Sequence[Mapping[str, Any]]],
    multiples: Mapping[str, float] = MULTIPLES,
    blunt: float = WRONG_ROW,
    *,
    routed: bool = False,
) -> tuple[dict[LayerKey, Tolerance], str | None]:
    """The tolerance of each layer from mode off against itself.

    Args:
        comparisons: results of `KvCache.compare`, one entry per rank, for rows of mode off in
            different batch shapes.
        multiples: measures, and how many times mode off's own is allowed.
        blunt: measures that would allow so much are left out.
        routed: the target has experts. A rounding can send a token to another one, in mode off too;
            which layer that shows in is chance, so its largest error there counts in all layers.

    Returns:
        Tolerances by rank, layer and K or V; and why there are none (non-finite rows in mode off),
        else None.
    """
    worst: dict[LayerKey, dict[str, float]] = {}
    floors: dict[LayerKey, dict[str, float]] = {}
    for ranks in comparisons:
        for rank, entry in _entries(ranks):
            key = (rank, entry["layer"], entry["what"])
            if entry["largest"] is None or entry["one_step"] is None:
                name, what = entry["name"], entry["what"]
                return {}, f"rows of mode off itself are not finite in {name}, {what}"
            best = worst.setdefault(key, dict.fromkeys(multiples, 0.0))
            least = floors.setdefault(key, dict.fromkeys(multiples, 0.0))
            for measure in multiples:
                best[measure] = max(best[measure], entry[measure])
                step = entry["one_step" if measure == "largest" else "one_element"]
                least[measure] = max(least[measure], step)
    if routed:
        _spread(worst, blunt / multiples["largest"])
    by_layer = {}
    for key, errors in worst.items():
        # Never finer than one rounding step of the cache: of the largest element for the largest
        # error, of one average element in every row for the others.
        allowed = {name: max(multiples[name] * errors[name], floors[key][name]) for name in errors}
        by_layer[key] = Tolerance(errors, {n: most for n, most in allowed.items() if most < blunt})
    return by_layer, None


def _spread(worst: Mapping[LayerKey, dict[str, float]], blunt: float) -> None:
    """Make the largest error that of any layer of its kind, but for those that are blunt."""
    for kind in {what for _, _, what in worst}:
        errors = [e for (_, _, what), e in worst.items() if what == kind and e["largest"] < blunt]
        largest = max((each["largest"] for each in errors), default=0.0)
        for each in errors:
            each["largest"] = largest


def compared_layers(allowed: Mapping[LayerKey, Tolerance], kinds: str | Sequence[str]) -> set[int]:
    """Layers in which a wrong row of any of these kinds would show on every rank."""
    of_kinds = {key: tolerance for key, tolerance in allowed.items() if key[2] in kinds}
    blunt = {layer for (_, layer, _), tolerance in of_kinds.items() if not tolerance.compares}
    return {layer for _, layer, _ in of_kinds} - blunt


def compare_exactly(ranks: Sequence[Mapping[str, Any]]) -> KvMismatch | None:
    """The first row that is not bit-identical, in the lowest layer that has one."""
    faults = [
        _finding("largest", entry["largest"], 0.0, 0.0, rank, entry, entry["first"])
        for rank, entry in _entries(ranks)
        if entry["differing"]
    ]
    return min(faults, key=lambda f: (f.layer, f.request, f.position, f.rank, f.what), default=None)


ROUNDING = 6 * 2.0**-23
"""Largest error, of a row's norm, that another order of float32 sums explains: 6 roundings. Seen
between two equal batches on a busy CPU: 3.4. A value that is wrong by a millionth is above it."""


def only_rounding(ranks: Sequence[Mapping[str, Any]]) -> bool:
    """True if no layer differs by more than ROUNDING."""
    errors = [entry["largest"] for _, entry in _entries(ranks)]
    return all(error is not None and error <= ROUNDING for error in errors)


def compare_within(
    ranks: Sequence[Mapping[str, Any]], allowed: Mapping[LayerKey, Tolerance]
) -> tuple[KvMismatch | None, bool]:
    """The finding that decides, and whether it breaks the tolerance.

    Of the layers that break it, the lowest has the fault: its error propagates to all later layers.
    If none breaks it, the error closest to its limit. A row that is not finite breaks it in any
    layer.
    """
    findings = []
    for rank, entry in _entries(ranks):
        tolerance = allowed[rank, entry["layer"], entry["what"]]
        if entry["largest"] is None:
            findings.append(_finding("largest", None, 0.0, 0.0, rank, entry))
        findings += [
            _finding(name, entry[name], limit, tolerance.own[name], rank, entry)
            for name, limit in tolerance.allowed.items()
            if name in entry and (name not in ("rms", "median") or entry["rows"] >= MIN_ROWS)
        ]
    broken = [finding for finding in findings if finding.ratio > 1]
    if broken:
        lowest = min(finding.layer for finding in broken)
        return max((f for f in broken if f.layer == lowest), key=lambda f: f.ratio), True
    return max(findings, key=lambda finding: finding.ratio, default=None), False


def _entries(ranks: Sequence[Mapping[str, Any]]) -> Iterable[tuple[int, Mapping[str, Any]]]:
    return ((rank, entry) for rank, of_rank in enumerate(ranks) for entry in of_rank["errors"])


def _finding(
    measure: str,
    error: float | None,
    allowed: float,
    off_error: float,
    rank: int,
    entry: Mapping[str, Any],
    place: Mapping[str, int] | None = None,
) -> KvMismatch:
    values = {name: entry[name] for name in ("layer", "name", "what", "part")}
    where = entry["place"] if place is None else place
    return KvMismatch(measure, error, allowed, off_error, rank, **values, **where)


KV_EVENT = "kv_gate"


@dataclass(frozen=True)
class StateResult:
    """States of a cell's requests against mode off's after the same tokens: end to end."""

    verdict: KvVerdict
    reason: str | None = None
    """Why the verdict is BROKEN or NOT_RUN."""
    sampled: int = 0
    """Requests whose states were copied, of all of them evenly."""
    requests: int = 0
    """Requests that were compared."""
    alike: int = 0
    """Requests compared with off x off itself: with its tokens up to the copies, after as many. The
    others are compared with mode off's prefill of their tokens."""
    layers: int = 0
    """Layers that were compared: mode off's own error is small enough there."""
    states: int = 0
    """Recurrent states that were compared on each rank."""
    finding: KvMismatch | None = None
    """The error that decides, or the one closest to its limit."""
    convolutions: int | None = None
    """Convolution states that were compared on each rank; None in older runs."""
    of_layers: int | None = None
    """Layers whose states were copied; None in older runs."""


@dataclass(frozen=True)
class KvResult:
    """The K/V gate's result for one cell; None for anything not checked."""

    verdict: KvVerdict
    reason: str | None = None
    """Why the verdict is BROKEN or NOT_RUN."""
    compared_with: str | None = None
    committed: int | None = None
    """Positions whose K/V the cache must hold, over all requests."""
    checked: int | None = None
    """Positions that were compared, in every layer on every rank."""
    unknown: int | None = None
    """Positions whose block another request had been given before the batch ended."""
    beyond_budget: int | None = None
    """Positions that had no room in memory."""
    layers: int | None = None
    """Layers that were compared: mode off's own error is small enough there."""
    ranks: int | None = None
    finding: KvMismatch | None = None
    """The error that decides, or the one closest to its limit; None: every row is equal."""
    seconds: float | None = None
    states: StateResult | None = None
    """The recurrent states of some requests; None for models without them."""
    of_layers: int | None = None
    """Layers that were looked at; None in older runs."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; a finding includes its ratio to the limit."""
        values = _plain(self)
        if self.states is not None:
            values["states"] = _plain(self.states)
        return values


def _plain(result: KvResult | StateResult) -> dict[str, Any]:
    values = {**asdict(result), "verdict": str(result.verdict)}
    if result.finding is not None:
        ratio = result.finding.ratio
        values["finding"]["ratio"] = None if ratio == float("inf") else ratio
    return values


def kv_event(cell: Cell, result: KvResult, batch: int) -> dict[str, Any]:
    """The result for the records, with the number of the batch whose cache was compared."""
    return {"event": KV_EVENT, **cell.names, "batch": batch, **result.to_dict()}


def write_fault(ranks: Sequence[Mapping[str, int]], accepted: int) -> str | None:
    """The fault in a gate batch's writes, in words; None if there is none.

    Args:
        ranks: the writes that each rank's `WriteWatch` saw, the first rank first.
        accepted: accepted drafts of the batch's staged windows.
    """
    for rank, seen in enumerate(ranks):
        where = f" on rank {rank}" if len(ranks) > 1 else ""
        if seen["early"]:
            return f"writes: {seen['early']} staged rows were written before their commit{where}"
        if seen["uneven"]:
            return f"writes: {seen['uneven']} rows were not written in every layer alike{where}"
        least = accepted - seen["without_slot"]
        if seen["windows"] and not least <= seen["written"] <= accepted:
            return (
                f"writes: {seen['written']} drafts are in the cache after their commits{where}, "
                f"but {accepted} were accepted"
            )
    return None
