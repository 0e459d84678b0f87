"""What ``tunery federate`` prints: the cost of a round, the result, and the course of what probes measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..console import show_mapping, show_measurements
from .cost import Cost
from .probes import overall

_SHOWN = 20  # moments at which probes measured


def show_cost(cost: Cost) -> None:
    """Print what a round is going to cost a client."""
    facts = {
        "multiplications per client and round": f"{cost.multiplications:.3g}",
        "adapter, each way": _size(cost.adapter_bytes),
    }
    if cost.stand_in_bytes:
        facts["stand-in, once"] = _size(cost.stand_in_bytes)
    if cost.every:
        facts[f"alignment every {cost.every} rounds, per round"] = _size(cost.alignment_bytes)
        facts["alignment, per round it takes part in"] = f"{_size(cost.alignment_bytes_asked)} or more"
        facts["statistics, per round it takes part in"] = _size(cost.statistics_bytes)
    show_mapping(facts)
    if cost.verdict():
        print(cost.verdict())


def show_federation(result: Mapping[str, Any], output_dir: Path) -> None:
    """Print the result of a federation, its cost beside what was predicted."""
    facts: dict[str, Any] = {
        "task": result["task"],
        "rounds": result["rounds"],
        "clients": result["clients"],
    }
    for name in result["main_metrics"]:
        facts[name] = f"{result['metrics'][name]:.4f}"
    measured, predicted = result["cost"]["measured"], result["cost"]["predicted"]
    facts |= {
        "adapter per client and round": f"{_size(measured['adapter_bytes'])} "
        f"(predicted {_size(predicted['adapter_bytes'])})",
        "training per client and round": f"{measured['seconds']:.2f} s for {predicted['multiplications']:.3g} "
        f"multiplications ({measured['multiplications_per_second']:.3g} a second)",
        "clients' training, all together": f"{result['client_seconds']:.0f} of {result['seconds']:.0f} s",
    }
    if measured["stand_in_bytes"]:
        facts["stand-in per client and round"] = (
            f"{_size(measured['stand_in_bytes'])} (predicted {_size(predicted['stand_in_bytes_once'])} once and "
            f"{_size(predicted['alignment_bytes_asked'])} or more a round)"
        )
    if measured["statistics_bytes"]:
        facts["statistics per client and round"] = (
            f"{_size(measured['statistics_bytes'])} (predicted {_size(predicted['statistics_bytes'])})"
        )
    if result["left_out"]:
        facts["left out"] = ", ".join(f"{name} ({count})" for name, count in sorted(result["left_out"].items()))
    show_mapping(facts)
    _show_probes(result.get("probes", ()))
    print(f"{output_dir}/ holds the weights, result.json, rounds.jsonl and rounds.png")


def _show_probes(measured: Sequence[Mapping[str, Any]]) -> None:
    """Print a table for each probe: a line for each moment, a column for each of its overall values."""
    shown = overall(measured)
    for probe in dict.fromkeys(row["probe"] for row in shown):
        lines: dict[tuple[int, str], dict[str, Any]] = {}
        for row in shown:
            if row["probe"] == probe:
                place = (row["round"], row["moment"])
                start = {"round": row["round"], "moment": row["moment"].replace("_", " ")}
                lines.setdefault(place, start)[row["name"]] = row["value"]
        left_out = f", the last {_SHOWN} of {len(lines)} moments" if len(lines) > _SHOWN else ""
        print(f"{probe}{left_out}")
        show_measurements(list(lines.values())[-_SHOWN:])


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"
