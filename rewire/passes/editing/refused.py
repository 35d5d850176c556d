"""What cannot be edited, as a run shows before planning; each error says where it is, and what to do."""

from __future__ import annotations

import ast
from collections.abc import Collection

from rewire.code.text import Span, Text, written_at
from rewire.errors import EditError
from rewire.passes.editing.additions import written_to
from rewire.passes.editing.carriers import Carriers
from rewire.passes.editing.edits import FunctionPlan
from rewire.passes.editing.sources import global_of, runs_in_function
from rewire.passes.editing.variables import changed_dict, returns_a_value
from rewire.passes.find import Finding
from rewire.passes.finding.adds import INSIDE, Add
from rewire.passes.finding.flow import Op, Scope


def check_in_place(carriers: Carriers) -> None:
    """Refuse an in-place write to a state whose memory is read under another name, too.

    The edited forward may make a new tensor there, or hold its states in other tensors.
    """
    inside = {op for op, stage in carriers.stage.items() if stage < len(carriers.adds)}
    ours = {*carriers.on_way, *inside, *(add.part for add in carriers.adds)}
    for op, holders in carriers.flow.held.items():
        if op is carriers.chain.entry and not carriers.begin.holds(op.scope):
            continue  # nothing is edited there: the stream starts where it is read
        if op in ours:  # the edit assigns the new value to this variable
            target = op.place and (op.place[0], _target(carriers, op))
            found = next((holder for holder in holders if (holder.code, holder.name) != target), None)
        else:
            found = next((holder for holder in holders if holder.op in inside), None)
        if found is not None:
            where, written = written_at(op.place)
            raise EditError(
                f"`{written}` at {where} writes to a state of the residual stream in place, and '{found.name}' in "
                f"{found.code.co_qualname} has the same memory and is read afterwards. Make a new tensor there "
                "(`x = x + f`), or a copy for the other name (`.clone()`)"
            )


def check_types(function: FunctionPlan, classes: Collection[type]) -> None:
    """Refuse ``type(block) is Block`` for edited blocks: their class is a subclass, so the test would be False."""
    for node in ast.walk(function.text.tree):
        if not isinstance(node, ast.Compare) or not any(map(_asks_for_class, (node.left, *node.comparators))):
            continue
        named = {id(global_of(n, function.decorated.function)) for n in ast.walk(node) if isinstance(n, ast.expr)}
        cls = next((cls for cls in classes if id(cls) in named), None)
        if cls is not None:
            raise EditError(
                f"`{ast.unparse(node)}` at {function.text.where(node)} is False of rewired blocks, whose class is a "
                f"subclass of {cls.__name__}: ask isinstance(.., {cls.__name__})"
            )


