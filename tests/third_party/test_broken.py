"""Strangers that are broken or claim one name: told whose they are, harmless to runs that do not name them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Site

GOOD = """
from tunery import Strategy, hookimpl

class Mine(Strategy):
    name = "{name}"
    summary = "trains nothing"
    reference = "none"

    def prepare(self, model, run):
        return model

@hookimpl
def tunery_strategies():
    return [Mine]
"""

BROKEN = {
    "raises": ("import json\njson.loads('{')", "JSONDecodeError: Expecting property name"),
    "exits": ("import sys\nsys.exit('leaving')", "SystemExit: leaving"),
    "misses_a_module": ("import module_that_is_not_there", "No module named 'module_that_is_not_there'"),
    "is_no_python": ("def f(:", "SyntaxError: "),
    "misspells": (GOOD.replace("tunery_strategies", "tunery_strategy").format(name="misspells"), "'tunery_strategy'"),
    "asks_for_more": (GOOD.replace("strategies()", "strategies(weather)").format(name="asks_for_more"), "weather"),
    "breaks_its_contract": (
        GOOD.replace("def prepare", "def prepared").format(name="x"),
        "Mine does not define prepare",
    ),
    "offers_an_instance": (GOOD.replace("[Mine]", "[Mine(None)]").format(name="x"), "parentheses"),
    "offers_nothing": ("", "implements no hook"),
}

# What choosing each plugin of argv gives: its distribution, or the error.
CHOOSE = """
import json, sys
from tunery.core.recipe import choose
from tunery.registry.errors import TuneryError
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = choose(name).describe()[0]["distribution"]
    except TuneryError as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""

LIST = """
import dataclasses, json
from tunery.registry.loading import load_plugins
print(json.dumps([dataclasses.asdict(broken) for broken in load_plugins().catalog.broken]))
"""


@pytest.fixture(scope="module")
def crowd(site: Site) -> Site:
    """Every broken distribution at once, a good one, and two that offer ``twin``."""
    for number, (name, (source, _)) in enumerate(BROKEN.items()):
        site.add(f"broken-{number}", f"stranger_{name}", source, name=name, version=f"{number}.5")
    site.add("good-dist", "stranger_good", GOOD.format(name="good"))
    for letter in "ab":
        site.add(f"twin-{letter}", f"stranger_twin_{letter}", GOOD.format(name="twin"), version="3.1")
    return site


@pytest.fixture(scope="module")
def chosen(crowd: Site) -> dict[str, str]:
    """What comes of naming each of them."""
    found: dict[str, str] = json.loads(crowd.script(CHOOSE, "full", "good", "twin", *BROKEN))
    return found


@pytest.fixture(scope="module")
def reported(crowd: Site) -> dict[str, Any]:
    """What the catalog says of each that failed."""
    return {broken["name"]: broken for broken in json.loads(crowd.script(LIST))}


def test_runs_that_do_not_name_them_go_on(chosen: dict[str, str]):
    """Ours and a good stranger's are chosen as ever."""
    assert (chosen["full"], chosen["good"]) == ("tunery", "good-dist")


@pytest.mark.parametrize("name", BROKEN)
def test_reported_with_whose_it_is(name: str, reported: dict[str, Any]):
    """Distribution, version, module, and the last line of the error."""
    number = list(BROKEN).index(name)
    origin = reported[name]["origin"]
    assert (origin["distribution"], origin["version"]) == (f"broken-{number}", f"{number}.5")
    assert origin["module"] == f"stranger_{name}"
    assert BROKEN[name][1] in reported[name]["error"]
    assert len(reported[name]["error"].splitlines()) == 1


@pytest.mark.parametrize("name", BROKEN)
def test_runs_that_name_it_stop_with_one_line(name: str, chosen: dict[str, str]):
    """The line says why, and whose it is."""
    assert chosen[name].startswith(f"BrokenPluginError: strategy '{name}' failed to load: ")
    assert BROKEN[name][1] in chosen[name]
    assert f"in broken-{list(BROKEN).index(name)} " in chosen[name]
    assert len(chosen[name].splitlines()) == 1


def test_two_claim_one_name(chosen: dict[str, str]):
    """The error names both, with versions and the way out."""
    assert chosen["twin"].startswith("DuplicatePluginError: ")
    assert "twin-a 3.1" in chosen["twin"] and "twin-b 3.1" in chosen["twin"]
    assert "TUNERY_DISABLE_PLUGINS" in chosen["twin"]


@pytest.mark.parametrize("disabled", ["twin-a", "stranger_twin_a"])
def test_the_user_settles_it(crowd: Site, disabled: str):
    """Leaving out one distribution, by its name or its entry point's, lets the other in."""
    assert json.loads(crowd.script(CHOOSE, "twin", disabled=disabled)) == {"twin": "twin-b"}


def test_command_line_stops_before_anything_is_written(crowd: Site):
    """``tunery train`` naming a broken plugin: exit code 2, one line, no folder."""
    out = crowd.folder.parent / "run"
    arguments = ["--strategy", "exits", "--model_name_or_path", "nowhere", "--dataset_name", "python_docs"]
    ran = crowd.python("-m", "tunery", "train", *arguments, "--output_dir", str(out), "--use_cpu")
    assert ran.returncode == 2
    assert ran.stderr.splitlines()[-1] == (
        "tunery: strategy 'exits' failed to load: SystemExit: leaving; in broken-1 1.5 (stranger_exits); "
        "mend or reinstall that distribution"
    )
    assert "Traceback" not in ran.stderr
    assert not out.exists()


def test_command_line_lists_them(crowd: Site):
    """``tunery plugins list`` shows the broken beside the whole."""
    ran = crowd.python("-m", "tunery", "plugins", "list", "--json")
    rows = {row["name"]: row for row in json.loads(ran.stdout)}
    assert rows["exits"] | {"file": ""} == {
        "kind": "broken",
        "name": "exits",
        "distribution": "broken-1",
        "version": "1.5",
        "file": "",
        "summary": "SystemExit: leaving",
    }
    assert rows["good"]["kind"] == "strategy"
