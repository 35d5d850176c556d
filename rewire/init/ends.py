"""What ends a branch: the weights that its output is a linear function of, and the norms and scales after them.

A module's forward is traced and followed back from what it returns. The way goes through everything that maps zero to
zero (activations, dropout, views, products, norms) and stops at weights and at gates like a sigmoid.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import fx, nn

from rewire.errors import TraceError
from rewire.passes.trunks import Finder
from rewire.passes.values import Values
from rewire.tracing import PathTracer, trace
from rewire.tracing.forwards import parameters_of, plain_forward

_CONVOLUTIONS = nn.modules.conv._ConvNd
#: Names of last weights, for forwards that cannot be traced.
_LAST = re.compile(
    r"(^|\.)(\w*down_proj|output_linear|w2|c_proj|o_proj|out_proj|fc2|lin2|linear2|wo|proj|dense_4h_to_h|to_out|dense|"
    r"output|out)(\.|$)"
)
#: Functions and modules that do not map zero to zero.
_GATES = re.compile(r"sigmoid|softmax|softplus|exp|cos|topk|one_hot|ones|where", re.I)
_PRODUCTS = {operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_", "multiply"}
_SUMS = {operator.add, operator.iadd, operator.sub, operator.isub, torch.add, torch.sub, torch.cat, torch.stack}
_MATRIX_PRODUCTS = {operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm", "__matmul__"}
_LINEAR = {F.linear, F.conv1d, F.conv2d, F.conv3d, torch._C._nn.linear}


@dataclasses.dataclass(frozen=True)
class Ends:
    """What a value is linear in.

    Attributes:
        weights: paths of the last weights.
        norms: paths of norm modules after them.
        scales: paths of vectors that are multiplied on after them.
        inputs: names of the module's arguments that reach the value without a weight between; "" stands for the first.
    """

    weights: frozenset[str] = frozenset()
    norms: frozenset[str] = frozenset()
    scales: frozenset[str] = frozenset()
    inputs: frozenset[str] = frozenset()

    def __or__(self, other: Ends) -> Ends:
        fields = dataclasses.fields(Ends)
        return Ends(*(getattr(self, field.name) | getattr(other, field.name) for field in fields))

    def below(self, path: str) -> Ends:
        """The same with all paths below ``path``, and without inputs."""

        def joined(names: Iterable[str]) -> frozenset[str]:
            return frozenset(f"{path}.{name}" if name and path else path or name for name in names)

        return Ends(joined(self.weights), joined(self.norms), joined(self.scales))


def is_matrix_module(module: nn.Module) -> bool:
    """Whether ``module`` is a linear map or a convolution: its ``weight`` is [out, in, ..] or a transpose of that."""
    return isinstance(module, (nn.Linear, _CONVOLUTIONS)) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` is transformers' Conv1D, a linear map whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_norm(module: nn.Module) -> bool:
    """Whether ``module`` normalises, and holds nothing but gains and shifts."""
    named = "norm" in type(module).__name__.lower()
    return named and all(
        parameter.ndim == 1 or parameter.shape.numel() == max(parameter.shape) for parameter in module.parameters()
    )


def is_adaptive(module: nn.Module) -> bool:
    """Whether ``module`` normalises with gains and shifts that it computes from a condition."""
    return bool(re.match(r"Ada\w*Norm|Ada(ptive|Group|Layer|RMS)", type(module).__name__))


def _never(_module: nn.Module) -> bool:
    return False


#: What tells modules apart: classes of a module and all below it, names and shapes of parameters.
Structure: TypeAlias = tuple[tuple[str, type[nn.Module]] | tuple[str, torch.Size], ...]


def structure(module: nn.Module) -> Structure:
    """Equal for modules, as the layers of a network, that differ in nothing but their values and numbers."""
    modules = ((path, type(child)) for path, child in module.named_modules())
    return (*modules, *((name, parameter.shape) for name, parameter in module.named_parameters()))


class Anatomy:
    """Answers questions about the modules of one model, each from its traced forward; once for equal modules.

    Args:
        finder: what found the model's residual adds; it knows how to trace the model's modules.
        running: what `child_calls_recorded` yielded.
    """

    def __init__(self, finder: Finder, running: list[PathTracer]) -> None:
        self.finder, self.running = finder, running
        self._graphs: dict[tuple[Structure, FunctionType | None], list[Values]] = {}
        self._ends: dict[Structure, Ends] = {}
        self._lengths: dict[Structure, int] = {}

    def ends_of(self, values: Values, nodes: Sequence[fx.Node], stops: Callable[[nn.Module], bool] = _never) -> Ends:
        """What the sum of ``nodes`` of a traced forward is linear in; paths are below its module.

        The way ends before children that ``stops`` says.
        """
        ends, seen = Ends(), set[fx.Node]()
        todo = list(nodes)
        while todo:
            node = todo.pop()
            child = values.child(node)
            if node not in seen and not (child is not None and stops(child)):
                seen.add(node)
                found, sources = self._step(values, node)
                ends |= found
                todo += sources
        return ends

    def ends(self, module: nn.Module) -> Ends:
        """What the (first) value that ``module`` returns is linear in; paths are below the module."""
        key = structure(module)
        if key not in self._ends:
            self._ends[key] = Ends()  # a module that contains itself
            self._ends[key] = self._ends_of_module(module)
        return self._ends[key]

    def length(self, values: Values, region: Iterable[fx.Node]) -> int:
        """Number of weights on the longest way through ``region``, nodes of a traced forward."""
        longest: dict[fx.Node, int] = {}
        for node in sorted(region, key=values.order.__getitem__):
            before = max((longest.get(source, 0) for source in node.all_input_nodes), default=0)
            child = values.child(node)
            own = self.length_of(child) if child is not None else int(bool(_matrix_operand(values, node)))
            longest[node] = before + own
        return max(longest.values(), default=0)

    def length_of(self, module: nn.Module) -> int:
        """Number of weights on the longest way through ``module``."""
        key = structure(module)
        if key not in self._lengths:
            self._lengths[key] = 0
            self._lengths[key] = self._length_of_module(module)
        return self._lengths[key]

    # -- one module -------------------------------------------------------------------------------------------------

    def _ends_of_module(self, module: nn.Module) -> Ends:
        if is_matrix_module(module):
            return Ends(weights=frozenset({"weight"}))
        if isinstance(module, nn.MultiheadAttention):
            return Ends(weights=frozenset({"out_proj.weight"}))
        if is_norm(module):
            return Ends(norms=frozenset({""}), inputs=frozenset({""}))
        parameters = dict(module.named_parameters())
        if not parameters:
            gate = _GATES.search(type(module).__name__)
            return Ends() if gate else Ends(inputs=frozenset({""}))
        if _is_row(module):
            return self._ends_of_row(list(module.named_children()))
        if all(parameter.shape.numel() == max(parameter.shape, default=1) for parameter in parameters.values()):
            return Ends(scales=frozenset(parameters), inputs=frozenset({""}))
        ends = Ends()
        for values in self.graphs(module):
            ends |= self.ends_of(values, _returned(values))
        return ends if ends != Ends() else self._ends_by_name(module)

    def _ends_of_row(self, row: list[tuple[str, nn.Module]]) -> Ends:
        ends = Ends(inputs=frozenset({""}))
        while row and ends.inputs:
            name, module = row.pop()
            last = self.ends(module)
            ends = dataclasses.replace(ends | last.below(name), inputs=last.inputs)
        return ends

    def _ends_by_name(self, module: nn.Module) -> Ends:
        """For a forward that tells nothing: the weights that are named like a last one, else the last one."""
        below = [self.ends(child).below(name) for name, child in module.named_children()]
        names = [n for n, p in module.named_parameters() if p.ndim >= 2 and not n.endswith("bias")]
        named = {name for name in names if _LAST.search(name.removesuffix(".weight"))}
        own = {name for name in names if "." not in name}
        if own & named:
            return Ends(weights=frozenset(own & named))
        known = {name for ends in below for name in ends.weights}
        in_order = [name for name in names if name in known] or names
        return Ends(weights=frozenset(known & named or in_order[-1:]))

    def _length_of_module(self, module: nn.Module) -> int:
        if is_matrix_module(module):
            return 1
        if isinstance(module, nn.MultiheadAttention):
            return 2
        if _is_row(module):
            return sum(map(self.length_of, module.children()))
        matrices = [parameter for parameter in module.parameters() if parameter.ndim >= 2]
        if is_norm(module) or is_adaptive(module) or not matrices:
            return 0
        graphs = self.graphs(module)
        if graphs:
            return max(self.length(values, values.nodes) for values in graphs)
        return min(len(matrices), 2)  # an attention, an MLP, experts

    def all_graphs(self) -> list[Values]:
        """All that were traced so far."""
        return [values for graphs in self._graphs.values() for values in graphs]

    def graphs(self, module: nn.Module, method: FunctionType | None = None) -> list[Values]:
        """The values of each path through the forward (or a method) of ``module``; none if it cannot be traced."""
        key = structure(module), method
        if key not in self._graphs:
            function = method or self.finder.forwards.get(type(module))
            try:
                paths = trace(module, function=function, leaves=self.finder.leaves, running=self.running).paths
            except TraceError:
                paths = []
            self._graphs[key] = [Values(p.graph, module) for p in paths if p.graph is not None]
        return self._graphs[key]

    # -- one node ---------------------------------------------------------------------------------------------------

    def _step(self, values: Values, node: fx.Node) -> tuple[Ends, Sequence[fx.Node]]:
        """What ``node`` itself says, and the nodes on which the way goes on."""
        if node.op == "placeholder":
            return Ends(inputs=frozenset({str(node.target)})), ()
        if node.op == "get_attr":
            return _of_attribute(values, node), ()
        if node.op == "call_module":
            child = values.child(node)
            if child is None:  # a method that could not be traced along with the forward
                function = getattr(type(values.root), str(node.target))
                ends = self._ends_of_method(values.root, function)
                return dataclasses.replace(ends, inputs=frozenset()), _handed(node, function, ends.inputs)
            ends = self.ends(child)
            return ends.below(str(node.target)), _handed(node, plain_forward(type(child))[0], ends.inputs)
        matrix = _matrix_operand(values, node)
        if matrix is not None:
            return Ends(weights=frozenset({str(matrix.target)})), ()
        return Ends(), _zero_preserving(node)

    def _ends_of_method(self, module: nn.Module, method: FunctionType) -> Ends:
        ends = Ends()
        for values in self.graphs(module, method):
            ends |= self.ends_of(values, _returned(values))
        if ends != Ends():
            return ends
        called = [name for name in method.__code__.co_names if isinstance(getattr(module, name, None), nn.Module)]
        for name in called:
            child = module.get_submodule(name)
            if any(parameter.ndim >= 2 for parameter in child.parameters()):
                ends |= self.ends(child).below(name)
        return ends if ends != Ends() else Ends(inputs=frozenset({""}))


def _is_row(module: nn.Module) -> bool:
    """Whether the children of ``module`` run one after the other: those of a list that are all alike may not."""
    if isinstance(module, nn.ModuleList):
        return len({type(child) for child in module}) == len(module)
    return type(module).forward is nn.Sequential.forward


def _returned(values: Values) -> list[fx.Node]:
    return [node for index, node in values.returned() if index in (None, 0)]


def _zero_preserving(node: fx.Node) -> list[fx.Node]:
    """Operands of an operation without weights that have to be zero for its result to be zero."""
    name = str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if _GATES.search(name):
        return []
    if node.target in _PRODUCTS or node.target in _SUMS:
        return node.all_input_nodes
    position, keyword = (2, "value") if name == "scaled_dot_product_attention" else (0, "input")
    if node.target in _MATRIX_PRODUCTS:
        position, keyword = 1, "other"
    operand = node.args[position] if len(node.args) > position else node.kwargs.get(keyword)
    return [operand] if isinstance(operand, fx.Node) else []


def _handed(node: fx.Node, function: FunctionType, inputs: Iterable[str]) -> list[fx.Node]:
    """What the call ``node`` of ``function`` hands to the arguments ``inputs``."""
    names = [parameter.name for parameter in parameters_of(function)]
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    arguments[""] = next(iter(node.all_input_nodes), None)
    return [value for value in map(arguments.get, inputs) if isinstance(value, fx.Node)]


def _matrix_operand(values: Values, node: fx.Node) -> fx.Node | None:
    """The parameter that ``node`` multiplies with as a matrix or a kernel."""
    if node.target not in _LINEAR and node.target not in _MATRIX_PRODUCTS:
        return None
    operands = [source for source in node.all_input_nodes if source.op == "get_attr"]
    return next((o for o in operands if getattr(_parameter(values, o), "ndim", 0) >= 2), None)


def _of_attribute(values: Values, node: fx.Node) -> Ends:
    parameter = _parameter(values, node)
    if parameter is None or parameter.shape.numel() != max(parameter.shape, default=1):
        return Ends()
    return Ends(scales=frozenset({str(node.target)}))


def _parameter(values: Values, node: fx.Node) -> nn.Parameter | None:
    found: Any = values.root
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, nn.Parameter) else None
