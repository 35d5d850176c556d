"""Finder: which modules make the queries, keys and values of an attention, by what it uses as such.

An attention is ``scaled_dot_product_attention(q, k, v)``, or ``softmax(q k) v`` written out. What flows to its three
inputs without weights on the way (heads, rotary embeddings, norms of queries) was made by the projections.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rewire.conventions import out_features
from rewire.passes.finding.adds import Add
from rewire.passes.finding.flow import Flow, Op, given
from rewire.passes.finding.rerun import gradients

_PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm"}


def projections_in(flow: Flow, add: Add) -> tuple[tuple[str, ...], dict[str, str]] | None:
    """Paths of the modules that project queries, keys and values in a branch, or of the one that projects all three.

    Returns:
        Three paths (q, k, v); or one; or that of one of them, and of what makes the other two. And smaller maps that
        take part in one of the three (a gate of the values), by path. None if there is no attention, or several, or one
        module is part of two.
    """
    found = [known for values in attentions(flow, add) if (known := _paths(flow, add, values))]
    return found[0] if found and all(known == found[0] for known in found) else None


def attentions(flow: Flow, add: Add) -> Iterator[tuple[Op, Op, Op]]:
    """Queries, keys and values as each attention in a branch gets them."""
    for op in sorted(add.own, key=lambda op: op.index):
        if op.name == "scaled_dot_product_attention" and len(op.inputs) >= 3:
            yield _by_name(op)
        elif op.name == "softmax":
            scores, outputs = _before(op, add.region), _behind(flow, op)
            pair = None if scores is None else _queries_first(flow, op, *scores.inputs[-2:])
            if pair is not None and outputs is not None:
                yield (*pair, outputs)


def _by_name(op: Op) -> tuple[Op, Op, Op]:
    """The three of an attention that is one operation, which may be given by name, in any order."""
    args, kwargs = given(op)
    named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
    q, k, v = (next(o for o in op.inputs if named[name] in (o, o.node)) for name in ("query", "key", "value"))
    return q, k, v


def _queries_first(flow: Flow, softmax: Op, a: Op, b: Op) -> tuple[Op, Op] | None:
    """Which of the two that scores are made of are the queries: all scores of one row are of one query, of all keys.

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
    """The product that scores are made of: scaled, masked, biased."""
    found, seen, todo = [], {softmax}, [softmax]
    while todo:
        op = todo.pop()
        if op.name in _PRODUCTS and sum(source in region for source in op.inputs) >= 2:
            found.append(op)
            continue
        for source in op.inputs:
            if source in region and not source.weighted and source not in seen:
                seen.add(source)
                todo.append(source)
    return found[0] if len(found) == 1 else None


def _behind(flow: Flow, softmax: Op) -> Op | None:
    """The values of the product in which the weights are used."""
    op = softmax
    while True:
        users = [user for user in flow.users[op] if not user.weighted]
        product = next((user for user in users if user.name in _PRODUCTS), None)
        if product is not None:
            return next((source for source in product.inputs if source is not op and not source.constant), None)
        if len(users) != 1:
            return None
        op = users[0]


def _paths(flow: Flow, add: Add, values: tuple[Op, Op, Op]) -> tuple[tuple[str, ...], dict[str, str]] | None:
    """The modules that made each of the values: of several the widest, and those beside it."""
    made = [_sources(add.region, value) for value in values]
    if any(not paths for paths in made):
        return None
    if all(paths == made[0] for paths in made):
        return ((next(iter(made[0])),), {}) if len(made[0]) == 1 else None
    for n, paths in enumerate(made):
        a, b = made[:n] + made[n + 1 :]
        if a == b and len(a) == 1 and not a & paths:
            own = max(sorted(paths), key=lambda path: _width(flow, path))
            return (own, *a), dict.fromkeys(paths - {own}, "qkv"[n])
    if made[0] & made[1] or made[0] & made[2] or made[1] & made[2]:
        return None
    widest = tuple(max(sorted(paths), key=lambda path: _width(flow, path)) for paths in made)
    return widest, {path: way for way, paths in zip("qkv", made, strict=True) for path in paths - {*widest}}


def _width(flow: Flow, path: str) -> int:
    return out_features(flow.model.get_submodule(path)) or 0


def _sources(region: Collection[Op], value: Op) -> set[str]:
    """The modules of the last operations with weights on the ways to a value; empty if one is no module's own."""
    found: set[str] = set()
    seen, todo = {value}, [value]
    while todo:
        op = todo.pop()
        if op not in region:
            continue
        if op.weighted:
            module = op.leaf or op.scope.module
            if module is None or any(True for _ in module.children()) or op.scope.helper:
                return set()
            found.add(op.scope.path if op.scope.module is module else f"{op.scope.path}.{op.name}".strip("."))
            continue
        for source in op.inputs:
            if source not in seen:
                seen.add(source)
                todo.append(source)
    return found
