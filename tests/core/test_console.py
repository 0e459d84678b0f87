"""What the command line prints: text as it is, whatever brackets it holds, and types that can be read."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tunery.core.console import list_plugins, show_measurements, show_plugin, show_result
from tunery.registry.catalog import Broken, Catalog, Origin
from tunery.registry.loading import load_plugins

RESULT: dict[str, Any] = {
    "task": "kind[/b]",
    "main_metrics": ["accuracy"],
    "metrics": {"accuracy": 0.5},
    "examples": {"validation": 4},
    "plugins": [{"kind": "strategy", "name": "lora"}],
    "parameters": {"trainable": 7},
    "seconds": 1.0,
    "baselines": {
        "lora:target_modules=[query,key]": {"metrics": {"accuracy": 0.25}, "parameters": {"trainable": 3}},
    },
}


def test_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]):
    """Rich would take them for styles, drop them, or end a finished run in a traceback."""
    show_result(RESULT, Path("try[/a]"))
    show_measurements([{"model": "[bold]x[/]", "name": ":key:"}])
    out = capsys.readouterr().out
    for text in ("kind[/b]", "lora:target_modules=[query,key]", "try[/a]/ holds", "[bold]x[/]", ":key:"):
        assert text in out


def test_a_broken_plugin_may_hold_brackets(capsys: pytest.CaptureFixture[str]):
    """The error of somebody's plugin does not end the list."""
    catalog = Catalog()
    catalog.broken.append(
        Broken(
            name="chat",
            origin=Origin(distribution="chat-dist", version="1", module="chat"),
            error="ValueError: [/INST]",
        )
    )
    list_plugins(catalog, as_json=False)
    assert "ValueError: [/INST]" in capsys.readouterr().out


def test_types_of_options_can_be_read(capsys: pytest.CaptureFixture[str]):
    """Every option of every plugin is shown with its type alone: an expression, of which no limits are left."""
    catalog = load_plugins().catalog
    seen = set()
    for name in sorted({entry.name for entry in catalog}):
        show_plugin(catalog, name, as_json=True)
        shown = json.loads(capsys.readouterr().out)
        for option in (option for row in (shown if isinstance(shown, list) else [shown]) for option in row["options"]):
            tree = ast.parse(option["type"], mode="eval")
            assert not [node for node in ast.walk(tree) if isinstance(node, ast.Call)], option
            assert "Annotated" not in option["type"], option
            seen.add(option["type"])
    assert {"float", "float | None", "tuple[float, ...]", "Literal['all', 'last'] | tuple[int, ...]"} <= seen
