"""From the times of contenders to a choice: what attends windows of one size, at which contexts.

Contenders are our kernel in its tilings, stock's attention over the committed tokens with the
window's rows merged in, and stock itself with its write. A staged contender must be faster than
stock by MIN_GAIN and more than the measurements scatter. Pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from nwor_kernels.verify_attention.tuning import Tiling


class Contender(StrEnum):
    """A way to attend a window."""

    OURS = "ours"
    """`verify_attention` over everything, in its usual tiling."""
    OURS_4 = "ours4"
    """`verify_attention` over everything, in `Tiling.FOUR_PROGRAMS`."""
    OURS_32 = "ours32"
    """`verify_attention` over everything, in `Tiling.ROWS_32`."""
    MERGE = "merge"
    """Stock over the committed tokens, and a kernel that merges the window's rows in."""
    STOCK = "stock"
    """Stock's write and attention: the window is not staged."""


TILINGS = {
    Contender.OURS: Tiling.USUAL,
    Contender.OURS_4: Tiling.FOUR_PROGRAMS,
    Contender.OURS_32: Tiling.ROWS_32,
}

LENGTHS = (1024, 8192, 32768)
"""Contexts at which contenders are timed, if the cache has room for them."""


MIN_GAIN = 0.03
"""Share of stock's time that staging must gain beyond the noise. An engine's windows are not those
that were timed: on an H200 (8B, 64 requests) a layer gained 6 us where 10 of 107 were timed, and
Phi-4's shape lost 2 % of a window where 0.7 % of attention's time had been timed as a gain."""


@dataclass(frozen=True)
class Choice:
    """What was measured of layers of one shape in windows of one size."""

    contender: Contender
    """Attends staged windows."""
    lengths: tuple[int, ...]
    """Contexts that were timed, ascending."""
    staged: tuple[float, ...]
    """Seconds of one layer at each of them: the contender's, with its share of the commit."""
    stock: tuple[float, ...]
    """Seconds of one layer at each of them: stock's write and attention."""
    noise: tuple[float, ...]
    """Seconds by which `staged` minus `stock` may be wrong, at each of them."""
    all_us: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    """Microseconds of one layer by contender, without the commit."""
    blocks: int = 0
    """Fewest blocks behind a time."""
    conditions: Mapping[str, float] = field(default_factory=dict, hash=False)
    """The GPU's while it was timed (`instruments.conditions`); empty without NVML."""


def decide(
    times: Mapping[Contender, Sequence[Sequence[float]]],
    lengths: Sequence[int],
    commit: float = 0.0,
) -> Choice:
    """The choice for one size: the contender that surely gains most over all lengths.

    Lengths at which it does not surely gain are left to stock, so it loses nothing there.

    Args:
        times: seconds of a layer at each length in each block, stock's with its write among them.
        commit: a layer's share of the commit that staging adds.
    """
    middle = {c: tuple(map(median, of_lengths)) for c, of_lengths in times.items()}
    told = {str(c): tuple(round(1e6 * t, 2) for t in ts) for c, ts in middle.items()}

    def choice_of(contender: Contender) -> Choice:
        pairs = zip(times[contender], times[Contender.STOCK], strict=True)
        noise = tuple(uncertainty(*both) for both in pairs)
        staged = tuple(t + commit for t in middle[contender])
        blocks = min(map(len, times[contender]))
        stock = middle[Contender.STOCK]
        return Choice(contender, tuple(lengths), staged, stock, noise, told, blocks)

    def lost(choice: Choice) -> tuple[float, float]:
        times_at = zip(choice.staged, choice.noise, choice.stock, strict=True)
        ratios = [(mine + noise) / stock for mine, noise, stock in times_at]
        return sum(min(ratio, 1.0) for ratio in ratios), sum(ratios)

    return min((choice_of(c) for c in times if c is not Contender.STOCK), key=lost)


def uncertainty(mine: Sequence[float], stock: Sequence[float]) -> float:
    """Two standard errors of the median difference, by its median absolute deviation.

    Args:
        mine, stock: times of the same blocks.
    """
    differences = [a - b for a, b in zip(mine, stock, strict=True)]
    middle = median(differences)
    deviation = median(abs(difference - middle) for difference in differences)
    # For normal noise 1.48 deviations are its scale, and a median's error is 1.25 of a mean's.
    return 2 * 1.25 * 1.48 * deviation / math.sqrt(len(differences))


@dataclass(frozen=True)
class DirectLengths:
    """At which contexts windows of one size are written directly."""

    lengths: tuple[int, ...] = ()
    direct: tuple[bool, ...] = ()

    @property
    def always(self) -> bool:
        """No window of this size is staged."""
        return bool(self.direct) and all(self.direct)

    @property
    def sometimes(self) -> bool:
        """Some are and others are not."""
        return any(self.direct) and not all(self.direct)

    def at(self, mean_length: float) -> bool:
        """True if the nearest length that was timed writes directly."""
        if not any(self.direct):
            return False
        apart = [abs(math.log(max(mean_length, 1.0) / length)) for length in self.lengths]
        return self.direct[apart.index(min(apart))]


NEVER = DirectLengths()
ALWAYS = DirectLengths((1,), (True,))


def direct_lengths(choices: Sequence[tuple[int, Choice]]) -> DirectLengths:
    """Where the target's layers together do not surely gain MIN_GAIN.

    Args:
        choices: for each shape of layers, how many there are and their choice, of equal lengths.
    """
    if not choices:
        return NEVER
    lengths = choices[0][1].lengths
    staged, stock, noise = (
        [sum(count * getattr(choice, name)[i] for count, choice in choices)
         for i in range(len(lengths))]
        for name in ("staged", "stock", "noise")
    )  # fmt: skip
    sums = zip(staged, noise, stock, strict=True)
    return DirectLengths(lengths, tuple(a + error >= (1 - MIN_GAIN) * b for a, error, b in sums))
