"""Decide from gaps measured in mode off whether a differing greedy token is a tie. Pure.

Two sound kernels sum in a different order, so in bf16 they may pick different tokens at a near-tie.
How near is measured: mode off answers the same prefix in several batch shapes, and a place's gap is
the mean over them. If a sound cell's token differs, its error exceeds the gap. Errors of mode off:
its own decoding against that mean, and, for cells with another attention kernel, every layer's
attention moved by one rounding step (`plugin.attention_nudge`), as another correct kernel's is.
That step explains the differing tokens of sound staging cells (SmolLM2 on an H200: 10, 6 and 3 of
320 with 8, 8 and 3 expected). `docs/tie-rule.md` has the reasons for each limit.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, sqrt

import numpy as np

ALLOWED_RMS = 4.0
"""The largest gap of a tie in multiples of the error scale, if no movement was larger."""

MAX_GAP = 0.5
"""The largest gap of a tie in nats, whatever was measured: two steps of 1/8 for each candidate,
twice the largest gap of 269 sound flips. The other token is then 0.61 times as likely."""

FLIPS_MULTIPLE = 2.0
"""Expected sound flips are multiplied by this: another kernel may err more than was measured."""

FLIPS_ALPHA = 1e-4
"""Chance of a false alarm of the number of flips."""

STILL = 1e-4
"""Movements up to here, in nats, are the rounding of log probabilities in float32."""

TopLogprobs = Mapping[int, float]
"""Log probabilities of the likeliest next tokens, by token id, in nats."""


@dataclass(frozen=True)
class ErrorScale:
    """Movement of two candidates' gap in mode off from its mean: by decoding, or with attention
    moved by one rounding step; the larger of the two."""

    rms: float
    """Root mean square of the movements, in nats."""

    largest: float
    """The largest movement, in nats."""

    positions: int
    """Output positions on which it was measured."""

    flips: tuple[tuple[float, float], ...]
    """(gap in nats, share of all output positions that have that gap or a larger one and at which a
    sound cell picks another token), by rising gaps."""

    def flips_from(self, gap: float) -> float:
        """The share of positions at which a sound cell flips a gap of so many nats or more."""
        at = bisect_left(self.flips, (gap - STILL,))
        return self.flips[at][1] if at < len(self.flips) else 0.0

    @property
    def allowance(self) -> float:
        """The largest gap, in nats, that counts as a tie anywhere."""
        return allowed_gap(self.rms, self.largest)


@dataclass(frozen=True)
class Place:
    """First differing output token of one request."""

    request: int
    position: int
    """Index into the request's output tokens."""

    reference: int
    """The token of off x off."""

    token: int
    """The cell's token."""


@dataclass(frozen=True)
class PlaceVerdict:
    """One differing token: its gap in each batch shape of mode off, and the limit."""

    place: Place

    gaps: tuple[float | None, ...]
    """log p(reference's token) - log p(cell's token), in nats, in each shape; None if one of
    the two is not among the likeliest tokens."""

    scale: ErrorScale

    @property
    def gap(self) -> float | None:
        """The distance of the two candidates, in nats: the mean over the shapes, without sign."""
        known = [gap for gap in self.gaps if gap is not None]
        if len(known) < len(self.gaps) or not known:
            return None
        return abs(fsum(known)) / len(known)

    @property
    def is_reversed(self) -> bool:
        """True if mode off's own shapes disagree about the likelier token."""
        known = [gap for gap in self.gaps if gap is not None]
        return bool(known) and min(known) < 0 < max(known)

    @property
    def is_tie(self) -> bool:
        """True if the gap is within the allowance, or the place's own shapes disagree."""
        if self.gap is None:
            return False
        return self.is_reversed or self.gap <= self.scale.allowance + STILL

    def describe(self) -> str:
        """The gap beside the allowance, in words."""
        if self.gap is None:
            return "the token is not among mode off's likeliest there"
        either = " (mode off itself picks either)" if self.is_reversed else ""
        allowed = self.scale.allowance
        return f"{self.gap:.3g} nats apart in mode off{either}, a tie is at most {allowed:.3g}"


def allowed_gap(rms: float, largest: float) -> float:
    """The largest gap of a tie, in nats, from the movements' root mean square and the largest."""
    return min(max(ALLOWED_RMS * rms, largest), MAX_GAP)


def gap_between(top: TopLogprobs, reference: int, token: int) -> float | None:
    """log p(reference) - log p(token), in nats; None if one of them is not in `top`."""
    if reference not in top or token not in top:
        return None
    return top[reference] - top[token]


