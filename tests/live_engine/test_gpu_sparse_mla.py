"""Real vLLM on a Hopper GPU with sparse latent attention (DeepSeek V3.2, GLM-5): staged.

A small DeepSeek V3.2 with random weights and synthetic acceptance, whose indexer selects 512
positions: some prompts are shorter, so that all is selected, and some longer. One engine a case;
each must stage every window, commit what it hands in, and stay within the errors of mode off.
vLLM captures breakable CUDA graphs of it, so each test has a process of its own.

vLLM's indexer takes its scores from DeepGEMM alone. Where that does not load (vLLM's own copy wants
another torch than 2.11) the scores are torch's, in mode off too (`deep_gemm_stand_in.py`). What is
tested stays real: the model's fused kernel, the top k of prefills, FlashAttention 3 and the graphs.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deep_gemm_stand_in
import pytest
from engine_tools import (
    GRAPHS,
    implementations_of,
    mtp_of,
    pair_with,
    prompts_of,
    run_cell,
    tiny_spec,
    total,
)
from test_gpu_groups import check_all, check_rows

from nwor_bench.engine.engine import VllmEngine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.gpu,
    pytest.mark.own_process,
    pytest.mark.row("latent attention (MLA)"),
]

SELECTED = 512
V32: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "index_topk": SELECTED,
    "index_n_heads": 64,
    "index_head_dim": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v32": V32,
    "shared selections": {**V32, "index_topk_freq": 2},  # as GLM-5.2: a layer without an indexer
    "64 heads": {**V32, "num_attention_heads": 64, "num_key_value_heads": 64},
    "its own drafts": {**V32, "num_nextn_predict_layers": 1},
}
"""Settings on top of the pair `mla-shape`, which is a small DeepSeek-V2."""

FEW: list[tuple[str, str, int, dict[str, str]]] = [
    ("deepseek-v32", "eager", 4, {}),
    ("deepseek-v32", "full", 4, {}),
]
MORE: list[tuple[str, str, int, dict[str, str]]] = [
    ("deepseek-v32", "full", 3, {}),  # four rows a request, which DeepGEMM takes in one piece
    ("deepseek-v32", "full", 4, {"stage_by": "copy"}),
    ("shared selections", "full", 4, {}),
    ("64 heads", "eager", 4, {}),
    ("its own drafts", "full", 4, {}),
]
CASES = [
    pytest.param(*case, id="-".join((*case[:2], str(case[2]), *case[3].values())), marks=marks)
    for cases, marks in ((FEW, ()), (MORE, pytest.mark.long))
    for case in cases
]
PROMPTS = prompts_of([1500, 21, 700, 33, 505, 150, 1100, 77])
"""The fifth grows over 512 tokens as it is answered."""


@pytest.fixture(autouse=True)
def indexer_scores(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """More of vLLM's arguments: where DeepGEMM is stood in for, torch takes the top k too."""
    # vLLM sets it for these models by itself, as the engine starts; here it ends with the test.
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    missing = deep_gemm_stand_in.use_where_missing(monkeypatch)
    return {"sparse_indexer_topk_backend": "torch"} if missing else {}


def start(
    model: str, drafts: int, arguments: dict[str, Any], folder: Path, start_alone: Any, **more: str
) -> VllmEngine:
    arguments = {**arguments, "tokenizer_mode": "hf"}
    spec = tiny_spec(
        draft_tokens=drafts, kv_cache_gib=0.5, max_model_len=2048,
        engine_args=json.dumps(arguments), **more,
    )  # fmt: skip
    pair = pair_with("mla-shape", MODELS[model], folder)
    if "num_nextn_predict_layers" in MODELS[model]:
        pair = mtp_of(pair)
    engine: VllmEngine = start_alone(pair, spec)
    status = engine.status()
    assert status.staging_unavailable is None, status
    assert implementations_of(engine) == {"FlashAttnMLASparseImpl"}
    assert status.target_layers == 4, status  # the indexers' caches are not among them
    assert status.bytes_per_token == 4 * 576 * 2, status
    return engine


@pytest.mark.parametrize(("model", "graphs", "drafts", "staging"), CASES)
def test_a_sparse_latent_model_is_staged(
    model: str,
    graphs: str,
    drafts: int,
    staging: dict[str, str],
    tmp_path: Path,
    start_alone: Callable[..., VllmEngine],
    record_property: Callable[[str, object], None],
    indexer_scores: dict[str, str],
) -> None:
    arguments = {**GRAPHS[graphs], **indexer_scores}
    if graphs == "full" and drafts != 4:
        sizes = [n * (drafts + 1) for n in (1, 2, 4, 8)]
        compilation = {**arguments["compilation_config"], "cudagraph_capture_sizes": sizes}
        arguments["compilation_config"] = compilation
    engine = start(model, drafts, arguments, tmp_path, start_alone, **staging)
    check_all(engine, "bfloat16", graphs, record_property, PROMPTS)


@pytest.mark.long
def test_its_default_graphs_stage_all_but_steps_in_piecewise_ones(
    tmp_path: Path,
    start_alone: Callable[..., VllmEngine],
    record_property: Callable[[str, object], None],
    indexer_scores: dict[str, str],
) -> None:
    """Short prompts beside windows run in a breakable piecewise graph, which holds the write."""
    sizes = [5, 10, 15, 20, 25, 30, 35, 40, 64, 128]
    arguments = {
        "compilation_config": {"cudagraph_capture_sizes": sizes}, "max_num_batched_tokens": 128,
        "max_num_seqs": 8, **indexer_scores,
    }  # fmt: skip
    engine = start("deepseek-v32", 4, arguments, tmp_path, start_alone)
    stock = run_cell(engine, "off", "off", PROMPTS)
    staged = run_cell(engine, "stage", "graph", PROMPTS)
    reasons = {window.fallback_reason for window in staged.windows}
    assert reasons == {None, "breakable_cuda_graphs"}, reasons
    drafts = sum(w.draft_tokens for w in staged.windows if w.fallback_reason is None)
    assert total(staged, "staged_tokens") == drafts > 0
    assert [len(t) for t in staged.token_ids] == [len(t) for t in stock.token_ids]
    check_rows(engine, record_property, PROMPTS)
