"""Decide from gaps measured in mode off whether a differing greedy token is a tie. Pure.

Two sound kernels sum in a different order, so in bf16 they may pick different tokens at a near-tie.
The tolerance is measured, not a constant: mode off answers the same prefix in several batch shapes.
A place's gap is the mean over those shapes. The error scale s is the root mean square, over many
output positions, of the difference between mode off's own decoding and that mean; a sound cell's
decoding differs from the mean by as much.

A staging cell uses another attention kernel, and mode off may agree with itself bit for bit:
FlashAttention adds in the same order in decode and in prefill (on an H200, 0 of 128 positions
moved in one set of prompts). So mode off also answers with every layer's attention moved by one
rounding step (`plugin.attention_nudge`), the typical difference of two correct kernels; s is the
larger of the two errors. On an H200 that s, about 0.12 nats on SmolLM2, explains the number of
differing tokens in sound staging cells: 10, 6 and 3 of 320 in three sets of prompts, with 8, 8 and
3 expected.

Why a single gap may reach 5 s: for normal errors a sound flip lies beyond c s at a share of
`density * s * (phi(c) - c * Q(c))` of the positions (density: share of positions per nat of the
gap near 0; phi, Q: the normal density and upper tail). With density 0.5 and s = 0.1 that is 2e-5
at c = 3, 4e-7 at c = 4 and 3e-9 at c = 5, and a run compares 1e4 to 1e6 tokens. Errors measured in
bf16 have a kurtosis of 5, so sound flips would exceed 4 s now and then.

Logits in bf16 are rounded to steps of 1/8 for logits of 16 to 32: two near-equal logits may be one
step apart, and the smallest movement can reverse their order. If few positions move, 5 s may be
less than a step. So a gap may always reach the largest movement observed, which is that of a gap,
of both candidates together. Half of all sound flips then have a gap of one step.

Without rounding steps most sound flips have much smaller gaps: the mean of (gap / s)^2 over flips
is 2/3 for normal errors and 1 for Laplace errors, while a fault's gaps can have any size. So the
sum of squares over a cell's n differences must stay within `2 n + 9 sqrt(n)` (twice the mean of
flips in steps, and four of Laplace's standard deviations), or 25, one gap of 5 s. The unit here is
the error scale of the positions that moved, which is s without steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, sqrt

ALLOWED_RMS = 5.0
"""The largest gap of a tie in multiples of the error scale, if no movement was larger."""

STILL = 1e-4
"""Movements up to here, in nats, are the rounding of log probabilities in float32."""

_SPREAD = 9.0

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

    within: int
    """Of them, positions whose two likeliest tokens are within the allowance."""

    moved_rms: float
    """Root mean square of the movements over the positions that moved at all, in nats."""

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
    def allowance(self) -> float:
        """The scale's allowance, or this place's own movement if that is larger."""
        known = [gap for gap in self.gaps if gap is not None]
        return max(self.scale.allowance, max(known) - min(known)) if known else 0.0

    @property
    def multiple(self) -> float:
        """The gap over the scale of moving positions, or over a fifth of the allowance."""
        if not self.gap:
            return 0.0
        return self.gap / max(self.scale.moved_rms, max(self.allowance, STILL) / ALLOWED_RMS)

    @property
    def is_tie(self) -> bool:
        """True if the gap is within the allowance."""
        return self.gap is not None and self.gap <= self.allowance + STILL

    def describe(self) -> str:
        """The gap beside the allowance, in words."""
        if self.gap is None:
            return "the token is not among mode off's likeliest there"
        return f"{self.gap:.3g} nats apart in mode off, a tie is at most {self.allowance:.3g}"


def allowed_gap(rms: float, largest: float) -> float:
    """The largest gap of a tie, in nats, from the movements' root mean square and the largest."""
    return max(ALLOWED_RMS * rms, largest)


def gap_between(top: TopLogprobs, reference: int, token: int) -> float | None:
    """log p(reference) - log p(token), in nats; None if one of them is not in `top`."""
    if reference not in top or token not in top:
        return None
    return top[reference] - top[token]


def leading_two(top: TopLogprobs) -> tuple[int, int] | None:
    """The two likeliest tokens, the likeliest first; None if fewer were recorded."""
    ranked = sorted(top, key=lambda token: (-top[token], token))
    return (ranked[0], ranked[1]) if len(ranked) > 1 else None


def together_outside(differences: int, squares: float) -> str | None:
    """Why ties that are each within their allowance are too far apart together; None if not.

    Args:
        differences: checked differences of one cell.
        squares: sum of the squares of their `multiple`.
    """
    allowed = max(ALLOWED_RMS**2, 2 * differences + _SPREAD * sqrt(differences))
    if squares <= allowed:
        return None
    return (
        f"its {differences} differing tokens are ties one by one, but together they are too far "
        f"apart: the squared gaps sum to {squares:.0f} times the squared error of mode off, "
        f"sound flips to {allowed:.0f} at most"
    )


def error_scale(
    decoded: Sequence[TopLogprobs],
    nudged: Sequence[TopLogprobs],
    asked: Sequence[Sequence[TopLogprobs]],
) -> ErrorScale:
    """The error scale from mode off's decoding, nudged attention, and the batch shapes.

    Args:
        decoded: log probabilities at each position from mode off's own windows.
        nudged: the same positions with attention moved by one rounding step.
        asked: the same positions in each batch shape.

    Each position gives two movements of the gap of `decoded`'s two likeliest tokens: that of
    `decoded`, and that of `nudged`. Every number is the larger of the two kinds.
    Raises ValueError if no position has both tokens in every shape.
    """
    moved: tuple[list[float], list[float]] = ([], [])
    within = []
    for tops in zip(decoded, nudged, *asked, strict=True):
        two = leading_two(tops[0])
        if two is None:
            continue
        gaps = [gap_between(top, *two) for top in tops]
        known = [gap for gap in gaps if gap is not None]
        if len(known) < len(gaps):
            continue
        mean = fsum(known[2:]) / len(known[2:])
        for movements, gap in zip(moved, known[:2], strict=True):
            movements.append(gap - mean)
        within.append(abs(mean))
    if not within:
        raise ValueError("no position has its two likeliest tokens in every shape")
    rms = max(map(_rms, moved))
    largest = max(abs(m) for movements in moved for m in movements)
    near = sum(gap <= allowed_gap(rms, largest) + STILL for gap in within)
    moved_rms = max(_rms([m for m in movements if abs(m) > STILL]) for movements in moved)
    return ErrorScale(rms, largest, len(within), near, moved_rms)


def _rms(values: Sequence[float]) -> float:
    return sqrt(fsum(value * value for value in values) / len(values)) if values else 0.0
