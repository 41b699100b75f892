"""How large the gate's batches are, so that a timed run has its time for windows. Pure.

A run that only checks compares whole prompts and all their tokens. In a timed run as many requests
run side by side, in windows of the same size, but most have a short prompt: a batch prefills
`MAX_PROMPT_TOKENS` at most, or fewer if the gate would else take more than its share of the
budget. All tokens, positions and layers of what runs are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median

from nwor_bench.records.header import GateFacts
from nwor_bench.records.types import NworMode
from nwor_bench.run.batch import RanBatch
from nwor_bench.workload.config import RunSpec
from nwor_bench.workload.prompts import Encode
from nwor_bench.workload.schedule import GATE_BLOCK, MAX_CHECKED_TOKENS, Block, Plan

MAX_PROMPT_TOKENS = 16_384
"""Prompt tokens of one batch of the gate in a timed run, at most; more only if MIN_WHOLE whole
prompts and the others' `SHORT` tokens are more."""

SHORT = 32
"""Tokens of a cut prompt."""

MIN_WHOLE = 2
"""Fewest whole prompts, the longest among them: of these requests the context is the timed one. The
mean is not, so it does not choose attention in the gate (`AttentionChoices.gate`)."""


def fit(block: Block, prompt_lengths: Sequence[int], new_tokens: int, most: int) -> Block:
    """The gate's block with at most `most` prompt tokens, as far as MIN_WHOLE allows.

    Args:
        block: the plan's, with whole prompts.
        prompt_lengths: tokens of each prompt.
        new_tokens: the scenario's max_new_tokens.
        most: prompt tokens of all requests.
    """
    lengths = cut_lengths(prompt_lengths, most)
    cut = None if lengths == tuple(prompt_lengths) else lengths
    return replace(block, lengths=cut, new_tokens=min(new_tokens, MAX_CHECKED_TOKENS))


def cut_lengths(prompt_lengths: Sequence[int], most: int) -> tuple[int, ...]:
    """Each prompt's length, whole or `SHORT`, so that the sum is `most` if that can be.

    The longest prompt stays whole, then others in an order that is the same in every run.
    """
    if sum(prompt_lengths) <= most:
        return tuple(prompt_lengths)
    requests = range(len(prompt_lengths))
    order = Random(0).sample(requests, len(requests))
    order.sort(key=lambda i: prompt_lengths[i] < max(prompt_lengths))
    cut = [min(length, SHORT) for length in prompt_lengths]
    room = most - sum(cut)
    for whole, i in enumerate(order):
        more = prompt_lengths[i] - cut[i]
        if whole >= MIN_WHOLE and more > room:
            continue
        cut[i], room = prompt_lengths[i], room - more
    return tuple(cut)


@dataclass(frozen=True)
class GateTokens:
    """What a gate runs if no token differs by a tie, and one interleaved batch has room for all
    cells."""

    requests: int
    prompt: int
    """Prompt tokens of a batch."""
    new: int
    """Tokens that each request generates."""
    batches: int
    """Batches of all requests: one of each cell, one of interleaved windows, and the last one."""
    prefills: int
    """Prefills of prompts and outputs for the K/V gate: off x off's, again with attention moved by
    a rounding step, and those of every batch that stages, if its tokens are others."""

    @property
    def prefilled(self) -> int:
        """Tokens of all prefills."""
        outputs = self.prefills * self.requests * (self.new - 1)
        return (self.batches + self.prefills) * self.prompt + outputs


def gate_tokens(
    block: Block, prompt_lengths: Sequence[int], new_tokens: int, *, interleaved: bool
) -> GateTokens:
    """What the gate of a block runs.

    Args:
        block: as `fit` returns it.
        prompt_lengths: tokens of each whole prompt.
        new_tokens: the scenario's max_new_tokens.
        interleaved: the run's cells are interleaved.
    """
    staging = sum(cell.nwor_mode is not NworMode.OFF for cell in block.order)
    return GateTokens(
        requests=len(block.prompts),
        prompt=sum(block.lengths or prompt_lengths),
        new=block.new_tokens or new_tokens,
        batches=len(block.order) + interleaved + bool(staging),
        prefills=3 + staging + interleaved if staging else 0,
    )


