"""Rewired models under torch.compile."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from mixing import ANCRE, all_gradients, assert_same, ids, keeping, mixed, train_step
from models import LinearNet, PreNorm, Stack, WithExits, vectors
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import checkpoint

import rewire
from rewire.patterns.tiny import tiny_model

compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which Dynamo itself hides


@compiles
def test_torch_compile_trains_like_eager() -> None:
    model = mixed(tiny_model("llama", num_hidden_layers=2).eval(), granularity="sublayer")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = model(ids(), use_cache=False).logits
        assert torch.allclose(compiled(ids(), use_cache=False).logits, expected, atol=1e-5)
    gradients = train_step(model, ids(), use_cache=False)
    model.zero_grad()
    compiled(ids(), use_cache=False).logits.square().mean().backward()
    assert_same(gradients, all_gradients(model), 1e-5)


@pytest.mark.slow
@compiles
def test_nodes_of_the_graphs_grow_with_the_layers() -> None:
    """Not with their square: all terms of a sum are one operator, and all gradients of a state are another."""

    def nodes(layers: int) -> int:
        torch._dynamo.reset()
        counts: list[int] = []

        def counted(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
            counts.append(len(graph.graph.nodes))
            return make_boxed_func(graph.forward)

        model = rewire.compile(LinearNet(layers), validate=False)
        compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=counted))
        compiled(torch.ones(2, 8)).sum().backward()
        return sum(counts)

    few, more, many = nodes(4), nodes(8), nodes(16)
    assert 1.9 * (more - few) < many - more < 2.1 * (more - few)


@compiles
def test_without_gradients() -> None:
    """There Dynamo calls the forwards of autograd functions as they are: sums of one to four states."""
    model = rewire.compile(LinearNet(3), start="paper", validate=False).requires_grad_(False)
    x = torch.randn(2, 8)
    assert torch.allclose(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x), atol=1e-6)


class SelectivelyCheckpointed(WithExits):
    contexts = staticmethod(keeping("mm"))

    def forward(self, x: Tensor) -> list[Tensor]:
        x, exits = self.stem(x), []
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=self.contexts)
            exits.append(self.head(x))
        return exits


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "net"), [(ANCRE, WithExits), ("attnres", SelectivelyCheckpointed)])
@compiles
def test_exits_between_blocks(topology: str, net: type[nn.Module]) -> None:
    model, found = mixed(net(), topology), []
    for called in (torch.compile(model, fullgraph=True, backend="aot_eager"), model):
        model.zero_grad()
        torch.stack(called(vectors())).square().mean().backward()
        found.append(all_gradients(model))
    assert_same(*found, 1e-5)


@pytest.mark.slow
@compiles
def test_torch_compile_with_inductor() -> None:
    model = mixed(Stack(PreNorm, depth=2))
    gradients, expected = train_step(model, vectors()), model(vectors())
    compiled = torch.compile(model, fullgraph=True)
    model.zero_grad()
    output = compiled(vectors())
    assert torch.allclose(output, expected, atol=1e-5)
    output.square().mean().backward()
    assert_same(gradients, all_gradients(model), 1e-5)


@compiles
def test_torch_compile_with_a_dynamic_length() -> None:
    model = mixed(tiny_model("llama", num_hidden_layers=2).eval())
    frames: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        frames.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for length in (7, 11, 16, 23):
            x = ids(length=length)
            actual = compiled(x, use_cache=False).logits
            assert torch.allclose(actual, model(x, use_cache=False).logits, atol=1e-5)
    assert len(frames) == 1


class TellsItsInput(nn.Module):
    """The stream begins in front of the blocks, which are checkpointed or not, and return two things."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.embedding, self.blocks, self.call = nn.Linear(8, 8), nn.ModuleList(TwoResults() for _ in range(3)), call

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, states = self.embedding(x), []
        for block in self.blocks:
            states.append(x)
            if self.call == "block":
                x, _ = checkpoint(block, x, use_reentrant=False)
            elif self.call == "method":
                x, _ = checkpoint(block.forward, x, use_reentrant=False)
            elif self.call == "partial":
                x, _ = checkpoint(functools.partial(block, y=x), x, use_reentrant=False)
            elif self.call == "function":
                x, _ = checkpoint(lambda x, block=block: block(x), x, use_reentrant=False)
            else:
                x, _ = block(x)
        return x, states


class TwoResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return x + self.linear(self.norm(x)), y


@pytest.mark.parametrize(
    ("topology", "call"),
    [
        ("hc-dynamic", "block"),
        *(pytest.param(ANCRE, at, marks=pytest.mark.slow) for at in ("block", "function", "method", "partial", "none")),
    ],
)
@compiles
def test_trunks_that_end_in_a_checkpoint(topology: str, call: str) -> None:
    """No note is left of it, which torch.compile would not trace; and what others see first is the input itself."""
    model = mixed(TellsItsInput(call), topology, example_inputs=vectors())
    output, states = torch.compile(model, fullgraph=True, backend="aot_eager")(vectors())
    expected, eager = model(vectors())
    assert torch.allclose(output, expected, atol=1e-5)
    assert torch.equal(eager[0], model.embedding(vectors())) and torch.allclose(states[0], eager[0])
