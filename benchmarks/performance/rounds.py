"""What federated rounds cost beside the clients' training.

* ``100 clients, time``: rounds of a federation of 100 clients, of which five train in each, one after another on one model,
  against the sum of the times those five trained for: MiniLM with LoRA on ``python_docs``. Rounds that end with an evaluation do
  not count, since nobody trains in it.
* ``100 clients, memory``: peak of two rounds of it against that of the same rounds with one client, who has all the rows and
  takes as many steps; and against that of one ordinary run of the whole model. Each is in a process of its own.
* ``100 clients, sub-model``: the same two with ``proxy_sub_fm``, aligned before and in between. There the ordinary run trains the
  same adapter on the whole model, which the server has beside the sub-model; what of the two is equal is in memory once.

Time is wall time on all of torch's threads: leave the machine alone meanwhile. Memory may be measured on a busy one. ``--quick``
takes fewer rounds, clients and steps, which changes peaks little.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ... import build_federated_options, build_options, federate, train
from ...core.console import calm
from . import workloads
from .claims import Claim, Run, main
from .paired import peak_memory

TIME_GOAL, MEMORY_GOAL = 1.05, 1.2
LENGTH, BATCH = 128, 16
CLIENTS, ROWS = 100, 3200
WHOLE = "lora:r=8"
SUB_MODEL = "proxy_sub_fm:r=8,distill_steps=2,realign_every=1,realign_steps=2"
SAME_ADAPTER = "proxy_sub_fm:r=8,ratio=0"


def claims(run: Run) -> Iterator[Claim]:
    """Measure every claim of this script."""
    calm()
    with tempfile.TemporaryDirectory() as folder:
        yield hundred_clients_time(run, Path(folder))
        yield from hundred_clients_memory(run, Path(folder), "", WHOLE, WHOLE)
        yield from hundred_clients_memory(
            run, Path(folder), ", sub-model", SUB_MODEL, SAME_ADAPTER, server_fraction=0.02
        )


def _keys(output_dir: Path, rows: int) -> dict[str, Any]:
    return {
        "model_name_or_path": workloads.MINILM,
        "dataset_name": "python_docs",
        "max_length": LENGTH,
        "max_train_samples": rows,
        "max_eval_samples": 64,
        "strategy": WHOLE,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 1e-3,
        "output_dir": str(output_dir),
        "overwrite_output_dir": True,
        "report_to": "none",
    }


def _federation(output_dir: Path, num_rounds: int, **more: Any) -> None:
    calm()
    rounds = {"num_clients": CLIENTS, "client_fraction": 0.05, "num_rounds": num_rounds, "eval_every": 0}
    federate(build_federated_options({**_keys(output_dir, ROWS), **rounds, **more}))


def _one_run(output_dir: Path, **more: Any) -> None:
    calm()
    train(build_options({**_keys(output_dir, ROWS), "save_strategy": "no", **more}))


def hundred_clients_time(run: Run, folder: Path) -> Claim:
    """Compare the rounds' seconds with those of the clients in them."""
    _federation(folder / "time", 3 if run.quick else 11)
    lines = (folder / "time" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "metrics" not in row]
    seconds, training = sum(row["seconds"] for row in rows), sum(row["client_seconds"] for row in rows)
    detail = f"{seconds:.1f} s, of which clients trained {training:.1f} s"
    return Claim(name="100 clients, time", value=seconds / training, goal=TIME_GOAL, detail=detail)


def hundred_clients_memory(
    run: Run, folder: Path, kind: str, strategy: str, whole: str, **more: Any
) -> Iterator[Claim]:
    """Compare the peak memory of a federation with that of one with a single client, and that of a run of the whole model.

    Args:
        run: how thoroughly.
        folder: where they write.
        kind: what claims call the federation.
        strategy: the federation's.
        whole: that of the ordinary run.
        more: further keys of both federations.
    """
    fraction = 0.02 if run.quick else 0.05
    steps = round(fraction * CLIENTS) * ROWS // CLIENTS // BATCH  # of a round's clients, all together
    rounds = {"strategy": strategy, "client_fraction": fraction, **more}
    alone = {**rounds, "num_clients": 1, "client_fraction": 1.0, "max_steps": steps}
    many = peak_memory(partial(_federation, folder / f"many{kind}", 2, **rounds))
    one = peak_memory(partial(_federation, folder / f"one{kind}", 2, **alone))
    plain = peak_memory(partial(_one_run, folder / f"plain{kind}", strategy=whole, max_steps=2 * steps))
    detail = f"100 clients {many}, one client {one}, one run with {whole} {plain}"
    for words, peer in (("one client's", one), ("one run's", plain)):
        name = f"100 clients{kind}, memory over {words}"
        yield Claim(name=name, value=many.total / peer.total, goal=MEMORY_GOAL, detail=detail)


if __name__ == "__main__":
    sys.exit(main(claims, __doc__))
