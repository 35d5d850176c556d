"""Losses, and ways to differentiate them: as in the same model where all is left to autograd."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from every_topology import mixed
from interpreter import INTERPRETED, interpret, starts_interpreter
from mixing import all_gradients, assert_same, autograd_alone, keeping
from models import WithExits, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def loss(model: nn.Module, x: Tensor) -> Tensor:
    total: Tensor = sum(out.sin().sum() for out in model(x))
    return total


def of_all_exits(model: nn.Module, x: Tensor) -> None:
    loss(model, x).backward()


def of_the_last(model: nn.Module, x: Tensor) -> None:
    model(x)[-1].sin().sum().backward()


def of_an_early_one(model: nn.Module, x: Tensor) -> None:
    model(x)[1].sin().sum().backward()


def from_one_exit_after_another(model: nn.Module, x: Tensor) -> None:
    exits = model(x)
    for number in (2, 4, 0):
        exits[number].sin().sum().backward(retain_graph=True)


def the_same_twice(model: nn.Module, x: Tensor) -> None:
    total = loss(model, x)
    total.backward(retain_graph=True)
    total.backward()


def of_two_calls(model: nn.Module, x: Tensor) -> None:
    (loss(model, x) * loss(model, 2 * x)).backward()


def without_the_first_blocks(model: nn.Module, x: Tensor) -> None:
    for frozen in (model.stem, *model.blocks[:2]):
        frozen.requires_grad_(False)
    loss(model, x).backward()


def of_connections_alone(model: nn.Module, x: Tensor) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("depth_connections" in name)
    loss(model, x).backward()


def without_connections(model: nn.Module, x: Tensor) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("depth_connections" not in name)
    loss(model, x).backward()


def without_norms(model: nn.Module, x: Tensor) -> None:
    for block in model.blocks:
        block.norm.requires_grad_(False)
    loss(model, x).backward()


def of_a_few_parameters(model: nn.Module, x: Tensor) -> None:
    few = [*model.blocks[2].parameters()]
    for parameter, gradient in zip(few, torch.autograd.grad(loss(model, x), few), strict=True):
        parameter.grad = gradient


def of_the_gradient_of_the_input(model: nn.Module, x: Tensor) -> None:
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(model, x), x, create_graph=True)
    gradient.square().sum().backward()


def of_gradients_and_an_exit(model: nn.Module, x: Tensor) -> None:
    exits, few = model(x), [*model.blocks[1].parameters()]
    gradients = torch.autograd.grad(exits[-1].sin().sum(), few, create_graph=True)
    (sum(gradient.sin().sum() for gradient in gradients) + exits[2].sum()).backward()


def in_a_checkpoint(model: nn.Module, x: Tensor) -> None:
    checkpoint(lambda x: loss(model, x), x, use_reentrant=False).backward()


def in_a_reentrant_checkpoint(model: nn.Module, x: Tensor) -> None:
    checkpoint(lambda x: loss(model, x), x.requires_grad_(), use_reentrant=True).backward()


def in_a_checkpoint_that_keeps_some_results(model: nn.Module, x: Tensor) -> None:
    """Selective checkpointing: what is kept must not be written to by what is computed again."""
    contexts = keeping("mm", "bmm", "addmm", "baddbmm", "exp")
    checkpoint(lambda x: loss(model, x), x, use_reentrant=False, context_fn=contexts).backward()


def with_saved_tensors_elsewhere(model: nn.Module, x: Tensor) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda kept: kept.clone()):
        total = loss(model, x)
    total.backward()


def in_several_directions_at_once(model: nn.Module, x: Tensor) -> None:
    """Three backward passes in one, kept as if it were one gradient."""
    exits, parameters = model(x), [*model.parameters()]
    directions = torch.linspace(-1, 1, 3 * exits[-1].numel()).view(3, *exits[-1].shape)
    outputs = [exits[-1].sin() + exits[1]]
    found = torch.autograd.grad(outputs, parameters, [directions], is_grads_batched=True)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient[0] - gradient[1] + gradient[2].square()


def in_several_directions_by_vmap(model: nn.Module, x: Tensor) -> None:
    """The same by torch.func, around a graph that was made outside."""
    last, parameters = model(x)[-1], [*model.parameters()]
    directions = torch.linspace(-1, 1, 3 * last.numel()).view(3, *last.shape)
    back = torch.func.vmap(lambda grad: torch.autograd.grad(last, parameters, grad, retain_graph=True))
    for parameter, gradient in zip(parameters, back(directions), strict=True):
        parameter.grad = gradient[0] - gradient[1] + gradient[2].square()


def by_torch_func(model: nn.Module, x: Tensor) -> None:
    found = torch.func.grad(lambda p: _functional(model, p, x))(_detached(model))
    for name, parameter in model.named_parameters():
        parameter.grad = found[name]


def of_each_sample(model: nn.Module, x: Tensor) -> None:
    def of_one(parameters: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = torch.func.grad(lambda p: _functional(model, p, x))(parameters)
        return found

    found = torch.func.vmap(of_one, (None, 0))(_detached(model), x)
    for name, parameter in model.named_parameters():
        parameter.grad = found[name].square().sum(0)


def forwards(model: nn.Module, x: Tensor) -> None:
    """The gradient in one direction, kept as if it were that of the bias."""
    _, tangent = torch.func.jvp(lambda x: _functional(model, _detached(model), x), (x,), (torch.ones_like(x),))
    model.head.bias.grad = tangent.expand(3)


def after_writing_to_the_output(model: nn.Module, x: Tensor) -> None:
    exits = model(x)
    exits[-1].mul_(2).add_(exits[1])
    exits[-1].sin().sum().backward()


def of_no_tokens_too(model: nn.Module, x: Tensor) -> None:
    (loss(model, x[:, :0]) + loss(model, x)).backward()


def _detached(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _functional(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    total: Tensor = sum(out.sin().sum() for out in torch.func.functional_call(model, parameters, (x,)))
    return total


STEPS = [
    *(of_all_exits, of_the_last, of_an_early_one, from_one_exit_after_another, the_same_twice, of_two_calls),
    *(without_the_first_blocks, of_connections_alone, without_connections, without_norms, of_a_few_parameters),
    *(of_the_gradient_of_the_input, of_gradients_and_an_exit),
    *(
        in_a_checkpoint,
        in_a_reentrant_checkpoint,
        in_a_checkpoint_that_keeps_some_results,
        with_saved_tensors_elsewhere,
    ),
    *(
        in_several_directions_at_once,
        in_several_directions_by_vmap,
        by_torch_func,
        of_each_sample,
        forwards,
        after_writing_to_the_output,
        of_no_tokens_too,
    ),
]
KEYS = ["grn-v3", "hc-dynamic", "attnres"]
MORE = ["ancre-ingoing", "denseformer-groups", "muddformer", "hc-static", "mhc", "attnres-scaled", "attnres-groups"]


@functools.cache
def with_exits(key: str) -> nn.Module:
    return mixed(WithExits(), key)


def gradients(step: Callable[[nn.Module, Tensor], None], key: str) -> dict[str, Tensor]:
    model = copy.deepcopy(with_exits(key))
    step(model, vectors())
    return all_gradients(model)


@pytest.mark.parametrize(
    ("step", "key"),
    [
        (step, key)
        for number, step in enumerate(STEPS)
        for key in (KEYS if INTERPRETED else (*KEYS, MORE[number % len(MORE)]))
    ],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
def test_as_by_autograd(step: Callable[[nn.Module, Tensor], None], key: str) -> None:
    found = gradients(step, key)
    with autograd_alone():
        assert_same(gradients(step, key), found, 1e-4)  # second derivatives round differently on other processors


@pytest.mark.slow
@starts_interpreter
def test_by_kernels(tmp_path: Path) -> None:
    interpret(f"{__file__}::test_as_by_autograd", tmp_path)
