"""Pass: plan how a function that makes residual adds itself may leave out the later ones, or iterations of a loop.

    for norm, f in zip(self.norms, self.branches):
        x = depth.reach(x, before=(self, f))  # iterations before this one that were skipped add nothing
        if ..:
            continue
        x = depth.add(x, f(norm(x)))
    x = depth.reach(x, 4)

Which iteration runs is told by a module that the loop's body calls, if that is another one in each.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
from collections.abc import Iterator, Mapping

from rewire.code.text import Span, Text, span_of
from rewire.passes.editing.carriers import Carriers
from rewire.passes.editing.edits import FunctionPlan, Iteration, Reach
from rewire.passes.editing.ends import ends
from rewire.passes.editing.told import modules_run
from rewire.passes.editing.variables import (
    COMPREHENSIONS,
    assigned,
    bound_before,
    kept_in,
    loops_around,
    names_behind,
)
from rewire.passes.finding.adds import Add
from rewire.passes.finding.flow import Scope

#: Statements around an add in a loop's body.
_STATEMENTS = (ast.If, ast.With, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr)
#: Expressions that may leave out a part of themselves, or run it at another time.
_BRANCHING = (ast.BoolOp, ast.Lambda, *COMPREHENSIONS)


def plan_iterations(carriers: Carriers, name: str, scope: Scope) -> None:
    """Plan this for the adds of the trunk ``name`` in the code of ``scope``."""
    function, sites = carriers.sources.plan(scope), _sites(carriers, name, scope)
    text, trunk = function.text, function.trunks.index(name)
    if not sites or not function.method or not text.receiver or any(at not in text.nodes for at in sites):
        return
    loops = {at: _loop_around(text, at) for at in sites}
    alone = [at for at, loop in loops.items() if loop is None]
    if any(len(sites[at]) > 1 or text.statement(text.nodes[at][0]) not in text.tree.body for at in alone):
        return  # in an `if`, or in a loop that is not understood
    around = [*dict.fromkeys(filter(None, loops.values()))]
    edits = [_iteration(carriers, scope, loop, {at: sites[at] for at in sites if loops[at] is loop}) for loop in around]
    known = [dataclasses.replace(edit, trunk=trunk) for edit in edits if edit is not None]
    names, paths = {_variable(text, at) for at in sites}, [path for edit in known for path, _ in edit.sites]
    variable = names.pop()
    if names or variable is None or len(known) < len(edits) or len({*paths}) < len(paths):
        return
    for edit in known:
        function.put(("iteration", edit.at, trunk), edit)
    made = [add for add in carriers.adds if scope.holds(add.op.scope)]
    if all(add.op.scope is scope for add in made) or (carriers.hold_all(scope) and made[-1].op.scope is scope):
        _put_ends(function, sites, variable, trunk, len(made))  # else `_Planner._end` does


def _sites(carriers: Carriers, name: str, scope: Scope) -> dict[Span, list[int]]:
    """The places in the code of ``scope`` that make adds, each with their numbers among the function's.

    Without those of blocks that it calls, which know themselves what they come after.
    """
    sites, made = dict[Span, list[int]](), [add for add in carriers.adds if scope.holds(add.op.scope)]
    for number, add in enumerate(made):
        if add.op.scope is scope or _is_given(carriers, name, scope, add):
            sites.setdefault(carriers.sources.span(scope, add.op), []).append(number)
    return sites


def _is_given(carriers: Carriers, name: str, scope: Scope, add: Add) -> bool:
    """Whether a function that ``scope`` calls makes an add of a branch that ``scope`` has computed."""
    called = next(call for call in add.op.scope.outward() if call.parent is scope)
    return called.call is not None and name in carriers.sources.plan(called).branch_given


def _put_ends(function: FunctionPlan, sites: Mapping[Span, list[int]], name: str, trunk: int, adds: int) -> None:
    """Add the edits where later ones of a function's ``adds`` do not run any more: behind loops, and at early exits."""
    text = function.text
    nodes = {at: text.nodes[at][0] for at in sites}
    passed, names = dict[tuple[Span, bool], int](), dict[tuple[Span, bool], tuple[str, ...]]()
    for at, node in nodes.items():
        for loop in loops_around(text, node)[-1:]:
            behind = span_of(loop), False
            passed[behind] = max(passed.get(behind, 0), *(number + 1 for number in sites[at]))
            names[behind] = (name, *names_behind(text, loop, name))
    loops = {loop for node in nodes.values() for loop in loops_around(text, node)}
    others = {name}.union(*(kept_in(loop, name) for loop in loops))
    for each in ends(text, [*nodes.values()], others):
        known = bound_before(text, each)
        if each not in text.tree.body and name in known:
            passed[span_of(each), True] = adds
            names[span_of(each), True] = (name, *sorted((others & known) - {name}))
    for (at, before), count in passed.items():
        function.put(("reach", at, before, trunk), Reach(at, names[at, before], (trunk,), before, count))


