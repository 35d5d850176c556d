"""The ``rewire`` command, without its subcommands."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

import rewire
from rewire.cli import output
from rewire.errors import RewireError, with_notes


class _Commands(TyperGroup):
    """Shows the errors that rewire raises on purpose as one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RewireError as error:
            output.console(stderr=True).print(Text(f"error: {with_notes(error)}", style="red"), soft_wrap=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rewire {rewire.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Learned residual connections for unmodified PyTorch models."""
