"""Two tensor-parallel ranks on the CPU: each stages its own heads, and all end a window alike."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checklist_rows import check_drafter_behind_32_layers, check_grammar
from checklist_tools import ask, check_cache, check_partial, compare, greedy
from engine_tools import eagle_pair, prompts_of, run_cell, tiny_pair, tiny_spec, total
from kv_gate_tools import change_a_value, kv_results
from rank_faults import (
    accepts_one_less,
    commit_fails,
    counts_one_less,
    on_ranks,
    planted,
    staging_fails,
    watch_slots,
    watched_slots,
)

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import BatchOutput

pytestmark = [
    pytest.mark.engine,
    pytest.mark.row("tensor parallelism"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors"),
]

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
def test_a_grammar_that_invalidates_drafts(engine: VllmEngine) -> None:
    check_grammar(engine, ["off", "graph"])


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
    [(staging_fails, "stage:RuntimeError"), (commit_fails, "commit:RuntimeError")],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_on_one_rank_is_a_fallback_of_all(
    engine: VllmEngine, reference: BatchOutput, plant: Any, fault: str, rank: int
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
    with planted(engine, accepts_one_less, rank=1):
        output = run_cell(engine, "stage", "off", PROMPTS)
    assert output.token_ids == reference.token_ids
    reasons = [w.fallback_reason for w in output.windows]
    accepted = [w.accepted_tokens > 0 for w in output.windows]
    assert reasons == ["ranks_accepted_differently" if some else None for some in accepted]
    assert True in accepted


def test_a_rank_that_counts_differently_is_named(engine: VllmEngine) -> None:
    with planted(engine, counts_one_less, rank=1):
        output = run_cell(engine, "stage", "off", PROMPTS)
    first = output.windows[0].staged_tokens
    assert output.rank_disagreement == (
        f"window 0 has staged_tokens {first - 1} on rank 1 and {first} on rank 0"
    )


@pytest.mark.long
def test_drafter_layers_behind_32_target_layers_are_not_staged(
    tmp_path: Path, start_engine: Callable[..., VllmEngine]
) -> None:
    """The shape of the run that once failed with "staged tokens 0 < accepted 6 for layer 32".

    32 target layers, an EAGLE head that vLLM names layer 32, two ranks, 16 requests, k = 8:
    144 tokens a step when every request has its window.
    """
    pair = eagle_pair(tmp_path, layers=32)
    engine = start_engine(pair, tiny_spec(requests=16, draft_tokens=8, **TWO_RANKS))
    check_drafter_behind_32_layers(engine, ("off", "graph"))
