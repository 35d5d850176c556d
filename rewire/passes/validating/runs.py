"""One forward and backward pass of a copy of a model, as `validate` compares them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rewire.attributes import CONNECTIONS
from rewire.copies import Inputs, own_inputs, private, seeded
from rewire.passes.validating.tensors import gradient_error, real, tensors_in, tolerance
from rewire.runtime.connection import Connection, connections
from rewire.runtime.stream import Stream
from rewire.torch_internals import children_of, pytree

#: Models with more parameters have only those perturbed that are constant: a second set would not fit everywhere.
_ALL_PERTURBED = 200_000_000

#: How far off effective connection weights may be: float32, whatever the model is in, and a softmax over them cancels.
_CONNECTIONS = 2e-4


@dataclasses.dataclass(frozen=True)
class Setting:
    """How both models are run.

    Attributes:
        name: in words.
        training: in training mode.
        perturbed: with weights that are not the model's own.
        moved: with connection weights that are not those of the start; the original is wired as they say (`wired`).
        strided: with inputs that are not contiguous, if the original takes such.
        rounding: outputs may differ by rounding; then gradients may differ by what a ReLU makes of that, and are not
            compared.
        within: the relative error that outputs may have at least, where something on the way to them is less precise.
    """

    name: str
    training: bool = False
    perturbed: bool = False
    moved: bool = False
    strided: bool = False
    rounding: bool = False
    within: float = 0.0


@dataclasses.dataclass
class Run:
    """Outputs of a model, and its gradients.

    Attributes:
        outputs: floating-point and complex tensors that it returned.
        expected: gradients that those of this run are compared with as they arrive, and leave as they do; None: they
            are kept.
        gradients: those that were kept, by parameter.
        wrong: in words, what differs from those expected.
        compared: number of gradients that were.
        within: see `Setting`.
    """

    outputs: list[Tensor] = dataclasses.field(default_factory=list)
    expected: dict[str, Tensor] | None = None
    gradients: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    wrong: list[str] = dataclasses.field(default_factory=list)
    compared: int = 0
    within: float = 0.0

    def __post_init__(self) -> None:
        self._largest = max((float(g.float().norm()) for g in (self.expected or {}).values()), default=0.0)

    def arrived(self, name: str, gradient: Tensor) -> None:
        """Keep a parameter's gradient, or compare it."""
        if self.expected is None:
            self.gradients[name] = gradient.detach()
        elif name in self.expected:
            self.compared += 1
            within = max(self.within, _CONNECTIONS) if CONNECTIONS in name else self.within
            error = gradient_error(self.expected.pop(name), gradient, self._largest, within)
            if error:
                self.wrong.append(f"the gradient of '{name}' differs from the original's by {error:.1e} (relative)")
        elif CONNECTIONS not in name and float(gradient.float().norm()) > 0:
            self.wrong.append(f"parameter '{name}' has a gradient in the rewritten model only")


def run(
    setting: Setting,
    model: nn.Module,
    inputs: Inputs,
    noise: dict[str, Tensor],
    expected: dict[str, Tensor] | None = None,
) -> Run:
    """One forward and backward pass of a copy of ``model``.

    Args:
        setting: how.
        model: it is not changed.
        inputs: they are not changed.
        noise: added to the parameters of these names.
        expected: gradients to compare with; see `Run`.
    """
    bench = _copy(setting, model, noise)
    result = Run(expected=expected, within=setting.within)
    with _gradients_to(result, bench) as trained, torch.enable_grad(), seeded(0, bench):
        args, kwargs = own_inputs(inputs)
        outputs = [t for t in tensors_in(bench(*args, **kwargs)) if t.is_floating_point() or t.is_complex()]
        differentiable = [t for t in outputs if t.requires_grad and t.numel()]
        if differentiable and trained:
            torch.default_generator.manual_seed(1)
            # weights that differ per element: a plain sum would hide what a final norm cancels
            loss = sum((_weights(t) * real(t)).sum() / t.numel() for t in differentiable)
            loss.backward()  # type: ignore[union-attr]
    result.outputs = [t.detach() for t in outputs]
    result.wrong += [f"parameter '{name}' has a gradient in the original only" for name in expected or ()]
    return result


