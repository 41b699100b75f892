"""Is a differing greedy token a tie? Pure: gaps measured in mode off go in, a verdict comes out.

Two sound kernels sum in another order, so in bf16 they may prefer different tokens where two
logits all but agree. How nearly is not taken from a constant or from the whole vocabulary: mode
off answers the same prefix in several batch shapes, and the gap of the two candidates may be no
larger than mode off itself moves such gaps.

Why five times the root mean square s of the movements: a sound cell's gap differs from the one
measured here by about s, so for normal errors a sound flip lies beyond c s at a share of
`density * s * (phi(c) - c * Q(c))` of the positions (density: share of positions per nat near a
gap of 0; phi, Q: the normal density and upper tail). With density 0.2 and s = 0.1 that is 8e-6 at
c = 3, 1e-7 at c = 4 and 1e-9 at c = 5: a run compares 1e4 to 1e6 tokens, and errors have longer
tails than the normal distribution's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, sqrt

ALLOWED_RMS = 5.0
"""The allowance in multiples of the movements' root mean square."""

TopLogprobs = Mapping[int, float]
"""Log probabilities of the likeliest next tokens, by token id, in nats."""


@dataclass(frozen=True)
class ErrorScale:
    """How far mode off moves the gap of two candidates from one batch shape to another."""

    rms: float
    """Root mean square of the movements, in nats."""

    largest: float
    """The largest movement, in nats."""

    positions: int
    """Output positions on which it was measured."""

    within: int
    """Of them, positions whose two likeliest tokens lie within the allowance."""

    @property
    def allowance(self) -> float:
        """The largest gap, in nats, that counts as a tie anywhere."""
        return ALLOWED_RMS * self.rms


@dataclass(frozen=True)
class Place:
    """Where a cell's output first leaves the reference's, within one request."""

    request: int
    position: int
    """Index into the request's output tokens."""

    reference: int
    """The token of off x off."""

    token: int
    """The cell's token."""


@dataclass(frozen=True)
class PlaceVerdict:
    """One differing token: its gap in each batch shape of mode off, and what is allowed."""

    place: Place

    gaps: tuple[float | None, ...]
    """log p(reference's token) - log p(cell's token), in nats, in each shape; None where one of
    the two is not among the likeliest tokens."""

    scale: ErrorScale

    @property
    def gap(self) -> float | None:
        """The smallest distance of the two candidates; 0 if the shapes disagree which leads."""
        known = [gap for gap in self.gaps if gap is not None]
        if len(known) < len(self.gaps) or not known:
            return None
        if min(known) <= 0 <= max(known):
            return 0.0
        return min(abs(gap) for gap in known)

    @property
    def allowance(self) -> float:
        """The scale's allowance, or this place's own movement if that is larger."""
        known = [gap for gap in self.gaps if gap is not None]
        return max(self.scale.allowance, max(known) - min(known)) if known else 0.0

    @property
    def is_tie(self) -> bool:
        """True if mode off cannot tell the two tokens apart."""
        return self.gap is not None and self.gap <= self.allowance

    def describe(self) -> str:
        """The gap beside the allowance, in words."""
        if self.gap is None:
            return "the token is not among mode off's likeliest there"
        return f"{self.gap:.3g} nats apart in mode off, a tie is at most {self.allowance:.3g}"


def gap_between(top: TopLogprobs, reference: int, token: int) -> float | None:
    """log p(reference) - log p(token), in nats; None if one of them is not in `top`."""
    if reference not in top or token not in top:
        return None
    return top[reference] - top[token]


def leading_two(top: TopLogprobs) -> tuple[int, int] | None:
    """The two likeliest tokens, the likeliest first; None if fewer were recorded."""
    ranked = sorted(top, key=lambda token: (-top[token], token))
    return (ranked[0], ranked[1]) if len(ranked) > 1 else None


def error_scale(first: Sequence[TopLogprobs], second: Sequence[TopLogprobs]) -> ErrorScale:
    """The scale from the same positions in two batch shapes.

    Each position gives one movement: that of the gap of the two likeliest tokens of `first`.
    Raises ValueError if no position has both tokens in both shapes.
    """
    gaps: list[tuple[float, float]] = []
    for top, other in zip(first, second, strict=True):
        two = leading_two(top)
        if two is None:
            continue
        before, after = gap_between(top, *two), gap_between(other, *two)
        if before is not None and after is not None:
            gaps.append((before, after))
    if not gaps:
        raise ValueError("no position has its two likeliest tokens in both shapes")
    moved = [after - before for before, after in gaps]
    rms = sqrt(fsum(m * m for m in moved) / len(moved))
    within = sum(abs(before) <= ALLOWED_RMS * rms for before, _ in gaps)
    return ErrorScale(rms, max(abs(m) for m in moved), len(gaps), within)
