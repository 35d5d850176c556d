"""Finder: which dimension of a trunk's states holds the channels. Weights that are applied to the states tell.

A linear map mixes the last dimension, a convolution the one before its positions, and a norm has gains along it. The
views between a state and the first such weights that read it are followed back to the state.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from rewire.conventions import NORM, is_norm
from rewire.passes.finding.adds import CASTS, TURNS, Add
from rewire.passes.finding.flow import ELEMENTWISE, Flow, Op, given
from rewire.passes.finding.graphs import attribute_at
from rewire.trunk import Site

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONVOLUTION = re.compile(r"^_?conv(?:_transpose|_transposed)?(\d)d")
_OVER_CHANNELS = ("batch_norm", "group_norm", "instance_norm")
_OVER_THE_LAST = ("layer_norm", "rms_norm", "native_layer_norm")
_PARTS = frozenset({"cat", "concat", "concatenate", "chunk", "split", "tensor_split", "narrow", "pad"})
_SIZES = (2, 3, 5, 7, 11, 13, 17)  # of dimensions: all different, so that a view shows where each one goes


def channels_of(flow: Flow, add: Add) -> tuple[int | None, int]:
    """Width of the stream (None if unknown) and its channel dimension, from the operations that read the state."""
    if add.shape is not None:
        for start, ops in ((add.op, add.post), (add.source, sorted(add.region, key=lambda op: op.index))):
            dim = None if start.shape is None or len(start.shape) != len(add.shape) else _first(flow, start, ops)
            turned = start is add.state is not add.shortcut and not add.flattened
            if dim is not None and turned:  # perhaps the sum is in another order
                dims = [n for n in range(-len(add.shape), 0) if _followed(add.shortcut, n, start) == dim]
                dim = dims[0] if dims else None
            if dim is not None:
                return int(add.shape[dim]), dim
    return _by_modules(flow, add)


def _first(flow: Flow, start: Op, ops: Iterable[Op]) -> int | None:
    """The dimension of ``start`` that the first weights among ``ops`` take as channels."""
    for op in ops:
        for source in op.inputs:
            dim = None if source.constant or source.shape is None else _told(flow, op, source)
            dim = None if dim is None else _followed(source, dim, start)
            if dim is not None:
                return dim
    return None


def _told(flow: Flow, op: Op, source: Op) -> int | None:
    """An operand's channel dimension, counted from the end; None if the operation does not tell."""
    assert source.shape is not None
    dims = len(source.shape)
    weighted = any(other.constant for other in op.inputs)
    if op.leaf is not None:
        width, dim = _of_module(type(op.leaf).__name__, op.leaf) or (0, -1)
        dim -= dims * (dim >= 0)
        return dim if width and -dim <= dims and source.shape[dim] == width else None
    if convolution := _CONVOLUTION.match(op.name):
        return -1 - int(convolution[1]) if weighted else None
    if op.name in _OVER_CHANNELS:
        return 1 - dims if dims > 1 else None
    if op.name in _OVER_THE_LAST:
        args, kwargs = given(op)
        shape: Any = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        return -1 if isinstance(shape, int) or len(shape) == 1 else None
    if op.name == "linear" or (op.name in ("matmul", "mm", "bmm") and source is op.inputs[0]):
        return -1 if weighted else None
    if op.name == "matmul" and op.inputs[0].constant:
        return -2
    return _gained(flow, op, source) if op.name in ELEMENTWISE and weighted else None


def _gained(flow: Flow, op: Op, source: Op) -> int | None:
    """The dimension along which ``source`` gets one gain or shift per channel."""
    assert source.shape is not None
    for gains in (other for other in op.inputs if other.constant):
        long = [n for n, size in enumerate(reversed(gains.shape or ()), start=1) if size > 1]
        if len(long) == 1 and long[0] <= len(source.shape) and _learned(flow, gains):
            return -long[0]
    return None


def _learned(flow: Flow, op: Op) -> bool:
    """Whether a constant is made of parameters, rather than of buffers."""
    if op.parameter:
        return isinstance(attribute_at(flow.model, op.parameter), nn.Parameter)
    return any(_learned(flow, source) for source in op.inputs)


def _followed(op: Op, dim: int, start: Op) -> int | None:
    """The dimension of ``start`` that becomes ``dim`` of ``op``; None if unknown."""
    todo, seen = [(op, dim)], {(op, dim)}
    while todo:
        op, dim = todo.pop()
        if op is start:
            return dim
        for source in reversed(() if op.matrices else op.inputs):
            known = source.index >= start.index and source.shape is not None
            before = _before(op, source, dim) if known else None
            if before is not None and (source, before) not in seen:
                seen.add((source, before))
                todo.append((source, before))
    return None


