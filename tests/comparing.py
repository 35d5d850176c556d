"""Outputs and gradients of a model, and comparisons of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from rewire.copies import own_inputs, private, seeded
from rewire.passes.finding.record import record

Results = tuple[list[Tensor], dict[str, Tensor | None]]


def evaluate(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool = False) -> Results:
    """Outputs, and the gradients of a random weighted sum of them by parameter name (connection weights aside).

    Training flags and buffers (BatchNorm's statistics) are left as they were.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    flags = [(module, module.training) for module in model.modules()]
    model.train(train)
    torch.manual_seed(5)
    outputs = [t for t in tensors_in(model(*args, **kwargs)) if t.is_floating_point()]
    generator = torch.Generator().manual_seed(6)
    loss = torch.zeros(())
    for t in outputs:
        if t.requires_grad:
            loss = loss + (t.float() * torch.rand(t.shape, generator=generator)).sum() / t.numel()
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad and "depth_connections" not in n}
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    for module, training in flags:
        module.training = training
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return [t.detach() for t in outputs], dict(zip(parameters, gradients, strict=True))


def assert_bitwise(expected: Results, actual: Results) -> None:
    assert len(expected[0]) == len(actual[0]) > 0
    for number, (a, b) in enumerate(zip(expected[0], actual[0], strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"output {number} differs by {(a - b).abs().max():.1e}"
    assert list(expected[1]) == list(actual[1])
    assert any(gradient is not None and bool(gradient.any()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        other = actual[1][name]
        assert (gradient is None) == (other is None), name
        assert gradient is None or torch.equal(gradient, other), f"the gradient of {name} differs"


def assert_close(expected: Results, actual: Results, tolerance: float = 1e-5, gradients: float = 1e-5) -> None:
    """Relative to each tensor's norm; a gradient that is zero but for rounding is measured against the largest one."""
    assert len(expected[0]) == len(actual[0]) > 0
    for number, (a, b) in enumerate(zip(expected[0], actual[0], strict=True)):
        error = float((a.double() - b.double()).norm() / a.double().norm())
        assert error <= tolerance, f"output {number} differs by {error:.1e}"
    largest = max(float(gradient.norm()) for gradient in expected[1].values() if gradient is not None)
    assert largest > 0 and list(expected[1]) == list(actual[1])
    for name, gradient in expected[1].items():
        other = actual[1][name]
        assert (gradient is None) == (other is None), name
        if gradient is not None:
            error = float((gradient.double() - other.double()).norm()) / max(float(gradient.norm()), 1e-3 * largest)
            assert error <= gradients, f"the gradient of {name} differs by {error:.1e}"


def operations(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool = False) -> list[Any]:
    """The operations with weights that a run of a copy shows: in which module, what, and of which shape."""
    bench = private(model).train(training)
    with seeded(0, bench):
        flow = record(bench, own_inputs((args, kwargs)))
    return [(op.scope.path, op.name, op.shape) for op in flow if op.weighted]


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in an output, in order; anything else must be plain data."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_in(item)]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors_in(item)]
    if dataclasses.is_dataclass(value):
        return [t for field in dataclasses.fields(value) for t in tensors_in(getattr(value, field.name))]
    assert value is None or isinstance(value, (bool, int, float, str)) or "Cache" in type(value).__name__, type(value)
    return []
