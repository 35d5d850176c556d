"""Output for people: reports as tables, in terminals and notebooks, and progress bars for long steps."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

#: Seconds after which a progress bar appears.
DELAY = 2.0
_EVERY = 0.2  # seconds between two updates of a bar in a notebook

_WIDTH = 120  # columns of tables as text

#: Shared by all bars: rich stacks the bars of one console, such as those of a study and of a validation in it.
stderr = Console(stderr=True)


class Shown:
    """Base of objects that `print`, rich and notebooks show as tables, those that `shown` returns."""

    def shown(self) -> Iterable[RenderableType]:
        """Lines and tables, one below the other."""
        raise NotImplementedError

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.shown()

    def __str__(self) -> str:
        file = io.StringIO()
        # Plain text everywhere: otherwise rich would add colours in terminals, and display the table in notebooks.
        Console(file=file, width=_WIDTH, color_system=None, force_terminal=False, force_jupyter=False).print(self)
        return file.getvalue()

    def _repr_html_(self) -> str:
        return _html(self, color_system=None)


def table(titles: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> Table:
    """A table whose cells are shown literally: rich does not take brackets for markup."""
    made = Table(*titles, box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    return made


def _html(shown: object, **settings: Any) -> str:
    console = Console(file=io.StringIO(), width=_WIDTH, record=True, force_jupyter=False, **settings)
    console.print(shown)
    code = '<pre style="line-height: normal; overflow-x: auto; white-space: pre">{code}</pre>'
    return console.export_html(inline_styles=True, code_format=code)


def watched() -> bool:
    """Whether this process shows progress bars: on a terminal or in a notebook, and only one of several ranks."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return False
    return stderr.is_jupyter or (sys.stderr is not None and sys.stderr.isatty() and stderr.is_interactive)


def say(line: str) -> None:
    """Print a line on stderr about a finished step, where no bar is shown; only one of several ranks does."""
    if not watched() and os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(what: str, steps: int | None = None) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, shown after `DELAY` seconds if it is `watched`, and removed when the block ends.

    Args:
        what: label of the bar.
        steps: number of calls of the yielded function; None if unknown.
    """
    bar = bars(TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    task = bar.add_task(what, total=steps)
    with drawn(bar, DELAY):
        yield lambda: bar.advance(task)


def bars(*columns: ProgressColumn) -> Progress:
    """Bars for `drawn`. They do not redirect what is printed meanwhile: stdout may be a file."""
    return Progress(*columns, console=stderr, transient=True, redirect_stdout=False)


@contextlib.contextmanager
def drawn(shown: Progress, delay: float = 0.0) -> Iterator[None]:
    """Draw `bars` from ``delay`` seconds on until the block ends, if they are `watched`."""
    if not watched():
        yield
        return
    ended = threading.Event()
    draw = _in_notebook if stderr.is_jupyter else _on_terminal
    drawing = threading.Thread(target=draw, args=(shown, delay, ended), daemon=True)
    drawing.start()
    try:
        yield
    finally:
        ended.set()
        drawing.join()


def _on_terminal(shown: Progress, delay: float, ended: threading.Event) -> None:
    if not ended.wait(delay):
        with shown:
            ended.wait()


def _in_notebook(shown: Progress, delay: float, ended: threading.Event) -> None:
    """Show progress in a notebook output of its own: rich would need ipywidgets, and erase what others print."""
    from IPython.display import display

    if ended.wait(delay):
        return
    output = display({"text/html": _html(shown)}, raw=True, display_id=True)
    while not ended.wait(_EVERY):
        output.update({"text/html": _html(shown)}, raw=True)
    output.update({"text/html": ""}, raw=True)
