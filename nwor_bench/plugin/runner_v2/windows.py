"""The window of one step under vLLM's V2 runner: begin, decide what was accepted, commit.

`hook.py` calls this from the runner's methods.
"""

import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from nwor_bench.plugin.counts.accumulator import Accumulator
from nwor_bench.plugin.counts.late_counts import LateCounts
from nwor_bench.plugin.counts.pending_step import PendingStep
from nwor_bench.plugin.interleaving import Interleaving, is_windows_alone
from nwor_bench.plugin.observe.device_times import DeviceClock, Probe
from nwor_bench.plugin.rank_vote import RankVote
from nwor_bench.plugin.runner_v2.batch import GpuWindowBatch
from nwor_bench.plugin.runner_v2.device_validation import DeviceValidator
from nwor_bench.plugin.runner_v2.graph_sets import StagingGraphs
from nwor_bench.plugin.runner_v2.layer_set import Launch
from nwor_bench.plugin.runner_v2.plan import may_read_this_step
from nwor_bench.plugin.runner_v2.refused_commits import STAGING_STOPPED, DeviceRefusals
from nwor_bench.plugin.runner_v2.setup import set_up_staging
from nwor_bench.plugin.runner_v2.staging import ACTIVATIONS_REUSED
from nwor_bench.plugin.runner_v2.window_checks import WindowChecks
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.plugin.staging.layers import attention_layers
from nwor_bench.plugin.staging.window import Window, close_leftover
from nwor_bench.records.fallback_reasons import BESIDE_PREFILL
from nwor_bench.records.types import BesidePrefill, NworMode, ScvMode

logger = logging.getLogger("vllm.nwor_bench")


@dataclass(slots=True)
class Step:
    """A step while the runner works on it."""

    pending: PendingStep
    has_window: bool
    scheduler_output: Any
    batch: GpuWindowBatch | None = None
    uniform: int | None = None
    """Drafts of every request where all have as many as there can be."""


