"""vLLM's features beside speculation: priorities, embeddings, beam search and new weights on one
engine of either runner; on a GPU offload, drafts that a grammar cuts, and models with states."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checklist_rows import LONG, PROMPTS, SMALL_CACHE, check_everything_in_one_batch
from checklist_tools import (
    ask,
    check_cache,
    check_counts,
    check_partial,
    check_same,
    compare,
    greedy,
    metric,
)
from engine_tools import (
    FULL_FOR_ALL,
    SCV,
    prompts_of,
    run_cell,
    tiny_pair,
    tiny_spec,
    total_of,
    worker_of,
)
from kv_gate_tools import check_gates, kv_results
from planted_layers import check_a_batch
from safetensors.numpy import load_file, save_file
from state_tools import AGAINST, GRAPHS, fault_of

from nwor_bench.analysis.parity.kv import KvVerdict
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.records.cell import Arguments
from nwor_bench.records.window import windows_of

pytestmark = pytest.mark.engine

Start = Callable[..., VllmEngine]

FEATURES: dict[str, Any] = {
    **SMALL_CACHE,
    "scheduling_policy": "priority",
    "enable_prompt_embeds": True,
}
"""vLLM's arguments under which the checks of one engine run."""


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.long), pytest.param("gpu", marks=pytest.mark.gpu)],
)
def test_features_on_one_engine(device: str, tmp_path: Path, start_alone: Start) -> None:
    """Prompt lookup: vLLM's V1 runner drafts for no embedded prompt with a draft model. The weights
    change last: graphs read them at the addresses of their capture."""
    pair = tiny_pair(tmp_path, "ngram")
    graphs, scv_modes = (FULL_FOR_ALL, SCV) if device == "gpu" else ({}, ("off", "graph"))
    arguments = json.dumps({**graphs, **FEATURES})
    engine = start_alone(pair, tiny_spec(block_size=32, engine_args=arguments))
    for scv in scv_modes:
        check_priorities(engine, scv)
    check_prompt_embeds(engine, scv_modes)
    check_beam_search(engine)
    check_reload(engine, pair.target, tmp_path, exact=device == "cpu")


def check_priorities(engine: VllmEngine, scv: str) -> None:
    """The last request is the most urgent, so that it displaces others from a small cache."""
    urgency = list(range(len(LONG), 0, -1))
    before = metric(engine, "vllm:num_preemptions")
    stock = ask(engine, "off", LONG, greedy(60), priority=urgency)
    between = metric(engine, "vllm:num_preemptions")
    staged = ask(engine, "stage", LONG, greedy(60), scv=scv, priority=urgency)
    assert before < between < metric(engine, "vllm:num_preemptions")
    check_same(engine, staged, stock)
    check_cache(engine, LONG[:2], ask(engine, "stage", LONG[:2], greedy(40), scv=scv))


def check_prompt_embeds(engine: VllmEngine, scv_modes: Sequence[str]) -> None:
    """Prompts given as the embeddings of their tokens are answered as the tokens are."""
    model = worker_of(engine).model_runner.model
    device = worker_of(engine).device
    with torch.inference_mode():
        embedded = [model.embed_input_ids(torch.tensor(p, device=device)) for p in PROMPTS]
    prompts = [{"prompt_embeds": rows.cpu().clone()} for rows in embedded]
    stock, _ = compare(engine, prompts, greedy(30), scv_modes)
    check_partial(stock)
    assert stock.tokens == ask(engine, "off", PROMPTS, greedy(30)).tokens


def check_beam_search(engine: VllmEngine) -> None:
    """Each step of each beam is a request of one token; what is drafted for it is staged."""
    from vllm.sampling_params import BeamSearchParams

    beams = []
    for mode in ("off", "stage"):
        run_cell(engine, mode, "off", PROMPTS[:1], max_new_tokens=1)  # sets the modes, and drains
        params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
        prompts: Any = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS[:3]]
        found = engine._llm.beam_search(prompts, params)
        windows = windows_of(engine._rpc("nwor_drain")["windows"])
        drafts, staged = (total_of(windows, f"{name}_tokens") for name in ("draft", "staged"))
        assert drafts > 0
        assert staged == (drafts if mode == "stage" else 0)
        beams.append([beam for each in found for beam in each.sequences])
    stock, ours = beams
    assert [beam.tokens for beam in ours] == [beam.tokens for beam in stock]
    # A GPU's two kernels of attention round differently.
    expected = [beam.cum_logprob for beam in stock]
    assert [beam.cum_logprob for beam in ours] == pytest.approx(expected, abs=1e-4)


def check_reload(engine: VllmEngine, target: str, folder: Path, *, exact: bool = True) -> None:
    """Other weights in place: windows are staged with them, and the cache is the stock one.

    `exact`: bit for bit; otherwise the K/V gate may allow for rounding.
    """
    good = {KvVerdict.EXACT} if exact else {KvVerdict.EXACT, KvVerdict.WITHIN}
    other = folder / "other"
    shutil.copytree(target, other)
    weights = load_file(other / "model.safetensors")
    changed = {n: w * 1.3 if "mlp" in n or "v_proj" in n else w for n, w in weights.items()}
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    first = ask(engine, "stage", PROMPTS, greedy(30))
    for path in (str(other), target):
        engine._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        stock, staged = compare(engine, PROMPTS, greedy(30), ["off", "graph"])
        check_partial(stock)
        assert (staged.tokens == first.tokens) is (path == target)
        (result,) = kv_results(engine, PROMPTS)
        assert result.verdict in good


@pytest.mark.gpu
def test_weights_offloaded_to_the_host(tmp_path: Path, start_alone: Start) -> None:
    arguments = {**FULL_FOR_ALL, "cpu_offload_gb": 0.001}
    spec = tiny_spec(block_size=32, engine_args=json.dumps(arguments))
    engine = start_alone(tiny_pair(tmp_path, "draft_model"), spec)
    stock, _ = compare(engine, PROMPTS, greedy(), SCV)
    check_partial(stock)


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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
    found = check_a_batch(engine, prompts_of([20, 30, 25, 41]), scv="graph", tokens=48)
    assert (found.verdict, found.reason) == (KvVerdict.WITHIN, None)
    assert (found.states, found.convolutions, found.windows) == (12, 12, 8)
