"""Finder: where an attention projects its queries, keys and values, by what patterns say, else by names and use."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from torch import nn

from rewire.conventions import FUSED_QKV, QKV, out_features
from rewire.errors import UnsupportedTopology
from rewire.mixes.fused_qkv import Fused
from rewire.passes.finding.adds import Add
from rewire.passes.finding.attention import order_in, projections_in
from rewire.passes.finding.flow import Flow, Op
from rewire.patterns import Pattern
from rewire.trunk import Site

#: Paths from the model's root, and the layout of a fused projection where it is known.
_Candidate: TypeAlias = tuple[tuple[str, ...], Fused | None]


@dataclasses.dataclass(frozen=True)
class Projections:
    """Where an attention projects its input.

    Attributes:
        where: path of the attention from the model's root.
        paths: the three projections (q, k, v), or one that is fused, or a torch.nn.MultiheadAttention.
        fused: layout of a fused projection's output; None for three apart.
        beside: other maps that read the input of the queries, the keys or the values: path -> ``q``, ``k`` or ``v``.
    """

    where: str
    paths: tuple[str, ...]
    fused: Fused | None
    beside: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def ways(self) -> dict[str, str]:
        """Path of each map that reads one of the three inputs -> ``q``, ``k`` or ``v``; of a fused one any of these."""
        return {**dict(zip(self.paths, "qkv", strict=False)), **self.beside}

    def error(self, why: str) -> UnsupportedTopology:
        return UnsupportedTopology(
            f"the attention '{self.where}' cannot have separate q/k/v inputs: {why}. Use a topology that "
            "reads one value, or register a pattern whose `qkv` names the projections that its forward calls."
        )


def find_projections(flow: Flow, site: Site, found: Iterable[Pattern], add: Add | None = None) -> Projections:
    """The projections of one attention, by what the patterns say, else by their usual names, else by their use.

    Args:
        flow, site: what the model computes, and the attention's residual add.
        found: patterns of the model, the most special first.
        add: that add in the flow, if it is known.

    Raises:
        UnsupportedTopology: they were not found; the message says what a pattern would have to name.
    """
    model = flow.model
    found = list(found)
    known = None if add is None else projections_in(flow, add)
    candidates = itertools.chain(_declared(model, site, found), _usual(flow, site), _used(flow, known and known[0]))
    region = () if add is None else add.region
    called = {scope.path for op in region for scope in op.scope.outward() if not scope.helper}
    # In a joint attention of two streams, modules with usual names may read the other one.
    for paths, fused in sorted(candidates, key=lambda candidate: not called.issuperset(candidate[0])):
        if fused is not None or not _needs_layout(model, paths):
            order = "" if fused is None or add is None else order_in(flow, add, paths[0])
            if order not in ("", "qkv"):
                raise UnsupportedTopology(
                    f"the attention '{site.name}' cannot have separate q/k/v inputs: '{paths[0]}' makes them in the "
                    f"order {', '.join(order)}. Let it make queries, keys and values in this order, or use a topology "
                    "that reads one value."
                )
            beside = _beside(model, site, found)
            if not beside and known is not None and known[0] == paths:
                beside = known[1]
            return Projections(site.name, paths, fused, beside)
    block = model.get_submodule(site.block)
    below = [name for name, child in block.named_modules() if name and isinstance(child, nn.Linear)]
    raise UnsupportedTopology(
        f"the attention '{site.name}' cannot have separate q/k/v inputs: what makes its queries, keys and values "
        f"was not found, by names or by use (linear maps of '{site.block}': {', '.join(below) or 'none'}). Use a "
        "topology that reads one value, or register a pattern with `qkv` set to the paths of the three below the block "
        "(or of a fused one, and `fused` to the layout of its output)."
    )


def _declared(model: nn.Module, site: Site, found: Iterable[Pattern]) -> Iterator[_Candidate]:
    """Paths that patterns name and the model has, and the layout that they give for a fused one."""
    for pattern in found:
        paths = _named(model, site, pattern.qkv)
        if paths is None:
            continue
        fused = None
        if pattern.fused and len(paths) == 1:
            holder = model.get_submodule(paths[0].rpartition(".")[0])
            fused = pattern.fused(model.get_submodule(paths[0]), holder)
        yield paths, fused


def _beside(model: nn.Module, site: Site, found: Iterable[Pattern]) -> dict[str, str]:
    """Other maps of the attention that a pattern names and the model has, and which input they read."""
    for pattern in found:
        paths = _named(model, site, tuple(pattern.beside))
        if paths is not None:
            return dict(zip(paths, pattern.beside.values(), strict=True))
    return {}


def _named(model: nn.Module, site: Site, names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Paths of modules that a pattern names, from the model's root; None if the model does not have all of them."""
    for block in _blocks(site) if names else ():
        branch = site.name.removeprefix(block).lstrip(".")
        paths = tuple(_join(block, name.format(branch=branch)) for name in names)
        if all(_submodule(model, path) is not None for path in paths):
            return paths
    return None


