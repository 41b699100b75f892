"""A capture that falls back leaves no graphs; a window that cannot be held ends staging."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_attention_fallbacks import ODDITIES, shared_buffers
from v2_pieces import hook_of, input_batch_of, make_parts, scheduled

from nwor_bench.records.types import NworMode, ScvMode

pytestmark = pytest.mark.slow  # vLLM's attention backends are imported


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Any:
    from wrapped_layers import WrappedLayers

    from nwor_bench.plugin.runner_v2 import graph_sets

    monkeypatch.setattr(graph_sets, "unused_stream", lambda device: None)
    monkeypatch.setattr(graph_sets, "capturing_on", nullcontext)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 1))
    return WrappedLayers(staged=True, monkeypatch=monkeypatch)


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("run", ["warm-up", "capture", "no run"])
@pytest.mark.parametrize(
    ("oddity", "odd"),
    [
        ("shared memory", 0),
        ("virtual requests", 1),
        ("silent write", 1),
        ("no key", 2),
        ("scale", 0),
    ],
)
def test_a_capture_that_falls_back_leaves_no_graphs(
    layers: Any, run: str, control: bool, oddity: str, odd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
    from wrapped_layers import DRAFTS, REQUESTS, ROWS, runner_of

    from nwor_bench.plugin.runner_v2.graph_sets import ControlGraphs, StagingGraphs

    shape = BatchExecutionDescriptor(
        CUDAGraphMode.FULL, num_tokens=ROWS, num_reqs=REQUESTS, uniform_token_count=DRAFTS + 1
    )
    stock = SimpleNamespace(graphs={shape: None}, decode_query_len=DRAFTS + 1)
    wanted = ("model model_state input_buffers intermediate_tensors attn_groups "
              "kv_cache_config lora_config use_aux_hidden_state_outputs")  # fmt: skip
    silent = run == "no run"  # write and attention both inside of compiled code
    runner = SimpleNamespace(
        cudagraph_manager=stock,
        device=torch.device("cpu"),
        block_tables=runner_of().block_tables,
        **dict.fromkeys(wanted.split()),
    )
    arguments: dict[str, Any] = {"buffers": shared_buffers(layers)}
    reason = "stage:activations_reused"
    if oddity in ODDITIES:
        arguments, reason = ODDITIES[oddity][0](odd), f"attention:{ODDITIES[oddity][1]}"

    def capture(*_: Any, **__: Any) -> None:
        assert layers.window.is_control is control
        if silent:
            return
        layers.forward(**(arguments if run == "warm-up" else {}))
        layers.forward(**(arguments if run == "capture" else {}))

    kind = ControlGraphs if control else StagingGraphs
    graphs = kind(runner, layers.window, layers.staging, layers.inputs, 0)
    monkeypatch.setattr(graphs, "_make_manager", lambda: SimpleNamespace(capture=capture))
    graphs.capture()
    assert graphs.unavailable == f"graph_capture:{'layer_not_staged' if silent else reason}"
    assert graphs.shapes == {}
    assert not layers.window.is_staging
    assert layers.window.batch is None
    layers.begin("whole step")  # the window serves again
    layers.window.forget()


def test_after_one_window_that_cannot_be_held_no_other_is_tried(
    layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_v2_hook import runner_of_two_requests

    planned = []

    def plan(*_: Any, **__: Any) -> Any:
        planned.append(layers.begin("whole step"))
        layers.window.forget()
        return planned[-1], None

    parts = make_parts(
        layers.staging,
        SimpleNamespace(plan=plan),
        window=layers.window,
        inputs=SimpleNamespace(open=lambda _: layers.inputs.open_capture(2)),
    )
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    runner = runner_of_two_requests()
    runner.num_speculative_steps = 3
    hook = hook_of(monkeypatch, parts, runner)
    hook.agree()
    hook.attach()
    hook.set_modes(NworMode.STAGE, ScvMode.OFF)
    for _ in range(3):
        requests = ["a-1", "b-2"]
        runner.execute_model(scheduled(requests, drafts=3))
        runner.prepare_attn(input_batch_of(requests, 3))
        layers.forward(buffers=shared_buffers(layers))
        runner.sample(None, None, None)
    reasons = [window.fallback_reason for window in hook.drain(None)]
    assert reasons == ["stage:activations_reused"] * 3
    assert len(planned) == 1
    assert hook.staging_unavailable == "stage:activations_reused"
