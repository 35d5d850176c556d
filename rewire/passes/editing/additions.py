"""The ways to write an addition: ``x + f``, ``x += f``, ``torch.add(x, f)``, ``x.add_(f)``."""

from __future__ import annotations

import ast
import dataclasses

from rewire.code.text import Span, Text
from rewire.errors import EditError

#: Methods that add to some rows of a tensor.
_SCATTERED = frozenset({"index_add", "scatter_add", "index_put"})


@dataclasses.dataclass(frozen=True)
class Addition:
    """An addition in a source text.

    Attributes:
        left, right: its operands.
        scattered: whether the branch is added to some rows: ``torch.index_add(x, 0, rows, f)``.
        part: for ``x[rows] += f``, the target.
        assignment: for ``x[rows] = x[rows] + f``, the whole statement.
    """

    node: ast.BinOp | ast.AugAssign | ast.Call
    left: ast.expr
    right: ast.expr
    scattered: bool = False
    part: ast.Subscript | None = None
    assignment: ast.Assign | None = None

    def operands(self, first: bool) -> tuple[ast.expr, ast.expr]:
        """Shortcut and branch; ``first`` says whether the shortcut is the first operand."""
        return (self.left, self.right) if first else (self.right, self.left)

    @property
    def options(self) -> list[ast.keyword]:
        """The factor: ``alpha=2``."""
        return [k for k in getattr(self.node, "keywords", ()) if k.arg == "alpha" and not self.scattered]

    @property
    def whole(self) -> ast.AST:
        """The node that is replaced in an edited text."""
        return self.assignment or self.node

    @property
    def target(self) -> ast.expr | None:
        """What the addition changes in place."""
        return written_to(self.node) if self.part is None else self.part.value


def written_to(node: ast.AST) -> ast.expr | None:
    """What an in-place operation changes: ``x`` of ``x += f``, ``x.mul_(2)``."""
    if isinstance(node, ast.AugAssign):
        return node.target
    method = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
    in_place = method is not None and method.attr.endswith("_") and not method.attr.endswith("__")
    return method.value if method is not None and in_place else None


def addition_in(node: ast.AST) -> Addition | None:
    """The addition that a node is, if it is one."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return Addition(node, node.left, node.right)
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return Addition(node, node.target, node.value)
    if not isinstance(node, ast.Call):
        return None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name.removesuffix("_") in _SCATTERED:
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        given = [k.value for k in node.keywords if k.arg == "input"] + node.args
        first = given[0] if of is None or getattr(of, "id", "") in ("torch", "F") else of
        return Addition(node, first, node, scattered=True)
    named = {k.arg: k.value for k in node.keywords}
    arguments = [*node.args, *(named[name] for name in ("input", "other") if name in named)]
    if name in ("add", "add_", "iadd", "__add__") and len(arguments) == 2:
        return Addition(node, arguments[0], arguments[1])
    if name in ("add", "add_", "__add__") and len(arguments) == 1 and isinstance(node.func, ast.Attribute):
        return Addition(node, node.func.value, arguments[0])
    return None


def addition_at(text: Text, at: Span, part: bool = False) -> Addition:
    """The addition at a place; ``part``: one that adds to a part of a value and stores it.

    Raises:
        EditError: it is written in another way.
    """
    nodes = text.nodes.get(at, [])
    additions = (_of_a_part(text, node) if part else addition_in(node) for node in nodes)
    found = next(filter(None, additions), None)
    if found is None:
        whole = [text.parents[node] if isinstance(node, ast.Subscript) else node for node in nodes[-1:]]
        written = ast.unparse(whole[0]) if whole else "?"
        form = "`x[rows] += f`, with a variable for `x`" if part else "`x + f`"
        raise EditError(f"the residual add at {text.file}:{at[0]} is written as `{written}`: write it as {form}")
    return found


def _of_a_part(text: Text, node: ast.AST) -> Addition | None:
    """The addition to a part that a node is or stores: ``x[rows] += f``, ``x[0] = x[0] + f``, ``x[rows].add_(f)``."""
    statement = text.parents[node] if isinstance(node, ast.Subscript | ast.Call) else node
    if isinstance(statement, ast.Assign):
        found = addition_in(statement.value)
        found, targets = found and dataclasses.replace(found, assignment=statement), statement.targets
    else:
        found = addition_in(node if isinstance(statement, ast.Expr) else statement)
        targets = [found.left] if found else []
    part = targets[0] if len(targets) == 1 else None
    if found is None or not isinstance(part, ast.Subscript):
        return None
    value = part.value
    if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant):  # an element of a list
        value = value.value
    return dataclasses.replace(found, part=part) if isinstance(value, ast.Name) else None
