"""Captured windows committed in one launch with vLLM's update, or in two if anything is unusual."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import pytest
import torch
from fake_engine import LAYERS as STAND_IN_LAYERS
from fake_engine import FakeEngine, FakeKvCache
from live_windows import switching
from torch import Tensor
from toy_run import Runner
from v2_pieces import (
    LAYERS,
    K,
    PieceBatch,
    PiecePlanner,
    PieceStaging,
    hook_of,
    input_batch_of,
    make_parts,
    make_runner,
    scheduled,
)

from nwor_bench.analysis.analyse import analyse
from nwor_bench.plugin.layers import LayerCache
from nwor_bench.plugin.window import NOT_FINISHED
from nwor_bench.records.store import RunData
from nwor_bench.records.types import Cell, NworMode, ScvMode, WindowRecord

pytestmark = pytest.mark.slow  # vLLM's runner is imported

REQUESTS = ["a-1", "b-2", "c-3"]


class Graph(Enum):
    """vLLM's CUDAGraphMode."""

    FULL = 1


class Descriptor(NamedTuple):
    """vLLM's of one graph."""

    cg_mode: Graph
    uniform_token_count: int | None = K + 1


class CapturedBatch(PieceBatch):
    """A window of a captured graph."""

    certain, path, copied, sources = 1, "full graph, merge", False, ("captured",)
    commit_shape = ("commit", len(REQUESTS) * (K + 1), K + 1, None)


class JoiningStaging(PieceStaging):
    """Staging whose commit can run an update; `launched` says what each launch did."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []
        self.went_wrong = False
        self.problem: Exception | None = None
        self._call: Any = None

    def open(self, batch: Any) -> None:
        self._call = None

    def update_in_commit(self, kernel: Any, call: Any) -> None:
        self._call = call

    def validate_in_commit(self, through: Callable[..., None]) -> None:
        self._call = None

    def commit(self, slots: Tensor, accepted: Tensor) -> str:
        if self.problem is not None:
            raise self.problem
        self.written += int(accepted.sum())
        self.launched.append("commit" if self._call is None else "commit and update")
        return ""

    def bind_update(self, batch: Any, kernel: Any, call: Any) -> tuple[Any, Any]:
        def launch(*tensors: Tensor) -> None:
            if self.problem is not None:
                raise self.problem
            self.written += int(tensors[2].sum())
            self.launched.append("ready")

        return call.states(None), launch

    def forget_launches(self) -> None:
        """None are bound here."""

    def write_directly(self, layers: list[int], slots: Tensor) -> None:
        self.launched.append("direct")


class Machine:
    """A hook on a runner with one full graph, which calls `post_update` as vLLM does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from nwor_bench.plugin.runner_v2.stock_update import StockUpdate

        self.staging, self.planner = JoiningStaging(), PiecePlanner(CapturedBatch)
        self.updates = 0
        self.descriptor = Descriptor(Graph.FULL)
        self.graphs = SimpleNamespace(
            capture=lambda: None, give_up=lambda reason: None, unavailable=None, shapes={},
            replay=lambda desc: None, why_direct=lambda *_: None,
        )  # fmt: skip
        parts = make_parts(self.staging, self.planner, graphs=self.graphs, slots=0)
        module = SimpleNamespace(post_update=self._stock)
        self.more: tuple[Any, ...] = ()
        self._states = [torch.zeros(8), torch.zeros(8, 1), None, torch.zeros(8, 9), torch.zeros(8)]

        def postprocess(*step: Tensor) -> None:
            first, sampled, counts, rejected, starts = step
            computed, last, bins, tokens, total = self._states
            module.post_update(
                first, computed, last, bins, sampled, counts, rejected, starts, tokens, total,
                *self.more,
            )  # fmt: skip

        self.sampled = torch.full((len(REQUESTS),), 2, dtype=torch.int32)
        self.runner = make_runner(
            cudagraph_manager=SimpleNamespace(
                dispatch=lambda: self.descriptor, run_fullgraph=lambda desc: None
            ),
            sample=lambda hidden, batch, grammar: (None, self.sampled[: batch.num_reqs], None),
            postprocess_sampled=postprocess,
        )
        update, adaptive = StockUpdate(object(), module), ScvMode.ADAPTIVE
        self.hook = hook_of(monkeypatch, parts, self.runner, scv=adaptive, update=update)
        self.hook.validator.warm_up = lambda drafts: None
        self.hook.validator.validate = lambda *_: SimpleNamespace(
            num_accepted=self.sampled - 1, path="device", fallback_reason=None
        )
        self.hook.attach()
        self.set_modes("stage", "adaptive")
        self.staging.launched.clear()

    def set_modes(self, nwor: str, scv: str) -> None:
        self.hook.set_modes(NworMode(nwor), ScvMode(scv))

    def _stock(self, *_: Any) -> None:
        self.updates += 1
        self.staging.launched.append("update")

    def run(
        self,
        *,
        until: str = "",
        new: Any = (),
        names: list[str] = REQUESTS,
        drafts: int | Sequence[int] = K,
        grammar: Any = None,
    ) -> None:
        """One step; `until` names the call of vLLM's before which it dies."""
        runner, batch = self.runner, input_batch_of(names, drafts)
        waits = grammar is not None
        step = scheduled(names, new=new, drafts=drafts, pending_structured_output_tokens=waits)
        runner.execute_model(step)
        runner.cudagraph_manager.dispatch()
        runner.prepare_attn(batch)
        runner.cudagraph_manager.run_fullgraph(self.descriptor)
        if until == "sample":
            return
        runner.sample(None, batch, grammar)
        runner.draft_tokens_handler.req_ids = names
        if until != "update":
            one, counts = torch.zeros(len(names), dtype=torch.int64), self.sampled[: len(names)]
            runner.postprocess_sampled(one, torch.zeros(len(names), K + 1), counts, one, one)

    def drained(self) -> list[tuple[int, str | None, str | None]]:
        """(staged tokens, fallback reason, SCV path) of each window."""
        windows = self.hook.drain(None)
        return [(w.staged_tokens, w.fallback_reason, w.scv_path) for w in windows]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


