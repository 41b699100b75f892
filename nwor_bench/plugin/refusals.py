"""Which configurations cannot be staged, and the name under which each is refused.

Staging holds a window's K/V from the write hook to the commit, and our own kernel does the
attention. So the hook must run in every step, the K/V must stay in place, and a layer's metadata
must describe the step's requests. `of_step` checks every step, since no configuration shows all.

Composite attention (Gemma 4, whose image tokens see each other) has one implementation for steps
with an image mask and a causal one for all others, windows among them: we look at the causal one.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm import envs
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import CompilationMode
from vllm.model_executor.layers.mamba.abstract import MambaBase

from nwor_bench.plugin.layers import causal_implementation
from nwor_bench.records import fallback_reasons as reasons

SPLIT_OPS = ("vllm::unified_kv_cache_update", "vllm::unified_attention_with_output")
"""The write and the attention: compiled code and piecewise graphs must end before each."""

LATENT_SPLIT_OPS = ("vllm::unified_mla_kv_cache_update", "vllm::unified_mla_attention_with_output")
"""The same of latent attention."""

FUSIONS = ("fuse_attn_quant", "fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache")
"""vLLM's passes that put the write or the attention into another kernel."""

LATENT_FUSION = "fuse_rope_kvcache_cat_mla"
"""The pass that does so to latent attention; vLLM sets it for other models too."""

SPARSE_MODULE = "vllm.models.deepseek_v32.attention"
"""The module of single models whose write and attention staging follows: DeepSeek V3.2, GLM-5."""

SCALES = ("output_scale", "output_block_scale")
"""Arguments of vLLM's attention after `output`."""

NOT_STAGED = "attention:kv_not_staged"
"""Attention of a layer whose write hook did not run in this step."""

NOT_CAUSAL = "attention:not_causal"
"""Attention in which a token sees later ones of its window."""

IMAGE_MASK = "attention:image_mask"
"""A step in which tokens of an image see each other."""


def of_compilation(config: Any, ops: Sequence[str] = SPLIT_OPS) -> str | None:
    """The fallback reason of a way to compile and capture under which K/V cannot be held on a GPU.

    Args:
        ops: the target's writes and attentions.
    """
    mode = getattr(config, "mode", None) or CompilationMode.NONE
    if mode == CompilationMode.NONE:
        return None
    if getattr(config, "use_inductor_graph_partition", False):
        return "inductor_graph_partition"
    passes = getattr(config, "pass_config", None)
    fusions = (*FUSIONS, LATENT_FUSION) if ops == LATENT_SPLIT_OPS else FUSIONS
    fusion = next((name for name in fusions if getattr(passes, name, False)), None)
    if fusion is not None:
        return fusion
    splits = getattr(config, "splitting_ops", None) or ()
    if mode != CompilationMode.VLLM_COMPILE or not set(ops) <= set(splits):
        return "whole_graph_compilation"  # Inductor gives one layer's buffers to the next
    return None


def breaks_piecewise_graphs(cudagraph_manager: Any) -> bool:
    """True if the V2 runner's piecewise CUDA graphs capture the write, which cannot be held."""
    if cudagraph_manager is None:
        return False
    return bool(getattr(cudagraph_manager, "use_breakable_cg", is_breakable_cudagraph_enabled()))


def of_engine(vllm_config: Any) -> str | None:
    """The fallback reason of how an engine was started, on either runner; None if it may stage."""
    if vllm_config.kv_transfer_config is not None:
        return reasons.KV_TRANSFER
    if vllm_config.speculative_config is None:
        return reasons.NO_SPECULATION
    return reasons.BATCH_INVARIANT if envs.VLLM_BATCH_INVARIANT else None


def of_module(layer: Any) -> str | None:
    """The fallback reason of a layer that a model's own module defines, in whole or in part.

    vLLM's newest models bring kernels that norm, rotate and write in one, or caches of their own.
    """
    for part in (layer, getattr(layer, "impl", None)):
        module = type(part).__module__
        if module.startswith("vllm.models.") and module != SPARSE_MODULE:
            return reasons.own_attention(module.split(".")[2])
    return None


def of_kind(layer: Any) -> str | None:
    """The fallback reason of a layer without an attention implementation; None if it has one."""
    if getattr(layer, "impl", None) is not None:
        return None
    if isinstance(layer, MambaBase):
        return reasons.RECURRENT_LAYERS
    name = type(layer).__name__
    return reasons.SPARSE_INDEXER if "Indexer" in name else reasons.layer_without_attention(name)


def of_states(layers: Sequence[Any], vllm_config: Any) -> str | None:
    """Why stock keeps the states of a target's recurrent layers; None if they may be staged.

    All of them stage, or none: one launch commits all.
    """
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn  # slow to import

    known = qwen_gdn_linear_attn.QwenGatedDeltaNetAttention
    other = next((type(layer) for layer in layers if type(layer) is not known), None)
    if other is not None:
        return reasons.unsupported_states(other.__name__)
    mode = vllm_config.cache_config.mamba_cache_mode
    return None if mode == "none" else reasons.mamba_cache_mode(mode)


