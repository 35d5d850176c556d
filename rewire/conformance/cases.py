"""Test cases for implementations: inputs and weights that reveal mistakes.

All numbers are multiples of a power of 2 that bfloat16 holds exactly, so that all rounding is the implementation's own.
They come from Python's generator, seeded by the scheme and the case, and are the same everywhere.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping

import torch
from torch import Tensor

from rewire.conformance.schemes import Options, Reference


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of case.

    Attributes:
        why: what it shows.
        depth: number of units.
        tokens: leading dimensions of x.
        width: channels, times the number that has to divide them.
        weights, inputs: the size of weights, and of x.
        silent: the branches return zero.
        low: low precision is meaningful, too: rounding is not amplified much.
    """

    why: str
    depth: int = 3
    tokens: tuple[int, ...] = (3,)
    width: int = 5
    weights: float = 1.0
    inputs: float = 1.0
    silent: bool = False
    low: bool = True


KINDS: Mapping[str, Kind] = {
    "typical": Kind("weights without any symmetry, and an odd width"),
    "one token": Kind("no mean over tokens", depth=2, tokens=(1,)),
    "one unit": Kind("histories of length 1", depth=1),
    "many tokens": Kind("two dimensions of tokens, more tokens than channels", depth=2, tokens=(2, 4), width=7),
    "large weights": Kind("logits near saturation, slow Sinkhorn iterations", weights=2.0, low=False),
    "small inputs": Kind("values as small as the epsilon of norms", inputs=2.0**-9),
    "silent branches": Kind("branches that return zero, as many do at their start", silent=True, low=False),
    "deep": Kind("more units than streams", depth=6, tokens=(2,), low=False),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """Inputs and weights, float64.

    Attributes:
        options: all options of the scheme.
        attention: the units t that begin with an attention.
        x: [.., D].
        weights: by name, as the reference has them.
        inner: of the branch of unit t, for each of its inputs (1, or q, k, v, residual), [ways, D, D].
        outer: [T, D, D]. Unit t returns ``tanh(sum_i input_i inner_ti) outer_t``.
        upstream: gradient of the output.
    """

    name: str
    options: Options
    attention: frozenset[int]
    x: Tensor
    weights: dict[str, Tensor]
    inner: tuple[Tensor, ...]
    outer: Tensor
    upstream: Tensor

    @property
    def depth(self) -> int:
        return len(self.inner)


def cases(reference: Reference, options: Options) -> list[Case]:
    """The cases of a scheme, with these options."""
    chosen = reference.with_options(options)
    least = max(reference.least, chosen.get("period") or 1)
    kinds = {name: kind for name, kind in KINDS.items() if kind.depth >= least}
    return [_made(reference, name, kind, chosen) for name, kind in kinds.items()]


def _made(reference: Reference, name: str, kind: Kind, options: Options) -> Case:
    rng = random.Random(f"{reference.name}/{name}")
    width = kind.width * (options[reference.divides] if reference.divides else 1)
    three = reference.attention and options.get("qkv", True)
    attention = frozenset(range(1, kind.depth + 1, 2)) if three else frozenset[int]()
    shapes = {n: v.shape for n, v in reference.parameters(kind.depth, width, attention, **options).items()}
    ways = [4 if t in attention else 1 for t in range(1, kind.depth + 1)]
    return Case(
        name,
        options,
        attention,
        x=_draw(rng, (*kind.tokens, width), kind.inputs),
        weights={n: _draw(rng, shape, kind.weights * _spread(reference, n, options)) for n, shape in shapes.items()},
        inner=tuple(_draw(rng, (number, width, width), 0.5) for number in ways),
        outer=_draw(rng, (kind.depth, width, width), 0.0 if kind.silent else 0.5),
        upstream=_draw(rng, (*kind.tokens, width), 1.0),
    )


def _spread(reference: Reference, name: str, options: Options) -> float:
    spread = reference.spreads.get(name, 1.0)
    if isinstance(spread, str):  # for logits that are divided by a temperature
        return 2.0 ** math.floor(math.log2(options[spread]))
    return spread


def _draw(rng: random.Random, shape: tuple[int, ...], spread: float) -> Tensor:
    """Multiples of ``spread / 64``, from -2 to 2 times the spread."""
    numbers = [rng.randint(-128, 128) for _ in range(math.prod(shape))]
    return torch.tensor(numbers, dtype=torch.float64).reshape(shape) * (spread / 64)
