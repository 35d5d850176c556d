"""A few numbers that represent many: enough to tell whether two ranks have the same numbers, or nearly."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rewire.placement import is_dtensor
from rewire.ranks.meeting import difference

_SEEN = 1024  # numbers of a tensor that are read
_SIGNS = 8  # random sums of these numbers
_GRID = 0.1  # grid for these sums, over the norm, by which nearly equal ones are found
_OTHERS = 12  # other weights that are compared
_FEWEST = 8  # fewest numbers in one: in few dimensions, directions agree by chance
_LEAST = 1e-6  # smallest gradients of connection weights, over the other's, that are more than rounding
_GRADIENTS, _VALUES = 0.05, 1e-3  # relative differences that are more than rounding


class Sketch:
    """Some tensors as their norm, and random-sign sums of their numbers, which differ as much as the tensors do.

    Args:
        tensors: about a thousand numbers of each are read.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        parts = [tensor.detach().flatten() for tensor in tensors]
        parts = [part[:: -(-part.numel() // _SEEN) or 1].cpu().double() for part in parts]
        seen = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device="cpu")
        self.norm: float = float(seen.norm())
        self.sums: list[float] = (seen @ _signs(seen.numel())).tolist()

    @property
    def direction(self) -> list[float] | None:
        """The sums over the norm; None if the norm is 0 or not finite."""
        known = math.isfinite(self.norm) and self.norm > 0
        return [value / self.norm for value in self.sums] if known else None

    def numbers(self) -> list[float]:
        return [self.norm, *self.sums]


@functools.lru_cache(32)
def _signs(numbers: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randint(0, 2, (numbers, _SIGNS), generator=generator, device="cpu").double() * 2 - 1


def cell(direction: list[float]) -> list[int]:
    """A grid cell, which nearly equal directions mostly share."""
    return [round(value / _GRID) for value in direction]


def furthest(one: list[float], two: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, two, strict=True))


def _apart(one: list[float], two: list[float], share: float, least: float = 0.0) -> bool:
    """Whether the numbers of two sketches differ by more than a share of the larger norm."""
    scale = max(one[0], two[0])
    distance = math.sqrt(sum((a - b) ** 2 for a, b in zip(one[1:], two[1:], strict=True)) / _SIGNS)
    return scale > least and distance > share * scale


def chosen(parameters: list[Any]) -> list[Any]:
    """The first and the last weight of each shape, small ones first: under tensor parallelism some are replicated."""
    shapes: dict[torch.Size, list[Any]] = {}
    for parameter in parameters:
        if local(parameter).numel() >= _FEWEST:
            shapes.setdefault(local(parameter).shape, []).append(parameter)
    by_size = sorted(shapes.values(), key=lambda same: local(same[0]).numel())
    return [parameter for same in by_size for parameter in dict.fromkeys((same[0], same[-1]))][:_OTHERS]


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def part(weight: Any) -> list[int]:
    """The part of a sharded weight on this rank: its place on the mesh dimensions along which ranks differ."""
    if not is_dtensor(weight):
        return []
    mesh = weight.device_mesh
    return [mesh.get_local_rank(dim) for dim, p in enumerate(weight.placements) if not p.is_replicate()]


def told(found: Mapping[str, Any], post: Mapping[str, Any]) -> str:
    """The contradiction between two ranks' sketches, in words; empty if there is none, or no common model."""
    exact = max(found["exact"], post["exact"])
    if furthest(found["direction"], post["direction"]) > exact:
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
            return (
                f"ranks {ranks[0]} and {ranks[1]} have the same {found['kind']} of other weights and different "
                f"{'gradients' if apart else 'values'} of the connection weights of trunk '{trunk}': they train one "
                "model, and its connections drift apart. If each of these ranks has a part of the tokens (sequence or "
                "context parallelism), call rewire.parallelize(model, mesh, sequence=True) with the mesh of these "
                "ranks, so that the gradients of connection weights are summed over it; else load the same weights on "
                "all ranks."
            )
    return ""
