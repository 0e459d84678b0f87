"""What the tests of federations share: a recipe of a tiny one, and a stand-in small enough to see through."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tunery.core.federated.arguments import build_federated_options
from tunery.core.federated.run import federate
from tunery.registry.catalog import Origin
from tunery.registry.loading import load_plugins
from tunery.registry.proxy import ProxyStrategy


class HalfWidth(ProxyStrategy):
    """A BERT of half as many neurons; queries and head train. Statistics and alignment are made up, and easy to foretell."""

    name = "half_width"
    summary = "half of the neurons"
    reference = "none"
    identity_start = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """every: rounds between alignments."""

        every: int = 2

    @property
    def realign_every(self) -> int:
        return self.config.every

    def prepare(self, model, run):
        small = copy.deepcopy(model)
        for layer in small.bert.encoder.layer:
            first, second = layer.intermediate.dense, layer.output.dense
            half = first.out_features // 2
            first.weight = nn.Parameter(first.weight[:half].detach().clone())
            first.bias = nn.Parameter(first.bias[:half].detach().clone())
            second.weight = nn.Parameter(second.weight[:, :half].detach().clone())
            first.out_features = second.in_features = half
        for name, value in small.named_parameters():
            value.requires_grad_("query" in name or "classifier" in name)
        return small

    def plug_in(self, model, proxy, run):
        trained = {name: value for name, value in proxy.named_parameters() if value.requires_grad}
        model.load_state_dict(trained, strict=False)
        return model

    def distill(self, model, proxy, batches, run):
        seen = sum(len(batch["input_ids"]) for batch in batches)
        assert all("labels" not in batch for batch in batches)
        with torch.no_grad():
            proxy.bert.encoder.layer[0].output.dense.bias.fill_(0.5)
        return {"rows": float(seen)}

    def statistics(self, proxy, batches, run):
        return {"tokens": torch.tensor([sum(batch["attention_mask"].sum().item() for batch in batches)])}

    def realign(self, model, proxy, statistics, batches, run):
        with torch.no_grad():
            for layer in proxy.bert.encoder.layer:
                layer.intermediate.dense.weight[[1, 3]] += 0.01 * statistics["tokens"].float()
        return {"tokens": float(statistics["tokens"])}


@pytest.fixture(scope="session")
def half_width() -> Iterator[type[HalfWidth]]:
    """The stand-in, installed."""
    catalog = load_plugins().catalog
    catalog.add(HalfWidth, Origin(distribution="tests", version="0", module=__name__, file=__file__))
    yield HalfWidth
    del catalog.entries["strategy", HalfWidth.name]


@pytest.fixture(scope="session")
def calm_base(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without dropout, for what has a closed form."""
    import shutil

    folder = tmp_path_factory.mktemp("calm") / "base"
    shutil.copytree(tiny.base, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def given(tiny: Any) -> Callable[..., dict[str, Any]]:
    """Return the keys of a federation of six clients, three a round, for three rounds."""

    def keys(folder: Path, **changes: Any) -> dict[str, Any]:
        return tiny.given(
            **{
                "max_steps": None,
                "save_strategy": None,
                "report_to": None,
                "strategy": "lora:r=2",
                "output_dir": str(folder),
                "num_clients": 6,
                "client_fraction": 0.5,
                "num_rounds": 3,
                "eval_every": 2,
                **changes,
            }
        )

    return keys


@pytest.fixture(scope="session")
def run_federation(given: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Run a federation in a folder, with keys changed."""

    def run(folder: Path, connect: Any = None, **changes: Any) -> dict[str, Any]:
        return federate(build_federated_options(given(folder, **changes)), connect)

    return run