def _loop_around(text: Text, at: Span) -> ast.For | None:
    """The innermost loop around an add; None if an iteration may leave it out and make later ones, or for no loop."""
    for parent in text.above(text.nodes[at][0]):
        if isinstance(parent, ast.For):
            return parent
        if isinstance(parent, _BRANCHING) or (isinstance(parent, ast.stmt) and not isinstance(parent, _STATEMENTS)):
            return None
    return None


def _iteration(carriers: Carriers, scope: Scope, loop: ast.For, sites: Mapping[Span, list[int]]) -> Iteration | None:
    """The edit at the start of a loop's body; None if nothing tells its iterations apart."""
    text = carriers.sources.text(scope)
    ifs = {at: _if_around(text, loop, at) for at in sites}
    alone = all(len({_lists(text, loop, at) for at in sites if ifs[at] is each}) == 1 for each in ifs.values())
    name, runs = _variable(text, next(iter(sites))), {len(numbers) for numbers in sites.values()}
    if not alone or len(runs) > 1 or name is None or name not in bound_before(text, loop):
        return None
    each_pass = [*zip(*(sites[at] for at in sorted(sites)), strict=True)]
    if any(list(numbers) != [*range(numbers[0], numbers[0] + len(sites))] for numbers in each_pass):
        return None  # some iterations made one add, and some another
    firsts = [numbers[0] for numbers in each_pass]
    if _first_in(carriers, scope, text, loop) < firsts[0]:
        return None  # a block comes first, which may be left out
    passed = {each: max(sites[at][0] for at in sites if ifs[at] is each) + 1 - firsts[0] for each in ifs.values()}
    behind = tuple((span_of(each), count) for each, count in passed.items() if each)
    for written, paths in _looked_up(carriers, scope, text, loop):
        if len(firsts) == len(paths) == len({*paths}):
            return Iteration(span_of(loop), name, written, tuple(zip(paths, firsts, strict=True)), behind)
    return None


def _first_in(carriers: Carriers, scope: Scope, text: Text, loop: ast.For) -> int:
    """The number, among those of a function, of the first add that a loop or a block that it calls makes."""
    made = [add for add in carriers.adds if scope.holds(add.op.scope)]
    places = enumerate(carriers.sources.span(scope, add.op) for add in made)
    return next(number for number, at in places if at in text.nodes and loop in text.above(text.nodes[at][0]))


def _if_around(text: Text, loop: ast.For, at: Span) -> ast.stmt | None:
    """The outermost ``if`` in a loop around an add, or the statement ``x = x + f if .. else x``."""
    node = text.nodes[at][0]
    above = [*itertools.takewhile(lambda each: each is not loop, text.above(node))]
    found = next((each for each in above[::-1] if isinstance(each, ast.If)), None)
    return found or (text.statement(node) if any(isinstance(each, ast.IfExp) for each in above) else None)


def _lists(text: Text, loop: ast.For, at: Span) -> tuple[tuple[ast.AST, bool], ...]:
    """The lists of statements in a loop that an add is in: of which statements, and whether it is their ``else``."""
    nodes = [text.nodes[at][0], *text.above(text.nodes[at][0])]
    pairs = itertools.pairwise(nodes[: nodes.index(loop) + 1])
    return tuple((parent, node in parent.orelse) for node, parent in pairs if isinstance(parent, (ast.If, ast.For)))


def _variable(text: Text, at: Span) -> str | None:
    """The variable that gets the value of a statement with an add."""
    return assigned(text, text.statement(text.nodes[at][0]))


def _looked_up(carriers: Carriers, scope: Scope, text: Text, loop: ast.For) -> Iterator[tuple[str, list[str]]]:
    """How a loop's body writes modules that it could look up at its start, each with the paths of those it ran."""
    names = [node for each in loop.body for node in ast.walk(each) if isinstance(node, ast.Name)]
    stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    around = [each for each in (loop, *loops_around(text, loop)) if not isinstance(each, ast.While)]
    targets = {node.id for each in around for node in ast.walk(each.target) if isinstance(node, ast.Name)}
    for written, runs in modules_run(carriers.flow, [scope], text, targets, stored, loop):
        yield written, [path for _, path in runs]
