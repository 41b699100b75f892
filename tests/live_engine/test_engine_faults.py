"""One engine: after any fault the tokens stay right and the fallback is counted; the gates see
faults of one value and of one layer.
"""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_tools import (
    abort_requests,
    prompts_of,
    run_cell,
    total,
    worker_of,
)
from kv_gate_tools import check_whole, kv_results
from planted_layers import LAYER_FAULTS, LayerFault, check_a_batch, keep_sizes, smallest_seen

from nwor_bench.analysis.parity.kv import KvVerdict
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import BatchOutput

pytestmark = pytest.mark.engine

PROMPTS = prompts_of([24, 31, 18, 40, 27, 22, 35, 29])


@pytest.fixture(scope="module")
def reference(engine: VllmEngine) -> BatchOutput:
    """off x off on the same prompts."""
    return run_cell(engine, "off", "off", PROMPTS)


Check = Callable[[BatchOutput, str], None]


@pytest.fixture
def check(reference: BatchOutput, record_property: Callable[[str, str], None]) -> Check:
    """Hold what every fault leaves, and tell the support table the reason."""

    def hold(output: BatchOutput, reason: str) -> None:
        check_fallback(output, reference, reason)
        record_property("written_directly", reason)

    return hold


def check_fallback(output: BatchOutput, reference: BatchOutput, reason: str) -> None:
    """Same tokens, some windows fell back with the reason, and the counters still agree."""
    assert output.token_ids == reference.token_ids
    fell_back = [w for w in output.windows if w.fallback_reason]
    assert fell_back
    assert {w.fallback_reason for w in fell_back} == {reason}
    assert all(w.staged_tokens == w.committed_tokens == 0 for w in fell_back)
    accepted = total(output, "committed_tokens") + sum(w.accepted_tokens for w in fell_back)
    assert accepted == output.counters.accepted_tokens


def every_third() -> Callable[[], bool]:
    """True in one call of three."""
    calls = iter(range(10**9))
    return lambda: next(calls) % 3 == 1


