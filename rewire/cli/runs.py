"""Commands that train or time models: ``study`` and ``bench``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

import rewire
from rewire.bench import harness
from rewire.cli import output
from rewire.cli.app import app
from rewire.cli.arguments import (
    MODEL,
    TO_READ,
    Device,
    How,
    Json,
    as_messages,
    inputs_of,
    load_with_inputs,
    on_device,
    picture,
    rewired_as,
    rewires,
    task_of,
    writable,
)
from rewire.console import progress, say
from rewire.errors import RewireError
from rewire.plotting import plot_times
from rewire.studies.contenders import DEFAULT, parse
from rewire.studies.task import Budget


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
            help=(
                "Comma-separated names, each with its options: muddformer,ancre-ingoing:start=paper,cascade=keep.  "
                "[default: a dozen]"
            ),
            show_default=False,
        ),
    ] = "",
    steps: Annotated[int | None, typer.Option(min=1, help="Length of each run in training steps.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Length of each run in seconds of training.")] = None,
    trials: Annotated[int, typer.Option(min=1, help="Maximum number of settings to try for each topology.")] = 10,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of runs to compare for each topology, each with its own seed.")
    ] = 5,
    finalists: Annotated[int, typer.Option(min=1, help="Number of topologies to compare: the best of the search.")] = 4,
    out: Annotated[Path, typer.Option(help="Folder for the table, pictures and page.")] = Path("study"),
    storage: Annotated[
        str | None,
        typer.Option(help="Storage of the runs: a file, or the URL of a database; may be shared.  [default: in --out]"),
    ] = None,
    device: Device = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
) -> None:
    """Compare residual connections on TASK: tuned rates, paired seeds, controls. Run it again to continue one."""
    # split at commas between topologies, not at those between options of one
    names = [name.strip() for name in re.split(r",(?![^,:=]*=)", topologies) if name.strip()] or DEFAULT
    budget: dict[str, Any] = {"steps": steps, "seconds": seconds}
    if steps is None and seconds is None:
        raise RewireError("give the length of each run: --steps or --seconds.")
    with as_messages(TypeError, ValueError, OSError):  # only here: errors of the task's own code keep their traceback
        for name in names:
            parse(name)
        Budget(steps, seconds)
        out.mkdir(parents=True, exist_ok=True)
    made = task_of(task)
    with as_messages(ImportError):
        found = rewire.study(
            made,
            names,
            **budget,
            trials=trials,
            seeds=seeds,
            finalists=finalists,
            out=out,
            storage=storage,
            device=device or None,
        )
    if as_json:
        output.print_json(found.as_json())
        return
    console = output.console()
    console.print(found.headline(), highlight=False, soft_wrap=True)
    console.print(found.table())
    for sentence in [*found.findings(), found.limits()]:
        console.print(sentence, highlight=False, soft_wrap=True)
    typer.echo(f"wrote {out / 'study.html'}")


@app.command("bench")
@rewires
def bench_command(
    model: Annotated[str, MODEL],
    how: How,
    topology: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,..]",
            help="Topology to measure; repeatable.  [default: ancre-ingoing]",
        ),
    ] = None,
    compiled: Annotated[bool, typer.Option("--compiled", help="Also measure each under torch.compile.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Sequences or images in a batch.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens in a sequence.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Number of measurements of each.")] = 10,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Dtype of the weights.")] = "float32",
    device: Device = "",
    out: Annotated[
        Path | None, typer.Option(metavar="PATH", callback=writable, help="Write all times as JSON.")
    ] = None,
    json: Json = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="PATH", callback=picture, help="Draw the times: .png, .pdf or .svg.")
    ] = None,
) -> None:
    """Time training steps (forward and backward) of MODEL, plain and rewired, in turn in one run."""
    where = torch.device(device) if device else harness.default_device()
    loaded, given = load_with_inputs(model)
    plain = loaded.to(device=where, dtype=getattr(torch, dtype)).train()
    inputs = inputs_of(model, plain, batch, length) if given is None else on_device(given, where, getattr(torch, dtype))
    models = {"plain": plain}
    for name in topology or ["ancre-ingoing"]:
        models[name] = rewired_as(plain, name, example_inputs=inputs, **TO_READ | how)
    if compiled:
        models |= {f"{name}, compiled": torch.compile(each) for name, each in models.items()}  # type: ignore[misc]
    steps = {name: harness.training_step(each, inputs) for name, each in models.items()}
    say(f"timing {len(steps)} models on {where}: {rounds} rounds")
    with progress(f"{len(steps)} models on {where}", len(steps) * (harness.WARMUP + rounds)) as step:
        timings = harness.side_by_side(steps, rounds, where, tick=step)
    measured = {"model": model, "batch": batch, "length": length, **harness.as_json(timings)}
    output.show(harness.table(timings, "plain"), measured, json)
    if out:
        harness.save(out, [measured], where)
    if plot:
        plot_times({name: timing.seconds for name, timing in timings.items()}, plot)
