"""Figures: what all of them share. A figure is plain data; `svg` draws it.

Colours are names of the page's own custom properties.
"""

import html
from collections.abc import Sequence
from typing import Any

from nwor_bench.report.document import Figure


def colour(name: str) -> str:
    """A colour of the page's style sheet."""
    return f"var(--{name})"


def axis(title: str = "", **settings: Any) -> dict[str, Any]:
    """An axis with its title."""
    return {"title": {"text": title}, **settings}


def categories(labels: Sequence[str], **settings: Any) -> dict[str, Any]:
    """A vertical axis with one place a label, the first at the top."""
    return axis(type="category", categoryarray=list(labels), showgrid=False, **settings)


def layout(xaxis: dict[str, Any], yaxis: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A figure's axes, and what else belongs to the whole of it."""
    return {"showlegend": False, "xaxis": xaxis, "yaxis": yaxis, **settings}


def figure_element(figure: Figure) -> str:
    """The figure on the page, with its text alternative and caption."""
    from nwor_bench.report.svg import draw_svg

    return (
        f'<figure id="{figure.name}"><div class="plot" tabindex="0">{draw_svg(figure)}</div>'
        f"<figcaption>{html.escape(figure.caption).replace(' %', '&nbsp;%')}</figcaption></figure>"
    )
