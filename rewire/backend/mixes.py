"""Pass: find weighted sums of states that a model's author wrote by hand, and hand them to the kernels of `mix`.

Two forms are known: sums of products (``a * x + b * y + f``), and contractions of a stack of states by `torch.einsum`,
`torch.tensordot`, or a product and a sum. What is not certainly such a sum stays as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, fx, nn

from rewire.mixes.mix import mix
from rewire.mixes.several import mixes
from rewire.mixes.streams import combine
from rewire.passes.finding.flow import plain_name
from rewire.passes.finding.graphs import tensor_of

#: Contractions of more are taken for matrix products: streams in a tensor, sums of them, and states that are stacked.
MOST_STREAMS, MOST_SUMS, MOST_STATES = 8, 8, 128

_Tensors = Callable[[fx.Node], "Tensor | None"]


@dataclasses.dataclass(frozen=True)
class LoweredMix:
    """A sum that was written by hand.

    Attributes:
        where: path of the module that computes it, and the name of the value.
        form: what it was: ``"sum of products"``, ``"einsum"``, ``"tensordot"``, ``"product and sum"``.
        sources: number of states that are mixed.
        outputs: number of sums that are made of them.
    """

    where: str
    form: str
    sources: int
    outputs: int = 1


class NotLowered(Exception):
    """Why what looks like a mix stays as it is."""


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call that computes what a node of the graph computes."""

    function: Callable[..., Tensor]
    args: tuple[object, ...]
    sources: int
    outputs: int = 1


def lower_mixes(graph: fx.Graph, root: nn.Module) -> tuple[list[LoweredMix], dict[str, str]]:
    """Replace weighted sums in place.

    Args:
        graph: operations with shapes in their ``meta`` (see `tensor_of`).
        root: the module that its attributes belong to.

    Returns:
        What was replaced; and what looked like a mix, with the reason why it was left.
    """
    lowered, left = list[LoweredMix](), dict[str, str]()
    tensors = functools.partial(tensor_of, root=root)
    for node in reversed(list(graph.nodes)):  # of a sum the outermost add first
        form, rule = _RULES.get(_name(node), ("", None))
        if rule is None or not node.users:
            continue
        try:
            call = rule(node, tensors)
        except NotLowered as error:
            left[_where(node)] = str(error)
            continue
        if call is not None:
            lowered.append(LoweredMix(_where(node), form, call.sources, call.outputs))
            _replace(graph, node, call)
    return lowered[::-1], left


def weighted_sum(sources: Sequence[Tensor], weights: Sequence[Tensor | float], added: Sequence[Tensor]) -> Tensor:
    """``sum_i w_i x_i + sum_k f_k``.

    Args:
        sources: [..., D].
        weights: numbers, one-element tensors and [D]; or numbers, one-element tensors and [..., 1].
        added: what broadcasts to the sources' shape.
    """
    like = sources[0]
    given = [w.float() if isinstance(w, Tensor) else like.new_tensor(w, dtype=torch.float32) for w in weights]
    if any(_per_token(w) for w in given):
        return mix(sources, None, added, scores=[w.expand(*like.shape[:-1], 1) for w in given])
    rows = torch.stack(torch.broadcast_tensors(*[w.reshape(-1) for w in given]))  # [N, 1] or [N, D]
    return mix(sources, rows.squeeze(1), added)


