"""Finder's front end: a flat graph of torch.compile, torch.export or torch.fx, as operations and the modules they are in.

``nn_module_stack``, which such graphs keep for each operation, says which module's forward it was written in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from rewire.passes.flow import ELEMENTWISE, Flow, Op, Scope, is_matrix, matrices, plain_name

#: How Dynamo writes the module that it compiles: a local or a global variable.
_ROOT = re.compile(r"^[LG]\['\w+'\]\.?")
#: What is asked of a tensor, and is no tensor.
_METADATA = {"size", "dim", "numel", "shape", "dtype", "device", "ndim", "is_cuda", "stride"}


def flow_of(graph: fx.Graph, root: nn.Module) -> Flow:
    """The operations of a flat graph.

    Args:
        graph: with shapes in the ``meta`` of its nodes (see `tensor_of`).
        root: the module that its attributes belong to.
    """
    outside = Scope(None, "")
    scopes: dict[tuple[str, ...], Scope] = {(): outside}
    made: dict[fx.Node, Op] = {}
    flow = Flow(root, [])
    for node in graph.nodes:
        if node.op == "output" or _is_metadata(node):
            continue
        inputs = tuple(made[source] for source in node.all_input_nodes if source in made)
        value = tensor_of(node, root)
        op = Op(len(flow.ops), _name(node), inputs, _scope(node, scopes), node=node)
        op.shape, op.dtype = (None, None) if value is None else (value.shape, value.dtype)
        op.constant = _is_weight(node, root) or (bool(inputs) and all(source.constant for source in inputs))
        if node.op == "call_module":
            op.leaf = _attribute(root, str(node.target))
            op.matrices = matrices(op.leaf) if isinstance(op.leaf, nn.Module) else 0
        elif op.name not in ELEMENTWISE and not op.constant:
            op.matrices = sum(source.constant and _is_matrix(source) for source in inputs)
        op.scale = node.kwargs.get("alpha")
        op.overwrites = str(getattr(node.target, "__name__", node.target)).partition(".")[0].endswith("_")
        made[node] = op
        flow.ops.append(op)
    kinds = {scope.path: scope.kind.rpartition(".")[-1] for scope in scopes.values()}
    flow.containers = lambda path: kinds.get(path, "ModuleList") in ("ModuleList", "ModuleDict", "Sequential")
    return flow


def _scope(node: fx.Node, scopes: dict[tuple[str, ...], Scope]) -> Scope:
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
        return str(node.target)
    return plain_name(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", ""))


def _is_metadata(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _METADATA
    return node.target is getattr and node.args[1] in _METADATA


def _is_matrix(op: Op) -> bool:
    return op.shape is not None and is_matrix(op.shape)


def _is_weight(node: fx.Node, root: nn.Module) -> bool:
    """Whether ``node`` is a parameter or a buffer."""
    if node.op == "get_attr":
        return isinstance(_attribute(root, str(node.target)), torch.Tensor)
    return node.op == "placeholder" and "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})


def tensor_of(node: fx.Node, root: nn.Module) -> torch.Tensor | None:
    """A tensor like that of ``node``: as `torch.compile`, `torch.export` and `FakeTensorProp` leave it in ``meta``."""
    value = node.meta.get("example_value", node.meta.get("val"))
    if value is None and node.op == "get_attr":
        value = _attribute(root, str(node.target))
    return value if isinstance(value, torch.Tensor) else None


def shape_of(node: fx.Node, root: nn.Module) -> torch.Size | None:
    """Shape of the tensor that ``node`` is; None if it is not known."""
    value = tensor_of(node, root)
    return None if value is None else value.shape


def _attribute(root: nn.Module, path: str) -> Any:
    value: Any = root
    for part in path.split("."):
        value = getattr(value, part, None)
    return value
