"""The hook of vLLM's V1 model runner: which of its methods make a window.

Four methods of one runner instance are wrapped: `execute_model` tells what was scheduled,
`_model_forward` runs with the forward context set (begin), `_sample` returns the sampled ids
(accept, commit), `sample_tokens` ends the step (record). A step without scheduled draft
tokens is no window and passes through.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from nwor_bench.plugin.counts.accumulator import Accumulator
from nwor_bench.plugin.counts.late_counts import LateCounts
from nwor_bench.plugin.counts.pending_step import PendingStep
from nwor_bench.plugin.counts.scheduler_output import finished, invalid_drafts, restarted
from nwor_bench.plugin.interleaving import Interleaving, is_windows_alone
from nwor_bench.plugin.observe.device_clock import DeviceClock
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.plugin.rank_vote import RankVote
from nwor_bench.plugin.runner_v1.cpu_attention import LayerStaging
from nwor_bench.plugin.runner_v1.host_counts import HostCounts, Step, count_sampled, pending_step
from nwor_bench.plugin.runner_v1.setup import set_up_staging
from nwor_bench.plugin.runner_v1.validation import Validation, ValidationRefused, Validator
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.plugin.staging.layers import attention_layers
from nwor_bench.plugin.staging.refusals import chunk_of
from nwor_bench.plugin.staging.window import Window, WindowBatch, close_leftover
from nwor_bench.records.fallback_reasons import BESIDE_PREFILL
from nwor_bench.records.types import BesidePrefill, NworMode, ScvMode

logger = logging.getLogger("vllm.nwor_bench")


class V1RunnerHook:
    """Follows one V1 runner: attach, switch modes, read back, detach (see `RunnerHook`)."""

    name = "V1"
    has_probe = False
    stage_by = "copy"
    graph_sets = ()

    def __init__(self, runner: Any, settings: PluginSettings):
        self.runner = runner
        self._stages_beside_prefill = settings.beside_prefill is BesidePrefill.STAGE
        self.nwor_mode = NworMode.OFF
        self.accumulator = Accumulator()
        self.layers = attention_layers(runner)
        self.target_layers, self.drafter_layers = self.layers.staged, self.layers.drafter
        self._step: Step | None = None
        self._scheduler_output: Any = None
        self._turns: Interleaving | None = None
        vocab_size = runner.model_config.get_vocab_size()
        layers = len(self.target_layers)
        self._counts = HostCounts(self.accumulator, layers, vocab_size, settings.debug)
        self._vocab_size = vocab_size
        late = runner.use_async_scheduling
        self.late = LateCounts(self.accumulator, layers, settings.debug) if late else None
        self.clock = DeviceClock(runner.device)
        capacity = runner.max_num_reqs * runner.num_spec_tokens
        self.validator = Validator(capacity, vocab_size, runner.device)
        self._vote = RankVote.of_worker()
        self.buffers, self.staging_unavailable = set_up_staging(runner, self.layers, capacity)
        self.window = Window(self.buffers) if self.buffers else None
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
                staging = LayerStaging(self.window, self.buffers, numbers[read], shares, chunk)
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

    def l2_facts(self) -> None:
        """None: copies are not kept in an L2 cache."""

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
            step.times = replace(step.times, forward_ms=_ms_since(started))
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
            step.times = replace(step.times, sample_ms=_ms_since(started))
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
                step.times = replace(step.times, wall_ms=_ms_since(step.started))
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

    # One window: begin, validate and commit, record.

    def _begin(self, step: Step) -> None:
        """Note the drafts of each request, and open the window when staging is on."""
        drafts = self._scheduler_output.scheduled_spec_decode_tokens
        step.req_ids = tuple(self.runner.input_batch.req_ids)
        step.num_draft_tokens = tuple(len(drafts.get(req_id, ())) for req_id in step.req_ids)
        if self.nwor_mode is NworMode.OFF:
            return
        if self.window is None:
            step.fallback_reason = self.staging_unavailable
            return
        if not self._stages_beside_prefill and not is_windows_alone(self._scheduler_output):
            step.fallback_reason = BESIDE_PREFILL
            return
        slot_mapping = get_forward_context().slot_mapping
        if not isinstance(slot_mapping, dict):
            step.fallback_reason = "micro_batches"
            return
        batch = self._window_batch(step, self._slots_of_groups(slot_mapping))
        self.window.begin(batch, control=self.nwor_mode is NworMode.CONTROL)
        if self._counts.debug:
            per_request = dict(zip(step.req_ids, step.num_draft_tokens, strict=True))
            logger.info("nwor begin: drafts per request %s", per_request)

    def _count_late(self, late: LateCounts, step: Step | None, sampled_token_ids: Tensor) -> None:
        """Leave the counts on the device; steps without drafts tell how far requests are."""
        discarded = self.runner.discard_request_mask.gpu
        num_sampled = count_sampled(sampled_token_ids, discarded, self._vocab_size)
        mark = self.clock.mark()
        if step is not None:
            step.num_sampled, step.sampled = num_sampled, mark
            return
        req_ids, now = tuple(self.runner.input_batch.req_ids), time.perf_counter()
        late.add(PendingStep(now, req_ids=req_ids, num_sampled=num_sampled, ended=mark))

    def _slots_of_groups(self, slot_mapping: dict[str, Tensor]) -> Tensor:
        """[num_tokens] int64 slots, or [groups, num_tokens]; a group has the same in all layers."""
        assert self.buffers is not None
        of_row = {layer.slot_row: slot_mapping[layer.name] for layer in self.buffers.layers}
        if len(of_row) == 1:
            return next(iter(of_row.values()))
        others = next(iter(of_row.values()))  # for groups without target layers, never looked at
        return torch.stack([of_row.get(row, others) for row in range(max(of_row) + 1)])

    def _window_batch(self, step: Step, slot_mapping: Tensor) -> WindowBatch:
        """Rows and slots of the drafts: a request's drafts are its last rows."""
        ends = self.runner.query_start_loc.np[1 : len(step.num_draft_tokens) + 1]
        spans = [
            np.arange(end - n, end) for end, n in zip(ends, step.num_draft_tokens, strict=True)
        ]
        rows = torch.from_numpy(np.concatenate(spans)).long().to(slot_mapping.device)
        direct_slots = slot_mapping.clone()
        direct_slots[..., rows] = -1
        return WindowBatch(step.num_draft_tokens, rows, slot_mapping[..., rows], direct_slots)

    def _validate_and_commit(self, step: Step, sampled_token_ids: Tensor) -> None:
        """Decide what was accepted, if any mode asks for it, and commit what is staged."""
        window = self.window
        staged = window is not None and window.batch is not None
        if window is not None and staged and window.is_control:
            window.end_control()
            return
        if not staged and (
            self.validator.mode is ScvMode.OFF or step.fallback_reason == BESIDE_PREFILL
        ):
            return  # no device work, no synchronisation: off x off, and beside a prefill
        started = time.perf_counter()
        try:
            step.validation = self.validator.validate(sampled_token_ids, step.num_draft_tokens)
            step.scv_fallback_reason = step.validation.fallback_reason
        except ValidationRefused as refusal:
            self._refuse(step, str(refusal))
        step.times = replace(step.times, mask_ms=_ms_since(started))
        if window is not None and staged:
            started = time.perf_counter()
            self._commit(window, step.validation)
            step.times = replace(step.times, commit_ms=_ms_since(started))

    def _commit(self, window: Window, validation: Validation | None) -> None:
        """Commit what was accepted, unless this rank or another has to write directly."""
        num_accepted = validation.num_accepted if validation else []
        if validation is not None and window.accept(validation.accepted, sum(num_accepted)):
            window.commit()
        alarm = self._turns.alarm if self._turns is not None else None
        reason = self._vote.settle(alarm or window.fallback_reason, num_accepted)
        if reason is not None:
            window.withdraw(reason)

    def _refuse(self, step: Step, reason: str) -> None:
        """The sampled ids do not fit the window: keep every draft, count the fallback."""
        if self.validator.mode is not ScvMode.OFF:
            self.validator.count_fallback(reason)
            step.scv_fallback_reason = reason
        if self.window is not None:
            self.window.abort(f"validate:{reason}")

    def _close_leftover(self) -> None:
        """Write and count the window that a step left open when it died between its calls."""
        step, self._step = self._step, None
        reason = close_leftover(self.window)
        if step is not None:
            self._counts.add_unfinished(step, reason)


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
