"""Finder: what projects the queries, keys and values of an attention, found by their use.

An attention is ``scaled_dot_product_attention(q, k, v)``, or ``softmax(q k) v`` written out. On the paths to its three
inputs, the first operations with weights are the projections: modules, or products with weights in a forward,
``F.linear(x, self.in_proj_weight)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator

from rewire.conventions import is_matrix, out_features
from rewire.passes.finding.adds import Add, keeps_values
from rewire.passes.finding.flow import Flow, Op, given, reached
from rewire.passes.finding.rerun import gradients

#: What a torch.nn.MultiheadAttention calls: projections, attention and output in one function.
MULTIHEAD = "multi_head_attention_forward"
#: Operations that use a whole weight, perhaps scaled. (``get`` and ``getattr`` are `weight.T`.)
_WHOLE = {"get", "getattr", "mul", "div"}
_PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm"}


def projections_in(flow: Flow, add: Add) -> list[tuple[tuple[str, ...], dict[str, str]]]:
    """The projections of queries, keys and values in each attention of a branch: see `Projections.paths`.

    Attentions that share projections, or of which one projection makes two inputs, are left out.

    Returns:
        For each attention: one path, three (q, k, v), or two (one of the three; the other two); and smaller maps that
        take part in one of the three (a gate of the values), by path.
    """
    found: list[tuple[tuple[str, ...], dict[str, str]]] = []
    for op, values in attentions(flow, add):
        known = _paths(add, op, values)
        if known and known not in found:
            found.append(known)
    return found


def shared_in(flow: Flow, add: Add) -> str:
    """In words, what makes two of queries, keys and values, as in latent attentions; empty if nothing does."""
    names = {"q": "queries", "k": "keys", "v": "values"}
    for op, values in attentions(flow, add):
        made = {way: _sources(add.region, op, value).keys() for way, value in zip("qkv", values, strict=True)}
        for a, b in itertools.combinations("qkv", 2):
            both = sorted(made[a] & made[b])
            if both and not all(made[a] == paths for paths in made.values()):
                return f"both {names[a]} and {names[b]} are made of what '{both[0]}' makes"
    return ""


def weight_of(op: Op) -> str:
    """The weight that an operation in a forward multiplies by: ``attn.in_proj_weight``, or the slicing of one.

    Empty if there is no weight, or several, or if it is made of several.
    """
    weight = weight_in(op)
    return "" if weight is None else _taken_from(weight)


def weight_in(op: Op) -> Op | None:
    """The operation that makes the only weight that an operation in a forward multiplies by."""
    if op.leaf is not None or op.constant or not op.matrices:
        return None
    weights = [source for source in op.inputs if source.constant and _is_matrix(source)]
    return weights[0] if len(weights) == 1 else None


def _is_matrix(weight: Op) -> bool:
    """Whether a weight is a matrix. A part of a matrix counts, too: a trace does not know its shape."""
    return any(map(_is_matrix, weight.inputs)) if weight.shape is None else is_matrix(weight.shape)


def projected_by(op: Op) -> str:
    """The name, as in `projections_in`, of the module that an operation belongs to, or of the weight that it uses."""
    if op.leaf is None:
        return weight_of(op)
    return op.scope.path if op.scope.module is op.leaf else f"{op.scope.path}.{op.name}".strip(".")


def _taken_from(weight: Op) -> str:
    sources = [source for source in weight.inputs if _is_matrix(source)]
    if weight.parameter or len(sources) != 1:
        return weight.parameter or (weight.node.name if weight.node is not None and not weight.inputs else "")
    name = _taken_from(sources[0])
    if not name or weight.name in _WHOLE or keeps_values(weight):
        return name
    how = ", ".join(map(str, weight.sizes or weight.selected or ()))
    return f"{name}.{weight.name}({how})[{weight.item}]"


def attentions(flow: Flow, add: Add) -> Iterator[tuple[Op, tuple[Op, Op, Op]]]:
    """Each attention in a branch, with its queries, keys and values."""
    for op in sorted(add.own, key=lambda op: op.index):
        if op.name == "scaled_dot_product_attention" and len(op.inputs) >= 3:
            yield op, _by_name(op)
        elif op.name == "softmax":
            scores, outputs = _before(op, add.region), _behind(flow, op)
            pair = None if scores is None else _queries_first(flow, op, *scores.inputs[-2:])
            if pair is not None and outputs is not None:
                yield op, (*pair, outputs)


def _by_name(op: Op) -> tuple[Op, Op, Op]:
    """Queries, keys and values of an attention that is one operation, whose arguments may be named, in any order."""
    args, kwargs = given(op)
    named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
    q, k, v = (next(o for o in op.inputs if named[name] in (o, o.node)) for name in ("query", "key", "value"))
    return q, k, v


def _queries_first(flow: Flow, softmax: Op, a: Op, b: Op) -> tuple[Op, Op] | None:
    """The operands of the scores, queries first: each row of scores is of one query and all keys.

    The product may have them in either order, and the softmax may be over any dimension.
    """
    args, kwargs = given(softmax)
    dim = getattr(softmax.leaf, "dim", None) if softmax.leaf is not None else kwargs.get("dim", (*args, -1)[1])
    row = lambda scores: scores.movedim(-1 if dim is None else dim, 0).flatten(1)[:, -1]  # noqa: E731
    for masked in (False, True):
        found = gradients(flow, {a: 8, b: 8}, softmax.inputs[:1], 8, row, masked)
        counts = [0 if grad is None else int(grad.count_nonzero()) for grad in (found[0] if found else ())]
        if all(counts) and len({*counts}) == 2:
            return (a, b) if counts[0] < counts[1] else (b, a)
    return None


def _before(softmax: Op, region: Collection[Op]) -> Op | None:
    """The product that makes the scores, before they are scaled, masked and biased."""

    def is_product(op: Op) -> bool:
        return op.name in _PRODUCTS and sum(not source.constant for source in op.inputs) >= 2

    def before(op: Op) -> Iterable[Op]:
        return () if is_product(op) else (o for o in op.inputs if o in region and not o.weighted)

    found = [*filter(is_product, reached([softmax], before))]
    # Position scores may be another product.
    found = [op for op in found if all(source in region for source in op.inputs[-2:])] or found
    return found[0] if len(found) == 1 else None


def _behind(flow: Flow, softmax: Op) -> Op | None:
    """The values, found through the product that uses the weights after dropout, masks and nan_to_num."""

    def users(op: Op, products: bool) -> list[Op]:
        return [o for o in flow.users[op] if not o.weighted and (o.name in _PRODUCTS) == products]

    made = reached([softmax], lambda op: users(op, False))
    found = {o for op in made for product in users(op, True) for o in product.inputs if o not in made}
    found = {op for op in found if not op.constant}
    return found.pop() if len(found) == 1 else None


def _paths(add: Add, attention: Op, values: tuple[Op, Op, Op]) -> tuple[tuple[str, ...], dict[str, str]] | None:
    """The projection of each value (the widest of several), and the other maps that take part."""
    made = [_sources(add.region, attention, value) for value in values]
    if any(not widths for widths in made):
        return None
    names = [widths.keys() for widths in made]
    if all(paths == names[0] for paths in names):
        return (tuple(names[0]), {}) if len(names[0]) == 1 else None
    for n, paths in enumerate(names):
        a, b = names[:n] + names[n + 1 :]
        if a == b and len(a) == 1 and not a & paths:
            own = _widest(made[n])
            return (own, *a), dict.fromkeys(paths - {own}, "qkv"[n])
    if names[0] & names[1] or names[0] & names[2] or names[1] & names[2]:
        return None
    widest = tuple(map(_widest, made))
    return widest, {path: way for way, paths in zip("qkv", names, strict=True) for path in paths - {*widest}}


def _widest(widths: dict[str, int]) -> str:
    return max(sorted(widths), key=lambda path: widths[path])


def _sources(region: Collection[Op], attention: Op, value: Op) -> dict[str, int]:
    """The first operations with weights on the paths to a value, and their widths; empty if one is unclear.

    Later ones (a short convolution of keys, a second map) work on their results.
    """
    behind: set[Op] = set()  # operations that come after one with weights
    for op in sorted(region, key=lambda op: op.index):
        if any(source in region and (source.weighted or source in behind) for source in op.inputs):
            behind.add(op)

    def is_first(op: Op) -> bool:
        return op in region and op.weighted and op not in behind

    way = reached([value], lambda op: () if op not in region or is_first(op) else op.inputs)
    first = sorted(filter(is_first, way), key=lambda op: -op.index)
    paths = [_projects(op, attention) for op in first]
    if not all(paths):
        return {}
    widths = (out_features(op.leaf or op.scope.module) or (op.shape[-1] if op.shape else 0) for op in first)
    return dict(zip(paths, widths, strict=True))


def _projects(op: Op, attention: Op) -> str:
    """The module to which an operation with weights belongs; its weight, if it is part of the attention's forward.

    Empty if that is unclear.
    """
    if op.leaf is not None:
        return "" if any(True for _ in op.leaf.children()) or op.scope.helper else projected_by(op)
    scope = next((scope for scope in op.scope.outward() if not scope.helper), op.scope)
    whole = scope.module is not None and not any(True for _ in scope.module.children())
    return scope.path if whole and not scope.holds(attention.scope) else weight_of(op)
