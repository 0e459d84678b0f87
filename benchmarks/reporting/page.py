"""The report as one HTML page: nothing is fetched, it opens offline, in light and dark."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from html import escape
from importlib.metadata import version

from ..comparison import AVERAGE, Standings, Versus, every_pair
from . import figures, rounds, scatter, sweep
from .layout import grid
from .markup import chip, html_score_table, html_table
from .provenance import failures, origins, protocol, ran, software
from .reference import QUOTED, read_reference
from .style import CSS
from .tables import against_rows, pair_rows, summary_rows
from .words import READING, conclusions, headline, overview

_BADGES = {
    "better": "better",
    "worse": "worse",
    "open": "no difference shown",
    "few": "too few seeds",
    "none": "not compared",
}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(table: Standings, sheets: Mapping[str, str], versus: Iterable[Versus] | None = None, against: str = "") -> str:
    """Return the page.

    Args:
        table: the suite's results.
        sheets: CSV files to offer, by name; they are inside the page.
        versus: every cell against the same one of earlier results.
        against: where those are.

    Raises:
        ResultError: the suite's reference table cannot be read.
    """
    name, along = escape(table.results.name), sweep.sweep(table)
    sections = {
        "findings": ("What the runs say", _findings(table)),
        "axis": ("", "") if along is None else (f"Against {escape(along.axis.name)}", _sweep(table, along)),
        "scores": ("Scores", _scores(table)),
        "change": (f"Against {escape(against)}", _change(table, versus)),
        "seeds": ("Every seed", _picture(figures.distributions(table), _SEEDS, narrow=len(table.results.tasks) == 1)),
        "cost": ("Score and cost", _with_legend(table, scatter.cost(table), _COST)),
        "stability": ("Score and stability", _with_legend(table, scatter.stability(table), _STABILITY)),
        "curves": (
            "Learning curves",
            _with_legend(table, figures.curves(table), _CURVES, narrow=len(table.results.tasks) == 1),
        ),
        "rounds": ("Rounds and traffic", _rounds(table)),
        "tests": ("Every test", _tests(table)),
        "failures": ("Failed runs", failures(table.results)),
        "protocol": ("Protocol", protocol(table.results)),
        "provenance": ("Provenance", origins(table.results) + software(table.results)),
    }
    kept = {key: (title, body) for key, (title, body) in sections.items() if body}
    links = "".join(f'<a href="#{key}">{title}</a>' for key, (title, _) in kept.items())
    bodies = "".join(f'<section id="{key}"><h2>{title}</h2>{body}</section>' for key, (title, body) in kept.items())
    offered = ", ".join(_download(file, text) for file, text in sheets.items())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}: report</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><style>{CSS}</style></head><body><main>'
        f'<header><h1>{name}</h1><p class="lead">{escape(str(table.results.suite.get("description", "")))}</p>'
        f"{_facts(table)}<nav>{links}</nav></header>{bodies}"
        f'<footer class="note"><p>{escape(READING)}</p><p>tunery {version("tunery")}; {ran(table.results)}; '
        f"data: {offered}</p></footer></main></body></html>\n"
    )


_INTERVALS = (
    "95 % of the mean: Student's t, which holds the true mean in 95 of 100 samples of five normal scores; the bootstrap's holds it"
    " in 84 (python -m tunery.benchmarks.studies.coverage). With runs that fail now and then, both hold it less often."
)
_SEEDS = (
    "A dot is a run; the thick bar spans the middle half of them, its line is the median, the shape their density. The dashed"
    " line is the majority class, a cross a run that is no better."
)
_COST = "The line joins the methods that no other beats at the same cost or less. Means over runs."
_STABILITY = "Left: towards the upper left is better and steadier. Right: what a method changes on each task."
_CURVES = "Mean over seeds; the band goes from the worst to the best seed, at steps or rounds that at least half of the runs reached."

_PAIRS = '<p class="note">Every method with every other, the number of pairs of a task being a family of Holm\'s correction.</p>'


def _facts(table: Standings) -> str:
    results = table.results
    poor, crashed = sum(c.degenerate for c in results.cells), sum(c.score is None for c in results.cells)
    items = [
        (len(results.tasks), "task", False),
        (len(results.methods), "method", False),
        (len(results.seeds), "seed", False),
        (len(results.cells), "run", False),
        (crashed, "failed", crashed > 0),
        (poor, "no better than the majority class", poor > 0),
    ]
    if results.damaged:
        items.append((len(results.damaged), "damaged, not counted", True))
    facts = []
    for count, name, bad in items:
        plural = "s" if name in ("task", "method", "seed", "run") and count != 1 else ""
        facts.append(f"<li{' class=bad' if bad else ''}><b>{count}</b><span>{name}{plural}</span></li>")
    return f'<ul class="facts">{"".join(facts)}</ul>'


def _findings(table: Standings) -> str:
    found = conclusions(table)
    notes = "".join(f"<p>{escape(line)}</p>" for line in overview(table)[1:])
    if not found:
        return f"{notes}<p>{escape(table.baseline)} is the only method: there is nothing to compare it with.</p>"
    items = "".join(
        f'<li class="{one.verdict}"><b>{escape(one.method)}</b><span class="badge">{_BADGES[one.verdict]}</span><br>'
        f"{escape(one.text)}</li>"
        for one in found
    )
    several = len(figures.overall(table)) > 1
    return (
        f'{notes}<p class="lead">{escape(headline(found, table.baseline, len(table.results.tasks)))}</p><ul class="said">{items}</ul>'
        + _picture(
            figures.differences(table),
            f"Difference to {escape(table.baseline)} with its 95 % interval. The grey band is what this many seeds could not have"
            " shown: a true difference inside it would be missed more than one time in five.",
            narrow=not several,
        )
    )


def _scores(table: Standings) -> str:
    laid = grid(table)
    captions = f"Measured here <small>mean±sd over seeds; small: difference to {escape(table.baseline)}</small>"
    tables = f'<div class="scroll">{html_score_table(laid, captions, table)}</div>'
    quoted = read_reference(table.results, table.baseline)
    if quoted:
        caption = f"{escape(quoted.title)} <small>{QUOTED}</small>"
        tables += f'<div class="scroll quoted">{html_score_table(quoted.grid, caption)}</div>'
    shade = "linear-gradient(90deg, rgba(var(--red),var(--depth)), transparent, rgba(var(--green),var(--depth)))"
    return (
        f'<div class="pair">{tables}</div><p class="note">sd larger than that of {escape(table.baseline)}'
        f'<span class="shade" style="background: {shade}"></span>smaller. Best mean bold, second underlined.'
        f"{' Scores are in points: 100 is perfect.' if set(table.scale.values()) == {100} else ''}</p>"
        f"<details><summary>Median, worst seed, intervals</summary>{html_table(summary_rows(table), text=2)}"
        f'<p class="note">{_INTERVALS}</p></details>'
    )


def _change(table: Standings, versus: Iterable[Versus] | None) -> str:
    if versus is None:
        return ""
    rows = against_rows(versus, table.scale)
    return f"<p>Every method against itself, by task and seed.</p>{html_table(rows, text=2)}"


def _sweep(table: Standings, found: sweep.Sweep) -> str:
    drawn = sweep.looks(table, found)
    items = (f"<span>{chip(*look)}{escape(line)}</span>" for line, look in drawn.items())
    picture = _picture(sweep.picture(table, found), escape(sweep.note(found)), narrow=False)
    content = html_table(sweep.rows(table, found), text=2 if len(found.lines) > 1 else 1)
    return (
        f'<div class="legend">{"".join(items)}</div>{picture}<details><summary>Every point</summary>{content}</details>'
    )


def _rounds(table: Standings) -> str:
    found = rounds.rows(table)
    return f'{html_table(found, text=2)}<p class="note">{rounds.READING}</p>' if found else ""


def _tests(table: Standings) -> str:
    if not table.versus:
        return ""
    order = sorted(
        table.versus.values(), key=lambda one: (one.task != AVERAGE, table.results.methods.index(one.method))
    )
    rows, pairs = against_rows(order, table.scale), pair_rows(every_pair(table), table.scale)
    others = f"<details><summary>{len(pairs) - 1} comparisons of every two methods</summary>{html_table(pairs, text=3)}"
    return (
        f"<details><summary>{len(rows) - 1} comparisons with {escape(table.baseline)}</summary>{html_table(rows, text=2)}"
        '<p class="note">p: paired t test; p (Holm): corrected for the number of tests in its family; Wilcoxon: signed-rank'
        " test, which cannot get below 0.0625 with five seeds; spread: Brown and Forsythe's test for equal variance; can show:"
        " the smallest true difference that this many seeds find with probability 0.8.</p></details>"
        + (f"{others}{_PAIRS}</details>" if len(pairs) > 1 else "")
    )


def _with_legend(table: Standings, svg: str, caption: str, narrow: bool = False) -> str:
    if not svg:
        return ""
    palette = figures.Palette(table)
    items = (f"<span>{chip(palette.colour(m), palette.marker(m))}{escape(m)}</span>" for m in table.results.methods)
    return f'<div class="legend">{"".join(items)}</div>{_picture(svg, caption, narrow=narrow)}'


def _picture(svg: str, caption: str, *, narrow: bool) -> str:
    if not svg:
        return ""
    return f"<figure{' class=narrow' if narrow else ''}>{svg}<figcaption>{caption}</figcaption></figure>"


def _download(name: str, text: str) -> str:
    coded = base64.b64encode(text.encode()).decode()
    return f'<a download="{name}" href="data:text/csv;base64,{coded}">{name}</a>'
