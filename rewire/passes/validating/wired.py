"""The original's branches, wired by a topology's formulas and without any edit.

While the original runs, its residual adds give what the formulas make of the branches so far, in float64 and plain
torch, in place of their sums; and each projection of queries, keys and values gets what it is given where the block
reads that one of the three alone. That is a model of its own. With connection weights that have moved, a rewired model
has to have its outputs and gradients: at their start most topologies are the plain network, and what an edit has lost
does not show.
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
from rewire.passes.editing.carriers import casts_of
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
from rewire.torch_internals import pytree, saved_tensor_hooks

T = TypeVar("T")
_Function: TypeAlias = Callable[..., Any]

#: Where in the code an operation or a call stands, and its number among those alike.
_Key: TypeAlias = tuple[Hashable, ...]


def wired(found: Found, rewired: nn.Module, patterns: Sequence[Pattern]) -> nn.Module:
    """The original, wired by the formulas of a rewired model's topologies, with connection weights like that one's."""
    flow = found.evaluation.flow
    model = shared(flow.before or flow.model)
    for connection in connections(rewired).values():
        assert connection.trunk is not None
        register(model, connection.trunk, copy.deepcopy(connection))
    layouts = {name: connection.layout for name, connection in connections(rewired).items()}
    scripts = [_Script(finding, layouts, patterns) for finding in found.findings]
    cls = type(model)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        wiring = _Wiring(self, scripts[self.training and len(scripts) > 1])
        with wiring.open, wiring.running():
            result = cls.__call__(self, *args, **kwargs)
        wiring.check()
        return result

    metaclass: Any = type(cls)
    model.__class__ = metaclass(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})
    return model


@dataclasses.dataclass(eq=False)
class _Read:
    """An attention that reads queries, keys and values apart.

    Attributes:
        site: number of its residual add.
        projections: where it projects them.
        state: the key of the value that it reads.
        reader: path of the module in whose call that is read.
    """

    site: int
    projections: Projections
    state: _Key
    reader: str


class _Script:
    """What happens to the streams in a run, by its operations and calls.

    Attributes:
        trunks: of each pass of a stream through a trunk, the trunk's name and layout.
        steps: of an operation -> number of the pass, what is done, and number of the operand that is the stream's.
        starts: of a call -> number of the pass that starts with an argument, its name, and which tensor of it.
        reads: by pass.
    """

    def __init__(self, found: Finding, layouts: Mapping[str, Layout], patterns: Sequence[Pattern]) -> None:
        self.trunks: list[tuple[str, Layout]] = []
        self.steps: dict[_Key, list[tuple[int, str, int]]] = {}
        self.starts: dict[_Key, list[tuple[int, str, int]]] = {}
        self.reads: list[list[_Read]] = []
        self._flow = found.flow
        self._keys = dict(_numbered((op, (op.scope.path, op.place, op.name)) for op in found.flow))
        firsts: list[int] = []  # of each pass, the number of its first add
        for name, layout in layouts.items():
            for chain in found.passes(name):
                self._start(chain, len(self.trunks))
                self._adds(chain, len(self.trunks), layout)
                separate = [n for n in range(len(chain.adds)) if layout.sites[n].reads_qkv]
                self.reads.append([self._read(found, name, chain, n, patterns) for n in separate])
                self.trunks.append((name, layout))
                firsts.append(chain.adds[0].op.index)
        # What starts with a state takes what another stream makes of it: in whose branch it is, and adds before it.
        for steps in self.steps.values():
            steps.sort(key=lambda step: (step[1] == "start", step[1] == "start" and -firsts[step[0]]))
        for starts in self.starts.values():
            starts.sort(key=lambda start: -firsts[start[0]])
        del self._flow, self._keys

    def __deepcopy__(self, _: object) -> _Script:
        return self

    def _put(self, op: Op, number: int, what: str, operand: int = 0) -> None:
        self.steps.setdefault(self._keys[op], []).append((number, what, operand))

    def _start(self, chain: Chain, number: int) -> None:
        """A stream starts with an argument of the call that reads it first, or with what an operation in that makes."""
        scope, entry = _beginning(self._flow, chain), chain.entry
        brought = next(((name, ops.index(entry)) for name, ops in scope.arguments.items() if entry in ops), None)
        made_here = scope.holds(entry.scope) and entry.place is not None  # by an operation: no input of the model
        if made_here or brought is None:
            self._put(entry, number, "start")
            return
        calls = dict.fromkeys(call for op in self._flow for call in op.scope.modules())
        keys = dict(_numbered((call, (call.path,)) for call in calls))
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
    """The innermost call of a module that holds the first add and all that its branches read; or adds, and gets it."""
    first = chain.adds[0]
    own = {*first.region, *casts_of(first), *first.inner, first.op}
    users = (user for op in (first.state, *casts_of(first)) for user in flow.users[op])
    scopes = around(op.scope.modules() for op in (first.op, *(user for user in users if user in own)))
    scopes = _hooked(scopes)
    adding = [s for s in scopes if any(add.op.scope is s for add in chain.adds)]
    given = [s for s in adding if any(chain.entry in ops for ops in s.arguments.values())]
    return given[0] if given else scopes[-1]


def _hooked(calls: Sequence[Scope]) -> list[Scope]:
    """Those that the recorder is told of: of modules, and not of their forwards as functions."""
    return [call for call in calls if not call.bare]


def _numbered(pairs: Iterable[tuple[T, _Key]]) -> Iterator[tuple[T, _Key]]:
    """Each with the number of those before it that stand at the same place."""
    counts: collections.Counter[_Key] = collections.Counter()
    for item, place in pairs:
        yield item, (*place, counts[place])
        counts[place] += 1


class _Reached(BaseException):
    """A projection gets these arguments. (No Exception, which a forward may catch.)"""

    def __init__(self, args: Args, kwargs: Kwargs) -> None:
        super().__init__()
        self.given, self.kwargs = args, kwargs


class _Wiring(Recorder):
    """A run in which the script happens.

    Attributes:
        passes: of streams, so far.
        counts: of operations and calls, by their place.
        modules: of the model, by path.
        products: weights of projections that are products in a forward: see `Projections.paths`.
        calls: of modules in whose calls an attention reads: copies of what the present call was given, and `counts`
            before it.
        origins: of these copies, by their ids: the keys of what made the originals.
        probe: in a call that is made again for one of queries, keys and values: what to read, by the key of the value
            in whose place it is, and the path of the projection at which it ends.
        met: the keys of what has been made or given in that call.
        written: what an addition in place has changed, and what it was before.
        before: for each call that runs, the number of operations before it.
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
        self.before: list[int] = []
        self.replaced: list[Tensor] = []
        self.origins: dict[int, _Key | None] = {}
        self.written: tuple[Tensor, Tensor] | None = None
        self.open = contextlib.ExitStack()

    def _new(self, tensor: Tensor, name: str, inputs: tuple[Op, ...], scope: Scope, place: Place | None) -> Op:
        op = super()._new(tensor, name, inputs, scope, place)
        at = (scope.path, place, name)
        self.keys[op.index] = (*at, self.counts[at])
        self.counts[at] += 1
        return op

    def __torch_function__(self, func: _Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs, count = kwargs or {}, len(self.ops)
        name, self.written = getattr(func, "__name__", ""), None
        if name in ("add_", "__iadd__"):  # perhaps to a branch's output
            self.written = args[0], args[0].clone()
        in_place = kwargs.get("inplace") or (name.endswith("_") and not name.endswith("__"))
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, _same) if in_place else contextlib.nullcontext():
            result = super().__torch_function__(func, types, args, kwargs)  # which `_in_place_of` may write to
        return self._happened(count, result, func, args, kwargs)

    def _left(self, module: nn.Module, args: Args, output: Any) -> Any:
        count = len(self.ops)  # behind those that the module made
        super()._left(module, args, output)
        if self.probe is None and count == self.before.pop():
            self.counts[self.paths[module],] -= 1  # it failed, and is called again, or does nothing
        return self._happened(count, output, module, args, {})

    def _happened(self, count: int, result: Any, func: _Function, args: Args, kwargs: Kwargs) -> Any:
        """A result, in which operations from the number ``count`` on give something else."""
        for op in self.ops[count:]:
            new = self._happens(op, func, args, kwargs)
            if new is not None:
                result = self._in_place_of(op, new, result, (args, kwargs))
        return result

    def _happens(self, op: Op, func: _Function, args: Args, kwargs: Kwargs) -> Tensor | None:
        """What an operation gives in place of its own result; None: that."""
        key, new = self.keys[op.index], None
        if self.products and weight_of(op) in self.products:
            return self._product(op, func, args, kwargs)
        if self.probe is not None:
            self.met.add(key)
            return self.probe[0].get(key)
        steps = self.script.steps.get(key, ())
        if steps and not torch.is_grad_enabled() and where_reentrant():  # what follows has other gradients
            raise RuntimeError(f"'{op.name}' in module '{op.scope.path}' runs inside an autograd function")
        if steps and op.name == KERNEL and op.leaf is None:  # it is used already when it is seen
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
        """What a sum adds to the operand of a number."""
        branch = self.made[op.inputs[1 - operand].index]
        if op.name in SCATTERED:  # to some rows
            shortcut = _first(given)
            args, kwargs = _swapped(given, shortcut, torch.zeros_like(shortcut))
            branch = func(*args, **kwargs)
            branch = branch if wires.value is None else branch.view_as(wires.value)
        branch = self.written[1] if self.written and branch is self.written[0] else branch
        return branch if op.scale is None or op.scale == 1 else branch * op.scale

    def _stored(self, op: Op, func: _Function, args: Args, branch: Tensor) -> Tensor:
        """A branch of a part, with zeros elsewhere: what ``x[rows] += branch`` adds to ``x``."""
        x = self.made[op.index]
        nothing = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).zero_()
        if func is Tensor.__setitem__:
            nothing[args[1]] = branch
        else:  # to a view
            offset = args[0].storage_offset() - x.storage_offset()
            nothing.as_strided(args[0].shape, args[0].stride(), offset).copy_(branch)
        return nothing

    def _in_place_of(self, op: Op, new: Tensor, result: Any, given: Inputs) -> Any:
        own = self.made[op.index]
        if op.name == "setitem" or any(own is tensor for tensor in pytree.tree_leaves(given)):  # which was written to
            own.copy_(new)
            for wires in self.passes:
                wires.value = own if wires.value is new else wires.value
            return result
        self.replaced.append(own)  # so that its id is not used again
        self.made[op.index], self.known[id(new)] = new, op
        return pytree.tree_map(lambda item: new if item is own else item, result)

    def _entered(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Inputs | None:
        super()._entered(module, args, kwargs)
        path = self.paths[module]
        if self.probe is not None:
            self._stop_at(path, args, kwargs)
            return None
        self._keep_activations()
        for number, name, item in self.script.starts.get((path, self.counts[path,]), ()):
            op = self.stack[-1].arguments[name][item]
            x = next(given for given in tensors_and_streams((args, kwargs)) if self.known.get(id(given)) is op)
            new = self.passes[number].start(x)
            # Not copies of dicts: the call may leave the next state in one that its caller holds.
            args, kwargs = mapped((args, kwargs), lambda item: new if item is x else item)  # noqa: B023
            self.known[id(new)] = op
            self.replaced.append(new)
        self.counts[path,] += 1
        self.before.append(len(self.ops))
        if path in self.readers:
            copied = _changed((args, kwargs), self._copied)  # the call may write to what it was given
            self.calls[path] = module, *copied, collections.Counter(self.counts)
        return self._apart(path, args, kwargs)

    def _stop_at(self, path: str, args: Args, kwargs: Kwargs) -> None:
        """End a call that is made again, at its projection: with shared modules an earlier pass calls that, too."""
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
        """Refuse a run in which something did not happen: it says nothing."""
        missing = [name for (name, _), wires in zip(self.script.trunks, self.passes, strict=True) if not wires.complete]
        if missing:
            raise RuntimeError(f"other residual adds of trunk '{missing[0]}' ran than were found")

    def _keep_activations(self) -> None:
        """Undo activation checkpointing: what it would run again, in backward, is not wired there."""
        hooks = saved_tensor_hooks()
        if hooks is not None and hooks[0] is not _same:
            self.open.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))

    def _apart(self, path: str, args: Args, kwargs: Kwargs) -> Inputs:
        """What a call gets: of a projection of queries, keys or values, where these are read apart, its own."""
        own = self._reads(path)
        return self._projected(own, path, args, kwargs) if own else (args, kwargs)

    def _reads(self, path: str) -> list[tuple[Wires, _Read]]:
        """What a projection reads now: of several streams, where these meet in one attention."""
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
        """What a product with a weight gives, where that is a projection."""
        path = weight_of(op)
        if self.probe is not None:
            self._stop_at(path, args, kwargs)
            return None
        reads = self._reads(path)
        if not reads:
            return None
        projections = reads[0][1].projections
        fused = path == projections.fused_path
        with self:  # which does not see what runs inside an operation
            fed = [self._fed(reads, path, way) for way in ("qkv" if fused else projections.ways[path])]
        made = [func(*alone.given, **alone.kwargs) for alone in fed]
        return _parts(made, projections.fused) if fused else made[0]

    def _fed(self, reads: Sequence[tuple[Wires, _Read]], path: str, way: str) -> _Reached:
        """What a projection is given where the block reads what is read for queries, keys or values alone."""
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
    """What a fused projection makes: each feature as it makes it of what queries, keys or values read."""
    assert fused is not None
    parts = [x.unflatten(-1, (fused.groups, -1)).split(fused.sizes, -1)[n] for n, x in enumerate(made)]
    return torch.cat(parts, -1).flatten(-2)


def _same(x: Tensor) -> Tensor:
    return x


def _changed(value: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """A copy of arguments with each tensor in them changed: of dataclasses, too, which pytrees may not know."""
    args, kwargs = pytree.tree_map(lambda item: mapped(item, change, fresh=True), value)
    return args, kwargs


def _first(given: Inputs) -> Tensor:
    return next(item for item in pytree.tree_leaves(given) if isinstance(item, Tensor))


def _swapped(value: Any, old: Tensor, new: Tensor) -> Any:
    return pytree.tree_map(lambda item: new if item is old else item, value)
