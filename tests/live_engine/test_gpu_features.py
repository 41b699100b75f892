"""vLLM's features beside speculation on a GPU: priorities, embeddings, new weights, offload."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checklist_rows import PROMPTS, check_everything_in_one_batch
from checklist_tools import ask, check_counts, check_partial, compare, greedy, metric
from engine_tools import FULL_FOR_ALL, SCV, prompts_of, tiny_pair, tiny_spec, worker_of
from feature_rows import (
    check_beam_search,
    check_priorities,
    check_prompt_embeds,
    check_reload,
    feature_arguments,
)
from kv_gate_tools import check_gates
from planted_layers import check_a_batch
from state_tools import AGAINST, GRAPHS, fault_of

from nwor_bench.analysis.parity.kv import KvVerdict
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.records.cell import Arguments

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

Start = Callable[..., VllmEngine]


def test_features_under_full_graphs(tmp_path: Path, start_alone: Start) -> None:
    """The weights change last: both sets of graphs read them at the addresses of their capture."""
    pair = tiny_pair(tmp_path, "ngram")
    arguments = feature_arguments(**FULL_FOR_ALL)
    engine = start_alone(pair, tiny_spec(block_size=32, engine_args=arguments))
    for scv in SCV:
        check_priorities(engine, scv)
    check_prompt_embeds(engine, SCV)
    check_beam_search(engine)
    check_reload(engine, pair.target, tmp_path, exact=False)


def test_weights_offloaded_to_the_host(tmp_path: Path, start_alone: Start) -> None:
    arguments = {**FULL_FOR_ALL, "cpu_offload_gb": 0.001}
    spec = tiny_spec(block_size=32, engine_args=json.dumps(arguments))
    engine = start_alone(tiny_pair(tmp_path, "draft_model"), spec)
    stock, _ = compare(engine, PROMPTS, greedy(), SCV)
    check_partial(stock)


def test_drafts_that_a_grammar_cuts_before_they_are_scheduled(
    tmp_path: Path, start_alone: Start
) -> None:
    """Without async scheduling windows of one batch have different draft counts: no graph runs
    those, beside equal ones that a graph runs."""
    arguments = json.dumps({**FULL_FOR_ALL, "async_scheduling": False})
    spec = tiny_spec(draft_tokens=4, block_size=32, engine_args=arguments)
    engine = start_alone(tiny_pair(tmp_path, "draft_model"), spec)
    assert worker_of(engine).vllm_config.scheduler_config.async_scheduling is False
    staged = check_everything_in_one_batch(engine, SCV)
    assert staged.total("uncounted_draft_tokens") == 0


def test_prefix_hits_of_a_model_with_states(tmp_path: Path, start_alone: Start) -> None:
    """vLLM copies states at the ends of blocks, so stock keeps them; the K/V are staged."""
    own = {"enable_prefix_caching": True, "gdn_prefill_backend": "triton"}
    spec = tiny_spec(
        requests=4, kv_cache_gib=0.5, max_model_len=4096,
        engine_args=json.dumps({**FULL_FOR_ALL, **own}),
    )  # fmt: skip
    engine = start_alone(resolve_pair("tiny-states-mtp", cache_dir=tmp_path / "pair"), spec)
    status = engine.status()
    assert (status.staging_unavailable, status.state_layers) == (None, 0)
    assert status.states_unavailable == "mamba_cache_mode:align"
    assert status.block_size is not None
    shared = [66] + [65] * status.block_size
    prompts = [shared + prompt for prompt in prompts_of([20, 30, 25, 41])]
    ask(engine, "off", prompts, greedy(30))
    told = engine.decode_greedily(prompts, [30] * 4, ignore_eos=True, top=20)
    for scv in SCV:
        for keep in (False, True):
            before = metric(engine, "vllm:prefix_cache_hits")
            staged = ask(engine, "stage", prompts, greedy(30), scv=scv, keep_cache=keep)
            check_counts(engine, staged)
            assert staged.total("states_avoided") == 0
            assert fault_of(staged.tokens, told) is None
        assert metric(engine, "vllm:prefix_cache_hits") > before
    check_gates(engine, prompts, greedy(30), SCV)


@pytest.mark.parametrize("graphs", GRAPHS)
def test_qwen3_5s_windows_are_checked_layer_by_layer(
    graphs: str, tmp_path: Path, start_alone: Start
) -> None:
    """Stock's kernel of its windows has the gated norm in it."""
    own = {"enable_prefix_caching": False, "gdn_prefill_backend": "triton"}
    spec = tiny_spec(
        requests=4, kv_cache_gib=2, max_model_len=512, against=json.dumps(AGAINST),
        engine_args=json.dumps({**own, **GRAPHS[graphs]}),
    )  # fmt: skip
    pair = resolve_pair("qwen3.5-quarter-shape", cache_dir=tmp_path)
    engine = start_alone(pair, spec.engine_specs[Arguments.of(AGAINST)])
    assert engine.status().state_slots == 1
    found = check_a_batch(engine, prompts_of([20, 30, 25, 41]), scv="graph")
    assert (found.verdict, found.reason) == (KvVerdict.WITHIN, None)
    assert (found.states, found.convolutions, found.windows) == (12, 12, 2)
