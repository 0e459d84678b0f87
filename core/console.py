"""What the command line prints: tables on a terminal, plain lines elsewhere, JSON where asked."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ..registry.contracts import KINDS
from ..registry.errors import UnknownPluginError, did_you_mean

if TYPE_CHECKING:
    from ..registry.catalog import Catalog, Entry


def calm() -> None:
    """Keep other libraries' progress bars and routine notices out of a command's output; their errors stay."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=FutureWarning)
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # unset, DeepSpeed warns that it found nothing better
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def plain_console() -> Console:
    """Return the console for a command's output: text as it is, since names and folders may hold what rich takes for markup."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, emoji=False)


def show_result(result: Mapping[str, Any], output_dir: Path) -> None:
    """Print the result of a run beside its baselines."""
    main = result["main_metrics"]
    metrics = [name for key in main for name in (key, f"test_{key}") if name in result["metrics"]] or main
    table = Table(
        title=f"{result['task']}, {result['examples'].get('validation', 0)} validation examples", title_justify="left"
    )
    for column in ("method", *(metric.replace("_", " ") for metric in metrics), "trainable parameters", "seconds"):
        table.add_column(column, justify="left" if column == "method" else "right")
    name = ", ".join(plugin["name"] for plugin in result["plugins"] if plugin["kind"] != "probe") or "as given"
    rows = [*result.get("baselines", {}).items(), (name, result)]
    if "plugged_in" in result:
        rows.append((f"{name}, plugged in", {"metrics": result["plugged_in"], "parameters": result["parameters"]}))
    for method, row in rows:
        values = [row["metrics"].get(metric) for metric in metrics]
        table.add_row(
            method,
            *("-" if value is None else f"{value:.4f}" for value in values),
            f"{row['parameters']['trainable']:,}",
            f"{row['seconds']:.0f}" if "seconds" in row else "-",
        )
    console = plain_console()
    console.print(table)
    for stage in result.get("stages", ()):
        done = f"{stage['steps']} steps, mean loss {stage['train_loss']:.4f}, {stage['seconds']:.0f} seconds"
        console.print(f"stage {stage['name']!r} before it: {done}", soft_wrap=True)
    console.print(f"{output_dir}/ holds the weights, result.json and training_curve.png", soft_wrap=True)


def show_measurements(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print measurements, one a row."""
    columns = list(dict.fromkeys(key for row in rows for key in row if row[key] != ""))
    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        values = (row.get(column, "") for column in columns)
        table.add_row(*(f"{value:.6g}" if isinstance(value, float) else str(value) for value in values))
    plain_console().print(table)


def show_mapping(facts: Mapping[str, Any]) -> None:
    """Print names and values, one pair a line."""
    width = max(len(key) for key in facts)
    for key, value in facts.items():
        print(f"{key:<{width}}  {value}")


def list_plugins(catalog: Catalog, as_json: bool) -> None:
    """Print every plugin and every entry point that failed to load."""
    rows = [_row(entry) for entry in catalog]
    for broken in catalog.broken:
        origin = broken.origin
        rows.append(
            {
                "kind": "broken",
                "name": broken.name,
                "distribution": origin.distribution,
                "version": origin.version,
                "file": origin.file or origin.module,
                "summary": broken.error,
            }
        )
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table()
    for column in ("kind", "name", "distribution", "version", "summary", "file"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(row[str(column.header)]) for column in table.columns))
    plain_console().print(table)
    if catalog.disabled:
        print(f"left out by TUNERY_DISABLE_PLUGINS: {', '.join(catalog.disabled)}")


def show_plugin(catalog: Catalog, name: str, as_json: bool) -> None:
    """Print one plugin with its options.

    Raises:
        UnknownPluginError: no plugin of any kind has that name.
    """
    found = [entry for entry in catalog if entry.name == name]
    if not found:
        known = sorted({entry.name for entry in catalog})
        if any(broken.name == name for broken in catalog.broken):
            catalog.find(next(iter(KINDS)), name)  # says why it is broken
        raise UnknownPluginError(f"no plugin is called {name!r}", known=known, remedy=did_you_mean(name, known))
    rows = [{**_row(entry), "reference": entry.cls.reference, **_details(entry)} for entry in found]
    if as_json:
        print(json.dumps(rows if len(rows) > 1 else rows[0], indent=2))
        return
    for row in rows:
        options = row.pop("options")
        show_mapping(row)
        table = Table(title="options", title_justify="left")
        for column in ("name", "type", "default", "meaning"):
            table.add_column(column, overflow="fold")
        for option in options:
            table.add_row(*(str(option[str(column.header)]) for column in table.columns))
        plain_console().print(table if options else "no options")


def _row(entry: Entry) -> dict[str, str]:
    return {
        "kind": entry.kind,
        "name": entry.name,
        "distribution": entry.origin.distribution,
        "version": entry.origin.version,
        "file": entry.origin.file,
        "summary": entry.cls.summary,
    }


def _details(entry: Entry) -> dict[str, Any]:
    supports = entry.cls.supports
    return {
        "tasks": "all" if supports.tasks is None else ", ".join(sorted(kind.value for kind in supports.tasks)),
        "zero_stages": ", ".join(map(str, sorted(supports.zero_stages))),
        "activation_checkpointing": "yes" if supports.activation_checkpointing else "no",
        "excludes": ", ".join(sorted(supports.excludes)) or "nothing",
        "options": [
            {
                "name": item.name if not item.metadata.get("open") else "any other",
                "type": _type_name(item.type),
                "default": _default(item),
                "meaning": _meaning(entry.cls.Config, item.name),
            }
            for item in dataclasses.fields(entry.cls.Config)
        ],
    }


class _Bare(ast.NodeTransformer):
    """Leaves of ``Annotated[type, limits]`` the type."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:  # the name that ast calls
        self.generic_visit(node)
        annotated = ast.unparse(node.value) in ("Annotated", "typing.Annotated")
        return node.slice.elts[0] if annotated and isinstance(node.slice, ast.Tuple) else node


def _type_name(annotation: Any) -> str:
    """Return an annotation as written, which the config modules keep as text, without the limits of its values."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    try:
        return ast.unparse(_Bare().visit(ast.parse(text, mode="eval"))).replace("typing.", "")
    except SyntaxError:
        return text


def _default(item: dataclasses.Field[Any]) -> str:
    if item.default is not dataclasses.MISSING:
        return json.dumps(item.default, default=str)
    return (
        "required" if item.default_factory is dataclasses.MISSING else json.dumps(item.default_factory(), default=str)
    )


def _meaning(config: type, name: str) -> str:
    """Return what a Config's docstring says of one field, in the class itself or the one it extends."""
    for cls in config.__mro__:
        lines = (cls.__doc__ or "").splitlines()
        for number, line in enumerate(lines):
            head, colon, text = line.strip().partition(":")
            if colon and name in [part.strip() for part in head.split(",")]:
                indent = len(line) - len(line.lstrip())
                more = []
                for following in lines[number + 1 :]:
                    if not following.strip() or len(following) - len(following.lstrip()) <= indent:
                        break
                    more.append(following.strip())
                return " ".join([text.strip(), *more])
    return ""
