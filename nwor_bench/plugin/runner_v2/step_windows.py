"""The window of each step of a V2 runner, from its plan to the ranks' word on it.

A window is opened before the forward: as it is planned, or because one like it is ready
(`ReadyWindow`). It ends behind the samples: one launch commits a captured window, and in SCV mode
`adaptive` also runs vLLM's update of its requests (`stock_update`). Then the ranks vote: it stays
committed, or is written directly.
"""

import logging
import time
from functools import partial
from typing import Any

from torch import Tensor

from nwor_bench.plugin.layers import layers_alone_in_their_memory
from nwor_bench.plugin.rank_vote import RankVote
from nwor_bench.plugin.runner_v2.device_validation import DeviceValidator
from nwor_bench.plugin.runner_v2.plan import GpuWindowBatch, may_read_this_step
from nwor_bench.plugin.runner_v2.setup import StagingParts
from nwor_bench.plugin.runner_v2.staging import DeviceRefusals
from nwor_bench.plugin.runner_v2.stock_update import (
    ReadyWindow,
    ReadyWindows,
    StockUpdate,
    UpdateCall,
    compile_with_update,
)
from nwor_bench.plugin.runner_v2.window_checks import GpuWindowChecks
from nwor_bench.plugin.scheduler_output import starts_requests
from nwor_bench.plugin.step import DeviceClock, Step
from nwor_bench.records.fallback_reasons import BESIDE_PREFILL, Fault, commit_fault, unjoined_update
from nwor_bench.records.types import NworMode, ScvMode

logger = logging.getLogger("vllm.nwor_bench")