def _asks_for_class(node: ast.expr) -> bool:
    """Whether an expression is ``type(x)`` or ``x.__class__``."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) == 1
    return isinstance(node, ast.Attribute) and node.attr == "__class__"


def check_hooked(carriers: Carriers) -> None:
    """Refuse a hook on the gradient of a state: when blocks read other states, their gradients do not pass it."""
    for op, place in carriers.flow.hooked.items():
        if carriers.stage.get(op, len(carriers.adds)) < len(carriers.adds):
            where, written = written_at(place)
            raise EditError(
                f"`{written}` at {where} hooks the gradient of a state of the residual stream, which reaches it by "
                "other ways, too, when later blocks read it: hook what a branch returns"
            )


def check_hook(carriers: Carriers) -> None:
    """Refuse an add that a forward hook makes: torch calls the hook, where rewire cannot edit."""
    modules = {(call.parent, call.call) for call in carriers.flow.calls if not call.helper and call.call is not None}
    for add in carriers.adds:
        if any(call.helper and (call.parent, call.call) in modules for call in add.op.scope.outward()):
            where, written = written_at(add.op.place)
            raise EditError(
                f"the residual add `{written}` at {where} is made by a forward hook, where rewire cannot edit it: "
                "write it in the forward of the module or of its caller"
            )


def check_drawn(carriers: Carriers, op: Op, scope: Scope) -> None:
    """Refuse a call that reorders a state by random numbers: it would draw anew for each state."""
    called = next((inner for inner in op.scope.chain() if inner.parent is scope), None)
    if called is not None and any(called.holds(drawn.scope) for drawn in carriers.flow.draws):
        text = carriers.sources.text(scope)
        raise EditError(
            f"the call at {text.where(text.nodes[carriers.sources.span(scope, op)][0])} draws random numbers, and "
            "changes the state's dimensions or their order by them: earlier states have to be changed alike. Draw "
            "in front of the call, and hand over what was drawn"
        )


def check_whole(value: Op, text: Text, at: Span) -> None:
    """Refuse a first state that is changed through a variable with a view of it: ``y += 1``."""
    target = next(filter(None, map(written_to, text.nodes.get(at, ()))), None)
    changed = value.name == "setitem" and any(source.place == value.place for source in value.inputs)
    if changed and isinstance(target, ast.Name):
        raise EditError(
            f"the residual stream starts with a tensor that {text.where(target)} changes through '{target.id}', a "
            "view of it: write to the tensor itself there, or make a new one"
        )


def _target(carriers: Carriers, op: Op) -> str:
    """The variable that an in-place operation changes: ``x`` of ``x[:, 0] += f``."""
    try:
        nodes = [] if op.place is None else carriers.sources.text(op.scope).at(*op.place)
    except EditError:
        return ""
    for node in nodes:
        target: ast.AST = written_to(node) or node
        while isinstance(target, (ast.Attribute, ast.Subscript)):
            target = target.value
        if isinstance(target, ast.Name):
            return target.id
    return ""


def check_add(found: Finding, add: Add) -> None:
    """Refuse an add that a checkpoint runs without the forward around it, or that is not a residual add in each run."""
    place, path = add.op.place, add.op.scope.path
    where, written = written_at(place)
    if runs_in_function(add.op.scope):
        raise EditError(f"the residual add at {where} {INSIDE}")
    if place is not None and place[0] in add.op.scope.again:
        raise EditError(
            f"the residual add at {where} stands in a function inside the forward of '{path}', which activation "
            "checkpointing runs again in the backward pass, when the forward around it has returned: checkpoint the "
            "branch alone, a method, or the whole block"
        )
    adds = {other.op for chain in found.chains.values() for other in chain.adds}
    here = [op for op in found.flow if op.scope is add.op.scope and op.place == place is not None]
    made = [op for op in here if op.name == add.op.name]
    others = [op for op in made if op not in adds and op not in _looped(add)]
    passes, name = {other.op for chain in found.again for other in chain.adds}, path or type(found.flow.model).__name__
    if others and passes.issuperset(others):
        raise EditError(
            f"`{written}` at {where} runs {len(made)} times in one call of '{name}', in a loop in whose passes the "
            "stream begins anew: make what the loop runs a module or a method"
        )
    if others and {other.op for chain in found.gone for other in chain.adds}.issuperset(others):
        raise EditError(
            f"`{written}` at {where} runs {len(made)} times in one call of '{name}', and makes adds of other streams, "
            "too, which are left alone: make what the loop runs a module or a method"
        )
    if others:
        raise EditError(
            f"`{written}` at {where} runs {len(made)} times in one call of '{name}', and {len(others)} of these are no "
            "residual adds of the stream by themselves (they add the stream to itself, say, or several branches to one "
            "value): write those in another statement, or parallel branches as `x + f + g`"
        )


def _looped(add: Add) -> list[Op]:
    """Sums at the place of an add that are part of it: a loop adds parallel branches, one per iteration."""
    elsewhere = [op.place for op in add.inner if op.place != add.op.place]
    twice = len(elsewhere) > len(set(elsewhere))  # several sums per iteration
    return [] if twice else [op for op in add.inner if op.place == add.op.place]


def check_returns(carriers: Carriers, scope: Scope) -> None:
    """Refuse a function that makes some of the adds and returns nothing, unless it changes a dict."""
    text = carriers.sources.text(scope)
    if not returns_a_value(text) and not carriers.hold_all(scope) and not changed_dict(text):
        raise EditError(
            f"the function at {text.where()} changes the state of the residual stream inside an object, and returns "
            "nothing: let it return the new state"
        )
