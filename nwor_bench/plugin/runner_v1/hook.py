"""The hook of vLLM's V1 model runner: which of its methods make a window.

Four methods of one runner instance are wrapped: `execute_model` tells what was scheduled,
`_model_forward` runs with the forward context set (begin), `_sample` returns the sampled ids
(accept, commit), `sample_tokens` ends the step (record). A step without scheduled draft
tokens is no window and passes through.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nwor_bench.plugin.counts.scheduler_output import finished, invalid_drafts, restarted
from nwor_bench.plugin.interleaving import Interleaving
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.plugin.runner_v1.cpu_attention import LayerStaging
from nwor_bench.plugin.runner_v1.host_counts import Step, pending_step
from nwor_bench.plugin.runner_v1.window_checks import WindowChecks
from nwor_bench.plugin.runner_v1.windows import V1Windows, ms_since
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.plugin.staging.refusals import chunk_of
from nwor_bench.records.types import NworMode, ScvMode


class V1RunnerHook(V1Windows):
    """Follows one V1 runner: attach, switch modes, read back, detach (see `RunnerHook`)."""

    name = "V1"
    has_probe = False
    stage_by = "copy"
    graph_sets = ()

    def __init__(self, runner: Any, settings: PluginSettings):
        super().__init__(runner, settings)
        self._patches = PatchSet(
            [
                Patch(runner, "execute_model", self._wrap_execute_model),
                Patch(runner, "_model_forward", self._wrap_model_forward),
                Patch(runner, "_sample", self._wrap_sample),
                Patch(runner, "sample_tokens", self._wrap_sample_tokens),
            ]
        )

    def agree(self) -> None:
        """Stage on every rank or on none; every rank calls it once, before anything else."""
        self.staging_unavailable = self._vote.settle(self.staging_unavailable)
        if self.staging_unavailable is not None:
            self.buffers = self.window = None

    @property
    def attached(self) -> bool:
        """True while the runner's methods are wrapped."""
        return self._patches.applied

    def attach(self) -> None:
        """Wrap the runner and give its target layers the window; nothing on a failure."""
        self._patches.apply()
        self._set_layer_staging(attach=True)

    def detach(self) -> None:
        """Leave runner and layers as they were found."""
        self._patches.undo()
        self._set_layer_staging(attach=False)

    def _set_layer_staging(self, attach: bool) -> None:
        if self.window is None or self.buffers is None:
            return
        context = self.runner.compilation_config.static_forward_context
        numbers = {layer.name: number for number, layer in enumerate(self.buffers.layers)}
        for name in (*numbers, *self.layers.sharing):
            staging = None
            if attach:
                read = self.layers.sharing.get(name, name)
                shares, chunk = name != read, chunk_of(context[name])
                staging = LayerStaging(
                    self.window, self.buffers, numbers[read], shares, chunk, name
                )
            context[name].impl.staging = staging

    def set_modes(self, nwor_mode: NworMode, scv_mode: ScvMode) -> None:
        """Switch modes between steps; the counters of the old mode start again at zero."""
        self.nwor_mode = nwor_mode
        self.validator.mode = scv_mode
        self.validator.counters = Counter()
        self.validator.fallbacks = Counter()

    def interleave(self, turns: Interleaving | None) -> None:
        """Let cells take turns in the batches to come, or no longer."""
        self._turns = turns

    def take_turn(self, nwor_mode: NworMode, scv_mode: ScvMode) -> None:
        """Switch both modes between two windows."""
        self.nwor_mode = nwor_mode
        self.validator.mode = scv_mode

    def prepare_sham(self) -> str:
        """Why there is no sham: a turn of stage sets the mode, as every turn does."""
        return "nothing_to_switch"

    def take_sham_turn(self) -> None:
        """Run in mode off."""
        self.take_turn(NworMode.OFF, ScvMode.OFF)

    def check_layers(self, requests: int | None) -> list[dict[str, Any]]:
        """Check windows of the next batch layer by layer; what was measured since the last call."""
        if self.window is None or self.buffers is None:
            return []
        found = self.checks.take() if self.checks is not None else []
        if requests is None:
            self.checks = None
        elif self.checks is None:
            self.checks = WindowChecks(self.runner, self.layers, self.buffers)
        return found

    def drain(self, output_lengths: dict[str, int] | None) -> list[dict[str, Any]]:
        """Windows since the last drain; with async scheduling this waits for the device once."""
        if self.late is not None:
            self.late.resolve(output_lengths)
        return self.accumulator.drain()

    def device_errors(self) -> list[str]:
        """Always empty: each launch is checked as it returns; an error is a counted fallback."""
        return []

    def set_probe(self, on: bool) -> None:
        """Does nothing: this runner's phases are timed on the host."""

    def graph_facts(self) -> dict[str, Any] | None:
        """None: windows under this runner's CUDA graphs are written directly."""
        return None

    def launch_refusals(self) -> None:
        """None: this runner binds no kernel."""

    # The four wrappers, in the order in which a step meets them.

    def _wrap_execute_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._close_leftover()
            if self.late is not None:
                self.late.note_requests(finished(scheduler_output), restarted(scheduler_output))
            self._scheduler_output = scheduler_output
            started = time.perf_counter()
            try:
                turn = self._turns.next(scheduler_output) if self._turns is not None else None
                if scheduler_output.scheduled_spec_decode_tokens:
                    self._step = Step(scheduler_output, started, turn=turn)
                return original(scheduler_output, *args, **kwargs)
            finally:
                self._scheduler_output = None

        return execute_model

    def _wrap_model_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _model_forward(*args: Any, **kwargs: Any) -> Any:
            step = self._step
            if step is None or self._scheduler_output is None:
                return original(*args, **kwargs)
            self._begin(step)
            started = time.perf_counter()
            output = original(*args, **kwargs)
            step.times = replace(step.times, forward_ms=ms_since(started))
            return output

        return _model_forward

    def _wrap_sample(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _sample(*args: Any, **kwargs: Any) -> Any:
            step = self._step
            started = time.perf_counter()
            output = original(*args, **kwargs)
            if self.late is not None:
                self._count_late(self.late, step, output.sampled_token_ids)
            if step is None:
                return output
            step.times = replace(step.times, sample_ms=ms_since(started))
            self._validate_and_commit(step, output.sampled_token_ids)
            return output

        return _sample

    def _wrap_sample_tokens(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sample_tokens(grammar_output: Any) -> Any:
            # Read before this step's own drafts are there.
            checked = self.runner._draft_token_req_ids or ()
            output = original(grammar_output)
            step, self._step = self._step, None
            if step is not None:
                step.invalid_drafts = invalid_drafts(step.scheduler_output, grammar_output, checked)
                step.times = replace(step.times, wall_ms=ms_since(step.started))
                if self.window is not None and self.window.batch is not None:
                    step.outcome = self.window.close()
                    if self._turns is not None:
                        self._turns.ended(step.outcome.fallback_reason)
                if self.late is None:
                    self._counts.add(step, output.sampled_token_ids)
                else:
                    self.late.add(pending_step(step))
            return output

        return sample_tokens
