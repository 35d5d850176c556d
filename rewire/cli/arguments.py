"""The meaning of arguments: models and tasks by name, files that can be written."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import torch
import typer
from torch import nn

import rewire
from rewire.bench.shapes import batch_for, make_shape
from rewire.compiler import check_named
from rewire.console import progress
from rewire.errors import RewireError, UnknownName, did_you_mean
from rewire.patterns import first_given, patterns_for
from rewire.registry import said
from rewire.saving.recipes import first_line
from rewire.torch_internals import pytree

MODEL = typer.Argument(
    metavar="MODEL",
    show_default=False,
    help="'package.module:callable' (called without arguments, returns a torch.nn.Module, or a pair with inputs: "
    "model, (x, ..); the current directory is importable), 'hf:model_type' (a tiny transformers model of that type, "
    "random weights), 'timm:name', or 'shape:name' (a size of the papers, see 'rewire list').",
)
Model = Annotated[str, MODEL]
Topology = Annotated[
    str,
    typer.Option(metavar="NAME[:OPTION=VALUE,..]", help="How to connect the blocks; 'rewire list' shows all names."),
]
#: Arguments of `rewire.compile`.
How: TypeAlias = dict[str, Any]
#: For a model that is only looked at. Neither changes the forwards, and every topology has this start.
TO_READ: How = {"start": "paper", "validate": False}
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
#: Options of each command that rewires a model, besides its topology.
_REWIRING = {
    "granularity": Annotated[
        Literal["auto", "block", "sublayer"] | None,
        typer.Option(show_default="auto", help="What the topology connects: whole blocks, or each residual add."),
    ],
    "loop": Annotated[
        Literal["continue", "restart"] | None,
        typer.Option(
            show_default="continue",
            help="For blocks that run in a loop: one stream through all passes, or a new stream in each pass.",
        ),
    ],
    "start": Annotated[
        Literal["preserve", "paper"] | None,
        typer.Option(help="Initial connection weights: those of the plain network, or of the paper."),
    ],
    "init": Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,..]", help="Initialiser for all weights; 'rewire list' shows all names."
        ),
    ],
    "units": Annotated[
        str | None,
        typer.Option(
            metavar="UNIT,..",
            help=(
                "Connect only these units: numbers from 1, negative numbers from the end, or 'output', as in "
                "--units=-2,-1,output."
            ),
        ),
    ],
}


def rewires(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `_REWIRING`; those that are used reach it as ``how``, for `rewire.compile`."""
    own = inspect.signature(command, eval_str=True).parameters
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _REWIRING.items()
    ]
    shown = [*own.values(), *options]
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in shown if each.name != "how"]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        used = {name: value for name in _REWIRING if (value := given.pop(name)) is not None}
        if "units" in used:
            used["units"] = [_unit(part.strip()) for part in used["units"].split(",")]
        command(**given, how=used)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _unit(said: str) -> int | str:
    try:
        return int(said)
    except ValueError:
        return said


