"""Suites: tasks x methods x seeds as data. A cell, one task by one method with one seed, is one flat recipe.

Keys of a cell are, later ones winning: what its protocol stands for, the suite's ``defaults``, its task's, its method's,
the ``overrides`` whose globs match, and the flags of the command line.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Ge, Len
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from ..registry.errors import RecipeError, did_you_mean
from ..registry.selection import read_yaml
from .axis import Axis
from .joint import task_names
from .protocols import Protocol, read_protocol
from .results import file_name

SHIPPED = Path(__file__).parent / "suites"
_NAME = re.compile(r"[A-Za-z0-9_.+]+(?:-[A-Za-z0-9_.+]+)*")
_DATA, _CACHE = "{data_dir}", "{cache_dir}"
Keys = dict[str, Any]


class Override(BaseModel):
    """Keys for the cells whose task and method match two globs; or, with ``skip``, no such cells."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: str = "*"
    methods: str = "*"
    keys: Keys = {}
    skip: bool = False

    def matches(self, task: str, method: str) -> bool:
        """Whether it is about this task by this method."""
        return fnmatch.fnmatchcase(task, self.tasks) and fnmatch.fnmatchcase(method, self.methods)


def _seeds(value: Any) -> Any:
    return list(range(value)) if isinstance(value, int) and not isinstance(value, bool) else value


