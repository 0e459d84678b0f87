"""What the suites of all three kinds share: which models and stages a law is checked on, and the laws of every plugin."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar

import annotated_types
import pytest

from ..catalog import Entry
from ..contracts import Plugin
from ..errors import CompatibilityError, ConfigError
from ..loading import load_plugins
from ..selection import Selection, configure, parse_selection
from .models import MODELS
from .trials import ONE, Trial
from .workers import STAGES

_NO_VALUE: Any = object()


class PluginLaws:
    """Laws of every plugin. Subclass the suite of its kind; what is in ``Test...`` classes below it, pytest runs.

    Attributes:
        plugin: the plugin as a user selects it: ``"mine"`` or ``"mine:key=value"``.
        models: tiny models to check it on, keys of ``tunery.registry.conformance.models.MODELS``; those of a task kind the
            plugin does not take are checked to be refused.
        stages: where two processes check it; a ZeRO stage the plugin does not take is checked to be refused.
        wide_stages: those of them where every model is tried; the others see the first model only.
    """

    kind: ClassVar[str]
    plugin: ClassVar[str]
    models: ClassVar[tuple[str, ...]] = ("bert_classifier", "llama_causal_lm")
    stages: ClassVar[tuple[str, ...]] = STAGES
    wide_stages: ClassVar[tuple[str, ...]] = ("ddp", "zero3")

    @classmethod
    def selection(cls) -> Selection:
        """Return what ``plugin`` selects."""
        return parse_selection(cls.plugin, cls.kind)

    @classmethod
    def entry(cls) -> Entry:
        """Return the registered plugin."""
        return load_plugins().catalog.find(cls.kind, cls.selection().name)

    @classmethod
    def takes(cls, model: str) -> bool:
        """Whether the plugin supports the task of a tiny model."""
        tasks = cls.entry().cls.supports.tasks
        return tasks is None or MODELS[model].kind in tasks

    @classmethod
    def runs_on(cls, stage: str) -> bool:
        """Whether the plugin supports a stage."""
        return zero_stage(stage) in cls.entry().cls.supports.zero_stages

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a law that asks for ``model``, ``stage`` or both on every one the plugin supports."""
        supported = {
            "model": [model for model in self.models if self.takes(model)],
            "stage": [stage for stage in self.stages if self.runs_on(stage)],
        }
        asked = {name: values for name, values in supported.items() if name in metafunc.fixturenames}
        for name, values in asked.items():
            if not values:
                raise ValueError(f"{type(self).__name__}: {self.plugin!r} supports none of its {name}s")
        if len(asked) < 2:
            for name, values in asked.items():
                metafunc.parametrize(name, values)
        else:
            first = supported["model"][0]
            pairs = itertools.product(*supported.values())
            metafunc.parametrize("model, stage", [(m, s) for m, s in pairs if m == first or s in self.wide_stages])

    @classmethod
    def first_model(cls) -> str:
        """Return the first model the plugin supports."""
        return next(model for model in cls.models if cls.takes(model))

    @classmethod
    def trial(cls, model: str, **changes: Any) -> Trial:
        """Return a short training run with the plugin selected."""
        raise NotImplementedError

    @classmethod
    def selecting(cls, **options: Any) -> dict[str, Any]:
        """Return what changes a trial to select the plugin with further options."""
        selection = cls.selection()
        text = str(Selection(selection.name, {**selection.options, **options}))
        return {"strategy": text} if cls.kind == "strategy" else {f"{cls.kind}s": (text,)}

    # ---- the laws

    def test_refuses_what_it_does_not_support(self) -> None:
        """A task kind, ZeRO stage or activation checkpointing it does not support stops a run before it begins."""
        for model in set(self.models):
            if not self.takes(model):
                _assert_refused(self.trial(model), ONE)
        for stage in self.stages:
            if not self.runs_on(stage):
                _assert_refused(self.trial(self.first_model()), stage)
        if not self.entry().cls.supports.activation_checkpointing:
            _assert_refused(self.trial(self.first_model(), options={"activation_checkpointing": True}), ONE)

    def test_refuses_an_unknown_option(self, tmp_path: Path) -> None:
        """A key the plugin does not know stops a run before it begins, with one line that names plugin and key."""
        trial = self.trial(self.first_model(), **self.selecting(no_such_option=1))
        with pytest.raises(ConfigError) as caught:
            trial.trainer(tmp_path / "run")
        self._assert_says(caught.value, "no_such_option")
        assert not (tmp_path / "run").exists()

    def test_refuses_a_wrong_type(self) -> None:
        """A value of the wrong type is a one-line error that names plugin and field."""
        for name, hint in self._hints().items():
            value = _wrong_type(hint)
            if value is not _NO_VALUE:
                self._assert_config_error(name, value)

    def test_refuses_a_value_out_of_range(self) -> None:
        """A value outside the bounds a field declares is a one-line error that names plugin and field."""
        for name, hint in self._hints().items():
            for value in _out_of_range(hint):
                self._assert_config_error(name, value)

    def test_documents_every_option(self) -> None:
        """The docstrings of the config name every field."""
        config = self.entry().cls.Config
        documented = "\n".join(cls.__doc__ or "" for cls in config.__mro__)
        assert [name for name in self._hints() if f"{name}:" not in documented and f"{name}," not in documented] == []

    def test_same_seed_gives_the_same_bits(self, model: str) -> None:
        """The same seed twice ends with bit-identical weights, dropout on."""
        trial = self.trial(model, dropout=True)
        assert trial.run().bits == trial.but(again=1).run().bits

    # ---- helpers

    def _hints(self) -> dict[str, Any]:
        config = self.entry().cls.Config
        hints = typing.get_type_hints(config, include_extras=True)
        closed = [item.name for item in dataclasses.fields(config) if item.init and not item.metadata.get("open")]
        return {name: hints[name] for name in closed}

    def _assert_config_error(self, key: str, value: object) -> None:
        entry, selection = self.entry(), self.selection()
        with pytest.raises(ConfigError) as caught:
            configure(entry.cls, Selection(selection.name, {**selection.options, key: value}), owner=str(entry.origin))
        self._assert_says(caught.value, key)

    def _assert_says(self, error: ConfigError, key: str) -> None:
        message = str(error)
        assert "\n" not in message
        assert repr(self.selection().name) in message
        assert key in message