class V2Windows:
    """Opens, decides and commits the window of each step of one V2 runner."""

    def __init__(self, runner: Any, settings: PluginSettings):
        self.runner = runner
        self.stage_by = settings.stage_by
        self._stages_beside_prefill = settings.beside_prefill is BesidePrefill.STAGE
        self.nwor_mode = NworMode.OFF
        self._is_sham = False
        self.layers = attention_layers(runner)
        self.target_layers, self.drafter_layers = self.layers.staged, self.layers.drafter
        self.accumulator = Accumulator()
        self.late = LateCounts(self.accumulator, len(self.target_layers), settings.debug)
        self.probe = Probe()
        self.clock = DeviceClock(runner.device)
        self._turns: Interleaving | None = None
        self.checks: WindowChecks | None = None
        """The local gate's, while it is on."""
        self._step: Step | None = None
        self._descriptor: Any = None
        k = runner.num_speculative_steps
        self.validator = DeviceValidator(k, runner.max_num_reqs, runner.device)
        self._vote = RankVote.of_worker()
        self._parts, self.staging_unavailable = set_up_staging(runner, self.layers, settings)
        if not self._vote.alone:
            self.late.tell_digest = self._vote.tell
        self._name_parts()

    def _name_parts(self) -> None:
        self.window = self._parts.window if self._parts else None
        self.buffers = self._parts.staging if self._parts else None
        self.graphs = self._parts.graphs if self._parts else None
        self.refusals = DeviceRefusals(self.buffers.errors) if self.buffers else None
        if self._parts and self.refusals:
            refusals, written = self.refusals, self._parts.staging.written
            self.late.read_with(refusals.errors, refusals.note, written)

    @property
    def graph_sets(self) -> tuple[StagingGraphs, ...]:
        """Our sets of CUDA graphs; none where nothing can be staged."""
        parts = self._parts
        return (parts.graphs, parts.control_graphs, parts.sham_graphs) if parts else ()

    def _begin(self, step: Step, input_batch: Any, slot_mappings: Tensor) -> None:
        """Note the drafts of each request, and open the window when staging is on."""
        drafts = input_batch.num_draft_tokens_per_req
        if drafts is None:
            drafts = np.zeros(input_batch.num_reqs, dtype=np.int32)
        step.pending.drafts = drafts
        most = self.runner.num_speculative_steps
        if input_batch.num_draft_tokens == input_batch.num_reqs * most:
            step.uniform = most
        if self.nwor_mode is NworMode.OFF:
            return
        if self._parts is None or self.staging_unavailable is not None:
            step.pending.fallback_reason = self.staging_unavailable
            return
        if self._stopped_staging(step):
            return
        if not self._stages_beside_prefill and not is_windows_alone(step.scheduler_output):
            step.pending.fallback_reason = BESIDE_PREFILL
            return
        certain_at_once = may_read_this_step(step.scheduler_output)
        control = self.nwor_mode is NworMode.CONTROL
        planner = self._parts.control_planner if control else self._parts.planner
        if self.checks is not None:
            planner = self.checks.planner(planner, control, self._descriptor)
        batch, reason = planner.plan(
            input_batch, slot_mappings, self._descriptor, certain_at_once=certain_at_once
        )
        if batch is None:
            step.pending.fallback_reason = reason
            return
        step.batch = batch
        if batch.sources is None:  # else a graph runs the forward, and has read them already
            self._parts.inputs.open(input_batch)
        self._parts.staging.open(batch)
        self._parts.window.begin(batch, control=control)
        if self.checks is not None:
            self.checks.begin(input_batch, slot_mappings, self._parts.slots)

    def _stopped_staging(self, step: Step) -> bool:
        """True if staging has stopped for good; this window's reason is then noted."""
        refused = self.refusals
        if refused is None:
            return False
        if refused.stopped:
            step.pending.fallback_reason = STAGING_STOPPED
            return True
        if refused.reason is None or not self._vote.alone:
            return False  # this window's vote tells the other ranks, and all stop with it
        step.pending.fallback_reason = refused.reason
        refused.settle(refused.reason)
        return True

    def _validate_and_commit(self, step: Step, num_sampled: Tensor) -> None:
        """Decide what was accepted, if any mode asks for it, and commit what is staged."""
        window = self.window
        staged = window is not None and window.batch is not None
        if window is not None and staged and window.is_control:
            self._end_control(step, window, num_sampled)
            return
        validator = self.validator
        if not staged and (
            validator.mode is ScvMode.OFF or step.pending.fallback_reason == BESIDE_PREFILL
        ):
            return  # no device work, no synchronisation: off x off, and beside a prefill
        assert step.pending.drafts is not None
        pending, batch = step.pending, step.batch
        accepted = num_sampled
        if staged and batch is not None and batch.sources and validator.mode is not ScvMode.OFF:
            pending.decided_in_commit = True
            self._validate_in_commit(pending, batch)
        else:
            began = time.perf_counter()
            validation = validator.validate(num_sampled, step.pending.drafts, step.uniform)
            self.probe.mark("mask_end")
            accepted = validation.num_accepted
            pending.scv_path = validation.path
            pending.scv_fallback_reason = validation.fallback_reason
            pending.scv_s = time.perf_counter() - began
        if window is None or not staged:
            return
        self.probe.mark("commit_start")
        if window.accept(accepted, None) and window.commit():
            pending.certain = batch.certain if batch is not None else 0
        assert self.refusals is not None
        alarm = self._turns.alarm if self._turns is not None else None
        own = self.refusals.to_vote() or alarm or window.fallback_reason
        reason = self._vote.settle(own)
        self.refusals.settle(reason)
        if reason is not None:
            window.withdraw(reason)
            self._stop_staging_if_lasting(reason)
        self.probe.mark("commit_end")
        if self.checks is not None:
            self.checks.end(window, num_sampled)
        outcome = window.close()
        pending.staged_tokens = outcome.staged_tokens
        pending.fallback_reason = outcome.fallback_reason

    def _end_control(self, step: Step, window: Window, num_sampled: Tensor) -> None:
        """All layers have written: there is nothing to commit, and no rank to wait for."""
        window.end_control()
        if self.checks is not None:
            self.checks.end(window, num_sampled)
        outcome = window.close()
        step.pending.control_tokens = outcome.control_tokens
        step.pending.fallback_reason = outcome.fallback_reason

    def _stop_staging_if_lasting(self, reason: str) -> None:
        """Stage no later window if this one shows that none can be; every rank does the same."""
        if ACTIVATIONS_REUSED in reason:
            logger.error("nwor: %s; from now on windows are written directly", reason)
            self.staging_unavailable = reason

    def _validate_in_commit(self, pending: PendingStep, batch: GpuWindowBatch) -> None:
        """One launch decides and commits: a captured window's addresses never change."""
        assert self.buffers is not None
        self.buffers.validate_in_commit(partial(self._launch_commit, pending, batch))

    def _launch_commit(
        self, pending: PendingStep, batch: GpuWindowBatch, launch: Launch, num_sampled: Tensor
    ) -> None:
        began = time.perf_counter()
        shape = batch.commit_shape
        _, tokens, length, _ = shape
        path, reason = self.validator.run(shape, tokens // length, launch, num_sampled)
        pending.scv_path, pending.scv_fallback_reason = path, reason
        pending.scv_s = time.perf_counter() - began

    def _close_leftover(self) -> None:
        """Write and count the window that a step left open when it died between its calls."""
        step, self._step = self._step, None
        reason = close_leftover(self.window)
        if step is not None and step.has_window:
            step.pending.fallback_reason = reason
            self.late.add(step.pending)
