"""Why windows are written directly: the rules that `plan` and the plugin share.

`plan` has a config.json (`planned`), the plugin has vLLM's runner and layers (`built`). A rule
has a predicate for each, None if that side cannot see the cause. The first rule that holds gives
the reason. The plugin also refuses what no config.json shows (`plugin/refusals.py`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nwor_bench.instruments.cards import Device
from nwor_bench.models.support.facts import (
    FP8_CACHES,
    OWN_ATTENTION,
    OWN_BUILDERS,
    PLAIN_CACHES,
    READ_AGAIN,
    STAGED_STATES,
    Attention,
    EngineFacts,
    LayerFacts,
    ModelFacts,
)
from nwor_bench.records import fallback_reasons as reasons
from nwor_kernels.limits import unsupported_heads, unsupported_window

FLASHINFER = "FlashInferImpl"

_BACKENDS = {
    "flash_attn": ("FlashAttentionImpl", "FlashAttentionMetadataBuilder"),
    "triton_attn": ("TritonAttentionImpl", "TritonAttentionMetadataBuilder"),
    "flashinfer": (FLASHINFER, "FlashInferMetadataBuilder"),
    "flash_attn_diffkv": ("FlashAttentionDiffKVImpl",),
    "triton_attn_diffkv": ("TritonAttentionDiffKVImpl", "TritonAttentionDiffKVMetadataBuilder"),
    "mla.flashattn_mla": ("FlashAttnMLAImpl", "FlashAttnMLAMetadataBuilder"),
    "mla.flashmla": ("FlashMLAImpl", "FlashMLAMetadataBuilder"),
    "mla.triton_mla": ("TritonMLAImpl", "TritonMLAMetadataBuilder"),
}
"""vLLM's modules of attention on a GPU that staging follows: the implementation, and the builder
under whose metadata a step shows whether its rows fit a window."""

FOLLOWED_ON_GPU = frozenset(
    f"vllm.v1.attention.backends.{module}.{name}"
    for module, names in _BACKENDS.items()
    for name in names
)
FOLLOWED_ON_CPU = frozenset(
    (
        "nwor_bench.plugin.runner_v1.cpu_attention.ReferenceCPUAttentionImpl",
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionMetadataBuilder",
    )
)


def path_of(kind: type) -> str:
    """A class's module and name."""
    return f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True)
class Rule:
    """One cause: its reason, or how one is made of what a predicate returned, and the predicates.

    `planned` and `built` return None or False if the rule does not hold.
    """

    reason: str | Callable[[Any], str]
    planned: Callable[[Any], Any] | None = None
    built: Callable[[Any], Any] | None = None

    def holds(self, planned: Any, built: Any) -> Any:
        """What the predicate of the given side says."""
        predicate, subject = (self.planned, planned) if built is None else (self.built, built)
        return None if predicate is None else predicate(subject)


def first_reason(rules: Iterable[Rule], *, planned: Any = None, built: Any = None) -> str | None:
    """The reason of the first rule that holds for what is planned, or for what vLLM has built."""
    for rule in rules:
        holds = rule.holds(planned, built)
        if holds is not None and holds is not False:
            return rule.reason if isinstance(rule.reason, str) else rule.reason(holds)
    return None


@dataclass(frozen=True)
class PlannedLayer:
    """An attention layer of a config.json, and the attention that vLLM would choose for it."""

    layer: LayerFacts
    model: ModelFacts
    engine: EngineFacts
    attention: Attention

    @property
    def on_cpu(self) -> bool:
        """True for vLLM's CPU build."""
        return self.engine.device is Device.CPU

    @property
    def unfollowed(self) -> str | None:
        """The implementation, if staging does not follow it."""
        name = self.attention.implementation
        paths = FOLLOWED_ON_CPU if self.on_cpu else FOLLOWED_ON_GPU
        return None if any(path.endswith(f".{name}") for path in paths) else name

    @property
    def strange_cache(self) -> str | None:
        """The dtype of a cache whose rows are not read."""
        known = PLAIN_CACHES if self.on_cpu else (*PLAIN_CACHES, *FP8_CACHES)
        return None if self.engine.cache_dtype in known else self.engine.cache_dtype

    @property
    def strange_size(self) -> str | None:
        """The fallback reason of a size that the GPU's kernels do not take."""
        if self.on_cpu:
            return None
        sizes = () if self.layer.latent else (self.layer.head_dim, self.layer.value_dim)
        heads = unsupported_heads(*(size for size in sizes if size is not None))
        return heads or unsupported_window(self.engine.draft_tokens + 1)