def contraction(
    states: Tensor | Sequence[Tensor], dim: int, weights: Tensor, order: Sequence[int | None], place: int | None
) -> Tensor:
    """``y_m = sum_n w_mn x_n``.

    Args:
        states: x_n, N of [..., D], or all in one tensor.
        dim: dimension of n in that tensor.
        weights: w, with as many dimensions as ``order`` names.
        order: dimensions of the weights that are (m, n), (m, n, D), or (..., m, n); None for one that they do not have.
        place: dimension of m in the result; None if there is one sum only.
    """
    w = weights.float().permute([d for d in order if d is not None])
    for position, d in enumerate(order):
        w = w if d is not None else w.unsqueeze(position)
    sources = states.unbind(dim) if isinstance(states, Tensor) else list(states)
    like = sources[0]
    per_token = len(order) == like.dim() + 1 and like.dim() > 1
    if per_token:
        w = w.expand(*like.shape[:-1], *w.shape[-2:])
    if place is None:
        scores = w.squeeze(-2).split(1, -1) if per_token else None
        return mix(sources, None if per_token else w[0], scores=scores)
    side_by_side = isinstance(states, Tensor) and dim == place == states.dim() - 2
    if side_by_side and (per_token or w.dim() == 2):
        return combine(states, w.mT)  # type: ignore[arg-type]
    return torch.stack(mixes(sources, None if per_token else w, w if per_token else None)[0], place)


def _sum_of_products(node: fx.Node, tensors: _Tensors) -> _Call | None:
    total = tensors(node)
    if total is None or not total.is_floating_point() or total.dim() < 2:
        return None
    sources, weights, added = [], [], []
    for term in _terms(node, tensors):
        product = _product(term, total, tensors)
        if product is None:
            added.append(term)
        else:
            sources.append(product[0])
            weights.append(product[1])
    given = [w for weight in weights if isinstance(weight, fx.Node) and (w := tensors(weight)) is not None]
    if len(sources) < 2 or not given:
        return None
    if any(_per_token(w) for w in given) and any(w.dim() == 1 and w.numel() > 1 for w in given):
        raise NotLowered("some of its weights are per token, others per channel")
    _check_dtype(total, [x for x in map(tensors, (*sources, *added)) if x is not None])
    return _Call(weighted_sum, (sources, weights, added), len(sources))


def _terms(node: fx.Node, tensors: _Tensors) -> list[fx.Node]:
    """What a tree of adds adds up; a sum that is used elsewhere, too, or broadcast, is one term."""
    terms: list[fx.Node] = []
    for side in node.args[:2]:
        if not isinstance(side, fx.Node):
            return [node]  # x + 1
        same = _shape(side, tensors) == _shape(node, tensors)
        if same and len(side.users) == 1 and _is_add(side):
            terms += _terms(side, tensors)
        else:
            terms.append(_without_zero(side))
    return terms


def _without_zero(node: fx.Node) -> fx.Node:
    """``x`` of the ``0 + x`` that Python's `sum` begins with."""
    if _name(node) == "add" and not node.kwargs and node.args[0] == 0 and isinstance(node.args[1], fx.Node):
        return node.args[1]
    return node


def _product(term: fx.Node, total: Tensor, tensors: _Tensors) -> tuple[fx.Node, fx.Node | float] | None:
    """(x, w) of ``w * x`` with x of the sum's shape."""
    if _name(term) != "mul" or len(term.args) != 2 or term.kwargs:
        return None
    for x, w in (term.args, term.args[::-1]):
        if isinstance(x, fx.Node) and _shape(x, tensors) == total.shape and _is_weight(w, total, tensors):
            return x, w  # type: ignore[return-value]
    return None


def _is_weight(weight: object, total: Tensor, tensors: _Tensors) -> bool:
    if not isinstance(weight, fx.Node):
        return isinstance(weight, (int, float))
    w = tensors(weight)
    if w is None or not w.is_floating_point():
        return False
    single, per_channel = w.numel() == 1, w.shape == total.shape[-1:]
    return single or per_channel or w.shape == (*total.shape[:-1], 1)


def _per_token(weight: Tensor) -> bool:
    return weight.dim() > 1 and weight.numel() != 1


@dataclasses.dataclass(frozen=True)
class _Operand:
    """A tensor of a contraction, with a label for each of its dimensions."""

    node: fx.Node
    labels: list[Hashable]


