"""``python_docs``: real English text that every Python carries, for runs without a network.

Every row is one docstring of more than 40 characters from the source files of this Python's standard library (parsed,
never imported), on one line, without its doctest examples. Columns:

=================  ==========  =====================================================================================
``text``           string      the docstring
``label``          12 classes  the top-level package it comes from
``kind``           4 classes   what it documents: module, class, function or method
``returns``        2 classes   "value" for a function or method whose code returns or yields one, else "nothing"
``log_num_lines``  float       log10 of the source lines the object spans, docstring not counted
``module``         string      dotted name of the module
``name``           string      dotted name of the object inside it; empty for the module itself
=================  ==========  =====================================================================================

Train and validation share no module. They share no passage either: validation rows with a run of eight words that
occurs in train, exact duplicates among them, are left out. The packages exist in Python 3.11, 3.12 and 3.13, also in
Debian's, which packs tkinter and others separately. A docstring may well name its package, as docstrings do; another
Python version has slightly different rows.
"""

from __future__ import annotations

import ast
import math
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...registry.errors import DataError

if TYPE_CHECKING:
    from datasets import DatasetDict

# Each package, with the modules (or sub-packages) whose docstrings are held out for validation: about a fifth of its rows.
# Named one by one so that the split is the same in every Python, and so that modules that document one thing twice
# (asyncio's events and base_events) stay on one side.
HELD_OUT: dict[str, tuple[str, ...]] = {
    "asyncio": ("protocols", "queues", "runners", "streams", "subprocess", "taskgroups", "threads", "timeouts"),
    "concurrent": ("futures.process", "futures.thread"),
    "email": ("charset", "encoders", "feedparser", "generator", "headerregistry", "parser", "utils"),
    "http": ("server",),
    "importlib": ("readers", "resources", "simple"),
    "logging": ("config",),
    "multiprocessing": ("heap", "process", "shared_memory", "sharedctypes"),
    "unittest": ("loader", "result", "runner", "suite"),
    "urllib": ("error", "response", "robotparser"),
    "wsgiref": ("headers",),
    "xml": ("dom.minidom", "dom.pulldom", "dom.xmlbuilder", "sax._exceptions", "sax.saxutils"),
    "xmlrpc": ("client",),
}
KINDS = ("module", "class", "function", "method")
MIN_CHARACTERS = 40
RUN_OF_WORDS = 8

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Row:
    """One docstring and what can be learnt from it; the module's docstring describes the fields."""

    text: str
    label: str
    kind: str
    returns: str
    log_num_lines: float
    module: str
    name: str


def load(root: Path | None = None) -> DatasetDict:
    """Build the dataset from the standard library's sources.

    Args:
        root: the folder with the standard library; by default this Python's.

    Returns:
        Splits ``train`` (about 1,500 rows) and ``validation`` (about 350), in the order of modules and lines.

    Raises:
        DataError: the standard library comes without its source files.
    """
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

    root = root or Path(sysconfig.get_path("stdlib"))
    missing = [package for package in HELD_OUT if not (root / package / "__init__.py").is_file()]
    if missing:
        raise DataError(
            f"python_docs needs the standard library's source files and finds none of: {', '.join(missing)}",
            owner=str(root),
            remedy="use a Python that is installed with its sources",
        )
    train, validation = _split(row for package in HELD_OUT for row in _rows_of(root, package))
    features = Features(
        {
            "text": Value("string"),
            "label": ClassLabel(names=list(HELD_OUT)),
            "kind": ClassLabel(names=list(KINDS)),
            "returns": ClassLabel(names=["nothing", "value"]),
            "log_num_lines": Value("float32"),
            "module": Value("string"),
            "name": Value("string"),
        }
    )
    splits = {"train": train, "validation": validation}
    return DatasetDict(
        {name: Dataset.from_list([asdict(row) for row in rows], features=features) for name, rows in splits.items()}
    )


def _split(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    train: dict[tuple[str, ...], Row] = {}
    held: dict[tuple[str, ...], Row] = {}
    for row in rows:
        (held if _is_held_out(row) else train).setdefault(_words(row.text), row)
    learnt = {run for words in train for run in _runs(words)}
    return list(train.values()), [row for words, row in held.items() if learnt.isdisjoint(_runs(words))]


def _is_held_out(row: Row) -> bool:
    inside = row.module.removeprefix(f"{row.label}.")
    return any(inside == held or inside.startswith(f"{held}.") for held in HELD_OUT[row.label])


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text.lower()))


def _runs(words: tuple[str, ...]) -> set[tuple[str, ...]]:
    """Every run of eight words; a shorter text is one run by itself."""
    return {words[start : start + RUN_OF_WORDS] for start in range(max(1, len(words) - RUN_OF_WORDS + 1))}


def _rows_of(root: Path, package: str) -> Iterator[Row]:
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if {"test", "tests"} & set(parts):
            continue
        module = ".".join(parts).removesuffix(".__init__")
        with warnings.catch_warnings():
            # A doubtful escape sequence in somebody's standard library is none of the user's business.
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
        for node, kind, name in [(tree, "module", ""), *_definitions(tree)]:
            text = _prose(ast.get_docstring(node) or "")
            if len(text) <= MIN_CHARACTERS:
                continue
            yield Row(
                text=text,
                label=package,
                kind=kind,
                returns="value" if kind in ("function", "method") and _returns_value(node.body) else "nothing",
                log_num_lines=math.log10(max(1, _num_lines(node))),
                module=module,
                name=name,
            )


def _definitions(parent: ast.AST, prefix: str = "", in_class: bool = False) -> Iterator[tuple[Documented, str, str]]:
    """Yield every class and function below ``parent``, with its kind and dotted name, in source order."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ClassDef):
            yield node, "class", prefix + node.name
            yield from _definitions(node, f"{prefix}{node.name}.", in_class=True)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, "method" if in_class else "function", prefix + node.name
            yield from _definitions(node, f"{prefix}{node.name}.")
        elif not isinstance(node, ast.expr):
            yield from _definitions(node, prefix, in_class)


def _returns_value(nodes: Iterable[ast.AST]) -> bool:
    """Whether the code returns or yields something other than ``None``; what nested definitions return does not count."""
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Return) and node.value and ast.unparse(node.value) != "None":
            return True
        if isinstance(node, ast.Yield | ast.YieldFrom) or _returns_value(ast.iter_child_nodes(node)):
            return True
    return False


def _num_lines(node: Documented) -> int:
    """Source lines of signature and body, without the docstring."""
    docstring, last = node.body[0], node.body[-1]
    first_line = 1 if isinstance(node, ast.Module) else node.lineno
    return _end(last) - first_line + 1 - (_end(docstring) - docstring.lineno + 1)


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _prose(docstring: str) -> str:
    """Put a docstring on one line, without its doctest examples and what they print."""
    kept = []
    in_example = False
    for line in docstring.splitlines():
        in_example = line.lstrip().startswith(">>>") or (in_example and bool(line.strip()))
        if not in_example:
            kept.append(line)
    return " ".join(" ".join(kept).split())
