"""The checks for people, at most 80 columns wide."""

from collections.abc import Sequence
from functools import partial
from textwrap import wrap as wrap_text

from nwor_bench.cli.doctor.check import Check, State, can_sweep

WIDTH = 80
INDENT = 19

wrap = partial(wrap_text, width=WIDTH, break_on_hyphens=False)
"""Lines of text; paths, options and packages have hyphens, and are there to be copied."""


def check_lines(checks: Sequence[Check]) -> list[str]:
    """One line a check, `name  state  what was found`; below it what to do."""
    lines = []
    for check in checks:
        head = f"{check.name:9} {check.state:8} "
        lines += wrap(check.found, initial_indent=head, subsequent_indent=" " * INDENT) or [head]
        if check.remedy:
            arrow = " " * INDENT + "-> "
            lines += wrap(check.remedy, initial_indent=arrow, subsequent_indent=" " * len(arrow))
    return [*lines, "", *wrap(verdict(checks))]


def verdict(checks: Sequence[Check]) -> str:
    """Can a sweep run, and what else cannot be measured?"""
    failed = [check.name for check in checks if check.state is not State.OK]
    if not can_sweep(checks):
        stops = [check.name for check in checks if check.needed and check.name in failed]
        return f"A sweep cannot run here until these are mended: {', '.join(stops)}."
    if not failed:
        return "A sweep can run here, and everything that nwor-bench measures can be measured."
    return f"A sweep can run here. Missing or wrong, but not needed for it: {', '.join(failed)}."
