"""The facts that staging depends on: a model's layers, from its config.json, and the attention that
vLLM 0.32 and 0.33 would choose for them on a device. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from nwor_bench.errors import ConfigError
from nwor_bench.instruments.cards import Device
from nwor_bench.models.config_json import has_latent_rows, read_latent_row, read_layer_heads
from nwor_bench.models.config_reader import Config, ConfigReader, Kind, kinds_of
from nwor_bench.models.methods import mtp_layers
from nwor_bench.models.recurrent import read_state

_MM_PREFIX = ("bagel", "gemma3", "molmo2", "moondream3", "paligemma")
"""Model types whose images see themselves in both directions, by vLLM's list."""

STAGED_STATES = "QwenGatedDeltaNetAttention"
STATE_LAYERS = {"gated delta net": STAGED_STATES, "Mamba2": "MambaMixer2"}
"""vLLM's classes of recurrent layers; with the others' K/V nothing is staged anyway."""


@dataclass(frozen=True)
class LayerFacts:
    """One decoder layer.

    Attributes:
        kind: its cache.
        head_dim: size of a K/V head; of the latent row with `latent`.
        window: of sliding or chunked attention.
        latent: latent attention (MLA).
        sparse: it attends to an indexer's selection.
        sinks: its attention has sinks.
        alibi: its attention has ALiBi's slopes.
        value_dim: size of its values, if it differs from its keys'.
        shares_kv: it reads another layer's K/V.
        states: vLLM's class of a recurrent layer; None if the config does not give its states.
    """

    kind: Kind
    head_dim: int | None = None
    window: int | None = None
    latent: bool = False
    sparse: bool = False
    sinks: bool = False
    alibi: bool = False
    value_dim: int | None = None
    shares_kv: bool = False
    states: str | None = None


@dataclass(frozen=True)
class ModelFacts:
    """A model as vLLM would build it.

    Attributes:
        images_see_themselves: vLLM needs a backend that masks images in both directions.
        mtp_layers: layers for multi-token prediction; None if the config has no such entry.
    """

    name: str
    architecture: str
    model_type: str
    layers: tuple[LayerFacts, ...]
    images_see_themselves: bool = False
    rswa: bool = False
    mtp_layers: int | None = None


