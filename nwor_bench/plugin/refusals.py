"""Which configurations cannot be staged, and the name under which each is refused.

Staging holds a window's K/V from the write hook to the commit, and our own kernel does the
attention. So the hook must run in every step, the K/V must stay in place, and a layer's metadata
must describe the step's requests. `of_step` checks every step, since no configuration shows all.
What a config.json shows too is refused by rules shared with `plan` (`models/support/rules.py`).

Composite attention (Gemma 4, whose image tokens see each other) has one implementation for steps
with an image mask and a causal one for all others, windows among them: we look at the causal one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from vllm import envs
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import CompilationMode
from vllm.v1.attention.backend import AttentionType

from nwor_bench.instruments.contract import Feature, lost
from nwor_bench.instruments.draft_counts import changes_count
from nwor_bench.models.support.facts import FP8_CACHES, PLAIN_CACHES
from nwor_bench.models.support.rules import (
    FOLLOWED_ON_CPU,
    FOLLOWED_ON_GPU,
    LAYER_RULES,
    MODULE_RULES,
    RUNNER_RULES,
    STATE_RULES,
    first_reason,
    path_of,
)
from nwor_bench.plugin.layers import TargetLayers, causal_implementation, is_latent
from nwor_bench.records import fallback_reasons as reasons

SPLIT_OPS = ("vllm::unified_kv_cache_update", "vllm::unified_attention_with_output")
"""The write and the attention: compiled code and piecewise graphs must end before each."""

LATENT_SPLIT_OPS = ("vllm::unified_mla_kv_cache_update", "vllm::unified_mla_attention_with_output")
"""The write and the attention of latent layers."""

FUSIONS = ("fuse_attn_quant", "fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache")
"""vLLM's passes that put the write or the attention into another kernel."""

LATENT_FUSION = "fuse_rope_kvcache_cat_mla"
"""The pass that does so to latent attention; vLLM sets it for other models too."""

SCALES = ("output_scale", "output_block_scale")
"""Arguments of vLLM's attention after `output`."""

OWN_FEATURES = {"FlashInferImpl": Feature.FLASHINFER, "TritonAttentionImpl": Feature.TRITON}
"""Implementations besides FlashAttention's that a new vLLM may take."""

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


def of_kind(layer: Any) -> str | None:
    """The fallback reason of a layer without an attention implementation; None if it has one."""
    if getattr(layer, "impl", None) is not None:
        return None
    name = type(layer).__name__
    return reasons.SPARSE_INDEXER if "Indexer" in name else reasons.layer_without_attention(name)


def of_states(layers: Sequence[Any], vllm_config: Any) -> str | None:
    """Why stock keeps the states of a target's recurrent layers; None if they may be staged.

    All of them stage, or none: one launch commits all.
    """
    whys = (first_reason(STATE_RULES, built=layer) for layer in layers)
    other = next((reason for reason in whys if reason is not None), None)
    if other is not None:
        return other
    mode = vllm_config.cache_config.mamba_cache_mode
    return None if mode == "none" else reasons.mamba_cache_mode(mode)


@dataclass(frozen=True)
class BuiltLayer:
    """An attention layer of vLLM's as the rules see it (`LAYER_RULES`).

    Attributes:
        kernel: the fallback reason of a layer whose sizes and dtypes our kernel does not take;
            None on a CPU, where the reference attention takes all.
    """

    layer: Any
    kernel: Callable[[Any], str | None] | None = None

    @property
    def impl(self) -> Any:
        """The implementation that serves windows."""
        return causal_implementation(self.layer.impl)

    @property
    def unfollowed(self) -> str | None:
        """The implementation's name, if staging does not follow it."""
        kind = type(self.impl)
        known = FOLLOWED_ON_CPU if self.kernel is None else FOLLOWED_ON_GPU
        return None if path_of(kind) in known else kind.__name__

    @property
    def changed(self) -> str | None:
        """What staging of this attention needs, if vLLM lacks it."""
        feature = OWN_FEATURES.get(type(self.impl).__name__)
        feature = Feature.MLA if is_latent(self.layer) else feature
        return None if feature is None else lost(feature)

    @property
    def refused_on_cpu(self) -> str | None:
        """The reason for which our reference attention leaves a layer to stock."""
        reason: str | None = self.layer.impl.why_stock if self.kernel is None else None
        return reason

    @property
    def strange_builder(self) -> str | None:
        """The metadata builder's name, if a step's metadata do not describe its requests."""
        backend = getattr(self.layer, "attn_backend", None)
        causal = getattr(backend, "causal_backend_cls", backend)
        return None if causal is None else strange_builder(causal.get_builder_cls())

    @property
    def bypasses_write(self) -> bool:
        """True if a fused kernel writes the cache (from vLLM 0.33)."""
        parts = (self.layer, self.layer.impl)
        return any(getattr(part, "kv_cache_update_bypass", False) for part in parts)

    @property
    def hides_chunk(self) -> bool:
        """True for chunked local attention of a layer that does not say its chunk."""
        backend = getattr(self.layer, "attn_backend", None)
        if backend is None or not is_chunked(backend.get_builder_cls()):
            return False
        return chunk_of(self.layer) <= 0

    def of_latent(self, name: str) -> Any:
        """An attribute of a latent layer; None for other layers."""
        return getattr(self.layer, name, None) if is_latent(self.layer) else None

    @property
    def strange_type(self) -> str | None:
        """The attention's type, if it is not a decoder's; FlashInfer has no other."""
        kind: str = getattr(self.impl, "attn_type", AttentionType.DECODER)
        return None if kind == AttentionType.DECODER else kind

    @property
    def has_slopes(self) -> bool:
        """True for ALiBi, which our attention does not have."""
        return getattr(self.impl, "alibi_slopes", None) is not None

    @property
    def strange_cache(self) -> str | None:
        """The dtype of a cache whose rows our kernels do not read."""
        if self.kernel is None:
            return None
        dtype: str = self.impl.kv_cache_dtype
        return None if dtype in (*PLAIN_CACHES, *FP8_CACHES) else dtype

    @property
    def refused_by_kernel(self) -> str | None:
        """The reason of our kernel."""
        return None if self.kernel is None else self.kernel(self.layer)


