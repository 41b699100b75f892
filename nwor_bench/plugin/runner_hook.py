"""`RunnerHook`: the part that both runners' hooks share, and the methods that each adds."""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, cast

from torch import Tensor

from nwor_bench.errors import ConfigError
from nwor_bench.plugin.late_counts import LateCounts, read_without_waiting
from nwor_bench.plugin.layers import StagedLayers, attention_layers, is_recurrent
from nwor_bench.plugin.one_slot_states import OneSlotStates
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.plugin.rank_vote import RankVote
from nwor_bench.plugin.scheduler_output import restarted, starts_requests
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.plugin.state_rings import StateRings
from nwor_bench.plugin.states import WindowStates
from nwor_bench.plugin.step import Accumulator, DeviceClock, Step
from nwor_bench.plugin.window import Window, close_leftover
from nwor_bench.records.fallback_reasons import STATES_OF_TOO_MANY
from nwor_bench.records.state_slots import FIELD, one_slot
from nwor_bench.records.types import BesidePrefill, NworMode, ScvMode
from nwor_bench.records.window import WindowRecord
from nwor_bench.records.window_order import UNDELIVERED, WindowPlace, only_verifies


class CellOrder(Protocol):
    """Which interleaved cell each step belongs to (`ModeSwitch`)."""

    alarm: str | None

    def next(self, scheduler_output: Any, only_verifies: bool) -> WindowPlace | None:
        """The place of the step that begins, after switching to its cell's modes."""

    def ended(self, fallback_reason: str | None) -> None:
        """A window has ended."""

    def sham_fell_back(self, reason: str) -> None:
        """The window in flight runs as plain off."""


class ScvValidator:
    """Decides which drafts were accepted, in one SCV mode at a time, and counts how."""

    def __init__(self) -> None:
        self.switch(ScvMode.OFF)

    def switch(self, mode: ScvMode) -> None:
        """Start a mode anew: counters at zero."""
        self.mode = mode
        self.counters: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        """Validations not done as the mode says, by reason."""

    def count_fallback(self, reason: str) -> None:
        """Count a validation that did not run as its mode says."""
        self.counters["scv_fallback_count"] += 1
        self.fallbacks[reason] += 1


