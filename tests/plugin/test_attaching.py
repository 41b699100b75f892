"""Whatever fails while the hook attaches: vLLM goes on as it was, and somebody can read why."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from planted_windows import shown
from refusals import refused
from test_v2_hook import runner_of_two_requests

from nwor_bench import plugin
from nwor_bench.errors import BenchError
from nwor_bench.plugin import attaching
from nwor_bench.plugin.attaching import HOOK, attach_hook
from nwor_bench.plugin.interleaving import ModeSwitch
from nwor_bench.plugin.rank_vote import RankVote
from nwor_bench.plugin.worker import NworWorkerExtension
from nwor_bench.records.types import NworMode

pytestmark = pytest.mark.slow  # vLLM's runner is imported

NOT_ATTACHED = "the nwor-bench plugin is not attached to this worker"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Mode stage in the environment, one rank, and a folder for the metrics."""
    monkeypatch.setenv("VLLM_NWOR_MODE", "stage")
    monkeypatch.setenv("VLLM_SCV_MODE", "off")
    monkeypatch.delenv("VLLM_NWOR_METRICS", raising=False)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setenv("VLLM_NWOR_METRICS_DIR", str(tmp_path))
    monkeypatch.setattr(RankVote, "of_worker", RankVote)
    return tmp_path


def worker_of(**more: Any) -> Any:
    """vLLM's worker with a V2 runner, and that runner's methods as they are."""
    speculative = SimpleNamespace(
        model="x", method="ngram", uses_draft_kv_cache=lambda: False, rejection_sample_method="x",
        num_speculative_tokens=2,
    )  # fmt: skip
    config = SimpleNamespace(
        speculative_config=speculative,
        parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1),
        model_config=SimpleNamespace(model="target"),
    )
    worker = SimpleNamespace(model_runner=runner_of_two_requests(), vllm_config=config, rank=0)
    worker.stock = methods_of(worker)
    return SimpleNamespace(**vars(worker) | more)


def methods_of(worker: Any) -> dict[str, Any]:
    names = ("execute_model", "prepare_attn", "sample")
    return {name: getattr(worker.model_runner, name) for name in names}


def is_stock(worker: Any) -> bool:
    return methods_of(worker) == worker.stock and not hasattr(worker, HOOK)


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "vllm.nwor_bench"]


def fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("planted")


V2_HOOK = "nwor_bench.plugin.runner_v2.hook"


@pytest.mark.parametrize(
    "step",
    [
        "nwor_bench.plugin.runner_hook.attention_layers",
        f"{V2_HOOK}.DeviceValidator",
        f"{V2_HOOK}.V2RunnerHook.agree",
        "nwor_bench.plugin.attaching.WindowRanges",
        f"{V2_HOOK}.V2RunnerHook.attach",
        f"{V2_HOOK}.V2RunnerHook.set_modes",
    ],
)
def test_a_fault_in_any_step_leaves_stock_vllm_and_its_reason(
    step: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step, fails)
    worker = worker_of()
    attach_hook(worker)
    assert is_stock(worker)
    (record,) = told(caplog)
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
    with refused(NOT_ATTACHED, BenchError, value="attach:ZeroDivisionError (planted)"):
        NworWorkerExtension.nwor_status(worker)
    lines = [line for line in shown(folder).splitlines() if "nwor_fallback_count_total" in line]
    (line,) = [line for line in lines if line[0] != "#" and not line.endswith(" 0.0")]
    assert 'reason="attach:ZeroDivisionError"' in line
    assert line.endswith(" 1.0")


def test_metrics_that_cannot_be_written_stop_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_NWOR_METRICS_DIR", str(folder / "gone"))
    worker = worker_of()
    attach_hook(worker)
    assert is_stock(worker)
    assert "attach:ConfigError" in worker.nwor_not_attached


