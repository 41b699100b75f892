"""Staged recurrent states on real vLLM, on either runner: engines, and what their tests hold.

In bfloat16 our sum and vLLM's round differently, so if two tokens are as good as equal either may
come; every other difference is a fault.
"""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from checklist_tools import ask, check_partial, greedy, metric
from engine_tools import EAGER, FULL_FOR_ALL, PIECEWISE, prompts_of, tiny_spec, total_of, worker_of

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import GreedyOutput
from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.plugin.states import WindowStates
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.workload.run_spec import RunSpec

PROMPTS = prompts_of([20, 30, 25, 41])

TIE = 0.1
"""Difference of two tokens' logits below which rounding decides: between 8 and 16, where they are,
bfloat16 has steps of 1/16."""

AGAINST = {"additional_config": {"nwor_state_slots": 1}}
"""The arguments of an engine with one state slot a request, which keeps records in rings."""

GRAPHS: dict[str, dict[str, Any]] = {"eager": EAGER, "full": FULL_FOR_ALL, "piecewise": PIECEWISE}
ON_GPU = [f"{graphs}-{state}" for graphs in GRAPHS for state in ("float32", "bfloat16")]
ENGINES = ["cpu", *ON_GPU]
"""Engines that tests run on, one at a time."""


def engines(*names: str) -> pytest.MarkDecorator:
    """Run a test on these engines; all but the first of ENGINES need a GPU."""
    return pytest.mark.parametrize("engine", [engine_case(n) for n in names], indirect=True)


def engine_case(name: str) -> Any:
    """An engine as a parameter."""
    return pytest.param(name, marks=[pytest.mark.gpu] * (name != "cpu"), id=name)


def states_spec(name: str, **changes: Any) -> RunSpec:
    """Spec of one of ENGINES for four short requests."""
    own = {**EAGER, "enable_prefix_caching": False}
    if name != "cpu":
        graphs, state = name.split("-")
        own = {**GRAPHS[graphs], "enable_prefix_caching": False, "gpu_memory_utilization": 0.2,
               "gdn_prefill_backend": "triton", "mamba_ssm_cache_dtype": state}  # fmt: skip
    arguments = json.dumps({**own, **changes.pop("engine_args", {})})
    usual = {"requests": 4, "kv_cache_gib": 0.1 if name == "cpu" else 0.5, "max_model_len": 256}
    return tiny_spec(**{**usual, **changes}, engine_args=arguments)


def hook_of(engine: VllmEngine) -> RunnerHook:
    """The engine's hook, in this process."""
    found: RunnerHook = worker_of(engine).nwor_hook
    return found


def states_of(engine: VllmEngine) -> WindowStates:
    """The engine's states."""
    found = hook_of(engine).states
    assert found is not None
    return found


def stock_answers(engine: VllmEngine) -> tuple[GreedyOutput, ...]:
    """Mode off with its likeliest tokens; some drafts are accepted and some are not."""
    check_partial(ask(engine, "off", PROMPTS, greedy()))
    return engine.decode_greedily(PROMPTS, [40] * len(PROMPTS), ignore_eos=True, top=20)


def fault_of(answers: Sequence[Sequence[int]], told: Sequence[GreedyOutput]) -> str | None:
    """The first difference of requests that repeat stock's from these that no tie explains; None
    if there is none."""
    for request, ours in enumerate(answers):
        theirs = told[request % len(told)]
        for at, (own, token) in enumerate(zip(ours, theirs.token_ids, strict=False)):
            if own == token:
                continue
            top = theirs.top[at]
            gap = abs(top.get(own, -99.0) - top[token])
            if gap > TIE:
                return f"request {request}, token {at}: logits differ by {gap:.2f}"
            break  # behind a tie the two go on from other tokens
    return None


def check_states(engine: VllmEngine, windows: Sequence[Any], drafts: int) -> None:
    """Every one of these windows wrote one state a request and layer."""
    layers = engine.status().state_layers
    assert layers == 3
    assert {window.states_reason for window in windows} == {None}
    assert total_of(list(windows), "states_avoided") == layers * drafts > 0
    assert all(w.states_committed in (layers * n for n in range(1, 5)) for w in windows)


def one_by_one(engine: VllmEngine, interrupt: bool) -> list[tuple[int, ...]]:
    """More requests than run at a time, of several lengths, so that they end and start beside
    others; `interrupt`: all running ones are preempted now and then."""
    engine.set_modes(Cell("tiny", NworMode.STAGE, ScvMode.OFF))
    engine._rpc("nwor_drain")
    core = engine._llm.llm_engine
    lengths = [9, 40, 23, 31, 17, 28, 12]
    for number, most in enumerate(lengths):
        prompt = {"prompt_token_ids": PROMPTS[number % len(PROMPTS)]}
        core.add_request(f"r{number}", prompt, greedy(most))
    found: dict[str, tuple[int, ...]] = {}
    steps, before = 0, metric(engine, "vllm:num_preemptions")
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                found[output.request_id] = tuple(output.outputs[0].token_ids)
        steps += 1
        if interrupt and steps % 11 == 10:
            core.reset_prefix_cache(reset_running_requests=True)
    assert (metric(engine, "vllm:num_preemptions") > before) == interrupt
    assert [len(found[f"r{n}"]) for n in range(len(lengths))] == lengths
    return [found[f"r{n}"] for n in range(len(lengths))]
