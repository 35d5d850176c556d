"""Ways through the code that leave out the last blocks: what runs there gets what the trunk would end with."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from mixing import shaken
from models import PreNorm, vectors
from torch import Tensor, nn
from written_nets import written_input, written_net

import rewire

LOOP = "for n, block in enumerate(self.blocks):\n    x = block(x)\n"
#: What the net computes behind its blocks.
HEAD = "self.stem(x).relu()"
EXITS = {
    "break": f"{LOOP}    if n == self.exit:\n        break\ny = {HEAD}",
    "return": f"{LOOP}    if n == self.exit:\n        return {HEAD}\ny = {HEAD}",
    "return of a variable": f"{LOOP}    if n == self.exit:\n        y = {HEAD}\n        return y\ny = {HEAD}",
    "variable, then break": f"{LOOP}    if n == self.exit:\n        y = {HEAD}\n        break\nelse:\n    y = {HEAD}",
    "on one line": f"{LOOP}    if n == self.exit: y = {HEAD}; return y\ny = {HEAD}",
    "a new value": f"{LOOP}    if n == self.exit:\n        x = x[:, 0:]\n        return {HEAD}\ny = {HEAD}",
    "before a block": f"for n, block in enumerate(self.blocks):\n    if n == self.exit + 1 > 0:\n        y = {HEAD}\n"
    f"        return y\n    x = block(x)\ny = {HEAD}",
    "in several statements": f"{LOOP}    if n == self.exit:\n        y = {HEAD}\n        with torch.enable_grad():\n"
    f"            if y.isnan().any():\n                return x\n        return y\ny = {HEAD}",
    "elif": f"{LOOP}    if n > 5:\n        pass\n    elif n == self.exit:\n        y = {HEAD}\n        return y\n"
    f"y = {HEAD}",
    "or else": f"x = self.blocks[0](x)\nx = self.blocks[1](x)\nif self.exit < 0:\n    x = self.blocks[2](x)\n"
    f"    y = {HEAD}\nelif self.exit > 5:\n    y = x\nelse:\n    y = {HEAD}",
    "or elif": f"x = self.blocks[0](x)\nx = self.blocks[1](x)\nif self.exit < 0:\n    x = self.blocks[2](x)\n"
    f"    y = {HEAD}\nelif self.exit == 1:\n    y = {HEAD}",
    "line by line": f"x = self.blocks[0](x)\nx = self.blocks[1](x)\nif self.exit == 1:\n    y = {HEAD}\n    return y\n"
    f"x = self.blocks[2](x)\ny = {HEAD}",
    "exception": "try:\n"
    + textwrap.indent(f"{LOOP}    if n == self.exit:\n        raise StopIteration\n", "    ")
    + f"except StopIteration:\n    y = {HEAD}\n    return y\ny = {HEAD}",
    "in a context": "with torch.enable_grad():\n"
    + textwrap.indent(f"{LOOP}    if n == self.exit:\n        break\ny = {HEAD}\nreturn y", "    "),
    "while": f"n = 0\nwhile True:\n    x = self.blocks[n](x)\n    if n in (self.exit, 2):\n        y = {HEAD}\n"
    "        break\n    n += 1",
    "closures": "for n, block in enumerate(self.blocks):\n    def run(x, block=block):\n        return block(x)\n\n"
    "    x = checkpoint(run, x, use_reentrant=False)\n"
    f"    if n == self.exit:\n        y = {HEAD}\n        return y\ny = {HEAD}",
    "a closure": "def run(x):\n    return block(x)\n\nfor n, block in enumerate(self.blocks):\n    x = run(x)\n"
    f"    if n == self.exit:\n        y = {HEAD}\n        return y\ny = {HEAD}",
    "checkpointed lambdas": "for n, block in enumerate(self.blocks):\n"
    "    x = checkpoint(lambda x, block=block: block(x), x, use_reentrant=False)\n"
    f"    if n == self.exit:\n        y = {HEAD}\n        return y\ny = {HEAD}",
    "lambda": "run = lambda block, x: block(x)\nfor n, block in enumerate(self.blocks):\n    x = run(block, x)\n"
    f"    if n == self.exit:\n        y = {HEAD}\n        return y\ny = {HEAD}",
    "match": f"{LOOP}    match n - self.exit:\n        case 0:\n            y = {HEAD}\n            return y\n"
    f"y = {HEAD}",
}


@pytest.mark.parametrize("topology", ["denseformer", "hc-static"])
@pytest.mark.parametrize("way", EXITS)
def test_early_exits(way: str, topology: str) -> None:
    """The branches of the blocks that did not run add nothing."""
    net = written_net(body=EXITS[way] + "\nx = y")
    net.exit = -1
    rewired = rewire.compile(net, topology, example_inputs=(written_input(),))
    for connection in rewire.connections(rewired).values():
        for weight in connection.parameters():
            nn.init.normal_(weight, 0.5, 0.5)
    rewired.exit = 1
    x = written_input()
    early = rewired(x)
    rewired.exit = -1
    for branch in (rewired.blocks[2].f, rewired.blocks[2].g):
        branch.register_forward_hook(lambda _, args, made: torch.zeros_like(made))
    torch.testing.assert_close(early, rewired(x))


@pytest.mark.parametrize(
    "between",
    [
        f"if n == 1:\n    y = {HEAD}",
        f"if n == 1:\n    y = {HEAD}\n    continue",
        f"if n == 1:\n    y = {HEAD}\nif x.isnan().any():\n    raise ValueError(x)",
    ],
)
def test_where_a_loop_goes_on_is_no_exit(between: str) -> None:
    """What is read there is what the next block reads."""
    body = LOOP + textwrap.indent(between, "    ")
    net = written_net(body=f"{body}\nx = torch.stack([x, y])")
    rewired = rewire.compile(net, "denseformer", example_inputs=(written_input(),))
    assert rewire.source(rewired, "").count("reach(x, -1)") == 1


def test_nested_functions_that_call_each_other() -> None:
    down = "def down(x, n):\n    return x if n < 0 else up(x, n)\n\n"
    up = "def up(x, n):\n    x = down(x, n - 1)\n    return self.blocks[n](x)\n\n"
    net = written_net(body=f"{down}{up}x = up(x, 2)")
    (connection,) = rewire.connections(rewire.compile(net, example_inputs=(written_input(),))).values()
    assert len(connection.layout.sites) == 6


# -- exits from a function below the one that has all blocks -----------------------------------------------------------


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PreNorm(8) for _ in range(2))

    def forward(self, x: Tensor, upto: int = 2) -> tuple[Tensor, int]:
        for number, block in enumerate(self.blocks):
            if number == upto:
                break
            x = block(x)
        return x, upto


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = Part(), Part(), nn.LayerNorm(8)

    def forward(self, x: Tensor, upto: int = 2) -> Any:
        x = self.first(x)[0]
        x = self.last(x, upto)[0]
        return self.norm(x)


class Returned(Parts):
    def forward(self, x: Tensor, upto: int = 2) -> Any:
        x = self.first(x)[0]
        return self.last(x, upto)


class ReturnedByAHelper(Parts):
    def run(self, x: Tensor, upto: int) -> Any:
        return self.last(x, upto)

    def forward(self, x: Tensor, upto: int = 2) -> Any:
        x = self.first(x)[0]
        return self.norm(self.run(x, upto)[0])


class Inside(Parts):
    def forward(self, x: Tensor, upto: int = 2) -> Any:
        out = self.first(x)
        return torch.tanh(self.norm(self.last(out[0], upto)[0]))


class Unpacked(Parts):
    def forward(self, x: Tensor, upto: int = 2) -> Any:
        out = self.first(x)
        x, _ = out
        out = self.last(x, upto)
        x, _ = out
        return self.norm(x)


class Attributes(Parts):
    def forward(self, x: Tensor, upto: int = 2) -> Any:
        self.state = self.first(x)[0]
        self.state = self.last(self.state, upto)[0]
        return self.norm(self.state)


class Items(Parts):
    def forward(self, x: Tensor, upto: int = 2) -> Any:
        states = {"a": self.first(x)[0]}
        states["b"] = self.last(states["a"], upto)[0]
        return self.norm(states["b"])


class LeavesOutItsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        if skip:
            return x
        return x + self.f(self.norm(x))


class OfOneBlock(Parts):
    """The last block leaves out its own add."""

    def __init__(self) -> None:
        super().__init__()
        self.last.blocks = nn.ModuleList([PreNorm(8), LeavesOutItsOwn()])

    def forward(self, x: Tensor, upto: int = 2) -> Any:
        x = self.first(x)[0]
        x = self.last.blocks[0](x)
        return self.norm(self.last.blocks[1](x, upto == 1))


@pytest.mark.each_once
@pytest.mark.parametrize("topology", ["ancre-ingoing", "hc-static", "grn-v1"])
@pytest.mark.parametrize("net", [Parts, Returned, ReturnedByAHelper, Inside, Unpacked, Attributes, Items, OfOneBlock])
def test_exits_from_a_part_of_the_trunk(net: Any, topology: str) -> None:
    x = vectors()
    rewired = shaken(rewire.compile(net().eval(), topology, example_inputs=(x,)), 0.1)
    early = rewired(x, 1)
    for parameter in rewired.last.blocks[1].parameters():
        parameter.data.zero_()
    whole = rewired(x)
    early, whole = (out[0] if isinstance(out, tuple) else out for out in (early, whole))
    torch.testing.assert_close(early, whole)


class Optional(nn.Module):
    """As YOLO's bottlenecks, which some models make without shortcuts."""

    def __init__(self) -> None:
        super().__init__()
        self.adds, self.f = True, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x).tanh() if self.adds else self.f(x)


class Extended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList(Optional() for _ in range(3)), nn.Linear(4 * 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        states.extend(block(states[-1]) for block in self.blocks)
        return self.out(torch.cat(states, -1))


@pytest.mark.parametrize("topology", ["ancre-ingoing", "hc-static", "grn-v1"])
def test_a_trunk_does_not_end_in_a_generator(topology: str) -> None:
    x = vectors()
    rewired = shaken(rewire.compile(Extended(), topology, example_inputs=(x,)), 0.1)
    assert len(rewire.coefficients(rewired)) == 1
    rewired(x).sum().backward()
