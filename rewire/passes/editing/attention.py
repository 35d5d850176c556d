"""Pass: plan the functions of an attention whose queries, keys and values read the stream separately."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
from typing import TypeAlias

from torch import nn

from rewire.code.text import is_call_of_one, span_of
from rewire.conventions import is_joint_attention
from rewire.errors import EditError, UnsupportedTopology
from rewire.passes.editing.carriers import Carriers
from rewire.passes.editing.edits import Apply, FunctionPlan, Parameter, Project, Through
from rewire.passes.finding.adds import between
from rewire.passes.finding.attention import weight_of
from rewire.passes.finding.flow import Op, Scope, around, given
from rewire.passes.finding.projections import Projections


def plan_attention(
    carriers: Carriers, number: int, width: int | None, projections: Projections, separate_norms: bool
) -> None:
    """Give each projection of an attention its own read, and if wanted copy the norms before it.

    Raises:
        UnsupportedTopology: the three cannot be taken apart; or there is no norm to copy.
    """
    try:
        copied = _Attention(carriers, number, width, projections).plan(separate_norms)
    except EditError as error:
        raise projections.error(str(error)) from error
    if separate_norms and not copied:
        raise UnsupportedTopology(
            f"the attention '{projections.where}' cannot have separate norms for q, k and v: none stands between "
            "the residual stream and its projections. Leave out separate_norms=True."
        )


#: A projection: the call of a module, or of a helper that multiplies; or the product itself.
_Call: TypeAlias = Scope | Op


class _Attention:
    def __init__(self, carriers: Carriers, number: int, width: int | None, projections: Projections) -> None:
        self.carriers, self.sources, self.flow = carriers, carriers.sources, carriers.flow
        self.add, self.width, self.projections = carriers.adds[number], width, projections

    def plan(self, separate_norms: bool) -> int:
        """Plan the edits; return the number of norms that are copied."""
        state, calls = self.add.state, self._projection_calls()
        entries = {op for _, ops in calls for op in ops}
        way: set[Op] = set().union(*(between(state, op) for op in entries)) - {state}
        if any(op.weighted for op in way):
            raise EditError("its input passes other weights before the projections")
        for op in way:
            if _changes_with_each_call(op):
                where = f" in '{op.scope.path}'" if op.scope.path else ""
                raise EditError(
                    f"'{op.name}'{where} stands between the state and the projections, and would run for each of the "
                    "three: it draws random numbers, or updates running statistics, each time it is called"
                )
        reads = self._reader()
        for call, read in calls:
            self._hand_down(reads, call, {state}.union(*(between(state, op) for op in read)), {state, *way})
            self._project(call)
        functions = {scope for call, _ in calls for scope in _caller(call).outward() if reads.holds(scope)}
        copied = 0
        for op in sorted(way, key=lambda op: op.index):
            inside = [scope for scope in op.scope.outward() if scope in functions]
            if not inside:
                raise EditError(
                    "its projections also read a value that was made of the same state outside of the block"
                )
            scope = inside[0]
            function, at = self.sources.plan(scope), self.sources.span(scope, op)
            if any((kind, at) in function.edits for kind in ("qkv", "project")):
                raise EditError(
                    f"what stands before its projections is called where these are, at {function.text.where()}, in a "
                    "loop over modules (torch.nn.Sequential): call the norm, and the attention, in a forward"
                )
            known = function.edits.get(("apply", at))
            if isinstance(known, Apply) and known.norm:
                del function.edits["apply", at]
            joins = sum(source is state or source in way for source in op.inputs) > 1
            function.put(("apply", at), Apply(at, calls=scope is not op.scope, joins=joins))
            copied += separate_norms and self._copy(function, scope, op)
        return copied

    def _copy(self, function: FunctionPlan, scope: Scope, op: Op) -> bool:
        """Copy the module that ``op`` belongs to in ``scope`` for keys and values, if it has weights."""
        inside = [inner for inner in op.scope.chain() if inner.parent is scope]
        if inside and not inside[0].helper:
            path, module = inside[0].path, inside[0].module
        else:
            path, module = ".".join(filter(None, (scope.path, op.name))), op.leaf
        if module is None or not any(True for _ in module.parameters()):
            return False
        if not any(is_call_of_one(node) for node in function.text.nodes.get(self.sources.span(scope, op), [])):
            raise EditError(f"'{path}' is not called with the read value alone, and so cannot have copies")
        function.copied.add(path)
        return True

    def _projection_calls(self) -> list[tuple[_Call, list[Op]]]:
        """The calls of projections in a branch, each with the values that it projects."""
        found: dict[_Call, list[Op]] = {}
        for op in self.add.region:
            call = self._call_of(op)
            if call is not None:
                entries = [o for o in op.inputs if not (isinstance(call, Scope) and call.holds(o.scope))]
                found.setdefault(call, []).extend(o for o in entries if o is self.add.state or o in self.add.region)
        fed = {self._name(call) for call, entries in found.items() if entries}
        missing = [path for path in self.projections.ways if path not in fed]
        if missing:
            raise EditError(f"its block does not call {', '.join(missing)} on the value that it reads")
        return [(call, entries) for call, entries in found.items() if entries]

    def _call_of(self, op: Op) -> _Call | None:
        """The projection that an operation is part of; None if it is part of none."""
        helper = next((scope for scope in op.scope.chain() if scope in self._helpers), None)
        calls = (s for s in op.scope.outward() if not s.helper and s.path in self.projections.ways)
        return helper or next(calls, None) or (op if weight_of(op) in self.projections.ways else None)

    @functools.cached_property
    def _helpers(self) -> dict[Scope, str]:
        """Calls of functions that multiply by one of the three weights only -> the name of that weight."""
        found: dict[Scope, set[str]] = {}
        for op in self.add.region:
            name = weight_of(op)
            if name in self.projections.ways and name != self.projections.fused_path:
                for scope in itertools.takewhile(lambda scope: scope.helper, op.scope.outward()):
                    found.setdefault(scope, set()).add(name)
        return {scope: names.pop() for scope, names in found.items() if len(names) == 1}

    def _name(self, call: _Call) -> str:
        """The projection's name in `Projections.ways`."""
        if isinstance(call, Op):
            return weight_of(call)
        return self._helpers.get(call, call.path)

    def _reader(self) -> Scope:
        """The function in which an attention reads the stream."""
        users = [user for user in self.flow.users[self.add.state] if user in self.add.region]
        scopes = around(user.scope.chain() for user in users)
        while scopes and scopes[-1] not in self.carriers.scopes:
            scopes.pop()
        if not scopes:
            raise EditError("it does not read the state that its output is added to")
        return scopes[-1]

    def _hand_down(self, reads: Scope, projection: _Call, values: set[Op], ways: set[Op]) -> None:
        """Pass the read on to the function that calls a projection.

        Args:
            reads: the function that reads the stream.
            projection: the call.
            values: the state, and the values between it and this projection.
            ways: the state, and the values between it and all projections.
        """
        scope: Scope | None = _caller(projection)
        while scope is not None and scope is not reads:
            function = self.sources.plan(scope)
            brought = {op for ops in scope.arguments.values() for op in ops} & values
            if not brought or scope.parent is None:
                raise EditError(f"the value that it reads does not come into {function.text.where()} as an argument")
            last = max(brought, key=lambda op: op.index)  # not the shortcut, which may be passed as well
            names = [name for name, ops in scope.arguments.items() if last in ops]
            width = None if self._reads_more(scope, last, ways) else self.width
            for name in names:
                function.put(("parameter", name), Parameter(name, qkv=True, width=width))
            call = self._called(scope)
            at, above = span_of(call), self.sources.plan(scope.parent)
            above.put(("qkv", at), Through(at, self.sources.callee(scope, call), qkv=True))
            scope = scope.parent

    def _reads_more(self, scope: Scope, value: Op, values: set[Op]) -> bool:
        """Whether a function reads the value for something besides projections, such as a gate: then as the residual.

        That value is not passed where the three are one tensor (`SeparateInputs.through`).
        """
        users = (user for user in self.flow.users[value] if scope.holds(user.scope) and user not in values)
        return any(self._call_of(user) is None for user in users)

    def _called(self, scope: Scope) -> ast.Call:
        """The expression of a call; a checkpoint around it gets the read, too."""
        call, outer = self.sources.call(scope, itself=True), self.sources.call(scope)
        if outer is not call and scope.parent is not None:
            at = span_of(outer)
            self.sources.plan(scope.parent).put(("qkv", at), Through(at, qkv=True))
        return call

    def _project(self, call: _Call) -> None:
        caller, name = _caller(call), self._name(call)
        function = self.sources.plan(caller)
        at = self.sources.span(caller, call) if isinstance(call, Op) else span_of(self._called(call))
        if isinstance(call, Scope) and call not in self._helpers and is_joint_attention(call.module):
            edit = Project(at, "qkv")
        else:
            fused = self.projections.fused if name == self.projections.fused_path else None
            way = "fused" if fused else self.projections.ways[name]
            edit = Project(at, way, *((fused.groups, fused.sizes) if fused else ()))
            if isinstance(call, Scope) and call not in self._helpers and function.method:
                below = name.removeprefix(caller.path).lstrip(".").split(".")
                written = "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in below)
                edit = dataclasses.replace(edit, module=f"{function.text.receiver}{written}")
        function.put(("project", at), edit)


def _caller(call: _Call) -> Scope:
    """The call that contains the projection."""
    scope = call.scope if isinstance(call, Op) else call.parent
    assert scope is not None
    return scope


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _changes_with_each_call(op: Op) -> bool:
    """Whether what makes a tensor draws random numbers in training, or updates running statistics."""
    if op.leaf is not None:
        kinds = (*_BATCH_NORMS, *_DROPOUTS)
        return any(isinstance(module, kinds) and getattr(module, "p", 1) for module in op.leaf.modules())
    args, kwargs = given(op)
    second = next(iter(args[1:]), None)
    if op.name in ("batch_norm", "instance_norm"):
        return kwargs.get("running_mean", second) is not None
    return op.name == "rrelu" or ("dropout" in op.name and kwargs.get("p", second) != 0)
