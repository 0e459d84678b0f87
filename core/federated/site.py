"""A client in a process of its own: made of its recipe and its rows, and nothing else."""

from __future__ import annotations

from transformers import set_seed

from ...registry.errors import RecipeError
from ...registry.proxy import ProxyStrategy
from ..data import encode, load_tasks
from ..models import empty_model, load_model, load_processor
from ..recipe import choose
from .arguments import FederatedOptions
from .protection import protection_of
from .resident import Resident
from .rows import with_its_one_file
from .worker import ClientWorker


def site_worker(name: str, options: FederatedOptions) -> ClientWorker:
    """Return the worker of a site.

    With a ``ProxyStrategy`` only the model's config and tokenizer are read here, and the stand-in comes from the server; with
    any other strategy the site has the model itself.

    Args:
        name: the site's.
        options: its own.

    Raises:
        TuneryError: anything that cannot be loaded or does not go together.
    """
    refuse_probes(options)
    args, run = options.run.training, options.run.run
    seed = args.seed if args.data_seed is None else args.data_seed
    (data,) = load_tasks(with_its_one_file(options.run.data), seed=seed)
    processor = load_processor(run.model_name_or_path, data.task, run.model_revision)
    encoded = encode(data, processor)
    strategy = choose(args.strategy, args.regularizers).strategy
    set_seed(args.seed)
    gets_all = isinstance(strategy, ProxyStrategy)
    make = empty_model if gets_all else load_model
    model = make(run.model_name_or_path, data.task, run.model_revision, run.dtype)
    resident = Resident(model, data.task, processor, encoded.data_collator, options.run)
    protection = protection_of(options.federated, resident.aligns)
    return ClientWorker(name, resident, encoded.train, protection, made_empty=gets_all)


def refuse_probes(options: FederatedOptions) -> None:
    """Refuse a site's recipe that names probes.

    Raises:
        RecipeError: it does.
    """
    if options.run.training.probes:
        raise RecipeError(
            "probes in the recipe of a site, which only trains", remedy="name them in the server's, who measures"
        )
