"""Control flow in the text of a function: from where on none of a trunk's blocks can run any more."""

from __future__ import annotations

import ast
from collections.abc import Sequence, Set
from typing import NamedTuple

from rewire.code.text import Text


def ends(text: Text, calls: Sequence[ast.AST], names: Set[str]) -> list[ast.stmt]:
    """The statements at which a trunk ends on a way through the code that leaves out blocks, as an early exit does.

    No block runs from there on, while one may run on other ways from the statement before; and the code from there on
    reads one of ``names``, or returns.

    Args:
        text: of the function.
        calls: what calls blocks; nothing in a nested function.
        names: variables that may hold the stream.
    """
    walk = _Walk(text, {node for call in calls for node in (call, *text.above(call))}, names)
    walk.body(text.tree.body, _Ways())
    return walk.found


class _Ways(NamedTuple):
    """Whether a block may run after a list of statements, after ``break``, and after ``continue``."""

    after: bool = False
    stop: bool = False
    again: bool = False


class _Walk:
    def __init__(self, text: Text, calling: Set[ast.AST], names: Set[str]) -> None:
        self.text, self.calling, self.names = text, calling, names
        self.found: list[ast.stmt] = []

    def body(self, statements: Sequence[ast.stmt], ways: _Ways) -> bool:
        """Whether a block may run from the first of some statements on."""
        live = ways.after
        for number in reversed(range(len(statements))):
            behind, live = live, self._statement(statements[number], ways._replace(after=live))
            if live and not behind:
                self._end(statements[number + 1 :])
        return live

    def _statement(self, node: ast.stmt, ways: _Ways) -> bool:
        if isinstance(node, ast.Break):
            return ways.stop
        if isinstance(node, ast.Continue):
            return ways.again
        if isinstance(node, ast.Return):
            return node in self.calling
        if isinstance(node, ast.Raise):
            return True  # where it is caught, one may
        if isinstance(node, ast.If):
            return self._branches([node.body, node.orelse], ways, node.test in self.calling)
        if isinstance(node, ast.Match):
            return self._branches([*(case.body for case in node.cases), []], ways, node.subject in self.calling)
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            again = any(each in self.calling for each in node.body)
            inside = _Ways(again or ways.after, ways.after, again or ways.after)
            live = (node.test if isinstance(node, ast.While) else node.iter) in self.calling
            return self._branches([node.body, node.orelse], ways, live or again, first=inside)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            return self._branches([node.body], ways, any(item.context_expr in self.calling for item in node.items))
        if isinstance(node, ast.Try):
            return self._try(node, ways)
        return ways.after or node in self.calling

    def _try(self, node: ast.Try, ways: _Ways) -> bool:
        if node.finalbody:
            ways = ways._replace(after=self.body(node.finalbody, ways))
        handlers = [self.body(handler.body, ways) for handler in node.handlers]
        after = self.body(node.orelse, ways) or any(handlers)
        live = self.body(node.body, _Ways(after, ways.stop or after, ways.again or after)) or after
        for handler, runs in zip(node.handlers, handlers, strict=True):
            if live and not runs:
                self._end(handler.body)
        return live

    def _branches(
        self, bodies: Sequence[Sequence[ast.stmt]], ways: _Ways, live: bool, first: _Ways | None = None
    ) -> bool:
        """Whether a block may run in one of several lists of statements, or behind them."""
        runs = [self.body(body, first if first and not number else ways) for number, body in enumerate(bodies)]
        live = live or any(runs)
        for body, one in zip(bodies, runs, strict=True):
            if live and not one:
                self._end(body)
        return live

    def _end(self, behind: Sequence[ast.stmt]) -> None:
        """Note that no block runs in the statements ``behind`` a place."""
        first = next(iter(behind), None)
        if isinstance(first, ast.If) and self.text.text.startswith("elif", self.text.span(first)[0]):
            self._end(first.body)  # no statement fits in before it
            self._end(first.orelse)
            return
        nodes = [node for statement in behind for node in ast.walk(statement)]
        if any(isinstance(node, ast.Return) or getattr(node, "id", None) in self.names for node in nodes):
            self.found.append(behind[0])
