"""Real vLLM on a GPU with gated delta nets: their states are staged in eager steps and in graphs.

As on a CPU (`test_staged_states.py`), a difference of tokens is a fault unless they are a tie.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from checklist_tools import ask, check_counts, check_partial, greedy
from engine_tools import FULL_FOR_ALL, PIECEWISE, run_interleaved, tiny_spec, total_of
from test_staged_states import CELLS, PROMPTS, check_states, difference, states_of

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import resolve_pair

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

OWN: dict[str, Any] = {"enable_prefix_caching": False, "gdn_prefill_backend": "triton"}


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "graphs",
    [{"enforce_eager": True}, FULL_FOR_ALL, PIECEWISE],
    ids=["eager", "full", "piecewise"],
)
def test_staged_states_leave_the_answers(
    graphs: dict[str, Any],
    state: str,
    start_alone: Callable[..., VllmEngine],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    pair = resolve_pair("tiny-states-mtp", cache_dir=tmp_path_factory.mktemp("pair"))
    arguments = json.dumps({**OWN, **graphs, "mamba_ssm_cache_dtype": state})
    engine = start_alone(pair, tiny_spec(requests=4, kv_cache_gib=0.5, engine_args=arguments))
    status = engine.status()
    assert (status.states_unavailable, status.state_layers) == (None, 3)
    stock = ask(engine, "off", PROMPTS, greedy())
    check_partial(stock)
    for mode, scv in (("stage", "off"), ("stage", "graph"), ("stage", "adaptive")):
        staged = ask(engine, mode, PROMPTS, greedy(), scv=scv)
        check_counts(engine, staged)
        check_states(engine, staged.windows, staged.total("draft_tokens"))
        assert difference(engine, staged.tokens, stock.tokens) is None
    control = ask(engine, "control", PROMPTS, greedy())
    assert control.total("states_committed") == 0
    assert difference(engine, control.tokens, stock.tokens) is None
    output, windows, _ = run_interleaved(engine, PROMPTS, cells=CELLS, seed="c")  # it visits stage
    assert difference(engine, output.token_ids, stock.tokens) is None
    check_states(engine, windows[CELLS[1]], total_of(windows[CELLS[1]], "draft_tokens"))
    assert states_of(engine)._staged == []
