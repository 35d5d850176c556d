"""Finder: which modules make the queries, keys and values of an attention, by what it uses as such.

An attention is ``scaled_dot_product_attention(q, k, v)``, or ``softmax(q k) v`` written out. What flows to its three
inputs without weights on the way (heads, rotary embeddings, norms of queries) was made by the projections.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rewire.conventions import out_features
from rewire.passes.finding.adds import Add, between
from rewire.passes.finding.flow import Flow, Op

_PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm"}


def projections_in(flow: Flow, add: Add) -> tuple[tuple[str, ...], dict[str, str]] | None:
    """Paths of the modules that project queries, keys and values in a branch, or of the one that projects all three.

    Returns:
        Three paths (q, k, v), or one; and smaller maps that take part in one of the three (a gate of the values), by
        path. None if there is no attention, or several, or one module is part of two.
    """
    found = [known for values in _attentions(flow, add) if (known := _paths(flow, add, values))]
    return found[0] if found and all(known == found[0] for known in found) else None


def order_in(flow: Flow, add: Add, path: str) -> str:
    """In which order a branch's fused projection makes queries, keys and values: ``"kqv"``; empty if unknown."""
    made = [op for op in flow if op.scope.path == path and op in add.region]
    for values in _attentions(flow, add) if made else ():
        ways = [between(made[-1], value) for value in values]
        parts = [
            min(way.difference(*(ways[:n] + ways[n + 1 :])), key=_index, default=None) for n, way in enumerate(ways)
        ]
        numbers = [None if part is None else _number(part) for part in parts]
        alike = {(part.name, len(number)) for part, number in zip(parts, numbers, strict=True) if part and number}
        if None not in numbers and len(alike) == 1:
            return "".join(way for _, way in sorted(zip(numbers, "qkv", strict=True)))
    return ""


def _index(op: Op) -> int:
    return op.index


def _number(part: Op) -> tuple[int, ...] | None:
    """What tells a part of a tensor from the others in their order; None if that is not known."""
    if part.name in ("chunk", "split", "unbind", "tensor_split", "split_with_sizes"):
        return (part.index,)
    places = part.selected[0] if part.name == "getitem" and part.selected else ()
    places = places if isinstance(places, tuple) else (places,)
    found = [place.start or 0 if isinstance(place, slice) else place for place in places if place is not Ellipsis]
    known = all(isinstance(place, int) and place >= 0 for place in found)
    return tuple(found) if found and known else None


def _attentions(flow: Flow, add: Add) -> Iterator[tuple[Op, Op, Op]]:
    """Queries, keys and values as each attention in a branch gets them."""
    for op in sorted(add.own, key=lambda op: op.index):
        if op.name == "scaled_dot_product_attention" and len(op.inputs) >= 3:
            yield op.inputs[0], op.inputs[1], op.inputs[2]
        elif op.name == "softmax":
            scores, outputs = _before(op, add.region), _behind(flow, op)
            if scores is not None and outputs is not None:
                q, k = scores.inputs[-2:]
                yield q, k, outputs


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
