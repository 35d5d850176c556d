"""One forward and backward pass of a copy of a model, for `validate`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rewire.attributes import CONNECTIONS
from rewire.copies import Inputs, is_written, own_inputs, private, seeded
from rewire.passes.validating.tensors import Gradient, gradient_error, real, sketch, tensors_in, tolerance
from rewire.runtime.connection import Connection, connections
from rewire.runtime.stream import Stream
from rewire.torch_internals import children_of, pytree

#: Above this number of parameters, only constant ones are perturbed: a second set would not fit everywhere.
LARGE = 200_000_000

#: Distance between tied values in elements: 256 bytes, to keep them aligned.
_STEP = 64

#: Error of effective connection weights: they are float32 in models of any dtype, and a softmax over them cancels.
_CONNECTIONS = 2e-4


@dataclasses.dataclass(frozen=True)
class Setting:
    """How both models are run.

    Attributes:
        name: in words.
        training: in training mode.
        gradients: whether autograd records them; if not, outputs alone are compared.
        perturbed: with weights that are not the model's own.
        moved: with connection weights that have moved from their start; the original is wired accordingly (`wired`).
        strided: with inputs that are not contiguous, if the original accepts them.
        rounding: outputs may differ by rounding. Then gradients are not compared, as a ReLU may amplify it.
        within: lower bound of the tolerance for outputs, for models with less precise hidden states.
        dtype: of parameters, buffers and inputs; None: their own.
    """

    name: str
    training: bool = False
    gradients: bool = True
    perturbed: bool = False
    moved: bool = False
    strided: bool = False
    rounding: bool = False
    within: float = 0.0
    dtype: torch.dtype | None = None


@dataclasses.dataclass
class Run:
    """Outputs of a model, and sketches of its gradients (`tensors.sketch`): whole gradients would fill a second model.

    Attributes:
        outputs: floating-point and complex tensors that it returned.
        expected: gradients to compare with. Each is removed when its counterpart arrives. None: gradients are kept.
        gradients: the kept gradients, by parameter.
        wrong: differences from the expected gradients, in words.
        compared: number of gradients that were compared.
        within: see `Setting`.
    """

    outputs: list[Tensor] = dataclasses.field(default_factory=list)
    expected: dict[str, Gradient] | None = None
    gradients: dict[str, Gradient] = dataclasses.field(default_factory=dict)
    wrong: list[str] = dataclasses.field(default_factory=list)
    compared: int = 0
    within: float = 0.0

    def __post_init__(self) -> None:
        self._largest = max((float(g.sketch.norm()) for g in (self.expected or {}).values()), default=0.0)

    def arrived(self, name: str, gradient: Tensor) -> None:
        """Keep a parameter's gradient, or compare it."""
        if self.expected is None:
            self.gradients[name] = Gradient(sketch(gradient), gradient.dtype)
        elif name in self.expected:
            self.compared += 1
            within = max(self.within, _CONNECTIONS) if CONNECTIONS in name else self.within
            error = gradient_error(self.expected.pop(name), sketch(gradient), self._largest, within)
            if error:
                self.wrong.append(f"the gradient of '{name}' differs from the original's by {error:.1e} (relative)")
        elif CONNECTIONS not in name and float(gradient.float().norm()) > 0:
            self.wrong.append(f"parameter '{name}' has a gradient in the rewritten model only")


