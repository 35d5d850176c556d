"""The last layers of a branch: the weights in which its output is linear, and the norms and scales after them.

The search goes back from the branch's output. It passes all that maps zero to zero (activations, dropout, views,
products, norms), and stops at weights and at gates such as a sigmoid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable

from torch import nn

from rewire.conventions import (
    LAST_LAYER,
    NOT_ZERO_AT_ZERO,
    is_adaptive_norm,
    is_linear,
    is_matrix,
    is_norm,
    matrices,
)
from rewire.passes.finding.flow import Op, Scope, reached

#: Operations whose operands are all followed: a sum is zero if all of them are, a product if one is.
_ALL_OPERANDS = {"mul", "multiply", "add", "sub", "cat", "stack"}
_MATRIX_PRODUCTS = {"matmul", "bmm", "mm"}


@dataclasses.dataclass
class LastLayers:
    """The weights in which a value is linear.

    Attributes:
        weights: names of the last weights.
        norms: paths of norm modules after them.
        scales: names of vectors that are multiplied on after them.
    """

    weights: set[str] = dataclasses.field(default_factory=set)
    norms: set[str] = dataclasses.field(default_factory=set)
    scales: set[str] = dataclasses.field(default_factory=set)


def last_layers_of(ops: Iterable[Op], stop: Callable[[Op], bool] = lambda op: False) -> LastLayers:
    """The weights in which the sum of ``ops`` is linear. The search ends where ``stop`` is true."""
    last = LastLayers()
    reached((op for op in ops if not stop(op)), lambda op: (o for o in _step(op, last) if not stop(o)))
    return last


def _step(op: Op, last: LastLayers) -> Collection[Op]:
    """Enter in ``last`` what ``op`` is of it. Returns the operations to go on with."""
    if op.parameter:
        if op.shape is not None and not is_matrix(op.shape):
            last.scales.add(op.parameter)
        return ()
    if op.leaf is not None:
        _enter_module(op.scope.path, op.leaf, last)
        return op.inputs[:1] if _goes_through(op.leaf) else ()
    norm = next((scope for scope in op.scope.modules() if scope.module is not None and is_norm(scope.module)), None)
    if norm is not None:
        last.norms.add(norm.path)
        return _inputs_of(norm, op)
    matrix = matrix_of(op)
    if matrix is not None:
        last.weights.add(matrix)
        return ()
    return _zero_preserving(op)


def _inputs_of(scope: Scope, op: Op) -> set[Op]:
    """The values from outside the call ``scope`` that ``op``, inside it, is made of."""
    inside = reached([op], lambda made: (o for o in made.inputs if scope.holds(o.scope) and not o.constant))
    return {source for made in inside for source in made.inputs if not scope.holds(source.scope)}


def _enter_module(path: str, module: nn.Module, last: LastLayers) -> None:
    """Add to ``last`` the weights in which a module's output is linear, as far as the module itself shows."""
    if is_linear(module):
        last.weights.add(f"{path}.weight")
    elif isinstance(module, nn.MultiheadAttention):
        last.weights.add(f"{path}.out_proj.weight")
    elif is_norm(module):
        last.norms.add(path)
    elif not matrices(module):
        last.scales.update(f"{path}.{name}" for name, _ in module.named_parameters())
    else:
        last.weights.update(f"{path}.{name}" for name in _last_by_name(module))


def _goes_through(module: nn.Module) -> bool:
    """Whether a module has no weight matrix and maps zero to zero, so that the search continues with its input."""
    return is_norm(module) or not (matrices(module) or NOT_ZERO_AT_ZERO.search(type(module).__name__))


def _last_by_name(module: nn.Module) -> list[str]:
    """The last weights of a module that was not looked into: those with such a name, else its very last one."""
    tables = {f"{path}.weight" for path, child in module.named_modules() if isinstance(child, nn.Embedding)}
    names = [n for n, p in module.named_parameters() if p.ndim >= 2 and not n.endswith("bias") and n not in tables]
    named = [name for name in names if LAST_LAYER.search(name.removesuffix(".weight"))]
    own = [name for name in named if "." not in name]
    return own or named[-1:] or names[-1:]


def _zero_preserving(op: Op) -> Collection[Op]:
    """The operands of an operation without weights that have to be zero for its result to be zero."""
    if NOT_ZERO_AT_ZERO.search(op.name):
        return ()
    if op.name in _ALL_OPERANDS:
        return op.inputs
    if op.name == "scaled_dot_product_attention":
        return op.inputs[2:3]
    if op.name in _MATRIX_PRODUCTS:
        return op.inputs[1:2]
    return op.inputs[:1]


def matrix_of(op: Op) -> str | None:
    """Name of the parameter that an operation uses as a matrix or a kernel."""
    if not op.matrices or op.name == "embedding":
        return None
    for source in op.inputs:
        weight: Op | None = source
        while weight is not None and weight.constant and not weight.parameter:
            weight = next(iter(weight.inputs), None)
        if weight is not None and weight.parameter and weight.shape is not None and len(weight.shape) >= 2:
            return weight.parameter
    return None


def depth_of(region: Iterable[Op]) -> int:
    """Number of weights on the longest path through ``region``."""
    longest: dict[Op, int] = {}
    for op in sorted(region, key=lambda op: op.index):
        before = max((longest.get(source, 0) for source in op.inputs), default=0)
        longest[op] = before + (_depth_of_module(op.leaf) if op.leaf is not None else int(matrix_of(op) is not None))
    return max(longest.values(), default=0)


def _depth_of_module(module: nn.Module) -> int:
    """Number of weights on the longest path through a module that was not looked into."""
    if is_linear(module):
        return 1
    matrices = [parameter for parameter in module.parameters() if parameter.ndim >= 2]
    if is_norm(module) or is_adaptive_norm(module) or not matrices:
        return 0
    return min(len(matrices), 2)  # an attention, an MLP, experts


def parameters_of(region: Iterable[Op]) -> set[str]:
    """Names of the parameters that operations use."""
    names: set[str] = set()
    for op in region:
        if op.leaf is not None:
            names.update(f"{op.scope.path}.{name}" for name, _ in op.leaf.named_parameters())
        weights = reached((source for source in op.inputs if source.constant), lambda weight: weight.inputs)
        names.update(weight.parameter for weight in weights if weight.parameter)
    return names
