"""A suite that sweeps one quantity: spread over seeds and mean against it, a line for each task or method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ..axis import Axis
from ..comparison import Standings, scores_of
from ..errors import ResultError
from ..results import Results
from ..statistics import Interval, Summary, sd_interval
from .figures import WIDTH
from .svg import COLOURS, GROUND, MARKERS, drawing
from .words import listed, number, span, unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

READING = (
    "Standard deviations are over seeds, ddof = 1; runs no better than the majority class count as any other. Bars: 95 % intervals,"
    " of the standard deviation by chi-square, which is exact of normal scores only; of the mean Student's t. Fewer than three"
    " seeds have none."
)
_TICKS = 8  # that fit side by side
_APART, _WIDEST = 4.0, 24.0  # of the intervals at one place, in typographic points


@dataclass(frozen=True, kw_only=True)
class Point:
    """One method on one task, at its place on the axis.

    Attributes:
        task, method: which.
        line: what the method is beside the swept quantity.
        x: that quantity.
        summary: of its scores.
        sd_interval: of their standard deviation, ``None`` of too few.
    """

    task: str
    method: str
    line: str
    x: float
    summary: Summary
    sd_interval: Interval | None


@dataclass(frozen=True)
class Sweep:
    """What a suite's axis is, and what ran along it.

    Attributes:
        axis: the axis.
        points: by task, then line, then x.
        off: methods that are not on the axis: the recipes of their runs on a task do not say one place.
    """

    axis: Axis
    points: tuple[Point, ...]
    off: tuple[str, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """What the methods are beside the swept quantity; one for all in most suites."""
        return tuple(dict.fromkeys(point.line for point in self.points))


def read_axis(results: Results) -> Axis | None:
    """Read the axis that ``suite.json`` names.

    Raises:
        ResultError: it is none.
    """
    content = results.suite.get("axis")
    try:
        return None if content is None else Axis.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, ("axis", *first["loc"])))
        remedy = "run tunery bench again"
        raise ResultError(f"{place}: {first['msg']}", owner=str(results.folder / "suite.json"), remedy=remedy) from None


def sweep(table: Standings) -> Sweep | None:
    """Return what ran along a suite's axis; ``None`` where it has none, or nothing on it has a score.

    Raises:
        ResultError: the axis is none.
    """
    axis, scores = read_axis(table.results), scores_of(table.results)
    if axis is None:
        return None
    points, off = [], set()
    for (task, method), summary in table.summaries.items():
        recipes = [cell.inputs.get("recipe") or {} for cell in table.results.of(task, method)]
        places = {(axis.value(recipe), axis.line(recipe)) for recipe in recipes}
        x, line = places.pop()
        if places or x is None:
            off.add(method)
            continue
        interval = sd_interval(list(scores[task, method].values()))
        points.append(Point(task=task, method=method, line=line, x=x, summary=summary, sd_interval=interval))
    tasks = table.results.tasks
    points.sort(key=lambda point: (tasks.index(point.task), point.line, point.x))
    return Sweep(axis, tuple(points), tuple(m for m in table.results.methods if m in off)) if points else None


# ---- the picture


def panels(table: Standings, found: Sweep) -> dict[str, dict[str, list[Point]]]:
    """Return what is drawn together: by title, the points of each line.

    A line is a task, all in one picture; where there are several methods beside the axis, or tasks scored in different
    units, every task has a picture of its own and a line is a method.
    """
    tasks = dict.fromkeys(point.task for point in found.points)
    alone = len(found.lines) > 1 or len({table.scale[task] for task in tasks}) > 1
    drawn: dict[str, dict[str, list[Point]]] = {}
    for point in found.points:
        title, line = (point.task, point.line or point.task) if alone else ("", point.task)
        drawn.setdefault(title, {}).setdefault(line, []).append(point)
    return drawn


def looks(table: Standings, found: Sweep) -> dict[str, tuple[str, str]]:
    """Return the colour and the marker of every line."""
    lines = dict.fromkeys(line for lines in panels(table, found).values() for line in lines)
    colours = COLOURS[1:]
    return {line: (colours[place % len(colours)], MARKERS[place % len(MARKERS)]) for place, line in enumerate(lines)}


def picture(table: Standings, found: Sweep) -> str:
    """Draw the standard deviation over seeds against the axis, and beside it the mean."""
    drawn, styles = panels(table, found), looks(table, found)
    label = f"Standard deviation over seeds and mean score against {found.axis.name}"
    with drawing(WIDTH, 3.3 * len(drawn), "sweep", label) as canvas:
        axes = iter(canvas.panels(2 * len(drawn), 2))
        for title, lines in drawn.items():
            for value in ("sd", "mean"):
                panel = next(axes)
                for place_of, (line, points) in enumerate(lines.items()):
                    shift = (place_of - (len(lines) - 1) / 2) * min(_APART, _WIDEST / len(lines))
                    _bars(panel, points, value, table.scale[points[0].task], styles[line][0], shift)
                    _line(panel, points, value, table.scale[points[0].task], styles[line])
                scale = table.scale[next(iter(lines.values()))[0].task]
                what = "sd over seeds" if value == "sd" else "mean over seeds"
                panel.set(xlabel=found.axis.name, ylabel=f"{what}{unit(scale) and ', points'}", title=title)
                if value == "sd":
                    panel.set_ylim(bottom=0)
                panel.grid()
                _ticks(panel, found)
    return canvas.text


def _bars(panel: Axes, points: Sequence[Point], value: str, scale: float, colour: str, shift: float) -> None:
    """Draw intervals ``shift`` typographic points to the right of where they belong, so that no line's hide another's."""
    from matplotlib.transforms import ScaledTranslation

    figure: Any = panel.figure
    beside = panel.transData + ScaledTranslation(shift / 72, 0, figure.dpi_scale_trans)
    for point in points:
        interval = point.sd_interval if value == "sd" else point.summary.interval
        if interval is not None:
            ends = [interval.low * scale, interval.high * scale]
            look: dict[str, Any] = {
                "color": colour,
                "alpha": 0.45,
                "linewidth": 2,
                "zorder": 1.5,
                "gid": _id(f"bar:{value}", point),
            }
            panel.plot([point.x] * 2, ends, transform=beside, **look)
            panel.update_datalim([(point.x, end) for end in ends])  # which plot does only for its own coordinates


def _line(panel: Axes, points: Sequence[Point], value: str, scale: float, style: tuple[str, str]) -> None:
    colour, marker = style
    kept = [(point, y) for point in points if (y := getattr(point.summary, value)) is not None]
    panel.plot(
        [point.x for point, _ in kept],
        [y * scale for _, y in kept],
        color=colour,
        marker=marker,
        markersize=6,
        markeredgecolor=GROUND,
        linewidth=1.7,
        gid=_id(value, points[0]),
    )


def _id(kind: str, point: Point) -> str:
    """Return a name that is unique on the page: of a point's interval, or of the line that begins with it."""
    return f"sweep:{kind}:{point.task}:{point.line}:{point.x:g}".replace(" ", "")


