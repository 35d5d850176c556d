"""What arguments mean: models and tasks by name, files that can be written."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from torch import nn

import rewire
from rewire.bench.shapes import batch_for, make_shape
from rewire.console import progress
from rewire.errors import RewireError, UnknownName
from rewire.patterns import first_given, patterns_for

MODEL = typer.Argument(
    metavar="MODEL",
    show_default=False,
    help="'package.module:callable' (called without arguments, returns a torch.nn.Module; the current directory is "
    "importable), 'hf:model_type' (a tiny transformers model of that type, random weights), 'timm:name', or "
    "'shape:name' (a size of the papers, see 'rewire list').",
)
Model = Annotated[str, MODEL]
Topology = Annotated[str, typer.Option(help="How to connect the blocks; 'rewire list' shows all.")]
Granularity = Annotated[Literal["auto", "block", "sublayer"], typer.Option(help="What the topology connects.")]

Loop = Annotated[
    Literal["continue", "restart"], typer.Option(help="Of blocks that run several times: what the passes are.")
]


def writable(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before anything that takes long is done."""
    if path and not path.parent.is_dir():
        raise RewireError(f"'{path}' cannot be written: there is no folder '{path.parent}'.")
    if path and path.is_dir():
        raise RewireError(f"'{path}' is a folder: give the name of a file in it.")
    return path


def picture(path: Path | None) -> Path | None:
    """Refuse the same, and formats other than those of pictures."""
    return _ending(path, ".png", ".pdf", ".svg")


def graph_file(path: Path | None) -> Path | None:
    """Refuse the same, and formats other than those of graphs."""
    return _ending(path, ".graphml", ".dot", ".json")


def _ending(path: Path | None, *suffixes: str) -> Path | None:
    if path and path.suffix.lower() not in suffixes:
        raise typer.BadParameter(f"'{path}' has to end in {', '.join(suffixes[:-1])} or {suffixes[-1]}.")
    return writable(path)


def load(spec: str) -> nn.Module:
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

        with as_messages(ImportError):
            return tiny.tiny_model(name) if kind == "hf" else tiny.timm_model(name)
    make = imported(kind, name)
    if isinstance(make, nn.Module):
        return make
    if not callable(make):
        raise RewireError(f"'{spec}' is a {type(make).__name__}, not a callable that returns a torch.nn.Module.")
    with users_code():
        model = make()
    if not isinstance(model, nn.Module):
        raise RewireError(f"'{spec}' returned a {type(model).__name__}, not a torch.nn.Module.")
    return model


def task_of(spec: str) -> rewire.Task:
    """The task that TASK names.

    Raises:
        RewireError: there is none; the message says what was looked for.
    """
    module, _, name = spec.partition(":")
    if not (module and name):
        raise RewireError(f"'{spec}' names no task: give 'package.module:name'.")
    found = imported(module, name)
    with users_code():
        made = found() if callable(found) else found
    if not isinstance(made, rewire.Task):
        raise RewireError(f"'{spec}' is a {type(made).__name__}, not a rewire.Task, nor a function that returns one.")
    return made


def rewired(
    spec: str,
    topology: str,
    granularity: Literal["auto", "block", "sublayer"],
    loop: Literal["continue", "restart"],
) -> nn.Module:
    """The model that MODEL names, rewired to be read."""
    # Neither start nor validation changes the forwards; the paper's start is the one that every topology has.
    return rewire.compile(load(spec), topology, granularity=granularity, start="paper", loop=loop, validate=False)


def imported(module: str, name: str) -> Any:
    """The object ``name`` (which may have dots) of ``module``."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    with users_code():
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


@contextlib.contextmanager
def as_messages(*kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds are shown as those of rewire, too."""
    try:
        yield
    except kinds as error:
        raise RewireError(str(error)) from error


@contextlib.contextmanager
def users_code() -> Iterator[None]:
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


def inputs_of(model: nn.Module, batch: int, length: int) -> Any:
    """Inputs of the size asked for where the model's config says how, else those that the registry makes."""
    if hasattr(getattr(model, "config", None), "vocab_size") or not first_given(patterns_for(model), "example_inputs"):
        return batch_for(model, batch, length)
    return first_given(patterns_for(model), "example_inputs")(model)
