"""Pipeline parallelism: a rewired model that is cut between its blocks.

Where a stage ends in the middle of a trunk, its stream leaves as one plain tensor. Connection weights that only one
unit uses are on the stage of that unit. The few that many units use, small matrices, are on the stage where the trunk
starts, and are sent along with the states; their gradients come back like those of states, and add up there. So no
weight exists twice, and nothing has to be reduced, clipped or saved twice, whatever the schedule.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rewire.errors import RewireError, UnsupportedCall, check_type
from rewire.mixes.history import History
from rewire.passes.editing.connect import plain_parameters, register
from rewire.placement import Placement, is_dtensor
from rewire.ranks import chain
from rewire.ranks.meeting import check_alike
from rewire.runtime.connection import Connection
from rewire.runtime.gate import Gate
from rewire.runtime.layout import Layout
from rewire.runtime.live import Entry
from rewire.runtime.stream import Stream
from rewire.torch_internals import (
    casts_inputs,
    children_of,
    forward_hooks,
    forward_pre_hooks,
    has_groups_inside,
    is_first_of_two,
    pytree,
)

H = TypeVar("H")


def pipeline_stage(stage: nn.Module) -> None:
    """Make a part of a rewired model one stage of a pipeline.

    Rewire the model, cut it between blocks, call this on each part, then shard, compile and build optimisers. The part
    takes and returns a tensor in place of a stream. It keeps the learned connection weights of its own units, as one
    parameter per unit: ``dynamic_5`` has the rows of unit 5 in ``dynamic``. Weights that many units read are on the
    part where their trunk starts, and are sent with the stream. In a process group, ranks compare their recipes here,
    and wait a short time for each other.

    Args:
        stage: a part of a rewired model, usually a deep copy of it without some of its blocks, or a module around some
            of them. Changed in place.

    Raises:
        RewireError: nothing of the rewired model was cut off, so that it was cut before it was rewired; two streams
            cross at one cut; the part is sharded already; or other ranks rewired their parts of a trunk differently.

    Example:
        >>> import copy
        >>> first, last = copy.deepcopy(rewired), copy.deepcopy(rewired)
        >>> del first.blocks[2:], last.blocks[:2]
        >>> rewire.pipeline_stage(first)
        >>> rewire.pipeline_stage(last)
        >>> torch.equal(last(*first(x)), rewired(x))
        True
    """
    parts = _parts(stage)
    if any(part.whole and plain_parameters(stage) >= part.connection.others for part in parts):
        raise RewireError(
            f"this stage has all residual adds of trunk '{parts[0].name}', and everything else that was there when it "
            "was rewired. If it had been cut from a larger model before, the stages would not be connected with each "
            "other. Rewire the whole model, then cut it, then call rewire.pipeline_stage on each part."
        )
    entering, leaving = [p for p in parts if p.first > 0], [p for p in parts if p.last is not None]
    for crossing in (entering, leaving):
        if len(crossing) > 1:
            raise RewireError(
                f"the streams of trunks {' and '.join(repr(part.name) for part in crossing)} would cross at the same "
                "place: cut the model where it has one stream."
            )
    chain.check_chains([chain.Part(p.connection.facts(), p.connection.number, p.first, p.last) for p in parts])
    held = {part.name: _placed(stage, part) for part in parts if not part.whole}
    for module in stage.modules():
        for entry in entries_of(module):
            entry.cut_at = next((part.last for part in leaving if part.name == entry.trunk), None)
    for part in leaving:
        assert part.last is not None
        stage.register_forward_hook(_Leaves(Boundary(held[part.name], part.last)), prepend=True)
    for part in entering:
        stage.register_forward_pre_hook(_Enters(Boundary(held[part.name], part.first)))


def pipeline_cache(parts: Sequence[nn.Module], group: dist.ProcessGroup | None = None) -> None:
    """Let a rank with several stages cache what it has of a stream, so that only what is new to it is sent.

    This is for schedules with several stages on a rank, like interleaved 1F1B: each stage takes the states that an
    earlier stage of the rank had at its end, and the connection weights, from a cache (cache-based pipeline
    communication of Attention Residuals, arXiv 2603.15031, Section 4.1). It helps topologies that keep their states
    unchanged.

    For each micro-batch all stages have to be called in turn, as schedules do. Entries of an interrupted training step,
    or of a call of a single stage (to count its operations, say), are dropped; but those of a single stage's call in
    evaluation mode disturb later evaluation. Collective: all ranks of the group call it, after `pipeline_stage`.

    Args:
        parts: the stages of this rank, in the order of the model.
        group: the ranks of the pipeline; None: all ranks.

    Raises:
        RewireError: the ranks rewired the model differently.

    Example:
        >>> for part in parts:  # doctest: +SKIP
        ...     rewire.pipeline_stage(part)  # doctest: +SKIP
        >>> rewire.pipeline_cache(parts, mesh["pp"].get_group())  # doctest: +SKIP
    """
    for part in parts:
        check_type("each of the parts", part, nn.Module)
    if group is not None:
        check_type("group", group, dist.ProcessGroup)
    enters = [_hook(forward_pre_hooks(part).values(), _Enters) for part in parts]
    leaves = [_hook(forward_hooks(part).values(), _Leaves) for part in parts]
    turns = list(zip(leaves[:-1], enters[1:], strict=True))
    mine = [(a.place, b.place) for a, b in turns if a is not None and b is not None and a.place[0] == b.place[0]]
    trunks = {hook.boundary.name: hook.boundary.connection for hook in (*enters, *leaves) if hook is not None}
    posts = [{"rank": dist.get_rank(), "facts": connection.facts()} for connection in trunks.values()]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (mine, posts), group)
    check_alike([post for _, some in gathered for post in some])
    everyone = [pairs for pairs, _ in gathered]
    # place where a stage begins -> where its rank's previous stage ended, if another rank's stage lies between
    known = {begins: ended[1] for pairs in everyone for ended, begins in pairs if ended != begins}
    for hook in (*enters, *leaves):
        if hook is not None and hook.place in known:
            hook.boundary = Boundary(hook.boundary.connection, hook.place[1], known[hook.place])
    for left, entered in turns:
        if left is not None and entered is not None and entered.place in known:
            left.kept = entered.kept = deque()


def _hook(hooks: Iterable[object], kind: type[H]) -> H | None:
    return next((hook for hook in hooks if isinstance(hook, kind)), None)


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a trunk that is on a stage.

    Attributes:
        connection: the trunk's connection.
        first: number of residual adds before the stage.
        last: number of residual adds up to the stage's end; None if the trunk ends here.
    """

    connection: Connection
    first: int
    last: int | None

    @property
    def name(self) -> str:
        return self.connection.layout.trunk

    @property
    def whole(self) -> bool:
        return self.first == 0 and self.last is None


