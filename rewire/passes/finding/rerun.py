"""Finder: rerun a part of a flow on random numbers; gradients show what depends on what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from rewire.copies import seeded
from rewire.passes.finding.adds import between
from rewire.passes.finding.flow import Flow, Op
from rewire.passes.finding.graphs import is_metadata, number
from rewire.passes.finding.record import tensors_of
from rewire.torch_internals import pytree

#: Leading dimensions of tensors whose shape a trace does not know.
_TOKENS = (2, 5)


def gradients(
    flow: Flow,
    starts: Mapping[Op, int],
    ends: Sequence[Op],
    width: int,
    part: Callable[[Tensor], Tensor] = lambda x: x,
    masked: bool = False,
) -> list[list[Tensor | None]]:
    """The gradients of a random function of each end for each start; results of weights in between are constant.

    Args:
        flow: holds the operations.
        starts: operations, and their width (last dimension) for flows without shapes.
        ends: operations that are computed from them.
        width: of all other values, for flows without shapes.
        part: selects the part of an end that the function takes.
        masked: value of boolean masks that are computed elsewhere.

    Returns:
        For each end: for each start, a tensor of its shape, or None. An empty list if the operations do not run.
    """
    with torch.enable_grad(), seeded(0, flow.model):
        run = _Run(flow, starts, width, masked)
        try:
            return [run.gradients(end, part) for end in ends]
        except Exception:  # numbers and sizes may differ from the model's own
            return []


class _Run:
    def __init__(self, flow: Flow, starts: Mapping[Op, int], width: int, masked: bool) -> None:
        self.width, self.masked = width, masked
        self.ops = {op.node: op for op in flow if op.node is not None}
        self.leaves = {op: self._random(op, width).requires_grad_() for op, width in starts.items()}
        self.known: dict[Op, Any] = {op: leaf * 1 for op, leaf in self.leaves.items()}  # a copy to write to

    def gradients(self, end: Op, part: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        """The gradients of a random function of a part of an end, for each start."""
        ways = frozenset().union(*(between(start, end) for start in self.leaves))
        if not ways:
            return [None] * len(self.leaves)
        for op in sorted(ways - self.known.keys(), key=lambda op: op.index):
            self.known[op] = self._made(op)
        x = part(self.known[end])
        leaves = [*self.leaves.values()]
        return [*torch.autograd.grad(x, leaves, torch.randn_like(x), retain_graph=True, allow_unused=True)]

    def _made(self, op: Op) -> Any:
        """The result of an operation on known values."""
        if op.weighted:
            return self._random(op, self.width)
        if op.node is not None:
            return self._of_node(op.node)
        if op.call is None:  # another tensor with this memory was written to
            return self.known[op.inputs[0]]
        function, args, kwargs = pytree.tree_map(self._argument, op.call)
        result = function(*args, **kwargs)
        return tensors_of(result if op.item >= 0 else (args, kwargs))[op.item if op.item >= 0 else ~op.item]

    def _argument(self, value: object) -> Any:
        if isinstance(value, Op):
            return self.known[value] if value in self.known else self._random(value, self.width)
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def _of_node(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._value)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert node.op == "call_function" and callable(node.target), node.op
        return node.target(*args, **kwargs)

    def _value(self, node: fx.Node) -> Any:
        """The value of an argument: a tensor, or a number that is computed from sizes."""
        known = self.ops.get(node)
        if known is not None and not _is_size(node):
            return self._argument(known)
        size = node.meta.get("example_value", node.meta.get("val"))
        return number(size) if isinstance(size, torch.SymInt) else self._of_node(node)

    def _random(self, op: Op, width: int) -> Tensor:
        """Random numbers in place of an operation's result; zeros for integers."""
        shape = (*_TOKENS, width) if op.shape is None else op.shape
        dtype = op.dtype or torch.float32
        if dtype.is_floating_point or dtype.is_complex:
            exact = dtype in (torch.float64, torch.complex128)  # as the least number of their masks needs
            real, both = (torch.float64, torch.complex128) if exact else (torch.float32, torch.complex64)
            return torch.randn(shape, dtype=both if dtype.is_complex else real, device="cpu")
        return torch.full(shape, self.masked and dtype == torch.bool, dtype=dtype, device="cpu")


def _is_size(node: fx.Node) -> bool:
    """Whether a node is a size, or computed from sizes alone."""
    sources = node.all_input_nodes
    return is_metadata(node) or (node.op == "call_function" and bool(sources) and all(map(_is_size, sources)))
