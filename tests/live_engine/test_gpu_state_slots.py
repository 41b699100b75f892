"""Real vLLM on a GPU with one state slot a request, in eager steps and in graphs."""

import gc
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from checklist_tools import ask, check_counts, greedy
from engine_tools import EAGER, FULL_FOR_ALL, PIECEWISE, prompts_of, tiny_spec, total_of
from planted_layers import check_a_batch
from test_engine_state_slots import AGAINST, StockElsewhere
from test_staged_states import PROMPTS, TIE, check_states, hook_of, one_by_one, states_of

from nwor_bench.analysis.parity.kv import KvVerdict
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import GreedyOutput
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.records.cell import Arguments
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.records.window import windows_of
from nwor_bench.workload.run_spec import RunSpec

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

OWN: dict[str, Any] = {"enable_prefix_caching": False, "gdn_prefill_backend": "triton"}

ENGINES = {"eager": EAGER, "full": FULL_FOR_ALL, "piecewise": PIECEWISE}


def specs(arguments: dict[str, Any], **changes: Any) -> tuple[RunSpec, RunSpec]:
    """Specs of an engine with a slot for each draft, and of one with a single slot."""
    given = {"requests": 4, "kv_cache_gib": 0.5, "max_model_len": 256, **changes}
    spec = tiny_spec(
        **given, engine_args=json.dumps({**OWN, **arguments}), against=json.dumps(AGAINST)
    )
    return spec.engine_specs[None], spec.engine_specs[Arguments.of(AGAINST)]


def fault_of(answers: Sequence[Sequence[int]], told: Sequence[GreedyOutput]) -> str | None:
    """The first difference from stock that no tie explains; None if there is none."""
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


def stocks(engine: VllmEngine) -> tuple[GreedyOutput, ...]:
    """What stock says; the engine is closed."""
    engine.set_modes(Cell("tiny", NworMode.OFF, ScvMode.OFF))
    told = engine.decode_greedily(PROMPTS, [40] * len(PROMPTS), ignore_eos=True, top=20)
    engine.close()
    gc.collect()
    torch.cuda.empty_cache()
    return told


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize("graphs", ENGINES)
def test_the_answers_are_those_of_stock(
    graphs: str,
    state: str,
    start_alone: Callable[..., VllmEngine],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = resolve_pair("tiny-states-mtp", cache_dir=tmp_path_factory.mktemp("pair"))
    stock, single = specs({**ENGINES[graphs], "mamba_ssm_cache_dtype": state})
    told = stocks(start_alone(pair, stock))
    engine = start_alone(pair, single)
    status = engine.status()
    assert (status.state_slots, status.states_unavailable, status.state_layers) == (1, None, 3)
    for scv in ("off", "graph", "adaptive"):
        staged = ask(engine, "stage", PROMPTS, greedy(), scv=scv)
        check_counts(engine, staged)
        check_states(engine, staged.windows, staged.total("draft_tokens"))
        assert fault_of(staged.tokens, told) is None
    for beside in (True, False):
        monkeypatch.setattr(hook_of(engine), "_stages_beside_prefill", beside)
        for interrupt in (True, False):
            assert fault_of(one_by_one(engine, "stage", interrupt), told) is None
            windows = windows_of(engine._rpc("nwor_drain")["windows"])
            assert {window.states_reason for window in windows} == {None}
            assert total_of(windows, "states_avoided") == 3 * total_of(windows, "draft_tokens")
    found = StockElsewhere(states_of(engine), monkeypatch)
    one_by_one(engine, "stage", interrupt=False)
    assert len(found.beside) >= 6
    assert max(found.alone + found.beside) < 1


@pytest.mark.parametrize("graphs", ENGINES)
def test_qwen3_5s_windows_are_checked_layer_by_layer(
    graphs: str, start_alone: Callable[..., VllmEngine], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Stock's kernel of its windows has the gated norm in it."""
    pair = resolve_pair("qwen3.5-quarter-shape", cache_dir=tmp_path_factory.mktemp("pair"))
    _, single = specs(ENGINES[graphs], kv_cache_gib=2, max_model_len=512)
    engine = start_alone(pair, single)
    assert engine.status().state_slots == 1
    found = check_a_batch(engine, prompts_of([20, 30, 25, 41]), scv="graph")
    assert (found.verdict, found.reason) == (KvVerdict.WITHIN, None)
    assert (found.states, found.convolutions, found.windows) == (12, 12, 2)
