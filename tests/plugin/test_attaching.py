"""Whatever fails while the hook attaches: vLLM goes on as it was, and somebody can read why."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from refusals import refused
from test_v2_hook import runner_of_two_requests

from nwor_bench.errors import BenchError

pytestmark = pytest.mark.slow  # vLLM's runner is imported

METHODS = ("execute_model", "prepare_attn", "sample")

NOT_ATTACHED = "the nwor-bench plugin is not attached to this worker"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Mode stage in the environment, one rank, and a folder for the metrics."""
    from nwor_bench.plugin.rank_vote import RankVote

    monkeypatch.setenv("VLLM_NWOR_MODE", "stage")
    monkeypatch.setenv("VLLM_SCV_MODE", "off")
    monkeypatch.delenv("VLLM_NWOR_METRICS", raising=False)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setenv("VLLM_NWOR_METRICS_DIR", str(tmp_path))
    monkeypatch.setattr(RankVote, "of_worker", RankVote)
    return tmp_path


def worker_of(runner: Any) -> Any:
    speculative = SimpleNamespace(
        model="x", method="ngram", uses_draft_kv_cache=lambda: False, rejection_sample_method="x"
    )
    config = SimpleNamespace(
        speculative_config=speculative,
        parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1),
        model_config=SimpleNamespace(model="target"),
    )
    return SimpleNamespace(model_runner=runner, vllm_config=config, rank=0)


def fallbacks(folder: Path) -> list[str]:
    """What a server shows of fallbacks, less the series that stands at 0 from the start."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
    text = generate_latest(registry).decode()
    lines = [line for line in text.splitlines() if line.startswith("nwor_fallback_count_total")]
    return [line for line in lines if not line.endswith(" 0.0")]


def methods_of(runner: Any) -> dict[str, Any]:
    return {name: getattr(runner, name) for name in METHODS}


def fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("planted")


STEPS: dict[str, str] = {
    "the runner's layers": "nwor_bench.plugin.runner_hook.attention_layers",
    "the validator": "nwor_bench.plugin.runner_v2.hook.DeviceValidator",
    "the ranks' agreement": "nwor_bench.plugin.runner_v2.hook.V2RunnerHook.agree",
    "the ranges": "nwor_bench.plugin.attaching.WindowRanges",
    "the hook's patches": "nwor_bench.plugin.runner_v2.hook.V2RunnerHook.attach",
    "the modes": "nwor_bench.plugin.runner_v2.hook.V2RunnerHook.set_modes",
}


@pytest.mark.parametrize("step", STEPS)
def test_a_fault_in_any_step_leaves_stock_vllm_and_its_reason(
    step: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import nwor_bench.plugin.attaching as attaching
    import nwor_bench.plugin.runner_v2.hook  # noqa: F401
    from nwor_bench.plugin.worker import NworWorkerExtension

    monkeypatch.setattr(STEPS[step], fails)
    runner = runner_of_two_requests()
    stock = methods_of(runner)
    worker = worker_of(runner)
    with caplog.at_level(logging.WARNING, "vllm.nwor_bench"):
        attaching.attach_hook(worker)
    assert methods_of(runner) == stock
    assert not hasattr(worker, attaching.HOOK)
    told = [record for record in caplog.records if record.name == "vllm.nwor_bench"]
    assert len(told) == 1
    assert told[0].exc_info is not None
    assert told[0].exc_info[0] is ZeroDivisionError
    with refused(NOT_ATTACHED, BenchError, value="attach:ZeroDivisionError (planted)"):
        NworWorkerExtension.nwor_status(worker)
    (line,) = fallbacks(folder)
    assert 'reason="attach:ZeroDivisionError"' in line
    assert line.endswith(" 1.0")


def test_metrics_that_cannot_be_written_stop_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nwor_bench.plugin.attaching import attach_hook

    monkeypatch.setenv("VLLM_NWOR_METRICS_DIR", str(folder / "gone"))
    runner = runner_of_two_requests()
    stock = methods_of(runner)
    worker = worker_of(runner)
    attach_hook(worker)
    assert methods_of(runner) == stock
    assert "attach:ConfigError" in worker.nwor_not_attached


def test_a_fault_of_another_rank_detaches_this_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that stayed attached would wait for the others in every window."""
    from nwor_bench.plugin.attaching import HOOK, attach_hook
    from nwor_bench.plugin.rank_vote import RankVote

    class Vote(RankVote):
        asked = 0

        def settle(self, reason: str | None, num_accepted: Any = ()) -> str | None:
            Vote.asked += 1
            return "rank_1:attach:OutOfMemoryError" if Vote.asked == 5 else reason

    monkeypatch.setattr(RankVote, "of_worker", Vote)
    runner = runner_of_two_requests()
    stock = methods_of(runner)
    worker = worker_of(runner)
    with caplog.at_level(logging.WARNING, "vllm.nwor_bench"):
        attach_hook(worker)
    assert Vote.asked == 5  # made, agreed twice, wrapped, switched on
    assert methods_of(runner) == stock
    assert not hasattr(worker, HOOK)
    assert worker.nwor_not_attached.startswith("rank_1:attach:OutOfMemoryError")
    assert len([r for r in caplog.records if r.name == "vllm.nwor_bench"]) == 1


