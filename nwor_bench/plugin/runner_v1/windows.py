"""The window of one step under vLLM's V1 runner: begin, decide what was accepted, commit.

`hook.py` calls this from the runner's methods.
"""

import logging
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from nwor_bench.plugin.counts.accumulator import Accumulator
from nwor_bench.plugin.counts.late_counts import LateCounts
from nwor_bench.plugin.counts.pending_step import PendingStep
from nwor_bench.plugin.interleaving import Interleaving, is_windows_alone
from nwor_bench.plugin.observe.device_times import DeviceClock
from nwor_bench.plugin.rank_vote import RankVote
from nwor_bench.plugin.runner_v1.host_counts import HostCounts, Step, count_sampled
from nwor_bench.plugin.runner_v1.setup import set_up_staging
from nwor_bench.plugin.runner_v1.validation import Validation, ValidationRefused, Validator
from nwor_bench.plugin.runner_v1.window_checks import WindowChecks
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.plugin.staging.layers import attention_layers
from nwor_bench.plugin.staging.window import Window, WindowBatch, close_leftover
from nwor_bench.records.fallback_reasons import BESIDE_PREFILL
from nwor_bench.records.types import BesidePrefill, NworMode, ScvMode

logger = logging.getLogger("vllm.nwor_bench")


class V1Windows:
    """Opens, decides and commits the window of each step of one V1 runner."""

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
        self.checks: WindowChecks | None = None
        """The local gate's, while it is on."""
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
        if self.checks is not None:
            self.checks.begin(step.num_draft_tokens, slot_mapping)
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
            self._check(window, sampled_token_ids)
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
        step.times = replace(step.times, mask_ms=ms_since(started))
        if window is not None and staged:
            started = time.perf_counter()
            self._commit(window, step.validation)
            step.committed_tokens = self.buffers.committed_tokens if self.buffers else 0
            self._check(window, sampled_token_ids)
            step.times = replace(step.times, commit_ms=ms_since(started))

    def _check(self, window: Window, sampled_token_ids: Tensor) -> None:
        """Have the local gate look at a window that is committed, or fell back."""
        if self.checks is not None:
            valid = (sampled_token_ids >= 0) & (sampled_token_ids < self._vocab_size)
            self.checks.end(window, valid.sum(1).tolist())

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


def ms_since(started: float) -> float:
    """Milliseconds on the host's clock since `started`, which is in seconds."""
    return (time.perf_counter() - started) * 1e3