def writable(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written, before anything slow is done."""
    if path and not path.parent.is_dir():
        raise RewireError(f"'{path}' cannot be written: there is no folder '{path.parent}'.")
    if path and path.is_dir():
        raise RewireError(f"'{path}' is a folder: give the name of a file in it.")
    return path


def picture(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written, or whose format is not that of a picture."""
    return _ending(path, ".png", ".pdf", ".svg")


def graph_file(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written, or whose format is not that of a graph."""
    return _ending(path, ".graphml", ".dot", ".json")


def _ending(path: Path | None, *suffixes: str) -> Path | None:
    if path and path.suffix.lower() not in suffixes:
        raise typer.BadParameter(f"'{path}' must end in {', '.join(suffixes[:-1])} or {suffixes[-1]}.")
    return writable(path)


def usable_device(name: str) -> str:
    """Refuse a device that torch does not have here."""
    try:
        torch.empty(0, device=name or "cpu")
    except (AssertionError, RuntimeError) as error:  # a build without CUDA fails an assertion
        raise typer.BadParameter(f"'{name}' is no device that torch can use here: {first_line(error)}") from error
    return name


Device = Annotated[
    str, typer.Option(callback=usable_device, show_default="an accelerator if there is one", help="Where to run.")
]


def load(spec: str) -> nn.Module:
    """The model that MODEL names.

    Raises:
        RewireError: there is none; the message says what was looked for.
    """
    return load_with_inputs(spec)[0]


def load_with_inputs(spec: str) -> tuple[nn.Module, Any]:
    """The model that MODEL names, and the inputs that came with it, or None. Raises as `load`."""
    kind, separator, name = spec.partition(":")
    if not (kind and separator and name) or kind.endswith(".py"):
        as_module = f", as '{kind.removesuffix('.py').replace('/', '.')}:{name or 'make'}'" if ".py" in kind else ""
        raise RewireError(
            f"'{spec}' does not name a model: give 'package.module:callable'{as_module}, 'hf:model_type', 'timm:name' "
            "or 'shape:name'."
        )
    with progress(f"loading {spec}"):
        return _made(spec, kind, name)


def _made(spec: str, kind: str, name: str) -> tuple[nn.Module, Any]:
    if kind == "shape":
        return make_shape(name), None
    if kind in ("hf", "timm"):
        from rewire.patterns import tiny

        with as_messages(ImportError):
            return (tiny.tiny_model(name) if kind == "hf" else tiny.timm_model(name)), None
    make = imported(kind, name)
    if isinstance(make, nn.Module):
        return make, None
    if not callable(make):
        raise RewireError(f"'{spec}' is a {type(make).__name__}, not a callable that returns a torch.nn.Module.")
    with users_code():
        made = make()
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise RewireError(
            f"'{spec}' returned {made!r:.60}: it has to return a torch.nn.Module, or a pair (model, (x,)) with inputs."
        )
    return model, inputs


def task_of(spec: str) -> rewire.Task:
    """The task that TASK names.

    Raises:
        RewireError: there is none; the message says what was looked for.
    """
    module, _, name = spec.partition(":")
    if not (module and name):
        raise RewireError(f"'{spec}' does not name a task: give 'package.module:name'.")
    found = imported(module, name)
    with users_code():
        made = found() if callable(found) else found
    if not isinstance(made, rewire.Task):
        raise RewireError(f"'{spec}' is a {type(made).__name__}, not a rewire.Task or a function that returns one.")
    return made


def rewired(spec: str, topology: str, **settings: object) -> tuple[nn.Module, Any]:
    """The model that MODEL names, rewired unless it is already, and the inputs that came with it."""
    model, inputs = load_with_inputs(spec)
    if not rewire.connections(model):
        model = rewired_as(model, topology, example_inputs=inputs, **settings)
    return model, inputs


def rewired_as(model: nn.Module, topology: str, **settings: Any) -> nn.Module:
    """`rewire.compile`, with errors about options shown as messages."""
    with as_messages(TypeError, ValueError):
        name, options = said(topology)
        if "units" in options and "units" in settings:
            raise ValueError(f"units are given twice: by --units, and in '{topology}'.")
        check_named(name, options | {key: settings[key] for key in settings.keys() & _REWIRING.keys()})
    return rewire.compile(model, topology, **settings)


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
            raise UnknownName(f"'{module}' has no '{name}'.{did_you_mean(part, dir(found))}")
        found = getattr(found, part)
    return found


@contextlib.contextmanager
def as_messages(*kinds: type[Exception]) -> Iterator[None]:
    """Show errors of these kinds as those of rewire are shown."""
    try:
        yield
    except kinds as error:
        raise RewireError(str(error)) from error


@contextlib.contextmanager
def users_code() -> Iterator[None]:
    """Show errors of the user's own code with only its frames."""
    try:
        yield
    except RewireError:
        raise
    except Exception as error:
        frames, ours = error.__traceback__, (*rewire.__path__, *torch.__path__, importlib.__file__, "<frozen importlib")
        while frames and frames.tb_frame.f_code.co_filename.startswith(ours):
            frames = frames.tb_next
        if frames is None and isinstance(error, TypeError):  # it was called with arguments that it does not take
            raise RewireError(". ".join([str(error), *getattr(error, "__notes__", ())])) from error
        traceback.print_exception(error.with_traceback(frames))
        raise typer.Exit(1) from None


def inputs_of(spec: str, model: nn.Module, batch: int, length: int) -> Any:
    """Inputs of the requested size if the model's config says how, else those that the registry makes.

    Raises:
        RewireError: nothing tells what the model takes.
    """
    known = first_given(patterns_for(model), "example_inputs")
    if known and not hasattr(getattr(model, "config", None), "vocab_size"):
        return known(model)
    args, kwargs = batch_for(model, batch, length)
    if not known:  # a guess
        try:
            with torch.no_grad():
                model(*args, **kwargs)
        except Exception as error:
            told = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            raise RewireError(
                f"no inputs are known for '{spec}', and it does not take vectors as wide as its first weight ({told}). "
                "Let the callable return the model with inputs: return model, (tokens,)."
            ) from error
    return args, kwargs


def on_device(inputs: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Inputs that came with a model, as (args, kwargs), with floating-point tensors in the dtype of the weights."""
    whole = isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(inputs[1], dict)
    args, kwargs = inputs if whole else ((), inputs) if isinstance(inputs, dict) else (inputs, {})

    def moved(value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device=device, dtype=dtype if value.is_floating_point() else None)

    return pytree.tree_map(moved, (tuple(args), kwargs))
