"""The keys of a federation, beside those of ``tunery train``; and the two read together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from ...registry.errors import RecipeError
from ..keys import help_text
from ..options import Options, build_options, read_given, typed_arguments


@dataclass(kw_only=True)
class FederatedArguments:
    """How rows are dealt out, how rounds go, and what clients do to what they send.

    The defaults are the paper's (Federated Proxy Fine-Tuning, section 4.1.3) where it says something.

    Attributes:
        listed_by: the command that lists these keys.
    """

    listed_by: ClassVar[str] = "tunery federate --keys"

    num_clients: Annotated[int, Ge(1)] = field(default=100, metadata={"help": "How many clients there are."})
    client_fraction: Annotated[float, Gt(0), Le(1)] = field(
        default=0.1, metadata={"help": "Share of the clients that train in a round, drawn by the seed."}
    )
    num_rounds: Annotated[int, Ge(1)] = field(
        default=500, metadata={"help": "Rounds; a client trains num_train_epochs (default 1) in each it takes part in."}
    )
    partition: Literal["iid", "dirichlet"] = field(
        default="iid", metadata={"help": "How training rows are dealt out: iid, or dirichlet, label-skewed."}
    )
    alpha: Annotated[float, Gt(0)] = field(
        default=1.0, metadata={"help": "Concentration of the Dirichlet distribution; small means few labels a client."}
    )
    aggregation: Literal["weighted", "uniform"] = field(
        default="weighted", metadata={"help": "Weight of a client in the mean: its rows, or the same for each."}
    )
    learning_rate_decay: Literal["linear", "released", "constant"] = field(
        default="linear",
        metadata={
            "help": "Learning rate over rounds, constant within one: linear, lr (R - t) / R with t of R rounds done; "
            "released, as the paper's public code has it: 1, .6, .4, .2, .2 for R = 5; or constant."
        },
    )
    eval_every: Annotated[int, Ge(0)] = field(
        default=10, metadata={"help": "Evaluate the server's model after every so many rounds; 0: at the end only."}
    )
    probe_every: Annotated[int, Ge(0)] | None = field(
        default=None,
        metadata={
            "help": "Rounds between two measurements of the probes, which also measure before the first round, on both sides "
            "of every alignment between rounds, and after the last round; 0: only then. Default: eval_every."
        },
    )
    min_clients: Annotated[int, Ge(1)] = field(
        default=1, metadata={"help": "Replies a round needs; one with fewer is repeated with other clients."}
    )
    max_attempts: Annotated[int, Ge(1)] = field(
        default=3, metadata={"help": "How often one round is tried before the federation gives up."}
    )
    round_timeout: Annotated[float, Gt(0)] | None = field(
        default=None, metadata={"help": "Seconds a client may take for a round; a later reply is left out."}
    )
    clip_norm: Annotated[float, Gt(0)] | None = field(
        default=None, metadata={"help": "Clients scale what they changed down to this L2 norm."}
    )
    statistics_clip_norm: Annotated[float, Gt(0)] | None = field(
        default=None, metadata={"help": "Clients scale the statistics they tell down to this L2 norm."}
    )
    noise_multiplier: Annotated[float, Ge(0)] = field(
        default=0.0,
        metadata={"help": "Clients add Gaussian noise of this many clip norms to each number they send."},
    )
    server_data: str | None = field(
        default=None,
        metadata={"help": "The server's own unlabelled rows, for aligning a stand-in: a file or a dataset's name."},
    )
    server_data_config_name: str | None = field(
        default=None, metadata={"help": "Configuration of that dataset, for example 20231101.en."}
    )
    server_fraction: Annotated[float, Ge(0), Le(0.9)] = field(
        default=0.0, metadata={"help": "Instead: share of the training rows that the server has, without labels."}
    )
    max_server_samples: Annotated[int, Ge(1)] | None = field(
        default=None, metadata={"help": "Use this many of the server's rows, drawn by the seed. Default: all."}
    )

    def is_probed(self, done: int) -> bool:
        """Whether probes measure after this many rounds, alignments and the last round aside."""
        every = self.eval_every if self.probe_every is None else self.probe_every
        return every > 0 and done % every == 0

    @property
    def clients_per_round(self) -> int:
        """How many clients are asked in a round."""
        return max(1, round(self.client_fraction * self.num_clients))

    def learning_rate(self, base: float, done: int) -> float:
        """Return the learning rate of a round.

        Args:
            base: that of the first round.
            done: rounds done before it.
        """
        if self.learning_rate_decay == "constant" or done == 0:
            return base
        left = self.num_rounds - done
        if self.learning_rate_decay == "released":
            left = max(left - 1, 1)  # the code counts on before it divides, and takes a rate of 0 for none given
        return base * left / self.num_rounds


@dataclass(frozen=True)
class FederatedOptions:
    """The arguments of a federation.

    Attributes:
        federated: its own.
        run: model, data and what the clients' Trainer takes.
        given: the keys that were given, recipe and flags merged.
    """

    federated: FederatedArguments
    run: Options
    given: Mapping[str, Any]

    @property
    def output_dir(self) -> Path:
        """Folder of the run."""
        return self.run.output_dir


_KEYS = tuple(item.name for item in fields(FederatedArguments))
_ROUND = {"num_train_epochs": 1}  # of a client in a round, unless told otherwise
# What a client's Trainer does in every round. Who gives one of these expects something else of them.
_SETTLED = {
    "lr_scheduler_type": "constant",
    "eval_strategy": "no",
    "save_strategy": "no",
    "logging_strategy": "no",
    "load_best_model_at_end": False,
    "report_to": "none",
}
_REFUSED = {
    "lr_scheduler_type": "rounds decay the learning rate: learning_rate_decay",
    "warmup_steps": "rounds decay the learning rate: learning_rate_decay",
    "warmup_ratio": "rounds decay the learning rate: learning_rate_decay",
    "eval_strategy": "the server's model is evaluated: eval_every",
    "eval_steps": "the server's model is evaluated: eval_every",
    "save_strategy": "every round is a checkpoint",
    "logging_strategy": "every round is a row of rounds.jsonl",
    "report_to": "every round is a row of rounds.jsonl",
    "do_predict": "the server's model is scored on the validation split",
    "load_best_model_at_end": "the last round counts",
    "tasks": "a federation has one task",
    "probe_moments": "rounds are probed: probe_every",
    "baselines": "train them apart: tunery train",
    "deepspeed": "a client is one process",
}


def build_federated_options(given: Mapping[str, Any]) -> FederatedOptions:
    """Make the argument objects of one flat mapping.

    Raises:
        RecipeError: a key or value that is refused.
    """
    for key, reason in _REFUSED.items():
        if given.get(key) and given[key] != _SETTLED.get(key):
            raise RecipeError(f"{key}={given[key]!r} has no place in a federation", remedy=reason)
    resume = given.get("resume_from_checkpoint")
    if resume and str(resume).lower() not in ("last", "true"):
        raise RecipeError(
            f"resume_from_checkpoint={resume!r} names a place, and a federation goes on in its own folder",
            remedy="give output_dir, and resume_from_checkpoint without a value",
        )
    values = {key: value for key, value in given.items() if key in _KEYS}
    federated = FederatedArguments(**typed_arguments(FederatedArguments, values, FederatedArguments.listed_by))
    if federated.min_clients > federated.clients_per_round:
        raise RecipeError(
            f"min_clients={federated.min_clients} is more than the {federated.clients_per_round} clients of a round",
            remedy="lower it, or raise client_fraction",
        )
    if federated.noise_multiplier and federated.clip_norm is None:
        raise RecipeError("noise_multiplier counts in clip norms", remedy="give clip_norm")
    if federated.server_data and federated.server_fraction:
        raise RecipeError("server_data and server_fraction both name the server's rows", remedy="give one of them")
    rest = {key: value for key, value in given.items() if key not in _KEYS}
    run = build_options({**_ROUND, **rest, **_SETTLED}, FederatedArguments.listed_by)
    if run.training.world_size > 1:
        raise RecipeError("a client is one process", remedy="start tunery federate without a launcher")
    return FederatedOptions(federated=federated, run=run, given=dict(given))


def read_federated_options(recipe: Path | None, flags: Sequence[str]) -> FederatedOptions:
    """Read a recipe and the flags that override it.

    Raises:
        TuneryError: an unreadable file, an unknown key or flag, or a wrong value.
    """
    return build_federated_options(read_given(recipe, flags, (FederatedArguments,)))


def federated_help() -> str:
    """Return every key with its help."""
    return help_text((FederatedArguments,), {**_ROUND, **_SETTLED})
