"""The story of a federation: options -> data, clients, server -> rounds -> result. ``federate`` is what ``tunery federate`` does."""

from __future__ import annotations

import copy
import gc
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import set_seed

from ...registry.proxy import ProxyStrategy
from ..artifacts import MANIFEST, RESULT, versions, write_json
from ..data import TaskData, encode, load_tasks
from ..models import load_model, load_processor
from ..recipe import choose
from ..run import check_writable, data_keys, peak_memory, refuse_mixing, remove, stored_parameters
from ..sharding import parameter_counts
from .arguments import FederatedArguments, FederatedOptions
from .checkpoint import LOG, ROUNDS, Checkpoints, Progress, RoundLog
from .cost import Cost, predict
from .engine import Engine, InProcess
from .partition import Indices, label_counts, partition, plot_partition
from .pictures import CURVE, plot_rounds
from .probes import BEGIN, ServerProbes, course
from .protection import protection_of
from .resident import Resident
from .rounds import Rounds
from .rows import no_rows, select, server_data, server_share, with_its_one_file
from .server import Server
from .worker import ClientWorker

PARTITION = "partition.png"
_EARLIER = (MANIFEST, RESULT, LOG, CURVE, PARTITION, ROUNDS, "checkpoint-*", "*.safetensors", "adapter_config.json")
_NOISE, _DISTILLING = 6, 7  # streams of the seed; partition, rounds and rows use the others


@dataclass(frozen=True)
class Federation:
    """Everything a federation consists of before its first round.

    Attributes:
        resident: the prepared model of this process.
        data: the task and its rows as text.
        client_rows: the training rows of each client, encoded.
        parts: their numbers.
        validation: the rows that evaluate the server.
        server_rows: the server's own, or ``None``.
        full: with a ``ProxyStrategy`` the model as loaded, which the stand-in was made of.
    """

    resident: Resident
    data: TaskData
    client_rows: Sequence[Any]
    parts: Sequence[Indices]
    validation: Any
    server_rows: Any
    full: Any

    def cost(self, options: FederatedOptions) -> Cost:
        """Return what a client's round is predicted to cost."""
        return predict(self.resident, self.client_rows, options, self.server_rows)


Connect = Callable[[Federation, FederatedOptions], Engine]


def federate(options: FederatedOptions, connect: Connect | None = None, *, simulated: bool = True) -> dict[str, Any]:
    """Run a federation, evaluate and save it; return what ``result.json`` holds.

    Args:
        options: its arguments.
        connect: makes the engine; default: clients one after another in this process.
        simulated: whether the training rows are dealt out to clients; otherwise clients have rows of their own.

    Raises:
        TuneryError: anything a user can mend. What finished rounds came to is kept, and can be resumed.
    """
    args, output_dir = options.run.training, options.output_dir
    choose(args.strategy, args.regularizers)  # a wrong name should cost no loading of models
    probed_by = choose(probes=args.probes)
    check_writable(output_dir)
    earlier = []
    if not args.resume_from_checkpoint:
        earlier = refuse_mixing(output_dir, _EARLIER, options.run.run.overwrite_output_dir)
    federation = assemble(options, simulated=simulated)
    resident = federation.resident
    server = Server(resident, federation.full, federation.validation, federation.server_rows, secrets.token_hex(8))
    probes = ServerProbes(probed_by, server)
    remove(earlier)
    output_dir.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(output_dir, options.given)
    progress = checkpoints.load(server)
    if progress is None:
        _picture(federation, options)
        progress = Progress(distilled=server.distill(_derived(args.seed, _DISTILLING)))
        progress.probed = probes.measure(BEGIN, 0)
    predicted = federation.cost(options)
    engine = (connect or in_process)(federation, options)
    gc.collect()
    gc.freeze()  # a Trainer collects garbage for each client: it need not walk through all that was there before
    try:
        rounds = Rounds(
            server,
            engine,
            options.federated,
            learning_rate=args.learning_rate,
            seed=options.run.training.seed,
            checkpoints=checkpoints,
            log=RoundLog(output_dir / LOG),
            probes=probes,
        )
        rows = rounds.run(progress)
    finally:
        gc.unfreeze()
        engine.close()
    return _finish(federation, server, options, rows, progress, predicted, probes)


