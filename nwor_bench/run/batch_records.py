"""Records of one batch from an engine's raw output."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nwor_bench.analysis.parity.batches import digest
from nwor_bench.engine.protocol import BatchOutput, Sampling
from nwor_bench.records.types import BatchRecord, Cell, Phase, WindowRecord
from nwor_bench.workload.schedule import Block
from nwor_bench.workload.window_order import WindowOrder


@dataclass(frozen=True)
class BatchPlace:
    """Identity of a batch in the run: its cell, phase, block, number and order."""

    cell: Cell
    phase: Phase
    block: Block
    batch: int
    order: int
    started_at: str
    turns: WindowOrder | None = None
    """The cells that take turns, in an interleaved batch."""

    def cell_of(self, window: dict[str, Any]) -> Cell:
        """The cell that one of the batch's windows is of."""
        number = window.get("cell")
        if self.turns is None:
            return self.cell
        return self.cell if number is None else self.turns.cells[number]


def window_records(
    place: BatchPlace, output: BatchOutput, bytes_per_token: int | None
) -> list[WindowRecord]:
    """One record per window. Bytes are tokens x cache bytes per token, not measured traffic."""
    return [
        _window_record(place, number, window, bytes_per_token)
        for number, window in enumerate(output.windows)
    ]


def _window_record(
    place: BatchPlace, number: int, window: dict[str, Any], bytes_per_token: int | None
) -> WindowRecord:
    def in_bytes(tokens: int) -> int | None:
        return None if bytes_per_token is None else tokens * bytes_per_token

    tuples = {
        name: tuple(window[name]) for name in ("accepted_per_position", "drafts_per_position")
    }
    cell = place.cell_of(window)
    return WindowRecord(
        pair=cell.pair,
        nwor_mode=str(cell.nwor_mode),
        scv_mode=str(cell.scv_mode),
        block=place.block.number,
        batch=place.batch,
        window=number,
        arm=cell.arm,
        bytes_staged=in_bytes(window["staged_tokens"]),
        bytes_committed=in_bytes(window["committed_tokens"]),
        bytes_avoided=in_bytes(window["rejected_tokens"]),
        **{**{name: window[name] for name in window.keys() - {"cell"}}, **tuples},
    )


def batch_record(
    place: BatchPlace,
    output: BatchOutput,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    conditions: dict[str, float],
) -> BatchRecord:
    """The batch's record, with our sums and vLLM's counters."""
    output_tokens = sum(len(tokens) for tokens in output.token_ids)
    windows = output.windows
    return BatchRecord(
        pair=place.cell.pair,
        nwor_mode=place.cell.nwor_mode,
        scv_mode=place.cell.scv_mode,
        phase=place.phase,
        block=place.block.number,
        batch=place.batch,
        order=place.order,
        requests=len(prompts),
        prompt_tokens=sum(len(prompt) for prompt in prompts),
        output_tokens=output_tokens,
        latency_ms=output.latency_ms,
        tokens_per_s=output_tokens / (output.latency_ms / 1e3),
        windows=len(windows),
        draft_tokens=sum(window["draft_tokens"] for window in windows),
        accepted_tokens=sum(window["accepted_tokens"] for window in windows),
        staged_tokens=sum(window["staged_tokens"] for window in windows),
        committed_tokens=sum(window["committed_tokens"] for window in windows),
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
        fallbacks=_count_fallbacks(windows, "fallback_reason"),
        scv_counters=output.scv_counters,
        arm=place.cell.arm,
        conditions=conditions,
        rank_disagreement=output.rank_disagreement,
        request_times=output.request_times,
    )


def counter_event(place: BatchPlace, facts: dict[str, Any]) -> dict[str, Any]:
    """Event with the precision of a batch's counters, for the records."""
    return {
        "event": place.phase,
        **place.cell.names,
        "block": place.block.number,
        "batch": place.batch,
        **facts,
    }


def interleaved_event(
    place: BatchPlace, facts: Sequence[dict[str, dict[str, int]]]
) -> dict[str, Any]:
    """Event with each cell's SCV counters in an interleaved batch, for the records."""
    assert place.turns is not None
    labels = [cell.label for cell in place.turns.cells]
    return {
        "event": place.phase,
        "block": place.block.number,
        "batch": place.batch,
        "cells": dict(zip(labels, facts, strict=True)),
    }


def prompt_digest(prompts: Sequence[Sequence[int]]) -> str:
    """A short fingerprint of a block's prompts, token by token."""
    return digest([token for prompt in prompts for token in (*prompt, -1)])


def _count_fallbacks(windows: list[dict[str, Any]], name: str) -> dict[str, int]:
    return dict(Counter(window[name] for window in windows if window[name]))