def of_runner(runner: Any) -> str | None:
    """The fallback reason of a V2 runner whose steps its hook cannot follow, or None."""
    reason = first_reason(RUNNER_RULES, built=runner) or of_engine(runner.vllm_config)
    return reason or of_compilation(runner.compilation_config)


def of_target(runner: Any, target: TargetLayers, kernel: Callable[[Any], str | None]) -> str | None:
    """The fallback reason of the first layer of a V2 runner's target that cannot be staged."""
    context = runner.compilation_config.static_forward_context
    layers = {name: context[name] for name in (*target.staged, *target.sharing)}
    indexers = [context[name] for name in target.indexers]
    whys = chain(
        (first_reason(MODULE_RULES, built=module) for module in (*layers.values(), *indexers)),
        (of_layer(layer, kernel) for layer in layers.values()),
    )
    reason = next((reason for reason in whys if reason is not None), None)
    if reason is None:
        reason = next(map(of_kind, indexers), None)  # of attention that we do not follow
    if reason is None and not layers and target.recurrent:
        return reasons.RECURRENT_LAYERS
    if reason is None and any(map(is_latent, layers.values())):
        reason = of_compilation(runner.compilation_config, LATENT_SPLIT_OPS)
    return reason or of_groups(runner.attn_groups, layers)


def of_layer(layer: Any, kernel: Callable[[Any], str | None] | None = None) -> str | None:
    """The fallback reason of one layer of a target; None if it can be staged."""
    return of_kind(layer) or first_reason(LAYER_RULES, built=BuiltLayer(layer, kernel))


def strange_builder(builder: type) -> str | None:
    """A metadata builder's name, unless a step's metadata are known to describe its requests.

    vLLM derives builders that cut a request into virtual ones or lengthen it. Of these only chunked
    local attention is supported: what each query sees is known.
    """
    known = FOLLOWED_ON_CPU | FOLLOWED_ON_GPU
    kinds = builder.__mro__ if is_chunked(builder) else (builder,)
    return None if any(path_of(kind) in known for kind in kinds) else builder.__name__


def is_chunked(builder: type) -> bool:
    """True for vLLM's builder of chunked local attention, which it makes inside a function."""
    return builder.__name__ == "ChunkedLocalAttentionBuilder"


def chunk_of(layer: Any) -> int:
    """Positions of a chunk if a query sees only those of its own chunk; -1: no chunks."""
    backend = getattr(layer, "attn_backend", None)
    if backend is None or not is_chunked(backend.get_builder_cls()):
        return -1
    return int(getattr(layer, "attention_chunk_size", None) or -1)


def of_groups(attn_groups: Sequence[Sequence[Any]], layers: Mapping[str, Any]) -> str | None:
    """The fallback reason of the groups in which the runner builds these layers' metadata."""
    for group in (group for groups in attn_groups for group in groups):
        theirs = [layers[name] for name in group.layer_names if name in layers]
        for builder in group.metadata_builders if theirs else ():
            if is_chunked(type(builder)) and any(chunk_of(layer) < 1 for layer in theirs):
                return reasons.CHUNKED_LOCAL_ATTENTION
            strange = strange_builder(type(getattr(builder, "causal_builder", builder)))
            if strange is not None:
                return reasons.attention_metadata(strange)
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
        return reasons.NOT_CAUSAL
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
        return reasons.NOT_CAUSAL
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
    follows. Of the V2 runner's, those that share the target's batch do, and dflash, whose one pass
    takes as long for any number; V1's follow by method."""
    speculator = getattr(runner, "speculator", None)
    if speculator is None:
        return None
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator as following

    name = type(speculator).__name__
    follows = isinstance(speculator, following.TargetDependentARSpeculator)
    return None if follows or (name == "DFlashSpeculator" and changes_count("dflash")) else name