def _blocks(site: Site) -> Iterator[str]:
    """The block of a residual add, and the modules around it."""
    path = site.block
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _usual(flow: Flow, site: Site) -> Iterator[_Candidate]:
    """Paths of modules with the usual names, and the layout of a fused one by its use."""
    for paths in _usual_paths(flow.model, site):
        fused = None
        if _needs_layout(flow.model, paths):
            fused = fused_by_use(flow, paths[0], out_features(flow.model.get_submodule(paths[0])))
        yield paths, fused


def _used(flow: Flow, paths: tuple[str, ...] | None) -> Iterator[_Candidate]:
    """Paths of what makes the values that are used as queries, keys and values; the layout of a fused one, too."""
    if paths is None or _submodule(flow.model, paths[0]) is None:
        return
    fused = None
    if _needs_layout(flow.model, paths):
        fused = fused_by_use(flow, paths[0], out_features(flow.model.get_submodule(paths[0])))
    yield paths, fused


def _usual_paths(model: nn.Module, site: Site) -> list[tuple[str, ...]]:
    """Paths of modules with the usual names, those in the branch first."""
    modules = dict(model.get_submodule(site.block).named_modules())
    linear = [path for path, child in modules.items() if getattr(child, "weight", None) is not None]
    weighted = [path for path, child in modules.items() if next(child.parameters(), None) is not None]  # LoRA by hand
    parents = [path for path in modules if path == site.branch or path.startswith(f"{site.branch}.")]
    parents.append(site.branch.rpartition(".")[0])  # the branch is a projection itself
    found: list[tuple[str, ...]] = [(path,) for path in parents if isinstance(modules.get(path), nn.MultiheadAttention)]
    for parent in parents:
        prefix = f"{parent}." if parent else ""
        for names in QKV:
            paths = tuple(prefix + name for name in names)
            if set(paths).issubset(weighted):
                found.append(paths)
        children = [path for path in linear if path.startswith(prefix) and "." not in path[len(prefix) :]]
        found += [(path,) for path in children if FUSED_QKV.search(path[len(prefix) :])]
    return [tuple(_join(site.block, path) for path in paths) for paths in found]


def _join(*paths: str) -> str:
    return ".".join(filter(None, paths))


def _needs_layout(model: nn.Module, paths: tuple[str, ...]) -> bool:
    """Whether ``paths`` name one fused projection, which can be fed only if the layout of its output is known."""
    return len(paths) != 3 and not isinstance(_submodule(model, paths[0]), nn.MultiheadAttention)


def _submodule(root: nn.Module, path: str) -> nn.Module | None:
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def fused_by_use(flow: Flow, path: str, width: int | None) -> Fused | None:
    """Layout of a fused projection's output of this width, from how the forward that calls it takes it apart."""
    if width is None:
        return None
    made = [op for op in flow if op.scope.path == path]
    users = [user for op in made for user in flow.users[op] if user.scope.path != path]
    layouts = {_layout(user, width) for user in users}
    return layouts.pop() if len(layouts) == 1 else None


def _layout(user: Op, width: int) -> Fused | None:
    """How ``user`` takes the fused projection apart; None if it does not say."""
    arguments: list[Any] = list(user.sizes)
    if user.name == "split":
        return _by_sizes(arguments[0], width)
    if user.name == "chunk":
        return _thirds(width) if arguments[0] == 3 else None
    if user.name in ("view", "reshape"):
        flat = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], (list, tuple)) else arguments
        return _by_shape(list(flat), width) or _by_shape(list(user.shape or ()), width)
    return None


def _by_sizes(sizes: Any, width: int) -> Fused | None:
    """Layout of what is split into pieces of these sizes, or of one size, which may be known only at run time.

    Two pieces are thirds if the first is one: q, then k and v together. In multi-query attention it is larger.
    """
    if isinstance(sizes, (list, tuple)):
        if not all(isinstance(size, int) for size in sizes) or sum(sizes) != width:
            return None
        if len(sizes) == 3:
            return Fused(1, tuple(sizes))
        return _thirds(width) if 3 * sizes[0] == width and len(sizes) == 2 else None
    if isinstance(sizes, int) and 3 * sizes != width:
        return None
    return _thirds(width)


def _thirds(width: int) -> Fused | None:
    return Fused(1, (width // 3,) * 3) if width % 3 == 0 else None


def _by_shape(shape: list[Any], width: int) -> Fused | None:
    """Layout of (..., 3, heads, size), (..., heads, 3, size)."""
    after = next((shape[n + 1 :] for n in range(len(shape) - 1, 0, -1) if shape[n] == 3), [])
    size = 1
    for entry in after:
        if not isinstance(entry, int) or entry <= 0:
            return None
        size *= entry
    return Fused(width // (3 * size), (size,) * 3) if after and width % (3 * size) == 0 else None
