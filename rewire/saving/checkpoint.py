"""Connection weights from saved files alone, without the model that they belong to."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rewire.attributes import CONNECTIONS
from rewire.errors import RewireError
from rewire.runtime.connection import Connection
from rewire.runtime.recipe import read_recipe
from rewire.saving.folder import RECIPE, with_recipe
from rewire.saving.recipes import EXTRA_STATE, check_shapes, first_line, is_recipe, layout_of, misfit


def matrices(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Effective connection weights in a saved state dict of a rewired model.

    Only tensors are read: a pickle that holds other objects is refused, and topologies are looked up among the known
    ones.

    Args:
        path: a file written by ``torch.save``: a state dict, or a checkpoint that has one in it (Lightning's, or
            ``{"model": .., "ema": .., "optimizer": ..}``); or a ``.safetensors`` file; or a folder with such files: of
            `rewire.save`, ``save_pretrained``, a Trainer, Accelerate or PEFT.

    Returns:
        Trunk -> matrix [destination, source], float32, as `rewire.coefficients` returns for the model itself. A trunk
        is named after the place of its weights in the model, ``model.layers``. If the checkpoint holds several state
        dicts (the model's and an average's), the name begins with the state dict's: ``ema: model.layers``.

    Raises:
        RewireError: it cannot be read, or holds no (or damaged) connection weights.
        UnknownName: a topology of that name does not exist here.
    """
    saved = _read(Path(path))
    states = dict(_state_dicts(saved))
    if not states:
        raise RewireError(
            f"'{path}' has no connection weights: none of its {len(saved)} entries ends in "
            f"'{CONNECTIONS}.<trunk>{EXTRA_STATE}'. Save the whole state dict of a rewired model."
        )
    found = dict[str, Tensor]()
    for at, state in states.items():
        marks = [key.removesuffix(EXTRA_STATE) for key in state if is_recipe(key)]
        before = f"{at}: " if len(states) > 1 else ""
        found |= {f"{before}{_trunk_of(mark)}": _matrix(mark, state) for mark in marks}
    return found


def read_connections(folder: Path) -> dict[str, Tensor]:
    """Connection weights and their recipes in the .safetensors files of a folder, on the CPU.

    Raises:
        RewireError: there are no such files, or one cannot be read.
    """

    def read(paths: Iterable[Path]) -> dict[str, Tensor]:
        return {key: value for path in paths for key, value in _read_safetensors(path, CONNECTIONS).items()}

    if (folder / RECIPE).exists():
        return with_recipe(folder, lambda recipe: read(folder / name for name in recipe["files"]))
    if not folder.is_dir():
        raise RewireError(
            f"there is no folder '{folder}' here. Fetch a model of the Hub first: huggingface_hub.snapshot_download."
        )
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise RewireError(f"'{folder}' is a folder without .safetensors files.")
    return read(paths)


def _read_safetensors(path: Path, part: str = "") -> dict[str, Tensor]:
    """Tensors whose dotted names contain ``part``."""
    if not path.is_file():  # a pipe, for example, would never end
        raise RewireError(f"'{path}' does not exist or is not a regular file.")
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys() if not part or part in key.split(".")}  # noqa: SIM118
    except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: torch opens the file, too
        raise RewireError(f"'{path}' cannot be read as a checkpoint: {first_line(error)}") from error


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        return read_connections(path)
    if not path.is_file():
        raise RewireError(f"'{path}' does not exist or is not a regular file.")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RewireError(
            f"'{path}' holds more than tensors, or is not a file of torch.save. It is read with weights_only=True, so "
            "that no code in it runs: save model.state_dict() alone."
        ) from error
    except Exception as error:  # for bytes that are no pickle, torch's reader may raise anything
        told = f"{type(error).__name__}: {first_line(error)}"
        raise RewireError(f"'{path}' cannot be read as a checkpoint of torch.save: {told}") from error
    if not isinstance(state, dict):
        raise RewireError(f"'{path}' holds a {type(state).__name__}, not a state dict: save model.state_dict().")
    return state


def _state_dicts(holder: Mapping[Any, object], at: str = "", depth: int = 3) -> Iterator[tuple[str, dict[str, Any]]]:
    """The state dicts of rewired models in a checkpoint, by their place in it."""
    state = {key: value for key, value in holder.items() if isinstance(key, str)}
    if any(map(is_recipe, state)):
        yield at, state
    elif depth:
        for key, value in state.items():
            if isinstance(value, Mapping):
                yield from _state_dicts(value, f"{at}.{key}".lstrip("."), depth - 1)


def _trunk_of(mark: str) -> str:
    return ".".join(part for part in mark.split(".") if part != CONNECTIONS)


def _matrix(mark: str, state: dict[str, Any]) -> Tensor:
    """The matrix of the connection that was saved at ``mark``."""
    recipe = read_recipe(state[mark + EXTRA_STATE])
    layout = layout_of(mark, recipe, _trunk_of(mark))
    saved = {key.removeprefix(f"{mark}."): value for key, value in state.items() if key.startswith(f"{mark}.")}
    shapes = {key: value.shape for key, value in state.items() if isinstance(value, Tensor)}
    check_shapes(mark, recipe, layout, "paper", shapes)  # all topologies have this start
    try:
        connection = Connection(layout, start="paper")
        connection.load_state_dict(saved)
        return connection.matrix().detach()
    except Exception as error:  # a topology may raise anything on options that it does not know
        raise misfit(mark, recipe, error) from error
