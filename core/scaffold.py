"""``tunery plugins new``: a complete distribution with one plugin, which passes its conformance tests as it is written."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from string import Template
from textwrap import dedent

from ..registry.contracts import KINDS
from ..registry.errors import DuplicatePluginError, RecipeError, did_you_mean
from ..registry.loading import load_plugins

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_PYPROJECT = """\
    [build-system]
    requires = ["setuptools>=77"]
    build-backend = "setuptools.build_meta"

    [project]
    name = "$distribution"
    version = "0.1.0"
    description = "The $kind $name for tunery"
    readme = "README.md"
    requires-python = ">=3.11"
    dependencies = ["tunery", "annotated-types"]

    [project.optional-dependencies]
    test = ["pytest"]

    [project.entry-points.tunery]           # all that tunery needs to find it
    $name = "$module"

    [tool.setuptools]
    py-modules = ["$module"]
    """
_README = """\
    # $distribution

    The $kind `$name` for tunery. What it does now is a starting point: replace it by your method in `$module.py`.

        pip install -e ".[test]"
        tunery plugins show $name
        tunery train recipe.yaml $flag $name
        pytest

    `tests/test_conformance.py` checks the laws every $kind keeps, on one process, under DDP and under DeepSpeed ZeRO.
    """
_TEST = '''\
    """$name keeps the laws of every $kind."""

    from tunery.registry.conformance import ${base}Laws


    class Test$cls(${base}Laws):
        plugin = "$name"
    '''
_STRATEGY = '''\
    """$name: the last layers and the head train, the rest is frozen."""

    from __future__ import annotations

    from dataclasses import dataclass
    from typing import TYPE_CHECKING, Annotated

    from annotated_types import Ge
    from tunery import Strategy, Support, hookimpl

    if TYPE_CHECKING:
        from torch import nn
        from tunery import RunContext


    class $cls(Strategy):
        """Train the last layers and the fresh head."""

        name = "$name"
        summary = "train the last layers and the head"
        reference = "paper and equation of your method"
        supports = Support(needs_anatomy=True)

        @dataclass(frozen=True, kw_only=True)
        class Config:
            """Options.

            Attributes:
                num_layers: how many layers train, counted from the output.
            """

            num_layers: Annotated[int, Ge(1)] = 1

        config: Config

        def prepare(self, model: nn.Module, run: RunContext) -> nn.Module:
            """Return the model, its ``requires_grad`` flags set."""
            chosen = tuple(f"{layer.name}." for layer in run.anatomy(model).layers[-self.config.num_layers :])
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.startswith(chosen) or not run.is_pretrained(name))
            return model


    @hookimpl
    def tunery_strategies() -> list[type[Strategy]]:
        """Offer :class:`$cls`."""
        return [$cls]
    '''
_REGULARIZER = '''\
    """$name: the mean of sum_c p_c log p_c is added to the loss, so that a classifier stays less sure of itself."""

    from __future__ import annotations

    from dataclasses import dataclass
    from typing import TYPE_CHECKING, Annotated

    from annotated_types import Ge
    from tunery import Regularizer, Support, TaskKind, hookimpl

    if TYPE_CHECKING:
        from torch import Tensor, nn
        from tunery import Batch, RunContext


    class $cls(Regularizer):
        """Penalise confident predictions."""

        name = "$name"
        summary = "penalty on confident predictions"
        reference = "Pereyra et al. 2017, confidence penalty, section 3; then paper and equation of your method"
        supports = Support(tasks=frozenset({TaskKind.CLASSIFICATION, TaskKind.IMAGE_CLASSIFICATION}))

        @dataclass(frozen=True, kw_only=True)
        class Config(Regularizer.Config):
            """Options.

            Attributes:
                weight: factor of the penalty, which is in nats.
            """

            weight: Annotated[float, Ge(0)] = 0.1

        config: Config

        def attach(self, model: nn.Module, run: RunContext) -> None:
            """Nothing to prepare; a method that needs a hook in the model registers it here."""

        def penalty(self, batch: Batch) -> Tensor:
            """Return the negative entropy of the predictions, averaged over the examples: a scalar."""
            log_p_BC = batch.outputs.logits.float().log_softmax(dim=-1)
            return (log_p_BC.exp() * log_p_BC).sum(dim=-1).mean()

        def detach(self, model: nn.Module) -> None:
            """Nothing to undo; a hook that ``attach`` registered is removed here."""


    @hookimpl
    def tunery_regularizers() -> list[type[Regularizer]]:
        """Offer :class:`$cls`."""
        return [$cls]
    '''
_PROBE = '''\
    """$name: the p-norm of the weights that train."""

    from __future__ import annotations

    from collections.abc import Iterator
    from dataclasses import dataclass
    from typing import TYPE_CHECKING, Annotated

    from annotated_types import Ge
    from tunery import Measurement, Probe, hookimpl

    if TYPE_CHECKING:
        from tunery import Subject


    class $cls(Probe):
        """Measure the size of the weights that train."""

        name = "$name"
        summary = "p-norm of the weights that train"
        reference = "paper and equation of your method"

        @dataclass(frozen=True, kw_only=True)
        class Config:
            """Options.

            Attributes:
                p: order of the norm.
            """

            p: Annotated[int, Ge(1)] = 2

        config: Config

        def measure(self, subject: Subject) -> Iterator[Measurement]:
            """Return the norm; under ZeRO-3 every rank sums its own pieces."""
            import torch

            sharding, p = subject.run.sharding, self.config.p
            total = 0.0
            with torch.no_grad():
                for _name, parameter, _start in subject.reference.pieces():
                    total += sharding.sum_shards(sharding.local(parameter).double().abs().pow(p).sum()).item()
            yield Measurement(name="norm", value=total ** (1 / p), where={"p": p})


    @hookimpl
    def tunery_probes() -> list[type[Probe]]:
        """Offer :class:`$cls`."""
        return [$cls]
    '''
_MODULES = {"strategy": _STRATEGY, "regularizer": _REGULARIZER, "probe": _PROBE}
_FLAGS = {"strategy": "--strategy", "regularizer": "--regularizers", "probe": "--probes"}


def write_plugin_skeleton(name: str, kind: str, folder: Path) -> list[Path]:
    """Write the folder ``tunery-NAME`` (dashes for underscores), whole or not at all.

    Args:
        name: what a user will type: lower_snake_case.
        kind: ``"strategy"``, ``"regularizer"`` or ``"probe"``.
        folder: where the new folder goes; made if it is not there.

    Returns:
        The files written.

    Raises:
        RecipeError: a bad name or kind, a folder that is there already or cannot be written.
        DuplicatePluginError: an installed distribution offers that name.
    """
    if kind not in _MODULES:
        raise RecipeError(f"no kind of plugin is called {kind!r}", known=KINDS, remedy=did_you_mean(kind, KINDS))
    if not _NAME.fullmatch(name):
        raise RecipeError(
            f"{name!r} is no name for a plugin", remedy="use lower case words joined by underscores: my_method"
        )
    catalog = load_plugins().catalog
    for taken in (*catalog, *catalog.broken):
        if taken.name == name:
            raise DuplicatePluginError(f"the name {name!r} is taken", owner=str(taken.origin), remedy="choose another")
    distribution = f"tunery-{name.replace('_', '-')}"
    target = folder / distribution
    try:
        if target.exists():
            raise RecipeError(f"{target} is there already", remedy="choose another name or --output_dir")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{distribution}-", dir=folder) as temporary:
            new = Path(temporary) / distribution
            texts = _texts(name, kind, distribution)
            for path, text in texts.items():
                (new / path).parent.mkdir(parents=True, exist_ok=True)
                (new / path).write_text(text, encoding="utf-8")
            new.rename(target)
    except OSError as error:
        raise RecipeError(f"cannot write {target}: {error.strerror}") from None
    return [target / path for path in texts]


def _texts(name: str, kind: str, distribution: str) -> dict[str, str]:
    """Return the content of every file, by its path in the new folder."""
    module = f"tunery_{name}"
    templates = {
        "pyproject.toml": _PYPROJECT,
        "README.md": _README,
        f"{module}.py": _MODULES[kind],
        "tests/test_conformance.py": _TEST,
    }
    fields = {
        "name": name,
        "kind": kind,
        "distribution": distribution,
        "module": module,
        "base": kind.capitalize(),
        # The kind stands behind it, so that no name makes it one of the names the module imports.
        "cls": "".join(word.capitalize() for word in name.split("_")) + kind.capitalize(),
        "flag": _FLAGS[kind],
    }
    return {path: Template(dedent(text)).substitute(fields) for path, text in templates.items()}