def _before(op: Op, source: Op, dim: int) -> int | None:
    """The dimension of an operand that becomes ``dim`` of the result."""
    made, shape = op.shape, source.shape
    assert made is not None and shape is not None
    if -dim > len(made):  # broadcast
        return None
    if op.name in TURNS:
        return _turned(op, source, dim)
    if op.name in _PARTS and len(made) == len(shape):  # perhaps along this dimension: an edge's nodes, shifted tokens
        return dim
    if made.numel() == shape.numel() and made != shape:  # the values stay in order
        behind = made[dim:].numel()
        alike = [n - len(shape) for n in range(len(shape)) if (shape[n], shape[n:].numel()) == (made[dim], behind)]
        return alike[0] if len(alike) == 1 else None
    return dim if -dim <= len(shape) and shape[dim] == made[dim] else None


def _turned(op: Op, source: Op, dim: int) -> int | None:
    """`_before` for a view that changes the order: apply it to a tensor whose sizes are all different."""
    assert source.shape is not None
    sizes = _SIZES[: len(source.shape)]
    args, kwargs = given(op)
    function: Any = op.call[0] if op.call else getattr(op.node, "target", None)
    own = source if op.call else source.node
    if isinstance(function, str):
        function = getattr(torch.Tensor, function)
    probe = torch.empty(sizes, device="meta")
    with contextlib.suppress(Exception):
        made = function(*(probe if arg is own else arg for arg in args), **kwargs)
        return sizes.index(made.shape[dim]) - len(sizes)
    return dim if op.shape == source.shape else None


def are_turned(adds: Sequence[Add], passages: Sequence[Sequence[Op]], sites: Sequence[Site]) -> bool:
    """Whether views between two adds move the channels to another dimension and back, with no add in between."""
    for add, passage, site in zip(adds[1:], passages[1:], sites[1:], strict=True):
        sizes, wanted = add.shape, site.channel_dim
        dim: int | None = None if sizes is None else wanted - len(sizes) * (wanted >= 0)
        for op in reversed(passage):
            if dim is None or op.shape is None or not op.inputs or op.inputs[0].shape is None:
                break
            dim, dims = _before(op, op.inputs[0], dim), len(op.inputs[0].shape)
            if dim is not None and wanted not in (dim, dim + dims):
                return True
    return False


def _by_modules(flow: Flow, add: Add) -> tuple[int | None, int]:
    """`channels_of` for traces, which know no shapes: by the modules that follow an add and read its state."""
    block = add.block()[-1]
    for op in (*add.post, *_readers(flow, add.state)):
        below = block.holds(op.scope) and op.scope.path != block.path
        told = _of_module(op.scope.path, op.scope.module) if below and op.scope.module is not None else None
        if told is not None and add.shape is None:
            return told
        sizes = add.shape or ()
        alike = [n - len(sizes) for n, size in enumerate(sizes) if told is not None and size == told[0]]
        if told is not None and alike:
            return told[0], told[1] if told[1] in alike else alike[-1]
    return None, -1


def _readers(flow: Flow, state: Op) -> Iterator[Op]:
    """The readers of a state, or of a cast of it."""
    for user in flow.users[state]:
        yield from _readers(flow, user) if user.name in CASTS else (user,)


def _of_module(path: str, module: nn.Module) -> tuple[int, int] | None:
    """Channels of a module that normalises or maps them, and their dimension."""
    if not any(True for _ in module.parameters()):
        return None
    named = NORM.search(f"{path.rpartition('.')[-1]} {type(module).__name__}")
    return _of_norm(module) if named or is_norm(module) else _of_map(module)


def _of_norm(module: nn.Module) -> tuple[int, int] | None:
    """Channels of a norm, or of the norm in an adaptive one, and their dimension."""
    for child in module.modules():
        kind, weight = type(child).__name__.lower(), getattr(child, "weight", None)
        shape: Any = getattr(child, "normalized_shape", None) or getattr(weight, "shape", ())
        shape = (shape,) if isinstance(shape, int) else shape
        if not is_norm(child) or len(shape) != 1:
            continue
        if isinstance(child, nn.GroupNorm):
            return int(shape[0]), 1
        spatial = next((n for n in (2, 3) if f"{n}d" in kind), 0)
        if getattr(child, "data_format", "") == "channels_first":
            spatial = 2
        return int(shape[0]), -1 - spatial
    return None


def _of_map(module: nn.Module) -> tuple[int, int] | None:
    """Channels that the first linear map or convolution in a module reads, and their dimension."""
    for child in module.modules():
        if isinstance(child, nn.Linear):
            return child.in_features, -1
        if isinstance(child, CONVOLUTIONS):
            return child.in_channels, -1 - len(child.kernel_size)
    return None
