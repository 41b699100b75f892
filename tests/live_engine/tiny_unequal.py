"""A tiny model of MiMo V2's kind: values narrower than keys, sinks and other heads where it slides.

No weights: the plugin's loader fills it with random ones. Its configuration has another
model type, whose class every transformers has, and MiMo's own fields beside it.
"""

import json
from pathlib import Path
from typing import Any

from tiny_architectures import COMMON

from nwor_bench.models.pairs import ResolvedPair
from nwor_bench.models.pairs.tiny import write_byte_tokenizer

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
