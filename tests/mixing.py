"""Rewired models whose connection weights really mix, and one step of training."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from models import token_ids
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import rewire
from rewire.kernels import switch
from rewire.mixes import autograd
from rewire.patterns.tiny import tiny_model

ANCRE = "ancre-ingoing"


def learned(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if "depth_connections" in name}


def mixed(model: nn.Module, topology: str = ANCRE, **options: Any) -> nn.Module:
    """Rewired, with connection weights that really mix: an answer that ignores them is wrong."""
    rewired = rewire.compile(model, topology, start="paper", validate=False, **options)
    return shaken(rewired, 0.01, 7)


@torch.no_grad()
def shaken(model: nn.Module, size: float, seed: int | None = None, **sizes: float) -> nn.Module:
    """The model, normal noise of this size added to its connection weights as the formulas have them, in place.

    Args:
        seed: None: the global generator.
        sizes: others, for weights of these names.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for connection in rewire.connections(model).values():
        for name, weight in connection.named_parameters():
            noise = torch.randn(weight.shape, generator=generator).to(weight)
            weight.add_(sizes.get(name, size) / connection.stored_in[name] * noise)
    return model


def llama() -> nn.Module:
    return tiny_model("llama").eval()


def ids(batch: int = 2, length: int = 12) -> Tensor:
    return token_ids(batch, length, 97)


def all_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(expected: dict[str, Tensor], actual: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert list(expected) == list(actual) and expected
    for name, value in expected.items():
        if tolerance == 0:
            assert torch.equal(value, actual[name]), name
        else:
            largest = max(float(v.norm()) for v in expected.values())
            error = float((value.double() - actual[name].double()).norm()) / max(float(value.norm()), 1e-3 * largest)
            assert error <= tolerance, (name, error)


@contextlib.contextmanager
def autograd_alone() -> Iterator[None]:
    """Without kernels, and as under transforms, which take no gradients that are written by hand."""
    with mock.patch.object(autograd, "_transforms", return_value=True), mock.patch.object(switch, "ON", False):
        yield


def keeping(*names: str) -> Callable[[], Any]:
    """Contexts of a selective checkpoint that keeps what these operators return, and rewire's own."""

    def policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        kept = operator.namespace == "rewire" or operator.overloadpacket.__name__ in names
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def nodes_behind(result: Tensor) -> list[Any]:
    """The nodes of the graph that autograd has made."""
    nodes: dict[Any, None] = {result.grad_fn: None}
    queue = list(nodes)
    for node in queue:
        new = {other: None for other, _ in node.next_functions if other is not None and other not in nodes}
        nodes |= new
        queue += new
    return list(nodes)


def train_step(model: nn.Module, *inputs: Any, **kwargs: Any) -> dict[str, Tensor]:
    model.zero_grad()
    output = model(*inputs, **kwargs)
    output = output.logits if hasattr(output, "logits") else output
    output.float().square().mean().backward()
    return all_gradients(model)