def test_a_fault_of_another_rank_detaches_this_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that stayed attached would wait for the others in every window."""

    class Vote(RankVote):
        asked = 0

        def settle(self, reason: str | None, num_accepted: Any = ()) -> str | None:
            Vote.asked += 1
            return "rank_1:attach:OutOfMemoryError" if Vote.asked == 5 else reason

    monkeypatch.setattr(RankVote, "of_worker", Vote)
    worker = worker_of()
    attach_hook(worker)
    assert Vote.asked == 5  # made, agreed twice, wrapped, switched on
    assert is_stock(worker)
    assert worker.nwor_not_attached.startswith("rank_1:attach:OutOfMemoryError")
    assert len(told(caplog)) == 1


@pytest.mark.parametrize("asked", [False, True])
def test_nothing_happens_if_nothing_is_asked_or_drafted(
    asked: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = worker_of()
    if asked:
        worker.vllm_config.speculative_config = None
    else:
        monkeypatch.delenv("VLLM_NWOR_MODE")
        monkeypatch.delenv("VLLM_SCV_MODE")
    before = dict(vars(worker))
    attach_hook(worker)
    assert is_stock(worker)
    assert vars(worker) == before
    assert list(folder.iterdir()) == []
    warnings = [(r.levelname, "--speculative-config" in r.message) for r in told(caplog)]
    assert warnings == [("WARNING", True)] * asked


def test_an_engine_of_the_harness_has_a_hook_without_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain decoding, with which draft counts are compared: its steps are read as others are."""
    monkeypatch.setenv("VLLM_NWOR_METRICS", "0")  # as the harness does
    worker = worker_of(nwor_status=None)  # of the harness' worker extension
    worker.vllm_config.speculative_config = None
    attach_hook(worker)
    assert getattr(worker, HOOK).attached


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft counts alternate, with modes left out."""
    monkeypatch.delenv("VLLM_NWOR_MODE")
    monkeypatch.delenv("VLLM_SCV_MODE")
    monkeypatch.setenv("VLLM_NWOR_DRAFTS", "interleave")


def warm_up(worker: Any) -> Any:
    """What vLLM's worker does as it starts, with the plugin around it."""
    return attaching._attach_after(lambda _: "warm")(worker)


@pytest.mark.usefixtures("drafts")
def test_draft_counts_are_measured_and_nothing_is_staged() -> None:
    worker = worker_of()
    assert warm_up(worker) == "warm"
    hook = getattr(worker, HOOK)
    assert hook.nwor_mode is NworMode.OFF
    assert isinstance(hook._interleaving, ModeSwitch)
    assert len(hook.accumulator.listeners) == 3  # vLLM's counts, ours by draft count, and tokens
    hook.detach()


@pytest.mark.usefixtures("drafts")
@pytest.mark.parametrize(
    ("target", "planted", "words"),
    [
        (f"{V2_HOOK}.V2RunnerHook.attach", fails, "planted"),
        (
            "nwor_bench.plugin.refusals.constant_drafter",
            lambda _: "SomeSpeculator",
            "SomeSpeculator drafts 2 tokens at every draft count",
        ),
    ],
    ids=["a fault", "a drafter of one count"],
)
def test_a_server_whose_counts_alternate_unmeasured_does_not_start(
    monkeypatch: pytest.MonkeyPatch, target: str, planted: Any, words: str
) -> None:
    """The server's scheduler would go on to change k."""
    monkeypatch.setattr(target, planted)
    worker = worker_of()
    with refused("VLLM_NWOR_DRAFTS", naming=words):
        warm_up(worker)
    assert is_stock(worker)


def test_a_fault_while_vllm_loads_the_plugin_is_not_vllms(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "not_installed", None)
    monkeypatch.setattr(attaching, "install", fails)
    plugin.register()
    assert plugin.not_installed == "install:ZeroDivisionError (planted)"
    assert "planted" in caplog.text
    with refused(NOT_ATTACHED, BenchError, value="install:ZeroDivisionError (planted)"):
        NworWorkerExtension.nwor_status(SimpleNamespace())
