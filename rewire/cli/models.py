"""Commands that look at a model, or write one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import networkx as nx
import torch
import typer

import rewire
from rewire.bench.shapes import shapes
from rewire.cli import output
from rewire.cli.app import app
from rewire.cli.arguments import (
    TO_READ,
    How,
    Json,
    Model,
    Topology,
    as_messages,
    graph_file,
    inputs_of,
    load_with_inputs,
    picture,
    rewired,
    rewired_as,
    rewires,
    writable,
)
from rewire.console import progress
from rewire.ejecting.eject import check_free
from rewire.errors import UnknownName, did_you_mean
from rewire.kernels import MixSpec, source
from rewire.passes.inputs import known_inputs
from rewire.patterns import patterns_for


@app.command("inspect")
@rewires
def inspect_command(
    model: Model,
    how: How,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=writable,
            help="Write an HTML page instead, with the streams, diff, weights and costs of the rewired MODEL.",
        ),
    ] = None,
    topology: Topology = "ancre-ingoing",
    json: Json = False,
) -> None:
    """Show the residual streams of MODEL: their residual adds in order, and what would be left alone, and why.

    With --html, --topology and the options after it say how MODEL is rewired for the page.
    """
    if html is None and (topology != "ancre-ingoing" or how.keys() - {"loop"}):
        raise typer.BadParameter(
            "add --html: without it, inspect takes only --loop; the other options say how MODEL is rewired for the "
            "page."
        )
    loaded, inputs = load_with_inputs(model)
    if html is None:
        report = rewire.inspect(loaded, **how, example_inputs=inputs)
        output.show(report, {"trunks": report.trunks, "left": report.left, "dropped": report.dropped}, json)
        return
    with progress(f"writing a page about {model}"):
        inputs = known_inputs(loaded, patterns_for(loaded), inputs)
        if not rewire.connections(loaded):
            loaded = rewired_as(loaded, topology, example_inputs=inputs, **TO_READ | how)
        rewire.report(loaded, html, inputs)
    _wrote(html, json)


@app.command("source")
@rewires
def source_command(
    model: Model,
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="Path of a block, as shown by inspect, such as model.layers.0.")
    ],
    how: How,
    topology: Topology = "ancre-ingoing",
    json: Json = False,
) -> None:
    """Rewire MODEL and print the new forward of the block at PATH."""
    loaded, _ = rewired(model, topology, **TO_READ | how)
    _code(rewire.source(loaded, path), "python", json)


@app.command("diff")
@rewires
def diff_command(
    model: Model,
    how: How,
    topology: Topology = "ancre-ingoing",
    json: Json = False,
) -> None:
    """Rewire MODEL and print everything that this changes in its source files, as a unified diff."""
    loaded, _ = rewired(model, topology, **TO_READ | how)
    _code(rewire.diff(loaded), "diff", json)


@app.command("eject")
@rewires
def eject_command(
    model: Model,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", show_default=False, help="Where to write.")],
    how: How,
    topology: Topology = "ancre-ingoing",
    json: Json = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write even if the folder holds another model or other files.")
    ] = False,
) -> None:
    """Write MODEL as Python files and weights that load without rewire; it is rewired first, unless it is already."""
    if not force:
        check_free(folder)  # before anything that takes long
    loaded, _ = rewired(model, topology, **how)
    with as_messages(OSError):
        written = rewire.eject(loaded, folder, force=force)
    _wrote(written, json)


@app.command("list")
def list_command(
    pattern: Annotated[
        str, typer.Argument(metavar="PATTERN", help="List only topologies whose names match, such as 'hc-*'.")
    ] = "",
    json: Json = False,
) -> None:
    """List the known topologies, initialisers and architectures, including those of plug-ins."""
    found = {"Topologies": rewire.list_topologies(pattern or "*")}
    if not found["Topologies"]:
        begin_so = rewire.list_topologies(f"{pattern}*")
        near = f" Did you mean '{pattern}*'?" if begin_so else did_you_mean(pattern, rewire.list_topologies())
        raise UnknownName(f"no topology has a name like '{pattern}'.{near}")
    if not pattern:
        found["Shapes that bench knows"] = shapes()
        found["Initialisers"] = rewire.list_initializers()
        found["Architectures known by name; others are recognised by structure"] = rewire.list_patterns()
    if json:
        output.print_json({title.split()[0].lower(): rows for title, rows in found.items()})
        return
    for title, rows in found.items():
        output.console().print(output.table(title, rows or {"none": ""}))


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
        typer.Option(
            metavar="PATH",
            callback=picture,
            help="File to write: .png, .pdf or .svg.  [default: CHECKPOINT's name, KIND.png]",
        ),
    ] = None,
    kind: Annotated[
        Literal["heatmap", "arcs", "bars"],
        typer.Option(help="Weights as a matrix, as arcs, or as bars by destination."),
    ] = "heatmap",
    json: Json = False,
) -> None:
    """Draw the connection weights in CHECKPOINT; the model itself is not needed."""
    target = out or checkpoint.with_suffix(f".{kind}.png")
    with as_messages(ImportError, OSError):
        rewire.plot(checkpoint, target, kind)
    _wrote(target, json)


@app.command("diagnose")
@rewires
def diagnose_command(
    model: Model,
    how: How,
    topology: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,..]",
            help="Topology to rewire MODEL with first; 'rewire list' shows all names.  [default: not rewired]",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences or images in the batch.")] = 2,
    length: Annotated[int, typer.Option(min=1, help="Tokens in a sequence.")] = 32,
    probes: Annotated[
        int, typer.Option(min=0, help="Random probes to estimate chi if it is not computed exactly; 0: no chi.")
    ] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the random batch and the probes.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="PATH", callback=picture, help="Also write a plot: .png, .pdf or .svg.")
    ] = None,
    json: Json = False,
) -> None:
    """Show how signals and gradients pass through MODEL, on a random batch: norms, cosines, effective depth and chi."""
    loaded, inputs = load_with_inputs(model)
    torch.manual_seed(seed)
    if inputs is None:
        inputs = inputs_of(model, loaded, batch, length)
    if topology:
        loaded = rewired_as(loaded, topology, example_inputs=inputs, **TO_READ | how)
    found = rewire.diagnose(loaded, inputs, probes=probes, seed=seed)
    output.show(found, found, json)
    if out:
        with as_messages(ImportError, OSError, ValueError):
            found.plot(out)
        if not json:
            _wrote(out, json)


@app.command("graph")
@rewires
def graph_command(
    model: Model,
    how: How,
    topology: Topology = "ancre-ingoing",
    batch: Annotated[
        int, typer.Option(min=0, help="Sequences or images over which weights per token are averaged; 0: none.")
    ] = 0,
    length: Annotated[int, typer.Option(min=1, help="Tokens in a sequence.")] = 32,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PATH", callback=graph_file, help="Also write the graph: .graphml, .dot or .json."),
    ] = None,
    json: Json = False,
) -> None:
    """Show the depth graph of MODEL: what each unit reads, what is unused, and what is held between units.

    It is rewired first, unless it is already.
    """
    loaded, inputs = rewired(model, topology, **TO_READ | how)
    if batch and inputs is None:
        inputs = inputs_of(model, loaded, batch, length)
    found = rewire.graph(loaded, inputs if batch else None)
    output.show(found.summary(), nx.node_link_data(found, edges="edges"), json)
    if out:
        with as_messages(OSError):
            found.save(out)
        if not json:
            _wrote(out, json)


@app.command("kernels")
def kernels_command(
    sources: Annotated[int, typer.Option(min=1, help="Number of states that are mixed.")] = 4,
    weights: Annotated[
        Literal["none", "scalar", "channel"],
        typer.Option(help="Weights of each state: none, one number, or one per channel."),
    ] = ("scalar"),
    scores: Annotated[bool, typer.Option("--scores", help="Add weights per token.")] = False,
    added: Annotated[int, typer.Option(min=0, help="Branch outputs that are added.")] = 0,
    outputs: Annotated[int, typer.Option(min=1, max=8, help="Number of mixes of the same states.")] = 1,
    norm: Annotated[Literal["none", "rms", "layer"], typer.Option(help="The norm that follows.")] = "none",
    probe: Annotated[bool, typer.Option("--probe", help="Add dot products with one more tensor.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Print the kernel of the gradients.")] = False,
    json: Json = False,
) -> None:
    """Print the Triton source that is generated for a mix."""
    follows: Any = None if norm == "none" else norm
    with as_messages(ValueError):
        spec = MixSpec(sources, weights, scores, added, outputs, follows, keep_mix=bool(follows), probe=probe)
        text = source(spec, backward)
    _code(text, "python", json)


def _code(text: str, language: str, json: bool) -> None:
    if json:
        output.print_json({"text": text})
    else:
        output.print_code(text, language)


def _wrote(path: Path, json: bool) -> None:
    if json:
        output.print_json({"wrote": str(path)})
    else:
        typer.echo(f"wrote {path}")
