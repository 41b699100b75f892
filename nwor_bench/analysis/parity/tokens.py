"""Compare the output of two batches: a mode may not change the model's output. Pure."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Protocol

from nwor_bench.analysis.parity.ties import ErrorScale, Place, PlaceVerdict
from nwor_bench.records.types import BatchRecord, Cell

REFERENCE = "reference"
"""Verdict and parity of off x off, with which the other cells are compared."""

EXACT = "exact"
"""Parity of a cell whose tokens equal those of off x off."""

EXPLAINED = "explained"
"""Parity of a cell whose tokens differ only at ties."""

ACCEPTANCE_ONLY = "acceptance only"

LOSSY = "lossy"
"""Parity of a cell that accepts tokens which are not the target's, in every mode."""

INVALID = "INVALID"

Tokens = Sequence[Sequence[int]]


class ParityRule(StrEnum):
    """How much of off x off's greedy output a cell must reproduce.

    EXACT: every token, and every position's acceptance. EXPLAINED: each differing token must be a
    tie in mode off, and each position's acceptance must stay within its interval.
    ACCEPTANCE_ONLY: with synthetic acceptance tokens do not follow the target; lengths and
    acceptance must be equal, since vLLM draws from the batch's seed. LOSSY: FLy accepts by how
    sure the target is, so a rounding changes tokens and counts; nothing of them is compared.
    """

    EXACT = EXACT
    EXPLAINED = EXPLAINED
    ACCEPTANCE_ONLY = ACCEPTANCE_ONLY
    LOSSY = LOSSY


BY_METHOD = {"synthetic": ParityRule.ACCEPTANCE_ONLY, "fly": ParityRule.LOSSY}
"""Rules of vLLM's rejection_sample_method; other methods accept the target's own tokens."""


def parity_rule(device: str, dtype: str, method: str | None, states: bool = False) -> ParityRule:
    """The strictest rule that sound modes can meet.

    On a CPU all modes share one attention kernel, and in float32 no near-ties are expected: tokens
    must be equal. Other dtypes on a GPU have ties, which the engine can check for any target; on a
    CPU too if `states` are staged, which are computed by another kernel than stock's.
    """
    if method in BY_METHOD:
        return BY_METHOD[method]
    if dtype == "float32" or (device.startswith("cpu") and not states):
        return ParityRule.EXACT
    return ParityRule.EXPLAINED


@dataclass(frozen=True)
class CellParity:
    """A cell's parity, and the difference in words; None if there is none."""

    parity: str
    difference: str | None = None


def compare_lengths(tokens: Tokens, reference: Tokens) -> str | None:
    """Where two batches' output lengths differ, in words; None if they are equal."""
    ours, theirs = [len(t) for t in tokens], [len(t) for t in reference]
    return None if ours == theirs else f"output lengths {ours}, {theirs} with off x off"


def digest(token_ids: Sequence[int]) -> str:
    """A short fingerprint of one request's tokens, for the records."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:16]


def first_mismatch(
    tokens: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]
) -> str | None:
    """Where two batches' output first differs, in words; None if it is equal everywhere."""
    if len(tokens) != len(reference):
        return f"{len(tokens)} requests answered, {len(reference)} expected"
    pairs = enumerate(zip(tokens, reference, strict=True))
    differing = [i for i, (ours, theirs) in pairs if ours != theirs]
    if not differing:
        return None
    request = differing[0]
    ours, theirs = tokens[request], reference[request]
    shared = min(len(ours), len(theirs))
    at = next((i for i in range(shared) if ours[i] != theirs[i]), shared)
    got = ours[at] if at < len(ours) else "the end"
    wanted = theirs[at] if at < len(theirs) else "the end"
    return (
        f"{len(differing)} of {len(reference)} requests differ; first: request {request}, "
        f"output token {at}: {got} instead of {wanted}"
    )


def acceptance_mismatch(batch: BatchRecord, reference: BatchRecord) -> str | None:
    """Where per-position acceptance (vLLM's own count) differs; None if it is equal."""
    ours, theirs = batch.vllm_accepted_per_position, reference.vllm_accepted_per_position
    if ours == theirs and batch.vllm_draft_tokens == reference.vllm_draft_tokens:
        return None
    return (
        f"accepted per position {ours} of {batch.vllm_draft_tokens} drafts, "
        f"{theirs} of {reference.vllm_draft_tokens} with off x off"
    )


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

    comparison: CellParity

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
        return TokenCheck(CellParity(EXACT), tokens_compared=total, tokens=total)
    if len(tokens) != len(reference):
        return TokenCheck(CellParity(INVALID, difference), tokens=total)
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
        comparison = CellParity(INVALID, what)
    else:
        comparison = CellParity(EXPLAINED, _ties(found, len(reference), compared, total))
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


TIES_EVENT = "ties"


def ties_event(
    cell: Cell, batch: BatchRecord, checked: TokenCheck, scale: ErrorScale, spent_s: float
) -> dict[str, Any]:
    """Checks of one batch's differing tokens. Gaps are in nats, the time spent in seconds."""
    return {
        "event": TIES_EVENT,
        **cell.names,
        "phase": batch.phase,
        "block": batch.block,
        "parity": checked.comparison.parity,
        "differences": len(checked.verdicts),
        "largest_gap": checked.largest_gap,
        "rounds": checked.rounds,
        "tokens_compared": checked.tokens_compared,
        "tokens": checked.tokens,
        "error_rms": scale.rms,
        "error_largest": scale.largest,
        "error_positions": scale.positions,
        "allowance": scale.allowance,
        "spent_s": spent_s,
        "expected_differences": scale.flips_from(0.0) * checked.tokens_compared,
        "places": [{**asdict(v.place), "gap": v.gap, "is_tie": v.is_tie} for v in checked.verdicts],
    }


def event_key(event: dict[str, Any]) -> tuple[Any, ...]:
    """Cell and batch of an event; a block that ran again replaces its earlier event."""
    names = ("pair", "nwor_mode", "scv_mode", "arm", "phase", "block")
    return tuple(event.get(name) for name in names)


def ties_facts(events: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """All batches together, for run.json; None if no token differed.

    Token counts include only batches with a difference. The error scale is the latest one: a
    resumed run measures it again.
    """
    every = list(events)
    if not every:
        return None
    latest = every[-1]
    gaps = [event["largest_gap"] for event in every if event["largest_gap"] is not None]
    return {
        "batches_with_differences": len(every),
        "differences_judged": sum(event["differences"] for event in every),
        "differences_expected": sum(event.get("expected_differences", 0.0) for event in every),
        "largest_gap_nats": max(gaps, default=None),
        "tokens_compared": sum(event["tokens_compared"] for event in every),
        "tokens": sum(event["tokens"] for event in every),
        "continuation_batches": sum(event["rounds"] for event in every),
        "judging_s": sum(event["spent_s"] for event in every),
        "error_rms_nats": latest["error_rms"],
        "error_largest_nats": latest["error_largest"],
        "error_positions": latest["error_positions"],
        "allowance_nats": latest["allowance"],
    }
