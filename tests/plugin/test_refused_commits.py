"""A commit that the device refused: read late, told once, and nothing is staged any more."""

import logging
from threading import Thread
from typing import Any

import pytest
import torch
from test_written_rows import Ranks
from v2_pieces import make_hook, run_step

from nwor_bench.plugin.rank_vote import RankVote
from nwor_bench.plugin.runner_v2.staging import DeviceRefusals
from nwor_kernels.metadata import ERROR_OVERFLOW, ERROR_SLOT_RANGE

REQUESTS = ["a-1", "b-2"]


def reasons(hook: Any) -> list[str | None]:
    return [counts.fallback_reason for counts in hook.accumulator.windows]


@pytest.mark.slow  # vLLM's runner is imported
def test_a_server_stops_staging_once_it_has_read_a_refusal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hook = make_hook(monkeypatch)
    run_step(hook, REQUESTS)
    hook.buffers.errors[1] = ERROR_SLOT_RANGE  # what that window's commit left on the device
    run_step(hook, REQUESTS)
    commits = hook.buffers.commits
    with caplog.at_level(logging.ERROR, "vllm.nwor_bench"):
        hook.late.resolve(None)  # as a server does every few seconds
        for _ in range(3):
            run_step(hook, REQUESTS)
        hook.late.resolve(None)
    assert reasons(hook) == [None, None, "device_refused:slot_range"] + ["staging_stopped"] * 2
    assert hook.buffers.commits == commits == 2
    assert hook.nwor_mode == "stage"
    ours = [record for record in caplog.records if record.name == "vllm.nwor_bench"]
    (told,) = [record.getMessage() for record in ours]
    for word in ("slot_range", "1 of 2 layers", "may be wrong", "prefix cache"):
        assert word in told


@pytest.mark.slow
def test_a_sweeps_drain_still_names_layers_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading before the drain changes nothing; told once."""
    for early in (False, True):
        hook = make_hook(monkeypatch)
        run_step(hook, REQUESTS)
        hook.buffers.errors[1] = ERROR_OVERFLOW
        if early:
            hook.late._read_pending()
            assert hook.buffers.errors.tolist() == [0, 0]
        hook.drain({"a": 9, "b": 9})
        assert hook.device_errors() == ["layer 1: overflow"]
        assert hook.device_errors() == []


@pytest.mark.slow
@pytest.mark.parametrize("late_rank_reads", [False, True])
def test_ranks_stop_with_the_same_window(
    monkeypatch: pytest.MonkeyPatch, late_rank_reads: bool
) -> None:
    """Each rank reads its own flags when it reads; the window's vote tells the others."""
    both = Ranks(monkeypatch)
    faults: list[BaseException] = []

    def rank(number: int, hook: Any) -> None:
        try:
            for step in range(6):
                if number == 1 and step == 1:
                    hook.buffers.errors[0] = ERROR_OVERFLOW
                if step == 3 and (number == 1 or late_rank_reads):
                    hook.late.resolve(None)
                run_step(hook, REQUESTS)
            hook.late.resolve(None)
        except BaseException as fault:
            faults.append(fault)
            both.barrier.abort()

    with monkeypatch.context() as patch:
        patch.setattr(RankVote, "settle", lambda *_: None)  # while the hooks are made
        hooks = [make_hook(patch, vote) for vote in both.ranks]
    threads = [Thread(target=rank, args=pair) for pair in enumerate(hooks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    told = "rank_1:device_refused:overflow"
    expected = [None, None, None, told, "staging_stopped", "staging_stopped"]
    assert [reasons(hook) for hook in hooks] == [expected, expected]
    # The window of the vote had been committed: every draft of it was written again.
    assert [hook.buffers.direct_writes for hook in hooks] == [1, 1]


def test_flags_of_all_layers_are_one_bounded_reason() -> None:
    errors = torch.tensor([0, ERROR_OVERFLOW, ERROR_SLOT_RANGE], dtype=torch.int32)
    refusals = DeviceRefusals(errors)
    refusals.note([0, 0, 0])
    assert refusals.reason is None
    refusals.note(errors.tolist())
    assert refusals.reason == "device_refused:overflow+slot_range"
    for _ in range(1000):
        refusals.note([1, 1, 1])
    assert len(refusals.take()) <= 4 + 1
    assert refusals.reason == "device_refused:overflow+slot_range"
