"""Finder: streams whose gradients the model cuts between two residual adds.

Such a cut affects the newest state only, but with learned connections later blocks read earlier states, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rewire.code.text import written_at
from rewire.errors import BadExampleInputs
from rewire.logs import find as log
from rewire.passes.finding.adds import Add, between
from rewire.passes.finding.flow import Flow
from rewire.runtime.reentrant import ADD_OUTSIDE
from rewire.torch_internals import gradient_of

_CUT = (
    "gradients do not pass from the residual add at {} to the next one (`detach`, `.data`, `torch.no_grad()`): later "
    "blocks read earlier states, too, whose gradients would not be cut; to freeze blocks, call requires_grad_(False)"
)
_REENTRANT = (
    "some of its residual adds are made inside an autograd function, and others are not, so that no stream can pass: "
    f"{ADD_OUTSIDE}."
)


def why_cut(flow: Flow, adds: Sequence[Add]) -> str:
    """Why gradients do not pass from one residual add of a run to the next, with the place; empty if they all do."""
    for add, following in itertools.pairwise(adds):
        if are_cut(flow, add, following):
            inside = add.op.reentrant or following.op.reentrant
            where = written_at(add.op.place)[0] or f"'{add.op.scope.path}'"
            return f"{_REENTRANT}{inside}" if inside else _CUT.format(where)
    return ""


def are_cut(flow: Flow, add: Add, following: Add) -> bool:
    """Whether gradients of one residual add do not reach the one before it, or only one of them has any."""
    if len({op.recorded for op in (add.op, *add.inner, following.op, *following.inner)}) > 1:
        return True
    if not flow.tensors:  # a trace
        return False
    x, y = (flow.tensors[op.index] for op in (add.op, following.shortcut))
    if x is y or not x.requires_grad or any(sum(z is other for other in flow.tensors) > 1 for z in (x, y)):
        return False
    return not _reached(x, y, [flow.tensors[op.index] for op in between(add.op, following.shortcut)])


def _reached(x: Tensor, y: Tensor, between: Iterable[Tensor]) -> bool:
    """Whether gradients of ``y`` reach ``x``. Those of autograd functions in between may be zero, and then do not.

    Raises:
        BadExampleInputs: only a real run can show it.
    """
    if not y.requires_grad:
        return False
    try:
        (grad,) = torch.autograd.grad(y, x, torch.rand_like(y), retain_graph=True, allow_unused=True)
    except RuntimeError as error:  # a tensor was written to since
        log.debug("whether gradients pass cannot be seen: %s", error)
        return True
    functions = any(isinstance(gradient_of(z), torch.autograd.function.BackwardCFunction) for z in between)
    if grad is None or not functions:
        return grad is not None
    if grad.is_meta:
        raise BadExampleInputs("whether an autograd function passes gradients on does not show on the meta device")
    return bool(grad.any())
