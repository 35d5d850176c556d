"""Pass: compare the rewritten model with the original, outputs and gradients."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rewire.errors import BadExampleInputs, OutOfOrder, ValidationMismatch
from rewire.patterns.pattern import Inputs
from rewire.stream import Stream

#: Relative tolerance (norm of the difference over norm of the original) by dtype.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
#: Gradients pass through more roundings than outputs.
_GRADIENT_SLACK = 5.0


def normalise_inputs(example_inputs: Any) -> Inputs:
    """A tuple of args, a dict of kwargs, or a pair of both, as a pair of both.

    Raises:
        BadExampleInputs: it is none of these.
    """
    if isinstance(example_inputs, dict):
        return (), example_inputs
    if isinstance(example_inputs, (tuple, list)):
        if (
            len(example_inputs) == 2
            and isinstance(example_inputs[0], (tuple, list))
            and isinstance(example_inputs[1], dict)
        ):
            return tuple(example_inputs[0]), example_inputs[1]
        return tuple(example_inputs), {}
    raise BadExampleInputs(
        "example_inputs must be a tuple of args, a dict of kwargs, or a pair of both, "
        f"not {type(example_inputs).__name__}."
    )


def validate(original: nn.Module, rewired: nn.Module, inputs: Inputs) -> None:
    """Run both models in evaluation mode on ``inputs``, forward and backward, and compare.

    Nothing is left behind: training flags, gradients and random state are as before.

    Raises:
        BadExampleInputs: the original does not run on the inputs.
        ValidationMismatch: outputs or gradients differ; the first block that differs is named.
    """
    try:
        expected = _run(original, inputs)
    except Exception as error:
        raise BadExampleInputs(
            f"{type(original).__name__} does not run on the example inputs: {type(error).__name__}: {error}"
        ) from error
    try:
        actual = _run(rewired, inputs)
    except OutOfOrder:
        raise
    except Exception as error:
        message = (
            f"the rewritten {type(original).__name__} fails where the original runs: {type(error).__name__}: {error}"
        )
        raise ValidationMismatch(message) from error
    _compare(expected, actual)


def outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Floating-point tensors in what ``model`` returns for ``inputs``, in evaluation mode and without gradients."""
    with _evaluating(model), torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        return [t for t in tensors_in(model(*inputs[0], **inputs[1])) if t.is_floating_point()]


@dataclasses.dataclass
class _Run:
    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    blocks: list[tuple[str, Tensor]]


def _run(model: nn.Module, inputs: Inputs) -> _Run:
    blocks: list[tuple[str, Tensor]] = []
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad and not p.is_meta}
    with _evaluating(model), _recorded(model, blocks), torch.enable_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        outputs = [t for t in tensors_in(model(*inputs[0], **inputs[1])) if t.is_floating_point()]
        differentiable = [t for t in outputs if t.requires_grad]
        gradients: Sequence[Tensor | None] = [None] * len(parameters)
        if differentiable and parameters:
            torch.manual_seed(1)
            # weights that differ per element: a plain sum would hide what a final norm cancels
            loss = sum((t.float() * _weights(t)).sum() / t.numel() for t in differentiable)
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)  # type: ignore[arg-type]
    return _Run([t.detach() for t in outputs], dict(zip(parameters, gradients, strict=True)), blocks)


def _weights(output: Tensor) -> Tensor:
    """Random weights of the shape of ``output``. Not by `rand_like`, whose values depend on strides, too."""
    return torch.rand(output.shape, device=output.device)


def _compare(expected: _Run, actual: _Run) -> None:
    if len(expected.outputs) != len(actual.outputs):
        raise ValidationMismatch(
            f"the rewritten model returns {len(actual.outputs)} tensors, not {len(expected.outputs)}."
        )
    for number, (a, b) in enumerate(zip(expected.outputs, actual.outputs, strict=True)):
        if relative_error(a, b) > TOLERANCES.get(a.dtype, 1e-5):
            raise ValidationMismatch(
                f"output {number} of the rewritten model differs from the original's by {relative_error(a, b):.1e} "
                f"(relative); {_first_difference(expected, actual)}."
            )
    largest = max((float(g.float().norm()) for g in expected.gradients.values() if g is not None), default=0.0)
    for name, gradient in expected.gradients.items():
        other = actual.gradients[name]
        if gradient is None and other is None:
            continue
        if gradient is None or other is None:
            raise ValidationMismatch(f"parameter '{name}' has a gradient in one of the two models only.")
        tolerance = _GRADIENT_SLACK * TOLERANCES.get(gradient.dtype, 1e-5)
        # a gradient that is zero in exact arithmetic (a key bias, say) is rounding noise in both
        difference = float((gradient.float() - other.float()).norm())
        if difference > tolerance * max(float(gradient.float().norm()), 1e-3 * largest):
            error = relative_error(gradient, other)
            raise ValidationMismatch(
                f"the gradient of '{name}' differs from the original's by {error:.1e} (relative); "
                f"{_first_difference(expected, actual)}."
            )


def _first_difference(expected: _Run, actual: _Run) -> str:
    known = dict[str, list[Tensor]]()
    for path, value in expected.blocks:
        known.setdefault(path, []).append(value)
    for path, value in actual.blocks:
        calls = known.get(path)
        if not calls:
            continue
        reference = calls.pop(0)
        if reference.shape != value.shape or relative_error(reference, value) > TOLERANCES.get(value.dtype, 1e-5):
            return f"the first block that differs is '{path}'"
    return "no single block differs by that much"


@contextlib.contextmanager
def _recorded(model: nn.Module, blocks: list[tuple[str, Tensor]]) -> Iterator[None]:
    """Record what modules with children return, streams as what the next block would read."""
    handles = []

    def record(path: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) and output else output
            if isinstance(value, Stream):
                value = value.value()
            if isinstance(value, Tensor) and value.is_floating_point():
                blocks.append((path, value.detach()))

        return hook

    for path, module in model.named_modules():
        if len(module._modules):
            handles.append(module.register_forward_hook(record(path)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def relative_error(reference: Tensor, other: Tensor) -> float:
    """Norm of the difference over the norm of ``reference``, in float32 or better."""
    precision = torch.promote_types(reference.dtype, torch.float32)
    a, b = reference.to(precision), other.to(precision)
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return float("inf")
    a, b = a[finite], b[finite]
    return float((a - b).norm() / a.norm().clamp_min(torch.finfo(precision).tiny))


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a model's output, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_in(item)]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors_in(item)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [t for field in dataclasses.fields(value) for t in tensors_in(getattr(value, field.name))]
    return []
