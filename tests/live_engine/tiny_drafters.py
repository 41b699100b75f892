"""An EAGLE-3 head and a LoRA adapter for the tiny target, and the pair with an MTP layer."""

import json
from pathlib import Path

import numpy as np
from engine_tools import tiny_pair
from safetensors.numpy import load_file, save_file

from nwor_bench.models.pairs import ResolvedPair, resolve_pair

PREFIX = "model.layers.0."
Weights = dict[str, np.ndarray]


def _read(target: Path) -> tuple[dict[str, object], Weights]:
    config = json.loads((target / "config.json").read_text())
    return config, load_file(target / "model.safetensors")


def _write(folder: Path, config: dict[str, object], weights: Weights) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    plain = {name: np.ascontiguousarray(w, dtype=np.float32) for name, w in weights.items()}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def eagle3_pair(folder: Path) -> ResolvedPair:
    """The tiny target with an EAGLE-3 head: one layer that reads three of the target's states.

    Query and key are alike and large, so a token attends to itself, and the value is half of its
    embedding: the head guesses what the target would say without a history.
    """
    target = Path(tiny_pair(folder, "ngram").target)
    config, weights = _read(target)
    size = weights["model.embed_tokens.weight"].shape[1]
    kv_rows = weights[f"{PREFIX}self_attn.k_proj.weight"].shape[0]
    left = np.eye(kv_rows, size)  # the first half of an embedding
    nothing = np.zeros((kv_rows, size))
    head_dim, groups = 32, size // kv_rows
    expand = np.concatenate([np.eye(kv_rows)[i : i + head_dim] for i in (0, 0, 32, 32)])
    assert groups == 2
    ones = np.ones(size)
    head = {
        "embed_tokens.weight": weights["model.embed_tokens.weight"],
        "lm_head.weight": weights["lm_head.weight"],
        "fc.weight": np.hstack([np.zeros((size, size))] * 2 + [0.1 * np.eye(size)]),
        "norm.weight": ones,
        "midlayer.input_layernorm.weight": ones,
        "midlayer.hidden_norm.weight": ones,
        "midlayer.post_attention_layernorm.weight": ones,
        "midlayer.self_attn.q_proj.weight": 3 * expand @ np.hstack([left, nothing]),
        "midlayer.self_attn.k_proj.weight": 3 * np.hstack([left, nothing]),
        "midlayer.self_attn.v_proj.weight": np.hstack([left, nothing]),
        "midlayer.self_attn.o_proj.weight": 2 * left.T @ expand.T / groups,
    }
    for name in ("gate_proj", "up_proj", "down_proj"):
        head[f"midlayer.mlp.{name}.weight"] = weights[f"{PREFIX}mlp.{name}.weight"]
    config |= {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}
    config |= {"draft_vocab_size": config["vocab_size"]}
    draft = _write(folder / "eagle3", config, head)
    return ResolvedPair("tiny", "eagle3", str(target), str(draft), "float32")


def speculators_pair(folder: Path) -> ResolvedPair:
    """The tiny EAGLE-3 head as `speculators` writes it; the method comes from its config.json."""
    pair = eagle3_pair(folder)
    assert pair.draft is not None
    config, weights = _read(Path(pair.draft))
    layer = {key: value for key, value in config.items() if key != "draft_vocab_size"}
    written = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": False,
        "transformer_layer_config": layer | {"architectures": ["LlamaForCausalLM"]},
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": pair.target},
        },
        "dtype": "float32",
    }
    weights = {name.replace("midlayer", "layers.0"): weight for name, weight in weights.items()}
    draft = _write(folder / "head", written, weights)
    return resolve_pair(target_model=pair.target, draft_model=str(draft))


def mtp_pair(folder: Path) -> ResolvedPair:
    """The generated pair whose target drafts with its own MTP layer."""
    return resolve_pair("tiny-mtp", cache_dir=folder)


def write_lora(folder: Path, target: Path, rank: int = 8) -> Path:
    """An adapter on the target's q and v projections, large enough to change what it says."""
    _, weights = _read(target)
    stream = np.random.default_rng(3)
    adapter: Weights = {}
    for name, weight in weights.items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            prefix = "base_model.model." + name.removesuffix(".weight")
            rows, columns = weight.shape
            adapter[f"{prefix}.lora_A.weight"] = stream.normal(0, columns**-0.5, (rank, columns))
            adapter[f"{prefix}.lora_B.weight"] = stream.normal(0, rank**-0.5, (rows, rank))
    folder.mkdir()
    plain = {name: w.astype(np.float32) for name, w in adapter.items()}
    save_file(plain, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
