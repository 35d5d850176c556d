"""The ``rewire`` command."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich import box
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from torch import nn
from typer.core import TyperGroup

import rewire
from rewire.bench import comparison, harness, workloads
from rewire.bench.shapes import batch_for, make_shape, shapes
from rewire.console import progress
from rewire.ejecting.eject import check_free
from rewire.errors import RewireError, UnknownName, with_notes
from rewire.kernels import MixSpec, source
from rewire.passes.inputs import known_inputs
from rewire.patterns import first_given, patterns_for
from rewire.plotting import plot_rates, plot_times
from rewire.studies.contenders import DEFAULT

_WIDTH = 120  # of what is written to a file or a pipe


class _Commands(TyperGroup):
    """Shows the errors that rewire raises on purpose as one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RewireError as error:
            _console(stderr=True).print(Text(f"error: {with_notes(error)}", style="red"), soft_wrap=True)
            raise typer.Exit(1) from None


@contextlib.contextmanager
def _as_messages(*kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds are shown as those of rewire, too."""
    try:
        yield
    except kinds as error:
        raise RewireError(str(error)) from error


@contextlib.contextmanager
def _users_code() -> Iterator[None]:
    """Errors of the user's own code are shown with its frames alone."""
    try:
        yield
    except RewireError:
        raise
    except Exception as error:
        frames, ours = error.__traceback__, (__file__, importlib.__file__, "<frozen importlib")
        while frames and frames.tb_frame.f_code.co_filename.startswith(ours):
            frames = frames.tb_next
        traceback.print_exception(error.with_traceback(frames))
        raise typer.Exit(1) from None


def _writable(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before anything that takes long is done."""
    if path and not path.parent.is_dir():
        raise RewireError(f"'{path}' cannot be written: there is no folder '{path.parent}'.")
    if path and path.is_dir():
        raise RewireError(f"'{path}' is a folder: give the name of a file in it.")
    return path


def _picture(path: Path | None) -> Path | None:
    """Refuse the same, and other formats."""
    if path and path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise typer.BadParameter(f"'{path}' has to end in .png, .pdf or .svg.")
    return _writable(path)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_MODEL = typer.Argument(
    metavar="MODEL",
    show_default=False,
    help="'package.module:callable' (called without arguments, returns a torch.nn.Module; the current directory is "
    "importable), 'hf:model_type' (a tiny transformers model of that type, random weights), 'timm:name', or "
    "'shape:name' (a size of the papers, see 'rewire list').",
)
Model = Annotated[str, _MODEL]
Topology = Annotated[str, typer.Option(help="How to connect the blocks; 'rewire list' shows all.")]
Granularity = Annotated[Literal["auto", "block", "sublayer"], typer.Option(help="What the topology connects.")]


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


@app.command("inspect")
def inspect_command(
    model: Model,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=_writable,
            help="Write a page instead: streams, the diff, weights and costs of MODEL, rewired.",
        ),
    ] = None,
    topology: Topology = "ancre-ingoing",
    granularity: Granularity = "auto",
) -> None:
    """Show the residual streams of MODEL: their residual adds in order, and what would be left alone, and why."""
    if html is None:
        _console().print(rewire.inspect(_load(model)))
        return
    with progress(f"writing a page about {model}"):
        loaded = _load(model)
        inputs = known_inputs(loaded, patterns_for(loaded), None)
        if not rewire.connections(loaded):
            loaded = rewire.compile(loaded, topology, granularity=granularity, start="paper", validate=False)
        rewire.report(loaded, html, inputs)
    typer.echo(f"wrote {html}")


@app.command("source")
def source_command(
    model: Model,
    path: Annotated[str, typer.Argument(metavar="PATH", help="A block, as inspect names it: model.layers.0")],
    topology: Topology = "ancre-ingoing",
    granularity: Granularity = "auto",
) -> None:
    """Rewire MODEL and print the new forward of the block at PATH."""
    _print_code(rewire.source(_rewired(model, topology, granularity), path), "python")


@app.command("diff")
def diff_command(model: Model, topology: Topology = "ancre-ingoing", granularity: Granularity = "auto") -> None:
    """Rewire MODEL and print all that this changes in its files, as a unified diff."""
    _print_code(rewire.diff(_rewired(model, topology, granularity)), "diff")


@app.command("eject")
def eject_command(
    model: Model,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", show_default=False, help="Where to write.")],
    topology: Topology = "ancre-ingoing",
    granularity: Granularity = "auto",
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that holds other files, too.")] = False,
) -> None:
    """Write MODEL as Python files and weights that load without rewire; it is rewired first, unless it is already."""
    if not force:
        check_free(folder)  # before anything that takes long
    loaded = _load(model)
    if not rewire.connections(loaded):
        loaded = rewire.compile(loaded, topology, granularity=granularity)
    typer.echo(f"wrote {rewire.eject(loaded, folder, force=force)}")


@app.command("list")
def list_command() -> None:
    """List the topologies, initialisers and architectures that are known here, those of plug-ins included."""
    console = _console()
    console.print(_table("Topologies", rewire.list_topologies()))
    console.print(_table("Shapes that bench knows", shapes()))
    console.print(_table("Initialisers", rewire.list_initializers() or {"none": ""}))
    console.print(_table("Architectures whose names are known; of others, the structure tells", rewire.list_patterns()))


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
            callback=_picture,
            help="File to write: .png, .pdf or .svg.  [default: CHECKPOINT's name, KIND.png]",
        ),
    ] = None,
    kind: Annotated[
        Literal["heatmap", "arcs", "bars"],
        typer.Option(help="Weights as a matrix, as arcs, or as bars by destination."),
    ] = "heatmap",
) -> None:
    """Draw the connection weights in CHECKPOINT; the model itself is not needed."""
    target = out or checkpoint.with_suffix(f".{kind}.png")
    with _as_messages(ImportError, OSError):
        rewire.plot(checkpoint, target, kind)
    typer.echo(f"wrote {target}")


@app.command("diagnose")
def diagnose_command(
    model: Model,
    topology: Annotated[
        str | None, typer.Option(help="Rewire MODEL first; 'rewire list' shows all.  [default: MODEL as it is]")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences or images in the batch.")] = 2,
    length: Annotated[int, typer.Option(min=1, help="Tokens in a sequence.")] = 32,
    probes: Annotated[int, typer.Option(min=0, help="Random probes for chi where it is not exact; 0: no chi.")] = 16,
    seed: Annotated[int, typer.Option(help="Of the random batch and the probes.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="PATH", callback=_picture, help="Draw it, too: .png, .pdf or .svg.")
    ] = None,
) -> None:
    """Show how signals and gradients pass through MODEL on a random batch: norms, cosines, effective depth and chi."""
    loaded = _load(model)
    if topology:
        loaded = rewire.compile(loaded, topology, start="paper", validate=False)
    torch.manual_seed(seed)
    found = rewire.diagnose(loaded, _bench_inputs(loaded, batch, length), probes=probes, seed=seed)
    _console().print(found)
    if out:
        with _as_messages(ImportError, OSError, ValueError):
            found.plot(out)
        typer.echo(f"wrote {out}")


@app.command("study")
def study_command(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            show_default=False,
            help="'package.module:name': a rewire.Task, or a function without arguments that returns one; the current "
            "directory is importable.",
        ),
    ],
    topologies: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated, options after colons: muddformer,ancre-ingoing:start=paper:cascade=keep.  "
            "[default: a dozen]",
            show_default=False,
        ),
    ] = "",
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of a run.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Seconds of training of a run.")] = None,
    trials: Annotated[int, typer.Option(min=1, help="Learning rates that are tried of each, at most.")] = 5,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each that are compared.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for table, pictures and page.")] = Path("study"),
    storage: Annotated[
        str | None,
        typer.Option(help="Where runs are kept: a file, or a database's URL; may be shared.  [default: in --out]"),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to train.  [default: an accelerator if there is one]")] = "",
) -> None:
    """Compare residual connections on TASK: rates tuned for each, several seeds, controls. Goes on after a kill."""
    names = [name.strip() for name in topologies.split(",") if name.strip()] or DEFAULT
    budget: dict[str, Any] = {"steps": steps, "seconds": seconds}
    if steps is None and seconds is None:
        raise RewireError("how long is a run? Give --steps or --seconds.")
    with _as_messages(ImportError, ValueError):
        found = rewire.study(
            _task(task), names, **budget, trials=trials, seeds=seeds, out=out, storage=storage, device=device or None
        )
    console = _console()
    console.print(found.table())
    for sentence in [*found.findings(), found.limits()]:
        console.print(sentence, highlight=False, soft_wrap=True)
    typer.echo(f"wrote {out / 'study.html'}")


@app.command("kernels")
def kernels_command(
    sources: Annotated[int, typer.Option(min=1, help="States that are mixed.")] = 4,
    weights: Annotated[Literal["none", "scalar", "channel"], typer.Option(help="One number, or one per channel.")] = (
        "scalar"
    ),
    scores: Annotated[bool, typer.Option("--scores", help="Weights per token, too.")] = False,
    added: Annotated[int, typer.Option(min=0, help="Branch outputs that join.")] = 0,
    outputs: Annotated[int, typer.Option(help="Mixes of the same states, 1 to 8.")] = 1,
    norm: Annotated[Literal["none", "rms", "layer"], typer.Option(help="The norm that follows.")] = "none",
    probe: Annotated[bool, typer.Option("--probe", help="Dot products with one more tensor each, too.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="The kernel of the gradients.")] = False,
) -> None:
    """Print the Triton source that is generated for a mix."""
    follows: Any = None if norm == "none" else norm
    with _as_messages(ValueError):
        spec = MixSpec(sources, weights, scores, added, outputs, follows, keep_mix=bool(follows), probe=probe)
        text = source(spec, backward)
    _print_code(text, "python")


@app.command("bench")
def bench_command(
    model: Annotated[str | None, _MODEL] = None,
    mixes: Annotated[
        bool, typer.Option("--mixes", help="Time single mixes instead, beside plain torch and other libraries.")
    ] = False,
    topology: Annotated[
        list[str] | None, typer.Option(help="What to measure; may be given several times.  [default: ancre-ingoing]")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compiled", help="Measure each under torch.compile, too.")] = False,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences or images in a batch.  [default: 8; of mixes 1]")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens in a sequence.  [default: 128; of mixes 1024, on an accelerator 16384]"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is measured.")] = 10,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of weights, or states.  [default: float32; of mixes on an accelerator bfloat16]"),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to run.  [default: an accelerator if there is one]")] = "",
    out: Annotated[
        Path | None, typer.Option("--json", "--out", metavar="PATH", help="Write the times as JSON.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="PATH", callback=_picture, help="Draw the times: .png, .pdf or .svg.")
    ] = None,
) -> None:
    """Time training steps (forward and backward) of MODEL, plain and rewired, in turn in one run; or single mixes."""
    where = torch.device(device) if device else harness.default_device()
    if mixes and (model or topology):
        raise RewireError("--mixes times mixes without a model: leave out MODEL and --topology.")
    if mixes:
        todo = workloads.default_workloads(where, dtype and getattr(torch, dtype), batch, length)
        _bench_mixes(todo, where, rounds, compiled, out, plot)
        return
    if model is None:
        raise RewireError("there is nothing to time: give a MODEL, or --mixes.")
    batch, length = batch or 8, length or 128
    plain = _load(model).to(device=where, dtype=getattr(torch, dtype or "float32")).train()
    inputs = _bench_inputs(plain, batch, length)
    models = {"plain": plain}
    for name in topology or ["ancre-ingoing"]:
        models[name] = rewire.compile(plain, name, start="paper", validate=False)
    if compiled:
        models |= {f"{name}, compiled": torch.compile(each) for name, each in models.items()}  # type: ignore[misc]
    steps = {name: harness.training_step(each, inputs) for name, each in models.items()}
    with progress(f"{len(steps)} models on {where}", len(steps) * (harness.WARMUP + rounds)) as step:
        timings = harness.side_by_side(steps, rounds, where, tick=step)
    _console().print(harness.table(timings, "plain"))
    if out:
        harness.save(out, [{"model": model, "batch": batch, "length": length, **harness.as_json(timings)}], where)
    if plot:
        plot_times({name: timing.seconds for name, timing in timings.items()}, plot)


def _bench_mixes(
    todo: list[workloads.Workload],
    where: torch.device,
    rounds: int,
    compiled: bool,
    out: Path | None,
    plot: Path | None,
) -> None:
    bandwidth = harness.copy_bandwidth(where)
    rows = []
    with progress(f"mixes on {where}", len(todo)) as step:
        for found in comparison.run(todo, rounds, compiled):
            rows += found
            step()
    _console().print(comparison.table(rows, bandwidth))
    if out:
        comparison.save(out, rows, bandwidth, where)
    if plot:
        plot_rates(comparison.rates(rows), bandwidth, plot)


def _bench_inputs(model: nn.Module, batch: int, length: int) -> Any:
    """Inputs of the size asked for where the model's config says how, else those that the registry makes."""
    if hasattr(getattr(model, "config", None), "vocab_size") or not first_given(patterns_for(model), "example_inputs"):
        return batch_for(model, batch, length)
    return first_given(patterns_for(model), "example_inputs")(model)


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
        raise RewireError(
            f"'{spec}' names no model: give 'package.module:callable', 'hf:model_type', 'timm:name' or 'shape:name'."
        )
    with progress(f"loading {spec}"):
        return _made(spec, kind, name)


def _made(spec: str, kind: str, name: str) -> nn.Module:
    if kind == "shape":
        return make_shape(name)
    if kind in ("hf", "timm"):
        from rewire.patterns import tiny

        with _as_messages(ImportError):
            return tiny.tiny_model(name) if kind == "hf" else tiny.timm_model(name)
    make = _imported(kind, name)
    if isinstance(make, nn.Module):
        return make
    if not callable(make):
        raise RewireError(f"'{spec}' is a {type(make).__name__}, not a callable that returns a torch.nn.Module.")
    with _users_code():
        model = make()
    if not isinstance(model, nn.Module):
        raise RewireError(f"'{spec}' returned a {type(model).__name__}, not a torch.nn.Module.")
    return model


def _task(spec: str) -> rewire.Task:
    """The task that TASK names.

    Raises:
        RewireError: there is none; the message says what was looked for.
    """
    module, _, name = spec.partition(":")
    if not (module and name):
        raise RewireError(f"'{spec}' names no task: give 'package.module:name'.")
    found = _imported(module, name)
    with _users_code():
        made = found() if callable(found) else found
    if not isinstance(made, rewire.Task):
        raise RewireError(f"'{spec}' is a {type(made).__name__}, not a rewire.Task, nor a function that returns one.")
    return made


def _rewired(spec: str, topology: str, granularity: Literal["auto", "block", "sublayer"]) -> nn.Module:
    """The model that MODEL names, rewired to be read."""
    # Neither start nor validation changes the forwards; the paper's start is the one that every topology has.
    return rewire.compile(_load(spec), topology, granularity=granularity, start="paper", validate=False)


def _imported(module: str, name: str) -> Any:
    """The object ``name`` (which may have dots) of ``module``."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    with _users_code():
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name and f"{module}.".startswith(f"{error.name}."):
                raise UnknownName(f"there is no module '{error.name}' here or among the installed packages.") from error
            raise  # an import inside the user's module
    for part in name.split("."):
        if not hasattr(found, part):
            raise UnknownName(f"'{module}' has no '{name}'.")
        found = getattr(found, part)
    return found


def _print_code(text: str, language: str) -> None:
    console = _console()
    if console.is_terminal:
        console.print(Syntax(text, language, theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        typer.echo(text, nl=False)  # as it is, to be read by programs


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
