"""Connection weights that drift apart: sequence and context parallelism that nobody declared, and the like.

Nothing in a forward tells that a rank has a part of the tokens only. Its gradients do. Where ranks train one model on
parts of a sequence, the gradients of what all of them hold (norms, say) are summed before the optimiser's step, and
those of connection weights, of which the model's author does not know, are not. So, before a step: **ranks on which
gradients of other weights are the same, up to a factor, have to have the same gradients and values of connection
weights, up to that factor.** (The factor is that of clipping, by norms which differ already. With clipping, all
weights drift apart from the first step, and values by themselves would tell nothing.) Models that are independent on
purpose, in one process group or not, have no such gradients: ensembles, actor and critic, local SGD, two pipelines.

A few numbers are compared, through the store: a rank leaves those of its connection weights under a key that is made
of another weight's gradient, or finds those of a rank that came first. Nobody waits. Who finds others than its own
leaves a note, which is read before the next step: in between, gradients are summed, so that all ranks concerned have
come. All of them raise there. Steps 2, 4, 8, .. 1,024, and then each 1,024th, are looked at.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rewire.errors import RewireError
from rewire.placement import is_dtensor
from rewire.ranks.meeting import alone, difference, store_of

_SEEN = 1024  # numbers of a tensor that are looked at
_SIGNS = 8  # random sums of them
_GRID = 0.1  # of these sums, over the norm: to find what is nearly the same
_OTHERS = 12  # weights with which gradients are compared
_FEWEST = 8  # numbers in one: directions in few dimensions are the same by chance
_LEAST = 1e-6  # gradients of connection weights, over the other's, that are more than rounding
_GRADIENTS, _VALUES = 0.05, 1e-3  # relative differences that are more than rounding

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

#: All connections of this process.
_CONNECTIONS: WeakSet[Watched] = WeakSet()
_WATCHES: WeakKeyDictionary[Optimizer, Watch] = WeakKeyDictionary()
_NUMBERS = itertools.count()


class Watched(nn.Module):
    """A connection: its weights are looked at before the steps of optimisers."""

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
        """What ranks that train one model have to have in common."""
        raise NotImplementedError


@functools.cache
def _hook() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or alone():
        return
    if optimizer not in _WATCHES:
        _WATCHES[optimizer] = Watch()
    _WATCHES[optimizer].step(optimizer)


class Watch:
    """What is compared before the steps of one optimiser.

    Attributes:
        number: of optimisers before it; ranks that train one model have made the same.
        count: of steps.
        left: keys of the last comparison, and whether this rank came first.
        before: directions of the gradients of other weights, when they were last looked at.
    """

    def __init__(self) -> None:
        self.number, self.count = next(_NUMBERS), 0
        self.left: dict[str, bool] = {}
        self.before: dict[int, list[float]] = {}

    def step(self, optimizer: Optimizer) -> None:
        if self.left:
            self._hear(store_of("watch"))
        self.count += 1
        if self.count & (self.count - 1) == 0 or self.count % 1024 == 0:
            with torch.no_grad():
                self._look(optimizer)

    def _hear(self, store: Store) -> None:
        """Raise what somebody found."""
        left, self.left = self.left, {}
        for key, first in left.items():
            if first:
                store.delete_key(key)
            if store.check([f"{key}/note"]):
                raise RewireError(store.get(f"{key}/note").decode())

    def _look(self, optimizer: Optimizer) -> None:
        """Leave what this rank has for each of some other weights, or compare it with what is there."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if _has_gradient(p)]
        if not parameters or _is_capturing(parameters[0]):
            return
        ours, trunks = _trunks({id(p) for p in parameters})
        before, self.before = self.before, {}
        for other in _others([p for p in parameters if id(p) not in ours]) if trunks else ():
            norm, signs = _sketch([_local(other.grad)])
            if not (math.isfinite(norm) and norm > 0):
                continue
            direction = self.before[id(other)] = [sign / norm for sign in signs]
            exact = 1e-5 if other.grad.dtype in (torch.float32, torch.float64) else 2e-2
            # Those that are the same at every step say nothing about data: of a bias behind which all is linear, say.
            if id(other) in before and _furthest(direction, before[id(other)]) > 10 * exact:
                cell = [round(sign / _GRID) for sign in direction]
                place = [self.number, self.count, list(_local(other).shape), cell]
                self._leave(place, {"direction": direction, "exact": exact, "norm": norm, "trunks": trunks})

    def _leave(self, place: list[Any], post: dict[str, Any]) -> None:
        store, key = store_of("watch"), hashlib.sha256(json.dumps(place).encode()).hexdigest()
        post["rank"] = dist.get_rank()
        found = json.loads(store.compare_set(key, "", json.dumps(post)))
        self.left[key] = found["rank"] == post["rank"]
        told = "" if self.left[key] else _told(found, post)
        if told:
            store.compare_set(f"{key}/note", "", told)


