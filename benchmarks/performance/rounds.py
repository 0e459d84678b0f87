"""What federated rounds cost beside the clients' training.

* ``100 clients, time``: rounds of a federation of 100 clients, of which five train in each, one after another on one model,
  against the sum of the times those five trained for: MiniLM with LoRA on ``python_docs``. Rounds that end with an evaluation do
  not count, since nobody trains in it.
* ``100 clients, memory``: peak of two rounds of it against that of one ordinary run of as many steps, each in a process of its
  own.
* ``100 clients, sub-model, memory``: the same with ``proxy_sub_fm``, aligned before and in between: the server has the whole model
  beside the sub-model, and one owner only what was taken out.

Time is wall time on all of torch's threads: leave the machine alone meanwhile.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ...core.console import calm
from ...core.federated.arguments import build_federated_options
from ...core.federated.run import federate
from ...core.options import build_options
from ...core.run import train
from . import workloads
from .claims import Claim, Run, main
from .paired import peak_memory

TIME_GOAL, MEMORY_GOAL = 1.05, 1.2
LENGTH = 128
SUB_MODEL = "proxy_sub_fm:r=8,distill_steps=2,realign_every=1,realign_steps=2"


def claims(run: Run) -> Iterator[Claim]:
    """Measure every claim of this script."""
    calm()
    with tempfile.TemporaryDirectory() as folder:
        yield hundred_clients_time(run, Path(folder))
        yield hundred_clients_memory(Path(folder))
        yield hundred_clients_memory(Path(folder), ", sub-model", strategy=SUB_MODEL, server_fraction=0.02)


def _keys(output_dir: Path, rows: int) -> dict[str, Any]:
    return {
        "model_name_or_path": workloads.MINILM,
        "dataset_name": "python_docs",
        "max_length": LENGTH,
        "max_train_samples": rows,
        "max_eval_samples": 64,
        "strategy": "lora:r=8",
        "per_device_train_batch_size": 16,
        "learning_rate": 1e-3,
        "output_dir": str(output_dir),
        "overwrite_output_dir": True,
        "report_to": "none",
    }


def _federation(output_dir: Path, num_rounds: int, **more: Any) -> None:
    calm()
    rounds = {"num_clients": 100, "client_fraction": 0.05, "num_rounds": num_rounds, "eval_every": 0}
    federate(build_federated_options({**_keys(output_dir, 3200), **rounds, **more}))


def _one_run(output_dir: Path, strategy: str | None = None) -> None:
    calm()
    more: dict[str, Any] = {} if strategy is None else {"strategy": strategy}
    train(build_options({**_keys(output_dir, 3200), "max_steps": 20, "save_strategy": "no", **more}))


def hundred_clients_time(run: Run, folder: Path) -> Claim:
    """Compare the rounds' seconds with those of the clients in them."""
    _federation(folder / "time", 3 if run.quick else 11)
    lines = (folder / "time" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "metrics" not in row]
    seconds, training = sum(row["seconds"] for row in rows), sum(row["client_seconds"] for row in rows)
    detail = f"{seconds:.1f} s, of which clients trained {training:.1f} s"
    return Claim(name="100 clients, time", value=seconds / training, goal=TIME_GOAL, detail=detail)


def hundred_clients_memory(folder: Path, kind: str = "", **more: Any) -> Claim:
    """Compare the peak memory of a federation, ``more`` being keys of it, with that of one run of its strategy."""
    many = peak_memory(partial(_federation, folder / f"many{kind}", 2, **more))
    one = peak_memory(partial(_one_run, folder / f"one{kind}", more.get("strategy")))
    detail = f"100 clients {many}, one run {one}"
    return Claim(name=f"100 clients{kind}, memory", value=many.total / one.total, goal=MEMORY_GOAL, detail=detail)


if __name__ == "__main__":
    sys.exit(main(claims, __doc__))
