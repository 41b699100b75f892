"""Read a model's shape from its config.json; missing or unknown entries are refused by name."""

from collections.abc import Mapping
from typing import Any

from nwor_bench.models.config_reader import MODEL_BITS, Config, ConfigReader, Kind, kinds_of
from nwor_bench.models.recurrent import read_state, recurrent_kinds
from nwor_bench.models.shape import Experts, Heads, Indexer, Layer, Mla, ModelShape

WEIGHT_BITS = {
    **{"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "int4": 4},
    **{"mxfp4": 4.25, "nvfp4": 4.5},  # with a scale of 8 bits for 32 or 16 elements
}
"""Bits of a matrix element by its dtype. Other scales (a few per cent) are left out."""

MAX_LAYERS = 10_000
"""A config.json with more layers than this is taken for a typing error."""

KNOWN_TYPES = {
    *("llama", "mistral", "ministral", "mixtral", "granite", "olmo2", "olmo3", "phi3", "smollm3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3", "gemma3_text"),
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_linear", "nemotron_h"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gpt_oss"),
}
"""Model types whose matrices are counted exactly; others are read as Llama."""

_OTHER_KINDS = {
    "is_encoder_decoder": "it is an encoder-decoder",
    "mamba_d_state": "it has state-space layers whose states are not covered",
    "moe_latent_size": "its experts work in a latent space",
    "num_kv_shared_layers": "its layers share caches",
    "block_configs": "its layers have heads of their own",
    "loop_num": "its layers run more than once",
    "H_cycles": "its layers run more than once",
}
"""Keys that, if set, mean an architecture that the byte model does not cover."""


def read_shape(config: Config, field: str, source: str) -> ModelShape:
    """The shape that a config.json describes; reads `text_config` if there is one.

    `field` and `source` name the flag and its value in messages. Raises ConfigError for a
    missing or mistyped entry, and for architectures that the byte model does not cover.
    """
    return _ShapeReader(config, field, source).read()


