"""The catalog: which classes it takes, what it finds, and what it says when it does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tunery.registry.catalog import Broken, Catalog, Origin
from tunery.registry.contracts import Plugin, Probe, Regularizer, Strategy
from tunery.registry.errors import BrokenPluginError, DuplicatePluginError, InvalidPluginError, UnknownPluginError

HERE = Origin(distribution="a-dist", version="1.0", module="a.module", file="/a/module.py")
THERE = Origin(distribution="b-dist", version="2.0", module="b.module")


class Mine(Strategy):
    name = "mine"
    summary = "trains"
    reference = "a paper, eq. 1"

    def prepare(self, model: Any, run: Any) -> Any:
        return model


class Penalty(Regularizer):
    name = "penalty"
    summary = "penalises"
    reference = "a paper, eq. 2"

    def attach(self, model: Any, run: Any) -> None: ...

    def detach(self, model: Any) -> None: ...


class Measure(Probe):
    name = "measure"
    summary = "measures"
    reference = "a paper, eq. 3"

    def measure(self, subject: Any) -> list[Any]:
        return []


def changed(base: type[Plugin], **attributes: Any) -> type[Plugin]:
    """Return a subclass with other class attributes."""
    return type("Changed", (base,), attributes)


@pytest.fixture
def catalog() -> Catalog:
    """One plugin of each kind."""
    catalog = Catalog()
    for cls in (Measure, Penalty, Mine):
        catalog.add(cls, HERE)
    return catalog


def test_lists_strategies_then_regularizers_then_probes(catalog: Catalog):
    """Whatever order they were found in, and by name within a kind."""
    catalog.add(changed(Mine, name="a_first"), HERE)
    assert [entry.name for entry in catalog] == ["a_first", "mine", "penalty", "measure"]
    assert catalog.names("strategy") == ["a_first", "mine"]


def test_finds_with_provenance(catalog: Catalog):
    """A found plugin knows its distribution, version, module and file."""
    entry = catalog.find("regularizer", "penalty")
    assert entry.cls is Penalty
    assert (entry.kind, entry.name, entry.origin) == ("regularizer", "penalty", HERE)
    assert entry.owner == "regularizer 'penalty' of a-dist 1.0 (a.module)"


def test_two_kinds_may_share_a_name(catalog: Catalog):
    """The kind is part of what is asked."""
    catalog.add(changed(Measure, name="mine"), THERE)
    assert catalog.find("strategy", "mine").cls is Mine
    assert catalog.find("probe", "mine").origin is THERE


def test_two_distributions_with_one_name(catalog: Catalog):
    """Neither wins; both are named with their versions, and the way out is told."""
    catalog.add(changed(Mine), THERE)
    with pytest.raises(DuplicatePluginError) as caught:
        catalog.find("strategy", "mine")
    message = str(caught.value)
    assert "a-dist 1.0 (a.module) and by b-dist 2.0 (b.module)" in message
    assert "TUNERY_DISABLE_PLUGINS" in message
    assert catalog.find("probe", "measure").cls is Measure


def test_unknown_name(catalog: Catalog):
    """What there is, the nearest name, and why something may be missing."""
    catalog.disabled.append("left_out")
    catalog.broken.append(Broken(name="torn", origin=THERE, error="ImportError: no"))
    with pytest.raises(UnknownPluginError) as caught:
        catalog.find("strategy", "mien")
    assert str(caught.value) == (
        "no strategy is called 'mien'; known: mine; did you mean 'mine'?; "
        "TUNERY_DISABLE_PLUGINS leaves out left_out; failed to load: torn"
    )


def test_name_of_another_kind(catalog: Catalog):
    """A regularizer asked for as a strategy is recognised."""
    with pytest.raises(UnknownPluginError, match="'penalty' is a regularizer"):
        catalog.find("strategy", "penalty")


def test_broken_name(catalog: Catalog):
    """The reason it failed to load, and whose it is."""
    catalog.broken.append(Broken(name="torn", origin=THERE, error="ImportError: no module named 'x'"))
    with pytest.raises(BrokenPluginError) as caught:
        catalog.find("probe", "torn")
    assert "ImportError: no module named 'x'" in str(caught.value)
    assert "b-dist 2.0 (b.module)" in str(caught.value)


@dataclass
class Thawed:
    strength: float = 1.0


@dataclass(frozen=True)
class Positional:
    strength: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Named:
    name: str = "x"


class Undecorated(Regularizer.Config):
    alpha: float = 1.0


REFUSED = {
    "an instance": (Mine(None), "parentheses"),
    "a function": (len, "is not a subclass of Strategy, Regularizer or Probe"),
    "another class": (dict, "is not a subclass of Strategy, Regularizer or Probe"),
    "a class without its method": (changed(Strategy, name="x", summary="x", reference="x"), "does not define prepare"),
    "no name": (changed(Mine, name=None), "'name'"),
    "an empty summary": (changed(Mine, summary=" "), "'summary'"),
    "a long reference": (changed(Mine, reference="a\nb"), "'reference'"),
    "a bad name": (changed(Mine, name="My-Method"), "'My-Method'"),
    "a kind of its own": (changed(Mine, kind="stratagem"), "'stratagem'"),
    "another kind": (changed(Mine, kind="probe"), "'probe'"),
    "no Support": (changed(Mine, supports=None), "'supports'"),
    "a Config that is no class": (changed(Mine, Config=Positional()), "frozen dataclass"),
    "a plain Config": (changed(Mine, Config=dict), "frozen dataclass"),
    "a Config that can change": (changed(Mine, Config=Thawed), "frozen dataclass"),
    "a Config whose fields do not count": (changed(Penalty, Config=Undecorated), "frozen dataclass"),
    "a positional Config": (changed(Mine, Config=Positional), "keyword-only"),
    "an option called name": (changed(Mine, Config=Named), "'name'"),
    "a regularizer without weight": (changed(Penalty, Config=Mine.Config), "Regularizer.Config"),
}


@pytest.mark.parametrize(("cls", "why"), REFUSED.values(), ids=REFUSED)
def test_refuses_what_breaks_the_contract(cls: Any, why: str):
    """The author is told what is wrong, and the catalog stays as it was."""
    catalog = Catalog()
    with pytest.raises(InvalidPluginError) as caught:
        catalog.add(cls, HERE)
    assert why in str(caught.value)
    assert "in a-dist 1.0 (a.module)" in str(caught.value)
    assert list(catalog) == []