@contextmanager
def _gradients_to(result: Run, bench: nn.Module) -> Iterator[bool]:
    """Hand gradients to ``result`` as they arrive; whether there are parameters that get some."""

    def hook(name: str) -> Any:
        def arrived(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:  # an autograd function may give none
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


def _copy(setting: Setting, model: nn.Module, noise: dict[str, Tensor]) -> nn.Module:
    bench = private(model).train(setting.training)
    parameters = dict(bench.named_parameters())
    for name, difference in noise.items():
        parameters[name].data = parameters[name].data + difference.to(parameters[name])  # connection weights: float32
    return bench


def _weights(output: Tensor) -> Tensor:
    """Random weights of the shape of ``output``. Not by `rand_like`, whose values depend on strides, too."""
    shape = (*output.shape, 2) if output.is_complex() else output.shape
    return torch.rand(shape).to(output.device)


def block_outputs(
    setting: Setting, model: nn.Module, inputs: Inputs, noise: dict[str, Tensor]
) -> list[tuple[str, Tensor]]:
    """What modules with children return, in order; streams as what the next block would read."""
    bench = _copy(setting, model, noise)
    blocks: list[tuple[str, Tensor]] = []

    def record(path: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) and output else output
            if isinstance(value, Stream):
                value = value.value()
            if isinstance(value, Tensor) and value.is_floating_point():
                blocks.append((path, value.detach().clone()))

        return hook

    for path, module in bench.named_modules():
        if children_of(module):
            module.register_forward_hook(record(path))
    with torch.enable_grad(), seeded(0, bench):
        args, kwargs = own_inputs(inputs)
        bench(*args, **kwargs)
    return blocks


def coarsest(setting: Setting, model: nn.Module, inputs: Inputs, noise: dict[str, Tensor]) -> float:
    """The relative error that the least precise of its matrices and hidden states may have."""
    states = [value for _, value in block_outputs(setting, model, inputs, noise)]
    matrices = [p for p in model.parameters() if p.dim() > 1 and p.is_floating_point()]
    return max(map(tolerance, (*states, *matrices)), default=0.0)


def noise_for(model: nn.Module) -> dict[str, Tensor]:
    """What to add to each parameter, so that no branch is zero."""
    generator = torch.Generator().manual_seed(2)
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.is_floating_point() and not p.is_meta}
    if sum(p.numel() for p in parameters.values()) > _ALL_PERTURBED:
        parameters = {name: p for name, p in parameters.items() if p.numel() and bool((p == p.flatten()[0]).all())}
    return {
        name: (0.02 * torch.randn(p.shape, generator=generator)).to(p)
        for name, p in parameters.items()
        if type(p) is Tensor and p.numel()
    }


def movement(rewired: nn.Module) -> dict[str, Tensor]:
    """What to add to each connection weight, so that they mix: it changes no effective weight by more than a half."""
    paths = {module: path for path, module in rewired.named_modules()}
    moved: dict[str, Tensor] = {}
    for connection in connections(rewired).values():
        generator = torch.Generator().manual_seed(3)
        drawn = {name: torch.randn(p.shape, generator=generator) for name, p in connection.named_parameters()}
        start, scale = _matrix(connection, drawn, 0.0), 0.3
        while scale > 1e-6 and float((_matrix(connection, drawn, scale) - start).abs().max()) > 0.5:
            scale /= 2
        moved |= {f"{paths[connection]}.{name}": scale * value for name, value in drawn.items()}
    return moved


def _matrix(connection: Connection, drawn: dict[str, Tensor], scale: float) -> Tensor:
    """The effective weights, with learned ones that were moved."""
    topology, dims = connection.layout.topology, connection.layout.dims
    learned = {name: p.detach().cpu() + scale * drawn[name] for name, p in connection.named_parameters()}
    constants = {name: buffer.cpu() for name, buffer in connection.named_buffers()}
    return topology.matrix(topology.weights({**learned, **constants}, dims), dims)


def strided(inputs: Inputs) -> Inputs:
    """The inputs in memory with gaps."""

    def spread(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or type(value) is not Tensor:
            return value
        wide = value.new_zeros((*value.shape[:-1], 2 * value.shape[-1]))
        wide[..., ::2] = value.detach()
        return wide[..., ::2].requires_grad_(value.requires_grad)

    args, kwargs = pytree.tree_map(spread, inputs)
    return args, kwargs
