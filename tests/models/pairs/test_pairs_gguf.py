"""A GGUF becomes the model that it describes: values, row order, config and tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
from refusals import refused
from safetensors.torch import load_file
from small_gguf import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, TEMPLATE, SyntheticGguf, write_gguf
from tokenizers import Tokenizer

from nwor_bench.errors import BenchError
from nwor_bench.models.pairs.packaged import convert_gguf, hub_name

pytestmark = pytest.mark.slow  # models are converted


@pytest.fixture
def converted(synthetic_gguf: SyntheticGguf, tmp_path: Path) -> Path:
    convert_gguf(synthetic_gguf.path, tmp_path / "model", print)
    return tmp_path / "model"


def as_bf16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest bf16, ties to even: bit arithmetic, no torch."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def q4_1_values(raw: np.ndarray, columns: int) -> np.ndarray:
    """Q4_1 by its definition: blocks of 32 values = 16-bit scale, 16-bit minimum, 16 bytes.

    Byte j holds value j in its low half and value j + 16 in its high half.
    """
    blocks = raw.reshape(-1, 20)
    scale = blocks[:, 0:2].copy().view(np.float16).astype(np.float32)
    minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return (codes * scale + minimum).reshape(-1, columns)


def raw_tensor(path: Path, name: str) -> np.ndarray:
    import gguf

    return next(t.data for t in gguf.GGUFReader(path).tensors if t.name == name)


def rotate(vector: np.ndarray, position: int, *, neighbours: bool) -> np.ndarray:
    """Rotary embedding of one head's vector, of neighbouring entries or of the two halves."""
    half = len(vector) // 2
    turn = np.exp(1j * position * 5000.0 ** (-np.arange(half) / half))
    if neighbours:
        turned = (vector[0::2] + 1j * vector[1::2]) * turn
        return np.stack([turned.real, turned.imag], axis=1).ravel()
    turned = (vector[:half] + 1j * vector[half:]) * turn
    return np.concatenate([turned.real, turned.imag])


def scores(query: np.ndarray, key: np.ndarray, x: np.ndarray, y: np.ndarray, *, neighbours: bool
           ) -> list[float]:  # fmt: skip
    """Attention scores of token x at position 9 on token y at position 4, one a query head."""
    rows_q = (query @ x).reshape(HEADS, HEAD_DIM)
    rows_k = (key @ y).reshape(KV_HEADS, HEAD_DIM)
    return [
        float(rotate(rows_q[h], 9, neighbours=neighbours)
              @ rotate(rows_k[h * KV_HEADS // HEADS], 4, neighbours=neighbours))
        for h in range(HEADS)
    ]  # fmt: skip


def test_converted_query_and_key_score_as_the_gguf_does(
    synthetic_gguf: SyntheticGguf, converted: Path
) -> None:
    """GGUF rows under neighbour rotation score as converted rows under half rotation: Q4_1 queries,
    F32 keys, each with its own head count."""
    model = {k: v.float().numpy() for k, v in load_file(converted / "model.safetensors").items()}
    x, y = np.random.default_rng(2).standard_normal((2, HIDDEN))
    query = as_bf16(q4_1_values(raw_tensor(synthetic_gguf.path, "blk.0.attn_q.weight"), HIDDEN))
    key = as_bf16(synthetic_gguf.tensors["blk.0.attn_k.weight"])
    prefix = "model.layers.0.self_attn"
    found = scores(
        model[f"{prefix}.q_proj.weight"], model[f"{prefix}.k_proj.weight"], x, y, neighbours=False
    )
    assert found == pytest.approx(scores(query, key, x, y, neighbours=True), abs=1e-4)
    # The test would notice rows left as they are.
    assert found != pytest.approx(scores(query, key, x, y, neighbours=False), abs=0.1)


def test_other_tensors_keep_values_order_and_get_their_names(
    synthetic_gguf: SyntheticGguf, converted: Path
) -> None:
    model = {k: v.float().numpy() for k, v in load_file(converted / "model.safetensors").items()}
    layer = "model.layers.0"
    expected = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        f"{layer}.input_layernorm.weight": "blk.0.attn_norm.weight",
        f"{layer}.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        f"{layer}.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        f"{layer}.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        f"{layer}.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        f"{layer}.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    }
    for name, source in expected.items():
        np.testing.assert_array_equal(model[name], as_bf16(synthetic_gguf.tensors[source]), name)
    down = "blk.0.ffn_down.weight"
    values = q4_1_values(raw_tensor(synthetic_gguf.path, down), 64)
    np.testing.assert_array_equal(model[f"{layer}.mlp.down_proj.weight"], as_bf16(values))
    # Quantised to 16 steps of the block's range: near what was written, and of its shape.
    assert np.abs(values - synthetic_gguf.tensors[down]).max() < 0.3
    assert len(model) == len(synthetic_gguf.tensors)


def test_config_says_what_the_metadata_says(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    wanted = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 8, "vocab_size": 11, "max_position_embeddings": 128, "rope_theta": 5000.0,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "dtype": "bfloat16",
    }  # fmt: skip
    assert {key: config[key] for key in wanted} == wanted


def test_an_output_matrix_unties_the_embeddings(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "untied.gguf", tied=False)
    convert_gguf(source.path, tmp_path / "model", print)
    assert not json.loads((tmp_path / "model/config.json").read_text())["tie_word_embeddings"]
    head = load_file(tmp_path / "model/model.safetensors")["lm_head.weight"]
    np.testing.assert_array_equal(head.float(), as_bf16(source.tensors["output.weight"]))


def test_tokenizer_merges_letters_but_never_digits_and_keeps_control_tokens(
    converted: Path,
) -> None:
    """Although "12" is in the vocabulary, smollm cuts digits apart before merging."""
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tokenizer.encode("ab12").tokens == ["ab", "1", "2"]
    assert tokenizer.encode("a  1").tokens == ["a", "ĠĠ", "1"]
    assert tokenizer.decode(tokenizer.encode("ab  12 a").ids) == "ab  12 a"
    assert tokenizer.encode("<|im_start|>ab<|im_end|>").ids == [1, 8, 2]
    assert tokenizer.decode([1, 8, 2]) == "ab"
    settings = json.loads((converted / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == TEMPLATE
    assert settings["bos_token"] == "<|im_start|>"
    assert settings["eos_token"] == "<|im_end|>"
    assert settings["pad_token"] == "<|endoftext|>"


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({"architecture": "gemma"}, "other.gguf: architecture", "gemma"),
        ({"context_length": None}, "other.gguf: no field llama.context_length", None),
        ({"extra_tensor": "blk.0.attn_q.bias"}, "blk.0.attn_q.bias", None),
        ({"extra_tensor": "rope_freqs.weight"}, "rope_freqs.weight", None),
    ],
    ids=str,
)
def test_what_cannot_be_converted_is_refused(
    tmp_path: Path, options: dict[str, str], field: str, value: str | None
) -> None:
    source = write_gguf(tmp_path / "other.gguf", **options)  # type: ignore[arg-type]
    with refused(field, BenchError, value=value):
        convert_gguf(source.path, tmp_path / "model", print)


def test_layer_numbers_keep_all_their_digits() -> None:
    assert hub_name("blk.12.ffn_up.weight") == "model.layers.12.mlp.up_proj.weight"
