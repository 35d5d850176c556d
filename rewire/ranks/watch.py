"""Connection weights that drift apart: for example, by sequence or context parallelism that was not declared.

Nothing in a forward shows that a rank has only a part of the tokens, but gradients do. If ranks train one model on
parts of a sequence, gradients of the weights that all of them hold (norms, for example) are summed before the
optimiser's step. Those of connection weights, which the model's author does not know, are not. So before a step:
**ranks with the same gradients of other weights, up to a factor, have to have the same gradients and values of
connection weights, up to that factor.** (The factor comes from clipping, by norms which already differ. With clipping,
all weights drift apart from the first step, and values alone would show nothing.) Models that are independent on
purpose, in one process group or not, have no such gradients: ensembles, actor and critic, local SGD, two pipelines.

A few numbers are compared through the store. A rank posts those of its connection weights under a key that is made
from another weight's gradient, or reads those of a rank that came first. Nobody waits. A rank that reads different
numbers leaves a note, which is read before the next step: as gradients are summed in between, all ranks concerned have
come by then, and all of them raise. Steps 2, 4, 8, .. 1,024, and then each 1,024th, are compared.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rewire.errors import RewireError
from rewire.placement import FURTHEST
from rewire.ranks.meeting import alone, store_of
from rewire.ranks.sketch import Sketch, cell, chosen, furthest, local, part, told
from rewire.torch_internals import without_dispatch_modes, writes_to

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_log = logging.getLogger("rewire.ranks")

#: How far the directions of one gradient may be apart after clipping.
_EXACT = {torch.float32: 1e-5, torch.float64: 1e-5}
#: All connections of this process.
_CONNECTIONS: WeakSet[Watched] = WeakSet()
#: Connections whose weights an optimiser of torch updates.
_STEPPED: WeakSet[Watched] = WeakSet()
_WATCHES: WeakKeyDictionary[Optimizer | Watched, Watch] = WeakKeyDictionary()


class Watched(nn.Module):
    """A connection whose weights are compared before the steps of optimisers."""

    def __init__(self) -> None:
        super().__init__()
        self._watch()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._watch()

    def _watch(self) -> None:
        _hook()
        _CONNECTIONS.add(self)

    def facts(self) -> dict[str, Any]:
        """The facts that ranks which train one model must share."""
        raise NotImplementedError

    def here(self) -> str:
        """The part of the weights on this rank, if they are distributed over pipeline stages."""
        raise NotImplementedError


@functools.cache
def _hook() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling() or alone():
        return
    if optimizer not in _WATCHES:
        _WATCHES[optimizer] = Watch("gradients")
    _WATCHES[optimizer].step(lambda: _gradients(optimizer))


def watch_values(connection: Watched, x: Tensor) -> None:
    """In a training forward: compare weights that something other than an optimiser of torch has updated.

    Args:
        connection: its weights have a history of versions.
        x: the trunk's input; other weights are found behind it.
    """
    if connection not in _WATCHES:
        _WATCHES[connection] = Watch("values")
    weights = [local(parameter) for parameter in connection.parameters()]
    watch, version = _WATCHES[connection], sum(0 if weight.is_inference() else writes_to(weight) for weight in weights)
    if version != watch.version and connection not in _STEPPED:
        watch.version = version
        watch.step(lambda: _values(connection, x))


#: Other weights, by which ranks recognise each other: name on this rank, gradient or value, and how far directions of
#: the same numbers may be apart; and the sketches of trunks.
Others: TypeAlias = list[tuple[int, Tensor, float]]
Seen: TypeAlias = tuple[Others, dict[str, Any]]


class Watch:
    """The comparison state of one optimiser's weights, or one connection's.

    Attributes:
        kind: what is compared of other weights.
        begun: start time; older posts are from an earlier training with the same numbers.
        count: of steps.
        left: keys of the last comparison; whether this rank came first, and where notes about it are left.
        before: directions of other weights' numbers at the last comparison.
        version: of a connection's weights.
        ended: whether the store is gone.
    """

    def __init__(self, kind: str) -> None:
        self.kind, self.count, self.version, self.ended = kind, 0, 0, False
        self.begun = time.time()
        self.left: dict[str, tuple[bool, str]] = {}
        self.before: dict[int, list[float]] = {}

    def step(self, look: Callable[[], Seen]) -> None:
        self.count += 1
        due = self.count & (self.count - 1) == 0 or self.count % 1024 == 0
        if self.ended or not (self.left or due):
            return
        try:
            if self.left:
                self._hear(store_of("watch"))
            if due:
                # Modes may count the operations of a block, and would miss these when the block is recomputed.
                with torch.no_grad(), without_dispatch_modes():
                    self._compare(*look())
        except RuntimeError as error:
            # The rank with the store has ended, as it may after a job's last step; or numbers cannot be read.
            self.ended = True
            _log.warning("connection weights are no longer compared between ranks: %s", error)

    def _hear(self, store: Store) -> None:
        """Raise the difference that another rank has found."""
        left, self.left = self.left, {}
        for key, (first, _) in left.items():
            if first:
                store.delete_key(key)
        for _, note in left.values():
            if store.check([note]):
                raise RewireError(store.get(note).decode())

    def _compare(self, others: Others, trunks: dict[str, Any]) -> None:
        """Post this rank's numbers for each of some other weights, or compare them with those that are there."""
        before, self.before = self.before, {}
        for name, numbers, exact in others if trunks else ():
            sketch = Sketch([numbers])
            direction = sketch.direction
            if direction is None:
                continue
            self.before[name] = direction
            # Numbers that are the same at every step say nothing about data: a bias with only linear maps after it.
            if name in before and furthest(direction, before[name]) > 10 * exact:
                place = [self.kind, self.count, list(numbers.shape), cell(direction)]
                self._leave(place, {"direction": direction, "exact": exact, "norm": sketch.norm, "trunks": trunks})

    def _leave(self, place: list[Any], post: dict[str, Any]) -> None:
        store, key = store_of("watch"), hashlib.sha256(json.dumps(place).encode()).hexdigest()
        mine = json.dumps(post | {"rank": dist.get_rank(), "kind": self.kind, "time": time.time()})
        there = store.compare_set(key, "", mine)
        if json.loads(there)["time"] < self.begun:
            there = store.compare_set(key, there.decode(), mine)
        found, own = json.loads(there), json.loads(mine)
        note = f"{key}/{found['rank']}/{found['time']}"
        self.left[key] = (found["rank"] == own["rank"], note)
        contradiction = "" if self.left[key][0] else told(found, own)
        if contradiction:
            store.compare_set(note, "", contradiction)


