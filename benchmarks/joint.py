"""Runs of several tasks at once, read as one result a task, so that they stand beside runs of one task each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core.inflection import lower_is_better

if TYPE_CHECKING:
    from .results import CellResult


def by_task(cells: Sequence[CellResult]) -> Iterator[CellResult]:
    """Yield every cell, those of several tasks as one a task.

    A part has its task's metrics, main metric, majority and curve, and an equal share of the run's seconds and parameters,
    so that sums over tasks are the run's; the rest is the whole run's. It is called by its task's name, unless its method
    ran that task elsewhere too: ``glue.rte`` is the part ``rte`` of the joint task ``glue`` then.
    """
    owner = {(cell.task, cell.method): cell.task for cell in cells if not _tasks_of(cell)}
    for cell in cells:
        for task in _tasks_of(cell):
            owner.setdefault((task, cell.method), cell.task)
    for cell in cells:
        tasks = _tasks_of(cell)
        if not tasks:
            yield cell
        for task in tasks:
            name = task if owner[task, cell.method] == cell.task else f"{cell.task}.{task}"
            yield replace(_part(cell, task, tasks), task=name, joint=cell.task)


def task_names(keys: Mapping[str, Any]) -> list[str]:
    """Return the names of the tasks that the keys of a run list; none where it has one task, or some have no name."""
    tasks = keys.get("tasks")
    if not isinstance(tasks, list) or not all(isinstance(item, Mapping) and item.get("name") for item in tasks):
        return []
    return [str(item["name"]) for item in tasks]


def curve_of(rows: Iterable[Sequence[Any]]) -> tuple[tuple[int, float], ...]:
    """Return the curve that a file holds; ``null`` is a value that was not finite."""
    return tuple((int(step), math.nan if value is None else float(value)) for step, value in rows)


def _tasks_of(cell: CellResult) -> list[str]:
    """Return the tasks of a joint run: as it measured them, or, where it failed, as it was to."""
    return (
        list(cell.run_info.get("tasks") or ()) if cell.status == "done" else task_names(cell.inputs.get("recipe") or {})
    )


def _part(cell: CellResult, task: str, tasks: Sequence[str]) -> CellResult:
    if cell.status != "done":
        return cell
    own = cell.run_info["tasks"][task]
    metrics = {
        key.removeprefix(f"{task}_"): value
        for key, value in cell.metrics.items()
        if task == max((name for name in tasks if key.startswith(f"{name}_")), key=len, default="")
    }
    info = dict(cell.train_info)
    info["seconds"] /= len(tasks)
    info["parameters"] = {key: count / len(tasks) for key, count in info["parameters"].items()}
    return replace(
        cell,
        metrics=metrics,
        main_metric=own["main_metric"],
        higher_is_better=not lower_is_better(own["main_metric"]),
        majority=own["majority"],
        curve=curve_of(own["curve"]),
        train_info=info,
    )