def _ticks(panel: Axes, found: Sweep) -> None:
    """Mark the swept values themselves, unless they are many."""
    from matplotlib.ticker import NullLocator

    values = sorted({point.x for point in found.points})
    panel.set_xscale(found.axis.scale)
    if len(values) <= _TICKS:
        panel.set_xticks(values, [place(value) for value in values])
        panel.xaxis.set_minor_locator(NullLocator())


# ---- tables


def place(x: float) -> str:
    """Return a place on the axis as text: ``2e-5``, ``0.4``, ``200``."""
    if x == 0 or abs(x) >= 0.01:
        return f"{x:g}"
    digits, _, power = f"{x:.9e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def note(found: Sweep) -> str:
    """Return what there is to know of the picture and the table."""
    off = (
        f" Not on the axis, since their runs do not all say one {found.axis.field}: {listed(found.off)}."
        if found.off
        else ""
    )
    return READING + off


def rows(table: Standings, found: Sweep) -> list[tuple[str, ...]]:
    """Return a header and a row for each point, as text."""
    several = len(found.lines) > 1
    header = ("task", *(["method"] if several else []), found.axis.name, "runs", "sd", "95 % of the sd", "mean")
    body = []
    for point in found.points:
        scale, one = table.scale[point.task], point.summary
        numbers = (number(one.sd, scale), span(point.sd_interval, scale), number(one.mean, scale))
        named = [point.line] if several else []
        body.append((point.task, *named, place(point.x), str(one.count), *numbers, span(one.interval, scale)))
    return [(*header, "95 % of the mean"), *body]


def records(found: Sweep) -> Iterable[Mapping[str, Any]]:
    """Yield the same in full precision, for a spreadsheet: one line a point."""
    for point in found.points:
        sd, mean, one = point.sd_interval, point.summary.interval, point.summary
        yield {
            "task": point.task,
            "method": point.method,
            "line": point.line,
            "axis": found.axis.name,
            "x": point.x,
            "scores": one.count,
            "sd": one.sd,
            "sd_low": sd and sd.low,
            "sd_high": sd and sd.high,
            "mean": one.mean,
            "low": mean and mean.low,
            "high": mean and mean.high,
        }
