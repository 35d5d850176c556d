"""Finder: where an attention projects its queries, keys and values, by what patterns say, else by names and use."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from rewire.errors import TraceError, UnsupportedTopology
from rewire.kernels.fused_qkv import Fused
from rewire.patterns import Pattern
from rewire.tracing import Leaf, trace

#: Usual names of the three projections.
_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
    ("wq", "wk", "wv"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
)
#: And of one that is fused.
_FUSED = re.compile(r"qkv|(^|_)(c_attn|in_proj|query_key_value)(_|$)", re.I)

#: Paths below the block, and the layout of a fused projection where it is known.
_Candidate: TypeAlias = tuple[tuple[str, ...], Fused | None]


@dataclasses.dataclass(frozen=True)
class Projections:
    """Where an attention projects its input.

    Attributes:
        block: the module whose forward holds the residual add.
        where: path of the attention from the model's root, for messages.
        paths: below the block, the three projections (q, k, v), or one that is fused, or a torch.nn.MultiheadAttention.
        fused: layout of a fused projection's output; None for three apart.
        leaves: library attributes that tracing replaces.
        forwards: module class -> function that is traced in place of its forward.
    """

    block: nn.Module
    where: str
    paths: tuple[str, ...]
    fused: Fused | None
    leaves: Sequence[Leaf]
    forwards: Mapping[type[nn.Module], FunctionType]

    def error(self, why: str) -> UnsupportedTopology:
        return UnsupportedTopology(
            f"the attention '{self.where}' cannot read its queries, keys and values apart: {why}. Use a topology that "
            "reads one value, or register a pattern whose `qkv` names the projections that its forward calls."
        )


def find_projections(
    block: nn.Module,
    path: str,
    branch: str,
    found: Iterable[Pattern],
    leaves: Sequence[Leaf],
    forwards: Mapping[type[nn.Module], FunctionType],
) -> Projections:
    """The projections of one attention, by what the patterns say, else by their usual names and use.

    Args:
        block: the module whose forward holds the attention's residual add.
        path: its path from the model's root.
        branch: path of the attention below the block.
        found: patterns of the model, the most special first.
        leaves: see `Projections`.
        forwards: see `Projections`.

    Raises:
        UnsupportedTopology: they were not found; the message says what a pattern would have to name.
    """
    where = f"{path}.{branch}" if path else branch
    for paths, fused in itertools.chain(_declared(block, branch, found), _usual(block, branch, leaves, forwards)):
        if fused is not None or not _needs_layout(block, paths):
            return Projections(block, where, paths, fused, leaves, forwards)
    below = [name for name, child in block.named_modules() if name and isinstance(child, nn.Linear)]
    raise UnsupportedTopology(
        f"the attention '{where}' cannot read its queries, keys and values apart: no projections with usual names were "
        f"found (linear maps of '{path}': {', '.join(below) or 'none'}). Use a topology that reads one value, or "
        "register a pattern with `qkv` set to the paths of the three below the block (or of a fused one, and `fused` "
        "to the layout of its output)."
    )


def _declared(block: nn.Module, branch: str, found: Iterable[Pattern]) -> Iterator[_Candidate]:
    """Paths that patterns name and the block has, and the layout that they give for a fused one."""
    for pattern in found:
        paths = tuple(text.format(branch=branch) for text in pattern.qkv)
        if not paths or any(_submodule(block, path) is None for path in paths):
            continue
        fused = None
        if pattern.fused and len(paths) == 1:
            holder = block.get_submodule(paths[0].rpartition(".")[0])
            fused = pattern.fused(block.get_submodule(paths[0]), holder)
        yield paths, fused


def _usual(
    block: nn.Module, branch: str, leaves: Sequence[Leaf], forwards: Mapping[type[nn.Module], FunctionType]
) -> Iterator[_Candidate]:
    """Paths of modules with the usual names, and the layout of a fused one by its use."""
    for paths in _usual_paths(block, branch):
        yield paths, _fused_by_use(block, paths[0], leaves, forwards) if _needs_layout(block, paths) else None


def _usual_paths(block: nn.Module, branch: str) -> list[tuple[str, ...]]:
    """Paths below the block of modules with the usual names, those in the branch first."""
    modules = dict(block.named_modules())
    linear = [path for path, child in modules.items() if getattr(child, "weight", None) is not None]
    parents = [path for path in modules if path == branch or path.startswith(f"{branch}.")]
    parents.append(branch.rpartition(".")[0])  # the branch is a projection itself
    found: list[tuple[str, ...]] = [(path,) for path in parents if _is_multihead(block, path)]
    for parent in parents:
        prefix = f"{parent}." if parent else ""
        for names in _NAMES:
            paths = tuple(prefix + name for name in names)
            if set(paths).issubset(linear):
                found.append(paths)
        children = [path for path in linear if path.startswith(prefix) and "." not in path[len(prefix) :]]
        found += [(path,) for path in children if _FUSED.search(path[len(prefix) :])]
    return found


def _needs_layout(block: nn.Module, paths: tuple[str, ...]) -> bool:
    """Whether ``paths`` name one fused projection, which can be fed only if the layout of its output is known."""
    return len(paths) != 3 and not _is_multihead(block, paths[0])


def _is_multihead(block: nn.Module, path: str) -> bool:
    return isinstance(_submodule(block, path), nn.MultiheadAttention)


def _submodule(root: nn.Module, path: str) -> nn.Module | None:
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def _fused_by_use(
    block: nn.Module, path: str, leaves: Sequence[Leaf], forwards: Mapping[type[nn.Module], FunctionType]
) -> Fused | None:
    """Layout of a fused projection's output, from how the forward that calls it takes it apart."""
    parent, _, name = path.rpartition(".")
    attention = block.get_submodule(parent)
    width = _rows(block.get_submodule(path))
    if width is None:
        return None
    try:
        traced = trace(attention, function=forwards.get(type(attention)), leaves=leaves)
    except TraceError:
        return None
    calls = [n for p in traced.paths if p.graph is not None for n in p.graph.nodes if n.target == name]
    layouts = {_layout(user, node, width) for node in calls for user in node.users}
    return layouts.pop() if len(layouts) == 1 else None


def _rows(projection: nn.Module) -> int | None:
    """Number of outputs of a linear map, nn.Linear or transformers' Conv1D."""
    rows = getattr(projection, "out_features", getattr(projection, "nf", None))
    return rows if isinstance(rows, int) else None


def _layout(user: fx.Node, node: fx.Node, width: int) -> Fused | None:
    """How ``user`` takes the fused projection ``node`` apart; None if it does not say."""
    if user.args[:1] != (node,):
        return None
    arguments: list[Any] = [*user.args[1:], *user.kwargs.values()]
    if user.target in ("split", torch.split):
        return _by_sizes(arguments[0], width)
    if user.target in ("chunk", torch.chunk):
        return _thirds(width) if arguments[0] == 3 else None
    if user.target in ("view", "reshape"):
        flat = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], (list, tuple)) else arguments
        return _by_shape(list(flat), width)
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
