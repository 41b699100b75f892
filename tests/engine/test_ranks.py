"""Ranks of one engine: counts must agree, times need not, and what all kept is one answer."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from nwor_bench.engine.kv_cache import VllmKvCache
from nwor_bench.engine.protocol import Kept
from nwor_bench.engine.readings import OF_EACH_RANK, common_status, disagreement
from nwor_bench.errors import EngineError
from nwor_bench.records.facts import CudaGraphs, to_json

COUNTS = ("draft_tokens", "accepted_tokens", "staged_tokens", "committed_tokens")

windows = st.lists(
    st.fixed_dictionaries({name: st.integers(0, 9) for name in COUNTS}), min_size=1, max_size=5
)


def copies(batch, ranks):
    """Windows with equal counts on every rank, each rank with times of its own."""
    counts = {name: [window[name] for window in batch] for name in COUNTS}
    return [
        {name: list(column) for name, column in counts.items()}
        | {"wall_ms": [rank + 0.5] * len(batch)}
        for rank in range(ranks)
    ]


@given(windows, st.integers(1, 4))
def test_equal_counts_agree_whatever_the_times(batch, ranks):
    assert disagreement(copies(batch, ranks)) is None


@given(windows, st.integers(2, 4), st.data())
def test_any_other_count_on_any_rank_is_named(batch, ranks, data):
    found = copies(batch, ranks)
    rank = data.draw(st.integers(1, ranks - 1))
    number = data.draw(st.integers(0, len(batch) - 1))
    name = data.draw(st.sampled_from(COUNTS))
    found[rank][name][number] += 1
    ours = batch[number][name]
    assert disagreement(found) == (
        f"window {number} has {name} {ours + 1} on rank {rank} and {ours} on rank 0"
    )


@given(windows)
def test_a_window_that_only_one_rank_ran_is_named(batch):
    first, second = copies(batch, 2)
    assert disagreement([first, {name: column[:-1] for name, column in second.items()}]) == (
        f"rank 1 ran {len(batch) - 1} windows and rank 0 {len(batch)}"
    )


STATUS = {
    "device": "cuda:0",
    "target_layers": 28,
    "drafter_layers": 1,
    "kv_heads": 4,
    "bytes_per_token": 57344,
    "num_gpu_blocks": 1000,
}


def test_one_ranks_status_is_left_as_it_is():
    assert to_json(common_status([STATUS])) == STATUS


def test_each_ranks_own_facts_are_kept():
    other = {**STATUS, "device": "cuda:1"}
    status = to_json(common_status([STATUS, other]))
    assert {name: status[name] for name in STATUS} == STATUS
    assert [rank["device"] for rank in status["ranks"]] == ["cuda:0", "cuda:1"]
    assert [rank["kv_heads"] for rank in status["ranks"]] == [4, 4]


@pytest.mark.parametrize(("name", "value"), [("num_gpu_blocks", 999), ("target_layers", 27)])
def test_ranks_that_differ_in_what_they_must_share_are_refused(name, value):
    with refused(f"rank 1 has {name}", EngineError, value=value, naming=f"rank 0 {STATUS[name]}"):
        common_status([STATUS, {**STATUS, name: value}])


GRAPHS = {"stage_window_sizes": [5, 40], "stage_memory_bytes": 73400320, "sham_capture_s": 1.5}


def test_ranks_may_differ_in_what_their_graphs_took():
    """Ranks on two H100s did, and no sweep with full graphs started."""
    first = {**STATUS, "cuda_graphs": GRAPHS}
    taken = {"stage_memory_bytes": 85983232, "sham_capture_s": 1.6, "attention_us": {"40": 9.1}}
    status = to_json(common_status([first, {**STATUS, "cuda_graphs": GRAPHS | taken}]))
    assert status["cuda_graphs"] == GRAPHS
    fewer = {**STATUS, "cuda_graphs": GRAPHS | {"stage_window_sizes": [40]}}
    with refused("rank 1 has cuda_graphs", EngineError, value=fewer["cuda_graphs"]):
        common_status([first, fewer])
    measured = {n for n in CudaGraphs.model_fields if n.endswith(("_s", "_us", "_bytes"))}
    assert measured | {"device"} == OF_EACH_RANK


def kept(*ranks: dict[str, Any]) -> Kept:
    calls = []

    def rpc_all(method: str, *given: Any) -> list[Any]:
        calls.append((method, *given))
        return list(ranks)

    found = VllmKvCache(None, rpc_all, lambda: None).states.keep("cell")  # type: ignore[arg-type, return-value]
    assert calls == [("nwor_keep", "states", "cell", [], [])]
    return found


def test_states_count_that_every_rank_has_after_as_many_tokens() -> None:
    first = {"unreadable": None, "tokens": [(0, 12), (1, 10), (2, 8)]}
    second = {"unreadable": None, "tokens": [(0, 12), (1, 9)]}
    assert kept(first) == Kept(tokens={0: 12, 1: 10, 2: 8})
    assert kept(first, second) == Kept(tokens={0: 12})


def test_one_rank_that_cannot_read_is_enough() -> None:
    fine: dict[str, Any] = {"unreadable": None, "tokens": []}
    assert kept(fine, {**fine, "unreadable": "no heads"}).unreadable == "no heads"
