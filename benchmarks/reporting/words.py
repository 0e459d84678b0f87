"""Numbers as a reader wants them, and what they come to in sentences."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..comparison import AVERAGE, Standings, Versus
from ..results import Results
from ..statistics import ALPHA, Interval
from ..suite import Override
from ..suite_file import names_in

MINUS = "\N{MINUS SIGN}"
NONE = "\N{EN DASH}"


@dataclass(frozen=True)
class Conclusion:
    """What the runs say of one method.

    Attributes:
        method: the method.
        verdict: ``better``, ``worse`` or ``open``, against the baseline; ``few`` where the seeds are too few to tell, ``none``
            where nothing could be compared.
        text: the sentences.
    """

    method: str
    verdict: str
    text: str

    def __str__(self) -> str:
        return f"{self.method}: {'no difference shown: ' if self.verdict == 'open' else ''}{self.text}"


def number(value: float | None, scale: float = 100, digits: int | None = None, *, sign: bool = False) -> str:
    """Return a score in points (two decimals), or what is no score with four significant digits."""
    if value is None:
        return NONE
    text = (
        f"{value * scale:.{2 if digits is None else digits}f}" if scale == 100 or digits is not None else f"{value:.4g}"
    )
    if float(text) == 0:
        text = text.lstrip("-")
    elif sign and value > 0:
        text = f"+{text}"
    return text.replace("-", MINUS)


def mean_and_sd(mean: float, sd: float | None, scale: float) -> str:
    """Return ``83.40±1.20``, or the mean alone where one run has no spread."""
    return number(mean, scale) if sd is None else f"{number(mean, scale)}±{number(sd, scale)}"


def probability(p: float | None) -> str:
    """Return ``p = 0.021`` or ``p < 0.001``."""
    if p is None:
        return "no test"
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}" if p < 0.1 else f"p = {p:.2f}"


def span(interval: Interval | None, scale: float) -> str:
    """Return ``0.30 to 2.10``."""
    return NONE if interval is None else f"{number(interval.low, scale)} to {number(interval.high, scale)}"


def unit(scale: float, difference: float | None = None) -> str:
    """Return what a difference is counted in."""
    if scale != 100:
        return ""
    return " point" if difference is not None and abs(round(difference * scale, 2)) == 1 else " points"


def verdict(one: Versus) -> str:
    """Return whether a comparison shows a difference, and which way; ``few`` where the seeds are too few for a test."""
    if one.p is None:
        return "few"
    if one.p >= ALPHA:
        return "open"
    return "better" if one.comparison.difference > 0 else "worse"


def conclusions(table: Standings) -> list[Conclusion]:
    """Return what the runs say of every method but the baseline, in the suite's order."""
    return [_conclusion(table, method) for method in table.results.methods if method != table.baseline]


def _conclusion(table: Standings, method: str) -> Conclusion:
    one = table.versus.get((AVERAGE, method))
    scale = 100.0
    if one is None and len(table.results.tasks) == 1:
        task = table.results.tasks[0]
        one, scale = table.versus.get((task, method)), table.scale[task]
    if one is None:
        return Conclusion(
            method, "none", f"no seed in common with {table.baseline} on every task; see the tests by task."
        )
    said = [difference(one, scale, table.baseline)]
    seeds = len(table.results.seeds)
    if one.comparison.count < seeds:
        said.append(f"Compared on the seeds with a score on every task, {one.comparison.count} of {seeds}.")
    return Conclusion(method, verdict(one), " ".join(filter(None, [*said, spread(table, method)])))


def headline(found: Sequence[Conclusion], baseline: str, tasks: int) -> str:
    """Return the one sentence that says which methods were shown to differ from the baseline."""
    groups = {kind: [one.method for one in found if one.verdict == kind] for kind in ("better", "worse", "open", "few")}
    parts = []
    for kind in ("better", "worse"):
        if groups[kind]:
            parts.append(f"{listed(groups[kind])} {'is' if len(groups[kind]) == 1 else 'are'} {kind} than {baseline}")
    named = bool(parts)
    if groups["open"]:
        parts.append(f"no difference to {'it' if named else baseline} is shown of {listed(groups['open'])}")
    if groups["few"]:
        parts.append(f"too few seeds have run to tell {listed(groups['few'])} from {'it' if parts else baseline}")
    text = f"{'; '.join(parts) or 'nothing could be compared'}."
    if tasks > 1:
        return f"On average over {tasks} tasks, {text}"
    return text if named else f"{text[0].upper()}{text[1:]}"  # a method's name stays as it is written