def _einsum(node: fx.Node, tensors: _Tensors) -> _Call | None:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    shapes = [_shape(operand, tensors) for operand in operands]
    if None in shapes or inputs.count(",") != 1:
        return None
    texts = inputs.split(",")
    hidden = [len(shape or ()) - len(text.replace("...", "")) for text, shape in zip(texts, shapes, strict=True)]
    labels = [_labels(text, number) for text, number in zip(texts, hidden, strict=True)]
    a, b = (_Operand(operand, of) for operand, of in zip(operands, labels, strict=True))  # type: ignore[arg-type]
    return _contraction(node, a, b, _labels(output, max(hidden) if "..." in inputs else 0), tensors)


def _labels(text: str, hidden: int) -> list[Hashable]:
    """Labels of an operand of an einsum, whose dots stand for ``hidden`` dimensions, numbered from the last."""
    before, dots, after = text.partition("...")
    return [*before, *range(-hidden if dots else 0, 0), *after]


def _tensordot(node: fx.Node, tensors: _Tensors) -> _Call | None:
    a, b = node.args[:2]
    dims = node.args[2] if len(node.args) > 2 else node.kwargs.get("dims", 2)
    shapes = _shape(a, tensors), _shape(b, tensors)
    if shapes[0] is None or shapes[1] is None:
        return None
    pair = ([-1], [0]) if dims == 1 else dims
    if not isinstance(pair, (tuple, list)) or any(not isinstance(d, (tuple, list)) or len(d) != 1 for d in pair):
        return None
    labels: list[list[Hashable]] = [[(side, d) for d in range(len(shape))] for side, shape in enumerate(shapes)]  # type: ignore[arg-type]
    labels[0][pair[0][0]] = labels[1][pair[1][0]] = "n"
    output = [label for label in (*labels[0], *labels[1]) if label != "n"]
    return _contraction(node, _Operand(a, labels[0]), _Operand(b, labels[1]), output, tensors)  # type: ignore[arg-type]


def _product_and_sum(node: fx.Node, tensors: _Tensors) -> _Call | None:
    """``(w * stack).sum(dim)``, the weights shaped to be broadcast."""
    product = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not isinstance(product, fx.Node) or _name(product) != "mul" or not isinstance(dim, int) or len(node.args) > 2:
        return None
    shape, sides = _shape(product, tensors), [arg for arg in product.args if isinstance(arg, fx.Node)]
    if shape is None or len(sides) != 2 or set(node.kwargs) - {"dim"}:
        return None
    all_labels: list[Hashable] = list(range(len(shape)))
    a, b = (_Operand(side, all_labels[len(shape) - len(_shape(side, tensors) or ()) :]) for side in sides)
    output = [label for label in all_labels if label != dim % len(shape)]
    return _contraction(node, a, b, output, tensors)


def _contraction(node: fx.Node, a: _Operand, b: _Operand, output: list[Hashable], tensors: _Tensors) -> _Call | None:
    """The contraction of ``a`` and ``b`` if one of them holds a few states of which all channels stay."""
    return _of_states(node, a, b, output, tensors) or _of_states(node, b, a, output, tensors)


def _broadcast(operand: _Operand, other: _Operand, tensors: _Tensors) -> list[int]:
    """Dimensions of ``operand`` that have size 1, to be broadcast to those of ``other``."""
    own, others = (_shape(side.node, tensors) or () for side in (operand, other))
    sizes = dict(zip(other.labels, others, strict=False))
    return [d for d, size in enumerate(own) if size == 1 and sizes.get(operand.labels[d], 1) != 1]