def assemble(options: FederatedOptions, *, simulated: bool = True) -> Federation:
    """Load data and model, deal the rows out, prepare the model.

    Args:
        options: the federation's.
        simulated: see :func:`federate`.

    Raises:
        TuneryError: anything that cannot be loaded or does not go together.
    """
    args, federated = options.run.training, options.federated
    seed = args.seed
    set_seed(seed)
    source = options.run.data if simulated else with_its_one_file(options.run.data)
    (data,) = load_tasks(source, seed=seed if args.data_seed is None else args.data_seed)
    run = options.run.run
    processor = load_processor(run.model_name_or_path, data.task, run.model_revision)
    encoded = encode(data, processor)
    labels = data.splits["train"]["labels"][:] if data.task.label_names else None
    keep, own = server_share(len(encoded.train), federated, seed)
    parts: list[Indices] = []
    if simulated:
        dealt = partition(
            len(keep),
            None if labels is None else [labels[index] for index in keep],
            num_clients=federated.num_clients,
            how=federated.partition,
            alpha=federated.alpha,
            seed=seed,
        )
        parts = [keep[part] for part in dealt]
    server_rows = select(encoded.train, own) if len(own) else server_data(federated, data, processor, seed)
    set_seed(seed)  # a site draws its head right after it, too
    model = load_model(run.model_name_or_path, data.task, run.model_revision, run.dtype)
    is_proxy = isinstance(choose(args.strategy).strategy, ProxyStrategy)
    full = _twin(model) if is_proxy else None
    resident = Resident(model, data.task, processor, encoded.data_collator, options.run)
    _check(resident, server_rows, federated)
    return Federation(
        resident=resident,
        data=data,
        client_rows=[select(encoded.train, part) for part in parts],
        parts=parts,
        validation=encoded.validation,
        server_rows=server_rows,
        full=full,
    )


def _twin(model: Any) -> Any:
    """Return a copy of a model whose parameters and buffers are the model's own: what a stand-in keeps is there once."""
    return copy.deepcopy(model, {id(value): value for value in (*model.parameters(), *model.buffers())})


def _check(resident: Resident, server_rows: Any, federated: FederatedArguments) -> None:
    """Refuse what would be noticed only after the stand-in was distilled, or at the first alignment."""
    protection_of(federated, resident.aligns)
    proxy = resident.proxy
    if proxy is not None and 0 < proxy.realign_every < federated.num_rounds and server_rows is None:
        raise no_rows()


def in_process(federation: Federation, options: FederatedOptions) -> Engine:
    """Return the engine whose clients are all in this process."""
    federated, seed = options.federated, options.run.training.seed
    protection = protection_of(federated, federation.resident.aligns)
    width = len(str(federated.num_clients - 1))
    workers = {}
    for number, rows in enumerate(federation.client_rows):
        name = f"client-{number:0{width}d}"
        workers[name] = ClientWorker(name, federation.resident, rows, protection, _derived(seed, _NOISE, number))
    return InProcess(workers)


def _derived(seed: int, *stream: int) -> int:
    return int(np.random.SeedSequence([seed, *stream]).generate_state(1)[0])


def _picture(federation: Federation, options: FederatedOptions) -> None:
    task, federated = federation.data.task, options.federated
    if not task.label_names or not federation.parts:
        return
    labels = federation.data.splits["train"]["labels"][:]
    counts = label_counts(federation.parts, labels, task.num_labels)
    how = f"Dirichlet({federated.alpha:g})" if federated.partition == "dirichlet" else "IID"
    title = f"{task.name}: {how}, {federated.num_clients} clients"
    plot_partition(counts, task.label_names, options.output_dir / PARTITION, title)


def _finish(
    federation: Federation,
    server: Server,
    options: FederatedOptions,
    rows: Sequence[Mapping[str, Any]],
    progress: Progress,
    predicted: Cost,
    probes: ServerProbes,
) -> dict[str, Any]:
    """Write weights, manifest, curve and ``result.json``."""
    resident, output_dir, task = federation.resident, options.output_dir, federation.data.task
    metrics = rows[-1]["metrics"]
    resident.load(server.adapter)
    resident.trainer.save_model()
    traffic, left_out = Counter[str](), Counter[str]()
    for row in rows:
        traffic.update(row["bytes"])
        left_out.update(row["left_out"].keys())
    result = {
        "task": task.name,
        "metrics": metrics,
        "main_metrics": [task.metrics[0]],
        "train_loss": rows[-1]["loss"],
        "rounds": len(rows),
        "clients": options.federated.num_clients if federation.parts else len({n for r in rows for n in r["clients"]}),
        "examples": {name: len(split) for name, split in federation.data.splits.items()},
        "parameters": parameter_counts(resident.model) | {"stored": stored_parameters(output_dir)},
        "bytes": dict(traffic),
        "left_out": dict(left_out),
        "distilled": progress.distilled,
        "cost": predicted.beside(rows),
        "client_seconds": sum(row["client_seconds"] for row in rows),
        "seconds": sum(row["seconds"] for row in rows),
        "peak_memory_bytes": peak_memory(),
        "seed": resident.trainer.run.seed,
        "plugins": [*resident.trainer.recipe.describe(), *probes.recipe.describe()],
        "base_model": options.run.run.model_name_or_path,
        "data": data_keys(options.run),
        "versions": versions(),
    }
    if measured := course(progress.probed, rows):
        result["probes"] = measured
    plot_rounds(
        rows,
        output_dir / CURVE,
        f"{task.name}: {options.run.training.strategy or 'as given'}",
        task.metrics[0],
        measured,
    )
    write_json(output_dir / RESULT, result)
    return result
