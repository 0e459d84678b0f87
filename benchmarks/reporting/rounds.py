"""Federated suites: the rounds a method needs, and what its rounds send and cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from ..comparison import Standings
from ..regression import MARGIN
from ..results import CellResult, Results
from .words import NONE, number

READING = (
    "Rounds are counted where the server's model was evaluated (eval_every); a run has converged where it first scores within"
    " half a point of its best. Means over the seeds that get there; in brackets, how many do. Bytes (MB: 1e6) and seconds are"
    " those of all clients in all rounds."
)


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """One method on one task, means over the runs with a score.

    Attributes:
        task, method: which.
        runs: how many there are.
        reached: by run that gets there, the first round that scores what the target did in the end with the same seed.
        converged: by run, the first round that scores within half a point of its best.
        sent: bytes by kind, as ``tunery federate`` names them: ``down_...`` to clients, ``up_...`` from them.
        client_seconds: that clients spent training, all together.
    """

    task: str
    method: str
    runs: int
    reached: tuple[int, ...]
    converged: tuple[int, ...]
    sent: dict[str, float]
    client_seconds: float | None


def is_federated(results: Results) -> bool:
    """Whether cells were federated: their steps are rounds."""
    return results.suite.get("command") == "federate" or any(
        c.run_info.get("command") == "federate" for c in results.cells
    )


def target_of(table: Standings) -> str:
    """Return the method whose final score the others are to reach: FedOT, the strategy ``offsite``; else the baseline."""
    found = {
        cell.method for cell in table.results.cells if str(cell.run_info.get("strategy")).partition(":")[0] == "offsite"
    }
    return found.pop() if len(found) == 1 else table.baseline


def rounds(table: Standings) -> list[Rounds]:
    """Return what the rounds of every task and method came to; nothing of a suite without rounds."""
    results, target = table.results, target_of(table)
    if not is_federated(results):
        return []
    found = []
    for task, method in itertools.product(results.tasks, results.methods):
        runs = [cell for cell in results.of(task, method) if cell.score is not None]
        goals = {cell.seed: cell.score for cell in results.of(task, target)}
        if not runs:
            continue
        reached = [first_round(cell, goal) for cell in runs if (goal := goals.get(cell.seed)) is not None]
        kinds = list(dict.fromkeys(kind for cell in runs for kind in cell.train_info.get("bytes") or {}))
        seconds = [cell.train_info["client_seconds"] for cell in runs if "client_seconds" in cell.train_info]
        found.append(
            Rounds(
                task=task,
                method=method,
                runs=len(runs),
                reached=tuple(place for place in reached if place is not None),
                converged=tuple(place for cell in runs if (place := convergence(cell)) is not None),
                sent={kind: fmean((c.train_info.get("bytes") or {}).get(kind, 0) for c in runs) for kind in kinds},
                client_seconds=fmean(seconds) if seconds else None,
            )
        )
    return found


def first_round(cell: CellResult, goal: float) -> int | None:
    """Return the first evaluated round whose score is at least ``goal`` (of a loss, at most); ``None`` if none is."""
    sign = 1 if cell.higher_is_better else -1
    return next((place for place, value in cell.curve if sign * (value - goal) >= 0), None)


def convergence(cell: CellResult) -> int | None:
    """Return the first evaluated round that scores within half a point of the run's best; ``None`` without a curve."""
    values = [value for _, value in cell.curve if math.isfinite(value)]
    if not values:
        return None
    return first_round(cell, max(values) - MARGIN if cell.higher_is_better else min(values) + MARGIN)


def rows(table: Standings) -> list[tuple[str, ...]]:
    """Return a header and a row for each task and method, as text; nothing of a suite without rounds."""
    found = rounds(table)
    if not found:
        return []
    to_target = f"rounds to {target_of(table)}'s score"
    header = (
        "task",
        "method",
        to_target,
        "rounds to converge",
        "MB to clients",
        "of it stand-in",
        "MB from clients",
        "client s",
    )
    return [
        header,
        *(
            (
                one.task,
                one.method,
                _mean(one.reached, one.runs),
                _mean(one.converged, one.runs),
                _mega(one, ["down_"]),
                _mega(one, ["down_stand_in"]),
                _mega(one, ["up_"]),
                number(one.client_seconds, 1, 1),
            )
            for one in found
        ),
    ]


def records(table: Standings) -> Iterable[dict[str, object]]:
    """Yield the same as numbers, for a spreadsheet: one line a task and method."""
    for one in rounds(table):
        yield {
            "task": one.task,
            "method": one.method,
            "runs": one.runs,
            "target": target_of(table),
            "reached": len(one.reached),
            "rounds_to_target": fmean(one.reached) if one.reached else None,
            "converged": len(one.converged),
            "rounds_to_converge": fmean(one.converged) if one.converged else None,
            "client_seconds": one.client_seconds,
            **{f"bytes_{kind}": count for kind, count in one.sent.items()},
        }


def _mean(found: Sequence[int], runs: int) -> str:
    if not found:
        return NONE
    return f"{fmean(found):g}" if len(found) == runs else f"{fmean(found):g} ({len(found)} of {runs})"


def _mega(one: Rounds, prefixes: Sequence[str]) -> str:
    return number(sum(count for kind, count in one.sent.items() if kind.startswith(tuple(prefixes))) / 1e6, 1, 2)
