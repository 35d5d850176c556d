"""Pass: find the norm that reads a value first, in a flat graph.

A graph has no modules: there a norm is one or several operations, and is recognised, like a module, by what it
computes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import fx, nn

from rewire.mixes.norms import Inlined, Kind, kind_of
from rewire.passes.editing.fusions import Fusion
from rewire.passes.finding.flow import Op
from rewire.torch_internals import is_assertion

#: The submodule of a rewritten graph that holds the operations of its norms.
_MODULES = "depth_norms"
#: Names of operations that write to a tensor, or change how later ones run; ``and_`` is one of Python's operators.
_EFFECT = re.compile(
    r"(?!(and|or|not|is)_$).*[^_]_|i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor)|setitem"
    r"|_(enter|exit)_autocast|_set_grad_enabled"
)
#: Dtypes to and from which a norm may cast; it is recognised in float32.
_PRECISIONS = (torch.float16, torch.bfloat16, torch.float64)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Operations that may be a norm.

    Attributes:
        value: the value that they read.
        steps: the operations, in order; the last one computes the result.
        parameters: the weight and, if there are two, the bias.
    """

    value: Op
    steps: tuple[Op, ...]
    parameters: tuple[Op, ...]

    @property
    def result(self) -> fx.Node:
        node: fx.Node = self.steps[-1].node
        return node

    def function(self, changed: Callable[[Any], Any] = lambda argument: argument) -> fx.GraphModule:
        """The operations as a function of value and parameters; ``changed`` maps arguments that are not tensors."""
        graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
        for op in (self.value, *self.parameters):
            made[op.node] = graph.placeholder(op.node.name)
        for op in self.steps:
            copied = made[op.node] = graph.node_copy(op.node, made.__getitem__)
            copied.args = fx.node.map_aggregate(copied.args, changed)
            copied.kwargs = fx.node.map_aggregate(copied.kwargs, changed)
        graph.output(made[self.result])
        return fx.GraphModule(nn.Module(), graph)


@dataclasses.dataclass(frozen=True)
class FlatNorm:
    """A norm in a flat graph that a kernel can compute together with its input.

    Attributes:
        operations: the norm's operations.
        kind, eps: the norm that they compute.
    """

    operations: Candidate
    kind: Kind
    eps: float

    def insert(self, graph: fx.Graph) -> fx.Node:
        """Insert an `Inlined` at the graph's insertion point; its operations become a submodule."""
        root, path = graph.owning_module, f"{_MODULES}.{self.operations.result.name}"
        assert root is not None
        root.add_submodule(path, self.operations.function())
        given = [graph.node_copy(op.node) if op.node.op == "get_attr" else op.node for op in self.operations.parameters]
        return graph.call_function(Inlined, (self.kind, self.eps, graph.get_attr(path), *given))

    def replace(self, graph: fx.Graph, node: fx.Node) -> None:
        """Replace the norm's result by ``node``."""
        self.operations.result.replace_all_uses_with(node)
        for op in reversed(self.operations.steps):
            for user in [user for user in op.node.users if is_assertion(user.target)]:
                graph.erase_node(user)  # else an exported program would still compute the asserted tensor
            if not op.node.users:
                graph.erase_node(op.node)


def find_norm(value: Op, region: Collection[Op]) -> tuple[FlatNorm | None, Fusion | None]:
    """The first norm among the operations of ``region`` that reads ``value`` [..., D], and its entry for the report."""
    report = None
    for candidate in _candidates(value, region):
        kind, eps, why_not = _recognised(candidate)
        why_not = why_not or _obstacle(candidate)
        report = Fusion(candidate.steps[-1].scope.path, why_not)
        if kind is not None:
            return FlatNorm(candidate, kind, eps) if why_not is None else None, report
    return None, report


def _candidates(value: Op, region: Collection[Op]) -> Iterator[Candidate]:
    """Operations that compute a tensor of the value's shape from the value and one or two tensors [D]."""
    shape, made = value.shape, {value}
    if not shape or not isinstance(shape[-1], int):
        return
    for op in sorted(region, key=lambda op: op.index):
        live = [source for source in op.inputs if not source.constant]
        if op.weighted or op.leaf is not None or not live or not made.issuperset(live):
            continue
        made.add(op)
        behind = _behind(op, value)
        steps, parameters = [op for op in behind if op.inputs], [op for op in behind if not op.inputs]
        whole = all(len(step.node.all_input_nodes) == len(step.inputs) for step in steps)  # false if sizes are inputs
        if whole and op.shape == shape and len(parameters) in (1, 2) and all(p.shape == shape[-1:] for p in parameters):
            yield Candidate(value, tuple(steps), tuple(parameters))


def _behind(op: Op, value: Op) -> list[Op]:
    """``op`` and all operations between ``value`` and it, in order."""
    found, todo = {op}, [op]
    while todo:
        new = {source for source in todo.pop().inputs if source is not value} - found
        found |= new
        todo += new
    return sorted(found, key=lambda op: op.index)


def _recognised(candidate: Candidate) -> tuple[Kind | None, float, str | None]:
    """The kind and eps of the norm that a candidate computes; or None, and the reason why it is not one."""
    assert candidate.value.shape is not None
    function, why_not = candidate.function(_on_rows), "it does not say its eps"
    for eps in _numbers(candidate):
        kind, reason = kind_of(function, candidate.value.shape[-1], len(candidate.parameters), eps)
        if kind is not None:
            return kind, eps, None
        why_not = reason or why_not
    return None, 0, why_not


def _obstacle(candidate: Candidate) -> str | None:
    """Why a norm cannot be computed together with its input; None if it can."""
    dtype, result = candidate.value.dtype, candidate.steps[-1].dtype
    for parameter in candidate.parameters:
        if parameter.dtype != dtype:
            return f"its weights are {parameter.dtype}, and what it reads is {dtype}"
    if result != dtype:
        return f"it makes {result} of {dtype}"
    node = candidate.value.node.next
    while node is not candidate.result:
        if _EFFECT.fullmatch(_name(node)) or node.kwargs.get("inplace"):
            return f"'{node}', between what it reads and the norm, may change something in place"
        node = node.next
    return None


def _numbers(candidate: Candidate) -> list[float]:
    """The numbers in a candidate that may be the norm's eps."""
    given = [argument for op in candidate.steps for argument in (*op.node.args, *op.node.kwargs.values())]
    return list(dict.fromkeys(x for x in given if isinstance(x, float) and x > 0))


def _on_rows(argument: object) -> Any:
    """An operation's argument, changed so that it runs in float32 on a CPU."""
    if isinstance(argument, torch.device):
        return torch.device("cpu")
    return torch.float32 if argument in _PRECISIONS else argument


def _name(node: fx.Node) -> str:
    """Name of the called operation; in-place operations end with an underscore."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.partition(".")[0]
