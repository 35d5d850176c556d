"""Finder: which additions of a flow are residual adds.

A residual add is ``x + f`` where ``f`` is computed from ``x`` through weights. Polynomials of an activation, rotary
embeddings, masks and position embeddings have no such ``f``, or are recognised by name.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import torch
from torch import nn

from rewire.code.text import place_of, within
from rewire.conventions import POSITIONAL
from rewire.passes.finding.flow import KERNEL, Flow, Op, Scope, around
from rewire.runtime.reentrant import ADD_OUTSIDE

#: Name of a product with the number 1, where another model of the same code has a factor.
UNSCALED = "unscaled"
#: Operations that keep the values and change their dtype or memory.
CASTS = frozenset(["to", "type", "type_as", "float", "double", "half", "bfloat16", "clone", "contiguous", UNSCALED])
#: Views that change the order of values.
TURNS = frozenset(
    {"transpose", "permute", "movedim", "moveaxis", "t", "swapaxes", "swapdims", "adjoint"}
    | {"flip", "fliplr", "flipud", "rot90", "roll", "channel_shuffle"}
)
#: All views.
VIEWS = TURNS | {"view", "reshape", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "view_as", "reshape_as"}
#: Indexing, and padding (up to a multiple of a window, say): views if they keep the number of values.
SELECTIONS = frozenset({"getitem", "select", "narrow", "slice", "index_select", "gather", "pad"})
ACCUMULATED = "index_put with accumulate=True"
#: Adds of a branch to some rows, as in stochastic depth over a part of the batch; it is zero on the others.
SCATTERED = frozenset({"index_add", "scatter_add", ACCUMULATED})
#: Operations that only scale a state and add to it.
_AFFINE = frozenset({"add", "sub", "mul", "div", "truediv", "lerp", "masked_fill", "dropout"}) | CASTS | VIEWS
#: Products with a matrix, if that is a weight.
_MAPS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "einsum"})
_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Dropout, nn.Identity)
#: Why a weighted sum of the stream and a branch is no residual add.
SCALED = "its shortcut is scaled: connections would have to learn the factor, and those of a plain `x + f` are replaced"
#: Why a sum inside an autograd function's kernel is no residual add.
FUSED = "a kernel adds, or TorchScript, out of sight: switch the fused add and norm off, so that the model itself adds"
#: Why a visible sum inside an autograd function is no residual add.
INSIDE = f"stands inside a torch.autograd.Function, which no stream can pass: {ADD_OUTSIDE}"
#: Why other operations on a state and a branch are no residual adds.
_LIKE_ADDS = {
    "sub": "is a subtraction: only sums are connected, `x + (-f)` say",
    "lerp": "mixes the state and a branch with `lerp`: only sums are connected",
    "addcmul": "adds a branch with `addcmul`: only sums are connected, `x + a * f` say",
    "addmm": "adds a branch inside a product of matrices: only sums are connected, `x + a @ b` say",
    "baddbmm": "adds a branch inside a product of matrices: only sums are connected, `x + a @ b` say",
    "sum": "sums a stack of the state and a branch: only `x + f` is connected",
    "setitem": "adds to a part of the state in place, and not as `x[rows] += f` or `x[rows] = x[rows] + f` does, with "
    "the same index and no row twice: write it so, or `x = torch.index_add(x, 0, rows, f)`",
}
#: Why sums whose shortcut is made from a state are no residual adds.
_SHORTCUTS = {
    "mul": SCALED,
    "div": SCALED,
    "detach": "its shortcut is detached: gradients do not pass it, while they do pass connections",
    "add": "its shortcut is a sum with a number or a weight, as of `sum([x, f])` and `x + bias + f`: write `x + f`",
}


@dataclasses.dataclass(eq=False)
class Add:
    """One residual add.

    Attributes:
        op: the addition; the outermost one if parallel branches are added one by one.
        inner: in that case, the additions inside it.
        shortcut: the operand that is the stream's value.
        state: the value of which the shortcut is a cast or a view, and which the branch reads, too.
        source: what the branches are computed from: the state, or the value that a projection makes the state from.
        branches: what is added to the shortcut, in order.
        post: operations between the addition and the next state.
        region: operations of the branches, from the source (excluded) to their results.
        flattened: whether the state is reshaped for the add and reshaped back at once (DINOv2).
        part: for ``x[rows] += f``, the sum that is stored in the state.
        others: residual adds of other streams in the region, if the branch is computed by a stream that read the state.
    """

    op: Op
    shortcut: Op
    state: Op
    source: Op
    branches: list[Op]
    region: frozenset[Op]
    inner: list[Op] = dataclasses.field(default_factory=list)
    post: list[Op] = dataclasses.field(default_factory=list)
    flattened: bool = False
    part: Op | None = None
    others: frozenset[Op] = frozenset()

    @property
    def own(self) -> frozenset[Op]:
        """The part of the region that makes no state of another stream."""
        return self.region.difference(*(between(self.source, other) for other in self.others)) or self.region

    @property
    def first(self) -> bool:
        """Whether the shortcut, or a part of it, is the first operand."""
        return (self.part or self.op).inputs[0] is not self.branches[-1]

    @property
    def shape(self) -> torch.Size | None:
        """The shape of the next state."""
        return self.state.shape if self.flattened else self.op.shape

    @property
    def result(self) -> Op:
        """The value that the stream has after this add."""
        return self.post[-1] if self.post else self.op

    @property
    def affine(self) -> bool:
        """Whether the operations after the add only scale its sum and add to it."""
        made = {self.op, *self.post}
        for op in self.post:
            alone = op.name in ("add", "sub") or sum(source in made for source in op.inputs) == 1
            if (
                op.name not in _AFFINE
                or not alone
                or (op.name not in ("add", "sub", "mul") and op.inputs[0] not in made)
            ):
                return False
        return bool(self.post)

    def block(self) -> list[Scope]:
        """The module calls around the addition and all weighted operations of its branches."""
        weighted = {op.scope for op in self.region if op.weighted}
        return around(scope.modules() for scope in (self.op.scope, *weighted))


def is_view(op: Op) -> bool:
    """Whether an operation only changes dimensions or the order of values, so that each state can pass it before a mix.

    So does an index that keeps the number of values: ``x[None, :]``, ``x[0]`` of one row, ``x[order]``.
    """
    if op.name not in SELECTIONS:
        return op.name in VIEWS and bool(op.inputs)
    return bool(op.inputs) and size_of(op) == size_of(op.inputs[0]) != -1


def keeps_values(op: Op) -> bool:
    """Whether an operation is a view or a cast."""
    return is_view(op) or (op.name in CASTS and bool(op.inputs))


def size_of(op: Op) -> int:
    """The number of values in a tensor; -1 if unknown."""
    return -1 if op.shape is None else op.shape.numel()


def residual_adds(flow: Flow) -> tuple[list[Add], dict[Add, str]]:
    """The residual adds of a flow in order; and additions that only look like residual adds, each with the reason."""
    found: dict[Op, Add] = {}  # by operation; for nested additions the outermost
    rejected: dict[Add, str] = {}
    for op in flow:
        add = _is_sum(op) and (_parallel(op, found, flow) or _plain(op, flow, found) or _projected(op))
        if op.name == "setitem" and op.node is None:
            add = _of_a_part(op, flow)
            if add and add.part in found:  # `x[rows] = h + f(h)`
                del found[add.part]
        if op.name in SCATTERED and op.node is None and len(op.inputs) > 1:
            add = _plain(op, flow, found)
            back = [user.shape == add.state.shape and is_view(user) for user in flow.users[op]] if add else []
            if add and add.state.shape is not None and op.shape != add.state.shape:
                add.flattened = bool(back) and all(back)
        if not add:
            rejected.update(_near_miss(op, flow))
            continue
        why = _false_friend(add) or _around(add, found) or _injected(add, found)
        if why:
            rejected[add] = why
        else:
            found[op] = add
    return list(found.values()), rejected


def _is_sum(op: Op) -> bool:
    if op.name != "add" or len(op.inputs) != 2 or op.inputs[0] is op.inputs[1]:
        return False
    return op.dtype is None or op.dtype.is_floating_point or op.dtype.is_complex


def _plain(op: Op, flow: Flow, found: dict[Op, Add]) -> Add | None:
    """``x + f``, where ``x`` may be a cast or a view of what ``f`` is computed from."""
    scattered = op.name in SCATTERED
    for shortcut, branch in [(op.inputs[0], op.inputs[-1])] if scattered else (op.inputs, op.inputs[::-1]):
        if op.shape is not None and shortcut.shape is not None and shortcut.shape != op.shape:
            continue  # it is broadcast
        if op.scale is not None and op.scale != 1 and shortcut is op.inputs[1]:
            continue  # the shortcut is scaled
        add = _from_a_state(op, shortcut, branch, flow, found)
        if add:
            return add
    return None


def _from_a_state(op: Op, shortcut: Op, branch: Op, flow: Flow, found: dict[Op, Add]) -> Add | None:
    """The add of a branch to a shortcut, which may be a cast or a view of the state."""
    state, reader = shortcut, op
    while True:
        region = _branch(op, state, branch, flow, reader) or _left_over(op, state, branch, found)
        if region:
            return Add(op, shortcut, state, state, [branch], region)
        if not keeps_values(state):
            return None
        state, reader = state.inputs[0], state


def _of_a_part(op: Op, flow: Flow) -> Add | None:
    """``x[rows] += f`` or ``x[rows] = x[rows] + f``, whose branch is zero on the other rows."""
    whole, part = op.inputs[0], op.inputs[-1]
    if not _is_sum(part) or any(user.name != "setitem" for user in flow.users[part]):
        return None
    through_view = op.place == part.place  # the sum wrote to a view; otherwise the storing statement holds it
    if not through_view and not _stands_before(op, part):
        return None
    for old, branch in (part.inputs, part.inputs[::-1]):
        read = old.name == "getitem" and old.inputs[:1] == (whole,)
        same = through_view or (old.selected is not None and old.selected == op.selected)
        if read and same and (part.scale in (None, 1) or old is part.inputs[0]):
            add = _from_a_state(op, whole, branch, flow, {})
            return add and dataclasses.replace(add, part=part)
    return None


def _stands_before(one: Op, other: Op) -> bool:
    """Whether one expression stands before, or around, another one in the same function."""
    if one.place is None or other.place is None or one.place[0] is not other.place[0]:
        return False
    start, other_start = (place_of(*place)[::2] for place in (one.place, other.place))
    return None not in (*start, *other_start) and start <= other_start


def _near_miss(op: Op, flow: Flow) -> dict[Add, str]:
    """An operation that combines a state with a branch in a way that is no residual add, and the reason."""
    operands = op.inputs
    if op.name == KERNEL or op.leaf is not None:
        return _added_by_kernel(op, flow)
    if op.name == "sum":
        operands = operands[0].inputs if operands and operands[0].name == "stack" else ()
    elif op.name == "setitem":  # `x[rows] += f`
        part = operands[-1]
        selected = [o.inputs[:1] == operands[:1] and o.name == "getitem" for o in part.inputs]
        operands = (operands[0], part.inputs[1 - selected.index(True)]) if _is_sum(part) and any(selected) else ()
    elif op.name not in _LIKE_ADDS and not _is_sum(op):
        return {}
    for shortcut, branch in itertools.permutations(operands, 2):
        state, why = _combined(op, shortcut)
        region = _branch(op, state, branch, flow, op) if why else frozenset()
        if why and not region and op.matrices:  # the product with the weights is a part of it: `addmm(x, norm(x), w)`
            region = between(state, branch) and frozenset({op})
        if region:
            return {Add(op, shortcut, state, state, [branch], region): why}
    return {}


def _added_by_kernel(op: Op, flow: Flow) -> dict[Add, str]:
    """A near miss in a kernel without visible operations, such as a fused add and norm, whose result equals the sum."""
    live = [source for source in op.inputs if not source.constant and source.shape == op.shape is not None]
    pairs = [pair for pair in itertools.permutations(live, 2) if flow.tensors and _is_sum_by_value(op, *pair, flow)]
    regions = {pair: _branch(op, *pair, flow, op) for pair in pairs}
    # Without a region, the branch reads another result of the kernel that made the state.
    fitting = [pair for pair in pairs if regions[pair] or pair[1].weighted]
    if not fitting:
        return {}
    state, branch = max(fitting, key=lambda pair: bool(regions[pair]))
    return {Add(op, state, state, state, [branch], regions[state, branch] or frozenset({op})): FUSED}


def _is_sum_by_value(op: Op, one: Op, other: Op, flow: Flow) -> bool:
    x, f, y = (flow.tensors[op.index] for op in (one, other, op))
    if not y.is_floating_point() or y.is_meta or not x.device == f.device == y.device:
        return False
    return torch.allclose((x + f).to(y), y, rtol=1e-2, atol=1e-5)


def _combined(op: Op, shortcut: Op) -> tuple[Op, str]:
    """The state that ``op`` reads, and why this is no residual add; empty if it may be one."""
    if op.name != "add":
        state = shortcut
        while keeps_values(state):
            state = state.inputs[0]
        return state, _LIKE_ADDS[op.name]
    if op.scale is not None and op.scale != 1 and shortcut is op.inputs[1]:
        return shortcut, SCALED
    if op.reentrant:
        return shortcut.inputs[0] if shortcut.name == "detach" else shortcut, f"it {INSIDE}.{op.reentrant}"
    live = [source for source in shortcut.inputs if not source.constant]
    if len(live) != 1:
        return shortcut, ""
    return live[0], _SHORTCUTS.get(shortcut.name, "")


def _around(add: Add, found: dict[Op, Add]) -> str:
    """Why ``x + y`` is no residual add, if ``y`` is the stream, to which the same function has added a branch of x."""
    branch = add.branches[0]
    while keeps_values(branch):
        branch = branch.inputs[0]
    inner = found.get(branch)
    if inner is None or branch.scope is not add.op.scope or len(add.branches) > 1:
        return ""
    if inner.source is not inner.state:
        return ""  # x + (g(x) + f(x)), where g(x) looks like a projected shortcut
    return "adds to the residual stream what it was computed from"


def _injected(add: Add, found: dict[Op, Add]) -> str:
    """Why ``x + y`` is no residual add, if x is what a loop adds to its stream y: ``for f in blocks: y = f(y + x)``."""
    first = add.branches[0]
    while keeps_values(first) or first in found:
        first = found[first].state if first in found else first.inputs[0]
    again = first.place is not None and first.place == add.op.place and add.shortcut in first.inputs
    return "adds the same value to the residual stream in each pass of a loop" if again else ""


def _branch(add: Op, state: Op, branch: Op, flow: Flow, reader: Op) -> frozenset[Op]:
    """The operations that compute ``branch`` from ``state``; empty if there are none, or none with weights.

    ``reader`` is what reads the state for the addition: that itself, or a cast or a view.

    They have to run in the addition's function or in what it calls. They may run in a function further out only if this
    one returns the sum (``BertSelfOutput(hidden, input_tensor)``), or if it completes the branch and continues the
    stream (SD3's ``post_attention(attn, x)``). So a mask that each block adds is not taken for a stream across blocks;
    nor is a shift of all blocks' branches (``x + (scale * f(x) + shift)``).
    """
    if not any(op.weighted for op in between(state, branch) - {state}):
        return frozenset()
    for scope in add.scope.outward():
        region = between(state, branch, scope) - {state}
        if any(op.weighted for op in region):
            return region
        if not _returned(add, scope, flow, added_to=scope.holds(branch.scope)) or _of_all_blocks(state, reader, flow):
            break
    return frozenset()


def _of_all_blocks(state: Op, reader: Op, flow: Flow) -> bool:
    """Whether the expression that reads ``state`` does so in other calls of the same function, too."""
    calls = {user.scope for user in flow.users[state] if user.place == reader.place}
    return reader.place is not None and len(calls) > 1


def _left_over(add: Op, state: Op, branch: Op, found: dict[Op, Add]) -> frozenset[Op]:
    """The branch of an add to another add's sum, if functions further out compute it. A mask of each block is no sum.

    A block gets both, and adds what the block before it computed (``x, residual = norm(x, residual)``); or the other
    add is the same expression in another block, which returns the sum: the last block may not (RealFormer's scores).
    """
    given = [op for ops in add.scope.arguments.values() for op in ops]
    same = add.place is not None and (add.scope.code, add.place) == (state.scope.code, state.place)
    if state not in found or not (same or {state, branch} <= {*given}):
        return frozenset()
    region = between(state, branch) - {state}
    return region if any(op.weighted for op in region) else frozenset()


def _returned(add: Op, scope: Scope, flow: Flow, added_to: bool = False) -> bool:
    """Whether a function returns a sum, or what operations on the sum alone compute from it.

    Args:
        added_to: whether further additions to the sum count as such operations.
    """
    reached, todo = {add}, [add]
    while todo:
        op = todo.pop()
        users = flow.users[op]
        if not users or any(not scope.holds(user.scope) for user in users):
            return True
        for user in users:
            live = {source for source in user.inputs if not source.constant}
            alone = live <= reached or (added_to and _is_sum(user))
            if user not in reached and not user.weighted and alone:
                reached.add(user)
                todo.append(user)
    return False


def _parallel(op: Op, found: dict[Op, Add], flow: Flow) -> Add | None:
    """``(x + attn) + mlp``: one residual add with two branches, if nothing else uses the first sum."""
    for inner, branch in (op.inputs, op.inputs[::-1]):
        first = found.get(inner)
        if first is None or len(flow.users[inner]) != 1 or inner.scope is not op.scope:
            continue
        if branch is first.source is not first.state:
            continue  # x + (g(x) + f(x)), where g(x) looks like a projected shortcut
        region = between(first.source, branch) - {first.source}
        if not region and not _in_one_expression(inner, op):
            continue  # it is what the state is made of
        del found[inner]
        branches, inside = [*first.branches, branch], [*first.inner, inner]
        return Add(op, first.shortcut, first.state, first.source, branches, first.region | region, inside)
    return None


def _in_one_expression(inner: Op, outer: Op) -> bool:
    """Whether ``inner`` is written inside ``outer``, as in ``x + f + 0.5``; True if unknown.

    An expression that a loop runs twice is not inside itself.
    """
    if inner.place is None or outer.place is None:
        return True
    return inner.place != outer.place and within(place_of(*inner.place), place_of(*outer.place))


def _projected(op: Op) -> Add | None:
    """``downsample(x) + f(x)``: the shortcut has one weight matrix, the branch more. A stream begins there.

    A branch without a nonlinearity is no branch: ``W(x) + B(A(x))`` is a linear map with an adapter of low rank (LoRA).
    """
    for shortcut, branch in (op.inputs, op.inputs[::-1]):
        if shortcut.shape != op.shape:
            continue
        source, weights = shortcut, 0
        while True:
            live = [o for o in source.inputs if not o.constant]
            if len(live) != 1 or not _inside(source, op):
                break
            weights += source.matrices
            source = live[0]
            region = between(source, branch) - {source}
            if weights == 1 and sum(o.matrices for o in region) > 1 and not all(map(_is_linear, region)):
                return Add(op, shortcut, shortcut, source, [branch], region)
    return None


def _is_linear(op: Op) -> bool:
    """Whether an operation is a linear map of one tensor, up to a constant."""
    live = [source for source in op.inputs if not source.constant]
    if op.leaf is not None:
        return len(live) == 1 and type(op.leaf) in _LINEAR
    return len(live) == 1 and (op.name in _AFFINE | _MAPS or op.name.startswith("conv"))


def _inside(op: Op, add: Op) -> bool:
    """Whether ``op`` runs in a function that the function of ``add`` calls."""
    return op.scope is not add.scope and add.scope.holds(op.scope)


def _false_friend(add: Add) -> str:
    depth = len(add.block())
    names = {called(scope, depth) for scope in {op.scope for op in add.region}}
    named = [name for name in names if name]
    if named and all(POSITIONAL.search(name) for name in named):
        return "adds a position embedding"
    return ""


def called(scope: Scope, depth: int) -> str:
    """The child that ``scope`` runs in, as a path relative to module call ``depth`` around it; empty if in none."""
    scopes = scope.modules()
    if len(scopes) < depth:
        return ""
    above = scopes[depth - 1].path if depth else ""
    return scopes[depth].path.removeprefix(above).lstrip(".") if len(scopes) > depth else ""


def between(start: Op, end: Op, inside: Scope | None = None, weights: bool = True) -> frozenset[Op]:
    """All operations on paths from ``start`` to ``end``, both included; empty if there is no path.

    Args:
        start, end: operations.
        inside: a function call; after ``start``, paths have to stay inside it.
        weights: whether paths through weights count.
    """
    if start is end:
        return frozenset([start])
    if start.index > end.index:
        return frozenset()
    # Go back from the end to the start, then forward among the operations that were met.
    before: list[Op] = []
    seen: set[Op] = {end}
    todo = [end]
    while todo:
        op = todo.pop()
        before.append(op)
        for source in op.inputs:
            if source.index < start.index or source in seen:
                continue
            if not weights and _is_index(source):
                continue
            if source is start or ((inside is None or inside.holds(source.scope)) and (weights or not source.weighted)):
                seen.add(source)
                todo.append(source)
    if start not in seen:
        return frozenset()
    return _reached(start, before)


def _is_index(op: Op) -> bool:
    """Whether a tensor holds integers or booleans, which are no states."""
    return op.dtype is not None and not (op.dtype.is_floating_point or op.dtype.is_complex)


def _reached(start: Op, ops: Iterable[Op]) -> frozenset[Op]:
    reached = {start}
    for op in sorted(ops, key=lambda op: op.index):
        if not reached.isdisjoint(op.inputs):
            reached.add(op)
    return frozenset(reached)
