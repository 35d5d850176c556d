"""What people see: reports as tables, in terminals and notebooks, and a bar for what takes longer than a moment."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

#: Seconds after which a bar appears.
DELAY = 2.0

_WIDTH = 120  # of tables as text

#: One for all bars: rich shows those of the same console, of a study and of a validation in it, below each other.
stderr = Console(stderr=True)


class Shown:
    """What `print`, rich and notebooks show as tables; subclasses have ``__rich_console__``."""

    def __str__(self) -> str:
        file = io.StringIO()
        # Plain text, wherever this is called: rich would look for colours it may use, and display in a notebook.
        Console(file=file, width=_WIDTH, color_system=None, force_terminal=False, force_jupyter=False).print(self)
        return file.getvalue()

    def _repr_html_(self) -> str:
        file = io.StringIO()
        console = Console(file=file, width=_WIDTH, record=True, color_system=None, force_jupyter=False)
        console.print(self)
        code = '<pre style="line-height: normal; overflow-x: auto; white-space: pre">{code}</pre>'
        return console.export_html(inline_styles=True, code_format=code)


def watched() -> bool:
    """Whether somebody looks at a bar: on a terminal, or in a notebook that can draw it. Of several processes, one."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return False
    if stderr.is_jupyter:
        return importlib.util.find_spec("ipywidgets") is not None
    return sys.stderr is not None and sys.stderr.isatty() and stderr.is_interactive


@contextlib.contextmanager
def progress(what: str, steps: int | None = None) -> Iterator[Callable[[], None]]:
    """A bar on stderr if the block takes longer than `DELAY`, and if it is `watched`; it is gone when the block ends.

    Args:
        what: stands before the bar.
        steps: how often what this returns is called; None: that is not known.
    """
    if not watched():
        yield lambda: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    # What the block prints goes where it always goes: stdout may be a file.
    bar = Progress(*columns, console=stderr, transient=True, redirect_stdout=False)
    task = bar.add_task(what, total=steps)
    later = threading.Timer(DELAY, bar.start)
    later.daemon = True
    later.start()
    try:
        yield lambda: bar.advance(task)
    finally:
        later.cancel()
        later.join()
        bar.stop()
