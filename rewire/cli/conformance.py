"""The command that checks implementations of schemes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rewire import conformance
from rewire.cli import output
from rewire.cli.app import app
from rewire.cli.arguments import Json, imported, usable_device, users_code
from rewire.conformance.ours import ours
from rewire.console import progress
from rewire.errors import RewireError
from rewire.registry import value_of


@app.command("conformance")
def conformance_command(
    scheme: Annotated[
        str | None, typer.Argument(help="Name of the scheme; without a name, all schemes are listed.")
    ] = None,
    implementation: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:CALLABLE",
            help="A function without arguments that returns the implementation.  [default: rewire's own]",
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of the scheme that differs from the paper; repeatable."),
    ] = None,
    device: Annotated[str, typer.Option(callback=usable_device, help="Where to run.")] = "cpu",
    vectors: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write the test cases of SCHEME, or of all schemes, to FOLDER instead."),
    ] = None,
    json: Json = False,
) -> None:
    """Compare an implementation of a scheme with the paper's formulas, and name its mistake."""
    if vectors is not None:
        with progress(f"writing test cases to {vectors}"):
            files = conformance.write(vectors, [scheme] if scheme else None)
        if json:
            output.print_json({"wrote": [str(file) for file in files]})
        else:
            size = sum(file.stat().st_size for file in files) / 1e6
            typer.echo(f"wrote {len(files)} files, {size:.1f} MB, to {vectors}")
        return
    if scheme is None:
        known = conformance.list_schemes()
        output.show(output.table("schemes", known), {"schemes": known}, json)
        return
    options = dict(map(_option, option or []))
    made = ours(scheme, **options) if implementation is None else _made(implementation)
    with progress(f"checking {scheme}"), users_code():
        report = conformance.check(scheme, made, device=device, **options)
    if json:
        output.print_json({"scheme": scheme, "agrees": report.agrees, "text": str(report)})
    else:
        typer.echo(str(report))
    raise typer.Exit(0 if report.agrees else 1)


def _made(spec: str) -> conformance.Implementation:
    module, _, name = spec.partition(":")
    if not (module and name):
        raise RewireError(f"'{spec}' does not name an implementation: give 'package.module:callable'.")
    make = imported(module, name)
    with users_code():
        made: conformance.Implementation = make()
    if not callable(made):
        raise RewireError(
            f"'{spec}' returned a {type(made).__name__}, not a function of hidden states, weights and branches."
        )
    return made


def _option(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise typer.BadParameter(f"'{text}' is not of the form NAME=VALUE, as in streams=2.")
    return name, value_of(value)
