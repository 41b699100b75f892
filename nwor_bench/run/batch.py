"""Run one batch, a block's prompts in one cell: from the engine's modes to its records."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from nwor_bench.analysis.parity.tokens import digest
from nwor_bench.engine.protocol import BatchOutput, Engine, Sampling
from nwor_bench.instruments.conditions import ConditionMonitor, Conditions
from nwor_bench.instruments.nvtx_ranges import Ranges, span
from nwor_bench.records.store import RunStore
from nwor_bench.records.types import BatchRecord, Cell, NworMode, Phase, WindowRecord
from nwor_bench.records.window_order import WindowOrder
from nwor_bench.run.gate.parity import BatchAnswer
from nwor_bench.workload.config import RunSpec
from nwor_bench.workload.prompts import Encode
from nwor_bench.workload.schedule import Block


@dataclass(frozen=True)
class BatchPlace:
    """Identity of a batch in the run: its cell, phase, block, number and order."""

    cell: Cell
    phase: Phase
    block: Block
    batch: int
    order: int
    started_at: str
    window_order: WindowOrder | None = None
    """The order of an interleaved batch's cells; None for a batch of one cell."""
    keep_prefix_cache: bool = False
    """Take contexts from the prefix cache, in which the batch before it has left them."""

    def cell_of(self, window: WindowRecord) -> Cell:
        """The cell that one of the batch's windows is of."""
        if self.window_order is None:
            return self.cell
        if window.cell_number is not None:
            return self.window_order.cells[window.cell_number]
        if self.window_order.drafts is not None:  # between groups: by what it verified
            ran = window.draft_tokens / window.num_reqs
            same_count = (cell for cell in self.window_order.cells if cell.drafts == ran)
            return next(same_count, self.cell)
        return self.cell


def window_records(
    place: BatchPlace,
    output: BatchOutput,
    bytes_per_token: int | None,
    bytes_per_state: int | None = None,
) -> list[WindowRecord]:
    """Windows as they are stored. Bytes are tokens x cache bytes per token, not measured traffic.

    Args:
        bytes_per_state: of one request and layer.
    """

    def in_bytes(number: int, per_item: int | None = bytes_per_token) -> int | None:
        return None if per_item is None else number * per_item

    records = []
    for number, window in enumerate(output.windows):
        cell = place.cell_of(window)
        records.append(
            replace(
                window,
                cell_number=None,
                **cell.names,
                block=place.block.number,
                batch=place.batch,
                window=number,
                bytes_staged=in_bytes(window.staged_tokens),
                bytes_committed=in_bytes(window.committed_tokens),
                bytes_avoided=in_bytes(window.rejected_tokens),
                state_bytes_committed=in_bytes(window.states_committed, bytes_per_state),
                state_bytes_avoided=in_bytes(window.states_avoided, bytes_per_state),
            )
        )
    return records


def batch_record(
    place: BatchPlace,
    output: BatchOutput,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    conditions: dict[str, float],
) -> BatchRecord:
    """The batch's record, with our sums and vLLM's counters."""
    lengths = [len(tokens) for tokens in output.token_ids]
    windows = output.windows
    return BatchRecord(
        **place.cell.names,
        phase=place.phase,
        block=place.block.number,
        batch=place.batch,
        order=place.order,
        requests=len(prompts),
        prompt_tokens=sum(len(prompt) for prompt in prompts),
        output_tokens=sum(lengths),
        latency_ms=output.latency_ms,
        tokens_per_s=sum(lengths) / (output.latency_ms / 1e3),
        windows=len(windows),
        draft_tokens=sum(window.draft_tokens for window in windows),
        accepted_tokens=sum(window.accepted_tokens for window in windows),
        staged_tokens=sum(window.staged_tokens for window in windows),
        committed_tokens=sum(window.committed_tokens for window in windows),
        vllm_num_drafts=output.counters.num_drafts,
        vllm_draft_tokens=output.counters.draft_tokens,
        vllm_accepted_tokens=output.counters.accepted_tokens,
        vllm_accepted_per_position=output.counters.accepted_per_position,
        parity=None,
        prompt_digest=prompt_digest(prompts),
        token_digests=tuple(digest(tokens) for tokens in output.token_ids),
        temperature=sampling.temperature,
        seed=sampling.seed,
        started_at=place.started_at,
        fallbacks=dict(Counter(w.fallback_reason for w in windows if w.fallback_reason)),
        scv_counters=output.scv_counters,
        conditions=conditions,
        rank_disagreement=output.rank_disagreement,
        request_times=output.request_times,
        request_acceptance=tuple((n, a) for n, a, _ in output.request_acceptance),
        request_tokens=tuple(
            (length, got)
            for length, (*_, got) in zip(lengths, output.request_acceptance, strict=False)
        ),
    )


def prompt_digest(prompts: Sequence[Sequence[int]]) -> str:
    """A short fingerprint of a block's prompts, token by token."""
    return digest([token for prompt in prompts for token in (*prompt, -1)])


AnswerCheck = Callable[[list[list[int]], BatchAnswer], BatchAnswer]
"""Checks a batch before it is stored, given its prompts; returns the answer with its parity."""


Watched = tuple[list[dict[str, int]], list[list[dict[str, Any]]]]
"""What a gate batch was watched for, by rank: writes and layers, see `RanBatch`."""


