"""The gate: a mode may not change what the model says. Pure comparisons of two batches."""

import hashlib
from collections.abc import Sequence

from nwor_bench.records import BatchRecord

REFERENCE = "reference"
EXACT = "exact"
INVALID = "INVALID"


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