@pytest.mark.row("faults inside a window")
@pytest.mark.parametrize("layer", [*(pytest.param(n, marks=pytest.mark.long) for n in (0, 1)), 2])
def test_a_layer_that_cannot_stage(
    engine: VllmEngine, check: Check, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    from nwor_bench.plugin.runner_v1.staging import StagingBuffers

    stage = StagingBuffers.stage
    strikes = every_third()

    def broken(self: StagingBuffers, number: int, *args: torch.Tensor) -> str:
        return "overflow" if number == layer and strikes() else stage(self, number, *args)

    monkeypatch.setattr(StagingBuffers, "stage", broken)
    output = run_cell(engine, "stage", "off", PROMPTS)
    check(output, "stage:overflow")
    assert total(output, "staged_tokens") > 0


@pytest.mark.row("faults inside a window")
def test_a_commit_that_raises(
    engine: VllmEngine, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nwor_bench.plugin.runner_v1 import staging

    commit = staging.commit_windows_reference
    strikes = every_third()

    def broken(*args: torch.Tensor, **named: Any) -> None:
        if strikes():
            raise RuntimeError("planted")
        commit(*args, **named)

    monkeypatch.setattr(staging, "commit_windows_reference", broken)
    check(run_cell(engine, "stage", "off", PROMPTS), "commit:RuntimeError")


def test_a_step_that_dies_is_closed_by_the_next(
    engine: VllmEngine, reference: BatchOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception between forward and sampling leaves a window open; the engine goes on."""
    from nwor_bench.plugin.runner_v1.hook import V1RunnerHook
    from nwor_bench.plugin.step import Step

    hook: V1RunnerHook = worker_of(engine).nwor_hook
    begin = V1RunnerHook._begin

    def begin_and_die(self: V1RunnerHook, step: Step) -> None:
        begin(self, step)
        raise RuntimeError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(V1RunnerHook, "_begin", begin_and_die)
        with pytest.raises(RuntimeError, match="planted"):
            run_cell(engine, "stage", "off", PROMPTS[:1])
    assert hook.window is not None
    assert hook.window.is_staging
    abort_requests(engine)
    output = run_cell(engine, "stage", "off", PROMPTS)
    assert hook.window.batch is None
    assert output.token_ids == reference.token_ids


def test_without_async_scheduling_no_kernel_counts_tokens(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host is given the ids anyway, so off x off adds no device work."""
    from nwor_bench.plugin.runner_v1 import hook

    monkeypatch.setattr(hook, "count_sampled", lambda *_: pytest.fail("tokens were counted"))
    output = run_cell(engine, "off", "off", PROMPTS)
    assert total(output, "draft_tokens") == output.counters.draft_tokens > 0
    assert total(output, "accepted_tokens") == output.counters.accepted_tokens > 0


def test_debug_logs_begin_and_commit_of_each_window(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_of(engine).nwor_hook.late, "debug", True)
    with caplog.at_level(logging.INFO, "vllm.nwor_bench"):
        output = run_cell(engine, "stage", "off", PROMPTS[:2])
    begins = [text for text in caplog.messages if text.startswith("nwor begin")]
    commits = [text for text in caplog.messages if text.startswith("nwor commit")]
    assert len(begins) == len(commits) == len(output.windows)
    for text, window in zip(commits, output.windows, strict=True):
        assert f"staged {window.staged_tokens}, committed {window.committed_tokens}" in text


def test_hooks_come_off_and_go_on_again(engine: VllmEngine, reference: BatchOutput) -> None:
    worker = worker_of(engine)
    wrapped = {"execute_model", "_model_forward", "_sample", "sample_tokens"}
    assert wrapped <= set(vars(worker.model_runner))
    engine.set_hooks(False)
    try:
        assert not wrapped & set(vars(worker.model_runner))
        bare = run_cell(engine, "stage", "off", PROMPTS)
        assert bare.token_ids == reference.token_ids
        assert bare.windows == []
    finally:
        engine.set_hooks(True)
    again = run_cell(engine, "stage", "off", PROMPTS)
    assert again.token_ids == reference.token_ids
    assert total(again, "staged_tokens") > 0


ON_CPU = [
    fault for fault in LAYER_FAULTS if "sliding" not in fault.name and "sinks" not in fault.name
]
SIZES: dict[str, float | None] = {}


@pytest.mark.parametrize("cell", [("stage", "off"), ("stage", "graph"), ("control", "off")])
def test_a_sound_batch_passes(engine: VllmEngine, cell: tuple[str, str]) -> None:
    found = check_a_batch(engine, PROMPTS, *cell)
    assert found.verdict is KvVerdict.WITHIN, found.reason
    assert found.layers == found.attended == found.whole_caches == 3
    assert found.windows == 2
    assert (found.rejected > 0) == (cell[0] == "stage")  # else no slot had to stay as it was
    assert found.written == found.layers * sum([2 * 8 * 5]) - found.layers * found.rejected


@pytest.mark.parametrize("fault", ON_CPU, ids=lambda fault: fault.name)
def test_a_fault_of_one_layer_is_seen_in_that_layer(engine: VllmEngine, fault: LayerFault) -> None:
    smallest, reason = smallest_seen(engine, PROMPTS, fault)
    SIZES[fault.name] = smallest
    assert smallest is not None
    assert smallest <= fault.must
    assert "local gate: model.layers.1.self_attn.attn" in reason
    keep_sizes("CPU, tiny pair, float32", SIZES)


def test_the_cache_is_left_as_the_commit_left_it(engine: VllmEngine) -> None:
    """A batch that was checked gives the tokens of one that was not."""

    def tokens() -> Any:
        return run_cell(engine, "stage", "off", PROMPTS, 16).token_ids

    engine.check_layers(8)
    try:
        checked = tokens()
    finally:
        assert engine.check_layers(None)[0]
    assert checked == tokens()


COMMITTED = sum(map(len, PROMPTS)) + 8 * 39


@pytest.mark.parametrize("one_attention", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_draft_model(engine: VllmEngine, one_attention: bool) -> None:
    """Bit for bit, and with the tolerances of a GPU: of mode off against itself."""
    scv_modes = ("off", "graph", "adaptive")
    for result in kv_results(engine, PROMPTS, one_attention=one_attention, scv_modes=scv_modes):
        check_whole(result, COMMITTED)
        assert result.verdict is (KvVerdict.EXACT if one_attention else KvVerdict.WITHIN)
