"""Trunks that start with a parameter or a buffer, as those of learned queries: no operation makes their first state."""

from __future__ import annotations

import pytest
import torch
from every_topology import FEW
from mixing import all_gradients, shaken
from torch import Tensor, nn
from written_nets import WIDTH, written_net

import rewire

OWN = "x = self.first\nfor block in self.blocks:\n    x = x + block.f(x)\n    x = x + block.g(x)"
BODIES = {
    "own adds": OWN,
    "read with another value": OWN.replace("block.f(x)", "block.f(x + memory)"),
    "blocks that add": "x = self.first\nfor block in self.blocks:\n    x = block(x)",
    "blocks by a method": "x = self.first\nfor block in self.blocks:\n    x = block.add(x)",
    "own add, then blocks": "x = self.first\nx = x + self.blocks[0].f(x)\nfor b in self.blocks[1:]:\n    x = b(x)",
    "blocks, then own add": "x = self.first\nfor b in self.blocks[1:]:\n    x = b(x)\nx = x + self.blocks[0].f(x)",
    "also in the result": f"{OWN}\nx = x + self.stem(x)",
    "one of two": OWN.replace("self.first", "self.first if len(memory) > 1 else memory"),
    "an argument of a call": f"def run(x):\n    {OWN.partition(chr(10))[2].replace(chr(10), chr(10) + '    ')}\n"
    "    return x\nx = run(self.first)",
}
NO_QKV = [key for key in (*FEW, "hc-static", "denseformer", "ancre-outgoing") if key not in ("dca", "muddformer")]


def net(body: str) -> nn.Module:
    made = written_net(body=f"memory = x\n{body}\nx = x + memory.mean()")
    made.first = nn.Parameter(torch.randn(WIDTH, WIDTH))
    return made


def results(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    output = model(x)
    output.sin().sum().backward()
    return {"output": output.detach()} | all_gradients(model)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("topology", NO_QKV)
def test_as_where_an_operation_makes_the_state(topology: str, body: str, caplog: pytest.LogCaptureFixture) -> None:
    found, x = [], torch.randn(WIDTH, WIDTH)
    for start in ("self.first", "self.first.clone()"):
        torch.manual_seed(0)
        plain = net(BODIES[body].replace("self.first", start))
        rewired = rewire.compile(plain, topology, example_inputs=(x,), granularity="sublayer")
        found.append(results(shaken(rewired, 0.1, 7), x))
    for name, value in found[1].items():
        torch.testing.assert_close(found[0][name], value, msg=name)
    assert "not validated" not in caplog.text


class Queries(nn.Module):
    def __init__(self, learned: bool = True) -> None:
        super().__init__()
        queries = torch.randn(3, WIDTH)
        if learned:
            self.queries = nn.Parameter(queries)
        else:
            self.register_buffer("queries", queries)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, memory: Tensor) -> Tensor:
        x = self.queries
        for block in self.blocks:
            x = x + block(x + memory).tanh()
        return x


class Inside(nn.Module):
    """Has them in a module, which it calls twice."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Queries()

    def forward(self, memory: Tensor) -> Tensor:
        return self.decoder(memory) * self.decoder(memory.sin())


@pytest.mark.parametrize("topology", NO_QKV)
def test_a_buffer_keeps_its_value(topology: str) -> None:
    model, memory = Queries(learned=False), torch.randn(3, WIDTH)
    queries = model.queries.clone()
    rewired = rewire.compile(model, topology, example_inputs=(memory,))
    assert torch.equal(rewired.queries, queries) and torch.equal(model.queries, queries)
    torch.testing.assert_close(rewired(memory), model(memory))


@pytest.mark.parametrize("topology", NO_QKV)
def test_in_a_module_that_runs_twice(topology: str) -> None:
    model, memory = Inside(), torch.randn(3, WIDTH)
    rewired = shaken(rewire.compile(model, topology, example_inputs=(memory,)), 0.1, 7)
    alone = shaken(rewire.compile(model.decoder, topology, example_inputs=(memory,)), 0.1, 7)
    torch.testing.assert_close(rewired(memory), alone(memory) * alone(memory.sin()))


class InAMethod(Queries):
    """A method starts the trunk, in each of its calls."""

    def forward(self, memory: Tensor) -> Tensor:
        return self.decode(memory) * self.decode(memory.sin())

    def decode(self, memory: Tensor) -> Tensor:
        x = self.queries
        for block in self.blocks:
            x = x + block(x + memory).tanh()
        return x


@pytest.mark.parametrize("topology", NO_QKV)
def test_in_a_method_that_runs_twice(topology: str, caplog: pytest.LogCaptureFixture) -> None:
    model, memory = InAMethod(), torch.randn(3, WIDTH)
    rewired = shaken(rewire.compile(model, topology, example_inputs=(memory,)), 0.1, 7)
    alone = Queries()
    alone.load_state_dict(model.state_dict())
    alone = shaken(rewire.compile(alone, topology, example_inputs=(memory,)), 0.1, 7)
    torch.testing.assert_close(rewired(memory), alone(memory) * alone(memory.sin()))
    assert "not validated" not in caplog.text


class ReadTwice(Queries):
    def forward(self, memory: Tensor) -> Tensor:
        x = self.queries + self.blocks[0](self.queries + memory)
        for block in self.blocks[1:]:
            x = x + block(x)
        return x


class FromAList(Queries):
    def __init__(self) -> None:
        super().__init__()
        self.firsts = nn.ParameterList([self.queries])
        del self.queries

    def forward(self, memory: Tensor) -> Tensor:
        x = self.firsts[0]
        for block in self.blocks:
            x = x + block(x + memory).tanh()
        return x


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (ReadTwice(), "starts with 'queries', which the code at .* reads 2 times: read it once, into a variable"),
        (FromAList(), "starts with 'firsts.0', which the code at .* does not read as an attribute: read it once"),
    ],
)
def test_of_which_it_is_unclear_which_read_is_the_state(model: nn.Module, why: str) -> None:
    with pytest.raises(rewire.EditError, match=why):
        rewire.compile(model, "denseformer", example_inputs=(torch.randn(3, WIDTH),))