STAGED = (len(REQUESTS) * K, None, "device")


def test_one_launch_serves_commit_and_update_and_later_windows_are_ready(machine: Machine) -> None:
    for _ in range(3):
        machine.run()
    machine.run(names=REQUESTS[:2])
    machine.run()
    one = ["commit and update", "ready", "ready"]
    assert machine.staging.launched == [*one, "commit and update", "ready"]
    assert len(machine.planner.certain_at_once) == 2
    counters = dict(machine.hook.validator.counters)
    assert counters == {"scv_device_validations": 5, "scv_launches": 5}
    assert machine.drained() == [STAGED, STAGED, STAGED, (2 * K, None, "device"), STAGED]
    assert machine.hook._step is None


@pytest.mark.parametrize("drafts", [None, torch.zeros(3, K)])
def test_an_update_that_brings_drafts_of_a_pipeline_is_vllms(
    machine: Machine, drafts: Tensor | None
) -> None:
    """vLLM 0.33's form; without a pipeline its drafts are None."""
    machine.more = (drafts, torch.zeros(8, K))
    for _ in range(2):
        machine.run()
    assert machine.updates == (0 if drafts is None else 2)
    assert [window[:2] for window in machine.drained()] == [STAGED[:2]] * 2


def test_windows_of_unequal_counts_are_never_ready_and_none_runs_as_one_that_is(
    machine: Machine,
) -> None:
    """Drafts and tokens in all equal an equal window's: vLLM gives them another graph."""
    one, others = Descriptor(Graph.FULL, 2), Descriptor(Graph.FULL, None)
    for graph, drafts in [(one, 1), (others, [2, 1, 0]), (others, [0, 1, 2]), (one, 1)]:
        machine.descriptor = graph
        machine.run(drafts=drafts)
    assert machine.staging.launched == [*["commit and update"] * 3, "ready"]


