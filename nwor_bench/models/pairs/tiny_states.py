"""Turn a tiny Llama into a Qwen3-Next: gated delta nets before its attention layers."""

from typing import Any

import numpy as np

Weights = dict[str, np.ndarray]

KEY_HEADS, VALUE_HEADS, WIDTH, KERNEL = 2, 4, 128, 4
"""Shape of each gated delta net; vLLM's CPU kernels need heads of 128."""

EXPERTS = 2

MIXER, MLP = 0.3, 0.1
"""Factors of what a gated delta net and its MLP add: the drafter, which has none, then often
guesses what the target says, and what the target says still depends on their states."""

OWN = {
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": WIDTH,
    "linear_value_head_dim": WIDTH,
    "linear_conv_kernel_dim": KERNEL,
}


def with_delta_nets(
    config: dict[str, Any], target: Weights, draft: Weights, count: int, rng: np.random.Generator
) -> tuple[dict[str, Any], Weights]:
    """A Qwen3-Next of `count` gated delta nets, then the target's layers.

    It must have experts, a shared one too: the first layer and the MTP layer have equal ones.
    Its MTP layer is the drafter's first layer, which sees the embedding of the last token and not
    the target's hidden state. The output gate of its attention is 1/2, and norms are one, which
    this family writes as 0. bfloat16: vLLM's CPU kernels take nothing else.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    weights = {name: w for name, w in target.items() if not name.startswith("model.layers.")}
    for layer in range(layers):
        weights |= _attention(config, target, layer, f"model.layers.{count + layer}.")
    for layer in range(count):
        weights |= _delta_net(config, target, f"model.layers.{layer}.", rng)
    weights |= _attention(config, draft, 0, "mtp.layers.0.")
    for prefix in ("model.layers.0.mlp.", "mtp.layers.0.mlp."):
        weights |= _experts(weights, prefix, hidden)
    seen, ignored = np.eye(hidden, dtype=np.float32), np.zeros((hidden, hidden), np.float32)
    weights["mtp.fc.weight"] = np.hstack([seen, ignored])
    for norm in ("model.norm", "mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"):
        weights[f"{norm}.weight"] = np.zeros(hidden, np.float32)
    return {
        **config,
        **OWN,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": count + layers,
        "layer_types": ["linear_attention"] * count + ["full_attention"] * layers,
        "num_nextn_predict_layers": 1,
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS,
        "moe_intermediate_size": config["intermediate_size"],
        "shared_expert_intermediate_size": config["intermediate_size"],
        "mlp_only_layers": list(range(1, count + layers)),
        "dtype": "bfloat16",
    }, weights


def _attention(config: dict[str, Any], source: Weights, layer: int, prefix: str) -> Weights:
    """A layer of the Llama under another name, as this family writes it."""
    old, size = f"model.layers.{layer}.", config["head_dim"]
    weights = {n.replace(old, prefix): w for n, w in source.items() if n.startswith(old)}
    query = weights[f"{prefix}self_attn.q_proj.weight"].reshape(-1, size, config["hidden_size"])
    both = np.concatenate([query, np.zeros_like(query)], axis=1)  # a head's query, then its gate
    weights[f"{prefix}self_attn.q_proj.weight"] = both.reshape(-1, config["hidden_size"])
    zeros = np.zeros(size, np.float32)
    weights |= {f"{prefix}self_attn.{norm}.weight": zeros for norm in ("q_norm", "k_norm")}
    return weights | _norms(config, prefix)


def _norms(config: dict[str, Any], prefix: str) -> Weights:
    zeros = np.zeros(config["hidden_size"], np.float32)
    both = ("input_layernorm", "post_attention_layernorm")
    return {f"{prefix}{norm}.weight": zeros for norm in both}


def _delta_net(
    config: dict[str, Any], target: Weights, prefix: str, rng: np.random.Generator
) -> Weights:
    """One gated delta net with the target's first MLP; its decays range from little to much."""
    hidden, keys, values = config["hidden_size"], KEY_HEADS * WIDTH, VALUE_HEADS * WIDTH

    def normal(*shape: int, std: float) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)

    mixer = {
        "in_proj_qkvz.weight": normal(2 * keys + 2 * values, hidden, std=hidden**-0.5),
        "in_proj_ba.weight": normal(2 * VALUE_HEADS, hidden, std=hidden**-0.5),
        "conv1d.weight": normal(2 * keys + values, 1, KERNEL, std=0.5),
        "dt_bias": normal(VALUE_HEADS, std=0.5),
        "A_log": np.log(rng.uniform(0.01, 2.0, VALUE_HEADS)).astype(np.float32),
        "norm.weight": np.ones(WIDTH, np.float32),
        "out_proj.weight": normal(hidden, values, std=MIXER * values**-0.5),
    }
    old = "model.layers.0.mlp."
    mlp = {n.replace(old, f"{prefix}mlp."): w for n, w in target.items() if n.startswith(old)}
    mlp[f"{prefix}mlp.down_proj.weight"] = mlp[f"{prefix}mlp.down_proj.weight"] * np.float32(MLP)
    return {f"{prefix}linear_attn.{n}": w for n, w in mixer.items()} | mlp | _norms(config, prefix)


def _experts(weights: Weights, prefix: str, hidden: int) -> Weights:
    """Experts for a dense MLP, which is taken out. With zeros for routers the chosen ones weigh 1
    together and the shared one 1/2."""
    names = [name for name in weights if name.startswith(prefix)]
    dense = {name.removeprefix(prefix): weights.pop(name) for name in names}
    routers = {"gate": EXPERTS, "shared_expert_gate": 1}
    experts = {f"{prefix}{n}.weight": np.zeros((k, hidden), np.float32) for n, k in routers.items()}
    for expert in (*(f"experts.{number}" for number in range(EXPERTS)), "shared_expert"):
        experts |= {f"{prefix}{expert}.{name}": weight for name, weight in dense.items()}
    return experts
