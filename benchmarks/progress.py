"""Progress of a suite: a bar with the time left on a terminal, one line a cell elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ..core.console import plain_console

if TYPE_CHECKING:
    from .runner import Outcome


@contextmanager
def progress(waiting: int, total: int) -> Iterator[Callable[[Outcome, str], None]]:
    """Yield what is told of every cell that ends.

    Args:
        waiting: cells to run.
        total: cells of the suite, done ones included.
    """
    console = plain_console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=console, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("cells", total=total, completed=total - waiting, left="")
        started = time.monotonic()

        def tell(outcome: Outcome, line: str) -> None:
            ended = len(outcome.done) + len(outcome.failed)
            seconds = (time.monotonic() - started) / ended * (waiting - ended)
            left = f"about {_span(seconds)} left" if ended < waiting else "all through"
            bar.update(task, completed=total - waiting + ended, left=left)
            bar.console.print(f"[{total - waiting + ended}/{total}] {line}; {left}", soft_wrap=True)

        yield tell


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