def zero_stage(stage: str) -> int:
    """Return the ZeRO stage of ``"zero3"``, 0 for anything else."""
    return int(stage.removeprefix("zero")) if stage.startswith("zero") else 0


def refused(plugin: type[Plugin], error: CompatibilityError) -> bool:
    """Whether a plugin said in one line that a combination cannot work."""
    message = str(error)
    return "\n" not in message and repr(plugin.name) in message


def _assert_refused(trial: Trial, where: str) -> None:
    with pytest.raises(CompatibilityError) as caught:
        trial.run(where)
    assert "\n" not in str(caught.value)


def _wrong_type(hint: Any) -> Any:
    """Return a value that a field of this type cannot take, ``_NO_VALUE`` where it can take anything."""
    plain = _plain(hint)
    if plain in (Any, object):
        return _NO_VALUE
    members = typing.get_args(plain) if _is_union(plain) else (plain,)
    mappings = any(
        isinstance(kind := typing.get_origin(_plain(m)) or _plain(m), type) and issubclass(kind, Mapping)
        for m in members
    )
    return [["not", "this"]] if mappings else {"not": ["this"]}


def _out_of_range(hint: Any) -> Iterator[Any]:
    """Yield a value beyond each bound that ``annotated_types`` declares anywhere in a type."""
    if typing.get_origin(hint) is typing.Annotated:
        inner, *extras = typing.get_args(hint)
        for extra in extras:
            for bound in _bounds(extra):
                yield from _beyond(bound)
        yield from _out_of_range(inner)
    elif _is_union(hint):
        for member in typing.get_args(hint):
            yield from _out_of_range(member)
    elif typing.get_origin(hint) in (list, tuple):
        yield from ([value] for value in _out_of_range(typing.get_args(hint)[0]))


def _bounds(extra: Any) -> list[Any]:
    if isinstance(extra, annotated_types.GroupedMetadata):
        return list(extra)
    return [*getattr(extra, "metadata", ()), extra]  # pydantic's Field(gt=0) holds a list of them


def _beyond(bound: Any) -> Iterator[Any]:
    match bound:
        case annotated_types.Ge(ge=limit):
            yield limit - 1  # type: ignore[operator]  # limits of configs are numbers
        case annotated_types.Gt(gt=limit):
            yield limit
        case annotated_types.Le(le=limit):
            yield limit + 1  # type: ignore[operator]
        case annotated_types.Lt(lt=limit):
            yield limit
        case annotated_types.MinLen(min_length=length) if length > 0:
            yield []


def _plain(hint: Any) -> Any:
    return _plain(typing.get_args(hint)[0]) if typing.get_origin(hint) is typing.Annotated else hint


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, UnionType)