def _parts(stage: nn.Module) -> list[Part]:
    check_type("stage", stage, nn.Module)
    ends: dict[str, list[int]] = {}
    found: dict[str, Connection] = {}
    for entry in (entry for module in stage.modules() for entry in entries_of(module)):
        found[entry.trunk] = entry.connection
        ends.setdefault(entry.trunk, []).extend(
            place for start, count in entry.adds.items() for place in (start, start + count)
        )
    return [
        Part(found[name], min(places), max(places) if max(places) < len(found[name].layout.units) else None)
        for name, places in ends.items()
        if places
    ]


def entries_of(module: nn.Module) -> list[Entry]:
    """The entries of all edited functions of a module."""
    return [entry for gate in vars(module).values() if isinstance(gate, Gate) for entry in gate.entries]


def _placed(stage: nn.Module, part: Part) -> Connection:
    """The connection that the stage holds, with the learned weights if the trunk starts here."""
    connection = part.connection.staged(part.first, part.last)
    for module in stage.modules():
        for name, child in children_of(module).items():
            if child is part.connection:
                children_of(module)[name] = connection
                return connection
    if (part.first == 0 or connection.rows) and any(is_dtensor(parameter) for parameter in stage.parameters()):
        raise RewireError(
            f"the connection weights of trunk '{part.name}' were lost when the model was cut, and this stage is "
            "sharded without them: call rewire.pipeline_stage before the stage is sharded."
        )
    assert connection.trunk is not None
    register(stage, dataclasses.replace(connection.trunk, owner=_home(stage, part)), connection)
    return connection


