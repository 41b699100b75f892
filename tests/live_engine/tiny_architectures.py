"""Tiny models of other architectures than Llama, with weights that make the history matter."""

import json
from pathlib import Path
from typing import Any

import torch

from nwor_bench.models.pairs import ResolvedPair
from nwor_bench.models.pairs.tiny import BYTE_VOCABULARY, SPECIAL_TOKENS, write_byte_tokenizer

VOCABULARY = 264
END = BYTE_VOCABULARY - len(SPECIAL_TOKENS)

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "eos_token_id": END,
    "bos_token_id": None,
    "pad_token_id": END + 1,
    "tie_word_embeddings": False,
}

SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen": {"model_type": "qwen3"},
    "gemma": {
        "model_type": "gemma3_text",
        "sliding_window": 32,
        "layer_types": SLIDING,
        "query_pre_attn_scalar": 32,
    },
    "mixture of experts": {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "mla": {
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "head_dim": 64,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",  # vLLM's CPU router knows no other
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "sinks": {
        "model_type": "gpt_oss",
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "head dims": {
        "model_type": "gemma4_text",
        "tie_word_embeddings": True,
        "head_dim": 256,  # of layers with a sliding window; the others have 512
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 32,
    },
    "shared K/V": {
        "model_type": "gemma3n_text",
        "tie_word_embeddings": True,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": [256] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 32,
        "laurel_rank": 16,
        "altup_num_inputs": 2,
    },
}
"""Settings on top of COMMON, by the checklist's name."""


def write_architecture(folder: Path, name: str, seed: int = 0) -> Path:
    """A model of that architecture with random weights and a tokenizer of bytes.

    Matrices have the standard deviation 1/sqrt(inputs), as in `generate_tiny`: with the 0.02 of
    an untrained model attention would carry nothing, and a wrong cache would not show.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(ARCHITECTURES[name])
    config = AutoConfig.for_model(settings.pop("model_type"), **{**COMMON, **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() > 1:
                plain_embedding = "embed" in key and not config.tie_word_embeddings
                deviation = 1.0 if plain_embedding else weight.shape[-1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=stream) * deviation)
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return folder


V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
}
"""DeepSeek-V3's settings on top of the pair `mla-shape`, which is a small DeepSeek-V2."""

MIMO: dict[str, Any] = {
    **COMMON,
    "architectures": ["MiMoV2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "hybrid_layer_pattern": [0, 1, 1, 0],  # 1: sliding
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_attention_heads": 32,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window_size": 32,
    "attention_value_scale": 0.707,
    "attention_bias": False,
    "partial_rotary_factor": 0.334,
    "layernorm_epsilon": 1e-5,
    "hidden_act": "silu",
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}


def unequal_pair(
    folder: Path, dtype: str, speculative: dict[str, Any], *, sinks: bool
) -> ResolvedPair:
    """The model in `folder`, drafted for by prompt lookup with these settings."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {"add_swa_attention_sink_bias": sinks, "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(MIMO | own))
    write_byte_tokenizer(folder)
    return ResolvedPair(
        "unequal", "ngram", str(folder), None, dtype, speculative, load_format="dummy"
    )