@pytest.mark.parametrize("asked", [False, True])
def test_nothing_happens_if_nothing_is_asked_or_drafted(
    asked: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from nwor_bench.plugin.attaching import attach_hook

    if not asked:
        monkeypatch.delenv("VLLM_NWOR_MODE")
        monkeypatch.delenv("VLLM_SCV_MODE")
    runner = runner_of_two_requests()
    stock = methods_of(runner)
    worker = worker_of(runner)
    if asked:
        worker.vllm_config.speculative_config = None
    with caplog.at_level(logging.INFO, "vllm.nwor_bench"):
        attach_hook(worker)
    assert methods_of(runner) == stock
    assert vars(worker).keys() == {"model_runner", "vllm_config", "rank"}
    assert list(folder.iterdir()) == []
    told = [(r.levelname, "--speculative-config" in r.message) for r in caplog.records]
    assert told == [("WARNING", True)] * asked


@pytest.fixture
def drafts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Draft counts alternate, with modes left out."""
    monkeypatch.delenv("VLLM_NWOR_MODE")
    monkeypatch.delenv("VLLM_SCV_MODE")
    monkeypatch.setenv("VLLM_NWOR_DRAFTS", "interleave")
    return folder


def warm_up(worker: Any) -> Any:
    """What vLLM's worker does as it starts, with the plugin around it."""
    from nwor_bench.plugin.attaching import _attach_after

    return _attach_after(lambda _: "warm")(worker)


def drafting(runner: Any) -> Any:
    worker = worker_of(runner)
    worker.vllm_config.speculative_config.num_speculative_tokens = 2
    return worker


def test_draft_counts_are_measured_and_nothing_is_staged(drafts: Path) -> None:
    from nwor_bench.plugin.attaching import HOOK
    from nwor_bench.plugin.interleaving import ModeSwitch
    from nwor_bench.records.types import NworMode

    worker = drafting(runner_of_two_requests())
    assert warm_up(worker) == "warm"
    hook = getattr(worker, HOOK)
    assert hook.nwor_mode is NworMode.OFF
    assert isinstance(hook._interleaving, ModeSwitch)
    assert len(hook.accumulator.listeners) == 3  # vLLM's counts, ours by draft count, and tokens
    hook.detach()


@pytest.mark.parametrize(
    ("target", "planted", "words"),
    [
        ("nwor_bench.plugin.runner_v2.hook.V2RunnerHook.attach", fails, "planted"),
        (
            "nwor_bench.plugin.refusals.constant_drafter",
            lambda _: "SomeSpeculator",
            "SomeSpeculator drafts 2 tokens at every draft count",
        ),
    ],
    ids=["a fault", "a drafter of one count"],
)
def test_a_server_whose_counts_alternate_unmeasured_does_not_start(
    drafts: Path, monkeypatch: pytest.MonkeyPatch, target: str, planted: Any, words: str
) -> None:
    """The server's scheduler would go on to change k."""
    import nwor_bench.plugin.runner_v2.hook  # noqa: F401

    monkeypatch.setattr(target, planted)
    runner = runner_of_two_requests()
    stock = methods_of(runner)
    with refused("VLLM_NWOR_DRAFTS", naming=words):
        warm_up(drafting(runner))
    assert methods_of(runner) == stock


def test_a_fault_while_vllm_loads_the_plugin_is_not_vllms(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from nwor_bench import plugin
    from nwor_bench.plugin import attaching
    from nwor_bench.plugin.worker import NworWorkerExtension

    monkeypatch.setattr(plugin, "not_installed", None)
    monkeypatch.setattr(attaching, "install", fails)
    with caplog.at_level(logging.ERROR, "vllm.nwor_bench"):
        plugin.register()
    assert plugin.not_installed == "install:ZeroDivisionError (planted)"
    assert "planted" in caplog.text
    with refused(NOT_ATTACHED, BenchError, value="install:ZeroDivisionError (planted)"):
        NworWorkerExtension.nwor_status(SimpleNamespace())


@pytest.mark.usefixtures("folder")
def test_an_engine_of_the_harness_has_a_hook_without_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain decoding, with which draft counts are compared: its steps are read as others are."""
    from nwor_bench.plugin.attaching import HOOK, attach_hook

    monkeypatch.setenv("VLLM_NWOR_METRICS", "0")  # as the harness does
    worker = worker_of(runner_of_two_requests())
    worker.vllm_config.speculative_config = None
    worker.nwor_status = None  # of the harness' worker extension
    attach_hook(worker)
    assert getattr(worker, HOOK).attached