def _home(stage: nn.Module, part: Part) -> str:
    """Path of the module that is to own a connection: the same as before; in a bare sequence, its first block."""
    assert part.connection.trunk is not None
    paths = [path for path, _ in stage.named_modules()]
    home = part.connection.trunk.owner if part.connection.trunk.owner in paths else ""
    if not isinstance(stage.get_submodule(home), nn.Sequential):
        return home
    return next(path for path, module in stage.named_modules() if any(entry.adds for entry in entries_of(module)))


class _Crossing:
    """Hook at one end of a stage, where a stream crosses.

    Attributes:
        kept: what a later stage of this rank uses again, one entry for each micro-batch; None without a cache.
    """

    def __init__(self, boundary: Boundary) -> None:
        self.boundary = boundary
        self.kept: deque[Kept] | None = None

    @property
    def place(self) -> tuple[str, int]:
        return self.boundary.name, self.boundary.position


class _Leaves(_Crossing):
    """Forward hook: replaces the stream that goes on to the next stage by a tensor."""

    def __call__(self, _module: nn.Module, _args: object, output: object) -> Any:
        items = output if isinstance(output, (tuple, list)) else (output,)
        if not any(isinstance(item, Stream) for item in items):
            raise UnsupportedCall(
                f"a stage that ends after residual add {self.boundary.position} of trunk '{self.boundary.name}' "
                f"returned no stream, but {type(output).__name__}. It has to return what its last block returns, by "
                "itself or first in a tuple, and nothing may be computed of it."
            )
        return tuple([self.boundary.sent(item, self.kept) if isinstance(item, Stream) else item for item in items])


class _Enters(_Crossing):
    """Forward pre-hook: makes a stream of the first argument, the tensor from the previous stage.

    Attributes:
        in_groups: whether FSDP2 has groups of weights inside the stage; None before the first call.
    """

    in_groups: bool | None = None

    def __call__(self, module: nn.Module, args: tuple[object, ...]) -> tuple[Any, ...]:
        boundary = self.boundary
        if not args or not isinstance(args[0], Tensor) or not boundary.message.fits(args[0]):
            got = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else f"{len(args)} arguments"
            raise UnsupportedCall(
                f"a stage that begins after residual add {boundary.position} of trunk '{boundary.name}' takes the "
                f"tensor that the stage before returns, {boundary.message}, and was given {got}. All parts have to be "
                "cut from one rewired model, rewire.pipeline_stage has to be called on the stage before, too, and what "
                "that returns has to be handed on as it is."
            )
        if boundary.message.float32 and casts_inputs(module):
            raise UnsupportedCall(
                f"the mixed precision of this stage of trunk '{boundary.name}' would cast connection weights that come "
                "with the stream: the policy of a whole stage needs cast_forward_inputs=False."
            )
        if self.in_groups is None:
            self.in_groups = has_groups_inside(module)
        return (boundary.stream(args[0], self.kept, self.in_groups), *args[1:])


