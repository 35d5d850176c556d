"""What commands print."""

from __future__ import annotations

import typer
from rich import box
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from rewire.files import to_json

_WIDTH = 120  # of output to a file or a pipe


def console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr, markup=False)  # names may contain brackets
    if not console.is_terminal:
        console.width = _WIDTH
    return console


def print_code(text: str, language: str) -> None:
    terminal = console()
    if terminal.is_terminal:
        terminal.print(Syntax(text, language, theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        typer.echo(text, nl=False)  # unformatted, for programs


def show(shown: object, data: object, as_json: bool) -> None:
    """Print a result in its own format, or ``data`` as JSON."""
    print_json(data) if as_json else console().print(shown)


def print_json(data: object) -> None:
    """Print plain data, dataclasses and tensors as JSON, without colours or wrapped lines."""
    typer.echo(to_json(data, indent=2))


def table(title: str, rows: dict[str, str]) -> Table:
    table = Table(title=title, box=box.SIMPLE, title_justify="left", title_style="bold", show_header=False, expand=True)
    table.add_column(no_wrap=True, style="cyan", width=max(map(len, rows)))
    table.add_column(ratio=1)
    for name, description in rows.items():
        table.add_row(name, description.replace("``", ""))
    return table
