"""Reasons: why windows are written directly, why a live group does not count, why staging stopped.

The plugin reports them and `plan` predicts them. One cause has one name. A reason with a detail
has it after a colon.
"""

from enum import StrEnum


class Fault(StrEnum):
    """Parts of reasons after which staging stops; each is a whole part between colons."""

    COMMIT = "commit"
    """A commit failed."""
    DEVICE_REFUSED = "device_refused"
    """The device refused a commit; found as the counts were read."""
    STAGING_STOPPED = "staging_stopped"
    """Every window after a refused commit is written directly."""
    ACTIVATIONS_REUSED = "activations_reused"
    """One layer's K/V overwrite another's; true of every window."""
    COUNTS = "counts_do_not_add_up"
    RANKS_DIFFER = "ranks_accepted_differently"


def fault_of(reason: str) -> Fault | None:
    """The fault that a reason names, behind a rank's number or a step of staging if at all."""
    parts = reason.split(":")
    return next((fault for part in parts for fault in Fault if part == fault), None)


def commit_fault(reason: str | None) -> str | None:
    """The reason, if a commit failed; else None."""
    return reason if reason is not None and fault_of(reason) is Fault.COMMIT else None


RECURRENT_LAYERS = "recurrent_layers"
"""Mamba, gated delta net, short convolution and no attention: a state instead of K/V."""
SPARSE_INDEXER = "sparse_indexer"
"""A sparse indexer's cache is written by the layer that it belongs to."""
CHUNKED_LOCAL_ATTENTION = "chunked_local_attention"
"""Attention metadata cut a request into virtual ones, and the layer does not say how."""
CHUNK_LOOKBACK = "chunk_lookback"
ALIBI = "alibi"
"""Scores with slopes (BLOOM, MPT), which our attention does not have."""
BREAKABLE_CUDA_GRAPHS = "breakable_cuda_graphs"
"""A step in a piecewise graph that captured the write too: only attention runs in each step."""
PIPELINE_PARALLEL = "pipeline_parallel"
"""Stages before the last learn what was accepted after they have begun further steps."""
V1_RUNNER_ON_GPU = "v1_runner_on_gpu"
"""vLLM's older runner; its full CUDA graphs cannot be captured twice (docs/features.md)."""
KV_TRANSFER = "kv_transfer"
"""A connector reads the cache within a step, before the commit."""
BATCH_INVARIANT = "batch_invariant"
"""VLLM_BATCH_INVARIANT=1: our attention splits a request's context by the whole batch."""
NO_SPECULATION = "no_speculation"
"""An engine without drafts: it has no windows."""
RSWA_WINDOW = "rswa_window"
STATES_NOT_CALLED = "states:not_called"
"""The step was staged, but the recurrent layers ran as captured from stock."""
STATES_WITHOUT_WINDOW = "states:no_window"
"""vLLM runs no row of the step as a window."""
STATES_OF_TOO_MANY = "states:more_requests_than_records"
"""More requests than the records of their tokens have room for."""
NO_CUDA = "no_cuda"
"""SCV's kernel and graphs need a CUDA device: the host validates."""
SLOWER_THAN_STOCK = "slower_than_stock"
"""Stock's write and attention are the faster for windows of this size and length, as measured."""
STOCK_ATTENTION = "stock_attention"
"""VLLM_NWOR_ATTENTION=stock."""
BY_CHOICE = frozenset({SLOWER_THAN_STOCK, STOCK_ATTENTION})
"""Windows that run as mode off runs them: SCV decides nothing either."""
BESIDE_PREFILL = "beside_prefill"
"""The step writes a prefill's rows anyway (`BesidePrefill`)."""


def unjoined_update(error: str) -> str:
    """SCV adaptive: the launch that also runs vLLM's update could not be compiled."""
    return f"update_not_joined:{error}"


def unsupported_attention(implementation: str) -> str:
    """Attention of this implementation is not ours to replace."""
    return f"unsupported_attention:{implementation}"


