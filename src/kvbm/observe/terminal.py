"""Tables and progress bars: drawn by rich on a terminal, plain text in a pipe and where rich is not installed.

Text is made printable here and is never read as rich's markup, so that no name from a file or a port can control the
terminal. rich is optional: ``pip install rich``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, TextIO

from kvbm.observe.format import columns, printable

if TYPE_CHECKING:
    from rich.console import Console

LINE_SECONDS = 5.0
Show = Callable[[float, float, Callable[[], str]], None]  # done, total, and the text beside the bar


def open_console(out: TextIO) -> Console | None:
    """None where ``out`` is no terminal or rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=out, markup=False, emoji=False, highlight=False) if out.isatty() else None


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]], right: Collection[int] = ()) -> None:
    """``right``: the columns that are aligned at their right."""
    cells = [[printable(cell) for cell in row] for row in rows]
    console = open_console(sys.stdout)
    if console is None:
        print("\n".join(columns([header, *cells], right)))
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for at, name in enumerate(header):
        table.add_column(name, justify="right" if at in right else "left", overflow="fold")
    for row in cells:
        table.add_row(*row)
    console.print(table)


@contextmanager
def block_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """As :func:`progress`, for (done, all) in blocks."""
    with progress(label) as show:
        yield lambda done, total: show(done, total, lambda: f"{done:,} of {total:,} blocks")


@contextmanager
def progress(label: str) -> Iterator[Show]:
    """A bar on standard error; where that is no terminal, a line every ``LINE_SECONDS``."""
    label, console, due = printable(label), open_console(sys.stderr), 0.0
    if console is None:
        every = LINE_SECONDS

        def show(done: float, total: float, text: str) -> None:
            print(f"{label}  {min(1.0, done / max(total, 1e-9)):4.0%}  {text}", file=sys.stderr, flush=True)
    else:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        every = 0.2
        texts = (TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[text]"))
        bar = Progress(next(texts), BarColumn(), TaskProgressColumn(), *texts, console=console, transient=True)
        task = bar.add_task(label, text="")

        def show(done: float, total: float, text: str) -> None:
            bar.update(task, completed=done, total=total, text=text)

    def report(done: float, total: float, text: Callable[[], str]) -> None:
        nonlocal due
        if (now := time.monotonic()) >= due:
            due = now + every
            show(done, total, text())

    with nullcontext() if console is None else bar:
        yield report
