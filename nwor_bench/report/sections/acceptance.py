"""The section on how many drafts were accepted, by their position in the draft."""

from collections.abc import Sequence

from nwor_bench.records.types import CellResult
from nwor_bench.report.document import Block, Figure, Paragraph, Section, table
from nwor_bench.report.plots import axis, colour, layout
from nwor_bench.report.text import NOT_MEASURED, decimal, joined, label, percent

TITLE = "Acceptance"

_COLOURS = ("faster", "slower", "same", "ineffective", "invalid", "ambiguous")
_NOTE = "Equal acceptance is no proof of equal output; the section Parity is."


def acceptance_section(cells: Sequence[CellResult]) -> Section:
    """A figure and a table; the table alone where no position was counted."""
    positions = max((len(cell.acceptance_per_position) for cell in cells), default=0)
    rows = []
    for cell in cells:
        rates = [percent(rate) for rate in cell.acceptance_per_position]
        rates += [NOT_MEASURED] * (positions - len(rates))
        rows.append(
            [label(cell), percent(cell.acceptance_rate), decimal(cell.acceptance_length, 2), *rates]
        )
    heads = [f"Draft {position + 1}" for position in range(positions)]
    caption = "Accepted draft tokens over proposed ones, altogether and by position in the draft"
    blocks: list[Block] = [table(["Cell", "Rate", "Length", *heads], rows, caption=caption)]
    if positions:
        blocks.insert(0, _figure(cells, positions))
    else:
        blocks.insert(0, Paragraph("Acceptance by position was not counted, so it is not drawn."))
    return Section(TITLE, (*blocks, Paragraph(_NOTE)), folded=True)


def _figure(cells: Sequence[CellResult], positions: int) -> Figure:
    """Cells that accepted alike share their bars."""
    groups: dict[tuple[float, ...], list[str]] = {}
    for cell in cells:
        if cell.acceptance_per_position:
            groups.setdefault(cell.acceptance_per_position, []).append(label(cell))
    names = {
        rates: "all cells" if len(groups) == 1 else joined(own) for rates, own in groups.items()
    }
    in_words = "; ".join(
        f"{name}: {', '.join(percent(rate) for rate in rates)}" for rates, name in names.items()
    )
    drafts = [f"draft {position + 1}" for position in range(positions)]
    return Figure(
        name="acceptance",
        caption=(
            "Share of the draft tokens at each position that the model accepted. Cells with "
            "exactly the same counts share their bars, as all do where no mode changes the output."
        ),
        alternative=f"Acceptance by position in the draft. {in_words}.",
        data=tuple(
            {
                "type": "bar",
                "name": name,
                "x": drafts[: len(rates)],
                "y": [100 * rate for rate in rates],
                "text": [percent(rate, 0) for rate in rates],
                "textposition": "outside",
                "cliponaxis": False,
                "marker": {"color": colour(_COLOURS[place % len(_COLOURS)])},
            }
            for place, (rates, name) in enumerate(names.items())
        ),
        layout=layout(
            axis(type="category", showgrid=False),
            axis("accepted, %", range=[0, 105], nticks=6),
            barmode="group",
            showlegend=True,
        ),
        height=230 + 22 * len(groups),
    )
