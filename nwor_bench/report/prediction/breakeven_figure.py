"""The break-even map as small multiples: one map for each way of staging and number of drafts."""

import io
from typing import TYPE_CHECKING

from nwor_bench.models.byte_model import MAPPED, BreakEvenMap
from nwor_bench.models.strategies import Strategy
from nwor_bench.report.svg import inline, settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "break-even"

_COLOURS = ("#b4541a", "#f3f1ec", "#1f6fb2")
_INK = "#1c1f23"
_CELL = (1.9, 1.75)
_DOTS = 72


def draw_maps(chart: BreakEvenMap, alternative: str) -> str:
    """Acceptance across, requests upwards; savings as colours, each map on its own scale."""
    import matplotlib as mpl
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    shades = LinearSegmentedColormap.from_list(NAME, _COLOURS)
    with mpl.rc_context({**settings(NAME), "font.size": 9, "axes.labelsize": 9}):
        size = (_CELL[0] * len(chart.draft_tokens) + 0.8, _CELL[1] * len(MAPPED) + 0.4)
        canvas = Figure(figsize=size, dpi=_DOTS, layout="constrained")
        grid = canvas.subplots(len(MAPPED), len(chart.draft_tokens), squeeze=False, sharex=True,
                               sharey=True)  # fmt: skip
        for strategy, row in zip(MAPPED, grid, strict=True):
            row[0].set_ylabel(f"{strategy.label}\nrequests a step")
            for drafts, axes in zip(chart.draft_tokens, row, strict=True):
                _map(axes, chart, strategy, drafts, shades)
        for axes in grid[-1]:
            axes.set_xlabel("acceptance, %")
        file = io.StringIO()
        canvas.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return inline(file.getvalue(), NAME, alternative)


def _map(
    axes: "Axes", chart: BreakEvenMap, strategy: Strategy, drafts: int, shades: object
) -> None:
    shares = [[100 * share for share in row]
              for row in chart.shares(strategy, drafts, chart.load.context)]  # fmt: skip
    most = max(abs(share) for row in shares for share in row) or 1.0
    rows, half = chart.requests, 50 / (len(chart.acceptances) - 1)
    box = (-half, 100 + half, -0.5, len(rows) - 0.5)
    axes.imshow(shares, cmap=shades, vmin=-most, vmax=most, origin="lower", extent=box,  # type: ignore[arg-type]
                aspect="auto", interpolation="nearest")  # fmt: skip
    limit = chart.model.break_even(strategy)
    if limit is not None:
        axes.axvline(100 * limit, color=_INK, ls="--", lw=1.2)
    if drafts == chart.load.draft_tokens:
        axes.plot(100 * chart.load.acceptance, rows.index(chart.load.requests), "o", mfc="none",
                  mec=_INK, mew=1.6, ms=7, clip_on=False)  # fmt: skip
    axes.set_yticks(range(len(rows)), [str(number) for number in rows])
    axes.set_title(f"k = {drafts}: {min(map(min, shares)):+.2g} to {max(map(max, shares)):+.2g} %",
                   fontsize=9)  # fmt: skip
