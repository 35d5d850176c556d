"""What tells iterations of a loop, or calls of a method, apart: that each of them runs another module."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence, Set

from rewire.code.text import Span, Text, place_of
from rewire.passes.finding.adds import Add
from rewire.passes.finding.flow import Flow, Scope


def modules_run(
    flow: Flow, scopes: Collection[Scope], text: Text, names: Set[str], changed: Set[str], inside: ast.AST
) -> Iterator[tuple[str, list[tuple[Scope, str]]]]:
    """Modules that a function runs, where these are looked up by variables that are known before.

    Args:
        flow: what was run.
        scopes: calls of the function.
        text: its text.
        names: variables of which at least one has to look the module up, as ``i`` does in ``self.layers[i]``.
        changed: variables that may not; but ``layer`` stands for ``self.layers[i]`` behind ``layer = self.layers[i]``.
        inside: the part of the text that counts.

    Yields:
        The module as an expression; or ``container, key``, as there may be none in calls that do not run it; for a
        module's child, that module, which may be None in these. With it, each time that it ran: the call of the
        function, and the module's path below the function's.
    """
    values = _looked_up_once(text, changed, inside)
    methods = {place_of(*child.call) for child in flow.calls if child.call is not None and _is_method(child)}
    for at, runs in _runs(flow, scopes).items():
        call = next((node for node in text.nodes.get(at, ()) if isinstance(node, ast.Call)), None)
        if call is None or inside not in text.above(call) or any(path is None for _, path in runs):
            continue
        known = [(scope, path or "") for scope, path in runs]
        called = call.func.value if at in methods and isinstance(call.func, ast.Attribute) else call.func
        for node in (_resolved(each, values) for each in (called, *call.args[:1])):  # the argument: checkpoint(f, x)
            used = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
            if _looks_up(node) and not used.isdisjoint(names) and used.isdisjoint(changed):
                yield _element(node, known)


def module_of_call(
    flow: Flow, scopes: Sequence[Scope], text: Text, adds: Sequence[Add]
) -> tuple[str, dict[str, int]] | None:
    """A module that is another one in each call of a method that makes adds; None if there is none.

    Args:
        flow: what was run.
        scopes: calls of the method.
        text: its text.
        adds: the trunk's adds.

    Returns:
        The module as in `modules_run`, and for each of its paths the number of adds before the call that runs it.
    """
    before = dict[Scope, int]()
    for number, add in enumerate(adds):
        before |= {call: before.get(call, number) for call in add.op.scope.outward() if call in scopes}
    tensors = {name for scope in scopes for name, ops in scope.arguments.items() if ops}
    stored = {n.id for n in ast.walk(text.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    given = {argument.arg for argument in ast.walk(text.tree.args) if isinstance(argument, ast.arg)} - {text.receiver}
    for written, runs in modules_run(flow, scopes, text, given, stored | tensors, text.tree):
        numbers = {path: before[scope] for scope, path in runs if scope in before}
        each_once = len(runs) == len({scope for scope, _ in runs}) == len(numbers) == len(before)
        if text.receiver and each_once:
            return written, numbers
    return None


def _runs(flow: Flow, scopes: Collection[Scope]) -> dict[Span, list[tuple[Scope, str | None]]]:
    """Where modules, or their methods, are called: by which calls of the function, and their paths below its module.

    The path of one that is not below it is None.
    """
    runs: dict[Span, list[tuple[Scope, str | None]]] = {}
    for child in flow.calls:
        scope = child.parent
        runs_module = _is_method(child) or not (child.helper or child.bare)
        if scope is not None and scope in scopes and child.call is not None and runs_module:
            above = f"{scope.path}." if scope.path else ""
            path = child.path.removeprefix(above) if child.path.startswith(above) else None
            runs.setdefault(place_of(*child.call), []).append((scope, path))
    for op in flow:
        if op.scope in scopes and op.leaf is not None and op.place is not None:
            runs.setdefault(place_of(*op.place), []).append((op.scope, op.name))
    return runs


def _is_method(call: Scope) -> bool:
    """Whether a call is one of a method, other than its forward, of another module than the caller's."""
    return call.helper and call.module is not None and call.parent is not None and call.path != call.parent.path


def _looked_up_once(text: Text, names: Set[str], inside: ast.AST) -> dict[str, ast.expr]:
    """The values of those of the variables that are only assigned once, in a statement that looks a module up."""
    stored = [n.id for n in ast.walk(text.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    found = {name: text.named[name][0] for name in names if name in text.named and stored.count(name) == 1}
    known = {name: value for name, value in found.items() if isinstance(value, ast.expr) and _looks_up(value)}
    return {name: value for name, value in known.items() if inside in text.above(value)}


def _resolved(node: ast.expr, values: Mapping[str, ast.expr]) -> ast.expr:
    """An expression with the values of variables in their place."""
    if isinstance(node, ast.Name):
        return values.get(node.id, node)
    if isinstance(node, ast.Attribute):
        return ast.Attribute(_resolved(node.value, values), node.attr, node.ctx)
    if isinstance(node, ast.Subscript):
        return ast.Subscript(_resolved(node.value, values), _resolved(node.slice, values), node.ctx)
    return node


def _looks_up(node: ast.expr) -> bool:
    """Whether an expression only looks something up: ``f``, ``layer.attn``, ``self.layers[i]``."""
    kinds = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.expr_context)
    return all(isinstance(inner, kinds) for inner in ast.walk(node))


def _element(node: ast.expr, runs: list[tuple[Scope, str]]) -> tuple[str, list[tuple[Scope, str]]]:
    """``layer`` for ``layer.attn``, with paths of the layers; ``self.layers, i`` for ``self.layers[i]``."""
    while isinstance(node, ast.Attribute) and all(path.endswith(f".{node.attr}") for _, path in runs):
        runs = [(scope, path.removesuffix(f".{node.attr}")) for scope, path in runs]
        node = node.value
    if isinstance(node, ast.Subscript):
        return f"{ast.unparse(node.value)}, {ast.unparse(node.slice)}", runs
    return ast.unparse(node), runs
