"""What a branch is called, what kind it is, and how wide the stream is that it reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from rewire.conventions import BRANCHES, NORM, is_norm
from rewire.passes.finding.adds import Add, called
from rewire.passes.finding.flow import Op

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def branch_calls(add: Add, depth: int) -> dict[str, str]:
    """The children that a branch calls for their weights: path below the block -> the path and the class, as text."""
    calls: dict[str, str] = {}
    for op in sorted((op for op in add.own if op.weighted), key=lambda op: op.index):
        path = called(op.scope, depth)
        if path:
            calls.setdefault(path, f"{path} {_class_name(op, depth)}".strip())
    return calls


def _class_name(op: Op, depth: int) -> str:
    """Class of the child in which ``op`` runs, if it says what the child does."""
    kind = op.scope.modules()[depth].kind
    telling = not kind.startswith("torch.nn.") or re.search(r"\.(Conv\dd|MultiheadAttention)$", kind)
    return kind.rpartition(".")[-1] if telling else ""


def named(add: Add) -> tuple[str, str]:
    """Path, below the block, of the module that the branch mainly is; and the branch's kind."""
    scopes = add.block()
    calls = branch_calls(add, len(scopes))
    kind = branch_kind(calls.values())
    if kind == "branch":  # a block that is one branch with its add (`BloomAttention(hidden, residual)`)
        kind = branch_kind([f"{scopes[-1].path.rpartition('.')[-1]} {scopes[-1].kind.rpartition('.')[-1]}"])
    return _main(calls, kind) or add.branches[0].name, kind


def _main(calls: dict[str, str], kind: str) -> str:
    pattern = BRANCHES.get("attention" if kind == "parallel" else kind)
    alike = [path for path, text in calls.items() if pattern and pattern.search(text)]
    return next(iter([*alike, *calls]), "")


def branch_kind(texts: Iterable[str]) -> str:
    """``attention``, ``cross-attention``, ``ffn``, ``parallel`` (both), ``conv`` or ``branch``, from names."""
    texts = list(texts)
    kinds = [name for name, pattern in BRANCHES.items() if any(pattern.search(text) for text in texts)]
    attention = [kind for kind in kinds if kind.endswith("attention")]
    other = [text for text in texts if not BRANCHES["attention"].search(text)]
    if attention and any(BRANCHES["ffn"].search(text) for text in other):
        return "parallel"
    return kinds[0] if kinds else "branch"


def channels_of(add: Add, readers: Sequence[Op]) -> tuple[int | None, int]:
    """Width of the stream (None if unknown) and its channels' dimension, by what follows an add and reads its state."""
    block = add.block()[-1]
    for op in (*add.post, *readers):
        below = block.holds(op.scope) and op.scope.path != block.path
        told = _told(op, op.scope.module) if below else None
        if told is not None:
            width, dim = told
            if add.shape is not None and len(add.shape) >= -dim:
                return int(add.shape[dim]), dim
            return width, dim
    first = min((op for op in add.region if op.weighted), key=lambda op: op.index, default=None)
    if add.shape is None or first is None:
        return None, -1
    dim = 1 - len(add.shape) if first.name.startswith("conv") else -1
    return int(add.shape[dim]), dim


def _told(op: Op, module: nn.Module | None) -> tuple[int, int] | None:
    if module is None or not any(True for _ in module.parameters()):
        return None
    named = NORM.search(f"{op.scope.path.rpartition('.')[-1]} {type(module).__name__}")
    return norm_channels(module) if named or is_norm(module) else input_channels(module)


def norm_channels(module: nn.Module) -> tuple[int, int] | None:
    """Channels of a norm, or of the norm in an adaptive one, and their dimension."""
    for child in module.modules():
        kind, weight = type(child).__name__.lower(), getattr(child, "weight", None)
        shape: Any = getattr(child, "normalized_shape", None) or getattr(weight, "shape", ())
        shape = (shape,) if isinstance(shape, int) else shape
        if not is_norm(child) or len(shape) != 1:
            continue
        if isinstance(child, nn.GroupNorm):
            return int(shape[0]), 1
        spatial = next((n for n in (2, 3) if f"{n}d" in kind), 0)
        if getattr(child, "data_format", "") == "channels_first":
            spatial = 2
        return int(shape[0]), -1 - spatial
    return None


def input_channels(module: nn.Module) -> tuple[int, int] | None:
    """Channels that the first linear map or convolution in a module reads, and their dimension."""
    for child in module.modules():
        if isinstance(child, nn.Linear):
            return child.in_features, -1
        if isinstance(child, CONVOLUTIONS):
            return child.in_channels, -1 - len(child.kernel_size)
    return None