def test_a_graph_of_equal_windows_runs_no_others() -> None:
    """What ready windows and captured plans rest on, who compare totals only: vLLM's own rule."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, _is_compatible
    from vllm.v1.worker.utils import get_uniform_decode_token_count

    equal = 0
    for drafts in product(range(5), repeat=3):
        tokens, most = sum(drafts) + 3, max(drafts) + 1
        count = get_uniform_decode_token_count(3, tokens, most, decode_graph_eligible=True)
        for length in range(2, 6):
            graph = BatchExecutionDescriptor(
                CUDAGraphMode.FULL, num_tokens=4 * length, num_reqs=4, uniform_token_count=length
            )
            runs = _is_compatible(graph, 3, tokens, count, 0, most, 1)
            assert runs == (drafts == (length - 1,) * 3)
            equal += runs
    assert equal == 4


def test_drafts_that_a_grammar_forbids_are_left_out_of_ready_windows_too(machine: Machine) -> None:
    grammar = SimpleNamespace(
        structured_output_request_ids=["b-2", "c-3"], num_acceptable_drafts=[1, 0]
    )
    for forbids in (None, grammar, grammar, None):
        machine.run(grammar=forbids)
    assert machine.staging.launched == ["commit and update", *["ready"] * 3]
    windows = machine.hook.drain(None)
    assert [window.uncounted_draft_tokens for window in windows] == [0, 3, 3, 0]
    assert [window.drafts_per_position for window in windows][1] == (2, 1)
    assert [window.staged_tokens for window in windows] == [len(REQUESTS) * K] * 4


@pytest.mark.parametrize("modes", ["off off", "off adaptive", "control adaptive"])
def test_other_modes_leave_the_update_to_vllm(machine: Machine, modes: str) -> None:
    machine.run()
    machine.set_modes(*modes.split())
    for _ in range(2):
        machine.run()
    assert machine.staging.launched == ["commit and update", "update", "update"]


def test_an_update_that_does_not_compile_is_a_fallback_of_every_window_that_lacks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nwor_bench.plugin.runner_v2 import step_windows

    def fail(*_: Any) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(step_windows, "compile_with_update", fail)
    machine = Machine(monkeypatch)
    for _ in range(2):
        machine.run()
    machine.set_modes("stage", "off")  # whose windows never have it
    machine.run()
    machine.set_modes("stage", "adaptive")
    machine.run()
    assert machine.staging.launched == ["commit", "update"] * 4
    why = "update_not_joined:RuntimeError"
    found = [(w.staged_tokens, w.scv_fallback_reason) for w in machine.hook.drain(None)]
    staged = len(REQUESTS) * K
    assert found == [(staged, why), (staged, why), (staged, None), (staged, why)]
    assert machine.hook.validator.fallbacks == {why: 1}  # set to 0 as modes are set
    assert machine.hook.validator.counters["scv_fallback_count"] == 1


def test_every_windows_last_phase_ends_behind_the_update(machine: Machine) -> None:
    marked: list[tuple[str, int]] = []

    def mark(step: Any, name: str) -> None:
        marked.append((name, len(machine.staging.launched)))

    machine.hook.clock.phase = mark
    machine.run()
    machine.set_modes("off", "off")
    machine.run()
    assert machine.staging.launched == ["commit and update", "update"]
    assert [place for name, place in marked if name == "commit_ms"] == [1, 2]


def wrap_commit(machine: Machine) -> None:
    """Wrap what an instrument wraps that is to see every commit."""
    window = machine.hook.window
    window.commit = window.commit


NEW = SimpleNamespace(
    req_id="c-3", num_computed_tokens=16, prompt_token_ids=[1], prefill_token_ids=[1]
)
JOINED = "commit and update"
REFUSED = "device_refused:overflow"


def leave_to_stock(machine: Machine) -> None:
    """By the context: the window of the step before was staged."""
    machine.graphs.why_direct = lambda *_: "slower_than_stock"


@pytest.mark.parametrize(
    ("disturb", "new", "window"),
    [
        (lambda _: None, [NEW], STAGED),
        (wrap_commit, [], STAGED),
        (lambda machine: machine.set_modes("stage", "adaptive"), [], STAGED),
        (leave_to_stock, [], STAGED),
        (lambda machine: machine.hook.refusals.note([1] * LAYERS), [], (0, REFUSED, "device")),
        (
            lambda machine: machine.hook.refusals.settle(f"rank_1:{REFUSED}"),
            [],
            (0, "staging_stopped", "device"),
        ),
    ],
    ids=["new request", "instrument", "modes set", "slower", "refusal", "rank's refusal"],
)
def test_what_ends_ready_windows(machine: Machine, disturb: Any, new: Any, window: Any) -> None:
    machine.run()
    disturb(machine)
    machine.run(new=new)
    assert machine.staging.launched == [JOINED, JOINED if window == STAGED else "update"]
    assert machine.drained() == [STAGED, window]
    if window == STAGED:
        assert machine.planner.certain_at_once == [False, bool(new)]


def test_windows_are_ready_again_once_an_instrument_is_gone(machine: Machine) -> None:
    machine.run()
    wrap_commit(machine)
    machine.run()
    del machine.hook.window.commit
    machine.run()
    assert machine.staging.launched == [JOINED, JOINED, "ready"]


@pytest.mark.parametrize("ready", [False, True])
def test_a_window_that_cannot_be_committed_is_written_and_vllm_updates(
    machine: Machine, ready: bool
) -> None:
    if ready:
        machine.run()
    machine.staging.launched.clear()
    machine.staging.problem = RuntimeError("cuLaunchKernelEx")
    machine.run()
    assert machine.staging.launched == ["direct", "update"]
    assert machine.drained()[-1] == (0, "commit:RuntimeError", None)
    machine.staging.problem = None
    machine.run()
    assert machine.drained() == [STAGED]


@pytest.mark.parametrize("dies_before", ["sample", "update"])
@pytest.mark.parametrize("ready", [False, True])
def test_a_step_that_dies_is_written_directly_and_leaves_nothing_to_the_next(
    machine: Machine, ready: bool, dies_before: str
) -> None:
    if ready:
        machine.run()
    machine.run(until=dies_before)
    machine.staging.launched.clear()
    machine.run()
    assert machine.staging.launched[0] == "direct"
    assert machine.updates == 0
    assert machine.drained()[-2:] == [(0, NOT_FINISHED, None), STAGED]
    machine.run(until=dies_before)
    machine.set_modes("off", "off")  # the next step is vLLM's alone
    machine.staging.launched.clear()
    machine.run()
    assert machine.staging.launched == ["update"]
    assert [reason for _, reason, _ in machine.drained()] == [NOT_FINISHED, None]


def test_interleaved_windows_are_ready_again_after_each_switch(machine: Machine) -> None:
    switching(machine.hook, [("off", "off"), ("stage", "adaptive")]).start()
    for _ in range(48):
        machine.run()
    launched = machine.staging.launched
    assert launched.count("commit and update") == 1
    assert launched.count("update") == 24
    assert launched.count("ready") == 23


STEPS = 20


class MachineEngine(FakeEngine):
    """An engine whose windows are the machine's; its cache is wrong once a commit went wrong."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(kv=FakeKvCache(wrong=lambda cell: machine.staging.went_wrong))
        self.machine = machine

    def set_modes(self, cell: Cell) -> None:
        super().set_modes(cell)
        self.machine.set_modes(cell.nwor_mode, cell.scv_mode)

    def check_layers(self, requests: int | None) -> list[list[dict[str, Any]]]:
        self.machine.hook.check_layers(requests)
        return super().check_layers(requests)

    def watch_writes(self, on: bool) -> list[dict[str, int]]:
        if on:
            wrap_commit(self.machine)  # as `WriteWatch` does
        else:
            del self.machine.hook.window.commit
        return []

    def _windows(self, asked: Any) -> list[WindowRecord]:
        for _ in range(STEPS):
            self.machine.run()
        return [
            replace(window, stage_operations=window.staged_tokens * STAND_IN_LAYERS)
            for window in self.machine.hook.drain(None)
        ]


