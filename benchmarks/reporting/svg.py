"""Matplotlib figures as inline SVG that follows the page: its font, its text colour, light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Stand-ins that no figure uses otherwise; the page's own colours take their place.
INK, FAINT, GROUND = "#010203", "#040506", "#070809"
_PAGE = {INK: "currentColor", FAINT: "var(--line)", GROUND: "var(--ground)"}
COLOURS = ("#7d8590", "#2f7fd0", "#d9730d", "#12976f", "#8b5cf6", "#d6336c", "#b8860b", "#0e96b4", "#6a9a1f", "#a8553a")
MARKERS = "oDs^vPXp<>"
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be searched, read out and copied
    "text.parse_math": False,  # a name may hold a dollar sign
    "font.size": 10,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "axes.labelsize": 9.5,
    "lines.solid_capstyle": "round",
}


class Drawing:
    """One figure being drawn; :attr:`text` is its SVG afterwards."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure
        self.text = ""

    def panels(self, count: int, columns: int) -> Sequence[Axes]:
        """Return ``count`` axes, at most ``columns`` beside each other."""
        rows = -(-count // columns)
        return [self.figure.add_subplot(rows, min(columns, count), place + 1) for place in range(count)]


@contextmanager
def drawing(width: float, height: float, name: str, label: str) -> Iterator[Drawing]:
    """Yield a figure to draw on; without pyplot, so that no window system is looked for and no figure stays open.

    Args:
        width, height: in inches of 72 px.
        name: unique on the page.
        label: what a screen reader says of the picture.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    style: Any = {**_STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1), facecolor="none")
        FigureCanvasSVG(figure)
        drawn = Drawing(figure)
        yield drawn
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    drawn.text = _inline(out.getvalue(), label)


def _inline(svg: str, label: str) -> str:
    """Return an SVG document as an element of a page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r' id="(?:figure|axes|patch|text|line2d|xtick|ytick|matplotlib\.axis|legend|Fill\w*|Path\w*)_\d+"', "", svg
    )
    svg = re.sub(r"font-family: [^;\"]*;?", "", re.sub(r"font: (?:(\d+) )?([\d.]+px) [^;\"]*", _font, svg))
    svg = re.sub(
        r'(<svg[^>]*?) width="[^"]*pt"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*pt"', r"\1", svg, count=1), count=1
    )
    for stand_in, colour in _PAGE.items():
        svg = svg.replace(stand_in, colour)
    return svg.strip().replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def _font(match: re.Match[str]) -> str:
    return f"font-size: {match[2]}; font-weight: {600 if match[1] else 400}"
