"""The hook of vLLM's V2 model runner (the default on a GPU): which of its methods make a window.

Four methods of the runner are wrapped, and two of its CUDA graph manager: `execute_model` tells
what was scheduled, `dispatch` which graph will run it, `prepare_attn` the slots (begin),
`run_fullgraph` is the forward under a full graph, `sample` gives the accepted counts on the
device (accept, commit). Counts are read by the host when the harness drains them, never here.
"""

import time
from collections.abc import Callable
from typing import Any

from nwor_bench.plugin.counts.pending_step import PendingStep
from nwor_bench.plugin.counts.scheduler_output import finished, invalid_drafts, restarted
from nwor_bench.plugin.interleaving import Interleaving
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.plugin.runner_v2.graph_sets import StockGraphs
from nwor_bench.plugin.runner_v2.window_checks import WindowChecks
from nwor_bench.plugin.runner_v2.windows import Step, V2Windows
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.plugin.staging.layers import layers_alone_in_their_memory
from nwor_bench.records.types import NworMode, ScvMode
from nwor_kernels.direct_launch import refusals as direct_launch_refusals


class V2RunnerHook(V2Windows):
    """Follows one V2 runner: attach, switch modes, read back, detach (see `RunnerHook`)."""

    name = "V2"
    has_probe = True

    def __init__(self, runner: Any, settings: PluginSettings):
        super().__init__(runner, settings)
        self._patches = self._runner_patches()

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
        return PatchSet(patches)

    @property
    def attached(self) -> bool:
        """True while the runner's methods are wrapped."""
        return self._patches.applied

    def attach(self) -> None:
        """Wrap the runner; the target layers follow when staging is switched on."""
        self._patches.apply()

    def detach(self) -> None:
        """Leave runner and layers as they were found."""
        self._patches.undo()
        self._stock_attention()

    def agree(self) -> None:
        """Stage on every rank or on none; every rank calls it once, before anything else."""
        self.staging_unavailable = self._vote.settle(self.staging_unavailable)
        if self.staging_unavailable is not None:
            self._parts = None
        self._name_parts()

    def set_modes(self, nwor_mode: NworMode, scv_mode: ScvMode) -> None:
        """Switch modes between steps; staging captures its graphs the first time.

        In mode off the target layers are the stock objects again.
        """
        self._close_leftover()
        self.nwor_mode, self._is_sham = nwor_mode, False
        self.validator.switch(scv_mode)
        if scv_mode is not ScvMode.OFF:
            self.validator.warm_up(self.runner.num_speculative_steps)
        if nwor_mode is not NworMode.OFF:
            self._allocate_copies()
        if self._parts is None:
            return
        if nwor_mode is NworMode.OFF:
            self._stock_attention()
            return
        self._staging_attention()
        control = nwor_mode is NworMode.CONTROL
        graphs = self._parts.control_graphs if control else self._parts.graphs
        graphs.capture()
        graphs.give_up(self._vote.settle(graphs.unavailable))

    def _staging_attention(self) -> None:
        """Wrap the target layers' attention."""
        assert self._parts is not None
        if not self._parts.attention.applied:
            self._parts.attention.apply()

    def interleave(self, turns: Interleaving | None) -> None:
        """Let cells take turns in the batches to come, or no longer."""
        self._turns = turns
        self.clock.on = turns is not None

    def take_turn(self, nwor_mode: NworMode, scv_mode: ScvMode) -> None:
        """Switch both modes between two windows; mode off runs on the stock objects again."""
        self.nwor_mode, self._is_sham = nwor_mode, False
        self.validator.mode = scv_mode
        self._patch_between_windows(nwor_mode is not NworMode.OFF)

    def prepare_sham(self) -> str | None:
        """Capture stock's forward once more; why windows of a sham run as plain off, or None."""
        if self._parts is None:
            return self.staging_unavailable
        self._stock_attention()
        graphs = self._parts.sham_graphs
        graphs.capture()
        graphs.give_up(self._vote.settle(graphs.unavailable))
        return graphs.unavailable

    def take_sham_turn(self) -> None:
        """Mode off with the switching of stage: patches that pass through, graphs of our own."""
        self.nwor_mode, self._is_sham = NworMode.OFF, True
        self.validator.mode = ScvMode.OFF
        self._patch_between_windows(True)

    def _patch_between_windows(self, patched: bool) -> None:
        """Wrap the target layers' attention, or restore the stock methods."""
        if self._parts is None or self._parts.attention.applied is patched:
            return
        if patched:
            self._parts.attention.apply()
        else:
            self._parts.attention.undo()

    def _allocate_copies(self) -> None:
        """Allocate the memory of copies, or stop staging on every rank."""
        if self._parts is None:
            return
        reason = self._vote.settle(self._parts.staging.allocate())
        if reason is not None:
            self._stock_attention()
            self.staging_unavailable = reason
            self._parts = self.window = self.buffers = self.graphs = None

    def _stock_attention(self) -> None:
        """Restore the target layers' stock methods."""
        if self._parts is not None and self._parts.attention.applied:
            self._parts.attention.undo()

    def check_layers(self, requests: int | None) -> list[dict[str, Any]]:
        """Check windows of the next batch, of so many requests; None: no longer.

        Returns what was measured since the last call. Call it between batches, in the cell's modes.
        """
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

    def drain(self, output_lengths: dict[str, int] | None) -> list[dict[str, Any]]:
        """Windows since the last drain; waits for the device once."""
        self.late.resolve(output_lengths)
        return self.accumulator.drain()

    def device_errors(self) -> list[str]:
        """Commits refused on the device since the last call; waits for it."""
        return self.refusals.take() if self.refusals else []

    def set_probe(self, on: bool) -> None:
        """Time each window's phases with CUDA events, or stop doing so."""
        self.probe.on = on

    def launch_refusals(self) -> dict[str, int]:
        """Bound kernels of this process that are launched through Triton, by reason."""
        return dict(direct_launch_refusals)

    def graph_facts(self) -> dict[str, Any]:
        """Sizes of vLLM's graph set and of ours, which must be equal, and the memory of ours."""
        stock, graphs = self.runner.cudagraph_manager, self.graphs
        control = self._parts.control_graphs if self._parts else None
        sham = self._parts.sham_graphs if self._parts else None
        wanted = graphs.wanted() if graphs else []
        return {
            "mode": None if stock is None else stock.cudagraph_mode.name,
            "stock_window_sizes": sorted(desc.num_tokens for desc in wanted),
            "stage_window_sizes": graphs.capture_sizes if graphs else [],
            "stage_memory_bytes": graphs.memory_bytes if graphs else None,
            "stage_unavailable": graphs.unavailable if graphs else None,
            "control_memory_bytes": control.memory_bytes if control else None,
            "control_unavailable": control.unavailable if control else None,
            "sham_window_sizes": sham.capture_sizes if sham else [],
            "sham_memory_bytes": sham.memory_bytes if sham else None,
            "sham_capture_s": sham.capture_s if sham else None,
            "sham_unavailable": sham.unavailable if sham else None,
        }

    # The wrappers, in the order in which a step meets them.

    def _wrap_execute_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dummy_run"):
                return original(scheduler_output, *args, **kwargs)
            self._close_leftover()
            self.late.note_requests(finished(scheduler_output), restarted(scheduler_output))
            if not scheduler_output.total_num_scheduled_tokens:
                self._went_idle(scheduler_output)
                return original(scheduler_output, *args, **kwargs)
            now, mark = time.perf_counter(), self.clock.mark()
            self.late.step_started(now, mark)
            has_window = bool(scheduler_output.scheduled_spec_decode_tokens)
            pending = PendingStep(started=now, began=mark)
            if self._turns is not None:  # after the mark: a switch belongs to its own window
                pending.turn = self._turns.next(scheduler_output)
            self._step = Step(pending, has_window, scheduler_output)
            return original(scheduler_output, *args, **kwargs)

        return execute_model

    def _went_idle(self, scheduler_output: Any) -> None:
        """A step without tokens: what comes before the next one is waiting."""
        if self._turns is not None:
            self._turns.next(scheduler_output)
            self.late.went_idle()

    def _wrap_dispatch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            self._descriptor = original(*args, **kwargs)
            return self._descriptor

        return dispatch

    def _wrap_prepare_attn(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_attn(input_batch: Any) -> Any:
            tables, slot_mappings = original(input_batch)
            step = self._step
            if step is not None:
                began = time.perf_counter()
                step.pending.req_ids = input_batch.req_ids
                step.pending.num_tokens = input_batch.num_tokens
                if step.has_window:
                    self._begin(step, input_batch, slot_mappings)
                    self.probe.mark("forward_start")
                step.pending.hook_s += time.perf_counter() - began
            return tables, slot_mappings

        return prepare_attn

    def _wrap_run_fullgraph(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run_fullgraph(desc: Any) -> Any:
            if self._parts is not None and self._is_sham:
                return self._run_sham(self._parts.sham_graphs, desc, original)
            if self._parts is None or not self._parts.window.is_staging:
                return original(desc)
            window = self._parts.window
            window.replayed()
            graphs = self._parts.control_graphs if window.is_control else self._parts.graphs
            if self.checks is not None:
                return self.checks.replay(graphs, window.is_control, desc)
            return graphs.replay(desc)

        return run_fullgraph

    def _run_sham(self, graphs: StockGraphs, desc: Any, original: Callable[..., Any]) -> Any:
        if desc in graphs.shapes:
            return graphs.replay(desc)
        step = self._step
        if self._turns is not None and step is not None and step.pending.turn is not None:
            self._turns.sham_fell_back("full_graph_of_another_shape")
        return original(desc)

    def _wrap_sample(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sample(hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
            step = self._step
            if step is None:
                return original(hidden_states, input_batch, grammar_output)
            if step.has_window:
                self.probe.mark("sample_start")
            output = original(hidden_states, input_batch, grammar_output)
            began = time.perf_counter()
            step.pending.num_sampled = output[1]
            if step.has_window:
                if grammar_output is not None:
                    # The drafts of the step before: this step's own come after its samples.
                    checked = self.runner.draft_tokens_handler.req_ids
                    step.pending.invalid_drafts = invalid_drafts(
                        step.scheduler_output, grammar_output, checked
                    )
                self.probe.mark("sample_end")
                self._validate_and_commit(step, output[1])
                step.pending.marks = self.probe.take()
                if self._turns is not None:
                    self._turns.ended(step.pending.fallback_reason)
            self._step = None
            self.late.add(step.pending)
            step.pending.hook_s += time.perf_counter() - began
            return output

        return sample
