"""Write a target and a drafter from a seed: random float32 weights, in about a second.

The drafter is the target plus Gaussian noise. The noise sets the acceptance: with 0 every draft is
accepted, far above 1 every draft is rejected. numpy's generator gives the same files on every CPU;
torch's depends on the instruction set.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nwor_bench.errors import ConfigError
from nwor_bench.models.config_json import read_shape
from nwor_bench.models.pairs.local import write_json
from nwor_bench.models.pairs.pair import ShapeSource
from nwor_bench.models.pairs.tiny_states import Weights, with_delta_nets

SPECIAL_TOKENS = ("<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
"""Their ids follow those of the 256 bytes, in this order; the remaining ids are reserved."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_BYTES = 256

BYTE_VOCABULARY = _BYTES + len(SPECIAL_TOKENS)
"""Vocabulary size of the byte tokenizer."""

LOAD_FORMAT = "dummy"
"""vLLM's load format that fills any shape with small random numbers."""

WITHOUT_WEIGHTS = (
    "none (random, vLLM's dummy loader); acceptance and text of this pair mean nothing"
)


@dataclass(frozen=True)
class TinyShape:
    """Sizes of a tiny Llama.

    With `mtp_layers` = 1 it drafts with a layer of its own; it then may have `delta_nets` recurrent
    layers before the others (`tiny_states`).
    """

    layers: int = 3
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    vocab: int = 264
    max_positions: int = 32768
    mtp_layers: int = 0
    delta_nets: int = 0


def generate_tiny(
    folder: Path, shape: TinyShape = TinyShape(), *, seed: int = 0, noise: float = 0.05
) -> tuple[Path, Path]:
    """Write `folder`/target and `folder`/draft; returns the two paths.

    `noise` is relative to each weight matrix's standard deviation. With an MTP layer `folder`/draft
    is not written. The same arguments give the same files, byte for byte.
    """
    if shape.vocab < BYTE_VOCABULARY or shape.heads % shape.kv_heads or noise < 0:
        raise ValueError(
            f"vocab {shape.vocab}, heads {shape.heads}, kv_heads {shape.kv_heads}, noise {noise}: "
            f"vocab must be at least {BYTE_VOCABULARY}, heads a multiple of kv_heads, noise >= 0"
        )
    config = _config(shape)
    target_weights = _random_weights(np.random.default_rng([seed, 0]), config)
    draft_weights = _with_noise(np.random.default_rng([seed, 1]), target_weights, noise)
    target, draft = folder / "target", folder / "draft"
    if shape.delta_nets:
        rng = np.random.default_rng([seed, 2])
        both = target_weights, draft_weights
        config, target_weights = with_delta_nets(config, *both, shape.delta_nets, rng)
    elif shape.mtp_layers:
        config, target_weights = _with_mtp_layer(config, target_weights, draft_weights)
    _write_model(target, config, target_weights)
    if not shape.mtp_layers:
        _write_model(draft, config, draft_weights)
    return target, draft


def _with_mtp_layer(
    config: dict[str, Any], target: Weights, draft: Weights
) -> tuple[dict[str, Any], Weights]:
    """The target as a MiMo model, whose MTP layer is the drafter's first layer.

    It sees the embedding of the last token and not the target's hidden state. MiMo's attention is
    Qwen2's, which has biases; here they are 0.
    """
    hidden, prefix, layer = config["hidden_size"], "model.mtp_layers.0.", "model.layers.0."
    weights = dict(target)
    first_layer = {name: weight for name, weight in draft.items() if name.startswith(layer)}
    weights |= {name.replace(layer, prefix): weight for name, weight in first_layer.items()}
    for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight",
                                                            "v_proj.weight"))]:  # fmt: skip
        bias = np.zeros(weights[name].shape[0], np.float32)
        weights[name.replace("weight", "bias")] = bias
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{prefix}{norm}.weight"] = np.ones(hidden, np.float32)
    ignored, seen = np.zeros((hidden, hidden), np.float32), np.eye(hidden, dtype=np.float32)
    weights[f"{prefix}input_proj.weight"] = np.hstack([ignored, seen])
    mimo = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}
    return {**config, **mimo, "num_nextn_predict_layers": 1}, weights


