"""vLLM's features beside speculation, on one engine: what their tests do on either runner."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checklist_rows import LONG, PROMPTS, SMALL_CACHE
from checklist_tools import ask, check_cache, check_partial, check_same, compare, greedy, metric
from engine_tools import run_cell, total_of, worker_of
from kv_gate_tools import kv_results
from safetensors.numpy import load_file, save_file

from nwor_bench.analysis.parity.kv import KvVerdict
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.records.window import windows_of

FEATURES: dict[str, Any] = {
    **SMALL_CACHE,
    "scheduling_policy": "priority",
    "enable_prompt_embeds": True,
}
"""vLLM's arguments under which every check here runs."""


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


def feature_arguments(**more: Any) -> str:
    """FEATURES and others as `--engine-args` has them."""
    return json.dumps({**more, **FEATURES})
