"""Entry points become plugins one by one: in one order, each on its own, and nothing wrong with one goes unsaid."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tunery.registry.contracts import Strategy
from tunery.registry.errors import BrokenPluginError
from tunery.registry.hookspecs import hookimpl
from tunery.registry.loading import DISABLE_VARIABLE, Loaded, disabled_names, load_plugins

Point = Callable[..., EntryPoint]


def strategy(name: str) -> type[Strategy]:
    """Return a minimal strategy."""
    body = {"name": name, "summary": "s", "reference": "r", "prepare": lambda self, model, run: model}
    return type(name.title(), (Strategy,), body)


def offering(*names: str) -> dict[str, Any]:
    """Return a hook that offers minimal strategies."""
    return {"tunery_strategies": hookimpl(lambda: [strategy(name) for name in names])}


@pytest.fixture
def point(monkeypatch: pytest.MonkeyPatch) -> Point:
    """Makes an entry point of a distribution, and the module it names."""

    def make(name: str, distribution: str = "a-dist", version: str = "1.0", **functions: Any) -> EntryPoint:
        module = ModuleType(f"stranger_{name}")
        module.__file__ = f"/site/{module.__name__}.py"
        for attribute, function in functions.items():
            function.__name__ = attribute
            setattr(module, attribute, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        entry = EntryPoint(name, module.__name__, "tunery")
        vars(entry)["dist"] = SimpleNamespace(metadata={"Name": distribution, "Version": version})
        return entry

    return make


def reasons(loaded: Loaded) -> dict[str, str]:
    """Return why entry points failed, by name."""
    return {broken.name: broken.error for broken in loaded.catalog.broken}


def test_provenance(point: Point):
    """Distribution, version, module and file come with a plugin."""
    entry = Loaded([point("mine", "b-dist", "2.1", **offering("mine"))]).catalog.find("strategy", "mine")
    assert str(entry.origin) == "b-dist 2.1 (stranger_mine)"
    assert entry.origin.file == "/site/stranger_mine.py"


def test_hooks_run_ours_first_then_by_distribution_and_name(point: Point):
    """The order does not depend on the order of installation."""
    called: list[str] = []

    def observer(name: str) -> dict[str, Any]:
        return {"tunery_run_begin": hookimpl(lambda run: called.append(name))}

    points = [
        point(name, distribution, **observer(name))
        for name, distribution in [("d", "z-dist"), ("c", "a-dist"), ("b", "tunery"), ("a", "z-dist")]
    ]
    for given in (points, points[::-1]):
        called.clear()
        Loaded(given).manager.hook.tunery_run_begin(run=None)
        # pluggy calls what was registered last first.
        assert called == ["d", "a", "c", "b"]


@pytest.mark.parametrize("disabled", ["twin_b", "b-dist"])
def test_disabled_by_name_or_distribution(point: Point, disabled: str):
    """Either settles who offers a name."""
    points = [point("twin_a", "a-dist", **offering("twin")), point("twin_b", "b-dist", **offering("twin"))]
    loaded = Loaded(points, frozenset({disabled}))
    assert loaded.catalog.find("strategy", "twin").origin.distribution == "a-dist"
    assert loaded.catalog.disabled == ["twin_b"]


def test_disabled_is_not_even_imported():
    """What is left out can do no harm."""
    loaded = Loaded([EntryPoint("bad", "module_that_is_not_there", "tunery")], frozenset({"bad"}))
    assert loaded.catalog.broken == []


def test_disable_variable(monkeypatch: pytest.MonkeyPatch):
    """A list with commas, spaces allowed; what is loaded follows its changes."""
    monkeypatch.setenv(DISABLE_VARIABLE, " lora, ,l2_sp ")
    assert disabled_names() == {"lora", "l2_sp"}
    assert "lora" not in load_plugins().catalog.names("strategy")
    monkeypatch.delenv(DISABLE_VARIABLE)
    assert "lora" in load_plugins().catalog.names("strategy")
    assert load_plugins() is load_plugins()


def test_disabled_names_that_nobody_has(point: Point, caplog: pytest.LogCaptureFixture):
    """A misspelt name leaves nothing out, and the log says so; one that fits is no news."""
    Loaded([point("mine", **offering("mine"))], frozenset({"mine"}))
    assert caplog.text == ""
    Loaded([point("mine", **offering("mine"))], frozenset({"mien", "mine"}))
    assert "TUNERY_DISABLE_PLUGINS: no plugin or distribution is called 'mien'; did you mean 'mine'?" in caplog.text


def test_misspelt_hook_is_an_error(point: Point):
    """``tunery_strategy`` would otherwise be silence."""
    loaded = Loaded([point("misspelt", tunery_strategy=offering("misspelt")["tunery_strategies"])])
    assert "tunery_strategy" in reasons(loaded)["misspelt"]


def test_unknown_hook_argument_leaves_nothing_registered(point: Point):
    """The good hooks of a module with a bad one are not called either."""
    called: list[str] = []
    good = hookimpl(lambda run: called.append("good"))
    loaded = Loaded([point("asks_too_much", tunery_run_begin=good, tunery_run_end=hookimpl(lambda run, weather: None))])
    assert "weather" in reasons(loaded)["asks_too_much"]
    loaded.manager.hook.tunery_run_begin(run=None)
    assert called == []


def test_hook_that_raises(point: Point):
    """Offering plugins may fail like importing them."""
    failing = hookimpl(lambda: {}["lost"])
    loaded = Loaded([point("fails", tunery_strategies=failing), point("works", **offering("works"))])
    assert reasons(loaded) == {"fails": "KeyError: 'lost'"}
    assert loaded.catalog.names("strategy") == ["works"]


def test_hook_that_returns_no_list(point: Point):
    """``return Mine`` for ``return [Mine]`` is reported."""
    loaded = Loaded([point("bare", tunery_strategies=hookimpl(lambda: strategy("bare")))])
    assert "not iterable" in reasons(loaded)["bare"]


def test_one_bad_class_takes_its_module_along(point: Point):
    """A module comes in whole or not at all."""
    bad = hookimpl(lambda: [strategy("good"), strategy("Bad-Name")])
    loaded = Loaded([point("half", tunery_strategies=bad)])
    assert "Bad-Name" in reasons(loaded)["half"]
    assert list(loaded.catalog) == []


def test_module_without_hooks(point: Point):
    """An entry point that offers nothing is a mistake."""
    assert "implements no hook" in reasons(Loaded([point("empty", helper=lambda: None)]))["empty"]


def test_two_entry_points_on_one_module(point: Point):
    """The module counts once."""
    first = point("one", **offering("mine"))
    second = EntryPoint("two", first.value, "tunery")
    vars(second)["dist"] = first.dist
    loaded = Loaded([first, second])
    assert loaded.catalog.find("strategy", "mine").name == "mine"
    assert loaded.catalog.broken == []


@pytest.mark.parametrize("value", ["module_that_is_not_there", "not a module!", "", "a..b", "json:"])
def test_entry_point_that_names_no_plugin_module(value: str):
    """Nonsense in a distribution's metadata is that distribution's problem."""
    loaded = Loaded([EntryPoint("nonsense", value, "tunery")])
    assert list(reasons(loaded)) == ["nonsense"]
    with pytest.raises(BrokenPluginError, match="in unknown unknown"):
        loaded.catalog.find("strategy", "nonsense")


def test_distribution_without_metadata(point: Point):
    """A half-removed installation is named as well as can be."""
    entry = point("orphan", **offering("orphan"))
    vars(entry)["dist"] = SimpleNamespace(metadata={})
    assert str(Loaded([entry]).catalog.find("strategy", "orphan").origin) == "unknown unknown (stranger_orphan)"


def test_interrupt_is_not_a_broken_plugin(point: Point):
    """Ctrl-C while plugins load ends the program."""

    def interrupted() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Loaded([point("slow", tunery_strategies=hookimpl(interrupted))])