def leading_two(top: TopLogprobs) -> tuple[int, int] | None:
    """The two likeliest tokens, the likeliest first; None if fewer were recorded."""
    ranked = sorted(top, key=lambda token: (-top[token], token))
    return (ranked[0], ranked[1]) if len(ranked) > 1 else None


def together_outside(gaps: Sequence[float], scale: ErrorScale, compared: float) -> str | None:
    """Why ties that are each within their allowance are no sound flips together; None if they are.

    Args:
        gaps: of the ties of one cell, in nats.
        compared: tokens that were compared.
    """
    from scipy.special import pdtrc  # here, since refusals of bad input must not wait for it

    for count, gap in enumerate(sorted(gaps, reverse=True), 1):
        expected = scale.flips_from(gap) * compared
        if pdtrc(count - 1, FLIPS_MULTIPLE * expected + 1) < FLIPS_ALPHA:
            return (
                f"its {len(gaps)} differing tokens are ties one by one, but too many together: "
                f"{count} have a gap of {gap:.3g} nats or more, where errors of mode off flip "
                f"{expected:.1f} of {compared:.0f} tokens"
            )
    return None


def error_scale(
    decoded: Sequence[TopLogprobs],
    nudged: Sequence[TopLogprobs],
    asked: Sequence[Sequence[TopLogprobs]],
    every: Sequence[TopLogprobs] = (),
    *,
    same_kernel: bool = False,
) -> ErrorScale:
    """The error scale from mode off's decoding, nudged attention, and the batch shapes.

    Args:
        decoded: log probabilities at each position from mode off's own windows.
        nudged: the same positions with attention moved by one rounding step.
        asked: the same positions in each batch shape.
        every: all positions of mode off's windows, of which `decoded` is a sample; () if no other.
        same_kernel: every cell has mode off's attention kernel: `nudged` is an upper limit only.

    Raises ValueError if no position has both tokens in every shape.
    """
    movements, steps = _movements(decoded, nudged, asked)
    gaps = _leading_gaps(every or decoded)
    kinds = [movements] if same_kernel else [movements, steps]
    rms, largest = max(map(_rms, kinds)), max(map(max, kinds))
    if same_kernel:  # movements are rare, and at least one rounding step
        step = min((gap for gap in gaps if gap > STILL), default=0.0)
        largest = max(largest, min(2 * step, allowed_gap(_rms(steps), max(steps))))
    near = [gap for gap in gaps if gap <= allowed_gap(rms, largest) + STILL]
    flips = _flips(near, max(movements, steps, key=sum), len(gaps))
    return ErrorScale(rms, largest, len(movements), flips)


def _movements(
    decoded: Sequence[TopLogprobs],
    nudged: Sequence[TopLogprobs],
    asked: Sequence[Sequence[TopLogprobs]],
) -> tuple[list[float], list[float]]:
    """How far the gap of `decoded`'s two likeliest tokens is from its mean over the shapes: that of
    `decoded`, and that of `nudged`; without sign."""
    moved: tuple[list[float], list[float]] = ([], [])
    for tops in zip(decoded, nudged, *asked, strict=True):
        two = leading_two(tops[0])
        gaps = [] if two is None else [gap_between(top, *two) for top in tops]
        known = [gap for gap in gaps if gap is not None]
        if not known or len(known) < len(gaps):
            continue
        mean = fsum(known[2:]) / len(known[2:])
        for movements, gap in zip(moved, known[:2], strict=True):
            movements.append(abs(gap - mean))
    if not moved[0]:
        raise ValueError("no position has its two likeliest tokens in every shape")
    return moved


def _leading_gaps(tops: Sequence[TopLogprobs]) -> list[float]:
    """The gap of the two likeliest tokens at each position, in nats."""
    leading = [(top, leading_two(top)) for top in tops]
    return [top[two[0]] - top[two[1]] for top, two in leading if two is not None]


def _flips(
    gaps: Sequence[float], movements: Sequence[float], positions: int
) -> tuple[tuple[float, float], ...]:
    """`ErrorScale.flips` of so many positions, for errors like these movements.

    Half of the errors have the other sign; half of those that make two tokens equal leave their
    order. One movement more than was measured reaches every gap.
    """
    falling, errors = np.sort(gaps)[::-1], np.array(movements)[:, None]
    reach = (errors > np.maximum(falling - STILL, STILL)).sum(0)
    beyond = (errors > falling + STILL).sum(0)
    shares = np.cumsum(((reach + beyond) / 2 + 1) / (2 * (len(movements) + 1))) / positions
    return tuple(zip(falling.tolist(), shares.tolist(), strict=True))[::-1]


def _rms(values: Sequence[float]) -> float:
    return sqrt(fsum(value * value for value in values) / len(values)) if values else 0.0
