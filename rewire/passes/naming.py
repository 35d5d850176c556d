"""What a branch is called, what kind it is, and how wide the stream is that it reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from rewire.passes.values import CONVOLUTIONS, Values

_KINDS = (
    ("cross-attention", re.compile(r"cross_?att|enc(oder|dec)_?att|encdecatt|multihead_attn|_mha_block", re.I)),
    ("attention", re.compile(r"attn|attention|self_att|msa\b|_sa_block", re.I)),
    ("conv", re.compile(r"conv", re.I)),
    (
        "ffn",
        re.compile(r"mlp|ffn|ff\b|feed_?forward|moe|expert|fc\d?\b|intermediate|_ff_block|densere|linear\d?\b", re.I),
    ),
)


def branch_modules(values: Values, shortcut: fx.Node, branches: Sequence[fx.Node]) -> list[fx.Node]:
    """Calls of children and methods between the stream and the add, norms and activations aside."""
    region: set[fx.Node] = set()
    for branch in branches:
        region |= values.between(shortcut, branch) - {shortcut}
    calls = [n for n in region if values.callee(n) and values.parametrised(n) and not values.is_norm(n)]
    # children before methods: a method's name says less
    return sorted(calls, key=lambda node: (values.child(node) is None, values.order[node]))


def branch_name(values: Values, shortcut: fx.Node, branches: Sequence[fx.Node]) -> str:
    """Path, below the block, of the module that the branch mainly is."""
    calls = branch_modules(values, shortcut, branches)
    if not calls:
        return branches[0].name
    kind = branch_kind(values, shortcut, branches)
    pattern = dict(_KINDS).get("attention" if kind == "parallel" else kind)
    named = [call for call in calls if pattern and pattern.search(values.described(call))]
    return str(values.callee((named or calls)[0]))


def branch_kind(values: Values, shortcut: fx.Node, branches: Sequence[fx.Node]) -> str:
    """``attention``, ``cross-attention``, ``ffn``, ``parallel`` (both), ``conv`` or ``branch``, from names."""
    texts = [values.described(call) for call in branch_modules(values, shortcut, branches)]
    kinds = [name for name, pattern in _KINDS if any(pattern.search(text) for text in texts)]
    patterns = dict(_KINDS)
    attention = [kind for kind in kinds if kind.endswith("attention")]
    other = [text for text in texts if not patterns["attention"].search(text)]
    if attention and any(patterns["ffn"].search(text) for text in other):
        return "parallel"
    return kinds[0] if kinds else "branch"


def channels_of(values: Values, shortcut: fx.Node, post: Sequence[fx.Node]) -> tuple[int | None, int]:
    """Width of the stream (None if unknown) and the dimension of its channels, from what reads it next to an add."""
    readers = sorted(shortcut.users, key=lambda node: values.order.get(node, 0))
    for user in (*post, *readers):
        child = values.child(user)
        told = None if child is None else _norm_channels(child) if values.is_norm(user) else _input_channels(child)
        if told is not None:
            return told
    return None, -1


def _norm_channels(module: nn.Module) -> tuple[int, int] | None:
    """Channels of a norm, or of the norm in an adaptive one, and their dimension."""
    for child in module.modules():
        kind, weight = type(child).__name__.lower(), getattr(child, "weight", None)
        shape: Any = getattr(child, "normalized_shape", None) or getattr(weight, "shape", ())
        if "norm" not in kind or len(shape) != 1:
            continue
        if isinstance(child, nn.GroupNorm):
            return int(shape[0]), 1
        spatial = next((n for n in (2, 3) if f"{n}d" in kind), 0)
        if getattr(child, "data_format", "") == "channels_first":
            spatial = 2
        return int(shape[0]), -1 - spatial
    return None


def _input_channels(module: nn.Module) -> tuple[int, int] | None:
    """Channels that the first linear map or convolution in a module reads, and their dimension."""
    for child in module.modules():
        if isinstance(child, nn.Linear):
            return child.in_features, -1
        if isinstance(child, CONVOLUTIONS):
            return child.in_channels, -1 - len(child.kernel_size)
    return None
