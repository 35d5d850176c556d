"""Forward hooks where streams pass: a model rewired at a preserving start does with them what the original does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from comparing import assert_close, evaluate
from every_topology import FAMILIES, PRESERVING, compiled, kinds_first
from mixing import ids, llama
from models import MaskedStack, PreNorm, Stack, WithMask, vectors
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint

import rewire


class Checkpointed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.training else layer(x)
        return self.out(x)


class Groups(Stack):
    """Blocks in containers that pass the stream on."""

    def __init__(self) -> None:
        super().__init__(PreNorm, depth=4)
        self.layers: Any = nn.Sequential(nn.Sequential(*self.layers[:2]), nn.Sequential(*self.layers[2:]))


def changed(x: Tensor) -> Tensor:
    """What steering does: in any class but that of tensors, it would be left out."""
    return 0.5 * x + x.detach().roll(1, -1) + 0.1 if type(x) is Tensor else x


def by_isinstance(_m: Any, _a: Any, out: Any) -> Any:
    return changed(out) if isinstance(out, Tensor) else None


def by_is_tensor(_m: Any, _a: Any, out: Any) -> Any:
    return changed(out) if torch.is_tensor(out) else None


def ablated(_m: Any, _a: Any, out: Tensor) -> Tensor:
    return torch.zeros_like(out)


def in_place(_m: Any, _a: Any, out: Tensor) -> None:
    out.mul_(0.5).add_(0.1)


def through_a_view(_m: Any, _a: Any, out: Tensor) -> None:
    out[..., 0].zero_()


def through_data(_m: Any, _a: Any, out: Tensor) -> None:
    out.data.mul_(0.5)


def from_the_input(_m: Any, args: Any, out: Tensor) -> Tensor:
    return out + 0.5 * args[0]


def read_only(_m: Any, _a: Any, out: Tensor) -> None:
    assert type(out) is Tensor and out.isfinite().all()


AFTER: list[Callable[..., Any]] = [by_isinstance, by_is_tensor, ablated, in_place, through_a_view, through_data]
AFTER += [from_the_input, read_only]


def before_it(_m: Any, args: Any) -> Any:
    return (changed(args[0]), *args[1:])


def before_it_alone(_m: Any, args: Any) -> Any:
    return changed(args[0])


def before_in_place(_m: Any, args: Any) -> None:
    args[0].mul_(0.5)


BEFORE: list[Callable[..., Any]] = [before_it, before_it_alone, before_in_place]
HOOKS = [hook.__name__ for hook in (*AFTER, *BEFORE)]


def register(model: nn.Module, name: str) -> None:
    """The hook, on the second block and the last."""
    for number in (1, len(model.layers) - 1):
        for hook in (hook for hook in AFTER if hook.__name__ == name):
            model.layers[number].register_forward_hook(hook)
        for hook in (hook for hook in BEFORE if hook.__name__ == name):
            model.layers[number].register_forward_pre_hook(hook)


def compare(model: nn.Module, rewired: nn.Module, train: bool = False, *args: Any) -> None:
    args = args or (vectors(),)
    expected = evaluate(model, args, {}, train)
    assert_close(expected, evaluate(rewired, args, {}, train), 2e-5, 1e-4)


@pytest.mark.parametrize(("hook", "key"), kinds_first((h, k) for h in HOOKS for k in PRESERVING if k in FAMILIES))
@pytest.mark.parametrize("kind", [Stack, Checkpointed])
def test_what_hooks_on_blocks_do(hook: str, key: str, kind: type[Stack]) -> None:
    model = kind(PreNorm, depth=3)
    rewired = compiled(model, key, example_inputs=(vectors(),), validate=False)
    for other in (model, rewired):
        register(other, hook)
    for train in (False, True):
        compare(model, rewired, train)
