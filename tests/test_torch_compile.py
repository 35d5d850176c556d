"""Rewired models under torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mixing import ANCRE, all_gradients, assert_same, ids, keeping, llama, mixed, train_step
from models import PreNorm, Stack, WithExits, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which Dynamo itself hides


@pytest.mark.usefixtures("fresh_dynamo")
@compiles
def test_torch_compile_trains_like_eager() -> None:
    model = mixed(llama(), granularity="sublayer")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = model(ids(), use_cache=False).logits
        assert torch.allclose(compiled(ids(), use_cache=False).logits, expected, atol=1e-5)
    gradients = train_step(model, ids(), use_cache=False)
    model.zero_grad()
    compiled(ids(), use_cache=False).logits.square().mean().backward()
    assert_same(gradients, all_gradients(model), 1e-5)


class SelectivelyCheckpointed(WithExits):
    contexts = staticmethod(keeping("mm"))

    def forward(self, x: Tensor) -> list[Tensor]:
        x, exits = self.stem(x), []
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=self.contexts)
            exits.append(self.head(x))
        return exits


@pytest.mark.usefixtures("fresh_dynamo")
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
@pytest.mark.usefixtures("fresh_dynamo")
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


@pytest.mark.usefixtures("fresh_dynamo")
@compiles
def test_torch_compile_with_a_dynamic_length() -> None:
    model = mixed(llama())
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
