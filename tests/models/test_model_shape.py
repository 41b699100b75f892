"""config.json to shape: five public models against their published counts, and what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nwor_bench.models.byte_model import ByteModel, Workload
from nwor_bench.models.config_json import KNOWN_TYPES, read_shape
from nwor_bench.models.config_reader import checkpoint_cache_dtype
from nwor_bench.models.shape import Heads, Indexer, Mla, ModelShape

CONFIGS = Path(__file__).parents[1] / "data" / "configs"

SMALL = {
    "model_type": "llama", "hidden_size": 8, "vocab_size": 10, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 16, "num_hidden_layers": 4,
    "dtype": "bfloat16",
}  # fmt: skip

MLA = {
    "q_lora_rank": 3, "kv_lora_rank": 6, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4,
    "v_head_dim": 5,
}  # fmt: skip


def published(name: str) -> ModelShape:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    return read_shape(config, "--config", name)


def small(**changes: Any) -> ModelShape:
    return read_shape({**SMALL, **changes}, "--config", "small")


@pytest.mark.parametrize(
    ("name", "billions", "digits", "bytes_per_token"),
    [
        ("Llama-3.2-3B", 3.21, 2, 112 * 1024),
        ("Llama-3.1-8B", 8.03, 2, 128 * 1024),
        ("Llama-3.1-70B", 70.6, 1, 320 * 1024),
        ("Qwen3-30B-A3B", 30.5, 1, 96 * 1024),
        ("DeepSeek-V3", 671, 0, 61 * (512 + 64) * 2),  # latent rows, no K and V
    ],
)
def test_parameters_and_cache_in_bf16_are_the_published_ones(
    name: str, billions: float, digits: int, bytes_per_token: int
) -> None:
    shape = published(name)
    assert round(shape.parameters() / 1e9, digits) == billions
    assert len(shape.layers) * shape.cache_row_elements() * 2 == bytes_per_token
    assert shape.model_type in KNOWN_TYPES


@pytest.mark.parametrize(("name", "billions"), [("Qwen3-30B-A3B", 3.3), ("DeepSeek-V3", 37)])
def test_activated_parameters_are_the_published_ones(name: str, billions: float) -> None:
    shape = published(name)
    assert shape.experts is not None
    embedding = shape.vocab * shape.hidden
    blocks = shape.block_parameters(shape.experts.per_token)
    activated = blocks + shape.unquantised_parameters() + embedding
    assert activated / 1e9 == pytest.approx(billions, rel=0.02)


INDEXER = {
    "model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128,
}  # fmt: skip


def test_a_sparse_latent_model_is_the_dense_one_and_its_indexers() -> None:
    config = json.loads((CONFIGS / "DeepSeek-V3.json").read_text())
    found, dense = read_shape({**config, **INDEXER}, "--config", "V3.2"), published("DeepSeek-V3")
    assert found.indexer == Indexer(64, 128, 2048, layers=61)
    assert found.indexer.key_bytes == 132
    each = 1536 * 64 * 128 + 7168 * (128 + 64)
    assert found.parameters() - dense.parameters() == 61 * each
    assert found.cache_row_elements() == 512 + 64
    assert found.model_type in KNOWN_TYPES


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, 4),
        ({"index_topk_freq": 2}, 3),  # layers 0, 1 and 3: the third uses the second's
        ({"index_topk_freq": 4, "index_skip_topk_offset": 1}, 1),
        ({"index_topk_pattern": ["F", "S", "S", "F"]}, 2),
    ],
)
def test_layers_that_have_an_indexer_of_their_own(changes: dict[str, Any], layers: int) -> None:
    shape = small(**MLA, **INDEXER, **changes)
    assert shape.indexer is not None
    assert shape.indexer.layers == layers


def test_a_dense_model_counted_tensor_by_tensor() -> None:
    layer = [(8, 8), (4, 8), (4, 8), (8, 8), (16, 8), (16, 8), (8, 16)]
    tensors = [(10, 8), *layer * 4, (10, 8)]
    assert small().parameters() == sum(rows * columns for rows, columns in tensors)
    assert small(tie_word_embeddings=True).parameters() == small().parameters() - 80


def test_an_mla_model_with_experts_counted_tensor_by_tensor() -> None:
    shape = small(
        **MLA, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=7,
        n_shared_experts=2, first_k_dense_replace=1,
    )  # fmt: skip
    attention = [(3, 8), (4 * 6, 3), (6 + 2, 8), (4 * (4 + 5), 6), (8, 4 * 5)]
    experts = [(7, 8), (7, 8), (8, 7)] * 6 + [(14, 8), (14, 8), (8, 14)] + [(6, 8)]
    dense = [(16, 8), (16, 8), (8, 16)]
    tensors = [(10, 8), *attention * 4, *dense, *experts * 3, (10, 8)]
    assert shape.parameters() == sum(rows * columns for rows, columns in tensors)
    assert shape.mla == Mla(q_rank=3, kv_rank=6, rope_dim=2, nope_dim=4, v_dim=5)
    assert shape.cache_row_elements() == 6 + 2


def test_values_of_another_width() -> None:
    """8 wide: 4 query heads of 6 in, 4 of 3 out, 2 K/V heads of 6 and 3."""
    shape = small(head_dim=6, v_head_dim=3)
    assert shape.cache_row_elements() == 2 * (6 + 3)
    assert shape.attention_parameters() == 8 * (4 * 6 + 4 * 3 + 2 * 6 + 2 * 3)
    assert shape.attention_parameters(2) == shape.attention_parameters() / 2
    assert small(head_dim=6, v_head_dim=6).parameters() == small(head_dim=6).parameters()


def test_only_a_layer_of_longcat_flash_has_two_rows() -> None:
    """Both families name the number of layers `num_layers`."""
    layers = {"num_hidden_layers": None, "num_layers": 2}
    assert len(small(model_type="chatglm", **layers).layers) == 2
    assert small(**MLA, model_type="longcat_flash", **layers).row_elements() == 4 * (6 + 2)


MIMOS = {
    "hybrid_layer_pattern": [0, 1, 1, 0], "sliding_window": 32, "head_dim": 6, "v_head_dim": 3,
    "swa_num_attention_heads": 8, "swa_num_key_value_heads": 4, "swa_head_dim": 5,
    "swa_v_head_dim": 1,
}  # fmt: skip
GEMMAS = {
    "model_type": "gemma4_text", "sliding_window": 32, "head_dim": 2, "global_head_dim": 6,
    "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "full", "sliding"),
    [
        (MIMOS, Heads(4, 2, 6, 3), Heads(8, 4, 5, 1)),
        (GEMMAS, Heads(4, 2, 6, 6), Heads(4, 2, 2, 2)),
        (
            {**GEMMAS, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
            Heads(4, 1, 6, 6),
            Heads(4, 2, 2, 2),
        ),
    ],
    ids=["MiMo V2", "Gemma 4", "Gemma 4, keys as values"],
)
def test_layers_with_heads_of_their_own(
    changes: dict[str, Any], full: Heads, sliding: Heads
) -> None:
    """A row has K and V of the layer's heads; matrices are queries, keys, values and output."""
    shape = small(**changes)
    assert [shape.heads_of(layer) for layer in shape.layers] == [full, sliding, sliding, full]
    kinds = (full, sliding)
    rows = [heads.kv * (heads.dim + heads.value_dim) for heads in kinds]
    matrices = [
        8 * heads.queries * (heads.dim + heads.value_dim) + 8 * row
        for heads, row in zip(kinds, rows, strict=True)
    ]
    layers = (shape.layers[0], shape.layers[1])
    assert [shape.cache_row_elements(layer=layer) for layer in layers] == rows
    assert [shape.attention_parameters(layer=layer) for layer in layers] == matrices
    model = ByteModel(shape, cache_bits=16, weight_bits=16, activation_bits=16)
    assert model.cache_row(1) == 2 * 2 * sum(rows)
    load = Workload(requests=3, context=100, draft_tokens=4, acceptance=0.5)
    assert model.context_read(load) == 3 * 2 * 2 * (100 * rows[0] + 32 * rows[1])
    assert shape.fits_ranks(2)
    assert not shape.fits_ranks(8)  # of which four query heads cannot be split


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "fits"),
    [(8, 2, 2, True), (8, 2, 8, True), (8, 2, 3, False), (12, 4, 6, False), (8, 8, 16, False)],
)
def test_which_ranks_fit(heads: int, kv_heads: int, ranks: int, fits: bool) -> None:
    shape = small(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=2)
    assert shape.fits_ranks(ranks) == fits