def of_layer(layer: Any, builders: Iterable[type]) -> str | None:
    """The fallback reason of an attention layer whose implementation is supported, or None.

    Args:
        builders: the metadata builders under which a step's metadata describe its requests.
    """
    backend = getattr(layer, "attn_backend", None)
    causal = getattr(backend, "causal_backend_cls", backend)
    reason = of_builder(causal.get_builder_cls(), builders) if causal is not None else None
    impl = causal_implementation(layer.impl)
    if reason is None and any(
        getattr(part, "kv_cache_update_bypass", False)  # from vLLM 0.33
        for part in (layer, layer.impl)
    ):
        return "kv_cache_update_bypass"
    if reason is None and backend is not None and is_chunked(backend.get_builder_cls()):
        reason = None if chunk_of(layer) > 0 else reasons.CHUNKED_LOCAL_ATTENTION
    if reason is None and getattr(impl, "chunk_lookback", -1) > -1:
        return reasons.CHUNK_LOOKBACK
    return reason


def of_builder(builder: type, known: Iterable[type]) -> str | None:
    """The fallback reason of a layer's metadata builder; None if it is one of these.

    vLLM derives builders that cut a request into virtual ones or lengthen it. Of these only chunked
    local attention is supported: what each query sees is known.
    """
    if builder in tuple(known) or (is_chunked(builder) and issubclass(builder, tuple(known))):
        return None
    return reasons.attention_metadata(builder.__name__)


def is_chunked(builder: type) -> bool:
    """True for vLLM's builder of chunked local attention, which it makes inside a function."""
    return builder.__name__ == "ChunkedLocalAttentionBuilder"


def chunk_of(layer: Any) -> int:
    """Positions of a chunk if a query sees only those of its own chunk; -1: no chunks."""
    backend = getattr(layer, "attn_backend", None)
    if backend is None or not is_chunked(backend.get_builder_cls()):
        return -1
    return int(getattr(layer, "attention_chunk_size", None) or -1)


def of_groups(
    attn_groups: Sequence[Sequence[Any]], layers: Mapping[str, Any], known: Iterable[type]
) -> str | None:
    """The fallback reason of the groups in which the runner builds these layers' metadata."""
    known = tuple(known)
    for group in (group for groups in attn_groups for group in groups):
        theirs = [layers[name] for name in group.layer_names if name in layers]
        for builder in group.metadata_builders if theirs else ():
            reason = of_builder(type(getattr(builder, "causal_builder", builder)), known)
            if is_chunked(type(builder)) and any(chunk_of(layer) < 1 for layer in theirs):
                reason = reasons.CHUNKED_LOCAL_ATTENTION
            if reason is not None:
                return reason
    return None


def of_step(metadata: Any, requests: int | None) -> str | None:
    """The fallback reason of one layer's metadata in this step; None if they fit the window.

    Args:
        requests: requests of the window, those without drafts included; None if the metadata
            are of virtual requests (chunked local attention).
    """
    if getattr(metadata, "_attention_backend_variant", 1) == 0:  # a composite's choice
        return IMAGE_MASK
    if requests is not None and _requests_of(metadata) != (requests, requests):
        return "attention:other_requests"
    if getattr(metadata, "causal", True) is not True:
        return NOT_CAUSAL
    for name in ("rswa_window", "rswa_prefix_lens"):
        if getattr(metadata, name, None) is not None:
            return f"attention:{name}"
    return None


def _requests_of(metadata: Any) -> tuple[int, int]:
    if hasattr(metadata, "seq_lens"):
        return metadata.seq_lens.shape[0], metadata.query_start_loc.shape[0] - 1
    both = metadata.num_decodes + metadata.num_prefills  # FlashInfer has only these
    return both, both


def of_latent_step(metadata: Any, num_draft_tokens: Sequence[int]) -> str | None:
    """The fallback reason of a latent layer's metadata in this step; None if they fit the window.

    vLLM takes requests with few rows as decodes, the rest as prefills, whose context length is the
    host's: not exact for windows under async scheduling.
    """
    if metadata.num_reqs != len(num_draft_tokens):
        return "attention:other_requests"
    if metadata.causal is not True:
        return NOT_CAUSAL
    if any(num_draft_tokens[metadata.num_decodes :]):
        return "attention:window_as_prefill"
    return None


def of_call(
    key: Any, value: Any, positional: Sequence[Any], named: dict[str, Any], *, shared: bool = False
) -> str | None:
    """The fallback reason of attention's arguments; None if we support them.

    Args:
        key, value: None if a fused kernel has written them already (vLLM 0.33).
        positional, named: what came after `output`.
        shared: the layer reads another's K/V, so that its own do not matter.
    """
    if (key is None or value is None) and not shared:
        return reasons.ALREADY_WRITTEN
    if not positional and all(extra is None for extra in named.values()):
        return None  # every call that is not fused; asked in each layer of each step
    names = (*SCALES, *(f"argument_{n}" for n in range(len(SCALES), len(positional))))
    given = {**dict(zip(names, positional, strict=False)), **named}
    name = next((name for name, extra in given.items() if extra is not None), None)
    return None if name is None else f"attention:{name}"


def constant_drafter(runner: Any) -> str | None:
    """The class of a drafter that drafts as many tokens whatever the scheduler says; None if it
    follows. Of the V2 runner's, those that share the target's batch do; V1's follow by method."""
    speculator = getattr(runner, "speculator", None)
    if speculator is None:
        return None
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator as following

    follows = isinstance(speculator, following.TargetDependentARSpeculator)
    return None if follows else type(speculator).__name__
