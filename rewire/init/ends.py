"""What ends a branch: the weights that its output is a linear function of, and the norms and scales after them.

The operations are followed back from a value. The way goes through everything that maps zero to zero (activations,
dropout, views, products, norms) and stops at weights and at gates like a sigmoid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

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
from rewire.passes.flow import Op, Scope

#: What is zero only if all operands are (sums), or as soon as one is (products).
_ALL_OPERANDS = {"mul", "multiply", "add", "sub", "cat", "stack"}
_MATRIX_PRODUCTS = {"matmul", "bmm", "mm"}


@dataclasses.dataclass(frozen=True)
class Ends:
    """What a value is linear in.

    Attributes:
        weights: names of the last weights.
        norms: paths of norm modules after them.
        scales: names of vectors that are multiplied on after them.
    """

    weights: frozenset[str] = frozenset()
    norms: frozenset[str] = frozenset()
    scales: frozenset[str] = frozenset()

    def __or__(self, other: Ends) -> Ends:
        fields = dataclasses.fields(Ends)
        return Ends(*(getattr(self, field.name) | getattr(other, field.name) for field in fields))


def ends_of(ops: Iterable[Op], stop: Callable[[Op], bool] = lambda op: False) -> Ends:
    """What the sum of ``ops`` is linear in; the way ends before operations that ``stop`` says."""
    ends, seen, todo = Ends(), set[Op](), list(ops)
    while todo:
        op = todo.pop()
        if op in seen or stop(op):
            continue
        seen.add(op)
        found, sources = _step(op)
        ends |= found
        todo += sources
    return ends


def _step(op: Op) -> tuple[Ends, Sequence[Op]]:
    """What one operation says, and the operations on which the way goes on."""
    if op.parameter:
        vector = op.shape is not None and not is_matrix(op.shape)
        return (Ends(scales=frozenset({op.parameter})) if vector else Ends()), ()
    if op.leaf is not None:
        return _of_module(op.scope.path, op.leaf), op.inputs[:1] if _goes_through(op.leaf) else ()
    norm = next((scope for scope in op.calls() if scope.module is not None and is_norm(scope.module)), None)
    if norm is not None:
        return Ends(norms=frozenset({norm.path})), _entering(op, norm)
    matrix = matrix_of(op)
    if matrix is not None:
        return Ends(weights=frozenset({matrix})), ()
    return Ends(), _zero_preserving(op)


def _entering(op: Op, scope: Scope) -> list[Op]:
    """The values from outside ``scope`` that ``op``, inside, is made of."""
    found, todo, seen = list[Op](), [op], set[Op]()
    while todo:
        for source in todo.pop().inputs:
            if source in seen:
                continue
            seen.add(source)
            if not scope.holds(source.scope):
                found.append(source)
            elif not source.constant:
                todo.append(source)
    return found


def _of_module(path: str, module: nn.Module) -> Ends:
    """What the value that a module returns is linear in, as far as the module itself tells."""
    if is_linear(module):
        return Ends(weights=frozenset({f"{path}.weight"}))
    if isinstance(module, nn.MultiheadAttention):
        return Ends(weights=frozenset({f"{path}.out_proj.weight"}))
    if is_norm(module):
        return Ends(norms=frozenset({path}))
    if not matrices(module):
        return Ends(scales=frozenset(f"{path}.{name}" for name, _ in module.named_parameters()))
    return Ends(weights=frozenset(f"{path}.{name}" for name in _last_by_name(module)))


def _goes_through(module: nn.Module) -> bool:
    """Whether a module maps zero to zero without a weight that it ends with."""
    return is_norm(module) or not (matrices(module) or NOT_ZERO_AT_ZERO.search(type(module).__name__))


def _last_by_name(module: nn.Module) -> list[str]:
    """For a module that was not looked into: the weights that are named like a last one, else the last one."""
    tables = {f"{path}.weight" for path, child in module.named_modules() if isinstance(child, nn.Embedding)}
    names = [n for n, p in module.named_parameters() if p.ndim >= 2 and not n.endswith("bias") and n not in tables]
    named = [name for name in names if LAST_LAYER.search(name.removesuffix(".weight"))]
    own = [name for name in named if "." not in name]
    if own:
        return own
    below = [list(child.named_parameters(prefix=path)) for path, child in module.named_children()]
    last = [[n for n, _ in parameters if n in named][-1:] for parameters in below]
    return [name for row in last for name in row][-1:] or named[-1:] or names[-1:]


def _zero_preserving(op: Op) -> Sequence[Op]:
    """Operands of an operation without weights that have to be zero for its result to be zero."""
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
    """Name of the parameter that an operation multiplies with as a matrix or a kernel."""
    if not op.matrices or op.name in ("embedding",):
        return None
    for source in op.inputs:
        weight: Op | None = source
        while weight is not None and weight.constant and not weight.parameter:
            weight = next(iter(weight.inputs), None)
        if weight is not None and weight.parameter and weight.shape is not None and len(weight.shape) >= 2:
            return weight.parameter
    return None


def length(region: Iterable[Op]) -> int:
    """Number of weights on the longest way through ``region``."""
    longest: dict[Op, int] = {}
    for op in sorted(region, key=lambda op: op.index):
        before = max((longest.get(source, 0) for source in op.inputs), default=0)
        longest[op] = before + (_length_of(op.leaf) if op.leaf is not None else int(matrix_of(op) is not None))
    return max(longest.values(), default=0)


def _length_of(module: nn.Module) -> int:
    """Number of weights on the longest way through a module that was not looked into."""
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
        todo = [source for source in op.inputs if source.constant]
        while todo:
            weight = todo.pop()
            names.update([weight.parameter] if weight.parameter else [])
            todo += weight.inputs
    return names
