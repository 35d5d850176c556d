"""Pass: what changes in the functions of an attention whose queries, keys and values read the stream apart."""

from __future__ import annotations

import ast

from torch import nn

from rewire.code.text import is_call_of_one, span_of
from rewire.errors import EditError, UnsupportedTopology
from rewire.passes.editing.carriers import Carriers
from rewire.passes.editing.edits import Apply, FunctionPlan, Parameter, Project, Through
from rewire.passes.finding.adds import between
from rewire.passes.finding.flow import Op, Scope, around
from rewire.passes.finding.projections import Projections


def plan_attention(
    carriers: Carriers, number: int, width: int | None, projections: Projections, separate_norms: bool
) -> None:
    """Let each projection of the attention of a residual add have its own read; the norms before it, perhaps copies.

    Raises:
        UnsupportedTopology: they cannot be taken apart; or there is no norm to copy.
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


class _Attention:
    def __init__(self, carriers: Carriers, number: int, width: int | None, projections: Projections) -> None:
        self.carriers, self.sources, self.flow = carriers, carriers.sources, carriers.flow
        self.add, self.width, self.projections = carriers.adds[number], width, projections

    def plan(self, separate_norms: bool) -> int:
        """Plan the edits; the number of norms that are copied."""
        state, calls = self.add.state, self._projection_calls()
        entries = {op for _, ops in calls for op in ops}
        way: set[Op] = set().union(*(between(state, op) for op in entries)) - {state}
        if any(op.weighted for op in way):
            raise EditError("its input passes other weights before the projections")
        reads = self._reader()
        for scope, _ in calls:
            self._hand_down(reads, scope, {state, *way})
            self._project(scope)
        functions = {scope for call, _ in calls for scope in call.chain()[:-1] if reads.holds(scope)}
        copied = 0
        for op in sorted(way, key=lambda op: op.index):
            inside = [scope for scope in op.scope.outward() if scope in functions]
            if not inside:
                raise EditError("its projections read what was made of the same state outside of the block, too")
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
            function.put(("apply", at), Apply(at, calls=scope is not op.scope))
            copied += separate_norms and self._copy(function, scope, op)
        return copied

    def _copy(self, function: FunctionPlan, scope: Scope, op: Op) -> bool:
        """Let keys and values have a copy of the module that ``op`` is part of in ``scope``, if that has weights."""
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

    def _projection_calls(self) -> list[tuple[Scope, list[Op]]]:
        """The calls of projections in a branch, with what they project of the stream's value."""
        found: dict[Scope, list[Op]] = {}
        for op in self.add.region:
            calls = (s for s in op.scope.outward() if not s.helper and s.path in self.projections.ways)
            scope = next(calls, None)
            if scope is not None:
                entries = [source for source in op.inputs if not scope.holds(source.scope)]
                found.setdefault(scope, []).extend(o for o in entries if o is self.add.state or o in self.add.region)
        missing = [path for path in self.projections.ways if not any(s.path == path and e for s, e in found.items())]
        if missing:
            raise EditError(f"its block does not call {', '.join(missing)} on the value that it reads")
        return [(scope, entries) for scope, entries in found.items() if entries]

    def _reader(self) -> Scope:
        """The function in which the stream is read for an attention."""
        users = [user for user in self.flow.users[self.add.state] if user in self.add.region]
        scopes = around(user.scope.chain() for user in users)
        while scopes and scopes[-1] not in self.carriers.scopes:
            scopes.pop()
        if not scopes:
            raise EditError("it does not read the state that its output is added to")
        return scopes[-1]

    def _hand_down(self, reads: Scope, projection: Scope, values: set[Op]) -> None:
        """Hand what was read to the function that calls a projection."""
        scope = projection.parent
        while scope is not None and scope is not reads:
            function = self.sources.plan(scope)
            brought = {op for ops in scope.arguments.values() for op in ops} & values
            if not brought or scope.parent is None:
                raise EditError(f"the value that it reads does not come into {function.text.where()} as an argument")
            last = max(brought, key=lambda op: op.index)  # not the shortcut, which comes along in some
            names = [name for name, ops in scope.arguments.items() if last in ops]
            width = None if self._reads_more(scope, last, values) else self.width
            for name in names:
                function.put(("parameter", name), Parameter(name, qkv=True, width=width))
            call = self._called(scope)
            at, above = span_of(call), self.sources.plan(scope.parent)
            above.put(("qkv", at), Through(at, self.sources.callee(scope, call), qkv=True))
            scope = scope.parent

    def _reads_more(self, scope: Scope, value: Op, values: set[Op]) -> bool:
        """Whether a function reads what comes in for something else than projections, a gate say: as the residual.

        That does not come in where the three are one tensor (`SeparateInputs.through`).
        """
        users = (user for user in self.flow.users[value] if scope.holds(user.scope) and user not in values)
        return any(self.projections.ways.keys().isdisjoint(s.path for s in user.scope.outward()) for user in users)

    def _called(self, scope: Scope) -> ast.Call:
        """The expression that makes a call; a checkpoint around it gets what was read, too."""
        call, outer = self.sources.call(scope, itself=True), self.sources.call(scope)
        if outer is not call and scope.parent is not None:
            at = span_of(outer)
            self.sources.plan(scope.parent).put(("qkv", at), Through(at, qkv=True))
        return call

    def _project(self, scope: Scope) -> None:
        assert scope.parent is not None
        function, at = self.sources.plan(scope.parent), span_of(self._called(scope))
        if isinstance(scope.module, nn.MultiheadAttention):
            edit = Project(at, "qkv")
        elif self.projections.fused is not None and scope.path == self.projections.fused_path:
            edit = Project(at, "fused", self.projections.fused.groups, self.projections.fused.sizes)
        else:
            below = scope.path.removeprefix(scope.parent.path).lstrip(".").split(".")
            written = "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in below)
            edit = Project(at, self.projections.ways[scope.path], module=f"{function.text.receiver}{written}")
        function.put(("project", at), edit)
