"""Blocks that are compiled one by one: Dynamo stops after 8 versions of one code object, and says so in a log only."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from every_topology import compiled
from models import PreNorm, Stack, vectors
from torch import Tensor, nn

from rewire.code.edited import Edited
from rewire.passes.editing.install import install
from rewire.patterns.tiny import tiny_config

DEPTH = 16

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # which Dynamo hides
]


class Probe(nn.Module):
    """Part of a block that counts how often it runs without having been compiled."""

    eager = 0

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            Probe.eager += 1
        return self.inner(x)


class Frames:
    """A backend that runs graphs as they are, and counts them (``made``) and their calls (``run``)."""

    def __init__(self) -> None:
        self.made = self.run = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        self.made += 1

        def run(*args: Any) -> Any:
            self.run += 1
            return graph.forward(*args)

        return run

    def during(self, step: Callable[[], Any]) -> tuple[int, int, int]:
        """Graphs that ``step`` made, graphs that it ran, and probes that ran eagerly."""
        before = self.made, self.run, Probe.eager
        step()
        return self.made - before[0], self.run - before[1], Probe.eager - before[2]


def probed(model: nn.Module, layers: nn.ModuleList, key: str) -> nn.Module:
    for layer in layers:
        layer.mlp = Probe(layer.mlp)
    return compiled(model, key, start="paper", validate=False).train()


def stack(key: str) -> nn.Module:
    model = Stack(PreNorm, depth=DEPTH)
    return probed(model, model.layers, key)


def llama(key: str, depth: int = DEPTH) -> nn.Module:
    from transformers import LlamaForCausalLM

    config = tiny_config("llama")
    config.num_hidden_layers = depth
    model = LlamaForCausalLM(config)
    return probed(model, model.model.layers, key)


def train_stack(model: nn.Module, length: int) -> None:
    model(vectors(length=length)).square().mean().backward()


def train_llama(model: nn.Module, length: int) -> None:
    tokens = torch.randint(3, 61, (2, length))
    model(tokens, labels=tokens, use_cache=False).loss.backward()


def codes(layers: Iterable[nn.Module]) -> set[int]:
    return {id(type(layer).forward.__code__) for layer in layers}  # type: ignore[attr-defined]


ALL_NEW, ALL_KNOWN = (DEPTH, DEPTH, 0), (0, DEPTH, 0)


def test_every_block_stays_compiled() -> None:
    """One version of each block for the first length, one for all others."""
    model, frames = stack("denseformer"), Frames()
    for n, layer in enumerate(model.layers):
        model.layers[n] = torch.compile(layer, backend=frames)
    counts = [frames.during(lambda length=length: train_stack(model, length)) for length in (8, 12, 17, 8)]
    assert counts == [ALL_NEW, ALL_NEW, ALL_KNOWN, ALL_KNOWN]


def test_every_sharded_transformers_block_stays_compiled() -> None:
    """FSDP2 makes a subclass of each block's class, and transformers wraps that one's forward again."""
    model, frames = llama("residual"), Frames()
    for layer in model.model.layers:
        layer.compile(backend=frames)
    sharded: dict[type, type] = {}  # as FSDP2 does it
    for layer in model.model.layers:
        cls = type(layer)
        layer.__class__ = sharded.setdefault(cls, type(f"FSDP{cls.__name__}", (Mixin, cls), {}))
    assert frames.during(lambda: train_llama(model, 8)) == ALL_NEW
    assert frames.during(lambda: train_llama(model, 8)) == ALL_KNOWN


class Mixin:
    """In place of FSDPModule, which needs a process group."""


STATIC = ["ancre-ingoing", "ancre-none", "grn-v2", "ancre-groups", "denseformer-groups"]
PER_TOKEN = ["grn-v3", "dca", "attnres", "muddformer", "hc-dynamic", "mhc"]


@pytest.mark.parametrize(
    ("backend", "key"),
    [
        *(("aot_eager", key) for key in (*STATIC, *PER_TOKEN)),
        *(("inductor", key) for key in ("ancre-groups", "grn-v2", "grn-v3", "attnres", "mhc")),
    ],
)
def test_compiled_blocks_train_as_they_do_eagerly(backend: str, key: str) -> None:
    """With real backends: the first block opens the stream, and the tables of its weights leave a compiled region."""
    model = compiled(Stack(PreNorm, depth=3), key, start="paper", validate=False)
    eager = copy.deepcopy(model)
    for layer in model.layers:
        layer.compile(backend=backend)
    train_stack(eager, 8)
    train_stack(model, 8)
    expected = {name: parameter.grad for name, parameter in eager.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_copies_have_code_of_their_own() -> None:
    model = llama("residual", depth=3)
    copies = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    layers = [layer for m in copies for layer in m.model.layers]
    assert len(codes(layers)) == 9
    assert {type(layer).__name__ for layer in layers} == {"LlamaDecoderLayer"}
    tokens = torch.arange(8)[None]
    expected = model(tokens).logits
    assert all(torch.equal(other(tokens).logits, expected) for other in copies)


def test_the_copy_of_a_compiled_block_is_not_compiled() -> None:
    """What `Module.compile` leaves in a module calls that module, not its copy."""
    model = compiled(Stack(PreNorm, depth=2), "residual", validate=False)
    for layer in model.layers:
        layer.compile(backend="eager")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.layers.parameters():
            parameter.zero_()
    assert not torch.equal(other(vectors()), model(vectors()))
    pickle.dumps(model)


def test_classes_are_freed_with_their_model() -> None:
    model = compiled(Stack(PreNorm, depth=2), "residual", validate=False)
    cls = weakref.ref(type(model.layers[0]))
    del model
    gc.collect()
    assert cls() is None


def test_modules_without_a_stream_share_a_class() -> None:
    first, second = nn.Identity(), nn.Identity()
    for module in (first, second):
        install(module, {"forward": Edited("forward", "    def forward(self, input): return -input\n")}, shared=True)
    assert first(1) == -1
    assert type(first) is type(second) is type(pickle.loads(pickle.dumps(first)))
