"""Compare the output of two batches: a mode may not change the model's output. Pure."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from nwor_bench.records.types import BatchRecord

REFERENCE = "reference"
EXACT = "exact"
EXPLAINED = "explained"
ACCEPTANCE_ONLY = "acceptance only"
INVALID = "INVALID"

Tokens = Sequence[Sequence[int]]


class ParityRule(StrEnum):
    """What a cell's greedy output must share with that of off x off.

    EXACT: every token, and every position's acceptance. EXPLAINED: each differing token must be a
    tie in mode off, and each position's acceptance must stay within its interval.
    ACCEPTANCE_ONLY: with synthetic acceptance tokens do not follow the target; lengths and
    acceptance must be equal, since vLLM draws from the batch's seed.
    """

    EXACT = EXACT
    EXPLAINED = EXPLAINED
    ACCEPTANCE_ONLY = ACCEPTANCE_ONLY


def parity_rule(device: str, dtype: str, synthetic: bool) -> ParityRule:
    """The strictest rule that sound modes can meet.

    On a CPU all modes share one attention kernel, and in float32 no near-ties are expected: tokens
    must be equal. Other dtypes on a GPU have ties, which the engine can check for any target.
    """
    if synthetic:
        return ParityRule.ACCEPTANCE_ONLY
    if device.startswith("cpu") or dtype == "float32":
        return ParityRule.EXACT
    return ParityRule.EXPLAINED


@dataclass(frozen=True)
class Comparison:
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
