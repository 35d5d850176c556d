"""The ways to write an addition: ``x + f``, ``x += f``, ``torch.add(x, f)``, ``x.add_(f)``."""

from __future__ import annotations

import ast
import dataclasses

from rewire.code.text import Span, Text
from rewire.errors import EditError
from rewire.passes.finding.adds import SCATTERED


@dataclasses.dataclass(frozen=True)
class Addition:
    """An addition in a source text.

    Attributes:
        left, right: its operands.
        scattered: whether the branch is written to some rows: ``torch.index_add(x, 0, rows, f)``.
    """

    node: ast.BinOp | ast.AugAssign | ast.Call
    left: ast.expr
    right: ast.expr
    scattered: bool = False

    def operands(self, first: bool) -> tuple[ast.expr, ast.expr]:
        """Shortcut and branch, if the shortcut is the ``first`` operand, or is not."""
        return (self.left, self.right) if first else (self.right, self.left)

    @property
    def options(self) -> list[ast.keyword]:
        """Its factor: ``alpha=2``."""
        return [k for k in getattr(self.node, "keywords", ()) if k.arg == "alpha" and not self.scattered]

    @property
    def target(self) -> ast.expr | None:
        """What it changes in place."""
        if isinstance(self.node, ast.AugAssign):
            return self.node.target
        function = self.node.func if isinstance(self.node, ast.Call) and len(self.node.args) == 1 else None
        return function.value if isinstance(function, ast.Attribute) and function.attr == "add_" else None


def addition_in(node: ast.AST) -> Addition | None:
    """The addition that a node is, if it is one."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return Addition(node, node.left, node.right)
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return Addition(node, node.target, node.value)
    if not isinstance(node, ast.Call):
        return None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in SCATTERED:
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        first = node.args[0] if of is None or getattr(of, "id", "") in ("torch", "F") else of
        return Addition(node, first, node, scattered=True)
    arguments = [*node.args, *(k.value for k in node.keywords if k.arg in ("input", "other"))]
    if name in ("add", "add_", "iadd", "__add__") and len(arguments) == 2:
        return Addition(node, arguments[0], arguments[1])
    if name in ("add", "add_", "__add__") and len(arguments) == 1 and isinstance(node.func, ast.Attribute):
        return Addition(node, node.func.value, arguments[0])
    return None


def addition_at(text: Text, at: Span) -> Addition:
    """The addition that stands at a place.

    Raises:
        EditError: it is written in another way.
    """
    nodes = text.nodes.get(at, [])
    found = next(filter(None, map(addition_in, nodes)), None)
    if found is None:
        written = ast.unparse(nodes[-1]) if nodes else "?"
        raise EditError(f"the residual add at {text.file}:{at[0]} is written as `{written}`: write it as `x + f`")
    return found
