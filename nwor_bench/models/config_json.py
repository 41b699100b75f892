"""Read a model's shape from its config.json; missing or unknown entries are refused by name."""

from nwor_bench.models.attention_config import (
    check_heads,
    read_head_dim,
    read_heads,
    read_indexer,
    read_mla,
    read_own_heads,
    read_value_dim,
)
from nwor_bench.models.config_reader import MODEL_BITS, Config, ConfigReader
from nwor_bench.models.layer_kinds import Kind, kinds_of
from nwor_bench.models.recurrent_config import read_state, recurrent_kinds
from nwor_bench.models.shape import Experts, Layer, ModelShape

MOST_LAYERS = 10_000
"""A config.json with more layers than this is taken for a typing error."""

KNOWN_TYPES = {
    *("llama", "mistral", "ministral", "mixtral", "granite", "olmo2", "olmo3", "phi3", "smollm3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3", "gemma3_text"),
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_linear", "nemotron_h"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
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
        )

    def tied(self) -> bool:
        # Gemma's configs leave the key out, and the family ties by default.
        is_gemma = str(self.config.get("model_type", "")).startswith("gemma")
        return bool(self.config.get("tie_word_embeddings", is_gemma))

    def weight_bits(self, dtype: str) -> int | None:
        """Bits of a matrix element; None if the quantisation config does not say."""
        quantised = self.config.get("quantization_config")
        if not quantised:
            return MODEL_BITS[dtype]
        if not isinstance(quantised, dict):
            raise self.refusal('its "quantization_config" is not an object; remove it')
        if quantised.get("quant_method") == "fp8":
            return 8
        bits = quantised.get("bits") or _group_bits(quantised)
        return bits if isinstance(bits, int) and bits > 0 else None

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
        own = self.whole("shared_expert_intermediate_size")
        shared = self.whole("n_shared_experts") or self.whole("num_shared_experts")
        each = self.whole("moe_shared_expert_intermediate_size") or width  # Nemotron's
        return Experts(count, per_token, width, own or shared * each)

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
        if count > MOST_LAYERS:
            raise self.refusal(f'its "num_hidden_layers" is {count}; write {MOST_LAYERS} or less')
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
