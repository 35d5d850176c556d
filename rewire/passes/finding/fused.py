"""Finder: which features of a fused projection are queries, keys and values.

Code splits them in many ways (views, splits, slices, einops), and a size of three may also be the number of heads. So
the operations between the projection and the attention are rerun, and their gradients show the layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch

from rewire.mixes.fused_qkv import Fused
from rewire.passes.finding.adds import Add, between
from rewire.passes.finding.attention import attentions, weight_in, weight_of
from rewire.passes.finding.flow import Flow, Op
from rewire.passes.finding.rerun import gradients


def features_in(flow: Flow, add: Add, path: str, width: int, inputs: int) -> str:
    """What each feature of a fused projection becomes in a branch, in order: ``qqqqkkvv``; empty if that is unclear.

    What another projection makes is left out.

    Args:
        flow, add: the flow, and the residual add of the attention.
        path: of the projection, or its weight.
        width, inputs: its output features (0 for a product with a weight), and its input features.
    """
    made = [op for op in flow if path in (op.scope.path, weight_of(op)) and op in add.region]
    if not made:
        return ""
    width = width or _rows(made[-1])
    uses = [values for _, values in attentions(flow, add)] or _threes(flow, made[-1], add.region)
    known = {features for values in uses if (features := _features(flow, made[-1], width, inputs, values))}
    return known.pop() if len(known) == 1 else ""


def _rows(product: Op) -> int:
    """The number of output features of a product with a weight, by the weight's shape; 0 if unknown."""
    weight = weight_in(product)
    if weight is None or weight.shape is None:
        return 0
    return int(weight.shape[0 if product.name == "linear" else -1])


def as_fused(features: str) -> Fused | None:
    """The features as a layout, if they are queries, keys and values in this order, once or repeatedly."""
    runs = [(way, len([*same])) for way, same in itertools.groupby(features)]
    ways = [way for way in "qkv" if way in features]
    first = dict(runs[: len(ways)])
    groups = len(runs) // max(len(ways), 1)
    if len(ways) < 2 or [*first] != ways or runs != [*first.items()] * groups:
        return None
    q, k, v = (first.get(way, 0) for way in "qkv")
    return Fused(groups, (q, k, v))


def _threes(flow: Flow, made: Op, region: Collection[Op]) -> Sequence[Sequence[Op]]:
    """If no attention was recognised: the values with exactly three readers, as three inputs of one."""
    behind = sorted((op for op in region if between(made, op)), key=lambda op: op.index)
    users = ([user for user in flow.users[op] if not user.weighted] for op in behind)
    return [three for three in users if len(three) == 3][:1]


def _features(flow: Flow, made: Op, width: int, inputs: int, values: Sequence[Op]) -> str:
    """Which of the three values each feature is part of; empty if some feature is part of none, or of several."""
    found = zip("qkv", gradients(flow, {made: width}, values, inputs), strict=False)
    read = {way: (grad != 0).flatten(0, -2).any(0) for way, (grad,) in found if grad is not None}  # each [features]
    parts = torch.stack([*read.values()]).int() if read else torch.empty(0, 1)
    if len(parts) < 2 or not bool((parts.sum(0) == 1).all() and parts.any(1).all()):
        return ""
    return "".join([*read][number] for number in parts.argmax(0).tolist())
