"""Connections of a trunk on a CPU beside the code that one would write by hand, in turn: time beyond plain adds.

    python benchmarks/by_hand.py [--sizes 16x256 512x256 ..] [--rounds 15] [--json FILE]

Twelve blocks whose branches have rank 4, so that connections are most of a step, forward and backward, in float32. What
counts is processor time of the fastest of the rounds, in each of which all take turns.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rewire

BLOCKS = 12


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def branch(self, x: Tensor) -> Tensor:
        found: Tensor = self.up(self.down(x))
        return found

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(width) for _ in range(BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Ancre(Net):
    """A sum of all states in place of the newest, with a softmax of logits."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.logits = nn.ParameterList([torch.zeros(t + 1) for t in range(BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        for layer, logits in zip(self.layers, self.logits, strict=True):
            states.append(self.sum(logits.softmax(0), states) + layer.branch(states[-1]))
        return states[-1]

    def sum(self, weights: Tensor, states: list[Tensor]) -> Tensor:
        total = weights[0] * states[0]
        for weight, x in zip(weights[1:], states[1:], strict=True):
            total = total + weight * x
        return total


class AncreStacked(Ancre):
    def sum(self, weights: Tensor, states: list[Tensor]) -> Tensor:
        return torch.tensordot(weights, torch.stack(states), dims=1)


class _SetSlice(torch.autograd.Function):
    """As the authors of DenseFormer have it (epfml/denseformer): states are written into one buffer."""

    @staticmethod
    def forward(ctx: Any, buffer: Tensor, before: Tensor | None, number: int, x: Tensor) -> Tensor:
        buffer[number] = x
        ctx.number = number
        return torch.empty(0, dtype=x.dtype).set_(buffer[: number + 1])  # type: ignore[call-overload, no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, Tensor]:
        return None, grad[: ctx.number] if ctx.number else None, None, grad[ctx.number]


class DenseFormer(Net):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.averages = nn.ParameterList([torch.eye(t + 2)[-1] for t in range(BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        buffer = x.new_empty(BLOCKS + 1, *x.shape)
        states = _SetSlice.apply(buffer, None, 0, x)
        for t, (layer, weights) in enumerate(zip(self.layers, self.averages, strict=True)):
            states = _SetSlice.apply(buffer, states, t + 1, layer(x))
            x = torch.tensordot(weights, states, dims=1)
        return x


def step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        x.grad = None
        model.zero_grad()
        model(x).backward(torch.ones_like(x))

    return run


def measure(tokens: int, width: int, rounds: int) -> dict[str, float]:
    """Milliseconds beyond the plain net's; its own, and of the same once more."""
    torch.manual_seed(0)
    plain = Net(width)
    models = {
        "plain": plain,
        "plain, again": plain,
        "ancre-ingoing": rewire.compile(plain, "ancre-ingoing", validate=False),
        "ANCRe, a loop": Ancre(width),
        "ANCRe, stacked": AncreStacked(width),
        "denseformer": rewire.compile(plain, "denseformer", validate=False),
        "DenseFormer, in place": DenseFormer(width),
    }
    steps = {name: step(model, torch.randn(tokens, width, requires_grad=True)) for name, model in models.items()}
    fastest = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds + 1):
        for name, run in steps.items():
            run()  # the caches are another's
            begun = time.process_time()
            run()
            fastest[name] = min(fastest[name], time.process_time() - begun)
    own = fastest.pop("plain")
    return {"plain": 1e3 * own} | {name: 1e3 * (seconds - own) for name, seconds in fastest.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=["16x256", "128x256", "512x256", "1024x512"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for size in arguments.sizes:
        found[size] = measure(*map(int, size.split("x")), arguments.rounds)
        print(size, {name: round(value, 2) for name, value in found[size].items()}, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "milliseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
