"""The hook of vLLM's V2 model runner (the default on a GPU).

Four methods of the runner are wrapped, and two of its CUDA graph manager: `execute_model` says
what was scheduled, `dispatch` which graph will run it, `prepare_attn` the slots (begin),
`run_fullgraph` is the forward under a full graph, `sample` gives the accepted counts on the
device (accept, commit). In SCV mode `adaptive` a captured window is committed a moment later, by
the launch that also runs vLLM's own update of its requests (`stock_update`). Counts are read by the
host when the harness drains them, never here.
`StagingModes` switches what is in place between windows.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nwor_bench.plugin.layers import layers_alone_in_their_memory
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.plugin.runner_v2.device_validation import DeviceValidator
from nwor_bench.plugin.runner_v2.graph_sets import StagingGraphs, StockGraphs
from nwor_bench.plugin.runner_v2.layer_set import Launch
from nwor_bench.plugin.runner_v2.plan import GpuWindowBatch, may_read_this_step
from nwor_bench.plugin.runner_v2.ready_windows import ReadyWindow, ReadyWindows
from nwor_bench.plugin.runner_v2.setup import (
    StagingModes,
    StagingParts,
    graph_facts,
    set_up_staging,
)
from nwor_bench.plugin.runner_v2.staging import DeviceRefusals, GpuStaging
from nwor_bench.plugin.runner_v2.stock_update import CALL, UpdateCall, find_update
from nwor_bench.plugin.runner_v2.window_checks import WindowChecks
from nwor_bench.plugin.scheduler_output import (
    invalid_drafts,
    is_windows_alone,
    starts_requests,
)
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.plugin.step import START, Step
from nwor_bench.plugin.window import Window
from nwor_bench.records.fallback_reasons import BESIDE_PREFILL, BY_CHOICE, Fault, fault_of
from nwor_bench.records.types import NworMode, ScvMode
from nwor_kernels.direct_launch import refusals as direct_launch_refusals

logger = logging.getLogger("vllm.nwor_bench")


class V2RunnerHook(RunnerHook):
    """Follows one V2 runner (see `RunnerHook`)."""

    name = "V2"
    buffers: GpuStaging | None
    validator: DeviceValidator

    def __init__(self, runner: Any, settings: PluginSettings):
        super().__init__(runner, settings)
        self.stage_by = settings.stage_by
        self.checks: WindowChecks | None = None
        self._is_sham = False
        self._descriptor: Any = None
        self._drafts: int = runner.num_speculative_steps
        self.validator = DeviceValidator(self._drafts, runner.max_num_reqs, runner.device)
        self._parts, self.staging_unavailable = set_up_staging(runner, self.layers, settings)
        self._update = find_update() if self._parts is not None else None
        self._awaiting: Step | None = None
        """The step in flight, if vLLM's update will commit its window."""
        self._ended: Step | None = None
        """The last window, until vLLM's update has followed it."""
        self._ready = ReadyWindows()
        self._flight: ReadyWindow | None = None
        """The window in flight, if it was ready."""
        self._updates_compiled = False
        self._compiling: GpuWindowBatch | None = None
        """A window of padding, if the update to come only compiles its commit."""
        if not self._vote.is_single:
            self.late.on_sealed = self._vote.note
        self._name_parts()
        self._patches = self._runner_patches()

    def _name_parts(self) -> None:
        parts = self._parts
        self.window = parts.window if parts else None
        self.buffers = parts.staging if parts else None
        self.graphs = parts.graphs if parts else None
        self.refusals = DeviceRefusals(parts.staging.errors) if parts else None
        self._modes = StagingModes(parts, self._vote) if parts else None
        if parts and self.refusals:
            refusals, written = self.refusals, parts.staging.written
            self.late.read_with(refusals.errors, refusals.note, written)

    def _drop_staging(self) -> None:
        self._parts = None
        self._ready.clear()
        self._name_parts()

    def _runner_patches(self) -> PatchSet:
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
        if self._update is not None:
            patches.append(Patch(self._update.caller, CALL, self._wrap_post_update))
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
        self._close_leftover()
        self._ready.clear()
        self.nwor_mode, self._is_sham = nwor_mode, False
        self.validator.switch(scv_mode)
        if scv_mode is not ScvMode.OFF:
            self.validator.warm_up(self._drafts)
        reason = self._modes.switch(nwor_mode) if self._modes is not None else None
        if reason is not None:
            self.staging_unavailable = reason
            self._drop_staging()
        if self._parts is not None and nwor_mode is NworMode.STAGE and self.validator.joins_update:
            self._compile_updates(self._parts)

    def _compile_updates(self, parts: StagingParts) -> None:
        """Launch each captured commit with vLLM's update once, without a request to update."""
        if self._update is None or self._updates_compiled:
            return
        self._updates_compiled = True
        device, most = self.runner.device, self._drafts + 1
        zeros = partial(torch.zeros, device=device)
        try:
            for batch in parts.graphs.shapes.values():
                requests = len(batch.num_draft_tokens)
                counts, starts = (zeros(n, dtype=torch.int32) for n in (requests, requests + 1))
                sampled = zeros(requests, most, dtype=torch.int64)
                nobody = torch.full((requests,), -1, device=device)
                self._compiling = batch
                self.runner.postprocess_sampled(nobody, sampled, counts, counts, starts)
        except Exception:
            logger.exception("nwor: vLLM's update of its requests runs in a launch of its own")
            self._update = None
        finally:
            self._compiling = None
            parts.staging.forget_launches()

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
        self._ready.clear()
        if self._parts is None:
            return []
        found = self.checks.take() if self.checks is not None else []
        if requests is None:
            if self.checks is not None:
                self.checks.stop(self.validator)
            self.checks = None
            return found
        if self.checks is None:
            whole = layers_alone_in_their_memory(self.runner, self.target_layers)
            self.checks = WindowChecks(self.runner, self._parts, whole)
        if self.nwor_mode is not NworMode.OFF:
            self.checks.prepare(requests, self.nwor_mode is NworMode.CONTROL)
        return found

    def device_errors(self) -> list[str]:
        """Commits refused on the device since the last call; waits for it."""
        return self.refusals.take() if self.refusals else []

    def launch_refusals(self) -> dict[str, int]:
        """Bound kernels of this process that are launched through Triton, by reason."""
        return dict(direct_launch_refusals)

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
                if step.has_window and not self._begin_ready(step, input_batch):
                    self._begin(step, input_batch, slot_mappings)
                    if not self._runs_full_graph:
                        self.clock.phase(step, START)  # else right before the replay
                step.hook_s += time.perf_counter() - began
            return tables, slot_mappings

        return prepare_attn

    def _wrap_run_fullgraph(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run_fullgraph(desc: Any) -> Any:
            if self._parts is not None and self._is_sham:
                return self._run_sham(self._parts.sham_graphs, desc, original)
            window = self.window
            if self._modes is None or window is None or not window.is_staging:
                return self._replay(original, desc)
            window.replayed()
            graphs = self._modes.graphs_of(window.is_control)
            if self.checks is not None:
                return self.checks.replay(graphs, window.is_control, desc)
            return self._replay(graphs.replay, desc)

        return run_fullgraph

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
            if step.has_window:
                if grammar_output is not None:
                    # The drafts of the step before: this step's own come after its samples.
                    checked = self.runner.draft_tokens_handler.req_ids
                    step.invalid_drafts = invalid_drafts(
                        step.scheduler_output, grammar_output, checked
                    )
                if self._flight is not None or self._commits_with_update(step):
                    self._awaiting = step  # `post_update` comes next, with the same counts
                    step.hook_s += time.perf_counter() - began
                    return output
            self._end(step, output[1], began)
            return output

        return sample

    def _wrap_post_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def post_update(*arguments: Any, **named: Any) -> None:
            if self._compiling is not None:
                self._compile_update(self._compiling, UpdateCall(*arguments, **named))
                return
            step, self._awaiting = self._awaiting, None
            if step is None or step is not self._step:
                original(*arguments, **named)
            else:
                began = time.perf_counter()
                call = UpdateCall(*arguments, **named)
                joined = None if call.query_start_loc is None else call
                self._end(step, call.num_sampled, began, joined)
                if joined is None or step.certain is None:  # it fell back before its commit
                    original(*arguments, **named)
            ended, self._ended = self._ended, None
            if ended is not None:
                self.clock.phase(ended, "commit_ms")

        return post_update

    def _compile_update(self, batch: GpuWindowBatch, call: UpdateCall) -> None:
        assert self.buffers is not None
        assert self._update is not None
        self.buffers.open(batch)
        self.buffers.update_in_commit(self._update.kernel, call)
        self.buffers.commit(batch.slots, call.num_sampled)
        self.buffers.reset()

    def _commits_with_update(self, step: Step) -> bool:
        """True if one launch will commit the step's window and run vLLM's update."""
        batch, window = step.batch, self.window
        return (
            self._update is not None
            and batch is not None
            and batch.sources is not None
            and self.validator.joins_update
            and window is not None
            and window.is_staging
            and not window.is_control
        )

    def _end(
        self, step: Step, num_sampled: Tensor, began: float, update: UpdateCall | None = None
    ) -> None:
        """The step has its tokens: commit its window and keep it for the counts to come.

        `update`: vLLM's, which the commit is to run.
        """
        if step.has_window:
            ready, self._flight = self._flight, None
            if ready is not None and update is not None:
                self._end_ready(ready, step, update)
            else:
                self._validate_and_commit(step, num_sampled, update)
            if self._interleaving is not None:
                self._interleaving.ended(step.fallback_reason)
        self._step = None
        self.late.add(step)
        if step.has_window and self._update is None:
            self.clock.phase(step, "commit_ms")
        elif step.has_window:
            self._ended = step  # its last phase ends behind vLLM's update
        step.hook_s += time.perf_counter() - began

    # A window like an earlier one.

    def _begin_ready(self, step: Step, input_batch: Any) -> bool:
        """Open the step's window if it is ready; False: it has to be planned."""
        self._flight = None
        if self.nwor_mode is not NworMode.STAGE or not self.validator.joins_update:
            return False
        ready = self._ready.find(self._descriptor, input_batch.num_reqs)
        if ready is None or not ready.fits(input_batch) or not self._is_undisturbed(step):
            return False
        step.drafts, step.uniform, step.batch = ready.drafts, self._drafts, ready.batch
        assert self._parts is not None
        self._parts.staging.open(ready.batch)
        self._parts.window.begin(ready.batch)
        self._flight = ready
        return True

    def _is_undisturbed(self, step: Step) -> bool:
        """True if nobody watches this window or asks for another path, and no request starts."""
        refused = self.refusals
        return (
            self.checks is None
            and refused is not None
            and refused.reason is None
            and not starts_requests(step.scheduler_output)
            and "commit" not in vars(self.window)  # an instrument has wrapped it
        )

    def _end_ready(self, ready: ReadyWindow, step: Step, call: UpdateCall) -> None:
        """Commit a window that was ready, and run vLLM's update."""
        window = self.window
        assert window is not None
        began = time.perf_counter()
        if window.commit_replayed(ready.commit, call):
            step.certain, step.decided_in_commit = ready.batch.certain, True
            step.scv_path = self.validator.joined_update()
            step.scv_s = time.perf_counter() - began
            if self._vote.is_single and self._alarm is None:  # then nobody can object
                step.staged_tokens = ready.num_drafts
                window.forget()
                return
        self._settle(window)
        self._note_outcome(step, window)

    def _make_ready(self, step: Step, window: Window) -> None:
        """Keep the window that was committed for the steps to come, if they may be the same."""
        batch, drafts = step.batch, step.drafts
        if batch is None or batch.copied or drafts is None or step.uniform is None:
            return  # a copying graph reads slots from buffers that are filled in each step
        if not step.is_window_alone or window.fallback_reason is not None:
            return
        assert self._update is not None
        assert self.buffers is not None
        bind = partial(self.buffers.bind_update, batch, self._update.kernel)
        drafts = drafts.copy()
        made = ReadyWindow(
            self._descriptor, len(drafts), step.num_tokens, batch, drafts, int(drafts.sum()), bind
        )
        self._ready.add(made)

    # The window of one step.

    def _begin(self, step: Step, input_batch: Any, slot_mappings: Tensor) -> None:
        drafts = input_batch.num_draft_tokens_per_req
        if drafts is None:
            drafts = np.zeros(input_batch.num_reqs, dtype=np.int32)
        step.drafts = drafts
        if input_batch.num_draft_tokens == input_batch.num_reqs * self._drafts:
            step.uniform = self._drafts
        if self.nwor_mode is NworMode.OFF:
            return
        step.fallback_reason = self._why_direct(step)
        if self._parts is None or step.fallback_reason is not None:
            return
        control = self.nwor_mode is NworMode.CONTROL
        planner = self._parts.control_planner if control else self._parts.planner
        if self.checks is not None:
            planner = self.checks.planner(planner, control, self._descriptor)
        certain_at_once = may_read_this_step(step.scheduler_output)
        batch, step.fallback_reason = planner.plan(
            input_batch, slot_mappings, self._descriptor, certain_at_once=certain_at_once
        )
        if batch is None:
            return
        step.batch = batch
        if batch.sources is None:  # else a graph runs the forward, and has read them already
            self._parts.inputs.open(input_batch)
        self._parts.staging.open(batch)
        self._parts.window.begin(batch, control=control)
        if self.checks is not None:
            self.checks.begin(input_batch, slot_mappings, self._parts.slots)

    def _why_direct(self, step: Step) -> str | None:
        if self._parts is None or self.staging_unavailable is not None:
            return self.staging_unavailable
        refused = self.refusals
        if refused is not None and refused.stopped:
            return Fault.STAGING_STOPPED.value
        # With several ranks this window's vote informs the others, and all stop with it.
        if refused is not None and refused.reason is not None and self._vote.is_single:
            refused.settle(refused.reason)
            return refused.reason
        if not self._stages_beside_prefill and not is_windows_alone(step.scheduler_output):
            return BESIDE_PREFILL
        return None

    def _validate_and_commit(
        self, step: Step, num_sampled: Tensor, update: UpdateCall | None
    ) -> None:
        window, validator = self.window, self.validator
        staged = window is not None and window.batch is not None
        if window is not None and staged and window.is_control:
            window.end_control()  # all layers have written: no commit, and no rank to wait for
            self._close_window(step, window, num_sampled)
            return
        direct = step.fallback_reason == BESIDE_PREFILL or step.fallback_reason in BY_CHOICE
        off = validator.mode is ScvMode.OFF or direct
        if not staged and off:
            return  # no device work, no synchronisation: off x off, and beside a prefill
        batch, accepted = step.batch, num_sampled
        if update is not None:
            step.decided_in_commit = True
            assert self._update is not None
            assert self.buffers is not None
            self.buffers.update_in_commit(self._update.kernel, update)
        elif staged and batch is not None and batch.sources and validator.mode is not ScvMode.OFF:
            step.decided_in_commit = True
            assert self.buffers is not None
            # One launch decides and commits: a captured window's addresses never change.
            self.buffers.validate_in_commit(partial(self._launch_commit, step, batch))
        else:
            accepted = self._validate(step, num_sampled)
        if window is None or not staged:
            return
        self._commit(step, window, accepted)
        if update is not None and step.certain is not None:
            step.scv_path = validator.joined_update()
            self._make_ready(step, window)
        self._close_window(step, window, num_sampled)

    def _validate(self, step: Step, num_sampled: Tensor) -> Tensor:
        assert step.drafts is not None
        began = time.perf_counter()
        found = self.validator.validate(num_sampled, step.drafts, step.uniform)
        self.clock.phase(step, "mask_ms")
        step.scv_path, step.scv_fallback_reason = found.path, found.fallback_reason
        step.scv_s = time.perf_counter() - began
        return found.num_accepted

    def _launch_commit(
        self, step: Step, batch: GpuWindowBatch, launch: Launch, num_sampled: Tensor
    ) -> None:
        began = time.perf_counter()
        shape = batch.commit_shape
        _, tokens, length, _ = shape
        step.scv_path, step.scv_fallback_reason = self.validator.run(
            shape, tokens // length, launch, num_sampled
        )
        step.scv_s = time.perf_counter() - began

    def _commit(self, step: Step, window: Window, accepted: Tensor) -> None:
        if window.accept(accepted) and window.commit():
            step.certain = step.batch.certain if step.batch is not None else 0
        self._settle(window)

    def _settle(self, window: Window) -> None:
        """Ask the ranks whether this window stays committed; if not, every rank writes it."""
        assert self.refusals is not None
        refused = None if self.refusals.stopped else self.refusals.reason
        reason = self._vote.settle(refused or self._alarm or window.fallback_reason)
        self.refusals.settle(reason)
        if reason is None:
            return
        window.withdraw(reason)
        if fault_of(reason) is Fault.ACTIVATIONS_REUSED:  # it then holds for every window
            logger.error("nwor: %s; from now on windows are written directly", reason)
            self.staging_unavailable = reason
            self._ready.clear()

    def _close_window(self, step: Step, window: Window, num_sampled: Tensor) -> None:
        if self.checks is not None:
            self.checks.end(window, num_sampled)
        self._note_outcome(step, window)