_WITHOUT_TEXT = (
    *("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
    *("ForQuestionAnswering", "BertModel"),
)
"""Ends of architectures that vLLM does not generate with."""


def read_facts(config: Config, name: str, field: str, source: str) -> ModelFacts:
    """The facts of a config.json; reads `text_config` if there is one.

    `field` and `source` name the argument and its value in messages. Raises ConfigError if the
    config does not describe its layers.
    """
    reader = ConfigReader(config, field, source)
    text = reader.config
    if text.get("is_encoder_decoder"):
        raise ConfigError.for_field(field, source, "it is an encoder-decoder; name a decoder")
    try:
        kinds = kinds_of(text)
    except (ValueError, TypeError, KeyError) as error:
        remedy = f"its config does not describe its layers ({error}); name another config.json"
        raise ConfigError.for_field(field, source, remedy) from error
    shared = _whole(text, "num_kv_shared_layers")
    layers = tuple(
        _layer(reader, kind, place, shares_kv=place >= len(kinds) - shared)
        for place, kind in enumerate(kinds)
    )
    architectures = config.get("architectures") or text.get("architectures") or [""]
    if not isinstance(architectures, list):
        remedy = f'its "architectures" is {architectures!r}; write a list of one name'
        raise ConfigError.for_field(field, source, remedy)
    if (architecture := str(architectures[0])).endswith(_WITHOUT_TEXT):
        remedy = f"it generates no text ({architecture}); name a model that does"
        raise ConfigError.for_field(field, source, remedy)
    outer = str(config.get("model_type") or text.get("model_type") or "")
    images = outer in _MM_PREFIX or (
        outer.startswith("gemma4") and text.get("use_bidirectional_attention") == "vision"
    )
    return ModelFacts(
        name=name,
        architecture=architecture,
        model_type=outer,
        layers=layers,
        images_see_themselves=images,
        rswa=text.get("rswa_window") is not None,
        mtp_layers=mtp_layers(text),
    )


def _layer(reader: ConfigReader, kind: Kind, place: int, *, shares_kv: bool) -> LayerFacts:
    if kind in (Kind.RECURRENT, Kind.NOTHING):
        return LayerFacts(kind, states=_state_layer(reader) if kind is Kind.RECURRENT else None)
    text = reader.config
    latent = has_latent_rows(text) or _compressed(text)
    window = {Kind.SLIDING: "sliding_window", Kind.CHUNKED: "attention_chunk_size"}.get(kind, "")
    head_dim, value_dim = _sizes(reader, slides=kind is Kind.SLIDING)
    return LayerFacts(
        kind=kind,
        head_dim=head_dim,
        window=_whole(text, window) or None,
        latent=latent,
        sparse=_sparse(text, kind) or _block_sparse(text, place),
        sinks=_sinks(text, kind),
        alibi=text.get("model_type") == "bloom" or bool(text.get("alibi")),
        value_dim=None if latent else value_dim,
        shares_kv=shares_kv,
    )


def _state_layer(reader: ConfigReader) -> str | None:
    """vLLM's class of a model's recurrent layers."""
    try:
        kind = read_state(reader).kind
    except ConfigError:
        return None
    olmo = str(reader.config.get("model_type", "")).startswith("olmo")
    return "OlmoHybridGatedDeltaNetAttention" if olmo else STATE_LAYERS.get(kind)


def _compressed(text: Config) -> bool:
    """DeepSeek V4's own latent attention: its rows have the size of a head."""
    return bool(text.get("compress_ratios"))


def _sizes(reader: ConfigReader, *, slides: bool) -> tuple[int | None, int | None]:
    """Size of a key, or of the latent row, and of a value of another size; None if unknown."""
    try:
        row = None if _compressed(reader.config) else read_latent_row(reader, slides=slides)
        if row is not None:
            return row, None
        heads = read_layer_heads(reader, slides=slides)
    except ConfigError:
        return None, None
    return heads.dim, heads.value_dim if heads.value_dim != heads.dim else None


def _sparse(text: Config, kind: Kind) -> bool:
    """An indexer selects from all of the context; Qwen4-Exp calls its number a budget."""
    selected = text.get("index_topk") or text.get("indexer_budget")
    return bool(selected) and kind is not Kind.SLIDING


def _block_sparse(text: Config, place: int) -> bool:
    """MiniMax M3: blocks of the context that an index selects, in some layers."""
    sparse = text.get("sparse_attention_config")
    if not isinstance(sparse, Mapping) or not sparse.get("use_sparse_attention"):
        return False
    where = sparse.get("sparse_attention_freq")
    return bool(where[place]) if isinstance(where, list) and place < len(where) else True


def _sinks(text: Config, kind: Kind) -> bool:
    """Attention sinks, by the models of vLLM 0.32 and 0.33 that have them."""
    family, slides = str(text.get("model_type", "")), kind is Kind.SLIDING
    if family == "gpt_oss":
        return True
    if family in ("granite_swa", "granitemoe_swa"):  # Transformers lists their layers
        return bool(text.get("attention_sinks", True))
    if family in ("granite", "granitemoe"):
        return bool(text.get("attention_sinks", text.get("layer_types") is not None))
    if family.startswith("mimo_v2"):
        key = "add_swa_attention_sink_bias" if slides else "add_full_attention_sink_bias"
        return bool(text.get(key))
    return slides and bool(text.get("swa_attention_sink_enabled"))


def _whole(text: Config, key: str) -> int:
    """A whole number; 0 for everything else."""
    value = text.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


class Runner(StrEnum):
    """vLLM's model runners."""

    V1 = "V1"
    V2 = "V2"


@dataclass(frozen=True)
class EngineFacts:
    """How vLLM would be started."""

    device: Device = Device.HOPPER
    draft_tokens: int = 4
    cache_dtype: str = "auto"


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
_TRITON = Attention("TRITON_ATTN", "TritonAttentionImpl")
_COMPOSITE = {
    Device.HOPPER: Attention("TRITON_FLASH_ATTN", _FLASH.implementation),
    Device.BLACKWELL: Attention("TRITON_FLASHINFER", _FLASHINFER.implementation),
}
"""By the causal implementation, which serves windows."""

PLAIN_CACHES = ("auto", "bfloat16", "float16", "float32")
"""Caches in a model's own dtype."""

FP8_CACHES = ("fp8", "fp8_e4m3")
"""Further caches whose rows the plugin reads on a GPU."""

FULL_LATENT_ROW = 576
"""512 + 64, which FlashAttention's latent attention is built for."""

OWN_ATTENTION = {
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "DeepseekV4ForConditionalGeneration": "deepseek_v4",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV41ForCausalLM": "deepseek_v41",
    "Dots3NoteForCausalLM": "dots3_note",
    "Glm5NextForCausalLM": "glm5next",
    "Glm5NextForConditionalGeneration": "glm5next",
    "GlmMoeDsaForCausalLM": "deepseek_v32",
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
        attention = OWN_ATTENTION.get(model.architecture, "")
        return Attention("of the model", _OWN_SPARSE.get(attention, "MiniMaxM3SparseImpl"))
    if device is Device.AMPERE and (layer.sinks or model.images_see_themselves):
        return _TRITON
    if model.images_see_themselves:
        return _COMPOSITE[device]
    if layer.value_dim:
        return _UNEQUAL
    without_flash = device is Device.AMPERE and cache_dtype not in PLAIN_CACHES
    if without_flash or (device is Device.BLACKWELL and (layer.head_dim or 0) <= 256):
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
    if layer.head_dim != FULL_LATENT_ROW or device is Device.AMPERE:
        return Attention("TRITON_MLA", "TritonMLAImpl")
    if device is Device.BLACKWELL:
        return Attention("FLASHINFER_MLA", "FlashInferMLAImpl")
    return Attention("FLASH_ATTN_MLA", "FlashAttnMLAImpl")