class Boundary:
    """A cut of a trunk, at which streams become tensors, and tensors become streams.

    A stream is sent as its states, in the order of an `outline` (each tensor once, a `History` as the states in it),
    and the connection weights that many units read. All of this is sent as one `Message`, except what the receiving
    rank has kept.

    Args:
        connection: the trunk's connection.
        position: number of residual adds before the cut.
        known: an earlier position, at which the receiving rank has kept the stream; None if it has kept nothing.

    Raises:
        UnsupportedCall: the cut is inside a unit.
    """

    def __init__(self, connection: Connection, position: int, known: int | None = None) -> None:
        self.connection, self.position, self.name = connection, position, connection.layout.trunk
        if not connection.layout.sites[position - 1].closes:
            raise UnsupportedCall(
                f"trunk '{self.name}' was cut after residual add {position}, in the middle of one of its units: cut it "
                "between blocks."
            )
        *earlier, stream = outline(connection, [position] if known is None else [known, position])
        states, self.structure = _flat(stream)
        ids = [id(state) for state in states]
        self.states = [n for n, state in enumerate(ids) if state not in ids[:n]]  # each tensor once
        self.same = [self.states.index(ids.index(state)) for state in ids]
        self.weights = connection.travelling
        has = [list(dict.fromkeys(map(id, _flat(one)[0]))) for one in earlier]
        #: For each tensor of the stream, its number in the stream at the earlier cut; None: it has to be sent.
        self.known = [has[0].index(ids[n]) if earlier and ids[n] in has[0] else None for n in self.states]
        self.known += [len(has[0]) + n if earlier else None for n in range(len(self.weights))]
        shapes = connection.layout.parameters(connection.start)
        self.message = Message(
            connection.layout,
            [states[n] for n, known in zip(self.states, self.known, strict=False) if known is None],
            [] if earlier else [shapes[name].shape for name in self.weights],
        )

    def sent(self, stream: Stream, kept: deque[Kept] | None = None) -> Tensor:
        """The message that is sent; appends the stream's tensors to ``kept``."""
        stream = stream.summed()
        states, structure = _flat(stream)
        if stream.position != self.position or stream.held is not None or structure != self.structure:
            raise UnsupportedCall(
                f"the stream of trunk '{self.name}' leaves a stage after residual add {stream.position}, in another "
                f"form than the next stage takes after residual add {self.position}: cut the model between blocks, "
                "return from a stage what its last block returns, and put no forward hooks on that block."
            )
        held = [*(states[n] for n in self.states), *(stream.shared.learned[name] for name in self.weights)]
        record = Kept(held)
        if kept is not None:
            kept.append(record)
        message: Tensor = _Hand.apply(self, record, *held)
        return stream.placement.wrapped(message) if stream.placement is not None else message

    def stream(self, message: Any, kept: deque[Kept] | None = None, in_groups: bool = False) -> Stream:
        """The stream, from the message and what was kept; made by calling the connection, so that FSDP gathers it.

        With ``in_groups``, backward refuses to compute gradients in two passes.
        """
        record = None if kept is None else self._taken(kept)

        def resumed(message: Any) -> Stream:
            placement, local = self.connection.placement, message
            if is_dtensor(message):
                local = message.to_local()
                placement = Placement.of_tokens(message, torch.Size([*local.shape[:-1], self.message.last(local)]))
            own = self.connection.learned(placement)
            witness = torch.zeros((), requires_grad=True).exp() if in_groups else None
            held = _Take.apply(self, record, local, witness, *own.values())
            states = pytree.tree_unflatten([held[n] for n in self.same], self.structure)
            learned = dict(zip([*self.weights, *own], held[len(self.states) :], strict=True))
            return self.connection.resume(states, learned, self.position, placement)

        return self.connection(message, resumed)

    def _taken(self, kept: deque[Kept]) -> Kept:
        """Take the oldest record whose micro-batch is still on its way."""
        while kept:
            record = kept.popleft()
            if record.on_its_way():
                return record
        raise UnsupportedCall(
            f"a stage that begins after residual add {self.position} of trunk '{self.name}' was called before the "
            "stage of this rank before it: call all stages in turn for each micro-batch, or leave out "
            "rewire.pipeline_cache."
        )


def outline(connection: Connection, positions: Sequence[int]) -> list[Stream]:
    """The connection's streams at ascending positions, for one token on the meta device.

    A state that does not change between two positions is the same tensor in both.
    """
    layout = connection.layout
    tensors = layout.parameters(connection.start)
    on_meta = {name: torch.empty_like(value, device="meta") for name, value in tensors.items()}
    token = layout.token("meta").bfloat16()  # so that states kept in float32 can be told apart
    stream, found = Stream.begin(token, layout.topology.weights(on_meta, layout.dims), layout), []
    for position in positions:
        while stream.position < position:
            stream = stream.write(torch.empty_like(token)).settled()
        found.append(stream)
    return found


