"""The gate: a mode may not change what the model says. Pure comparisons of two batches."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from nwor_bench.records import BatchRecord

REFERENCE = "reference"
EXACT = "exact"
EXPLAINED = "explained"
ACCEPTANCE_ONLY = "acceptance only"
INVALID = "INVALID"

Tokens = Sequence[Sequence[int]]


class ParityRule(StrEnum):
    """What a cell's greedy output must share with that of off x off.

    EXACT: every token. EXPLAINED: every token, or else the two candidates' logits lie closer
    than the run's precision can tell apart. ACCEPTANCE_ONLY: where vLLM accepts drafts by the
    dice (synthetic acceptance) tokens do not follow the target; lengths and accepted drafts do.
    """

    EXACT = EXACT
    EXPLAINED = EXPLAINED
    ACCEPTANCE_ONLY = ACCEPTANCE_ONLY


def parity_rule(device: str, dtype: str, synthetic: bool, can_explain: bool) -> ParityRule:
    """The strictest rule that sound modes can meet.

    On a CPU all modes share one attention, and float32 leaves room for no other token; other
    dtypes on a GPU do, and are explained where the target's weights are at hand.
    """
    if synthetic:
        return ParityRule.ACCEPTANCE_ONLY
    if device.startswith("cpu") or dtype == "float32" or not can_explain:
        return ParityRule.EXACT
    return ParityRule.EXPLAINED


class GapSource(Protocol):
    """Explains one request's first differing token; see `logit_gap.LogitGaps`."""

    def explain(
        self, prompt: Sequence[int], reference: Sequence[int], tokens: Sequence[int]
    ) -> "Gap | None":
        """None if one output is the beginning of the other."""


class Gap(Protocol):
    """How far apart two candidates are, and how far the precision can move them."""

    @property
    def gap(self) -> float:
        """Distance of the two logits."""

    @property
    def allowance(self) -> float:
        """The largest distance that precision explains."""

    @property
    def explained(self) -> bool:
        """True if the gap is within the allowance."""


@dataclass(frozen=True)
class Comparison:
    """A cell's parity, and what differs in words; None if nothing does."""

    parity: str
    difference: str | None = None


def explain_tokens(
    prompts: Tokens, tokens: Tokens, reference: Tokens, gaps: GapSource
) -> Comparison:
    """EXPLAINED if every differing request's first differing token is a tie, else INVALID."""
    difference = first_mismatch(tokens, reference)
    if difference is None:
        return Comparison(EXACT)
    if len(tokens) != len(reference):
        return Comparison(INVALID, difference)
    differing = [i for i in range(len(reference)) if list(tokens[i]) != list(reference[i])]
    found = [gaps.explain(prompts[i], reference[i], tokens[i]) for i in differing]
    unexplained = [
        (i, gap)
        for i, gap in zip(differing, found, strict=True)
        if gap is None or not gap.explained
    ]
    if unexplained:
        request, gap = unexplained[0]
        why = "one output ends early" if gap is None else (
            f"the logits lie {gap.gap:.3g} apart, precision explains {gap.allowance:.3g}"
        )  # fmt: skip
        return Comparison(
            INVALID,
            f"{difference}; {len(unexplained)} not explained by precision, first: request "
            f"{request}: {why}",
        )
    largest = max((gap for gap in found if gap is not None), key=lambda gap: gap.gap)
    return Comparison(
        EXPLAINED,
        f"{len(differing)} of {len(reference)} requests differ, each at a tie: the largest gap "
        f"of the two logits is {largest.gap:.3g}, precision explains {largest.allowance:.3g}",
    )


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


def digest_mismatch(digests: Sequence[str], reference: Sequence[str]) -> str | None:
    """The same for batches of which only the fingerprints are left (a run that is resumed)."""
    if len(digests) != len(reference):
        return f"{len(digests)} requests answered, {len(reference)} expected"
    pairs = enumerate(zip(digests, reference, strict=True))
    differing = [i for i, (ours, theirs) in pairs if ours != theirs]
    if not differing:
        return None
    return f"{len(differing)} of {len(reference)} requests differ; first: request {differing[0]}"


def acceptance_mismatch(batch: BatchRecord, reference: BatchRecord) -> str | None:
    """Where per-position acceptance (vLLM's own count) differs; None if it is equal."""
    ours, theirs = batch.vllm_accepted_per_position, reference.vllm_accepted_per_position
    if ours == theirs and batch.vllm_draft_tokens == reference.vllm_draft_tokens:
        return None
    return (
        f"accepted per position {ours} of {batch.vllm_draft_tokens} drafts, "
        f"{theirs} of {reference.vllm_draft_tokens} with off x off"
    )
