"""Names and kinds of branches."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rewire.conventions import BRANCHES
from rewire.passes.finding.adds import Add, called
from rewire.passes.finding.flow import Op


def branch_calls(add: Add, depth: int) -> dict[str, str]:
    """The children whose weights a branch uses: path below the block -> the path and the class, as text."""
    calls: dict[str, str] = {}
    for op in sorted((op for op in add.own if op.weighted), key=lambda op: op.index):
        path = called(op.scope, depth)
        if path:
            calls.setdefault(path, f"{path} {_class_name(op, depth)}".strip())
    return calls


def _class_name(op: Op, depth: int) -> str:
    """Class of the child in which ``op`` runs, if its name says what the child does."""
    kind = op.scope.modules()[depth].kind
    telling = not kind.startswith("torch.nn.") or re.search(r"\.(Conv\dd|MultiheadAttention)$", kind)
    return kind.rpartition(".")[-1] if telling else ""


def named(add: Add) -> tuple[str, str]:
    """Path, below the block, of the branch's main module; and the branch's kind."""
    scopes = add.block()
    calls = branch_calls(add, len(scopes))
    kind = branch_kind(calls.values())
    if kind == "branch":  # a whole block may be one branch with its add (`BloomAttention(hidden, residual)`)
        kind = branch_kind([f"{scopes[-1].path.rpartition('.')[-1]} {scopes[-1].kind.rpartition('.')[-1]}"])
    return _main(calls, kind) or add.branches[0].name, kind


def _main(calls: dict[str, str], kind: str) -> str:
    pattern = BRANCHES.get("attention" if kind == "parallel" else kind)
    alike = [path for path, text in calls.items() if pattern and pattern.search(text)]
    return next(iter([*alike, *calls]), "")


def branch_kind(texts: Iterable[str]) -> str:
    """The kind by names: ``attention``, ``cross-attention``, ``ffn``, ``parallel`` (both), ``conv`` or ``branch``."""
    texts = list(texts)
    kinds = [name for name, pattern in BRANCHES.items() if any(pattern.search(text) for text in texts)]
    attention = [kind for kind in kinds if kind.endswith("attention")]
    other = [text for text in texts if not BRANCHES["attention"].search(text)]
    if attention and any(BRANCHES["ffn"].search(text) for text in other):
        return "parallel"
    return kinds[0] if kinds else "branch"