def run(
    setting: Setting,
    model: nn.Module,
    inputs: Inputs,
    values: dict[str, Tensor],
    expected: dict[str, Gradient] | None = None,
) -> Run:
    """Run a copy of ``model`` forward and backward.

    Args:
        setting, model, inputs: model and inputs are not changed.
        values: values for the parameters of these names; others keep their own.
        expected: gradients to compare with; see `Run`.
    """
    result = Run(expected=expected, within=setting.within)
    with (
        _copied(setting, model, values) as bench,
        _gradients_to(result, bench) as trained,
        torch.set_grad_enabled(setting.gradients),
    ):
        with seeded(0, bench):
            args, kwargs = _given(setting, inputs)
            outputs = [t for t in tensors_in(bench(*args, **kwargs)) if t.is_floating_point() or t.is_complex()]
            differentiable = [t for t in outputs if t.requires_grad and t.numel()]
            if differentiable and trained:
                torch.default_generator.manual_seed(1)
                # random weights: a plain sum would hide what a final norm cancels
                loss = sum((_weights(t) * real(t)).sum() / t.numel() for t in differentiable)
                loss.backward()  # type: ignore[union-attr]
        result.outputs = [t.detach() for t in outputs]
    result.wrong += [f"parameter '{name}' has a gradient in the original only" for name in expected or ()]
    return result


@contextmanager
def _gradients_to(result: Run, bench: nn.Module) -> Iterator[bool]:
    """Pass gradients to ``result`` as they arrive; yield whether any parameter gets one."""

    def hook(name: str) -> Any:
        def arrived(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:  # an autograd function may return None
                result.arrived(name, gradient)

        return arrived

    handles = [
        parameter.register_post_accumulate_grad_hook(hook(name))
        for name, parameter in bench.named_parameters()
        if parameter.requires_grad and not parameter.is_meta
    ]
    try:
        yield bool(handles)
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _copied(setting: Setting, model: nn.Module, values: dict[str, Tensor]) -> Iterator[nn.Module]:
    """A copy of the model with these values (copied only if it writes to them), in the setting's mode and precision."""
    bench = private(model).train(setting.training)
    parameters, given = dict(bench.named_parameters()), dict(model.named_parameters())
    for name, value in values.items():
        parameters[name].data = value.clone() if is_written(given[name]) else value
    if setting.dtype is not None:
        bench = bench.double() if setting.dtype == torch.float64 else bench.float()
    try:
        yield bench
    finally:
        for name in values:  # modules form reference cycles, which would keep the values alive
            parameters[name].data = torch.empty(0, dtype=parameters[name].dtype, device=parameters[name].device)


def _given(setting: Setting, inputs: Inputs) -> Inputs:
    """A copy of the inputs in the setting's precision, or in their own if that is higher."""

    def raised(value: object) -> Any:
        if setting.dtype is None or not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.detach().to(torch.promote_types(value.dtype, setting.dtype)).requires_grad_(value.requires_grad)

    args, kwargs = pytree.tree_map(raised, own_inputs(inputs))
    return args, kwargs


def _weights(output: Tensor) -> Tensor:
    """Random weights of the shape of ``output``. The values of `rand_like` would depend on strides, too."""
    shape = (*output.shape, 2) if output.is_complex() else output.shape
    return torch.rand(shape).to(output.device)


def block_outputs(
    setting: Setting, model: nn.Module, inputs: Inputs, values: dict[str, Tensor]
) -> list[tuple[str, Tensor]]:
    """Outputs of all modules with children, in order. A stream is shown as the value that the next block would read."""
    blocks: list[tuple[str, Tensor]] = []

    def record(path: str) -> Any:
        def hook(_module: nn.Module, _args: object, output: object) -> None:
            value = output[0] if isinstance(output, tuple) and output else output
            if isinstance(value, Stream):
                value = value.value()
            if isinstance(value, Tensor) and value.is_floating_point():
                blocks.append((path, value.detach().clone()))

        return hook

    with _copied(setting, model, values) as bench:
        for path, module in bench.named_modules():
            if children_of(module):
                module.register_forward_hook(record(path))
        with torch.set_grad_enabled(setting.gradients), seeded(0, bench):
            args, kwargs = _given(setting, inputs)
            bench(*args, **kwargs)
    return blocks


def coarsest(setting: Setting, model: nn.Module, inputs: Inputs, values: dict[str, Tensor]) -> float:
    """The tolerance for the least precise of the model's matrices and hidden states."""
    states = [value for _, value in block_outputs(setting, model, inputs, values)]
    matrices = [p for p in model.parameters() if p.dim() > 1 and p.is_floating_point()]
    return max(map(tolerance, (*states, *matrices)), default=0.0)


def values_for(setting: Setting, original: nn.Module, rewired: nn.Module) -> dict[str, Tensor]:
    """The parameter values that a setting changes, stored once for both models."""
    own = {name: p.detach() for name, p in original.named_parameters() if p.is_floating_point() and not p.is_meta}
    own = {name: p for name, p in own.items() if type(p) is Tensor and p.numel()}
    values, generator = dict[str, Tensor](), torch.Generator().manual_seed(2)
    large = sum(p.numel() for p in own.values()) > LARGE
    for name, p in own.items():
        if setting.perturbed and (not large or bool((p == p.flatten()[0]).all())):
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float32).mul_(0.02).to(p)
            values[name] = p.to(setting.dtype or p.dtype) + noise  # then no branch is zero
    if setting.dtype is not None:
        rest = {name: p for name, p in own.items() if name not in values}
        tied = large and setting.moved
        values |= _tied(rest, setting.dtype) if tied else {n: p.to(setting.dtype) for n, p in rest.items()}
    return values | (movement(rewired) if setting.moved else {})


