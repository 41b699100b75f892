"""The hook of vLLM's V2 model runner (the default on a GPU).

Four methods of the runner are wrapped, and two of its CUDA graph manager: `execute_model` says
what was scheduled, `dispatch` which graph will run it, `prepare_attn` the slots (begin),
`run_fullgraph` is the forward under a full graph, `sample` gives the accepted counts on the
device, and `post_update`, vLLM's own update of its requests, ends the step: its window is committed
(`StepWindows`). Counts are read by the host when the harness drains them, never here.
`StagingModes` switches what is in place between windows.
"""

import logging
import time
from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np
from torch import Tensor

from nwor_bench.errors import EngineError
from nwor_bench.plugin.one_slot_states import ONE_SLOT
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.plugin.runner_v2.device_validation import DeviceValidator
from nwor_bench.plugin.runner_v2.graph_sets import StagingGraphs, StockGraphs
from nwor_bench.plugin.runner_v2.setup import (
    StagingModes,
    StagingParts,
    graph_facts,
    set_up_staging,
)
from nwor_bench.plugin.runner_v2.staging import DeviceRefusals, GpuStaging
from nwor_bench.plugin.runner_v2.step_windows import StepWindows
from nwor_bench.plugin.runner_v2.stock_update import CALL, StockUpdate, UpdateCall, find_update
from nwor_bench.plugin.scheduler_output import invalid_drafts
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.plugin.step import START, Step
from nwor_bench.records.fallback_reasons import BESIDE_PREFILL, BY_CHOICE, Fault, fault_of
from nwor_bench.records.types import NworMode, ScvMode

logger = logging.getLogger("vllm.nwor_bench")