class RunnerHook(ABC):
    """One worker's hook: it follows vLLM's V1 or V2 runner and owns its windows.

    Calls come between batches: first `agree`, once, then `attach`; `detach` and `attach` may follow
    at any time.

    Attributes:
        layers: the runner's layers that have a cache, by their role in staging.
        target_layers: names of the target's layers with K/V of their own, in the runner's order.
        drafter_layers: names of the drafter's layers; they are never staged.
    """

    name: ClassVar[str]
    """Which runner it follows: "V1" or "V2"."""
    stage_by: str
    """How drafts are held: "reference" or "copy"."""
    window: Window | None
    """The window in flight, one object for good; None if nothing can be staged."""
    buffers: StagedLayers | None
    """Where windows are staged; None likewise."""
    validator: ScvValidator
    staging_unavailable: str | None
    """The fallback reason of every window in mode stage; None if windows are staged."""
    states: WindowStates | None = None
    """The target's recurrent states; None if stock keeps them, or there are none."""
    states_unavailable: str | None = None
    """Why stock keeps them; None if they are staged, or there are none."""
    _patches: PatchSet

    def __init__(self, runner: Any, settings: PluginSettings):
        self.runner = runner
        self.nwor_mode = NworMode.OFF
        config = getattr(runner, "vllm_config", None)
        self.one_slot = one_slot(getattr(config, "additional_config", None))
        """The engine has one state slot a request (`state_slots`), so every window is staged."""
        self.layers = attention_layers(runner)
        self.target_layers, self.drafter_layers = self.layers.staged, self.layers.drafter
        self.accumulator = Accumulator()
        self.clock = DeviceClock(runner.device)
        self.late = LateCounts(
            self.accumulator, len(self.target_layers), settings.debug, self.clock.release
        )
        self._stages_beside_prefill = settings.beside_prefill is BesidePrefill.STAGE
        self._interleaving: CellOrder | None = None
        self._step: Step | None = None
        self._vote = RankVote.of_worker()

    @property
    def attached(self) -> bool:
        """True while the runner's methods are wrapped."""
        return self._patches.applied

    def agree(self) -> None:
        """Stage on every tensor-parallel rank or on none; every rank must call it."""
        self.staging_unavailable = self._vote.settle(self.staging_unavailable)
        if self.layers.recurrent:
            reason = self._vote.settle(self.states_unavailable)
            self.states_unavailable = reason or self.staging_unavailable
        if self.states is not None and self.states_unavailable is not None:
            self.states.give_up(self.states_unavailable)
            self.states = None
        if self.staging_unavailable is not None:
            self._drop_staging()

    @abstractmethod
    def _drop_staging(self) -> None:
        """Nothing can be staged: let go of all that staging needs."""

    def attach(self) -> None:
        """Wrap the runner's methods; nothing stays wrapped after an error."""
        self._patches.apply()

    def detach(self) -> None:
        """Restore the runner and its layers as they were found."""
        self._patches.undo()

    @abstractmethod
    def set_modes(self, nwor_mode: NworMode, scv_mode: ScvMode) -> None:
        """Switch both modes; the validator's counters start at zero."""

    def interleave(self, interleaving: CellOrder | None) -> None:
        """Interleave cells within the batches to come; None: no longer."""
        if interleaving is not None:
            self.check_mode(NworMode.OFF)
        self._interleaving = interleaving
        self.clock.on = interleaving is not None

    @abstractmethod
    def switch_to(self, nwor_mode: NworMode, scv_mode: ScvMode) -> None:
        """Switch both modes between two windows; both were set before."""

    @abstractmethod
    def prepare_sham(self) -> str | None:
        """Capture the sham's graphs once, after every mode was set; the reason if it cannot run."""

    @abstractmethod
    def switch_to_sham(self) -> None:
        """Switch as for stage; the windows compute as in mode off."""

    def count_without_waiting(self) -> PatchSet:
        """Patches that count windows as they come, for a server; apply them before `attach`."""
        self.clock.on = self.clock.in_server = self.late.in_server = True
        return PatchSet([Patch(self.runner, "execute_model", read_without_waiting(self.late))])

    def drain(self, output_lengths: dict[str, int] | None) -> list[WindowRecord]:
        """Windows since the last drain; waits for the device once.

        Args:
            output_lengths: tokens that each finished request returned, by its name; windows beyond
                them are counted separately. None: every window counts.
        """
        self.late.resolve(output_lengths)
        return self.accumulator.drain()

    def take_request_counts(self) -> dict[str, list[int]]:
        """Windows with drafts, accepted drafts, and those that it got, of each request since the
        last call."""
        counts, self.late.by_request = self.late.by_request, {}
        return counts

    @abstractmethod
    def check_layers(self, requests: int | None) -> list[dict[str, Any]]:
        """Check each layer of some windows of the next batch; what was measured since last time.

        Call it in the cell's modes. `requests`: most requests of the batch; None: stop checking.
        """

    def gate(self, on: bool) -> None:
        """A batch of the gate begins, or the gate has ended: contexts do not choose within it."""
        return

    @property
    def graph_sets(self) -> Sequence[Any]:
        """Our own sets of CUDA graphs, one for each mode that has one; each has `replay`."""
        return ()

    def device_errors(self) -> list[str]:
        """Commits that the device refused since the last call; waits for the device."""
        return []

    def graph_facts(self) -> dict[str, Any] | None:
        """Sizes of vLLM's CUDA graphs and of ours; None for a runner without both."""
        return None

    def launch_refusals(self) -> dict[str, int] | None:
        """Updates of vLLM's that our commit cannot run, by reason; None without such commits."""
        return None

    @property
    def rings(self) -> StateRings | None:
        """Rings of the states' records; None without them."""
        return None if self.states is None else self.states.rings

    def _start_step(self, scheduler_output: Any) -> None:
        """A step begins on the host; `_step` is None after it if the step has no tokens."""
        if self.rings is not None:
            self.rings.scheduled(scheduler_output)
        if self._step is not None or (self.window is not None and self.window.batch is not None):
            self._close_leftover()
        if scheduler_output.finished_req_ids or starts_requests(scheduler_output):
            self.late.note_requests(scheduler_output.finished_req_ids, restarted(scheduler_output))
        if not scheduler_output.total_num_scheduled_tokens:
            if self._interleaving is not None:  # the time before the next step is waiting
                self._interleaving.next(scheduler_output, only_verifies=False)
                self.late.went_idle()
            return
        now, mark = time.perf_counter(), self.clock.step()
        self.late.step_started(now, mark)
        alone = only_verifies(scheduler_output)
        has_window = alone or bool(scheduler_output.scheduled_spec_decode_tokens)
        step = Step(now, has_window, scheduler_output, only_verifies=alone, began=mark)
        if self._interleaving is not None:  # after the mark: a switch belongs to its own window
            step.place = self._interleaving.next(scheduler_output, only_verifies=alone)
        step.undelivered = getattr(scheduler_output, UNDELIVERED, None)
        self._step = step

    def _allocate_states(self) -> None:
        """Make the states' records as staging is switched on; without room stock keeps them."""
        states = self.states
        if states is not None and states.unavailable is None:
            states.give_up(self._vote.settle(states.allocate()))
            self.states_unavailable = states.unavailable

    def check_mode(self, nwor_mode: NworMode) -> None:
        """Raise ConfigError for a mode in which stock would write the states of a window."""
        if self.one_slot and nwor_mode is not NworMode.STAGE:
            remedy = f"with {FIELD} every window is staged; write {NworMode.STAGE}"
            raise ConfigError.for_field("NWOR mode", str(nwor_mode), remedy)

    def why_not_one_slot(self) -> str | None:
        """Why this engine's windows cannot all be staged; None if they can."""
        states, context = self.states, self.runner.compilation_config.static_forward_context
        if self.staging_unavailable or self.states_unavailable or states is None:
            why = self.staging_unavailable or self.states_unavailable or "no recurrent layers"
            if states is None or why != "states:OutOfMemoryError":
                return why
            takes = f"{why}; records take {states.record_bytes / 1e9:.1f} GB beside the cache"
            return f"{takes}: lower gpu_memory_utilization or max_num_seqs"
        if states.requests < self.runner.max_num_reqs:
            return f"{STATES_OF_TOO_MANY}; max_num_seqs must be at most {states.requests}"
        drafter = next((n for n in self.layers.drafter if is_recurrent(context[n])), None)
        return None if drafter is None else f"the drafter's {drafter} keeps states too"

    def stages_alone(self, step: Step) -> bool:
        """True if the step's states are staged though its K/V is written directly."""
        return self.one_slot and step.drafts is not None and bool(step.drafts.any())

    def _begin_states(self, step: Step, req_ids: Sequence[str], tables: Any, computed: Any) -> None:
        """The forward comes next, with rings: place its own. Stock reads states of requests without
        drafts.

        Args:
            tables: one a KV-cache group, [requests, >= 1], the states' slots.
            computed: gives [requests] int, each one's tokens before the step.
        """
        states = cast(OneSlotStates, self.states)
        states.rings.place(req_ids)
        if self.late.debug:
            states.rings.check(req_ids, computed())
        if states.rings.stock_reads(step.scheduler_output.scheduled_spec_decode_tokens):
            states.make_current(len(req_ids), tables)

    def _commit_states(self, step: Step, counts: Tensor) -> None:
        """Commit the states of the step's window."""
        assert self.states is not None
        step.state_layers, step.states_reason = self.states.commit(counts)
        step.state_rows = self.states.rows

    @property
    def _alarm(self) -> str | None:
        return self._interleaving.alarm if self._interleaving is not None else None

    def _close_leftover(self) -> None:
        """Write and count the window that a step left open when it died between its calls."""
        step, self._step = self._step, None
        if self.states is not None:
            self.states.follow(None)
            self.states.abandon()
        reason = close_leftover(self.window)
        if step is not None and step.has_window:
            step.fallback_reason, step.num_sampled = reason, None
            self.late.add(step)
