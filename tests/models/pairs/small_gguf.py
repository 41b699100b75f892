"""A small Llama GGUF file, written with the format's own library."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import gguf  # half a second: loaded by the tests that write a file

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WIDE = 2, 1, 8, 32, 64
CONTROL, NORMAL = 3, 1
# "Ġ" is how byte-level BPE writes a space. Ids follow this order.
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "1", "2", "Ġ", "ab", "12", "ĠĠ"]
MERGES = ["a b", "1 2", "Ġ Ġ"]
TEMPLATE = "{{ messages[0]['content'] }}"


@dataclass(frozen=True)
class SyntheticGguf:
    """The file, and the float32 values that were written (quantised ones before rounding)."""

    path: Path
    tensors: dict[str, np.ndarray]


def write_gguf(path: Path, *, architecture: str = "llama", extra_tensor: str | None = None,
               context_length: int | None = 128, tied: bool = True) -> SyntheticGguf:  # fmt: skip
    """One layer; query and down projection in Q4_1, the rest in F32."""
    import gguf

    rng = np.random.default_rng(5)
    shapes = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_gate.weight": (WIDE, HIDDEN),
        "blk.0.ffn_up.weight": (WIDE, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, WIDE),
    }
    if not tied:
        shapes["output.weight"] = (len(TOKENS), HIDDEN)
    if extra_tensor is not None:
        shapes[extra_tensor] = (HIDDEN,)
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, context_length)
    tensors = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, dtype=np.float32)
        tensors[name] = values
        if name in ("blk.0.attn_q.weight", "blk.0.ffn_down.weight"):
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return SyntheticGguf(path, tensors)


def _add_metadata(writer: "gguf.GGUFWriter", context_length: int | None) -> None:
    if context_length is not None:
        writer.add_context_length(context_length)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([CONTROL] * 3 + [NORMAL] * (len(TOKENS) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
