"""Check a batch's differing tokens one by one: each must be a tie in mode off."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from nwor_bench.analysis.parity.batches import (
    EXACT,
    EXPLAINED,
    INVALID,
    Comparison,
    Tokens,
    first_mismatch,
)
from nwor_bench.analysis.parity.ties import Place, PlaceVerdict
from nwor_bench.records.types import Cell


class TieSource(Protocol):
    """Answers from the engine; see `run.gate.ties.TieCheck`."""

    def check(
        self, prompts: Tokens, reference: Tokens, places: Sequence[Place]
    ) -> list[PlaceVerdict]:
        """A verdict for each place, in their order."""

    def go_on(
        self, cell: Cell, prompts: Tokens, reference: Tokens, starts: Mapping[int, int]
    ) -> dict[int, tuple[int, ...]]:
        """The rest of each request in the cell's modes, after `starts` tokens of the reference."""


@dataclass(frozen=True)
class TokenCheck:
    """A batch compared with the reference, its differing tokens checked."""

    comparison: Comparison

    rounds: int = 0
    """Batches in which the cell continued after ties."""

    tokens_compared: int = 0
    """Output tokens compared, each generated after the reference's own tokens."""

    tokens: int = 0
    """Output tokens of the reference."""

    verdicts: tuple[PlaceVerdict, ...] = ()
    """Verdicts on the differences, in the order of the checks."""

    diverged: tuple[int, ...] = ()
    """For each differing request the reference's tokens from the first difference on."""

    @property
    def largest_gap(self) -> float | None:
        """The largest gap of a tie, in nats; None if there was none."""
        gaps = [v.gap for v in self.verdicts if v.is_tie and v.gap is not None]
        return max(gaps, default=None)


def check_tokens(
    cell: Cell,
    prompts: Tokens,
    tokens: Tokens,
    reference: Tokens,
    source: TieSource,
    *,
    to_the_end: bool,
) -> TokenCheck:
    """EXACT if nothing differs, EXPLAINED if every checked difference is a tie, else INVALID.

    After a tie a cell's text differs. With `to_the_end` its modes generate the rest again after the
    reference's token, until every request has ended or a difference is not a tie. Without it only
    the first difference of each request is checked.
    """
    total = sum(map(len, reference))
    difference = first_mismatch(tokens, reference)
    if difference is None:
        return TokenCheck(Comparison(EXACT), tokens_compared=total, tokens=total)
    if len(tokens) != len(reference):
        return TokenCheck(Comparison(INVALID, difference), tokens=total)
    outputs = {request: tuple(output) for request, output in enumerate(tokens)}
    round_ = _round(outputs, dict.fromkeys(outputs, 0), reference)
    diverged = tuple(len(reference[p.request]) - p.position for p in round_.places)
    found: list[PlaceVerdict] = []
    compared = rounds = 0
    while True:
        compared += round_.compared
        verdicts = source.check(prompts, reference, round_.places) if round_.places else []
        found += verdicts
        broken = round_.ended or _not_ties(verdicts)
        if broken or not round_.next_starts or not to_the_end:
            break
        starts = round_.next_starts
        round_ = _round(source.go_on(cell, prompts, reference, starts), starts, reference)
        rounds += 1
    if broken:
        what = f"{difference}; {len(found)} differing tokens checked, not a tie: {broken}"
        comparison = Comparison(INVALID, what)
    else:
        comparison = Comparison(EXPLAINED, _ties(found, len(reference), compared, total))
    return TokenCheck(comparison, rounds, compared, total, tuple(found), diverged)


@dataclass(frozen=True)
class _Round:
    """One batch of a cell compared with the reference, each request from its start."""

    places: list[Place]
    ended: str | None
    """Which output ends too early or too late, in words; None if none does."""
    compared: int
    next_starts: dict[int, int]
    """Start of the next round for each request with tokens left after its difference."""


def _round(
    outputs: Mapping[int, Sequence[int]], starts: Mapping[int, int], reference: Tokens
) -> _Round:
    """Each output's first differing token."""
    places: list[Place] = []
    ended = None
    compared = 0
    for request, output in outputs.items():
        start, expected = starts[request], reference[request][starts[request] :]
        pairs = enumerate(zip(output, expected, strict=False))
        at = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
        if at is not None:
            places.append(Place(request, start + at, expected[at], output[at]))
            compared += at + 1
            continue
        compared += min(len(output), len(expected))
        if len(output) != len(expected):
            ended = ended or (
                f"request {request} ends after {start + len(output)} output tokens, with off x "
                f"off after {len(reference[request])}"
            )
    following = {place.request: place.position + 1 for place in places}
    left = {r: start for r, start in following.items() if start < len(reference[r])}
    return _Round(places, ended, compared, left)


def _not_ties(verdicts: Sequence[PlaceVerdict]) -> str | None:
    """Differences that are not ties, in words; None if all are ties."""
    broken = [verdict for verdict in verdicts if not verdict.is_tie]
    if not broken:
        return None
    place = broken[0].place
    return (
        f"{len(broken)}, first: request {place.request}, output token {place.position}: "
        f"{place.token} instead of {place.reference}, {broken[0].describe()}"
    )


def _ties(found: Sequence[PlaceVerdict], requests: int, compared: int, total: int) -> str:
    differing = len({verdict.place.request for verdict in found})
    worst = max(found, key=lambda verdict: verdict.gap or 0.0)
    return (
        f"{differing} of {requests} requests differ; {len(found)} differing tokens checked, each "
        f"a tie: the largest gap is {worst.describe()}; {compared} of {total} tokens compared"
    )
