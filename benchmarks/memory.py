"""Memory that topologies add under activation checkpointing: a Llama of 32 layers, one training step.

    python benchmarks/memory.py [--out FILE]

Counted are the bytes of all tensors that live at once, at their most: every operator's results are followed until they
are freed, in forward and backward. The plain model's peak is subtracted, and the rest is told in hidden states, what
one layer's checkpoint keeps. Weights and their gradients are small beside these. States held are those that the stream
holds between the last two layers, what would cross a boundary of pipeline stages there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

with contextlib.suppress(ModuleNotFoundError):  # where torchvision's operators do not match torch's build
    import torchvision_stub  # noqa: F401

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import rewire
from rewire.kernels import plain
from rewire.stream import Stream

LAYERS, WIDTH, TOKENS = 32, 128, 512
plain.WORTHWHILE = 0  # sums are computed as those of tensors of usual sizes are
#: Topology with options.
TOPOLOGIES: list[tuple[str, dict[str, Any]]] = [
    (name, options)
    for name in ("ancre-ingoing", "ancre-outgoing", "ancre-none", "denseformer")
    for options in ({}, {"block": 4}, {"block": 8})
]
TOPOLOGIES += [
    (name, options)
    for name in ("grn-v1", "grn-v2", "grn-v3", "dca")
    for options in ({}, {"last": 4}, {"block": 4}, {"block": 8})
]
TOPOLOGIES += [(name, options) for name in ("muddformer", "attnres") for options in ({}, {"block": 4}, {"block": 8})]


class Peak(TorchDispatchMode):
    """Counts the bytes of the tensors made inside that live at once.

    Attributes:
        bytes, most: now, and at their most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(x.untyped_storage()) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor) and id(x.untyped_storage()) not in given:
                self._made(x.untyped_storage())
        return result

    def _made(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.bytes += size
        self.most = max(self.most, self.bytes)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.bytes -= size


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        vocab_size=16,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def peak(model: nn.Module) -> float:
    """Of one training step, in hidden states."""
    ids = torch.arange(TOKENS)[None] % 16
    step(model, ids)  # kernels and gradients of weights are there
    with Peak() as counted:
        step(model, ids)
    return counted.most / (TOKENS * WIDTH * 4)


def step(model: nn.Module, ids: Tensor) -> None:
    model(input_ids=ids).logits.float().square().mean().backward()


def extra(name: str, options: dict[str, Any], plain: float) -> float:
    return peak(rewire.compile(llama(), name, granularity="block", validate=False, **options)) - plain