EIGHT = {"num_bits": 8, "type": "float", "dynamic": False}

QUANTISED: list[tuple[dict[str, Any] | None, str]] = [
    (None, "auto"),
    ({"quant_method": "modelopt"}, "auto"),
    ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8"),
    ({"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"}, "auto"),
    ({"quant_method": "modelopt_fp4", "quantization": {"kv_cache_quant_algo": "NVFP4"}}, "nvfp4"),
    ({"quant_method": "modelopt", "kv_cache_scheme": EIGHT}, "fp8"),
    ({"quant_method": "modelopt", "kv_cache_scheme": {**EIGHT, "dynamic": True}}, "auto"),
    ({"quant_method": "modelopt", "kv_cache_scheme": {**EIGHT, "num_bits": 4}}, "nvfp4"),
]
SCHEME = {"quant_method": "compressed-tensors", "kv_cache_scheme": EIGHT}


@pytest.mark.parametrize(
    ("quantised", "expected"),
    [*QUANTISED, (SCHEME, "fp8"), ({**SCHEME, "kv_cache_scheme": None}, "auto")],
)
def test_the_checkpoint_says_what_auto_is(quantised: dict[str, Any] | None, expected: str) -> None:
    assert checkpoint_cache_dtype({"quantization_config": quantised}) == expected


@pytest.mark.slow  # imports vLLM
def test_vllm_says_the_same() -> None:
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    for quantised, expected in QUANTISED:
        model: Any = SimpleNamespace(hf_config=SimpleNamespace(quantization_config=quantised))
        theirs = resolve_kv_cache_dtype_string("auto", model)
        assert theirs.removesuffix("_e4m3") == expected