def _trunks(trained: set[int]) -> tuple[set[int], dict[str, Any]]:
    """The connection weights among what is trained, and a sketch of those of each trunk, by the part that is here."""
    ours: set[int] = set()
    trunks: dict[str, Any] = {}
    for connection in list(_CONNECTIONS):
        weights: list[Any] = [p for p in connection.parameters() if id(p) in trained]
        if weights:
            ours.update(map(id, weights))
            facts = connection.facts()
            (name,) = facts["trunks"]
            trunks[f"{name} {sorted({str(_part(weight)) for weight in weights})}"] = {
                "facts": facts,
                "gradient": _flat(_sketch([_local(weight.grad) for weight in weights])),
                "value": _flat(_sketch([_local(weight) for weight in weights])),
            }
    return ours, trunks


def _others(parameters: list[Any]) -> Iterator[Any]:
    """The first and the last weight of each shape, small ones first: under tensor parallelism some are replicated."""
    shapes: dict[torch.Size, list[Any]] = {}
    for parameter in parameters:
        if _local(parameter).numel() >= _FEWEST:
            shapes.setdefault(_local(parameter).shape, []).append(parameter)
    by_size = sorted(shapes.values(), key=lambda same: _local(same[0]).numel())
    chosen = [parameter for same in by_size for parameter in dict.fromkeys((same[0], same[-1]))]
    yield from chosen[:_OTHERS]


def _has_gradient(parameter: Tensor) -> bool:
    grad = parameter.grad
    return grad is not None and grad.layout == torch.strided and grad.is_floating_point()


def _is_capturing(parameter: Tensor) -> bool:
    return parameter.is_cuda and torch.cuda.is_current_stream_capturing()


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return local


def _part(weight: Any) -> list[int]:
    """Which part of a sharded weight this rank has: where it is on the mesh dimensions along which ranks differ."""
    if not is_dtensor(weight):
        return []
    mesh = weight.device_mesh
    return [mesh.get_local_rank(dim) for dim, p in enumerate(weight.placements) if not p.is_replicate()]


def _sketch(tensors: list[Tensor]) -> tuple[float, list[float]]:
    """The norm of some numbers, and sums of them with random signs: these are as far apart as the numbers are."""
    seen = torch.cat([tensor.detach().flatten()[:_SEEN].cpu().double() for tensor in tensors])
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (seen.numel(), _SIGNS), generator=generator).double() * 2 - 1
    return float(seen.norm()), (seen @ signs).tolist()


def _furthest(one: list[float], two: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, two, strict=True))


def _flat(sketch: tuple[float, list[float]]) -> list[float]:
    return [sketch[0], *sketch[1]]


def _apart(one: list[float], two: list[float], share: float, least: float = 0.0) -> bool:
    scale = max(one[0], two[0])
    distance = math.sqrt(sum((a - b) ** 2 for a, b in zip(one[1:], two[1:], strict=True)) / _SIGNS)
    return scale > least and distance > share * scale


def _told(found: Mapping[str, Any], post: Mapping[str, Any]) -> str:
    """What contradicts in what two ranks have; nothing, if they do not train one model, or nothing does."""
    exact = max(found["exact"], post["exact"])
    if _furthest(found["direction"], post["direction"]) > exact:
        return ""
    for name in found["trunks"].keys() & post["trunks"].keys():
        one, two = found["trunks"][name], post["trunks"][name]
        if one["facts"] != two["facts"]:
            return difference([{"rank": p["rank"], "facts": t["facts"]} for p, t in ((found, one), (post, two))])
        here, there = ([g / p["norm"] for g in t["gradient"]] for p, t in ((found, one), (post, two)))
        apart = _apart(here, there, _GRADIENTS, _LEAST)
        if apart or _apart(one["value"], two["value"], _VALUES):
            (trunk,) = one["facts"]["trunks"]
            ranks = sorted((found["rank"], post["rank"]))
            what = "gradients" if apart else "values"
            return (
                f"ranks {ranks[0]} and {ranks[1]} have the same gradients of other weights and different {what} of the "
                f"connection weights of trunk '{trunk}': they train one model, and its connections drift apart. If "
                "each of these ranks has a part of the tokens (sequence or context parallelism), call "
                "rewire.parallelize(model, mesh, sequence=True) with the mesh of these ranks, so that the gradients of "
                "connection weights are summed over it; else load the same weights on all ranks."
            )
    return ""