def _gradients(optimizer: Optimizer) -> Seen:
    """Gradients of an optimiser's weights: of some others, and of connections."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if _has_gradient(p)]
    if not parameters or _is_capturing(parameters[0]):
        return [], {}
    trained = {id(p) for p in parameters}
    ours: set[int] = set()
    trunks: dict[str, Any] = {}
    for connection in list(_CONNECTIONS):
        weights: list[Any] = [p for p in connection.parameters() if id(p) in trained]
        if weights:
            _STEPPED.add(connection)
            ours.update(map(id, weights))
            trunks |= _trunk(connection, weights, [local(weight.grad) for weight in weights])
    others = chosen([p for p in parameters if id(p) not in ours]) if trunks else []
    return [(id(p), local(p.grad), _EXACT.get(p.grad.dtype, 2e-2)) for p in others], trunks


def _values(connection: Watched, x: Tensor) -> Seen:
    """Values of weights behind a trunk's input, and of its connection's."""
    weights = list(connection.parameters())
    if _is_capturing(weights[0]):
        return [], {}
    others = [(id(p), local(p), 0.0) for p in chosen(_behind(x))]
    return others, _trunk(connection, weights, []) if others else {}


def _behind(x: Tensor) -> list[Any]:
    nodes: list[Any] = [x.grad_fn]
    for node in nodes:  # `nodes` grows: breadth first
        if node is not None and len(nodes) < FURTHEST:
            nodes.extend(source for source, _ in node.next_functions if source not in nodes)
    found = [node.variable for node in nodes if hasattr(node, "variable")]
    return [weight for weight in found if local(weight).untyped_storage().nbytes() > 0]  # FSDP frees some


def _trunk(connection: Watched, weights: list[Any], gradients: list[Tensor]) -> dict[str, Any]:
    """The sketch of a trunk's weights, by its name and the part of them on this rank."""
    facts = connection.facts()
    (name,) = facts["trunks"]
    gradient, value = Sketch(gradients), Sketch([local(weight) for weight in weights])
    sketch = {"facts": facts, "gradient": gradient.numbers(), "value": value.numbers()}
    return {f"{name} {connection.here()} {sorted({str(part(weight)) for weight in weights})}": sketch}


def _has_gradient(parameter: Tensor) -> bool:
    grad = parameter.grad
    return grad is not None and grad.layout == torch.strided and grad.is_floating_point()


def _is_capturing(parameter: Tensor) -> bool:
    return parameter.is_cuda and torch.cuda.is_current_stream_capturing()
