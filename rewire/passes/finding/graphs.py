"""Finder's front end: a flat graph of torch.compile, torch.export or torch.fx, as operations and their modules.

The call in which an operation runs comes from ``nn_module_stack``, which such graphs keep; in our own traces (`follow`)
it is known from the traced calls.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from rewire.conventions import is_matrix, matrices
from rewire.passes.finding.flow import CONTAINERS, ELEMENTWISE, Flow, Op, Scope, kind_of, makes_alike, plain_name
from rewire.torch_internals import is_parameter_input

#: How Dynamo names the module that it compiles: a local or a global variable.
_ROOT = re.compile(r"^[LG]\['\w+'\]\.?")
#: Attributes and methods of tensors that return no tensor.
_METADATA = {"size", "dim", "numel", "shape", "dtype", "device", "ndim", "is_cuda", "stride"}


def flow_of(graph: fx.Graph, root: nn.Module, constants: Mapping[str, torch.Tensor] = MappingProxyType({})) -> Flow:
    """The operations of a flat graph.

    Args:
        graph: with shapes in the ``meta`` of its nodes, where they are known (see `tensor_of`).
        root: the module that its attributes belong to.
        constants: further tensors, by the names of nodes that get them.
    """
    outside = Scope(None, "")
    scopes: dict[tuple[str, ...], Scope] = {(): outside}
    made: dict[fx.Node, Op] = {}
    flow = Flow(root, [])
    for node in graph.nodes:
        if node.op == "output" or is_metadata(node):
            continue
        inputs = tuple(made[source] for source in node.all_input_nodes if source in made)
        value = constants.get(str(node.target)) if node.op == "get_attr" else None
        value = tensor_of(node, root) if value is None else value
        name = _name(node)
        inputs = () if makes_alike(name) and node.op != "call_module" else inputs
        op = Op(len(flow.ops), name, inputs, _scope(node, scopes), node.meta.get("place"), node=node)
        op.shape, op.dtype = (None, None) if value is None else (_sizes(value), value.dtype)
        weight = _is_weight(node, root) or str(node.target) in constants
        op.parameter = str(node.target) if node.op == "get_attr" and weight else ""
        op.constant = weight or (bool(inputs) and all(source.constant for source in inputs))
        if node.op == "call_module":
            op.leaf = root.get_submodule(str(node.target))
            op.scope, op.place = _call_of(op, str(node.target)), None
            op.matrices = matrices(op.leaf)
        elif op.name not in ELEMENTWISE and not op.constant:
            op.matrices = sum(source.constant and _is_matrix(source) for source in op.inputs)
        op.scale = node.kwargs.get("alpha")
        op.sizes = (*node.args[1:], *node.kwargs.values())
        op.selected = node.args[1:2] if name == "getitem" else None
        made[node] = op
        flow.ops.append(op)
    if isinstance(root, fx.GraphModule):
        flow.containers = _by_kind(scopes.values())
    else:
        known = dict(root.named_modules())
        flow.containers = lambda path: isinstance(known.get(path), CONTAINERS)
    return flow


def _by_kind(scopes: Iterable[Scope]) -> Callable[[str], bool]:
    """Whether a path is that of a container, by the class in the calls. Modules that are not called are containers."""
    kinds = {scope.path: scope.kind.rpartition(".")[-1] for scope in scopes}
    return lambda path: kinds.get(path, "ModuleList") in ("ModuleList", "ModuleDict", "Sequential")


def _call_of(op: Op, path: str) -> Scope:
    """The call of a module that is one operation."""
    kind = kind_of(op.leaf)
    return Scope(op.scope, path, op.leaf, kind, call=op.place, arguments={"": list(op.inputs)}, key=object())


def _scope(node: fx.Node, scopes: dict[tuple[str, ...], Scope]) -> Scope:
    if "scope" in node.meta:
        scopes[(str(node),)] = node.meta["scope"]
        own: Scope = node.meta["scope"]
        return own
    stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    keys: tuple[str, ...] = ()
    scope = scopes[()]
    for call, (path, cls) in stack.items():
        keys = (*keys, call)
        if keys not in scopes:
            kind = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
            scopes[keys] = Scope(scope, _ROOT.sub("", path), kind=kind, key=call)
        scope = scopes[keys]
    return scope


def _name(node: fx.Node) -> str:
    if node.op in ("placeholder", "get_attr"):
        return "input"
    if node.op == "call_module":
        return str(node.target).rpartition(".")[2]
    target: Any = node.target
    while isinstance(target, functools.partial):
        target = target.func
    if target is torch.einsum and len(node.all_input_nodes) == 1 and isinstance(node.args[0], str):
        before, _, behind = node.args[0].replace(" ", "").partition("->")
        return "permute" if sorted(before) == sorted(behind) else "einsum"
    return plain_name(target if isinstance(target, str) else getattr(target, "__name__", ""))


def is_metadata(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _METADATA
    return node.target is getattr and node.args[1] in _METADATA


def _is_matrix(op: Op) -> bool:
    """Whether a weight, or a value made of weights, is a matrix."""
    return is_matrix(op.shape) if op.shape is not None else any(map(_is_matrix, op.inputs))


def _is_weight(node: fx.Node, root: nn.Module) -> bool:
    """Whether ``node`` is a parameter or a buffer."""
    if node.op == "get_attr":
        return isinstance(attribute_at(root, str(node.target)), torch.Tensor)
    return is_parameter_input(node)


def tensor_of(node: fx.Node, root: nn.Module) -> torch.Tensor | None:
    """A tensor like that of ``node``, from the ``meta`` of `torch.compile`, `torch.export` or `FakeTensorProp`."""
    value = node.meta.get("example_value", node.meta.get("val"))
    if value is None and node.op == "get_attr":
        value = attribute_at(root, str(node.target))
    return value if isinstance(value, torch.Tensor) else None


def _sizes(x: torch.Tensor) -> torch.Size | None:
    """The shape as plain numbers, as comparing dynamic sizes would specialise them. None if a size is unknown."""
    sizes = [number(size) for size in x.shape]
    return None if None in sizes else torch.Size(sizes)


def number(value: object) -> Any:
    """A dynamic size as its present number, or None if that is unknown; other values unchanged."""
    if not isinstance(value, torch.SymInt):
        return value
    return value.node.hint if value.node.has_hint() else None


def attribute_at(root: nn.Module, path: str) -> Any:
    """The attribute at a path below a module; None if there is none."""
    value: Any = root
    for part in path.split("."):
        value = getattr(value, part, None)
    return value
