"""When has a sweep measured enough? By the intervals' width or by the clock, never the verdict.

Looking at a verdict again and again until it is conclusive finds a difference that does not exist
in a quarter of runs (simulated: sweeps/studies/interval-coverage). Whether an interval is
narrow says nothing about where it lies, so a run may stop on it (Chow and Robbins, Annals of
Mathematical Statistics 36, 1965). What remains is that a narrow interval is also a lucky one; a
first look after FIRST_LOOK blocks and looks that lie LOOK_STEP apart keep the interval's
coverage at the stop between 93 and 97 % (simulated too). The clock does not depend on the ratio.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from nwor_bench.errors import ConfigError
from nwor_bench.workload.options import fraction, quantity, seconds

FIRST_LOOK = 10
"""Fewest blocks on whose intervals a run may stop."""

LOOK_STEP = 1.2
"""Blocks at a look over those at the look before."""

WIDEST = 0.1
"""Largest half-width to stop at."""

MAX_BLOCKS = 200
"""Blocks at which a run ends that neither the width nor the clock has ended."""


CHECK_SHARE = 1 / 3
"""Most of a time budget that warm-up, gate and whole batches may take together if cells are
interleaved: the gate cuts more prompts, and no whole batch begins that would end later. The rest is
for interleaved windows."""


@dataclass(frozen=True)
class StoppingRule:
    """How many timed blocks a sweep runs.

    Attributes:
        blocks: without `ci_width` and `time_budget_s` exactly this many, else at least (the clock
            may end it before).
        max_blocks: at most this many.
        ci_width: stop when the half-width of every ratio's interval is at most this fraction.
        time_budget_s: start no block that would end later than this many seconds after the engine's
            start.
    """

    blocks: int
    max_blocks: int
    ci_width: float | None = None
    time_budget_s: float | None = None

    @property
    def looks(self) -> tuple[int, ...]:
        """Numbers of blocks after which the widths are checked, without the last."""
        if self.ci_width is None:
            return ()
        looks = [max(self.blocks, FIRST_LOOK)]
        while looks[-1] < self.max_blocks:
            looks.append(ceil(looks[-1] * LOOK_STEP))
        return tuple(look for look in looks if look < self.max_blocks)

    def stop(
        self, done: int, half_widths: Sequence[float | None], spent_s: float, next_s: float
    ) -> str | None:
        """Why to stop after `done` blocks, or None to go on.

        Args:
            done: finished blocks.
            half_widths: of the compared cells (None: no interval); they count at looks only.
            spent_s: time since the engine's start.
            next_s: time that one more block takes.
        """
        if done >= self.max_blocks:
            return None if self.max_blocks == self.blocks else f"--max-blocks {self.max_blocks}"
        if self.time_budget_s is not None and spent_s + next_s > self.time_budget_s:
            return f"--time-budget {self.time_budget_s:g}s: {spent_s:.1f} s were spent"
        known = [width for width in half_widths if width is not None]
        if (
            self.ci_width is not None
            and done in self.looks
            and known
            and len(known) == len(half_widths)
            and max(known) <= self.ci_width
        ):
            widest = f"{100 * max(known):.2f} %"
            return f"--ci-width {100 * self.ci_width:g}%: every ratio is known to +- {widest}"
        return None


parse_fraction = quantity(
    fraction, lambda value: 0 < value < 1, "write for example 0.5% (half the interval)"
)
"""`0.5%` or `0.005`, between 0 and 1."""

parse_seconds = quantity(seconds, lambda value: value > 0, "write for example 60s, 5m or 1h")
"""`60s`, `5m`, `1h` or a number of seconds, more than 0."""


def parse_half_width(flag: str, text: str) -> float:
    """`parse_fraction` up to WIDEST: `0.5` is hardly meant as 50 %."""
    value = parse_fraction(flag, text)
    if value > WIDEST:
        wide = f"+-{100 * value:g} % would say nothing (at most {100 * WIDEST:g}%)"
        meant = f"; did you mean {text}%?" if text.replace(".", "", 1).isdigit() else ""
        raise ConfigError.for_field(flag, text, f"{wide}{meant}")
    return value