def own_attention(package: str) -> str:
    """A model whose own module attends or writes the cache: `vllm.models.PACKAGE`."""
    return f"own_attention:{package}"


def layer_without_attention(kind: str) -> str:
    """A layer with a cache that is neither attention nor recurrent."""
    return f"layer_without_attention:{kind}"


NOT_CAUSAL = "attention:not_causal"
"""Attention in which a token sees later ones of its window."""
ALREADY_WRITTEN = "attention:kv_cache_update_bypass"
"""Attention that is called without K and V: they were written before."""
NOT_STAGED = "attention:kv_not_staged"
"""Attention of a layer whose write did not come by our hook in this step."""
_ELSEWHERE = {"kv_cache_update_bypass", "kv_not_staged", "layer_not_staged"}


def written_elsewhere(reason: str) -> bool:
    """True if K/V did not come by the write that we wrap: another kernel wrote them."""
    return not _ELSEWHERE.isdisjoint(reason.split(":"))


def attention_metadata(builder: str) -> str:
    """A builder whose metadata do not have one row for each request."""
    return f"attention_metadata:{builder}"


def unsupported_states(kind: str) -> str:
    """States that stock vLLM writes in every mode: of a layer of another kind."""
    return f"unsupported_states:{kind}"


def mamba_cache_mode(mode: str) -> str:
    """With prefix caching vLLM copies states at the end of each block."""
    return f"mamba_cache_mode:{mode}"


def attention_type(kind: str) -> str:
    """Attention that is not a decoder's."""
    return f"attention_type:{kind}"


def cache_dtype(name: str) -> str:
    """A cache whose rows we do not read."""
    return f"cache_dtype:{name}"


class LeftOut(StrEnum):
    """Why a group of windows does not count; label `reason` of nwor_live_groups_left_out_total."""

    INTERRUPTED = "interrupted"
    FALLBACK = "fallback"
    BATCH_SIZE = "batch_size"
    UNTIMED = "untimed"
    DRAFTS = "drafts"


class Guard(StrEnum):
    """Why staging has stopped for good; label `reason` of nwor_live_staging_stopped_total."""

    COMMIT_REFUSED = "commit_refused"
    COUNTS = "counts_do_not_add_up"
    RANKS_DIFFER = "ranks_differ"


IN_WORDS = {
    LeftOut.INTERRUPTED: "interrupted by a step that is more than windows",
    LeftOut.FALLBACK: "with a staged window that was written directly",
    LeftOut.BATCH_SIZE: "with a batch size that changed its class",
    LeftOut.UNTIMED: "with a window that has no time",
    LeftOut.DRAFTS: "with a window that verified another number of drafts",
    Guard.COMMIT_REFUSED: "a commit was refused",
    Guard.COUNTS: "counts of a window do not add up",
    Guard.RANKS_DIFFER: "tensor-parallel ranks accepted different drafts",
    V1_RUNNER_ON_GPU: "vLLM's V1 runner serves it, which cannot stage on a GPU",
    RECURRENT_LAYERS: "recurrent layers keep a state and no K/V",
    SPARSE_INDEXER: "its sparse indexer writes a cache of its own",
    RSWA_WINDOW: "its sliding window moves with the request",
    ALIBI: "our attention has no ALiBi slopes",
    ALREADY_WRITTEN: "its kernel writes the cache itself",
    "cache_dtype": "our kernels cannot read such a cache",
    "own_attention": "its own module attends or writes the cache",
    "attention_metadata": "its metadata do not have one row a request",
    "unsupported_attention": "its attention is not ours to replace",
    "unsupported_states": "stock writes such states",
}
"""Why a group is left out, behind its number; a guard, or why nothing is staged, as the end of a
sentence. A reason with a detail stands without it."""


def in_words(reason: str) -> str:
    """The reason for people; one that is not known stays as it is."""
    kind, _, detail = reason.partition(":")
    known = {str(name): words for name, words in IN_WORDS.items()}
    if kind in known and detail:
        return f"{known[kind]} ({detail})"
    return known.get(reason, reason)