def listed(names: Sequence[str]) -> str:
    """Return ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def difference(one: Versus, scale: float, other: str) -> str:
    """Return the sentence on a difference: its size, interval, p, and what as many seeds could have shown."""
    found = one.comparison
    size = f"{number(found.difference, scale, sign=True)}{unit(scale, found.difference)} "
    size += f"{'over' if found.difference > 0 else 'against'} {other}"
    seeds = f"{found.count} seed{'' if found.count == 1 else 's'}"
    if found.p is None:
        return f"{size}; {seeds} cannot tell noise from a difference."
    facts = f"95 % {span(found.interval, scale)}, {probability(one.p)} after Holm"
    if found.detectable is None:
        return f"{size}, the same with each of {seeds} ({probability(one.p)} after Holm)."
    able = f"{seeds} can show {number(found.detectable, scale)}{unit(scale, found.detectable)}"
    return f"{size} ({facts}; {able})."


def spread(table: Standings, method: str) -> str:
    """Return the sentence on spread over seeds: on how many tasks it is smaller than the baseline's, and shown to be."""
    pairs = []
    for task in table.results.tasks:
        ours, theirs = (table.summaries.get((task, name)) for name in (method, table.baseline))
        if ours and theirs and ours.sd is not None and theirs.sd is not None:
            one = table.versus.get((task, method))
            sure = one is not None and one.variance_p is not None and one.variance_p < ALPHA
            pairs.append((ours.sd < theirs.sd, sure))
    if not pairs:
        return ""
    smaller = sum(less for less, _ in pairs)
    shown = sum(less and sure for less, sure in pairs)
    larger = sum(not less and sure for less, sure in pairs)
    text = f"Spread over seeds smaller on {smaller} of {len(pairs)} task{'' if len(pairs) == 1 else 's'}"
    text += f", shown on {shown or 'none'}" if smaller else ""
    return f"{text}; shown to be larger on {larger}." if larger else f"{text}."


def overview(table: Standings) -> list[str]:
    """Return in short sentences what was run, what failed, and how the numbers are to be read."""
    results = table.results
    done = sum(cell.score is not None for cell in results.cells)
    crashed = len(results.cells) - done
    poor = sum(cell.degenerate for cell in results.cells)
    counts = [counted(results.tasks, "task"), counted(results.methods, "method"), counted(results.seeds, "seed")]
    lines = [
        f"{' x '.join(counts)}: {done} runs with a score, {crashed} failed, {poor} no better than the majority class."
    ]
    missing = _missing(results)
    if missing:
        lines.append(
            f"{missing} cell{'' if missing == 1 else 's'} of the suite {'has' if missing == 1 else 'have'} no result yet."
        )
    for run in dict.fromkeys((cell.joint, cell.method) for cell in results.cells if cell.joint):
        parts = dict.fromkeys(cell.task for cell in results.cells if (cell.joint, cell.method) == run)
        said = f"{run[1]} trains {listed(tuple(parts))} in one run, {run[0]}"
        lines.append(f"{said}; seconds and parameters of a task are an equal share of it.")
    lines += _mixed(results)
    if results.damaged:
        lines.append(f"{counted(tuple(results.damaged), 'damaged file')} moved aside and not counted.")
    return lines


def _mixed(results: Results) -> list[str]:
    """Return a line for each way in which runs of one task and method, averaged over seeds, had different inputs."""
    first: dict[tuple[str, str], dict[str, Any]] = {}
    found: dict[str, dict[str, None]] = {}
    for cell in results.cells:
        task, method, _ = cell.run
        ours = _apart_from_seed(cell.inputs)
        theirs = first.setdefault((task, method), ours)
        if ours != theirs:
            from ..inputs import differences  # the models it looks at are slow to import

            found.setdefault("; ".join(differences(theirs, ours)), {})[f"{method} on {task}"] = None
    return [
        f"Runs of different inputs are averaged: {listed(tuple(who)) if len(who) < 5 else f'{len(who)} methods and tasks'},"
        f" {what}."
        for what, who in found.items()
    ]


def _apart_from_seed(inputs: Mapping[str, Any]) -> dict[str, Any]:
    recipe = {key: value for key, value in (inputs.get("recipe") or {}).items() if key != "seed"}
    return {key: value for key, value in inputs.items() if key != "fingerprint"} | {"recipe": recipe}


def _missing(results: Results) -> int:
    """Return how many cells the suite asks for, without those its overrides skip, that have no result."""
    suite = results.suite
    tasks, methods = names_in(suite, "tasks") or results.tasks, names_in(suite, "methods") or results.methods
    skipping = [item for item in suite.get("overrides") or () if item.get("skip")]
    skips = [Override(tasks=item.get("tasks", "*"), methods=item.get("methods", "*")) for item in skipping]
    asked = [pair for pair in itertools.product(tasks, methods) if not any(one.matches(*pair) for one in skips)]
    ran = {cell.run for cell in results.cells}
    return sum((*pair, seed) not in ran for pair in asked for seed in suite.get("seeds") or results.seeds)


def counted(items: Sequence[object], name: str) -> str:
    """Return ``1 task``, ``2 tasks``."""
    return f"{len(items)} {name}{'' if len(items) == 1 else 's'}"


READING = (
    "mean±sd over seeds, sd with ddof = 1; the average is the mean of the tasks' means and of their sds. Runs no better than the"
    " majority class count with their score; runs without a score count as failed only. Intervals are Student's t, tests are"
    " paired by seed and corrected by Holm's method within all averages and within all tasks x methods, and the difference that"
    " seeds can show (with probability 0.8) is one that does so after this correction."
)
