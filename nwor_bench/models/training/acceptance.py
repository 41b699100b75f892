"""Acceptance of a head's drafts: greedy windows, simulated on the target's own text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwor_bench.models.training.eagle_head import EagleHead, unroll
from nwor_bench.models.training.target import Target


@dataclass(frozen=True)
class Acceptance:
    """Accepted drafts by position, over windows with equally many drafts.

    Attributes:
        windows: windows counted.
        accepted: accepted drafts at each position, first position first.
    """

    windows: int
    accepted: tuple[int, ...]

    @property
    def length(self) -> float | None:
        """Acceptance length (tokens per window, bonus token included); None without windows."""
        return 1 + sum(self.accepted) / self.windows if self.windows else None

    @property
    def rates(self) -> tuple[float, ...] | None:
        """Acceptance rate by position; None without windows."""
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
    """Number of accepted drafts for a window at each position.

    Args:
        drafts: token drafted in step j, in the rows of `unroll`, [steps, tokens - 1], int64.
        tokens: prompt and the target's greedy answer, [tokens], int64.

    Returns:
        [tokens - 1 - steps], int64: for a window at position t (hidden state of t and token t + 1
        are known) the number of leading drafts that equal tokens t + 2, t + 3, ...
    """
    steps = drafts.shape[0]
    starts = tokens.shape[0] - 1 - steps
    hits = torch.stack([
        drafts[j, j : j + starts] == tokens[j + 2 : j + 2 + starts] for j in range(steps)
    ])  # fmt: skip
    return hits.long().cumprod(0).sum(0)


def walk(accepted: Sequence[int], first: int, steps: int) -> Acceptance:
    """Acceptance over consecutive windows: each begins after the last one's bonus token.

    Feeding the sequence's own tokens to later draft steps is exact, because a draft counts only
    if all earlier drafts of the window equal those tokens.
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

    Returns one result for each length in `answer_tokens`, over the first so many answer tokens.
    """
    windows, counts = [0] * len(answer_tokens), [[0] * draft_tokens for _ in answer_tokens]
    for prompt, answer in sequences:
        tokens = torch.tensor([*prompt, *answer])
        ids = tokens.to(target.device)[None]
        drafted = unroll(head, target.embed(ids), target.hidden_states(ids), draft_tokens)
        drafts = torch.stack([target.logits(step[0]).argmax(-1).cpu() for step in drafted])
        accepted = accepted_drafts(drafts, tokens).tolist()
        for row, length in enumerate(answer_tokens):
            # Later tokens do not change earlier ones, so a shorter answer is a prefix of this.
            counted = accepted[: len(prompt) + length - 1 - draft_tokens]
            found = walk(counted, len(prompt) - 1, draft_tokens)
            windows[row] += found.windows
            counts[row] = [a + b for a, b in zip(counts[row], found.accepted, strict=True)]
    return [Acceptance(w, tuple(c)) for w, c in zip(windows, counts, strict=True)]