def _config(shape: TinyShape) -> dict[str, Any]:
    """config.json of a Llama model of that shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": _BYTES,
        "pad_token_id": _BYTES + 1,
        "dtype": "float32",
    }


def _random_weights(rng: np.random.Generator, config: dict[str, Any]) -> Weights:
    """Weights of a Llama model under their Hugging Face names, norms set to one.

    With a standard deviation of 1/sqrt(inputs) attention contributes as much as the token itself,
    so the next token depends on the history. With the usual 0.02 a random model maps token to
    token and soon repeats itself.
    """
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (q_rows, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.o_proj": (hidden, q_rows),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    weights = {"model.embed_tokens.weight": _normal(rng, (config["vocab_size"], hidden), 1.0)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = np.ones(hidden, np.float32)
        for name, shape in shapes.items():
            weights[f"{prefix}.{name}.weight"] = _normal(rng, shape, shape[1] ** -0.5)
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    # The factor 2 spreads the logits: without it sampling at temperature 1 is almost uniform.
    head = _normal(rng, (config["vocab_size"], hidden), 2 * hidden**-0.5)
    # Zero logits never win against 256 random ones: greedy output is text and never ends early.
    head[_BYTES:] = 0.0
    weights["lm_head.weight"] = head
    return weights


def _normal(rng: np.random.Generator, shape: tuple[int, ...], std: float) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)


def _with_noise(rng: np.random.Generator, weights: Weights, noise: float) -> Weights:
    """The weights plus noise on every matrix; norms (vectors) and zero rows are unchanged."""
    noisy = {}
    for name, weight in weights.items():
        if weight.ndim == 2:
            # Drawn even for noise 0, so that a seed always gives the same direction of noise.
            change = _normal(rng, weight.shape, 1.0) * (weight != 0)
            weight = weight + np.float32(noise) * weight.std() * change
        noisy[name] = weight
    return noisy


def _write_model(folder: Path, config: dict[str, Any], weights: Weights) -> None:
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    tokens = {key: config[key] for key in ("eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", tokens)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_byte_tokenizer(folder, config["vocab_size"])


def write_byte_tokenizer(folder: Path, vocab: int = BYTE_VOCABULARY) -> None:
    """Write a byte tokenizer: a text becomes its UTF-8 bytes, one token each."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    reserved = range(vocab - BYTE_VOCABULARY)
    names = [*SPECIAL_TOKENS, *(f"<|reserved_{i}|>" for i in reserved)]
    tokenizer.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[1],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings)


def check_shape(shape: ShapeSource) -> None:
    """Refuse a config.json that is not a decoder's, before anything is written.

    Raises ConfigError naming the table and the entry: a missing size, an architecture that the
    byte model does not cover, or a vocabulary too small for the prompts' tokens.
    """
    for name, config in _configs(shape):
        field = f"[shape.{name}]"
        for key, example in (("architectures", ["LlamaForCausalLM"]), ("model_type", "llama")):
            if not config.get(key):
                raise ConfigError.for_field(field, key, f"write it, for example {example!r}")
        sizes = read_shape(config, field, config["model_type"])
        if sizes.vocab < BYTE_VOCABULARY:
            raise ConfigError.for_field(
                f"{field} vocab_size", sizes.vocab,
                f"prompts are tokens of single bytes; write {BYTE_VOCABULARY} or more",
            )  # fmt: skip


def shape_parameters(config: dict[str, Any], field: str) -> int:
    """Parameters of the model that a config.json describes, without norms and biases."""
    return read_shape(config, field, str(config.get("model_type"))).parameters()


def write_shape(folder: Path, shape: ShapeSource) -> None:
    """Write `folder`/target and, with a drafter, `folder`/draft.

    The target gets a byte tokenizer, whose ids are valid in any larger vocabulary.
    """
    for name, config in _configs(shape):
        (folder / name).mkdir(parents=True)
        write_json(folder / name / "config.json", config)
    target = folder / "target"
    write_byte_tokenizer(target)
    ends = BYTE_VOCABULARY - len(SPECIAL_TOKENS)
    write_json(target / "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends + 1})


def _configs(shape: ShapeSource) -> list[tuple[str, dict[str, Any]]]:
    configs = (("target", shape.target), ("draft", shape.draft))
    return [(name, config) for name, config in configs if config is not None]
