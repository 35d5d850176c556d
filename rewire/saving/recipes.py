"""Recipes: how models were rewired, as plain data; and rewiring a plain model by its recipes.

A trunk's recipe is what `Connection.recipe` returns: topology, options, units, width, attention units. Nothing in it is
executed: topologies are looked up among the known classes, and all else has to be what compiling gives.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rewire.attributes import CONNECTIONS
from rewire.copies import outside_inference_mode
from rewire.errors import RewireError, UnknownName, moved_trunk
from rewire.passes.checks import check_model, check_unwrapped
from rewire.passes.editing.connect import place
from rewire.passes.find import Found, Method, check_found, find
from rewire.passes.prepare import Prepared, prepare
from rewire.passes.rewrite import rewrite
from rewire.runtime.connection import Connection
from rewire.runtime.layout import Layout
from rewire.runtime.recipe import recipe_of
from rewire.topologies.base import Recurrence, Start, Topology
from rewire.topologies.registry import named_topology, topology_in
from rewire.trunk import Trunk

#: Plain data, as `Connection.recipe` returns it.
Recipe: TypeAlias = dict[str, Any]

#: Suffix of a state dict entry that holds a recipe.
EXTRA_STATE = "._extra_state"

_SHOWN = 12  # differing lines in a message
_MOST_UNITS = 4096  # of a trunk; its matrix has this many squared entries


def described(model: nn.Module) -> dict[str, Recipe]:
    """The recipe of each trunk of a rewired model, by the path of its connection.

    ``sites`` describes the trunk's residual adds in words, by which another model can be recognised.

    Raises:
        WrappedModel, RewireError: a trunk is not where it was, because something now wraps the model; or its topology
            is not registered.
    """
    recipes = {}
    for path, module in model.named_modules():
        if isinstance(module, Connection) and module.trunk is not None:
            if path != place(module.trunk):
                check_unwrapped(model)
                raise moved_trunk(module.layout.trunk, model, "save")
            recipe, topology = module.recipe(), module.layout.topology
            if topology_in(recipe) != topology:
                raise RewireError(
                    f"trunk '{module.layout.trunk}' cannot be saved: its topology is not registered: "
                    f"{topology}. Register its class with rewire.register_topology; its fields become the options."
                )
            recipes[path] = {**recipe, "sites": _sites(module.trunk)}
    return recipes


def layouts_of(recipes: object) -> dict[str, Layout]:
    """The layouts that recipes describe, by the path of a connection; nothing is built.

    Raises:
        RewireError: a recipe is damaged, or no rewiring gives it.
        UnknownName: a topology is not known here.
    """
    if not isinstance(recipes, dict) or not recipes:
        raise RewireError(f"the recipe is damaged: its trunks are {recipes!r}.")
    layouts = {path: layout_of(path, recipe, path) for path, recipe in recipes.items()}
    for path, layout in layouts.items():
        recipe, made = recipes[path], recipe_of(layout)
        recipe = {**recipe, "options": made["options"] | recipe["options"]}  # newer options get their defaults
        saved, here = (
            sorted(f"{key}: {json.dumps(r[key], sort_keys=True)}" for key in r.keys() - {"scales", "sites"})
            for r in (recipe, made)
        )
        if saved != here:
            raise RewireError(f"the recipe of '{path}' is not that of the model it gives:{difference(saved, here)}")
    return layouts


def check_shapes(path: str, recipe: object, layout: Layout, start: Start, saved: Mapping[str, Sequence[int]]) -> None:
    """Refuse a recipe that does not fit the saved weights, before anything of its size is built.

    Args:
        path, layout, start: of the connection.
        recipe: of the layout, for the message.
        saved: shapes of saved tensors, by name.

    Raises:
        RewireError: weights are missing, or have another shape.
    """
    try:
        with torch.device("meta"), _OnMeta():
            made = layout.parameters(start)
    except Exception:  # errors show when it is really made; topologies of others may need values
        return
    for name, value in made.items():
        shape = saved.get(f"{path}.{name}")
        if shape is None:
            raise misfit(path, recipe, ValueError(f"{name} is missing"))
        if list(shape) != list(value.shape):
            raise misfit(path, recipe, ValueError(f"{name} is {list(shape)} (saved), {list(value.shape)} (here)"))


class _OnMeta(TorchFunctionMode):
    """Replaces random tensors by tensors on the meta device."""

    def __torch_function__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        given = {name: value for name, value in (kwargs or {}).items() if name != "generator"}
        return function(*args, **(given | {"device": "meta"} if "device" in given else given))


@outside_inference_mode
def rewired_by(
    model: nn.Module,
    recipes: Any,
    start: Start,
    example_inputs: object = None,
    saved: Mapping[str, Sequence[int]] | None = None,
) -> nn.Module:
    """A copy of the plain ``model``, rewired by ``recipes``, with connection weights at their start.

    Args:
        model: as for `rewire.compile`; its parameters are shared.
        recipes: as they were read, by the path of a connection. Their ``sites`` are compared with the model's.
        start: of the connections.
        example_inputs: to run a copy on, if tracing does not find the residual adds of a recipe.
        saved: shapes of the weights that will be loaded, by name; None: they were compared.

    Raises:
        RewireError: a recipe is damaged or does not fit the weights; or the model is not the recipes', and the message
            shows what differs.
        UnknownName: a topology is not known here.
        AlreadyRewired, WrappedModel: the model is no plain one.
    """
    layouts_of(recipes)  # raises before the search, which may take long
    check_model(model)
    prepared = prepare(model, example_inputs)
    found = _found(prepared, recipes)
    check_found(found, prepared)
    here = {place(trunk): trunk for trunk in found.trunks.values()}
    _check_sites(model, recipes, here)
    layouts = [_layout(path, recipe, here[path]) for path, recipe in recipes.items()]
    for (path, recipe), layout in zip(recipes.items(), layouts, strict=True):
        if saved is not None:
            check_shapes(path, recipe, layout, start, saved)
        _check_made(path, recipe, layout, start)
    return rewrite(prepared, found, layouts, start)


def _found(prepared: Prepared, recipes: dict[str, Recipe]) -> Found:
    """The search result, over the ways to look at the model and at its loops, that the recipes fit."""
    methods: list[Method | None] = [None] if prepared.inputs is None else [None, "run"]
    for method, restart in itertools.product(methods, (False, True)):
        found = find(prepared, method, restart)
        if _fits(recipes, found.trunks.values()):
            return found
    return find(prepared, methods[-1])


def _check_made(path: str, recipe: object, layout: Layout, start: Start) -> None:
    """Refuse a recipe whose topology cannot be built, or has no matrix."""
    try:
        Connection(layout, start).matrix()
    except Exception as error:  # a topology may raise anything on options that it does not know
        raise misfit(path, recipe, error) from error


def _fits(recipes: dict[str, Recipe], trunks: Iterable[Trunk]) -> bool:
    """Whether the trunks have as many residual adds as the recipes say."""
    here = {place(trunk): len(trunk.sites) for trunk in trunks}
    return all(here.get(path) == len(recipe["units"]) for path, recipe in recipes.items())


def layout_of(path: str, recipe: Any, trunk: str, **facts: Any) -> Layout:
    """The layout that a recipe describes.

    Args:
        path: of the connection, for messages.
        recipe: as it was read.
        trunk: its name.
        facts: `Trunk.facts`, if the trunk is known.

    Raises:
        RewireError: the recipe is damaged, or its topology cannot have these options.
        UnknownName: the topology is not known here.
    """
    try:
        json.dumps(recipe, allow_nan=False)
        name, options, units = recipe["topology"], recipe["options"], recipe["units"]
        width, attention = recipe["width"], recipe["attention"]
        _check_sizes(units, width, attention)
        if not isinstance(name, str):
            raise ValueError(f"topology {name!r}")
        sites = recipe.get("sites", [])
        if len(sites) > _MOST_UNITS or not all(isinstance(site, str) for site in sites):
            raise ValueError(f"sites {sites!r}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RewireError(f"the recipe of '{path}' is damaged: {type(error).__name__}: {first_line(error)}") from error
    try:
        topology = named_topology(name, options)
        _check_switches(topology)
        return Layout(trunk, topology, units, width, attention, **facts)
    except UnknownName as error:
        raise UnknownName(f"'{path}' cannot be made: {error}") from error
    except Exception as error:  # a topology may raise anything on options that it does not know
        raise misfit(path, recipe, error) from error


def _check_switches(topology: Topology) -> None:
    """Refuse switches that are neither true nor false. Topologies check all other options themselves."""
    for name, parameter in inspect.signature(type(topology)).parameters.items():
        if isinstance(parameter.default, bool) and not isinstance(getattr(topology, name, False), bool):
            raise TypeError(f"{name}={getattr(topology, name)!r} is neither true nor false")


def misfit(path: str, recipe: object, error: BaseException) -> RewireError:
    """The error for a recipe that does not fit its weights."""
    told = str(recipe)[:1000]
    return RewireError(f"the connection weights of '{path}' do not fit their recipe, {told}: {first_line(error)}")


def is_recipe(name: str) -> bool:
    """Whether an entry of a state dict is the recipe of a connection."""
    return name.endswith(EXTRA_STATE) and CONNECTIONS in name.split(".")


def difference(saved: Sequence[str], here: Sequence[str]) -> str:
    """The lines that differ, as in a diff; empty if there are none."""
    lines = list(difflib.unified_diff(saved, here, "saved", "here", n=0, lineterm=""))
    lines = [line for line in lines[2:] if not line.startswith("@@")]
    more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "".join(f"\n  {line}" for line in lines[:_SHOWN] + more)


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _sites(trunk: Trunk) -> list[str]:
    """A line of text for each residual add."""
    return [
        f"{site.name}, width {site.width or 'unknown'}" + "".join(f", then {part}" for part in site.post)
        for site in trunk.sites
    ]


def _same(before: Sequence[str], sites: Sequence[str]) -> bool:
    """Whether lines of `_sites` agree, as far as both a run and a trace can know."""
    post_norm = [any(", then " in line for line in lines) for lines in (before, sites)]
    return [*map(_by_name, before)] == [*map(_by_name, sites)] and post_norm[0] == post_norm[1]


def _by_name(line: str) -> str:
    return re.sub(r", width (unknown|\d+)", "", line).partition(", then ")[0]


def _check_sites(model: nn.Module, recipes: dict[str, Recipe], here: dict[str, Trunk]) -> None:
    saved, found = [], []
    for path, recipe in recipes.items():
        sites = _sites(here[path]) if path in here else ["no trunk"]
        before = recipe.get("sites", sites if path in here else ["a trunk"])
        if _same(before, sites):
            continue
        saved += [f"{path}: {site}" for site in before]
        found += [f"{path}: {site}" for site in sites]
    if not recipes.keys() <= here.keys():
        found += [f"{path}: {site}" for path in here.keys() - recipes.keys() for site in _sites(here[path])]
    if saved != found:
        raise RewireError(
            f"{type(model).__name__} is not the model that was saved: its residual adds differ "
            f"(- saved, + here):{difference(saved, found)}"
        )


def _layout(path: str, recipe: object, trunk: Trunk) -> Layout:
    """The layout of ``trunk`` by its recipe. It has to be what compiling with that topology gives."""
    layout = layout_of(path, recipe, trunk.name, **trunk.facts)
    width = trunk.width
    single = tuple(range(1, len(trunk.sites) + 1))
    if layout.units not in (trunk.units, single) or layout.dims.width != width:
        raise RewireError(
            f"the saved recipe of '{path}' does not fit this model: it was saved with units {list(layout.units)} and "
            f"width {layout.dims.width}; here are {len(trunk.sites)} residual adds in {trunk.blocks} blocks, of width "
            f"{width}."
        )
    if trunk.post_norm and not isinstance(layout.topology, Recurrence):
        raise misfit(path, recipe, ValueError(f"{layout.topology} in a post-norm trunk"))
    return layout


def _check_sizes(units: object, width: object, attention: object) -> None:
    """Refuse units that do not count up from 1 without gaps: so the matrix is no larger than the recipe."""
    if not isinstance(units, list) or not all(type(unit) is int for unit in units):
        raise ValueError(f"units {str(units)[:200]}")
    steps = [b - a for a, b in zip([0, *units], units, strict=False)]
    if not steps or len(steps) > _MOST_UNITS or steps[0] != 1 or any(step not in (0, 1) for step in steps):
        raise ValueError(f"units {units[:8]!r}.. ({len(units)})")
    if type(width) is not int or width < 0:
        raise ValueError(f"width {width!r}")
    if not isinstance(attention, list) or not set(units).issuperset(attention):
        raise ValueError(f"attention {attention!r}")
