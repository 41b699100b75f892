"""Two tensor-parallel ranks: each stages its own heads, and all end a window alike. On two GPUs
every slot stands beside a direct write too."""

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from checklist_rows import check_drafter_behind_32_layers, check_grammar
from checklist_tools import ask, check_cache, check_partial, compare, greedy
from engine_tools import EAGER, FULL, eagle_pair, prompts_of, run_cell, tiny_pair, tiny_spec, total
from kv_gate_tools import change_a_value, kv_results
from planted_faults import RANK_FAULTS, RankFault
from planted_gate import Outcomes, run_gate
from rank_faults import on_ranks, planted, watch_slots, watched_slots
from refusals import refused

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import BatchOutput
from nwor_bench.errors import EngineError
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.workload.run_spec import RunSpec

pytestmark = [
    pytest.mark.engine,
    pytest.mark.row("tensor parallelism"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors"),
]
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
ON_GPUS = [pytest.mark.gpu, NEEDS_TWO]
DEVICES = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.long), pytest.param("gpu", marks=ON_GPUS)]
)

PROMPTS = prompts_of([24, 31, 18, 40, 27, 22, 35, 29])
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "block_size": 32, "kv_cache_gib": 0.1}


@pytest.fixture(scope="module")
def engine(
    start_engine: Callable[..., VllmEngine], tmp_path_factory: pytest.TempPathFactory
) -> VllmEngine:
    """A draft model with partial acceptance, on two ranks."""
    pair = tiny_pair(tmp_path_factory.mktemp("pair"), "draft_model")
    return start_engine(pair, tiny_spec(**TWO_RANKS))


@pytest.fixture(scope="module")
def reference(engine: VllmEngine) -> BatchOutput:
    """off x off on the same prompts."""
    return run_cell(engine, "off", "off", PROMPTS)


def test_each_rank_stages_its_own_heads(engine: VllmEngine) -> None:
    status = engine.status()
    assert status.target_layers == status.staging_buffers == 3
    assert [rank.kv_heads for rank in status.ranks] == [1, 1]  # two in the model
    rows = 3 * 1 * 2 * 32 * 4  # layers, heads of this rank, K and V, head_dim, float32
    assert [rank.bytes_per_token for rank in status.ranks] == [rows, rows]


@pytest.mark.parametrize(
    "scv", ["off", *(pytest.param(scv, marks=pytest.mark.long) for scv in ("graph", "adaptive"))]
)
def test_tokens_and_counts_are_those_of_stock_and_the_cache_is_sound(
    engine: VllmEngine, scv: str
) -> None:
    stock, staged = compare(engine, PROMPTS, greedy(), [scv])
    check_partial(stock)
    assert engine._rpc_all("nwor_window_state") == ["idle", "idle"]
    check_cache(engine, PROMPTS, staged)


@pytest.mark.long
def test_every_slot_holds_what_a_direct_write_leaves(
    engine: VllmEngine, reference: BatchOutput
) -> None:
    run_cell(engine, "stage", "off", PROMPTS)
    on_ranks(engine, watch_slots)
    staged = run_cell(engine, "stage", "off", PROMPTS)
    ranks = on_ranks(engine, watched_slots)
    assert staged.token_ids == reference.token_ids
    for rank in ranks:
        assert rank["windows"] == len(staged.windows) >= 8
        assert rank["accepted"] == 3 * total(staged, "committed_tokens") > 0
        assert rank["rejected"] == 3 * total(staged, "rejected_tokens") > 0
        assert rank["wrong"] == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "fault"),
    [("staging_fails", "stage:RuntimeError"), ("commit_fails", "commit:RuntimeError")],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_on_one_rank_is_a_fallback_of_all(
    engine: VllmEngine, reference: BatchOutput, plant: str, fault: str, rank: int
) -> None:
    with planted(engine, plant, rank):
        output = run_cell(engine, "stage", "off", PROMPTS)
        answers = ask(engine, "stage", PROMPTS, greedy(40))
        check_cache(engine, PROMPTS, answers)
    assert output.token_ids == reference.token_ids
    assert output.rank_disagreement is None
    assert {w.fallback_reason for w in output.windows} == {f"rank_{rank}:{fault}"}
    assert total(output, "staged_tokens") == total(output, "committed_tokens") == 0
    healed = run_cell(engine, "stage", "off", PROMPTS)
    assert {w.fallback_reason for w in healed.windows} == {None}


@pytest.mark.long
@pytest.mark.parametrize(
    "fault", [None, *RANK_FAULTS], ids=lambda fault: fault.name if fault else "none"
)
def test_a_planted_fault_of_one_rank_is_caught(
    engine: VllmEngine, tmp_path: Path, fault: RankFault | None
) -> None:
    """By the sweep's gate; sound ranks pass."""
    with planted(engine, fault.plant, rank=1) if fault else nullcontext():
        outcome = run_gate(engine, tiny_spec(**TWO_RANKS), PROMPTS, tmp_path / "run")
    assert outcome.staged > 0
    if fault is None:
        assert outcome.reasons == {}
        return
    Outcomes("cpu").add(fault.name, outcome)
    assert outcome.caught == dict.fromkeys(fault.cells, fault.checks), outcome.reasons


@pytest.mark.long
def test_the_kv_gate_looks_into_every_rank(engine: VllmEngine) -> None:
    for one_attention in (True, False):
        (result,) = kv_results(engine, PROMPTS, one_attention=one_attention)
        assert result.reason is None
        assert result.checked == result.committed == sum(map(len, PROMPTS)) + 8 * 39
        assert (result.ranks, result.layers) == (2, 3)