def _of_states(
    node: fx.Node, stack: _Operand, weights: _Operand, output: list[Hashable], tensors: _Tensors
) -> _Call | None:
    """The contraction of the states in ``stack`` with ``weights``; None if they are none."""
    states, w, total = tensors(stack.node), tensors(weights.node), tensors(node)
    if states is None or w is None or total is None or not w.is_floating_point() or len(stack.labels) < 3:
        return None
    if not output or stack.labels[-1] != output[-1] or _broadcast(stack, weights, tensors):
        return None
    spread = _broadcast(weights, stack, tensors)
    labels = [label for d, label in enumerate(weights.labels) if d not in spread]
    summed = [label for label in stack.labels if label not in output]
    sums = [label for label in labels if label not in stack.labels]
    if len(summed) != 1 or summed[0] not in labels or len(sums) > 1 or len(set(labels)) < len(labels):
        return None
    (n,), dim = summed, stack.labels.index(summed[0])
    place = output.index(sums[0]) if sums else None
    stacked = _stacked(stack.node, dim, states.dim())
    number, outputs = states.shape[dim], 1 if place is None else total.shape[place]
    if not isinstance(number, int) or number > (MOST_STATES if stacked else MOST_STREAMS):
        return None
    if not isinstance(outputs, int) or outputs > MOST_SUMS:
        return None
    *tokens, channel = [label for label in stack.labels if label != n]
    if [label for label in output if label not in sums] != [*tokens, channel]:
        raise NotLowered("its output has the dimensions in another order than its states")
    per_token = any(label in tokens for label in labels)
    if per_token and channel in labels:
        raise NotLowered("its weights are per token and channel")
    _check_dtype(total, [states])
    wanted = [*(tokens if per_token else []), *(sums or [None]), n, *([channel] if channel in labels else [])]
    order = [labels.index(label) if label in labels else None for label in wanted]
    args = (stacked or stack.node, dim, _squeezed(node, weights.node, spread), order, place)
    return _Call(contraction, args, number, outputs)


def _stacked(node: fx.Node, dim: int, dims: int) -> list[fx.Node] | None:
    """The tensors that ``node`` stacks along ``dim``."""
    if _name(node) != "stack" or not isinstance(node.args[0], (tuple, list)):
        return None
    along = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return list(node.args[0]) if isinstance(along, int) and along % dims == dim else None  # type: ignore[arg-type]


def _squeezed(node: fx.Node, weights: fx.Node, dims: list[int]) -> fx.Node:
    """``weights`` for ``node``, without the dimensions that are there to be broadcast."""
    if not dims:
        return weights
    with node.graph.inserting_before(node):
        return node.graph.call_method("squeeze", (weights, tuple(dims)))


_RULES: dict[str, tuple[str, Callable[[fx.Node, _Tensors], _Call | None]]] = {
    "add": ("sum of products", _sum_of_products),
    "iadd": ("sum of products", _sum_of_products),
    "einsum": ("einsum", _einsum),
    "tensordot": ("tensordot", _tensordot),
    "sum": ("product and sum", _product_and_sum),
}

#: Operations without effects, which are left out of the graph along with the sum that used them.
_PURE = {"add", "mul", "stack", "view", "reshape", "unsqueeze", "getitem"}


def _replace(graph: fx.Graph, node: fx.Node, call: _Call) -> None:
    with graph.inserting_before(node):
        new = graph.call_function(call.function, call.args)  # type: ignore[arg-type]
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    dead = [node]
    while dead:
        gone = dead.pop()
        inputs = gone.all_input_nodes
        graph.erase_node(gone)
        dead += [source for source in inputs if not source.users and _name(source) in _PURE]


def _name(node: fx.Node) -> str:
    """Name of the operation that ``node`` is, in any spelling."""
    if node.op == "call_method":
        return str(node.target)
    return str(getattr(node.target, "__name__", "")).partition(".")[0] if node.op == "call_function" else ""


def _where(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return f"{stack[-1][0]}: {node.name}" if stack else node.name


def _shape(node: object, tensors: _Tensors) -> torch.Size | None:
    value = tensors(node) if isinstance(node, fx.Node) else None
    return None if value is None else value.shape


def _check_dtype(total: Tensor, states: Sequence[Tensor]) -> None:
    expected = functools.reduce(torch.promote_types, [x.dtype for x in states])
    if total.dtype != expected:
        raise NotLowered(f"it makes {total.dtype} of states in {expected}")


def _is_add(node: fx.Node) -> bool:
    """Whether ``node`` adds two values, in any spelling."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    operands = [arg for arg in node.args[:2] if isinstance(arg, fx.Node)]
    return (
        plain_name(name) == "add"
        and node.op in ("call_function", "call_method")
        and len(operands) == 2
        and not node.kwargs
    )
