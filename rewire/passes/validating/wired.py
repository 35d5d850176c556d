"""The original's branches, wired by a topology's formulas without any edit.

While the original runs, each residual add returns the result of the formulas instead of its sum, computed in float64
and plain torch from the branches so far. Where a block reads queries, keys and values separately, each projection gets
the input that it would have if the block read that one alone. With connection weights that have moved, a rewired model
has to match outputs and gradients of this model. At their start most topologies equal the plain network, which would
hide what an edit has lost.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from rewire.copies import Inputs, shared
from rewire.errors import ValidationMismatch
from rewire.mixes.fused_qkv import Fused
from rewire.passes.editing.carriers import casts_of, first_readers
from rewire.passes.editing.connect import register
from rewire.passes.find import Finding, Found
from rewire.passes.finding.adds import SCATTERED, is_view
from rewire.passes.finding.attention import weight_of
from rewire.passes.finding.chains import Chain
from rewire.passes.finding.flow import KERNEL, Args, Flow, Kwargs, Op, Place, Scope, around
from rewire.passes.finding.projections import Projections, find_projections
from rewire.passes.finding.record import Recorder
from rewire.passes.validating.wires import Wires
from rewire.patterns import Pattern
from rewire.runtime.connection import connections
from rewire.runtime.layout import Layout
from rewire.runtime.nested import mapped, tensors_and_streams
from rewire.runtime.reentrant import where_reentrant
from rewire.torch_internals import pytree, replace_saved_tensor_hooks, saved_tensor_hooks

T = TypeVar("T")
_Function: TypeAlias = Callable[..., Any]

#: The place of an operation or a call in the code, and a number that counts those at the same place.
_Key: TypeAlias = tuple[Hashable, ...]


def wired(found: Found, rewired: nn.Module, patterns: Sequence[Pattern]) -> nn.Module:
    """The original, wired by a rewired model's topologies, with that model's connection weights."""
    flow = found.evaluation.flow
    model = shared(flow.before or flow.model)
    for connection in connections(rewired).values():
        assert connection.trunk is not None
        register(model, connection.trunk, copy.deepcopy(connection))
    layouts = {name: connection.layout for name, connection in connections(rewired).items()}
    evaluation = _Script(found.evaluation, layouts, patterns)
    training, inference = (
        evaluation if finding is None else _Script(finding, layouts, patterns)
        for finding in (found.training, found.inference)
    )
    cls = type(model)

    def call(self: Any, *args: object, **kwargs: object) -> Any:
        wiring = _Wiring(self, training if self.training else evaluation if torch.is_grad_enabled() else inference)
        with wiring.running():
            result = cls.__call__(self, *args, **kwargs)
        wiring.check()
        return result

    metaclass: Any = type(cls)
    model.__class__ = metaclass(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})
    return model


@dataclasses.dataclass(eq=False)
class _Read:
    """An attention that reads queries, keys and values separately.

    Attributes:
        site: number of its residual add.
        projections: where it projects them.
        state: the key of the state that it reads.
        reader: path of the module in whose call the state is read.
    """

    site: int
    projections: Projections
    state: _Key
    reader: str


class _Script:
    """What happens to the streams in a run, by the keys of operations and calls.

    Attributes:
        trunks: for each pass of a stream through a trunk, the trunk's name and layout.
        steps: operation -> number of the pass, the step, and the number of the operand that is the stream's.
        starts: call -> number of the pass that starts with an argument, its name, and the index of the tensor in it.
        returned: call -> number of the pass that starts with what it returns, and the index of the tensor in that.
        weights: call -> parameters and buffers with which streams start in it, and the numbers of these passes.
        reads: the separate reads of each pass.
    """

    def __init__(self, found: Finding, layouts: Mapping[str, Layout], patterns: Sequence[Pattern]) -> None:
        self.trunks: list[tuple[str, Layout]] = []
        self.steps: dict[_Key, list[tuple[int, str, int]]] = {}
        self.starts: dict[_Key, list[tuple[int, str, int]]] = {}
        self.returned: dict[_Key, list[tuple[int, int]]] = {}
        self.weights: dict[_Key, dict[str, list[int]]] = {}
        self.reads: list[list[_Read]] = []
        self._flow = found.flow
        self._keys = dict(_numbered((op, (op.scope.path, op.place, op.name)) for op in found.flow))
        firsts: list[int] = []  # for each pass, the number of its first add
        for name, layout in layouts.items():
            for chain in found.passes(name):
                self._start(chain, len(self.trunks))
                self._adds(chain, len(self.trunks), layout)
                separate = [n for n in range(len(chain.adds)) if layout.sites[n].reads_qkv]
                self.reads.append([self._read(found, name, chain, n, patterns) for n in separate])
                self.trunks.append((name, layout))
                firsts.append(chain.adds[0].op.index)
        # A stream that starts with another one's state starts after the other's steps, whose result it takes.
        for steps in self.steps.values():
            steps.sort(key=lambda step: (step[1] == "start", step[1] == "start" and -firsts[step[0]]))
        for starts in self.starts.values():
            starts.sort(key=lambda start: -firsts[start[0]])
        for returned in self.returned.values():
            returned.sort(key=lambda start: -firsts[start[0]])
        del self._flow, self._keys

    def __deepcopy__(self, _: object) -> _Script:
        return self

    def _put(self, op: Op, number: int, what: str, operand: int = 0) -> None:
        self.steps.setdefault(self._keys[op], []).append((number, what, operand))

    def _start(self, chain: Chain, number: int) -> None:
        """Note where a stream starts: at an argument of the call that first reads it, or an operation in that call.

        A module that is called there may make the first state, and read it before it returns it.
        """
        scope, entry = _beginning(self._flow, chain), chain.entry
        calls = dict.fromkeys(call for op in self._flow for call in op.scope.modules())
        keys = dict(_numbered((call, (call.path,)) for call in calls))
        inside = [call for call in _hooked(entry.scope.modules()) if call is not scope and scope.holds(call)]
        if inside and entry in inside[0].results:
            self.returned.setdefault(keys[inside[0]], []).append((number, inside[0].results.index(entry)))
            return
        brought = next(((name, ops.index(entry)) for name, ops in scope.arguments.items() if entry in ops), None)
        made_here = scope.holds(entry.scope) and entry.place is not None  # not an input of the model
        if entry.parameter and brought is None:
            self.weights.setdefault(keys[scope], {}).setdefault(entry.parameter, []).append(number)
            return
        if made_here or brought is None:
            self._put(entry, number, "start")
            return
        self.starts.setdefault(keys[scope], []).append((number, *brought))

    def _adds(self, chain: Chain, number: int, layout: Layout) -> None:
        for site, (add, passage) in enumerate(zip(chain.adds, chain.passages, strict=True)):
            for op in (*(passage if site else ()), *casts_of(add)):
                if is_view(op) and not (add.flattened and op in casts_of(add)):
                    self._put(op, number, "view")
            shortcut = add.shortcut
            if add.part is not None:
                self._put(add.part, number, "part", 1 - add.first)
            for op in (*add.inner, add.op):
                self._put(op, number, "add" if op is add.op else "part", op.inputs.index(shortcut))
                shortcut = op
            if site in layout.posts:
                self._put(add.post[-1] if add.post else add.op, number, "push")

    def _read(self, found: Finding, name: str, chain: Chain, site: int, patterns: Sequence[Pattern]) -> _Read:
        add = chain.adds[site]
        known = find_projections(found.flow, found.trunks[name].sites[site], patterns, add)
        readers = (user for user in found.flow.users[add.state] if user in add.region)
        calls = around(op.scope.modules() for op in (add.op, *readers))
        return _Read(site, known, self._keys[add.state], _hooked(calls)[-1].path)


def _beginning(flow: Flow, chain: Chain) -> Scope:
    """The innermost module call with the first add and its branches' reads; or one that adds and gets the state."""
    first = chain.adds[0]
    own = {*first.region, *casts_of(first), *first.inner, first.op}
    scopes = around(op.scope.modules() for op in (first.op, *first_readers(flow, chain, own)))
    scopes = _hooked(scopes)
    adding = [s for s in scopes if any(add.op.scope is s for add in chain.adds)]
    given = [s for s in adding if any(chain.entry in ops for ops in s.arguments.values())]
    return given[0] if given else scopes[-1]


