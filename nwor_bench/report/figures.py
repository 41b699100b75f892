"""Figures as SVG, drawn by matplotlib: text stays text, colours are the page's own.

matplotlib draws a stand-in for each colour of the style sheet; in the SVG these become
`var(--name)`, so light and dark need no second figure.
"""

import html
import io
import re
from typing import TYPE_CHECKING, Any

from nwor_bench.report.document import Figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

COLOURS = ("text", "soft", "line", "head", "band", "same", "faster", "slower", "ambiguous",
           "ineffective", "invalid")  # fmt: skip
_STAND_INS = {name: f"#0f1e{place:02x}" for place, name in enumerate(COLOURS, 16)}

_WIDTH, _DOTS = 720, 72


def colour(name: str) -> str:
    """The stand-in for a colour of the page's style sheet."""
    return _STAND_INS[name]


def draw_svg(figure: Figure) -> str:
    """The figure as an SVG element that is the same each time."""
    file = io.StringIO()
    import matplotlib as mpl

    with mpl.rc_context(_settings(figure.name)):
        canvas_of(figure).savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _inline(file.getvalue(), figure.name, figure.alternative)


def canvas_of(figure: Figure) -> "Canvas":
    """The drawn figure as a matplotlib object."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    with mpl.rc_context(_settings(figure.name)):
        size = (_WIDTH / _DOTS, figure.height / _DOTS)
        canvas = Canvas(figsize=size, dpi=_DOTS, layout="constrained")
        figure.draw(canvas)
    return canvas


def _inline(svg: str, name: str, alternative: str) -> str:
    """The SVG as an element of a page: its ids are its own, its colours the page's."""
    start = svg.index("<svg")
    # Its style rules would apply to the whole page, which has rules for its figures.
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg[start:], flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]*"', body)
    assert box is not None
    body = body[body.index(">") + 1 :]
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = body.replace("url(#", f"url(#{name}-").replace('xlink:href="#', f'href="#{name}-')
    for tint, hexadecimal in _STAND_INS.items():
        body = body.replace(hexadecimal, f"var(--{tint})")
    label = html.escape(alternative)
    head = f'<svg role="img" aria-label="{label}" {box.group()}><title>{label}</title>'
    return head + re.sub(r"\s*\n\s*", "\n", body).strip()


def _settings(name: str) -> Any:
    """matplotlib's settings for a figure of that name."""
    text, soft = colour("text"), colour("soft")
    return {
        "svg.fonttype": "none", "svg.hashsalt": name, "text.parse_math": False, "font.size": 13,
        "font.family": "DejaVu Sans", "text.color": text, "axes.labelcolor": text,
        "xtick.color": soft, "ytick.color": soft, "xtick.labelcolor": text,
        "ytick.labelcolor": text, "axes.edgecolor": soft, "grid.color": colour("line"),
        "axes.spines.top": False, "axes.spines.right": False, "axes.labelsize": 13,
        "legend.frameon": False, "legend.fontsize": 12, "axes.axisbelow": True,
    }  # fmt: skip