class _ShapeReader(ConfigReader):
    def read(self) -> ModelShape:
        for key, kind in _OTHER_KINDS.items():
            if self.config.get(key):
                raise self.refusal(f"{kind} ({key}); name a decoder with a plain KV cache")
        hidden, (heads, kv_heads) = self.number("hidden_size"), read_heads(self)
        check_heads(self)
        dtype = self.dtype()
        experts = self.experts()
        kinds = recurrent_kinds(self)
        layers = self.layers(experts) if kinds is None else self.hybrid_layers(kinds, experts)
        some_dense = not all(layer.sparse for layer in layers if layer.has_mlp)
        family = str(self.config.get("model_type", "unknown"))
        mla = read_mla(self)
        return ModelShape(
            model_type=family,
            hidden=hidden,
            vocab=self.number("vocab_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=read_head_dim(self, heads),
            mlp_width=self.number("intermediate_size") if some_dense else 0,
            layers=layers,
            dtype=dtype,
            weight_bits=self.weight_bits(dtype),
            tied_embeddings=self.tied(),
            mla=mla,
            experts=experts,
            state=None if kinds is None else read_state(self),
            indexer=read_indexer(self, family),
            value_dim=None if mla is not None else read_value_dim(self),
            gated_attention=bool(self.config.get("attn_output_gate", family == "qwen3_next")),
            mlp_matrices=2 if family == "nemotron_h" else 3,
            plain_attention=self.plain_attention(),
        )

    def tied(self) -> bool:
        # Gemma's configs leave the key out, and the family ties by default.
        is_gemma = str(self.config.get("model_type", "")).startswith("gemma")
        return bool(self.config.get("tie_word_embeddings", is_gemma))

    def weight_bits(self, dtype: str) -> float | None:
        """Bits of a matrix element; None if the quantisation config does not say."""
        quantised = self.config.get("quantization_config")
        if not quantised:
            return MODEL_BITS[dtype]
        if not isinstance(quantised, dict):
            raise self.refusal('its "quantization_config" is not an object; remove it')
        method = str(quantised.get("quant_algo") or quantised.get("quant_method")).lower()
        if method in WEIGHT_BITS:
            return WEIGHT_BITS[method]
        bits = quantised.get("bits") or _group_bits(quantised)
        return bits if isinstance(bits, int) and bits > 0 else None

    def plain_attention(self) -> bool:
        """True if a quantised checkpoint leaves attention in the model's dtype."""
        quantised = self.config.get("quantization_config") or {}
        left_out = quantised.get("modules_to_not_convert") or ()
        return any("attn" in str(module) for module in left_out)

    def experts(self) -> Experts | None:
        names = ("n_routed_experts", "num_experts", "num_local_experts")
        key = next((name for name in names if self.config.get(name)), None)
        if key is None:
            return None
        others = self.whole("num_experts_per_token") or self.whole("top_k_experts")
        count = self.number(key)
        per_token = self.number("num_experts_per_tok", others or None)  # Kimi's, Gemma 4's
        if per_token > count:
            raise self.refusal(
                f'its "num_experts_per_tok" is {per_token} with {count} experts; write at most that'
            )
        own_width = "moe_intermediate_size" in self.config
        width = self.number("moe_intermediate_size" if own_width else "intermediate_size")
        shared_width = self.whole("shared_expert_intermediate_size")
        shared = self.whole("n_shared_experts") or self.whole("num_shared_experts")
        width_of_shared = self.whole("moe_shared_expert_intermediate_size") or width  # Nemotron's
        return Experts(count, per_token, width, shared_width or shared * width_of_shared)

    def hybrid_layers(self, kinds: tuple[Kind, ...], experts: Experts | None) -> tuple[Layer, ...]:
        """Layers of a model that has recurrent ones; in Nemotron-H each is one block."""
        blocks = Kind.NOTHING in kinds
        dense_first = self.whole("first_k_dense_replace")
        strange = next((k for k in kinds if k in (Kind.SLIDING, Kind.CHUNKED, Kind.BOTH)), None)
        if strange is not None:
            raise self.refusal(f"it has layers of {strange} beside recurrent ones: not covered")
        return tuple(
            Layer(
                sparse=experts is not None and place >= dense_first,
                attends=kind is Kind.FULL,
                recurrent=kind is Kind.RECURRENT,
                has_mlp=not blocks or kind is Kind.NOTHING,
            )
            for place, kind in enumerate(kinds)
        )

    def layers(self, experts: Experts | None) -> tuple[Layer, ...]:
        count = self.number("num_hidden_layers")
        if count > MAX_LAYERS:
            raise self.refusal(f'its "num_hidden_layers" is {count}; write {MAX_LAYERS} or less')
        windows = self.windows(count)
        dense_first = self.whole("first_k_dense_replace")
        step, marked = self.number("decoder_sparse_step", 1), self.marked_sparse(count)
        dense = self.entries("mlp_only_layers", int) or []
        return tuple(
            Layer(
                window=windows[place],
                sparse=experts is not None
                and place >= dense_first
                and place not in dense
                and (place + 1) % step == 0
                and marked[place],
                heads=read_own_heads(self, slides=windows[place] is not None),
            )
            for place in range(count)
        )

    def marked_sparse(self, count: int) -> list[bool]:
        """Layers with experts by `moe_layer_freq`: one in n, or a mark for each (MiMo V2)."""
        if not isinstance(self.config.get("moe_layer_freq"), list):
            frequency = self.number("moe_layer_freq", 1)
            return [place % frequency == 0 for place in range(count)]
        marks = self.entries("moe_layer_freq", int) or []
        if len(marks) != count:
            raise self.refusal(f'its "moe_layer_freq" has {len(marks)} entries; write {count}')
        return [bool(mark) for mark in marks]

    def windows(self, count: int) -> list[int | None]:
        """Each layer's sliding window; None for full attention."""
        listed = self.entries("layer_types", str) or []
        self.entries("hybrid_layer_pattern", int)  # MiMo V2
        try:
            kinds = kinds_of(self.config)
        except ValueError as entry:
            raise self.refusal(f"its {entry}; write a whole number, 1 or more") from None
        strange = {*listed} - {"full_attention", "sliding_attention"}
        strange |= {*kinds} - {Kind.FULL, Kind.CHUNKED, Kind.SLIDING}
        if strange or len(kinds) != count:
            raise self.refusal(
                f"it has {min(strange) if strange else len(kinds)} layers; only {count} layers of "
                "full_attention or sliding_attention are covered"
            )
        window = self.number("sliding_window") if Kind.SLIDING in kinds else None
        return [window if kind is Kind.SLIDING else None for kind in kinds]


def _group_bits(quantised: Config) -> object:
    """Bits as compressed-tensors writes them: config_groups.*.weights.num_bits."""
    groups = quantised.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    return weights.get("num_bits") if isinstance(weights, dict) else None


_SPARSE_TYPES = ("deepseek_v32", "glm_moe_dsa")
"""Model types whose attention reads a selected part of the context, and is covered."""

_EXPANDED = ("minicpm3",)
"""Model types of latent attention whose K and V vLLM expands before it caches them."""


def has_latent_rows(config: Mapping[str, Any]) -> bool:
    """True if the cache has one latent row a token, not K and V of heads."""
    return config.get("kv_lora_rank") is not None and config.get("model_type") not in _EXPANDED


def read_heads(reader: ConfigReader) -> tuple[int, int]:
    """Query and K/V heads of layers that have no others."""
    heads = reader.number("num_attention_heads")
    return heads, reader.number("num_key_value_heads", heads)


def check_heads(reader: ConfigReader) -> None:
    """Refuse query heads that cannot share the K/V heads evenly."""
    heads, kv_heads = read_heads(reader)
    if heads % kv_heads and not has_latent_rows(reader.config):
        raise reader.refusal(
            f'its "num_key_value_heads" is {kv_heads}; write a divisor of the {heads} '
            '"num_attention_heads"'
        )


def read_head_dim(reader: ConfigReader, heads: int) -> int:
    """Size of a query and of a key."""
    default = None
    if reader.config.get("head_dim") is None:
        default = reader.whole("attention_head_dim") or reader.number("hidden_size") // heads
    return reader.number("head_dim", default)


def read_value_dim(reader: ConfigReader) -> int | None:
    """Size of a value; None if it is that of a key."""
    return reader.whole("v_head_dim") or None


def read_layer_heads(reader: ConfigReader, *, slides: bool) -> Heads:
    """Heads of the layers that slide, or of the others."""
    heads_of_kind = read_own_heads(reader, slides=slides)
    if heads_of_kind is not None:
        return heads_of_kind
    heads, kv_heads = read_heads(reader)
    dim = read_head_dim(reader, heads)
    return Heads(heads, kv_heads, dim, read_value_dim(reader) or dim)


def read_own_heads(reader: ConfigReader, *, slides: bool) -> Heads | None:
    """Heads of sliding layers (MiMo V2), or of the others (Gemma 4), that have their own; of all
    layers if K and V are expanded from latent rows, with values padded to the size of keys."""
    heads, kv_heads = read_heads(reader)
    if reader.config.get("model_type") in _EXPANDED:
        dim = reader.number("qk_nope_head_dim") + reader.number("qk_rope_head_dim")
        return Heads(heads, heads, dim, dim)
    dim = read_head_dim(reader, heads)
    if slides and reader.config.get("swa_num_key_value_heads"):
        dim = reader.number("swa_head_dim", dim)
        return Heads(
            reader.number("swa_num_attention_heads", heads),
            reader.number("swa_num_key_value_heads"),
            dim,
            reader.number("swa_v_head_dim", dim),
        )
    if not slides and str(reader.config.get("model_type", "")).startswith("gemma4"):
        dim = reader.number("global_head_dim", 512)
        if reader.config.get("attention_k_eq_v"):  # else it has the others' K/V heads
            kv_heads = reader.number("num_global_key_value_heads", kv_heads)
        return Heads(heads, kv_heads, dim, dim)
    return None


def read_latent_row(reader: ConfigReader, *, slides: bool) -> int | None:
    """Elements of a cached latent row; sliding layers may have their own (dots3). None without."""
    if not has_latent_rows(reader.config):
        return None
    of = "swa_" if slides and reader.config.get("swa_kv_lora_rank") else ""
    return reader.number(f"{of}kv_lora_rank") + reader.whole(f"{of}qk_rope_head_dim")


def most_cached_elements(reader: ConfigReader) -> int:
    """Cache elements of one token in the layer that has most, an indexer's keys included."""
    kinds = (True, False)
    rows = [read_latent_row(reader, slides=slides) or 0 for slides in kinds]
    if any(rows):
        return max(rows) + reader.whole("index_head_dim")
    return max(read_layer_heads(reader, slides=slides).cache_elements(1) for slides in kinds)


def read_mla(reader: ConfigReader) -> Mla | None:
    """Latent attention; None if K and V are cached."""
    if not has_latent_rows(reader.config):
        return None
    return Mla(
        q_rank=reader.whole("q_lora_rank") or None,
        kv_rank=reader.number("kv_lora_rank"),
        rope_dim=reader.number("qk_rope_head_dim"),
        nope_dim=reader.number("qk_nope_head_dim"),
        v_dim=reader.number("v_head_dim"),
    )


def read_indexer(reader: ConfigReader, family: str) -> Indexer | None:
    """Indexer of sparse latent attention; with `index_topk_freq` some layers have none."""
    selected = reader.whole("index_topk")
    if not selected:
        return None
    if family not in _SPARSE_TYPES or not has_latent_rows(reader.config):
        raise reader.refusal(
            "its attention reads a selected part of the context (index_topk); name a decoder "
            "with a plain KV cache"
        )
    layers = range(reader.number("num_hidden_layers"))
    pattern = reader.config.get("index_topk_pattern")
    every, first = reader.number("index_topk_freq", 1), reader.whole("index_skip_topk_offset") or 2
    if pattern is None:
        with_indexer = [layer for layer in layers if max(layer - first + 1, 0) % every == 0]
    else:
        with_indexer = [n for n in layers if n >= len(pattern) or pattern[n] != "S"]
    heads, head_dim = reader.number("index_n_heads"), reader.number("index_head_dim")
    return Indexer(heads, head_dim, selected, len(with_indexer))
