"""Every number in full precision, as CSV: the statistics, and the runs they come from."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from ..comparison import AVERAGE, Standings, Versus, every_pair
from ..statistics import Comparison, Summary
from .rounds import records
from .sweep import Sweep
from .sweep import records as along_axis


def statistics_csv(table: Standings) -> str:
    """Return every statistic in full precision, a line for each task and method and for each method's average."""
    rows: list[dict[str, object]] = []
    for task in table.results.tasks:
        metric = next(cell.main_metric for cell in table.results.cells if cell.task == task)
        for method in table.results.methods:
            runs = table.results.of(task, method)
            if not runs:
                continue
            counts = {"task": task, "method": method, "metric": metric, "runs": len(runs)}
            summary, one = table.summaries.get((task, method)), table.versus.get((task, method))
            rows.append({**counts, "failed": table.failed[task, method], **_summary(summary), **_comparison(one)})
    for method, (mean, sd) in table.averages.items():
        one = table.versus.get((AVERAGE, method))
        rows.append({"task": AVERAGE, "method": method, "mean": mean, "sd": sd, **_comparison(one)})
    return _csv(rows)


def _summary(summary: Summary | None) -> dict[str, object]:
    if summary is None:
        return {"scores": 0}
    t, bca = summary.interval, summary.bootstrap
    return {
        "scores": summary.count,
        "mean": summary.mean,
        "sd": summary.sd,
        "median": summary.median,
        "worst": summary.worst,
        "low": t and t.low,
        "high": t and t.high,
        "bca_low": bca and bca.low,
        "bca_high": bca and bca.high,
    }


def _comparison(one: Versus | None) -> dict[str, object]:
    if one is None:
        return {}
    found: Comparison = one.comparison
    return {
        "pairs": found.count,
        "difference": found.difference,
        "difference_low": found.interval and found.interval.low,
        "difference_high": found.interval and found.interval.high,
        "p": found.p,
        "p_holm": one.p,
        "wilcoxon": found.wilcoxon,
        "variance_p_holm": one.variance_p,
        "detectable": found.detectable,
    }


def pairs_csv(table: Standings) -> str:
    """Return the comparison of every method with every other, a line a pair."""
    return _csv(
        {"task": one.task, "method": one.method, "other": one.other, **_comparison(one)} for one in every_pair(table)
    )


def rounds_csv(table: Standings) -> str:
    """Return the rounds that each method needs on each task, its bytes and its clients' seconds; empty without rounds."""
    return _csv(records(table))


def sweep_csv(found: Sweep) -> str:
    """Return standard deviation and mean along a suite's axis, a line a point."""
    return _csv(dict(record) for record in along_axis(found))


def runs_csv(table: Standings) -> str:
    """Return every run, one a line: its score and what it cost."""
    return _csv(
        {
            "task": cell.task,
            "method": cell.method,
            "seed": cell.seed,
            "status": "degenerate" if cell.degenerate else cell.status,
            "metric": cell.main_metric,
            "score": cell.score,
            "majority": cell.majority,
            "seconds": cell.train_info.get("seconds"),
            "peak_memory_bytes": cell.train_info.get("peak_memory_bytes"),
            "steps": cell.train_info.get("steps"),
            "trainable_parameters": (cell.train_info.get("parameters") or {}).get("trainable"),
            "fingerprint": cell.inputs.get("fingerprint"),
            "part_of": cell.joint or None,
            "error": cell.error,
        }
        for cell in table.results.cells
    )


def _csv(rows: Iterable[dict[str, object]]) -> str:
    rows = list(rows)
    out = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
