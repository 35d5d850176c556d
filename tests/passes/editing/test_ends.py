"""Ways through the code that leave out the last blocks: what runs there gets what the trunk would end with."""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch import nn
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