@dataclass(frozen=True)
class TokenSeconds:
    """What an engine takes, from a batch that ran."""

    prefill_s: float
    """Seconds of a prompt token."""
    decode_s: float
    """Seconds of a batch's windows, for each token that a request generates."""

    def gate_s(self, tokens: GateTokens) -> float:
        """Seconds of a gate of so many tokens."""
        return self.prefill_s * tokens.prefilled + self.decode_s * tokens.batches * tokens.new

    def most_prompt_tokens(self, seconds: float, tokens: GateTokens) -> int:
        """Prompt tokens of a batch with which a gate takes so many seconds; 0 if none are."""
        room_s = seconds - self.gate_s(replace(tokens, prompt=0))
        return max(int(room_s / self.prefill_s / (tokens.batches + tokens.prefills)), 0)


def token_seconds(batch: RanBatch) -> TokenSeconds | None:
    """Seconds a token of a batch of off x off; None if its windows have no times."""
    record, windows = batch.answer.record, batch.windows
    walls = [window.wall_ms for window in windows if window.wall_ms is not None]
    if not walls or not record.prompt_tokens:
        return None
    decode_s = min(sum(walls) * len(windows) / len(walls), record.latency_ms) / 1e3
    usual_s = median(walls) * len(windows) / 1e3  # the first ones may compile
    return TokenSeconds(
        prefill_s=max(record.latency_ms / 1e3 - decode_s, 1e-6) / record.prompt_tokens,
        decode_s=min(decode_s, usual_s) * record.requests / record.output_tokens,
    )


class GateSize:
    """The size of a run's gate: whole in a run that only checks, else cut to its time.

    Args:
        plan: the run's.
        encode: prompts to token ids.
        spec: says whether anything is timed, and how many tokens a request generates.

    Attributes:
        block: the gate's block, as large as it may be by now.
    """

    def __init__(self, plan: Plan, encode: Encode, spec: RunSpec):
        self.block = self._whole = plan.gate
        self._interleaved = plan.interleaved
        self._lengths = [len(ids) for ids in encode(plan.gate.prompts)]
        self._new_tokens = spec.scenario.max_new_tokens
        first = next((block.new_tokens for block in plan.blocks), None)
        self._timed_tokens = first or self._new_tokens
        self._most: int | None = None
        self._room_s: float | None = None
        self._forecast_s: float | None = None
        if not spec.checks_only:
            self._cut_to(MAX_PROMPT_TOKENS)

    @property
    def tokens(self) -> GateTokens:
        """What the gate runs."""
        interleaved = self._interleaved
        return gate_tokens(self.block, self._lengths, self._new_tokens, interleaved=interleaved)

    def _cut_to(self, most: int) -> None:
        self._most = most
        self.block = fit(self._whole, self._lengths, self._new_tokens, most)

    def fit_into(self, room_s: float | None, warmed: RanBatch | None) -> None:
        """Cut prompts further if the gate would take longer; never below MIN_WHOLE.

        Args:
            room_s: seconds that the budget leaves the gate; None without a budget.
            warmed: the last warm-up batch, from which the gate's time follows; None if none ran.
        """
        self._room_s = room_s
        per_token = None if warmed is None else token_seconds(warmed)
        if self._most is None or per_token is None:
            return
        if room_s is not None and per_token.gate_s(self.tokens) > room_s:
            self._cut_to(min(self._most, per_token.most_prompt_tokens(room_s, self.tokens)))
        self._forecast_s = per_token.gate_s(self.tokens)

    def gate_s(self, batch: RanBatch) -> float:
        """Seconds that the gate takes, by one of its batches."""
        per_token = token_seconds(batch)
        if per_token is None:
            return self.tokens.batches * batch.answer.record.latency_ms / 1e3
        return per_token.gate_s(self.tokens)

    def whole_s(self, batch: RanBatch) -> float:
        """Seconds that a batch takes, or would take with whole prompts and block 1's tokens."""
        record = batch.answer.record
        per_token = token_seconds(batch)
        whole = sum(self._lengths)
        if record.block != GATE_BLOCK or per_token is None or record.prompt_tokens == whole:
            return record.latency_ms / 1e3
        return per_token.prefill_s * whole + per_token.decode_s * self._timed_tokens

    def facts(self) -> GateFacts:
        """The size for run.json."""
        lengths = self.block.lengths or self._lengths
        pairs = zip(lengths, self._lengths, strict=True)
        return GateFacts(
            requests=len(lengths),
            whole=sum(length == whole for length, whole in pairs),
            prompt_tokens=sum(lengths),
            longest_prompt=max(lengths),
            new_tokens=self.tokens.new,
            most_prompt_tokens=self._most,
            forecast_s=None if self._forecast_s is None else round(self._forecast_s, 3),
            room_s=None if self._room_s is None else round(self._room_s, 3),
        )
