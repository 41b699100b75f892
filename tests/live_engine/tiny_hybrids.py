"""Tiny models with other layers than attention over all of a request: a configuration, no weights.

vLLM fills them with random weights (`load_format="dummy"`).
"""

import json
from pathlib import Path
from typing import Any

from engine_tools import NGRAM
from tiny_architectures import COMMON

from nwor_bench.models.pairs import ResolvedPair
from nwor_bench.models.pairs.tiny import write_byte_tokenizer

MAMBA_2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}

HYBRIDS: dict[str, dict[str, Any]] = {
    "Mamba": {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "state_size": 16,
        "conv_kernel": 4,
        "expand": 2,
        "time_step_rank": 8,
    },
    "Mamba 2": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "num_heads": 4,
        "head_dim": 64,
        "state_size": 16,
        "n_groups": 1,
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 32,
    },
    "Granite hybrid": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 256,
        **MAMBA_2,
    },
    "Falcon-H1": {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "mamba_d_ssm": 256,
        **MAMBA_2,
    },
    "Nemotron-H": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M*",
        "mamba_num_heads": 4,
        "mamba_head_dim": 64,
        "n_groups": 1,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 32,
    },
    "Zamba 2": {
        "architectures": ["Zamba2ForCausalLM"],
        "model_type": "zamba2",
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"],
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "mamba_headdim": 64,
        "num_mem_blocks": 1,
        "chunk_size": 32,
        "num_key_value_heads": 4,
        "attention_hidden_size": 256,
        "attention_head_dim": 64,
    },
    "LFM2": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "block_dim": 128,
        "block_ff_dim": 256,
        "conv_dim": 128,
        "conv_dim_out": 128,
        "block_auto_adjust_ff_dim": False,
    },
    "Qwen3-Next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    # No hybrid, but a model that brings its own drafter.
    "GLM-4.5": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "num_nextn_predict_layers": 1,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": True,
    },
    # No hybrid, but three of four layers see one chunk of a request (chunked local attention).
    "Llama 4": {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "intermediate_size_mlp": 256,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 64,
        "no_rope_layers": [1, 1, 1, 0],
        "use_qk_norm": True,
        "rope_theta": 10000.0,
    },
}
"""Settings on top of COMMON, by family."""

OWN_ARGUMENTS = {"Qwen3-Next": {"gdn_prefill_backend": "triton"}}
"""vLLM's arguments on a GPU, by family: its own choice there needs the module cutlass."""

EAGER_DUMMY: dict[str, Any] = {
    "load_format": "dummy",
    "enforce_eager": True,
    "enable_prefix_caching": False,  # with it vLLM copies states by a kernel that needs a GPU
}
"""vLLM's arguments for such a model; what else a device needs comes on top."""


def hybrid_pair(folder: Path, family: str, dtype: str) -> ResolvedPair:
    """A model of the family in `folder`, with prompt lookup for its drafter."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**COMMON, "num_hidden_layers": 4, **HYBRIDS[family], "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config))
    write_byte_tokenizer(folder)
    return ResolvedPair("tiny", "ngram", str(folder), None, dtype, NGRAM)