class Suite(BaseModel):
    """What a suite file says.

    Attributes:
        name: name of its folder of results.
        description: what it is for, and which paper's table it follows.
        defaults: recipe keys of every cell.
        tasks: by name, the recipe keys of each; a text may hold ``{data_dir}``.
        methods: by name, the recipe keys of each: strategy, regularizers, learning_rate, ...; a text may hold ``{cache_dir}``, a
            folder that all cells of the results share.
        seeds: of the cells; a number n means 0 ... n-1.
        protocol: pieces of :mod:`.protocols`; a task's or method's key ``protocol`` replaces them.
        overrides: keys for some cells.
        command: what runs a cell: ``train``, or ``federate`` in rounds.
        threads: of torch, in every cell; another number may change the last bits of a result.
        reference: what a paper printed, for the report: ``title``, ``columns``, ``rows`` by method, and the columns of which
            less is better, ``lower_is_better``; never mixed with what was run.
        axis: the one quantity that its methods differ in: the report draws spread and mean against it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    description: str = ""
    defaults: Keys = {}
    tasks: Annotated[dict[str, Keys], Len(1)]
    methods: Annotated[dict[str, Keys], Len(1)]
    seeds: Annotated[list[Annotated[int, Ge(0)]], Len(1), BeforeValidator(_seeds)] = [0]
    protocol: list[str] = []
    overrides: list[Override] = []
    command: Literal["train", "federate"] = "train"
    threads: Annotated[int, Ge(1)] = 1
    reference: dict[str, Any] = {}
    axis: Axis | None = None

    def cells(self, flags: Mapping[str, Any], data_dir: str | None = None) -> list[Cell]:
        """Return every cell, task by task, then seed by seed, so that methods can be compared early.

        Raises:
            RecipeError: a protocol that is none, or is not one of the suite's command; methods that make no axis.
        """
        cells = [
            self._cell(task, method, seed, flags, data_dir)
            for task in self.tasks
            for seed in self.seeds
            for method in self.methods
            if not any(item.skip and item.matches(task, method) for item in self.overrides)
        ]
        if self.axis is not None and cells:
            self._check_axis(self.axis, cells)
        return cells

    def _check_axis(self, axis: Axis, cells: Sequence[Cell]) -> None:
        """Refuse an axis that no method is on, a place on it taken twice, and no logarithm."""
        owner, taken = f"axis of suite {self.name}", dict[tuple[str, str, float], str]()
        for cell in cells:
            x = axis.value(cell.recipe)
            if x is None:
                continue
            if axis.scale == "log" and x <= 0:
                remedy = "scale: linear draws it"
                raise RecipeError(f"method {cell.method!r} is at {x:g}, no logarithm", owner=owner, remedy=remedy)
            first = taken.setdefault((cell.task, axis.line(cell.recipe), x), cell.method)
            if first != cell.method:
                asked = f"methods {first!r} and {cell.method!r} both have {axis.field} at {x:g}"
                raise RecipeError(asked, owner=owner, remedy="give each another value")
        if not taken:
            raise RecipeError(f"no method says {axis.field}", owner=owner, remedy="write it in each method's keys")

    def _cell(self, task: str, method: str, seed: int, flags: Mapping[str, Any], data_dir: str | None) -> Cell:
        given: Keys = {**self.defaults, **self.tasks[task], **self.methods[method]}
        for override in self.overrides:
            if override.matches(task, method):
                given |= override.keys
        pieces = given.pop("protocol", self.protocol)
        pieces = [pieces] if isinstance(pieces, str) else list(pieces)
        protocol = read_protocol(pieces)
        if protocol.learning_rates and self.command == "federate":
            remedy = "a method for each learning_rate compares them"
            raise RecipeError("learning_rate_search is of command: train", owner=f"suite {self.name}", remedy=remedy)
        recipe = {"split_seed": 0, **protocol.keys, **given, **flags, "seed": seed}
        return Cell(self.name, task, method, seed, recipe, tuple(pieces), self.threads, self.command, data_dir)


@dataclass(frozen=True)
class Cell:
    """One task by one method with one seed.

    Attributes:
        suite, task, method, seed: which one.
        recipe: the keys of its run, ``{data_dir}`` and ``{cache_dir}`` as written.
        pieces: its protocol.
        threads: of torch.
        command: ``train`` or ``federate``.
        data_dir: what ``{data_dir}`` stands for.
        cache_dir: what ``{cache_dir}`` stands for: itself, until the cell runs.
    """

    suite: str
    task: str
    method: str
    seed: int
    recipe: Mapping[str, Any]
    pieces: Sequence[str]
    threads: int = 1
    command: str = "train"
    data_dir: str | None = None
    cache_dir: str = _CACHE

    @property
    def name(self) -> str:
        """``<task>--<method>--seed<k>``."""
        return file_name(self.task, self.method, self.seed).removesuffix(".json")

    @cached_property
    def protocol(self) -> Protocol:
        """What its pieces stand for."""
        return read_protocol(self.pieces)

    @property
    def keys(self) -> Keys:
        """The keys of its run, with the folders in their places.

        Raises:
            RecipeError: no folder was given for ``{data_dir}``.
        """
        return {key: self._placed(value) for key, value in self.recipe.items()}

    def _placed(self, value: Any) -> Any:
        if isinstance(value, str):
            if _DATA in value and self.data_dir is None:
                raise RecipeError(f"the suite's data are in {value}", remedy="say where that is: --data_dir FOLDER")
            return value.replace(_DATA, self.data_dir or "").replace(_CACHE, self.cache_dir)
        if isinstance(value, list):
            return [self._placed(item) for item in value]
        if isinstance(value, Mapping):
            return {key: self._placed(item) for key, item in value.items()}
        return value


def shipped_suites() -> list[str]:
    """Return the names of the suites tunery brings."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def read_suite(name: str) -> Suite:
    """Read a suite by name, or from a file.

    Raises:
        RecipeError: no such suite, or a file that is none.
    """
    from ..core.federated.arguments import FederatedArguments
    from ..core.options import check_keys
    from .comparison import AVERAGE

    path = SHIPPED / f"{name}.yaml"
    if not path.is_file():
        path = Path(name)
        if not path.is_file():
            known = shipped_suites()
            remedy = did_you_mean(name, known) or "or give a YAML file"
            if name.startswith("overtraining"):
                remedy = "the overtraining paper's figures are recipes of tunery sensitivity, such as olmo_1b"
            raise RecipeError(f"no suite {name!r}", known=known, remedy=remedy)
    try:
        suite = Suite.model_validate(read_yaml(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise RecipeError(
            f"suite {path.name}: {place or 'the file'}: {first['msg']}", known=Suite.model_fields
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise RecipeError(f"cannot read suite {path}: {error}") from None
    for kind, names in (("task", suite.tasks), ("method", suite.methods), ("suite", [suite.name])):
        for given in names:
            if not _NAME.fullmatch(given):
                remedy = "letters, digits, _ . + and single hyphens make a name"
                raise RecipeError(f"{kind} {given!r} is no name", owner=str(path), remedy=remedy)
    for given in (*suite.tasks, *itertools.chain(*map(task_names, suite.tasks.values()))):
        if given == AVERAGE:
            raise RecipeError(f"task {given!r} is what the report calls the mean over tasks", owner=str(path))
    parts = [suite.defaults, *suite.tasks.values(), *suite.methods.values(), *(item.keys for item in suite.overrides)]
    owner, more = f"suite {path.name}", (FederatedArguments,) if suite.command == "federate" else ()
    for pieces in (part["protocol"] for part in parts if "protocol" in part):
        if not isinstance(pieces, (str, list)):
            raise RecipeError(f"protocol {pieces!r} is no list of pieces", owner=owner)
    check_keys((key for part in parts for key in part if key != "protocol"), owner, more)
    if suite.axis is not None and suite.axis.key is not None:
        check_keys([suite.axis.key], f"axis of {owner}", more)
    return suite
