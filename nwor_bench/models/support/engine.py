"""Which runner and attention vLLM 0.32 would choose for a model on a device. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from nwor_bench.models.layer_kinds import Kind
from nwor_bench.models.support.facts import LayerFacts, ModelFacts


class Device(StrEnum):
    """Kinds of devices that differ in their attention."""

    HOPPER = "hopper"
    """H100 and H200; Ampere and Ada choose alike but for sinks."""
    BLACKWELL = "blackwell"
    """B200 and B300."""
    CPU = "cpu"


class Runner(StrEnum):
    """vLLM's model runners."""

    V1 = "V1"
    V2 = "V2"


@dataclass(frozen=True)
class EngineFacts:
    """How vLLM would be started.

    Attributes:
        one_group: vLLM's --disable-hybrid-kv-cache-manager.
        eager: no CUDA graphs are captured.
    """

    device: Device = Device.HOPPER
    draft_tokens: int = 4
    cache_dtype: str = "auto"
    one_group: bool = False
    eager: bool = False


@dataclass(frozen=True)
class Attention:
    """vLLM's name of a backend, and the class that does the attention."""

    backend: str
    implementation: str


_CPU = Attention("CPU_ATTN", "ReferenceCPUAttentionImpl")
_FLASH = Attention("FLASH_ATTN", "FlashAttentionImpl")
_FLASHINFER = Attention("FLASHINFER", "FlashInferImpl")
_UNEQUAL = Attention("FLASH_ATTN_DIFFKV", "FlashAttentionDiffKVImpl")
_UNEQUAL_ON_CPU = Attention("TRITON_ATTN_DIFFKV", "TritonAttentionDiffKVImpl")
"""Value and key head sizes differ; the model chooses Triton without FlashAttention 3 or 4."""
_COMPOSITE = {
    Device.HOPPER: Attention("TRITON_FLASH_ATTN", "CompositeAttentionImpl"),
    Device.BLACKWELL: Attention("TRITON_FLASHINFER", "CompositeAttentionImpl"),
}

STAGEABLE = {
    Device.CPU: ("ReferenceCPUAttentionImpl",),
    Device.HOPPER: (
        *("FlashAttentionImpl", "TritonAttentionImpl", "CompositeAttentionImpl"),
        *("FlashAttentionDiffKVImpl", "TritonAttentionDiffKVImpl"),
        *("FlashAttnMLAImpl", "FlashMLAImpl", "TritonMLAImpl", "FlashAttnMLASparseImpl"),
    ),
    Device.BLACKWELL: (
        *("FlashAttentionImpl", "TritonAttentionImpl", "FlashInferImpl"),
        *("FlashAttentionDiffKVImpl", "TritonAttentionDiffKVImpl"),
        *("CompositeAttentionImpl", "TritonMLAImpl"),
    ),
}
"""Implementations that the plugin can stage in; on a GPU only with the V2 runner."""

SPARSE_LATENT = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
"""Architectures of `vllm.models.deepseek_v32`, whose sparse latent attention staging follows. vLLM
captures breakable CUDA graphs of them by itself."""

PLAIN_CACHES = ("auto", "bfloat16", "float16", "float32")
"""Caches in a model's own dtype."""

FULL_LATENT_ROW = 576
"""512 + 64, which FlashAttention's latent attention is built for."""

OWN_ATTENTION = {
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "DeepseekV4ForConditionalGeneration": "deepseek_v4",
    "DeepseekV41ForCausalLM": "deepseek_v41",
    "Dots3NoteForCausalLM": "dots3_note",
    "Glm5NextForCausalLM": "glm5next",
    "Glm5NextForConditionalGeneration": "glm5next",
    "HYV4ForCausalLM": "hy_v4",
    "InklingForCausalLM": "inkling",
    "InklingForConditionalGeneration": "inkling",
    "KimiK3ForConditionalGeneration": "kimi_k3",
    "KimiLinearForCausalLM": "kimi_k3",
    "MiniMaxM3SparseForCausalLM": "minimax_m3",
    "MiniMaxM3SparseForConditionalGeneration": "minimax_m3",
    "Qwen4ExpForCausalLM": "qwen4_exp",
    "Qwen4ExpForConditionalGeneration": "qwen4_exp",
}
"""Architectures whose attention on a GPU is in a package of their own, `vllm.models.PACKAGE`."""


OWN_BUILDERS = {"HrmTextForCausalLM": "EncoderOnlyAttentionBuilder"}
"""Architectures with a metadata builder of their own: a prompt's tokens see each other."""

READ_AGAIN = ("IQuestLoopCoderForCausalLM",)
"""Architectures whose layers attend again to K/V that they wrote earlier in the step."""

_OWN_SPARSE = {"qwen4_exp": "Qwen4ExpQSAFlashAttentionImpl"}
"""Sparse attention over plain K/V, by package; MiniMax M3's elsewhere."""


def attention_of(
    layer: LayerFacts, model: ModelFacts, device: Device, cache_dtype: str = "auto"
) -> Attention | None:
    """The attention of one layer; None for a layer without."""
    if layer.kind in (Kind.RECURRENT, Kind.NOTHING):
        return None
    if layer.latent:
        return _latent(layer, device, cache_dtype)
    if device is Device.CPU:
        return _UNEQUAL_ON_CPU if layer.value_dim else _CPU
    if layer.sparse:
        own = OWN_ATTENTION.get(model.architecture, "")
        return Attention("of the model", _OWN_SPARSE.get(own, "MiniMaxM3SparseImpl"))
    if model.images_see_themselves:
        return _COMPOSITE[device]
    if layer.value_dim:
        return _UNEQUAL
    if device is Device.BLACKWELL and (layer.head_dim or 0) <= 256:
        return _FLASHINFER
    return _FLASH


def _latent(layer: LayerFacts, device: Device, cache_dtype: str) -> Attention:
    """Latent attention; on a CPU with AMX vLLM takes AMXMLAImpl in bfloat16."""
    if device is Device.CPU:
        return Attention("CPU_MLA", "CPUMLAImpl")
    if layer.sparse and (device is Device.BLACKWELL or cache_dtype not in PLAIN_CACHES):
        return Attention("FLASHMLA_SPARSE", "FlashMLASparseImpl")
    if layer.sparse:
        return Attention("FLASH_ATTN_MLA_SPARSE", "FlashAttnMLASparseImpl")
    if layer.head_dim != FULL_LATENT_ROW:
        return Attention("TRITON_MLA", "TritonMLAImpl")
    if device is Device.BLACKWELL:
        return Attention("FLASHINFER_MLA", "FlashInferMLAImpl")
    return Attention("FLASH_ATTN_MLA", "FlashAttnMLAImpl")
