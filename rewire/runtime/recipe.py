"""The recipe of a trunk: what its connection weights mean, as plain data that is saved with them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from math import inf
from typing import Any

from rewire.errors import RewireError
from rewire.placement import is_dtensor
from rewire.runtime.layout import Layout
from rewire.topologies.registry import name_and_options

_LARGEST = 1 << 24  # bytes: thousands of trunks
_DEEPEST = 32  # levels of nested lists and objects


def recipe_of(layout: Layout) -> dict[str, Any]:
    """A layout as plain data."""
    name, options = name_and_options(layout.topology)
    return {
        "topology": name,
        "options": options,
        "units": list(layout.units),
        "width": layout.dims.width,
        "attention": sorted(layout.dims.attention),
    }


def read_recipe(state: Any) -> dict[str, Any]:
    """The recipe that `Connection.get_extra_state` wrote, even if the whole state dict was cast to another dtype.

    Raises:
        RewireError: the recipe is damaged, or it is the digest that a model from `rewire.eject` writes in its place.
    """
    state = state.to_local() if is_dtensor(state) else state
    try:
        text = bytes(state.byte().tolist())
        if re.fullmatch(rb"[0-9a-f]{32}", text):
            raise RewireError(
                "these weights are those of an ejected model, which only its own files can read. Load them by the "
                "class in these files; `coefficients(model)` of its rewire_runtime.py shows what was learned."
            )
        return parsed(text)
    except (AttributeError, TypeError, ValueError) as error:
        raise RewireError(f"the recipe among the weights is damaged: {type(error).__name__}: {error}") from error


def parsed(text: bytes) -> dict[str, Any]:
    """Parse the JSON object that is saved with weights, if it is no larger or deeper than rewire would write.

    Raises:
        ValueError: it is not such an object.
    """
    if len(text) > _LARGEST:
        raise ValueError("no recipe is as large")
    try:
        found = json.loads(text)
    except RecursionError:
        found = None
    level = [found]
    for _ in range(_DEEPEST):
        level = [part for each in level if isinstance(each, (dict, list)) for part in _parts(each)]
    if level or not isinstance(found, dict):
        raise ValueError("it is no object, or one deep in others")
    return found


def _parts(whole: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return whole.values() if isinstance(whole, dict) else whole


def scales_in(recipe: Any) -> dict[str, float]:
    """The scales of weights in a file with this recipe; files of old versions have none."""
    scales = recipe.get("scales", {})
    if not isinstance(scales, dict) or not all(isinstance(unit, float) and 0 < unit < inf for unit in scales.values()):
        raise RewireError(f"the recipe among the weights is damaged: scales {scales!r}.")
    return scales
