"""Pass: record the rewritten model once more, and compare its graph with the one that was found.

With plain connections in it, a rewritten model has to compute what the original computes, operation by operation:
numbers that agree could hide an operation that makes no difference on these inputs. Operations that go through weights
are compared, in order: in which module they run, what they are and of which shape, and through which weights their
inputs have come. What lies between them (the adds, and the places where a stream is handed on) is what was rewritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch import nn

from rewire.code.text import written_at
from rewire.copies import Inputs, own_inputs, private, seeded
from rewire.errors import ValidationMismatch
from rewire.passes.finding.flow import Flow, Op
from rewire.passes.finding.record import record

#: What a value was computed through: operations with weights, by their numbers, and parameters, by their names.
Sources: TypeAlias = frozenset[int | str]


def compare_graphs(found: Sequence[Flow], plain: nn.Module, inputs: Inputs) -> int:
    """Compare the graph of a rewritten model with that of the original.

    Args:
        found: the original's operations in evaluation mode and, if it runs in that, in training mode.
        plain: the rewritten model, with plain residual connections in it; it is not changed.
        inputs: what the original was run on.

    Returns:
        How many operations were compared.

    Raises:
        ValidationMismatch: an operation is missing, new, in another order, or computed from something else.
        OutOfOrder: other residual adds run than were found.
    """
    compared = 0
    for flow, training in zip(found, (False, True), strict=False):
        bench = private(plain).train(training)
        with seeded(0, bench), torch.enable_grad():
            again = record(bench, own_inputs(inputs))
        compared += _compare(flow, again, type(plain).__name__)
    return compared


def _compare(flow: Flow, again: Flow, name: str) -> int:
    (ops, sources), (others, their_sources) = _through_weights(flow), _through_weights(again)
    for op, other in zip_longest(ops, others):
        if op is None or other is None or _what(op) != _what(other):
            raise ValidationMismatch(
                f"the rewritten {name} does not compute what the original does: where the original runs "
                f"{_said(op)}, it runs {_said(other)}. Please report this; until then, leave the trunk out (trunks=)."
            )
    names = [*map(_said, ops), *("an output of the model" for _ in flow.outputs)]
    for said, mine, theirs in zip(names, sources, their_sources, strict=False):
        if mine != theirs:
            lost = ", ".join(_source(ops, source) for source in sorted(mine - theirs, key=str)[:2]) or "nothing more"
            new = ", ".join(_source(ops, source) for source in sorted(theirs - mine, key=str)[:2]) or "nothing else"
            raise ValidationMismatch(
                f"the rewritten {name} does not compute what the original does: {said} is computed from {lost} in "
                f"the original, and from {new} in its place. Please report this; until then, leave the trunk out "
                "(trunks=)."
            )
    return len(ops)


def _through_weights(flow: Flow) -> tuple[list[Op], list[Sources]]:
    """The operations with weights, in order, and the sources of each one's inputs; then those of the outputs.

    Those that a module repeats on the same sources count once: one fused projection for queries, keys and values is
    called for each of their inputs, where they have separate ones.
    """
    ops: list[Op] = []
    read: list[Sources] = []
    behind: dict[Op, Sources] = {}
    numbers: dict[Any, int] = {}
    for op in flow:
        sources = _union([behind[source] for source in op.inputs])
        if op.parameter:
            sources = frozenset([op.parameter])
        elif op.weighted:
            number = numbers.setdefault((_what(op), sources), len(ops))
            if number == len(ops):
                ops.append(op)
                read.append(sources)
            sources = frozenset([number])
        behind[op] = sources
    return ops, read + [behind[op] for op in flow.outputs]


def _union(sets: list[Sources]) -> Sources:
    different = list({id(sources): sources for sources in sets if sources}.values())
    return different[0] if len(different) == 1 else frozenset().union(*different)


def _what(op: Op) -> tuple[object, ...]:
    return op.scope.path, op.name, op.shape


def _said(op: Op | None) -> str:
    if op is None:
        return "nothing more"
    scope, at = op.scope, op.place
    while scope.parent is not None and scope.kind.startswith("torch.nn."):  # where the user calls it
        scope, at = scope.parent, scope.call
    file, text = written_at(at)
    return f"'{op.name}' in module '{op.scope.path}'" + (f" ({file}: {text})" if file else "")


def _source(ops: Sequence[Op], source: int | str) -> str:
    return _said(ops[source]) if isinstance(source, int) else f"parameter '{source}'"