def _hooked(calls: Sequence[Scope]) -> list[Scope]:
    """The calls that the recorder's hooks see: not those of forwards as functions."""
    return [call for call in calls if not call.bare]


def _numbered(pairs: Iterable[tuple[T, _Key]]) -> Iterator[tuple[T, _Key]]:
    """Each item with its key: its place, and the number of earlier items at the same place."""
    counts: collections.Counter[_Key] = collections.Counter()
    for item, place in pairs:
        yield item, (*place, counts[place])
        counts[place] += 1


class _Reached(BaseException):
    """Carries the arguments of a projection. (A BaseException, which a forward does not catch.)"""

    def __init__(self, args: Args, kwargs: Kwargs) -> None:
        super().__init__()
        self.given, self.kwargs = args, kwargs


class _Wiring(Recorder):
    """A run in which the script happens.

    Attributes:
        passes: the streams so far.
        counts: numbers of operations and calls, by their place.
        modules: of the model, by path.
        products: weights of projections that are products in a forward: see `Projections.paths`.
        calls: for modules in whose calls an attention reads: copies of the present arguments, and earlier `counts`.
        origins: by ids of these copies: the keys of what made the originals.
        probe: while a call is repeated for one of queries, keys and values: the values to read, by the keys of those
            that they replace; and the path of the projection at which to stop.
        met: keys of all values in the arguments of that call.
        written: the target of an in-place addition, and its value before.
        named: parameters and buffers.
        started: number of a pass -> the first state that it made of one of these.
        under_way: for each running call, its key, the number of operations before it, its arguments, and the states
            in these with which streams start, each with the tensor in whose place it is.
    """

    def __init__(self, model: nn.Module, script: _Script) -> None:
        super().__init__(model)
        self.script = script
        made = connections(model)
        weights = {name: made[name].effective() for name in dict(script.trunks)}
        self.passes = [Wires(layout, weights[name]) for name, layout in script.trunks]
        self.parts: list[list[Tensor]] = [[] for _ in self.passes]
        self.counts: collections.Counter[_Key] = collections.Counter()
        self.keys: dict[int, _Key] = {}
        self.calls: dict[str, tuple[nn.Module, Args, Kwargs, collections.Counter[_Key]]] = {}
        self.readers = {read.reader for reads in script.reads for read in reads}
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.products = {way for reads in script.reads for read in reads for way in read.projections.ways}
        self.products -= self.modules.keys()
        self.probe: tuple[dict[_Key, Tensor], str] | None = None
        self.met: set[_Key] = set()
        self.under_way: list[tuple[_Key, int, Inputs, list[tuple[Tensor, Tensor]]]] = []
        self.replaced: list[Tensor] = []
        self.named = dict((*model.named_parameters(), *model.named_buffers()))
        self.started: dict[int, Tensor] = {}
        self.origins: dict[int, _Key | None] = {}
        self.written: tuple[Tensor, Tensor] | None = None

    def _new(self, tensor: Tensor, name: str, inputs: tuple[Op, ...], scope: Scope, place: Place | None) -> Op:
        op = super()._new(tensor, name, inputs, scope, place)
        at = (scope.path, place, name)
        self.keys[op.index] = (*at, self.counts[at])
        self.counts[at] += 1
        return op

    def __torch_function__(self, func: _Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        args, kwargs = self._with_starts(args, kwargs or {})
        count = len(self.ops)
        _keep_activations()
        name, self.written = getattr(func, "__name__", ""), None
        if name in ("add_", "__iadd__"):  # the target may be a branch's output
            self.written = args[0], args[0].clone()
        in_place = kwargs.get("inplace") or (name.endswith("_") and not name.endswith("__"))
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, _same) if in_place else contextlib.nullcontext():
            result = super().__torch_function__(func, types, args, kwargs)  # `_in_place_of` may write to the result
        return self._happened(count, result, func, args, kwargs)

    def _with_starts(self, args: Args, kwargs: Kwargs) -> Inputs:
        """Arguments, with first states in place of the parameters and buffers with which streams start in this call."""
        starts = self.script.weights.get(self.under_way[-1][0], {}) if self.under_way else {}
        for name, passes in starts.items():
            weight = self.named[name]
            if any(item is weight for item in tensors_and_streams((args, kwargs))):
                number = next((number for number in passes if not self.passes[number].complete), passes[-1])
                if number not in self.started:
                    self.started[number] = weight  # which the formulas read
                    self.started[number] = self.passes[number].start(weight)
                    self._read_as(self._op(weight), self.started[number])
                new = self.started[number]
                args, kwargs = mapped((args, kwargs), lambda item: new if item is weight else item, fresh=True)  # noqa: B023
        return args, kwargs

    def _left(self, module: nn.Module, args: Args, output: object) -> Any:
        count, scope = len(self.ops), self.stack[-1]  # including those in the module
        super()._left(module, args, output)
        output = self._happened(count, output, module, args, {})
        if self.probe is not None:
            return output
        key, before, given, put = self.under_way.pop()
        for new, x in put:  # where the call has left them
            mapped(given, lambda item: x if item is new else item)  # noqa: B023
        if count == before:
            self.counts[self.paths[module],] -= 1  # the call failed and will be repeated, or it does nothing
        for number, index in self.script.returned.get(key, ()):
            op = scope.results[index]
            output = self._in_place_of(op, self.passes[number].start(self.made[op.index]), output, (args, {}))
        return output

    def _happened(self, count: int, result: object, func: _Function, args: Args, kwargs: Kwargs) -> Any:
        """The result of a call in which operations from number ``count`` on return something else."""
        for op in self.ops[count:]:
            new = self._happens(op, func, args, kwargs)
            if new is not None:
                result = self._in_place_of(op, new, result, (args, kwargs))
        return result

    def _happens(self, op: Op, func: _Function, args: Args, kwargs: Kwargs) -> Tensor | None:
        """What an operation returns in place of its own result; None: its own result."""
        key, new = self.keys[op.index], None
        if self.products and weight_of(op) in self.products:
            return self._product(op, func, args, kwargs)
        if self.probe is not None:
            self.met.add(key)
            return self.probe[0].get(key)
        steps = self.script.steps.get(key, ())
        if steps and not torch.is_grad_enabled() and where_reentrant():  # what follows has other gradients
            raise RuntimeError(f"'{op.name}' in module '{op.scope.path}' runs inside an autograd function")
        if steps and op.name == KERNEL and op.leaf is None:  # its result was used before it was seen
            raise RuntimeError(f"kernels make the state in module '{op.scope.path}', and show no operations")
        for number, what, operand in steps:
            wires, made = self.passes[number], self.made[op.index] if new is None else new
            if what == "start":
                new = wires.start(made)
            elif what == "push":
                new = wires.push(made)
            elif what == "view":
                viewed = _first((args, kwargs))
                wires.view(lambda x: func(*_swapped(args, viewed, x), **_swapped(kwargs, viewed, x)), made)  # noqa: B023
            else:
                if op.name == "setitem":
                    self.parts[number] = [self._stored(op, func, args, f) for f in self.parts[number]]
                else:
                    self.parts[number].append(self._branch(op, wires, operand, func, (args, kwargs)))
                if what == "add":
                    rows = wires.value if op.name in SCATTERED else None
                    new = wires.add(self.parts[number], made if rows is None else made.view_as(rows))
                    self.parts[number] = []
        return new

    def _branch(self, op: Op, wires: Wires, operand: int, func: _Function, given: Inputs) -> Tensor:
        """The branch that a sum adds to its operand number ``operand``."""
        branch = self.made[op.inputs[1 - operand].index]
        if op.name in SCATTERED:  # to some rows
            shortcut = _first(given)
            args, kwargs = _swapped(given, shortcut, torch.zeros_like(shortcut))
            branch = func(*args, **kwargs)
            branch = branch if wires.value is None else branch.view_as(wires.value)
        branch = self.written[1] if self.written and branch is self.written[0] else branch
        return branch if op.scale is None or op.scale == 1 else branch * op.scale

    def _stored(self, op: Op, func: _Function, args: Args, branch: Tensor) -> Tensor:
        """A branch for some rows, with zeros elsewhere: what ``x[rows] += branch`` adds to ``x``."""
        x = self.made[op.index]
        nothing = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).zero_()
        if func is Tensor.__setitem__:
            nothing[args[1]] = branch
        else:  # to a view
            offset = args[0].storage_offset() - x.storage_offset()
            nothing.as_strided(args[0].shape, args[0].stride(), offset).copy_(branch)
        return nothing

    def _in_place_of(self, op: Op, new: Tensor, result: object, given: Inputs) -> Any:
        own = self.made[op.index]
        if op.name == "setitem" or any(own is tensor for tensor in pytree.tree_leaves(given)):  # it was written to
            own.copy_(new)
            for wires in self.passes:
                wires.value = own if wires.value is new else wires.value
            return result
        self._read_as(op, new)
        return pytree.tree_map(lambda item: new if item is own else item, result)

    def _read_as(self, op: Op, new: Tensor) -> None:
        """Let what an operation made be ``new`` for all that reads it from now on."""
        self.replaced.append(self.made[op.index])  # keeps ids from being reused
        self.made[op.index], self.known[id(new)] = new, op

    def _entered(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Inputs | None:
        args, kwargs = self._with_starts(args, kwargs)
        super()._entered(module, args, kwargs)
        path = self.paths[module]
        if self.probe is not None:
            self._stop_at(path, args, kwargs)
            return None
        _keep_activations()
        put: list[tuple[Tensor, Tensor]] = []
        for number, name, item in self.script.starts.get((path, self.counts[path,]), ()):
            op = self.stack[-1].arguments[name][item]
            x = next(given for given in tensors_and_streams((args, kwargs)) if self.known.get(id(given)) is op)
            new = self.passes[number].start(x)
            # Lists and dicts are not copied: the call may leave the next state in one of its caller's.
            args, kwargs = mapped((args, kwargs), lambda item: new if item is x else item)  # noqa: B023
            put.append((new, x))
            self._read_as(op, new)
        self.under_way.append(((path, self.counts[path,]), len(self.ops), (args, kwargs), put))
        self.counts[path,] += 1
        if path in self.readers:
            copied = _changed((args, kwargs), self._copied)  # the call may write to its arguments
            self.calls[path] = module, *copied, collections.Counter(self.counts)
        return self._apart(path, args, kwargs)

    def _stop_at(self, path: str, args: Args, kwargs: Kwargs) -> None:
        """Stop a repeated call at its projection. If modules are shared, an earlier pass may call it, too."""
        assert self.probe is not None
        if path == self.probe[1] and self.met.issuperset(self.probe[0]):
            raise _Reached(args, kwargs)

    def _copied(self, item: Tensor) -> Tensor:
        made = self.known.get(id(item))
        copied = item.clone()
        self.origins[id(copied)] = None if made is None else self.keys.get(made.index)
        self.replaced.append(copied)
        return copied

    def check(self) -> None:
        """Refuse a run that left out steps of the script: it proves nothing."""
        missing = [name for (name, _), wires in zip(self.script.trunks, self.passes, strict=True) if not wires.complete]
        if missing:
            raise RuntimeError(f"other residual adds of trunk '{missing[0]}' ran than were found")

    def _apart(self, path: str, args: Args, kwargs: Kwargs) -> Inputs:
        """The arguments of a call; for a projection that is read separately, its own input."""
        own = self._reads(path)
        return self._projected(own, path, args, kwargs) if own else (args, kwargs)

    def _reads(self, path: str) -> list[tuple[Wires, _Read]]:
        """The reads of a projection now: of several streams, if they meet in one attention."""
        return [
            (wires, read)
            for wires, reads in zip(self.passes, self.script.reads, strict=True)
            for read in reads
            if wires.qkv is not None and wires.site == read.site and path in read.projections.ways
        ]

    def _projected(self, reads: Sequence[tuple[Wires, _Read]], path: str, args: Args, kwargs: Kwargs) -> Inputs:
        module, projections = self.modules[path], reads[0][1].projections
        if isinstance(module, nn.MultiheadAttention):
            names = ("query", "key", "value")
            given = [self._fed(reads, path, way) for way in "qkv"]
            own = [(*g.given, *(g.kwargs[n] for n in names[len(g.given) :]))[n] for n, g in enumerate(given)]
            return (*own, *args[3:]), {name: value for name, value in kwargs.items() if name not in names}
        if path != projections.fused_path:
            alone = self._fed(reads, path, projections.ways[path])
            return alone.given, alone.kwargs
        result = _parts([module.forward(*self._fed(reads, path, way).given) for way in "qkv"], projections.fused)

        def feed(*_: object) -> Tensor:
            handle.remove()
            return result

        handle = module.register_forward_hook(feed)
        return args, kwargs

    def _product(self, op: Op, func: _Function, args: Args, kwargs: Kwargs) -> Tensor | None:
        """The result of a product with a weight, if that is a projection."""
        path = weight_of(op)
        if self.probe is not None:
            self._stop_at(path, args, kwargs)
            return None
        reads = self._reads(path)
        if not reads:
            return None
        projections = reads[0][1].projections
        fused = path == projections.fused_path
        with self:  # hides what runs inside an operation
            fed = [self._fed(reads, path, way) for way in ("qkv" if fused else projections.ways[path])]
        made = [func(*alone.given, **alone.kwargs) for alone in fed]
        return _parts(made, projections.fused) if fused else made[0]

    def _fed(self, reads: Sequence[tuple[Wires, _Read]], path: str, way: str) -> _Reached:
        """Repeat the reader's call with the read for queries, keys or values alone; return the projection's input."""
        reader = reads[0][1].reader
        read = {of.state: wires.qkv[way].clone() for wires, of in reads if wires.qkv is not None}
        module, args, kwargs, counts = self.calls[reader]
        before, depth = self.counts, len(self.stack)

        self.met = set()

        def given(item: Tensor) -> Tensor:
            origin = self.origins[id(item)] or ()
            self.met.add(origin)
            known = read.get(origin)
            return item.clone() if known is None else known

        args, kwargs = _changed((args, kwargs), given)
        self.counts, self.probe = collections.Counter(counts), (read, path)
        try:
            Recorder._entered(self, module, args, kwargs)
            module.forward(*args, **kwargs)  # hooks have run
        except _Reached as reached:
            return reached
        finally:
            self.counts, self.probe = before, None
            del self.stack[depth:]
        raise ValidationMismatch(f"'{path}' is not called where '{reader}' is called once more.")


def _parts(made: Sequence[Tensor], fused: Fused | None) -> Tensor:
    """The output of a fused projection: each feature from what queries, keys or values read."""
    assert fused is not None
    parts = [x.unflatten(-1, (fused.groups, -1)).split(fused.sizes, -1)[n] for n, x in enumerate(made)]
    return torch.cat(parts, -1).flatten(-2)


def _keep_activations() -> None:
    """Undo activation checkpointing, whose rerun in backward would not be wired."""
    hooks = saved_tensor_hooks()
    if hooks is not None and hooks[0] is not _same:
        replace_saved_tensor_hooks(_same, _same)


def _same(x: Tensor) -> Tensor:
    return x


def _changed(value: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """A copy of arguments with ``change`` applied to each tensor, also in dataclasses, which pytrees may not know."""
    args, kwargs = pytree.tree_map(lambda item: mapped(item, change, fresh=True), value)
    return args, kwargs


def _first(given: Inputs) -> Tensor:
    return next(item for item in pytree.tree_leaves(given) if isinstance(item, Tensor))


def _swapped(value: object, old: Tensor, new: Tensor) -> Any:
    return pytree.tree_map(lambda item: new if item is old else item, value)