@pytest.fixture
def gated(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[], tuple[Runner, RunData]]:
    """Runs a sweep of stage x adaptive on the machine."""
    from nwor_bench.plugin.runner_v2 import step_windows

    checks = SimpleNamespace(
        take=list, stop=lambda validator: None, prepare=lambda *_: None,
        planner=lambda usual, *_: usual, begin=lambda *_: None, end=lambda *_: None,
        replay=lambda graphs, control, descriptor: graphs.replay(descriptor),
    )  # fmt: skip
    monkeypatch.setattr(step_windows, "layers_alone_in_their_memory", lambda *_: ())
    monkeypatch.setattr(step_windows, "GpuWindowChecks", lambda *_: checks)

    def run() -> tuple[Runner, RunData]:
        runner = Runner(
            tmp_path / "run", MachineEngine(machine), requests=len(REQUESTS), draft_tokens=K,
            scv_modes="off,adaptive",
        )  # fmt: skip
        return runner, runner.run()

    return run


def paths_of(run: RunData, phase: str) -> list[list[str | None]]:
    """Paths of the windows of each batch of stage x adaptive."""
    return [
        [window.path for window in run.windows if window.batch == batch.batch]
        for batch in run.batches
        if batch.phase == phase and batch.cell.label == "stage x adaptive"
    ]