def _tied(parameters: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Values in ``dtype`` that share memory: parameters alike get the values of the first of them, shifted."""
    kinds: dict[Any, list[str]] = {}
    for name, p in parameters.items():
        kinds.setdefault((re.sub(r"\d+", "", name), p.shape, p.device), []).append(name)
    values: dict[str, Tensor] = {}
    for (_, shape, _), names in kinds.items():
        first = parameters[names[0]].to(dtype).flatten()  # [count]
        reach, count = _STEP * (len(names) - 1), first.numel()
        ring = torch.cat([first, *[first] * (reach // count), first[: reach % count]])
        values |= {name: ring[_STEP * n :][:count].view(shape) for n, name in enumerate(names)}
    return values


def movement(rewired: nn.Module) -> dict[str, Tensor]:
    """Connection weights that have moved from their start. No effective weight moves by more than a half."""
    paths = {module: path for path, module in rewired.named_modules()}
    moved: dict[str, Tensor] = {}
    for connection in connections(rewired).values():
        generator = torch.Generator().manual_seed(3)
        drawn = {
            name: torch.randn(p.shape, generator=generator, dtype=torch.float32)
            for name, p in connection.named_parameters()
        }
        start, scale = _matrix(connection, drawn, 0.0), 0.3
        while scale > 1e-6 and float((_matrix(connection, drawn, scale) - start).abs().max()) > 0.5:
            scale /= 2
        for name, p in connection.named_parameters():
            moved[f"{paths[connection]}.{name}"] = p.detach() + (scale * drawn[name]).to(p)
    return moved


def _matrix(connection: Connection, drawn: dict[str, Tensor], scale: float) -> Tensor:
    """The effective weights, with learned weights moved by ``scale`` times ``drawn``."""
    topology, dims = connection.layout.topology, connection.layout.dims
    stored = {name: p.detach().cpu() + scale * drawn[name] for name, p in connection.named_parameters()}
    learned = {name: value * connection.stored_in[name] for name, value in stored.items()}
    constants = {name: buffer.cpu() for name, buffer in connection.named_buffers()}
    return topology.matrix(topology.weights({**learned, **constants}, dims), dims)


def strided(inputs: Inputs) -> Inputs:
    """The inputs with gaps in memory."""

    def spread(value: object) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or type(value) is not Tensor:
            return value
        wide = value.new_zeros((*value.shape[:-1], 2 * value.shape[-1]))
        wide[..., ::2] = value.detach()
        return wide[..., ::2].requires_grad_(value.requires_grad)

    args, kwargs = pytree.tree_map(spread, inputs)
    return args, kwargs
