"""How many drafts would the target accept? Greedy windows, simulated on its own text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwor_bench.models.training.model import EagleHead, unroll
from nwor_bench.models.training.target import Target


@dataclass(frozen=True)
class Acceptance:
    """Counts over windows that each drafted the same number of tokens.

    Attributes:
        windows: windows counted.
        accepted: drafts accepted at each position, first position first.
    """

    windows: int
    accepted: tuple[int, ...]

    @property
    def length(self) -> float | None:
        """Tokens that a request gains a window, bonus token included; None without a window."""
        return 1 + sum(self.accepted) / self.windows if self.windows else None

    @property
    def rates(self) -> tuple[float, ...] | None:
        """Accepted drafts over drafts, position by position; None without a window."""
        return tuple(n / self.windows for n in self.accepted) if self.windows else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "windows": self.windows,
            "accepted": list(self.accepted),
            "acceptance_length": self.length,
            "rates": None if self.rates is None else list(self.rates),
        }


def accepted_drafts(drafts: Tensor, tokens: Tensor) -> Tensor:
    """How many drafts are accepted if a window begins at each position.

    Args:
        drafts: drafted token of step j in the row of `unroll`, [steps, tokens - 1], int64.
        tokens: the sequence, [tokens], int64; from the prompt's end on the target's greedy text.

    Returns:
        [tokens - 1 - steps], int64: for a window that begins at t (the hidden state at t and
        token t + 1 known) the number of leading drafts that equal tokens t + 2, t + 3, ...
    """
    steps = drafts.shape[0]
    starts = tokens.shape[0] - 1 - steps
    hits = torch.stack([
        drafts[j, j : j + starts] == tokens[j + 2 : j + 2 + starts] for j in range(steps)
    ])  # fmt: skip
    return hits.long().cumprod(0).sum(0)


def walk(accepted: Sequence[int], first: int, steps: int) -> Acceptance:
    """Windows one after another: each begins where the last one's bonus token ended.

    Feeding the sequence's own tokens to later steps is exact: a window's later drafts count
    only while the earlier ones were those very tokens.
    """
    counts, windows, at = [0] * steps, 0, first
    while at < len(accepted):
        windows += 1
        for position in range(accepted[at]):
            counts[position] += 1
        at += accepted[at] + 1
    return Acceptance(windows, tuple(counts))


@torch.no_grad()
def measure_acceptance(
    head: EagleHead,
    target: Target,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    draft_tokens: int,
    answer_tokens: Sequence[int],
) -> list[Acceptance]:
    """Acceptance over greedy answers; `sequences` are (prompt, answer) token ids.

    One result for each of `answer_tokens`: over the first so many tokens of every answer.
    """
    windows, counts = [0] * len(answer_tokens), [[0] * draft_tokens for _ in answer_tokens]
    for prompt, answer in sequences:
        tokens = torch.tensor([*prompt, *answer])
        ids = tokens.to(target.device)[None]
        drafted = unroll(head, target.embed(ids), target.hidden_states(ids), draft_tokens)
        drafts = torch.stack([target.logits(step[0]).argmax(-1).cpu() for step in drafted])
        accepted = accepted_drafts(drafts, tokens).tolist()
        for row, length in enumerate(answer_tokens):
            # What follows later changes nothing before it: a shorter answer is a prefix of this.
            judged = accepted[: len(prompt) + length - 1 - draft_tokens]
            found = walk(judged, len(prompt) - 1, draft_tokens)
            windows[row] += found.windows
            counts[row] = [a + b for a, b in zip(counts[row], found.accepted, strict=True)]
    return [Acceptance(w, tuple(c)) for w, c in zip(windows, counts, strict=True)]