def test_the_gate_ends_on_the_path_that_is_timed(gated: Callable[[], Any]) -> None:
    """Other batches of the gate have instruments in place, so no window of theirs is ready."""
    _, run = gated()
    joined, ready = "full graph, merge, joined", "full graph, merge, ready"
    watched, last = paths_of(run, "gate")
    assert watched == [joined] * STEPS
    assert last == [joined, *[ready] * (STEPS - 1)]
    assert paths_of(run, "timed") == [last] * 3
    (result,) = (cell for cell in analyse(run).cells if cell.label == "stage x adaptive")
    assert result.ratio_to_off is not None
    assert "path" not in str(result.reason)


def test_a_fault_of_ready_windows_alone_is_seen_by_the_gates_last_batch(
    gated: Callable[[], Any], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nwor_bench.plugin.runner_v2.stock_update import ReadyWindow

    def commit(window: ReadyWindow, call: Any) -> str:
        machine.staging.went_wrong = True
        return original(window, call)

    original = ReadyWindow.commit
    monkeypatch.setattr(ReadyWindow, "commit", commit)
    runner, run = gated()
    assert [cell.label for cell in runner.sweep.parity.broken] == ["stage x adaptive"]
    watched, last = (
        e for e in run.events if e["event"] == "kv_gate" and e["scv_mode"] == "adaptive"
    )
    assert watched["verdict"] != last["verdict"] == "INVALID"
    assert paths_of(run, "timed") == []


def test_an_update_that_is_not_known_stays_vllms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.worker.gpu import input_batch, model_runner

    from nwor_bench.plugin.runner_v2.stock_update import StockUpdate, find_update

    update = find_update()
    assert isinstance(update, StockUpdate)
    assert update.kernel is input_batch._post_update_kernel
    monkeypatch.setattr(model_runner, "post_update", lambda *_: None)  # other code's
    assert find_update() == "vllm: another post_update"


def test_an_update_that_is_not_known_is_counted_by_its_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = make_parts(PieceStaging(), PiecePlanner())
    reasons = [
        hook_of(monkeypatch, parts, make_runner(), update=update).launch_refusals()
        for update in ("vllm: another post_update", None)
    ]
    assert reasons == [{"vllm: another post_update": 1}, {}]


@pytest.mark.parametrize("other", ["total_len", "output_bin_counts"])
def test_layers_of_several_shapes_are_committed_before_the_launch_that_updates(
    monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """And a launch is bound again if vLLM's tensors are others, those for penalties too."""
    from nwor_bench.plugin.runner_v2.plan import GpuWindowBatch
    from nwor_bench.plugin.runner_v2.staging import GpuStaging
    from nwor_bench.plugin.runner_v2.stock_update import UpdateCall
    from nwor_kernels.commit.plan import CommitPlan

    launched: list[str] = []
    bound: list[Any] = []

    def bind_with_update(plan: Any, *_: Any, states: Any, **__: Any) -> Any:
        bound.append(states)
        return lambda *_: launched.append("update")

    monkeypatch.setattr(CommitPlan, "bind", lambda *_, **__: lambda _: launched.append("commit"))
    monkeypatch.setattr(CommitPlan, "bind_with_update", bind_with_update)
    caches = [LayerCache(str(n), torch.zeros(2, 1, 4, n), 2, torch.float32) for n in (4, 6)]
    staging = GpuStaging(caches, 4)
    rows = torch.arange(6)
    whole: dict[str, Any] = {"tokens_per_request": 3, "certain": 1, "sources": ("a", "b")}
    batch: Any = GpuWindowBatch((2, 2), rows, rows, None, **whole)
    one = torch.zeros(2, dtype=torch.int32)
    call = UpdateCall(one, one, one, None, torch.zeros(2, 3), one, one, one, one.view(1, 2), one)
    for changed in (call, call, call._replace(**{other: one.clone().view(1, 2)}), call):
        staging.open(batch)
        staging.update_in_commit("kernel", changed)
        assert staging.commit(rows, one) == ""
        staging.reset()
    assert launched == ["commit", "update"] * 4
    assert [getattr(s, other) is getattr(call, other) for s in bound] == [True, False, True]


def test_vllms_module_keeps_no_hook_of_a_closed_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module outlives the engine: what it kept would hold the cache and the graphs."""
    machine = Machine(monkeypatch)
    postprocess, hook = machine.runner.postprocess_sampled, ref(machine.hook)
    machine.run()
    machine.hook = machine.runner = None
    gc.collect()
    assert hook() is None
    machine.staging.launched.clear()
    postprocess(*[torch.zeros(2, dtype=torch.int64)] * 5)
    assert machine.staging.launched == ["update"]