RUNNER_RULES = (
    Rule("data_parallel", None, lambda r: r.parallel_config.data_parallel_size > 1),
    Rule(reasons.PIPELINE_PARALLEL, None, lambda r: r.use_pp),
    Rule("context_parallel", None, lambda r: r.dcp_size > 1 or r.pcp_manager is not None),
    Rule("adaptive_verification", None, lambda r: r.adaptive_verification is not None),
    Rule("micro_batches", None, lambda r: r.ubatch_runner is not None),
    # The next three never ran with staging (docs/features.md).
    Rule("sleep_mode", None, lambda r: bool(_of_model(r, "enable_sleep_mode"))),
    Rule("eplb", None, lambda r: getattr(r.parallel_config, "enable_eplb", False)),
    Rule("batch_sharded_sampling", None, lambda r: getattr(r, "batch_sharder", None) is not None),
    # Such a model's attention sees other positions than ours.
    Rule(reasons.RSWA_WINDOW, lambda m: m.rswa, lambda r: _of_model(r, "rswa_window") is not None),
)
"""On a model's `ModelFacts`; on vLLM's V2 runner."""

MODULE_RULES = (
    Rule(
        reasons.own_attention,
        lambda model: OWN_ATTENTION.get(model.architecture),
        lambda layer: _own_package(layer) or _own_package(getattr(layer, "impl", None)),
    ),
)
"""On a model's `ModelFacts`; on a layer of any kind.

vLLM's newest models bring kernels that norm, rotate and write in one, or caches of their own.
"""

LAYER_RULES = (
    Rule(reasons.unsupported_attention, lambda p: p.unfollowed, lambda b: b.unfollowed),
    Rule(str, None, lambda b: b.changed),
    Rule(str, None, lambda b: b.refused_on_cpu),
    Rule(reasons.cache_dtype, lambda p: p.strange_cache if p.on_cpu else None),
    Rule(
        reasons.attention_metadata,
        lambda p: OWN_BUILDERS.get(p.model.architecture),
        lambda b: b.strange_builder,
    ),
    Rule("kv_cache_update_bypass", None, lambda b: b.bypasses_write),
    Rule(reasons.CHUNKED_LOCAL_ATTENTION, None, lambda b: b.hides_chunk),
    Rule(reasons.CHUNK_LOOKBACK, None, lambda b: getattr(b.impl, "chunk_lookback", -1) > -1),
    Rule("latent_sliding_window", None, lambda b: b.of_latent("sliding_window") is not None),
    Rule(reasons.NOT_CAUSAL, None, lambda b: b.of_latent("non_causal_multi_token_decode")),
    Rule(reasons.attention_type, None, lambda b: b.strange_type),
    Rule(reasons.ALIBI, lambda p: p.layer.alibi, lambda b: b.has_slopes),
    Rule(reasons.cache_dtype, lambda p: p.strange_cache, lambda b: b.strange_cache),
    Rule(str, lambda p: p.strange_size, lambda b: b.refused_by_kernel),
    # In the engine each step shows it (`refusals.of_call`).
    Rule(reasons.ALREADY_WRITTEN, lambda p: p.model.architecture in READ_AGAIN),
)
"""On a `PlannedLayer`; on the plugin's `BuiltLayer`."""

STATE_RULES = (
    Rule(reasons.RECURRENT_LAYERS, lambda layer: layer.states is None),
    Rule(
        reasons.unsupported_states,
        lambda layer: None if layer.states == STAGED_STATES else layer.states,
        lambda layer: None if type(layer).__name__ == STAGED_STATES else type(layer).__name__,
    ),
)
"""On a recurrent layer's `LayerFacts`; on vLLM's layer."""


def _of_model(runner: Any, name: str) -> Any:
    return getattr(getattr(runner.vllm_config, "model_config", None), name, None)


def _own_package(part: Any) -> str | None:
    """The package of a single model in which a layer's part is defined."""
    module = type(part).__module__
    return module.split(".")[2] if module.startswith("vllm.models.") else None
