"""Forwards written by chance, of adds and of blocks that add, in loops and ifs that may leave some out.

Each call has to compute DenseFormer's formula with what ran, or to raise.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mixing import shaken
from torch import Tensor, nn

import rewire

HEAD = """
from torch import nn

class Branch(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh())

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = Branch(), Branch()

    def forward(self, x):
        x = x + self.f(x)
        return x + self.g(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.ModuleList(Branch() for _ in range(8)), nn.ModuleList(Block() for _ in range(8))
        self.skip = ()

    def forward(self, x):
"""
#: The n-th of the net's branches is a[n], of its blocks b[m]; what may be left out has the numbers from k on.
STATEMENTS = [
    "x = x + self.a[{n}](x)",
    "x = self.b[{m}](x)",
    "if {k} not in self.skip:\n    x = x + self.a[{n}](x)",
    "if {k} not in self.skip:\n    x = self.b[{m}](x)",
    "for j, f in enumerate(self.a[{n} : {n} + 2]):\n    if j + {k} in self.skip:\n        continue\n    x = x + f(x)",
    "for j, f in enumerate(self.a[{n} : {n} + 2]):\n    if j + {k} in self.skip:\n        break\n    x = x + f(x)",
    "for j, f in enumerate(self.b[{m} : {m} + 2]):\n    if j + {k} in self.skip:\n        continue\n    x = f(x)",
    "for j in range(2):\n    if j + {k} not in self.skip:\n        x = x + self.a[{n} + j](x)\n"
    "    if j + {k} + 2 not in self.skip:\n        x = self.b[{m} + j](x)",
    "for j in range(2):\n    if j + {k} not in self.skip:\n        x = self.b[{m} + j](x)\n"
    "    x = x + self.a[{n} + j](x)",
    "j = 0\nwhile j < 2:\n    if j + {k} not in self.skip:\n        x = x + self.a[{n} + j](x)\n    j += 1",
]


def program(chance: random.Random) -> str:
    chosen = [chance.choice(STATEMENTS) for _ in range(chance.randint(2, 4))]
    text = "\n".join(each.format(n=2 * i, m=2 * i, k=4 * i) for i, each in enumerate(chosen))
    return HEAD + "".join(
        f"        {line}\n" for line in (*text.split("\n"), chance.choice(["return x", "return x * 2"]))
    )


def net_of(text: str, path: Path) -> Any:
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Net().double()


def branches(net: nn.Module, x: Tensor) -> list[nn.Module]:
    """Those that run, in order."""
    ran: list[nn.Module] = []
    hooks = [
        module.register_forward_hook(lambda module, *_: ran.append(module))
        for module in net.modules()
        if type(module).__name__ == "Branch"
    ]
    net(x)
    for hook in hooks:
        hook.remove()
    return ran


@torch.no_grad()
def denseformer(net: nn.Module, of: list[nn.Module], weights: Tensor, x: Tensor) -> Tensor:
    ran, states = branches(net, x), [x]
    for number, branch in enumerate(of if ran else []):
        states.append(x + branch(x) if branch in ran else x)
        x = sum((weights[number, n] * state for n, state in enumerate(states)), torch.zeros(()))
    return x


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 40))])
def test_each_call_is_right_or_refused(seed: int, tmp_path: Path) -> None:
    chance, x = random.Random(seed), torch.randn(2, 8, dtype=torch.double)
    text = program(chance)
    torch.manual_seed(seed)
    net = net_of(text, tmp_path / f"program_{seed}.py")
    of = branches(net, x)
    if len(of) < 2:
        return
    rewired = shaken(rewire.compile(net, "denseformer", example_inputs=(x,), granularity="sublayer"), 0.5, seed)
    (weights,) = (matrix.double() for matrix in rewire.coefficients(rewired).values())
    assert len(weights) == len(of)
    factor, right = 2 if text.endswith("x * 2\n") else 1, 0
    for skip in (
        *itertools.chain.from_iterable(itertools.combinations(range(16), n) for n in range(2)),
        (0, 4),
        (5, 8),
    ):
        net.skip = rewired.skip = skip
        try:
            found = rewired(x)
        except rewire.OutOfOrder:
            continue
        expected = factor * denseformer(net, of, weights, x)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=f"{text}\n{skip}")
        right += 1
    assert right
