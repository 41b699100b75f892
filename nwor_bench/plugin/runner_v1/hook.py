"""The hook of vLLM's V1 model runner, which the CPU build uses.

Four methods of one runner instance are wrapped: `execute_model` says what was scheduled,
`_model_forward` runs with the forward context set (begin), `_sample` returns the sampled ids
(accept, commit), `sample_tokens` ends the step (record). A step without scheduled draft
tokens has no window and passes through.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.plugin.refusals import chunk_of
from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.plugin.runner_v1.cpu_attention import CpuWindowChecks, LayerStaging, set_up_staging
from nwor_bench.plugin.runner_v1.cpu_states import operator_patch, set_up_states
from nwor_bench.plugin.runner_v1.staging import (
    StagingBuffers,
    Validation,
    ValidationRefused,
    Validator,
)
from nwor_bench.plugin.scheduler_output import (
    invalid_drafts,
)
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.plugin.step import Step
from nwor_bench.plugin.window import Window, WindowBatch
from nwor_bench.records.fallback_reasons import BESIDE_PREFILL, commit_fault
from nwor_bench.records.types import NworMode, ScvMode
from nwor_bench.records.window_order import PLACE

logger = logging.getLogger("vllm.nwor_bench")


class V1RunnerHook(RunnerHook):
    """Follows one V1 runner (see `RunnerHook`)."""

    name = "V1"
    stage_by = "copy"
    buffers: StagingBuffers | None
    validator: Validator

    def __init__(self, runner: Any, settings: PluginSettings):
        super().__init__(runner, settings)
        self.checks: CpuWindowChecks | None = None
        self._vocab_size: int = runner.model_config.get_vocab_size()
        capacity = runner.max_num_reqs * runner.num_spec_tokens
        self.validator = Validator(capacity, self._vocab_size, runner.device)
        self.buffers, self.staging_unavailable = set_up_staging(runner, self.layers, capacity)
        self.window = Window(self.buffers) if self.buffers else None
        patches = [
            Patch(runner, "execute_model", self._wrap_execute_model),
            Patch(runner, "_model_forward", self._wrap_model_forward),
            Patch(runner, "_sample", self._wrap_sample),
            Patch(runner, "sample_tokens", self._wrap_sample_tokens),
        ]
        if self.window is not None:
            states_or_why = set_up_states(runner, self.layers, self.window)
            self.states, self.states_unavailable = states_or_why
        if self.states is not None:
            patches.append(operator_patch(self.states))
        self._patches = PatchSet(patches)

    def _drop_staging(self) -> None:
        self.buffers = self.window = None

    def attach(self) -> None:
        """Wrap the runner and give its target layers the window; nothing on a failure."""
        super().attach()
        self._set_layer_staging(attach=True)

    def detach(self) -> None:
        """Leave runner and layers as they were found."""
        super().detach()
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
        self.check_mode(nwor_mode)
        self.nwor_mode = nwor_mode
        if nwor_mode is not NworMode.OFF:
            self._allocate_states()
        self.validator.switch(scv_mode)

    def switch_to(self, nwor_mode: NworMode, scv_mode: ScvMode) -> None:
        """Switch both modes between two windows."""
        self.nwor_mode = nwor_mode
        self.validator.mode = scv_mode

    def prepare_sham(self) -> str:
        """Why there is no sham: stage sets the mode, as every cell does."""
        return "nothing_to_switch"

    def switch_to_sham(self) -> None:
        """Run in mode off."""
        self.switch_to(NworMode.OFF, ScvMode.OFF)

    def check_layers(self, requests: int | None) -> list[dict[str, Any]]:
        """Check windows of the next batch layer by layer; what was measured since the last call."""
        if self.window is None or self.buffers is None:
            return []
        windows = self.checks.take() if self.checks is not None else []
        if requests is None:
            self.checks = None
        elif self.checks is None:
            self.checks = CpuWindowChecks(self.runner, self.layers, self.buffers, self.states)
        return windows

    # The four wrappers, in call order.

    def _wrap_execute_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._start_step(scheduler_output)
            return original(scheduler_output, *args, **kwargs)

        return execute_model

    def _wrap_model_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _model_forward(*args: Any, **kwargs: Any) -> Any:
            step, runner = self._step, self.runner
            if step is not None and step.drafts is None and self.rings is not None:
                batch, rows = runner.input_batch, runner.input_batch.num_reqs
                tables = [each.get_device_tensor(rows) for each in batch.block_table.block_tables]
                starts = runner.query_start_loc.gpu[: rows + 1]
                self._begin_states(
                    step, batch.req_ids, tables, lambda: runner.seq_lens[:rows] - starts.diff()
                )
            if step is None or not step.has_window or step.drafts is not None:
                return original(*args, **kwargs)
            self._begin(step)
            started = time.perf_counter()
            output = original(*args, **kwargs)
            step.host_ms["forward_ms"] = _ms_since(started)
            return output

        return _model_forward

    def _wrap_sample(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _sample(*args: Any, **kwargs: Any) -> Any:
            step, started = self._step, time.perf_counter()
            output = original(*args, **kwargs)
            if step is not None:
                ids, runner = output.sampled_token_ids, self.runner
                step.req_ids = tuple(runner.input_batch.req_ids)
                if runner.use_async_scheduling:  # otherwise the host gets the ids anyway
                    discarded = runner.discard_request_mask.gpu
                    step.num_sampled = count_sampled(ids, discarded, self._vocab_size)
                if step.has_window:
                    step.host_ms["sample_ms"] = _ms_since(started)
                    self._validate_and_commit(step, ids)
            return output

        return _sample

    def _wrap_sample_tokens(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sample_tokens(grammar_output: Any) -> Any:
            # Read before this step's own drafts are there.
            checked = self.runner._draft_token_req_ids or ()
            output = original(grammar_output)
            step, self._step = self._step, None
            if step is None:
                return output
            sampled = getattr(output, "sampled_token_ids", None)  # a rank without logits has none
            if not self.runner.use_async_scheduling and sampled is not None:
                counts = [len(ids) for ids in sampled]
                step.num_sampled = torch.tensor(counts, dtype=torch.int32)
            if step.has_window:
                step.invalid_drafts = invalid_drafts(step.scheduler_output, grammar_output, checked)
                if not (step.only_verifies and hasattr(step.scheduler_output, PLACE)):
                    step.host_ms["wall_ms"] = _ms_since(step.started)
                if self.window is not None and self.window.batch is not None:
                    step.take(self.window.close())
                    if self._interleaving is not None:
                        self._interleaving.ended(step.fallback_reason)
            self.late.add(step)
            return output

        return sample_tokens

    # The window of one step.

    def _begin(self, step: Step) -> None:
        drafts = step.scheduler_output.scheduled_spec_decode_tokens
        step.req_ids = tuple(self.runner.input_batch.req_ids)
        per_request = tuple(len(drafts.get(req_id, ())) for req_id in step.req_ids)
        step.drafts = np.array(per_request, dtype=np.int32)
        step.num_tokens = step.scheduler_output.total_num_scheduled_tokens
        if self.nwor_mode is NworMode.OFF or not step.drafts.any():  # k = 0 has nothing to stage
            return
        if self.window is None:
            step.fallback_reason = self.staging_unavailable
            return
        if not self._stages_beside_prefill and not step.only_verifies:
            step.fallback_reason = BESIDE_PREFILL
            return
        slot_mapping = get_forward_context().slot_mapping
        if not isinstance(slot_mapping, dict):
            step.fallback_reason = "micro_batches"
            return
        batch = self._window_batch(per_request, self._slots_of_groups(slot_mapping))
        control = self.nwor_mode is NworMode.CONTROL
        step.path = "eager, ours" if control else "eager, ours, host"
        self.window.begin(batch, control=control)
        if self.checks is not None:
            self.checks.begin(per_request, slot_mapping)
        if self.late.debug:
            named = dict(zip(step.req_ids, per_request, strict=True))
            logger.info("nwor begin: drafts per request %s", named)

    def _slots_of_groups(self, slot_mapping: dict[str, Tensor]) -> Tensor:
        """[num_tokens] int64 slots, or [groups, num_tokens]; a group has the same in all layers."""
        assert self.buffers is not None
        of_row = {layer.slot_row: slot_mapping[layer.name] for layer in self.buffers.layers}
        if len(of_row) == 1:
            return next(iter(of_row.values()))
        others = next(iter(of_row.values()))  # for groups without target layers, never looked at
        return torch.stack([of_row.get(row, others) for row in range(max(of_row) + 1)])

    def _window_batch(self, drafts: tuple[int, ...], slot_mapping: Tensor) -> WindowBatch:
        """Rows and slots of the drafts: a request's drafts are its last rows."""
        ends = self.runner.query_start_loc.np[1 : len(drafts) + 1]
        spans = [np.arange(end - n, end) for end, n in zip(ends, drafts, strict=True)]
        rows = torch.from_numpy(np.concatenate(spans)).long().to(slot_mapping.device)
        direct_slots = slot_mapping.clone()
        direct_slots[..., rows] = -1
        return WindowBatch(drafts, rows, slot_mapping[..., rows], direct_slots)

    def _validate_and_commit(self, step: Step, sampled_token_ids: Tensor) -> None:
        window = self.window
        staged = window is not None and window.batch is not None
        if self.states is not None and (staged or self.stages_alone(step)):
            # As vLLM counts them for its next step, whatever the validator finds.
            self._commit_states(step, (sampled_token_ids != -1).sum(dim=1, dtype=torch.int32))
        if window is not None and staged and window.is_control:
            window.end_control()
            self._check(window, sampled_token_ids)
            return
        off = self.validator.mode is ScvMode.OFF or step.fallback_reason == BESIDE_PREFILL
        if not staged and off:
            return  # no device work, no synchronisation: off x off, and beside a prefill
        started = time.perf_counter()
        validation = self._validate(step, sampled_token_ids)
        step.host_ms["mask_ms"] = _ms_since(started)
        if window is not None and staged:
            started = time.perf_counter()
            self._commit(window, validation, commit_fault(step.states_reason))
            step.committed_tokens = self.buffers.committed_tokens if self.buffers else 0
            self._check(window, sampled_token_ids)
            step.host_ms["commit_ms"] = _ms_since(started)

    def _validate(self, step: Step, sampled_token_ids: Tensor) -> Validation | None:
        """The accepted drafts; None: the ids do not fit the window, so every draft is kept."""
        assert step.drafts is not None
        try:
            validation = self.validator.validate(sampled_token_ids, tuple(step.drafts.tolist()))
        except ValidationRefused as refusal:
            if self.validator.mode is not ScvMode.OFF:
                self.validator.count_fallback(str(refusal))
                step.scv_fallback_reason = str(refusal)
            if self.window is not None:
                self.window.abort(f"validate:{refusal}")
            return None
        step.scv_path, step.scv_fallback_reason = "host", validation.fallback_reason
        return validation

    def _commit(self, window: Window, validation: Validation | None, fault: str | None) -> None:
        num_accepted = validation.num_accepted if validation else []
        if validation is not None and window.accept(validation.accepted):
            window.commit()
        reason = self._vote.settle(fault or self._alarm or window.fallback_reason, num_accepted)
        if reason is not None:
            window.withdraw(reason)

    def _check(self, window: Window, sampled_token_ids: Tensor) -> None:
        if self.checks is not None:
            valid = (sampled_token_ids >= 0) & (sampled_token_ids < self._vocab_size)
            self.checks.end(window, valid.sum(1).tolist())


def count_sampled(sampled_token_ids: Tensor, discarded: Tensor, vocab_size: int) -> Tensor:
    """How many tokens each request got, without waiting for the device.

    Args:
        sampled_token_ids: [requests, width] int; ids outside of the vocabulary are padding.
        discarded: [at least requests] bool, requests whose prefill goes on: theirs do not count.

    Returns:
        [requests] int32.
    """
    valid = (sampled_token_ids >= 0) & (sampled_token_ids < vocab_size)
    counts = valid.sum(dim=1, dtype=torch.int32)
    return counts.masked_fill(discarded[: len(counts)], 0)


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
