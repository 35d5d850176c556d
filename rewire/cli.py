"""The command line: ``rewire inspect``, ``source``, ``list`` and ``plot``."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from torch import nn
from typer.core import TyperGroup

import rewire
from rewire.checkpoint import matrices
from rewire.errors import RewireError, UnknownName
from rewire.plotting import plot_arcs, plot_heatmap

_WIDTH = 120  # of what is written to a file or a pipe


class _Commands(TyperGroup):
    """Shows the errors that rewire raises on purpose as one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RewireError as error:
            _console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="'package.module:callable' (called without arguments, returns a torch.nn.Module; the current directory is "
        "importable), 'hf:model_type' (a tiny transformers model of that type, random weights), or 'timm:name'.",
    ),
]


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
    """Learned residual connections for models that nobody prepared."""


@app.command("inspect")
def inspect_command(model: Model) -> None:
    """Show the residual streams of MODEL: their residual adds in order, and what would be left alone, and why."""
    _console().print(rewire.inspect(_load(model)))


@app.command("source")
def source_command(
    model: Model,
    path: Annotated[str, typer.Argument(metavar="PATH", help="A block, as inspect names it: model.layers.0")],
    topology: Annotated[
        str, typer.Option(help="How to connect the blocks; 'rewire list' shows all.")
    ] = "ancre-ingoing",
    granularity: Annotated[
        Literal["auto", "block", "sublayer"], typer.Option(help="What the topology connects.")
    ] = "auto",
) -> None:
    """Rewire MODEL and print the new forward of the block at PATH."""
    # Neither start nor validation changes the forward; the paper's start is the one that every topology has.
    rewired = rewire.compile(_load(model), topology, granularity=granularity, start="paper", validate=False)
    text = rewire.source(rewired, path)
    console = _console()
    if console.is_terminal:
        console.print(Syntax(text, "python", theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        typer.echo(text, nl=False)  # as it is, to be read by programs


@app.command("list")
def list_command() -> None:
    """List the topologies, initialisers and architectures that are known here, those of plug-ins included."""
    console = _console()
    console.print(_table("Topologies", rewire.topologies()))
    console.print(_table("Initialisers", rewire.initializers() or {"none": ""}))
    console.print(_table("Architectures whose names are known; of others, the structure tells", rewire.patterns()))


@app.command("plot")
def plot_command(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            show_default=False,
            help="State dict of a rewired model: a file written by torch.save, or a .safetensors file.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="File to write: .png, .pdf or .svg.  [default: CHECKPOINT's name, KIND.png]"),
    ] = None,
    kind: Annotated[Literal["heatmap", "arcs"], typer.Option(help="Weights as a matrix, or as arcs.")] = "heatmap",
) -> None:
    """Draw the connection weights in CHECKPOINT; the model itself is not needed."""
    target = out or checkpoint.with_suffix(f".{kind}.png")
    if target.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise typer.BadParameter(f"'{target}' has to end in .png, .pdf or .svg.", param_hint="--out")
    draw = plot_heatmap if kind == "heatmap" else plot_arcs
    try:
        draw(matrices(checkpoint), target)
    except (ImportError, OSError) as error:
        raise RewireError(str(error)) from error
    typer.echo(f"wrote {target}")


def main() -> None:
    """Entry point of the ``rewire`` command."""
    app(prog_name="rewire")


def _load(spec: str) -> nn.Module:
    """The model that MODEL names.

    Raises:
        RewireError: there is none; the message says what was looked for.
    """
    kind, separator, name = spec.partition(":")
    if not (kind and separator and name):
        raise RewireError(f"'{spec}' names no model: give 'package.module:callable', 'hf:model_type' or 'timm:name'.")
    if kind in ("hf", "timm"):
        from rewire.patterns import tiny

        try:
            return tiny.tiny_model(name) if kind == "hf" else tiny.timm_model(name)
        except ImportError as error:
            raise RewireError(str(error)) from error
    make = _imported(kind, name)
    if isinstance(make, nn.Module):
        return make
    if not callable(make):
        raise RewireError(f"'{spec}' is a {type(make).__name__}, not a callable that returns a torch.nn.Module.")
    model = make()
    if not isinstance(model, nn.Module):
        raise RewireError(f"'{spec}' returned a {type(model).__name__}, not a torch.nn.Module.")
    return model


def _imported(module: str, name: str) -> Any:
    """The object ``name`` (which may have dots) of ``module``."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise UnknownName(f"there is no module '{error.name}' here or among the installed packages.") from error
        raise  # an import inside the user's module: its traceback says which
    for part in name.split("."):
        if not hasattr(found, part):
            raise UnknownName(f"'{module}' has no '{name}'.")
        found = getattr(found, part)
    return found


def _table(title: str, rows: dict[str, str]) -> Table:
    table = Table(title=title, box=box.SIMPLE, title_justify="left", title_style="bold", show_header=False, expand=True)
    table.add_column(no_wrap=True, style="cyan", width=max(map(len, rows)))
    table.add_column(ratio=1)
    for name, description in rows.items():
        table.add_row(name, description.replace("``", ""))
    return table


def _console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = _WIDTH
    return console