class StepWindows:
    """Opens the windows of one worker that can stage, and ends them.

    What belongs to one window is kept in its `Step`, so nothing is left of a step that died.

    Args:
        update: vLLM's, which commits may run too; None if it is not known.
    """

    def __init__(
        self,
        parts: StagingParts,
        validator: DeviceValidator,
        vote: RankVote,
        clock: DeviceClock,
        update: StockUpdate | None,
    ):
        self.parts = parts
        self.ready = ReadyWindows()
        self.refusals = DeviceRefusals(parts.staging.errors)
        self._window, self._staging = parts.window, parts.staging
        self._validator = validator
        self._vote = vote
        self._clock = clock
        self._update = update
        self._compiled = False
        self._update_failed: str | None = None
        self.checks: GpuWindowChecks | None = None
        """The gate's checks of the windows to come; None if none is checked."""

    def compile_updates(self, runner: Any) -> None:
        """Compile every captured commit that runs vLLM's update too, the first time."""
        if self._update is None or self._compiled or not self._validator.joins_update:
            return
        self._compiled = True
        try:
            batches = self.parts.graphs.shapes.values()
            compile_with_update(runner, self._update, self._staging, batches)
        except Exception as error:
            logger.exception("nwor: vLLM's update of its requests runs in a launch of its own")
            self._update, self._update_failed = None, unjoined_update(type(error).__name__)
        finally:
            self._staging.forget_launches()

    def check(
        self, runner: Any, target_layers: list[str], requests: int | None, nwor_mode: NworMode
    ) -> list[dict[str, Any]]:
        """Check windows layer by layer, as `RunnerHook.check_layers` says."""
        self.ready.clear()
        windows = self.checks.take() if self.checks is not None else []
        if requests is None:
            if self.checks is not None:
                self.checks.stop(self._validator)
            self.checks = None
            return windows
        if self.checks is None:
            whole = layers_alone_in_their_memory(runner, target_layers)
            self.checks = GpuWindowChecks(runner, self.parts, whole)
        if nwor_mode is not NworMode.OFF:
            self.checks.prepare(requests, nwor_mode is NworMode.CONTROL)
        return windows

    # Before the forward.

    def open_ready(self, step: Step, input_batch: Any, descriptor: Any) -> bool:
        """Open the window of a step in mode stage if it is ready; False: it has to be planned."""
        if not self._validator.joins_update:
            return False
        ready = self.ready.find(descriptor, input_batch.num_reqs)
        if ready is None or not ready.fits(input_batch) or not self._is_undisturbed(step):
            return False
        if self.parts.graphs.why_direct(descriptor, input_batch) is not None:
            return False  # its context has grown
        step.ready, step.batch, step.drafts = ready, ready.batch, ready.drafts
        self._staging.open(ready.batch)
        self._window.begin(ready.batch)
        return True

    def _is_undisturbed(self, step: Step) -> bool:
        """True if nobody watches this window or asks for another path, and no request starts."""
        return (
            self.checks is None
            and self.refusals.reason is None
            and not self.refusals.stopped  # a rank's refusal: none of them votes any more
            and not starts_requests(step.scheduler_output)
            and "commit" not in vars(self._window)  # an instrument has wrapped it
        )

    def why_direct(self, step: Step, stages_beside_prefill: bool) -> str | None:
        """Why the step's window is written directly; None if it may be staged."""
        refused = self.refusals
        if refused.stopped:
            return Fault.STAGING_STOPPED.value
        # With several ranks this window's vote informs the others, and all stop with it.
        if refused.reason is not None and self._vote.is_single:
            refused.settle(refused.reason)
            return refused.reason
        if not stages_beside_prefill and not step.only_verifies:
            return BESIDE_PREFILL
        return None

    def open(
        self, step: Step, input_batch: Any, slot_mappings: Tensor, descriptor: Any, control: bool
    ) -> None:
        """Plan the step's window and open it, or set why it is written directly."""
        parts, checks = self.parts, self.checks
        planner = parts.control_planner if control else parts.planner
        if checks is not None:
            planner = checks.planner(planner, control, descriptor)
        certain_at_once = may_read_this_step(step.scheduler_output)
        batch, step.fallback_reason = planner.plan(
            input_batch, slot_mappings, descriptor, certain_at_once=certain_at_once
        )
        if batch is None:
            return
        step.batch, step.descriptor = batch, descriptor
        step.path = batch.path
        if batch.sources is None:  # else a graph runs the forward, and has read them already
            eager = descriptor is None or descriptor.cg_mode.name == "NONE"
            attended = parts.choices.attended(
                batch.size, equal=batch.tokens_per_request is not None
            )
            step.path = f"{'eager' if eager else 'piecewise'}, {attended}"
            parts.inputs.open(input_batch)
        self._staging.open(batch)
        self._window.begin(batch, control=control)
        if checks is not None:
            checks.begin(input_batch, slot_mappings, parts.slots)

    def replayed(self) -> None:
        """A captured graph runs the open window's forward."""
        batch, states = self._window.batch, self.parts.states
        self._window.replayed()
        if states is not None:
            assert isinstance(batch, GpuWindowBatch)
            states.replayed(batch.states)

    # Behind the samples.

    def joins_update(self, step: Step) -> bool:
        """True if one launch is to commit the step's window and run vLLM's update."""
        return step.ready is not None or (
            self._update is not None
            and step.batch is not None
            and step.batch.sources is not None
            and self._validator.joins_update
            and self._window.is_staging
            and not self._window.is_control
        )

    def end(self, step: Step, call: UpdateCall | None, alarm: str | None) -> None:
        """Commit the open window, or write it directly, and set its outcome.

        Args:
            call: vLLM's update, which the commit is to run; given if `joins_update`.
            alarm: why this rank wants no window staged any more.
        """
        window, ready, num_sampled = self._window, step.ready, step.num_sampled
        assert num_sampled is not None
        if self.parts.states is not None:
            step.state_layers, step.states_reason = self.parts.states.commit(num_sampled)
            step.state_rows = self.parts.states.rows
            alarm = commit_fault(step.states_reason) or alarm
        if window.is_control:
            window.end_control()  # all layers have written: no commit, and no rank to wait for
        elif ready is not None and call is not None:
            began, step.path = time.perf_counter(), ready.path
            if window.commit_replayed(ready.commit, call):
                step.certain, step.decided_in_commit = ready.batch.certain, True
                step.scv_path = self._validator.joined_update()
                step.scv_s = time.perf_counter() - began
                if self._vote.is_single and alarm is None:  # then nobody can object
                    step.staged_tokens = ready.num_drafts
                    window.forget()
                    return
            self._settle(alarm)
        else:
            self._commit(step, num_sampled, call)
            self._settle(alarm)
            if call is not None and window.fallback_reason is None:
                self._make_ready(step)
        if self.checks is not None:
            self.checks.end(window, num_sampled)
        step.take(window.close())

    def _commit(self, step: Step, num_sampled: Tensor, call: UpdateCall | None) -> None:
        window, validator, batch, accepted = self._window, self._validator, step.batch, num_sampled
        step.decided_in_commit = True
        on_host = validator.mode is ScvMode.OFF
        if call is not None:
            assert self._update is not None
            how = "joined"
            self._staging.update_in_commit(self._update.kernel, call)
        elif batch.sources and not on_host:
            how = "validated"
            # One launch decides and commits: a captured window's addresses never change.
            self._staging.validate_in_commit(partial(validator.launch_commit, step))
        else:
            step.decided_in_commit, how = False, "host" if on_host else "device"
            accepted = validator.validate_step(step, num_sampled, self._clock)
        step.path = f"{step.path}, {how}"
        if window.accept(accepted) and window.commit():
            step.certain = batch.certain
            if call is not None:
                step.scv_path = validator.joined_update()
            elif batch.sources and validator.joins_update and step.scv_fallback_reason is None:
                step.scv_fallback_reason = self._update_failed
                if self._update_failed is not None:
                    validator.count_fallback(self._update_failed)

    def _settle(self, alarm: str | None) -> None:
        """Ask the ranks whether this window stays committed; if not, every rank writes it."""
        window, refusals = self._window, self.refusals
        refused = None if refusals.stopped else refusals.reason
        reason = self._vote.settle(refused or alarm or window.fallback_reason)
        refusals.settle(reason)
        if reason is not None:
            window.withdraw(reason)

    def _make_ready(self, step: Step) -> None:
        """Keep the window that was committed for the steps to come, if they may be the same."""
        batch = step.batch
        if batch.copied or step.uniform is None or not step.only_verifies:
            return  # a copying graph reads slots from buffers that are filled in each step
        assert self._update is not None
        bind = partial(self._staging.bind_update, batch, self._update.kernel)
        self.ready.add(ReadyWindow.of(step, bind))
