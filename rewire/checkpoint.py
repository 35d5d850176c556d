"""Connection weights from a saved state dict alone, without the model that it belongs to."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from rewire.connection import CONNECTIONS, Connection, read_recipe
from rewire.errors import RewireError, UnknownName
from rewire.stream import Layout
from rewire.topologies import Topology, topologies

_RECIPE = "._extra_state"


def matrices(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Effective connection weights in a saved state dict of a rewired model.

    Nothing but tensors is read: a pickle that holds other objects is refused, and topologies are looked up among the
    known ones.

    Args:
        path: a file written by ``torch.save(model.state_dict(), path)``, or a ``.safetensors`` file.

    Returns:
        Trunk -> matrix [destination, source], float32, as `rewire.coefficients` returns for the model itself. A trunk
        is named after the place of its weights in the model, ``model.layers``.

    Raises:
        RewireError: the file cannot be read, or holds no (or damaged) connection weights.
        UnknownName: a topology of that name does not exist here.
    """
    state = _read(Path(path))
    marks = [key.removesuffix(_RECIPE) for key in state if _is_recipe(key)]
    if not marks:
        raise RewireError(
            f"'{path}' has no connection weights: none of its {len(state)} entries ends in "
            f"'{CONNECTIONS}.<trunk>{_RECIPE}'. Save the whole state dict of a rewired model."
        )
    return {_trunk_of(mark): _matrix(mark, state) for mark in marks}


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise RewireError(
            f"'{path}' is {'a folder, not a file' if path.is_dir() else 'no file: there is nothing there'}."
        )
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RewireError(
            f"'{path}' is no state dict, or holds more than tensors, which is not unpickled: save model.state_dict()."
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError, safetensors.SafetensorError) as error:
        raise RewireError(f"'{path}' cannot be read as a checkpoint: {_first_line(error)}") from error
    if not isinstance(state, dict):
        raise RewireError(f"'{path}' holds a {type(state).__name__}, not a state dict: save model.state_dict().")
    return {key: value for key, value in state.items() if isinstance(key, str)}


def _is_recipe(key: str) -> bool:
    parts = key.removesuffix(_RECIPE).split(".")
    return key.endswith(_RECIPE) and CONNECTIONS in parts[-2:-1]


def _trunk_of(mark: str) -> str:
    return ".".join(part for part in mark.split(".") if part != CONNECTIONS)


def _matrix(mark: str, state: dict[str, Any]) -> Tensor:
    """The matrix of the connection that was saved at ``mark``."""
    try:
        recipe = read_recipe(state[mark + _RECIPE])
        name, options, units = recipe["topology"], recipe["options"], recipe["units"]
        width, attention = recipe["width"], recipe["attention"]
        _check_units(units)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RewireError(f"the recipe of '{mark}' is damaged: {type(error).__name__}: {_first_line(error)}") from error
    cls = _topology_class(name, mark)
    saved = {key.removeprefix(f"{mark}."): value for key, value in state.items() if key.startswith(f"{mark}.")}
    try:
        layout = Layout(_trunk_of(mark), cls(**options), units, width, attention)
        connection = Connection(layout, start="paper")  # a start they all have
        connection.load_state_dict(saved)
    except (RuntimeError, TypeError, ValueError, RewireError) as error:
        raise RewireError(f"the connection weights of '{mark}' do not fit their recipe, {recipe}: {error}") from error
    return connection.matrix().detach()


def _check_units(units: Any) -> None:
    """Units count up from 1 without gaps: the depth, and so the size of the matrix, is no larger than the recipe."""
    steps = [b - a for a, b in zip([0, *units], units, strict=False)]
    if not steps or steps[0] != 1 or any(step not in (0, 1) for step in steps):
        raise ValueError(f"units {units!r}")


def _topology_class(name: str, mark: str) -> Callable[..., Topology]:
    topologies()  # loads the topologies of other installed packages
    known = {cls.__name__: cls for cls in _subclasses(Topology)}
    if name not in known:
        raise UnknownName(
            f"'{mark}' was saved with the topology class '{name}', which is not known here; known are "
            f"{', '.join(sorted(known))}. Import or install the package that defines it."
        )
    return known[name]


def _subclasses(cls: type) -> list[type]:
    direct: list[type] = cls.__subclasses__()
    return direct + [below for child in direct for below in _subclasses(child)]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