class V2RunnerHook(RunnerHook):
    """Follows one V2 runner (see `RunnerHook`)."""

    name = "V2"
    buffers: GpuStaging | None
    validator: DeviceValidator

    def __init__(self, runner: Any, settings: PluginSettings):
        super().__init__(runner, settings)
        self.stage_by = settings.stage_by
        self._is_sham = False
        self._descriptor: Any = None
        self._drafts: int = runner.num_speculative_steps
        self.validator = DeviceValidator(self._drafts, runner.max_num_reqs, runner.device)
        parts, self.staging_unavailable = set_up_staging(runner, self.layers, settings)
        update = None if parts is None else find_update()
        self._why_no_update = update if isinstance(update, str) else None
        if isinstance(update, str):
            logger.warning("the commit does not run vLLM's update: %s", update)
            update = None
        self._watches_update = update is not None
        """True if steps end with vLLM's update; False: with their samples."""
        self._name_parts(parts, update)
        if not self._vote.is_single:
            self.late.on_sealed = self._vote.note
        self._patches = self._runner_patches(update)

    def _name_parts(self, parts: StagingParts | None, update: StockUpdate | None) -> None:
        self._parts = parts
        self.window = parts.window if parts else None
        self.buffers = parts.staging if parts else None
        self.graphs = parts.graphs if parts else None
        self.states = parts.states if parts else None
        if parts is not None:
            self.states_unavailable = parts.states_unavailable
        self.refusals: DeviceRefusals | None = None
        self._modes: StagingModes | None = None
        self._windows: StepWindows | None = None
        if parts is not None:
            self._modes = StagingModes(parts, self._vote)
            windows = StepWindows(parts, self.validator, self._vote, self.clock, update)
            self._windows, self.refusals = windows, windows.refusals
            self.late.read_with(self.refusals.errors, self.refusals.note, parts.staging.written)

    def _drop_staging(self) -> None:
        self._name_parts(None, None)
        if self.layers.recurrent:
            self.states_unavailable = self.states_unavailable or self.staging_unavailable

    def _runner_patches(self, update: StockUpdate | None) -> PatchSet:
        runner = self.runner
        patches = [
            Patch(runner, "execute_model", self._wrap_execute_model),
            Patch(runner, "prepare_attn", self._wrap_prepare_attn),
            Patch(runner, "sample", self._wrap_sample),
        ]
        if runner.cudagraph_manager is not None:
            patches += [
                Patch(runner.cudagraph_manager, "dispatch", self._wrap_dispatch),
                Patch(runner.cudagraph_manager, "run_fullgraph", self._wrap_run_fullgraph),
            ]
        if update is not None:
            patches.append(Patch(update.caller, CALL, self._wrap_post_update))
        return PatchSet(patches)

    @property
    def graph_sets(self) -> tuple[StagingGraphs, ...]:
        """Our sets of CUDA graphs; none if nothing can be staged."""
        parts = self._parts
        return (parts.graphs, parts.control_graphs, parts.sham_graphs) if parts else ()

    def detach(self) -> None:
        """Leave runner and layers as they were found."""
        super().detach()
        if self._modes is not None:
            self._modes.patch(False)

    def set_modes(self, nwor_mode: NworMode, scv_mode: ScvMode) -> None:
        """Switch modes between steps; staging captures its graphs the first time."""
        self.check_mode(nwor_mode)
        self._close_leftover()
        self.nwor_mode, self._is_sham = nwor_mode, False
        self.validator.switch(scv_mode)
        if scv_mode is not ScvMode.OFF:
            self.validator.warm_up(self._drafts)
        if nwor_mode is not NworMode.OFF:
            self._allocate_states()
        reason = self._modes.switch(nwor_mode) if self._modes is not None else None
        if reason is not None:
            self.staging_unavailable = reason
            self._drop_staging()
        if self._windows is not None:
            self._windows.ready.clear()
            if nwor_mode is NworMode.STAGE:
                self._windows.compile_updates(self.runner)

    def switch_to(self, nwor_mode: NworMode, scv_mode: ScvMode) -> None:
        """Switch both modes between two windows; mode off runs on the stock objects again."""
        self.nwor_mode, self._is_sham = nwor_mode, False
        self.validator.mode = scv_mode
        if self._modes is not None:
            self._modes.patch_next(nwor_mode is not NworMode.OFF)

    def prepare_sham(self) -> str | None:
        """Capture stock's forward once more; why windows of a sham run as plain off, or None."""
        return self.staging_unavailable if self._modes is None else self._modes.prepare_sham()

    def switch_to_sham(self) -> None:
        """Mode off with the switching of stage: patches that pass through, graphs of our own."""
        self.nwor_mode, self._is_sham = NworMode.OFF, True
        self.validator.mode = ScvMode.OFF
        if self._modes is not None:
            self._modes.patch_next(True)

    def check_layers(self, requests: int | None) -> list[dict[str, Any]]:
        """Check windows of the next batch layer by layer; what was measured since the last call."""
        if self._windows is None:
            return []
        return self._windows.check(self.runner, self.target_layers, requests, self.nwor_mode)

    def gate(self, on: bool) -> None:
        """Run staged and direct windows whatever their context, or as contexts choose again."""
        if self._parts is not None:
            self._parts.choices.gate(on)

    def device_errors(self) -> list[str]:
        """Commits refused on the device since the last call; waits for it."""
        return self.refusals.take() if self.refusals else []

    def launch_refusals(self) -> dict[str, int]:
        """Updates of vLLM's that our commit cannot run, by reason."""
        return {} if self._why_no_update is None else {self._why_no_update: 1}

    def graph_facts(self) -> dict[str, Any]:
        """Sizes of vLLM's graph set and of ours, which must be equal, and the memory of ours."""
        return graph_facts(self.runner.cudagraph_manager, self._parts)

    # The wrappers, in call order.

    def _wrap_execute_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._descriptor = None  # vLLM asks its graphs for none if a step must run eagerly
            if not kwargs.get("dummy_run"):
                self._start_step(scheduler_output)
            return original(scheduler_output, *args, **kwargs)

        return execute_model

    def _wrap_dispatch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            self._descriptor = original(*args, **kwargs)
            return self._descriptor

        return dispatch

    @property
    def _runs_full_graph(self) -> bool:
        """True if a full CUDA graph will run the step in flight."""
        return self._descriptor is not None and self._descriptor.cg_mode.name == "FULL"

    def _wrap_prepare_attn(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_attn(input_batch: Any) -> Any:
            tables, slot_mappings = original(input_batch)
            step = self._step
            modes = self._modes
            if modes is not None and modes.is_patch_due and not self._runs_full_graph:
                modes.patch_now()
            if step is not None:
                began = time.perf_counter()
                step.req_ids = input_batch.req_ids
                step.num_tokens = input_batch.num_tokens
                if self.rings is not None:
                    rows, batch = input_batch.num_reqs, input_batch
                    self._begin_states(
                        step, step.req_ids, tables,
                        lambda: batch.seq_lens[:rows] - batch.query_start_loc[: rows + 1].diff(),
                    )  # fmt: skip
                if step.has_window:
                    self._begin(step, input_batch, slot_mappings)
                    if not self._runs_full_graph:
                        self.clock.phase(step, START)  # else right before the replay
                step.hook_s += time.perf_counter() - began
            return tables, slot_mappings

        return prepare_attn

    def _wrap_run_fullgraph(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run_fullgraph(desc: Any) -> Any:
            window, modes, windows = self.window, self._modes, self._windows
            if self._is_sham and self._parts is not None:
                return self._run_sham(self._parts.sham_graphs, desc, original)
            if modes is None or windows is None or window is None or not window.is_staging:
                self._check_stock_graph(desc)
                return self._replay(original, desc)
            windows.replayed()
            graphs = modes.graphs_of(window.is_control)
            if windows.checks is not None:
                return windows.checks.replay(graphs, window.is_control, desc)
            return self._replay(graphs.replay, desc)

        return run_fullgraph

    def _check_stock_graph(self, desc: Any) -> None:
        """Raise EngineError if stock's graph of windows would run over one state slot."""
        if self.one_slot and desc.uniform_token_count != 1:
            reason = None if self._step is None else self._step.fallback_reason
            problem = f"a window in a full graph cannot be staged ({reason})"
            raise EngineError.at(ONE_SLOT, problem, reason)

    def why_not_one_slot(self) -> str | None:
        """Why this engine's windows cannot all be staged; None if they can."""
        graphs = None if self.graphs is None else self.graphs.unavailable
        return super().why_not_one_slot() or graphs

    def _replay(self, replay: Callable[[Any], Any], desc: Any) -> Any:
        if self._step is not None:
            self.clock.phase(self._step, START)
        return replay(desc)

    def _run_sham(self, graphs: StockGraphs, desc: Any, original: Callable[..., Any]) -> Any:
        if desc in graphs.shapes:
            return self._replay(graphs.replay, desc)
        step = self._step
        if self._interleaving is not None and step is not None and step.place is not None:
            self._interleaving.sham_fell_back("full_graph_of_another_shape")
        return self._replay(original, desc)

    def _wrap_sample(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sample(hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
            step = self._step
            if step is None:
                return original(hidden_states, input_batch, grammar_output)
            if step.has_window:
                self.clock.phase(step, "forward_ms")
            output = original(hidden_states, input_batch, grammar_output)
            if step.has_window:
                self.clock.phase(step, "sample_ms")
            began = time.perf_counter()
            step.num_sampled = output[1]
            if step.has_window and grammar_output is not None:
                # The drafts of the step before: this step's own come after its samples.
                checked = self.runner.draft_tokens_handler.req_ids
                step.invalid_drafts = invalid_drafts(step.scheduler_output, grammar_output, checked)
            if not self._watches_update:
                self._end(step, None)
            step.hook_s += time.perf_counter() - began
            if step.has_window and not self._watches_update:
                self.clock.phase(step, "commit_ms")
            return output

        return sample

    def _wrap_post_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        this = ref(self)  # vLLM's module outlives the engine, whose memory the hook holds

        def post_update(*arguments: Any, **named: Any) -> None:
            hook = this()
            step = None if hook is None else hook._step
            if hook is None or step is None or step.num_sampled is None:
                original(*arguments, **named)  # no step that has its tokens
            else:
                hook._end_with_update(step, original, arguments, named)

        return post_update

    def _end_with_update(
        self,
        step: Step,
        original: Callable[..., Any],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ) -> None:
        began = time.perf_counter()
        windows, call = self._windows, None
        if windows is not None and windows.joins_update(step):
            call = UpdateCall(*arguments, **named)
            call = call if call.draft_tokens is None else None
        self._end(step, call)
        step.hook_s += time.perf_counter() - began
        if call is None or step.certain is None:  # no commit ran it
            original(*arguments, **named)
        if step.has_window:
            self.clock.phase(step, "commit_ms")

    # A step's window.

    def _begin(self, step: Step, input_batch: Any, slot_mappings: Tensor) -> None:
        """Open the step's window, or set why it is written directly."""
        windows, mode = self._windows, self.nwor_mode
        if (
            windows is not None
            and mode is NworMode.STAGE
            and windows.open_ready(step, input_batch, self._descriptor)
        ):
            return
        drafts = input_batch.num_draft_tokens_per_req
        if drafts is None:
            drafts = np.zeros(input_batch.num_reqs, dtype=np.int32)
        step.drafts = drafts
        if input_batch.num_draft_tokens == input_batch.num_reqs * self._drafts:
            step.uniform = self._drafts
        elif mode is NworMode.STAGE:  # a smaller count of `nwor-bench worth`
            most = int(drafts.max(initial=0))
            uneven = input_batch.num_draft_tokens != input_batch.num_reqs * most
            step.uniform = None if uneven else most
        if mode is NworMode.OFF or not input_batch.num_draft_tokens:  # k = 0 has nothing to stage
            return
        step.fallback_reason = self.staging_unavailable
        if windows is not None and step.fallback_reason is None:
            step.fallback_reason = windows.why_direct(step, self._stages_beside_prefill)
        if windows is not None and step.fallback_reason is None:
            control = mode is NworMode.CONTROL
            windows.open(step, input_batch, slot_mappings, self._descriptor, control)

    def _end(self, step: Step, call: UpdateCall | None) -> None:
        """The step has its tokens: commit its window and keep it for the counts to come.

        `call`: vLLM's update, if the commit is to run it.
        """
        windows, window = self._windows, self.window
        if step.has_window:
            if windows is not None and window is not None and window.batch is not None:
                windows.end(step, call, self._alarm)
            else:
                if self.stages_alone(step):
                    assert step.num_sampled is not None
                    self._commit_states(step, step.num_sampled)
                self._validate_alone(step)
            if step.fallback_reason is not None:
                self._stop_if_reused(step.fallback_reason)
            if self._interleaving is not None:
                self._interleaving.ended(step.fallback_reason)
        self._step = None
        self.late.add(step)

    def _validate_alone(self, step: Step) -> None:
        """Decide about a window that is not staged, but for off x off and beside a prefill."""
        direct = step.fallback_reason == BESIDE_PREFILL or step.fallback_reason in BY_CHOICE
        if self.validator.mode is not ScvMode.OFF and not direct:
            assert step.num_sampled is not None
            self.validator.validate_step(step, step.num_sampled, self.clock)

    def _stop_if_reused(self, reason: str) -> None:
        if self._windows is not None and fault_of(reason) is Fault.ACTIVATIONS_REUSED:
            logger.error("nwor: %s; from now on windows are written directly", reason)
            self.staging_unavailable = reason  # it holds for every window
            self._windows.ready.clear()