def _flat(stream: Stream) -> tuple[list[Tensor], Any]:
    """The tensors of a stream's states that later units need, and the structure that holds them."""
    states = stream.layout.topology.lasting(stream.states)
    return pytree.tree_flatten(tuple(s.states if isinstance(s, History) else s for s in states))


class Kept:
    """The stream at the end of a stage, for a later stage of the same rank, and the gradients that come back from it.

    Attributes:
        tensors: the stream's tensors, detached.
        learn: which of them require gradients.
        grads: gradients from the later stage, once its backward has run.
        graph: a weak reference that dies with the stage's autograd graph; None without a graph.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        self.learn = [tensor.requires_grad for tensor in tensors]
        self.grads: list[Tensor | None] = [None] * len(tensors)
        self.graph: weakref.ref[_Alive] | None = None

    def on_its_way(self) -> bool:
        """Whether a later stage may still use the stream: its graph is alive, or it has none."""
        return self.graph() is not None if self.graph is not None else not (torch.is_grad_enabled() and any(self.learn))


class _Alive:
    """Lives as long as the graph that holds it."""


class Message:
    """Packs tensors of a stream into one, and unpacks them as views of it.

    The message has shape [tokens.., c], with c columns per token, so that it may be a DTensor, too. Its memory holds
    the tensors one after the other: first the bits of weights and other float32 tensors, then the hidden states.

    Args:
        layout: the trunk's layout.
        states: the states on the meta device; those that are hidden states in bfloat16.
        weights: shapes of the weights.

    Attributes:
        float32: whether the message has bits of float32 tensors.
    """

    def __init__(self, layout: Layout, states: Sequence[Tensor], weights: Sequence[torch.Size]) -> None:
        dims = layout.token("meta").dim() - 1  # number of token dimensions
        self.trailing = [state.shape[dims:] for state in states]
        self.precise = [state.dtype == torch.float32 for state in states]
        self.channels = layout.dims.width if layout.channels_are_last else None  # None: as many as the message has
        self.weights, self.float32 = weights, bool(weights) or any(self.precise)

    def __str__(self) -> str:
        return f"of {len(self.trailing)} states" + " and some weights" * bool(self.weights)

    def fits(self, message: Tensor) -> bool:
        """Whether a tensor may be such a message."""
        last = self.last(message)
        return last >= 1 and sum(self._columns(message.shape[:-1].numel(), message.dtype, last)) == message.shape[-1]

    def last(self, message: Tensor) -> int:
        """The size of the last dimension of hidden states."""
        if self.channels is not None:
            return self.channels
        weights, *states = self._columns(message.shape[:-1].numel(), message.dtype, 1)
        return (message.shape[-1] - weights) // sum(states)

    def _trailing(self, state: int, last: int) -> torch.Size:
        shape = self.trailing[state]
        return shape if self.channels is not None else torch.Size([*shape[:-1], last])

    def _columns(self, tokens: int, dtype: torch.dtype, last: int) -> list[int]:
        """The numbers of columns of the weights and of each state."""
        bits = 4 * sum(shape.numel() for shape in self.weights)
        double = max(1, 4 // dtype.itemsize)
        sizes = [self._trailing(n, last).numel() for n in range(len(self.trailing))]
        precise = [n * double if known else n for n, known in zip(sizes, self.precise, strict=True)]
        return [2 * math.ceil(bits / (2 * dtype.itemsize * max(1, tokens))), *precise]

    def packed(self, tensors: Sequence[Tensor]) -> Tensor:
        """The message of states and weights."""
        states, weights = tensors[: len(self.trailing)], tensors[len(self.trailing) :]
        like = next(state for state, precise in zip(states, self.precise, strict=True) if not precise)
        tokens = states[0].shape[: states[0].dim() - len(self.trailing[0])]
        message = like.new_zeros(*tokens, sum(self._columns(tokens.numel(), like.dtype, like.shape[-1])))
        precise = torch.promote_types(like.dtype, torch.float32)
        given = [s.to(precise) if known else s for s, known in zip(states, self.precise, strict=True)]
        for place, tensor in zip(self.parts(message), [*given, *weights], strict=True):
            place.copy_(tensor)
        return message

    def parts(self, message: Tensor) -> list[Tensor]:
        """The states and weights in a message: views of it."""
        tokens, last = message.shape[:-1], self.last(message)
        sizes = [columns * tokens.numel() for columns in self._columns(tokens.numel(), message.dtype, last)]
        order = sorted(range(len(self.trailing)), key=lambda n: not self.precise[n])  # wider numbers first
        bits, *pieces = message.reshape(-1).split([sizes[0], *(sizes[n + 1] for n in order)])
        precise = torch.promote_types(message.dtype, torch.float32)
        found: dict[int, Tensor] = {}
        for n, piece in zip(order, pieces, strict=True):
            found[n] = (piece.view(precise) if self.precise[n] else piece).view(*tokens, *self._trailing(n, last))
        flat, counts = bits.view(torch.float32), [shape.numel() for shape in self.weights]
        weights = flat[: sum(counts)].split(counts) if counts else ()
        return [*(found[n] for n in sorted(found)), *map(Tensor.view, weights, self.weights)]


class _Hand(torch.autograd.Function):
    """Packs a stream's tensors into a message; its backward adds the gradients of those that were kept.

    The message is neither a parameter nor a view, as some schedules detach a stage's output in place.
    """

    @staticmethod
    def forward(ctx: Any, boundary: Boundary, kept: Kept, *tensors: Tensor) -> Tensor:
        ctx.boundary, ctx.grads, ctx.alive = boundary, kept.grads, _Alive()  # holds no tensors
        kept.graph = weakref.ref(ctx.alive) if any(ctx.needs_input_grad) else None
        return boundary.message.packed([x for x, known in zip(tensors, boundary.known, strict=True) if known is None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        crossed = iter(ctx.boundary.message.parts(grad))
        found = [next(crossed) if known is None else None for known in ctx.boundary.known]
        return (None, None, *map(_sum, found, ctx.grads))


class _Take(torch.autograd.Function):
    """Returns a stream's tensors, from the message and from those that were kept, and then the stage's own weights.

    The weights pass through here for zero-bubble schedules. These first compute gradients of inputs, then gradients of
    weights, starting where both paths of the graph meet. Connection weights would meet it on both sides of a block,
    whose graph the second pass would free; so they all meet here.
    """

    @staticmethod
    def forward(
        ctx: Any, boundary: Boundary, kept: Kept | None, message: Tensor, witness: Tensor | None, *own: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.boundary, ctx.grads = boundary, [] if kept is None else kept.grads
        ctx.witness = None if witness is None else witness.grad_fn
        ctx.set_materialize_grads(False)
        crossed, needed = iter(boundary.message.parts(message)), ctx.needs_input_grad[2]
        held, learn = [], []
        for number in boundary.known:
            if number is None:
                held.append(next(crossed).detach())
                learn.append(needed)
            else:
                assert kept is not None
                held.append(kept.tensors[number].detach())
                learn.append(kept.learn[number])
        held += [x.detach() for x in own]
        learn += [x.requires_grad for x in own]
        ctx.made = [(x.shape, x.dtype, x.device) for x in held]
        ctx.mark_non_differentiable(*(tensor for tensor, learns in zip(held, learn, strict=True) if not learns))
        return tuple(held)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.witness is not None and is_first_of_two(ctx.witness):
            raise UnsupportedCall(
                "the schedule computes gradients of inputs and of weights in two passes, and FSDP2 has groups of "
                "weights inside this stage: torch 2.13 loses their gradients then, those of plain models, too. Call "
                "fully_shard on the stage alone, or take a schedule with one pass, such as Interleaved1F1B."
            )
        crossed = []
        for number, grad, (shape, dtype, device) in zip(ctx.boundary.known, grads, ctx.made, strict=False):
            if number is None:
                crossed.append(torch.zeros((), dtype=dtype, device=device).expand(shape) if grad is None else grad)
            else:
                ctx.grads[number] = grad
        message = ctx.boundary.message.packed(crossed) if ctx.needs_input_grad[2] else None
        return None, None, message, None, *grads[len(ctx.boundary.known) :]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b