@pytest.mark.parametrize("one_attention", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_kv_gate_names_a_value_of_the_second_rank(
    engine: VllmEngine, one_attention: bool
) -> None:
    def plant(output: BatchOutput) -> None:
        on_ranks(engine, change_a_value, 2, 4, 50, 3, 0, 1)

    (result,) = kv_results(engine, PROMPTS, one_attention=one_attention, before_check=plant)
    assert result.reason is not None
    assert result.reason.startswith("K/V: layer 2 (model.layers.2.self_attn.attn), request 4, ")
    assert "position 50 (of its output), K, head 0 of rank 1" in result.reason


def test_ranks_that_accept_differently_write_directly(
    engine: VllmEngine, reference: BatchOutput
) -> None:
    with planted(engine, "accepts_one_less", rank=1):
        output = run_cell(engine, "stage", "off", PROMPTS)
    assert output.token_ids == reference.token_ids
    reasons = [w.fallback_reason for w in output.windows]
    accepted = [w.accepted_tokens > 0 for w in output.windows]
    assert reasons == ["ranks_accepted_differently" if some else None for some in accepted]
    assert True in accepted


def test_a_rank_that_counts_differently_is_named(engine: VllmEngine) -> None:
    with planted(engine, "counts_one_less", rank=1):
        output = run_cell(engine, "stage", "off", PROMPTS)
    first = output.windows[0].staged_tokens
    assert output.rank_disagreement == (
        f"window 0 has staged_tokens {first - 1} on rank 1 and {first} on rank 0"
    )


ONE_CACHE_GROUP = {**EAGER, "disable_hybrid_kv_cache_manager": True}
"""Layers with and without a sliding window in one group of KV caches, which can be staged."""


def on_gpus(arguments: dict[str, Any], **changes: Any) -> RunSpec:
    """A spec of eight requests on two GPUs."""
    given = {"draft_tokens": 4, "tensor_parallel_size": 2, **changes}
    return tiny_spec(**given, engine_args=json.dumps(arguments))


@pytest.mark.gpu
@NEEDS_TWO
@pytest.mark.parametrize(
    ("name", "dtype", "arguments"),
    [
        ("llama-1b-shape", "float32", EAGER),
        ("llama-1b-shape", "float32", FULL),
        ("qwen-shape", "float32", EAGER),
        ("moe-shape", "float32", EAGER),
        ("gemma-shape", "float32", ONE_CACHE_GROUP),
    ],
)
def test_two_ranks_stage_as_one(
    name: str, dtype: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    pair = resolve_pair(name, cache_dir=tmp_path)
    spec = on_gpus(arguments, dtype=dtype, max_model_len=1024)
    engine = VllmEngine(pair, spec, tmp_path / "engine.log")
    try:
        prompts = prompts_of([600, 21, 90, 33, 61, 150, 40, 77])
        stock, _ = compare(engine, prompts, greedy(), ("off", "graph", "adaptive"))
        if "enforce_eager" in arguments:
            on_ranks(engine, watch_slots)
            watched = run_cell(engine, "stage", "off", prompts)
            for rank in on_ranks(engine, watched_slots):
                assert rank["windows"] == len(watched.windows) >= 8
                assert rank["accepted"] > 0 < rank["rejected"]
                assert rank["wrong"] == 0
            with planted(engine, "staging_fails", rank=1):
                faulty = run_cell(engine, "stage", "off", prompts)
            assert list(faulty.token_ids) == stock.tokens
            assert faulty.rank_disagreement is None
            reasons = {window.fallback_reason for window in faulty.windows}
            assert reasons == {"rank_1:stage:RuntimeError"}
    finally:
        engine.close()


@pytest.mark.gpu
@NEEDS_TWO
def test_ranks_stop_staging_with_the_same_window(
    tmp_path: Path, start_engine: Callable[..., VllmEngine]
) -> None:
    """Only one rank reads that a commit was refused; a staged window's vote tells the other."""
    engine = start_engine(tiny_pair(tmp_path, "draft_model"), on_gpus(EAGER))
    prompts = prompts_of([20, 30, 40, 50])
    stock = run_cell(engine, "off", "off", prompts)
    with (
        planted(engine, "commit_is_refused", rank=1),
        refused("a commit was refused on the device", EngineError, naming="layer 0: slot_range"),
    ):
        run_cell(engine, "stage", "off", prompts)
    after = run_cell(engine, "stage", "off", prompts)
    assert after.token_ids == stock.token_ids
    assert after.rank_disagreement is None
    assert {window.fallback_reason for window in after.windows} == {"staging_stopped"}


@DEVICES
def test_drafter_layers_behind_32_target_layers_are_not_staged(
    device: str, tmp_path: Path, start_alone: Callable[..., VllmEngine]
) -> None:
    """The shape of the run that once failed with "staged tokens 0 < accepted 6 for layer 32".

    32 target layers, an EAGLE head that vLLM names layer 32, two ranks, 16 requests, k = 8:
    144 tokens a step when every request has its window.
    """
    ranks = TWO_RANKS if device == "cpu" else {"tensor_parallel_size": 2}
    spec = tiny_spec(requests=16, draft_tokens=8, **ranks)
    engine = start_alone(eagle_pair(tmp_path, layers=32), spec)
    check_drafter_behind_32_layers(engine, ("off", "graph") if device == "cpu" else ("graph",))


@DEVICES
@pytest.mark.row("structured output")
def test_a_grammar_that_invalidates_drafts(
    device: str, tmp_path: Path, start_alone: Callable[..., VllmEngine]
) -> None:
    """The scheduler validates drafts late, and in another process than the ranks'."""
    spec = tiny_spec(**TWO_RANKS) if device == "cpu" else on_gpus(EAGER)
    check_grammar(start_alone(tiny_pair(tmp_path, "draft_model"), spec), ("off", "graph"))
