"""Pipeline parallelism: a rewired model that is cut between its blocks.

Where a stage ends in the middle of a trunk, its stream leaves as plain tensors: the states, and the learned connection
weights, which the next stage goes on with. Autograd then does the rest. The gradients of states and of connection
weights go back from stage to stage like any other gradient, and add up on the one stage that holds the weights: the
one on which the trunk starts. There is nothing to reduce, to clip or to save twice, whatever the schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rewire.connection import Connection
from rewire.depth import Entry
from rewire.errors import RewireError, UnsupportedCall
from rewire.gate import Gate
from rewire.kernels.history import History
from rewire.passes.connect import register
from rewire.placement import Placement, is_dtensor
from rewire.stream import Stream


def pipeline_stage(stage: nn.Module) -> None:
    """Let a part of a rewired model be one stage of a pipeline.

    Rewire the model, cut it between blocks, call this on each part, then shard, compile and build optimisers. The part
    takes and returns tuples of tensors where a stream belongs; the learned connection weights stay on the part on which
    their trunk starts, and on the others come with the stream.

    Args:
        stage: what is left of a rewired model, usually a deep copy of it without some of its blocks, or a module
            around some of them. Changed in place.

    Raises:
        RewireError: the part has all blocks of its trunks, so that it was rewired after it was cut; two streams cross
            at one place; or the connection weights of a sharded part are missing.

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
    if parts and all(part.first == 0 and part.last is None for part in parts):
        raise RewireError(
            f"this stage has all residual adds of trunk '{parts[0].name}': no stream crosses its ends. If it was cut "
            "from a larger model and then rewired, stages would be networks of their own: rewire the whole model, then "
            "cut it, then call rewire.pipeline_stage on each part."
        )
    entering, leaving = [p for p in parts if p.first > 0], [p for p in parts if p.last is not None]
    for crossing in (entering, leaving):
        if len(crossing) > 1:
            raise RewireError(
                f"the streams of trunks {' and '.join(repr(part.name) for part in crossing)} would cross at the same "
                "place: cut the model where it has one stream."
            )
    held = {part.name: _placed(stage, part) for part in parts}
    for module in stage.modules():
        for entry in _entries(module):
            entry.cut_at = next((part.last for part in leaving if part.name == entry.trunk), None)
    for part in leaving:
        assert part.last is not None
        stage.register_forward_hook(_Leaves(Boundary(held[part.name], part.last)), prepend=True)
    for part in entering:
        stage.register_forward_pre_hook(_Enters(Boundary(held[part.name], part.first)))


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a trunk that is on a stage.

    Attributes:
        connection: of the trunk.
        first: number of residual adds before it.
        last: number of residual adds up to its end; None if the trunk ends here.
    """

    connection: Connection
    first: int
    last: int | None

    @property
    def name(self) -> str:
        return self.connection.layout.trunk


def _parts(stage: nn.Module) -> list[Part]:
    ends: dict[str, list[int]] = {}
    found: dict[str, Connection] = {}
    for entry in (entry for module in stage.modules() for entry in _entries(module)):
        found[entry.trunk] = entry.connection
        ends.setdefault(entry.trunk, []).extend(
            place for start, count in entry.adds.items() for place in (start, start + count)
        )
    return [
        Part(found[name], min(places), max(places) if max(places) < len(found[name].layout.units) else None)
        for name, places in ends.items()
        if places
    ]


def _entries(module: nn.Module) -> list[Entry]:
    """What the functions of a module know of trunks."""
    return [entry for gate in vars(module).values() if isinstance(gate, Gate) for entry in gate.entries]


def _placed(stage: nn.Module, part: Part) -> Connection:
    """The connection that the stage holds, with the learned weights if the trunk starts here."""
    connection = part.connection if part.first == 0 else part.connection.receiving()
    for module in stage.modules():
        for name, child in module._modules.items():
            if child is part.connection:
                module._modules[name] = connection
                return connection
    if part.first == 0 and any(is_dtensor(parameter) for parameter in stage.parameters()):
        raise RewireError(
            f"the connection weights of trunk '{part.name}' were lost when the model was cut, and its first stage is "
            "sharded without them: call rewire.pipeline_stage before the stage is sharded."
        )
    assert connection.trunk is not None
    register(stage, dataclasses.replace(connection.trunk, owner=_home(stage, part)), connection)
    return connection


def _home(stage: nn.Module, part: Part) -> str:
    """Path of the module that is to own a connection: where it was; in a bare sequence of blocks, the first of them."""
    assert part.connection.trunk is not None
    paths = [path for path, _ in stage.named_modules()]
    home = part.connection.trunk.owner if part.connection.trunk.owner in paths else ""
    if not isinstance(stage.get_submodule(home), nn.Sequential):
        return home
    return next(path for path, module in stage.named_modules() if any(entry.adds for entry in _entries(module)))


class _Leaves:
    """Forward hook: a stream that goes on to the next stage leaves as tensors, in place."""

    def __init__(self, boundary: Boundary) -> None:
        self.boundary = boundary

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        items = output if isinstance(output, (tuple, list)) else (output,)
        if not any(isinstance(item, Stream) for item in items):
            raise UnsupportedCall(
                f"a stage that ends after residual add {self.boundary.position} of trunk '{self.boundary.name}' "
                f"returned no stream, but {type(output).__name__}. It has to return what its last block returns, by "
                "itself or first in a tuple, and nothing may be computed of it."
            )
        packed: list[Any] = []
        for item in items:
            packed.extend(self.boundary.tensors(item) if isinstance(item, Stream) else (item,))
        return tuple(packed)


class _Enters:
    """Forward pre-hook: the tensors of a stream that comes from the stage before, the first arguments, become one."""

    def __init__(self, boundary: Boundary) -> None:
        self.boundary = boundary

    def __call__(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        count = self.boundary.count
        if len(args) < count or not all(isinstance(arg, Tensor) for arg in args[:count]):
            raise UnsupportedCall(
                f"a stage that begins after residual add {self.boundary.position} of trunk '{self.boundary.name}' "
                f"takes {count} tensors, the states of its stream and connection weights, and was given {len(args)} "
                "arguments. All parts have to be cut from one rewired model, rewire.pipeline_stage has to be called on "
                "the stage before, too, and what that returns has to be handed on as it is."
            )
        return (self.boundary.stream(args[:count]), *args[count:])


class Boundary:
    """A place in a trunk at which streams become tensors, and tensors streams.

    What crosses: the states of an `outline`, each tensor once, a `History` as the states in it; then the learned
    connection weights in the order of their names.

    Args:
        connection: of the trunk.
        position: number of residual adds before it.

    Raises:
        UnsupportedCall: it is inside a unit.
    """

    def __init__(self, connection: Connection, position: int) -> None:
        self.connection, self.position, self.name = connection, position, connection.layout.trunk
        if not connection.layout.closes_unit(position - 1):
            raise UnsupportedCall(
                f"trunk '{self.name}' was cut after residual add {position}, in the middle of one of its units: cut it "
                "between blocks."
            )
        states, self.structure = _flat(outline(connection, position))
        known = [id(state) for state in states]
        self.different = [n for n, state in enumerate(known) if state not in known[:n]]
        self.same = [self.different.index(known.index(state)) for state in known]
        self.weights = sorted(connection.learned_names)

    @property
    def count(self) -> int:
        """Number of tensors that cross."""
        return len(self.different) + len(self.weights)

    def tensors(self, stream: Stream) -> tuple[Tensor, ...]:
        """What crosses."""
        stream = stream.summed()
        states, structure = _flat(stream)
        if stream.position != self.position or not stream.at_rest or structure != self.structure:
            raise UnsupportedCall(
                f"the stream of trunk '{self.name}' leaves a stage after residual add {stream.position}, in another "
                f"form than the next stage takes after residual add {self.position}: cut the model between blocks, and "
                "return from a stage what its last block returns."
            )
        states = [states[n] for n in self.different]
        if stream.placement is not None:
            states = [stream.placement.wrapped(state) for state in states]
        return _handed([*states, *(stream.weights.learned[name] for name in self.weights)])

    def stream(self, tensors: Sequence[Tensor]) -> Stream:
        """The stream of what crossed."""
        given, weights = tensors[: len(self.different)], _handed(tensors[len(self.different) :])
        example: Any = given[0]
        local = _handed([_to_local(state) for state in given])
        states = pytree.tree_unflatten([local[n] for n in self.same], self.structure)
        placement, topology = self.connection.placement, self.connection.layout.topology
        if is_dtensor(example):
            placement = Placement.of_tokens(example, topology.template(states).shape)
        return self.connection.resume(states, dict(zip(self.weights, weights, strict=True)), self.position, placement)


def outline(connection: Connection, position: int) -> Stream:
    """A stream of one token on the meta device: of what the connection's streams consist at ``position``."""
    layout = connection.layout
    tensors = layout.topology.parameters(layout.dims, connection.start) | layout.topology.constants(layout.dims)
    on_meta = {name: torch.empty_like(value, device="meta") for name, value in tensors.items()}
    token = layout.token("meta")
    stream = Stream.begin(token, layout.topology.weights(on_meta, layout.dims), layout)
    while stream.position < position:
        stream = stream.write(torch.empty_like(token)).settled()
    return stream


def _to_local(x: Any) -> Tensor:
    return x.to_local() if is_dtensor(x) else x


def _flat(stream: Stream) -> tuple[list[Tensor], Any]:
    """The tensors of a stream's states, and how they are put together."""
    return pytree.tree_flatten(tuple(s.states if isinstance(s, History) else s for s in stream.states))


def _handed(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same tensors, as stages may exchange them, with such gradients.

    Contiguous; and neither parameters nor views, as some schedules detach what a stage returned in place.
    """
    learned = [number for number, tensor in enumerate(tensors) if tensor.requires_grad]
    handed = [tensor.detach().contiguous() for tensor in tensors]
    if learned and torch.is_grad_enabled():
        made = _Handed.apply(*(tensors[number] for number in learned))
        for number, tensor in zip(learned, made, strict=True):
            handed[number] = tensor
    return tuple(handed)


class _Handed(torch.autograd.Function):
    """Tensors as they are."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach().contiguous() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else grad.contiguous() for grad in grads)