@dataclass(frozen=True)
class RanBatch:
    """A batch that has run and is stored."""

    cell: Cell
    """The cell that the batch ran in."""

    answer: BatchAnswer
    """The batch's record and its tokens."""

    windows: list[WindowRecord]
    """The batch's windows, in the order in which they ran."""

    written: list[dict[str, int]]
    """Each rank's counts of staging's writes; empty unless watched."""

    layers: list[list[dict[str, Any]]]
    """What each rank measured of single layers, for the local gate; empty unless watched."""


class BatchRunner:
    """Runs batches on one engine and stores each with its windows.

    Args:
        engine: started, in any mode.
        store: receives every batch as it ends.
        encode: prompts to token ids.
        spec: the run's configuration, for sampling.
        ranges: NVTX ranges around batches, or None.
        monitor: watches the machine during batches; None records no conditions.
        first: number of the first batch.
    """

    def __init__(
        self,
        engine: Engine,
        store: RunStore,
        encode: Encode,
        spec: RunSpec,
        ranges: Ranges | None,
        monitor: ConditionMonitor | None,
        first: int,
    ):
        self.engine = engine
        self._store = store
        self._encode = encode
        self._spec = spec
        self._ranges = ranges
        self._monitor = monitor
        self._next = first
        self.watches = True
        """Gate batches have writes watched and layers checked: then no window is ready."""
        status = engine.status()
        self._bytes = status.bytes_per_token, status.bytes_per_state

    def run(
        self, cell: Cell, phase: Phase, block: Block, order: int, check: AnswerCheck | None = None
    ) -> RanBatch:
        """Run and store one batch; `check` runs first, while its K/V is still in the cache."""
        return self._run(BatchPlace(cell, phase, block, self._next, order, _now()), check)

    def run_interleaved(
        self,
        baseline: Cell,
        phase: Phase,
        block: Block,
        window_order: WindowOrder,
        check: AnswerCheck | None = None,
        *,
        keep_prefix_cache: bool = False,
    ) -> RanBatch:
        """Run a batch of interleaved cells; it is recorded as the baseline's (off x off)."""
        begun = (block, self._next, 0, _now())
        place = BatchPlace(baseline, phase, *begun, window_order, keep_prefix_cache)
        return self._run(place, check)

    def _run(self, place: BatchPlace, check: AnswerCheck | None) -> RanBatch:
        prompts = place.block.token_ids(self._encode)
        sampling = self._sampling(place.phase, place.block)
        facts: list[dict[str, dict[str, int]]] = []
        if place.window_order is not None:
            self.engine.interleave(place.window_order)
        try:
            output, watched, conditions = self._generate(place, prompts, sampling)
        finally:
            if place.window_order is not None:
                facts = self.engine.stop_interleaving()
        self._next += 1
        record = batch_record(place, output, prompts, sampling, conditions)
        answer = BatchAnswer(record, output.token_ids)
        if check is not None:
            answer = check(prompts, answer)
        windows = window_records(place, output, *self._bytes)
        self._store.append_batch(answer.record, windows)
        if place.window_order is not None:
            event = {"event": place.phase, "block": place.block.number, "batch": place.batch}
            labels = [cell.label for cell in place.window_order.cells]
            self._store.append_event({**event, "cells": dict(zip(labels, facts, strict=True))})
        return RanBatch(place.cell, answer, windows, *watched)

    def _generate(
        self, place: BatchPlace, prompts: list[list[int]], sampling: Sampling
    ) -> tuple[BatchOutput, Watched, Conditions]:
        """The engine's output, what a gate batch was watched for, and the conditions."""
        label, nwor = place.cell.label, place.cell.nwor_mode
        is_gate = place.phase in (Phase.GATE, Phase.INTERLEAVED_GATE)
        order = place.window_order  # draft counts alone hold no K/V back
        interleaves = order is not None and (order.drafts is None or order.stages)
        watches = self.watches and is_gate and (interleaves or nwor is not NworMode.OFF)
        written: list[dict[str, int]] = []
        layers: list[list[dict[str, Any]]] = []
        with span(self._ranges, "cell", place.order, label):
            if place.window_order is None:  # interleaved cells set their own modes
                self.engine.set_modes(place.cell)
            if self._monitor is not None:
                self._monitor.begin()
            with span(self._ranges, "batch", place.batch, label):
                if watches:
                    self.engine.check_layers(len(prompts))
                    if nwor is not NworMode.CONTROL:  # which writes every draft at once
                        self.engine.watch_writes(True)
                try:
                    keep = place.keep_prefix_cache
                    output = self.engine.generate(prompts, sampling, keep_prefix_cache=keep)
                finally:
                    if watches:
                        layers = self.engine.check_layers(len(prompts))
                        if nwor is not NworMode.CONTROL:
                            written = self.engine.watch_writes(False)
            conditions = {} if self._monitor is None else self._monitor.end()
        return output, (written, layers), conditions

    def _sampling(self, phase: Phase, block: Block) -> Sampling:
        """Sampling parameters: the gate is always greedy; seeds depend on the block."""
        scenario = self._spec.scenario
        greedy = phase in (Phase.GATE, Phase.INTERLEAVED_GATE)
        return Sampling(
            max_new_tokens=block.new_tokens or scenario.max_new_tokens,
            temperature=0.0 if greedy else scenario.temperature,
            top_p=1.0 if greedy else scenario.top_p,
            seed=self._spec.seed + block.number * scenario.requests,
            ignore_eos=scenario.ignore_eos,
        )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
