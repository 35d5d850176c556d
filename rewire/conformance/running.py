"""Run an implementation on a case, and record the reads of all units, the output and all gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rewire.conformance.cases import Case
from rewire.conformance.schemes import Options, Reference

#: Called with x [.., D], the weights by name, and the branches; returns the output [.., D].
Implementation = Callable[[Tensor, Mapping[str, Tensor], Sequence["Branch"]], Tensor]
WAYS = ("queries", "keys", "values", "residual")


@dataclasses.dataclass(eq=False)
class Branch:
    """The branch of unit t: ``tanh(x inner) outer``, or the same with four inputs.

    Attributes:
        attention: whether it begins with an attention, and takes q, k, v and the residual's read.
        inner, outer: its weights, float64.
        seen: the arguments of its calls.
        stored: rounds its inputs and outputs, if they have more digits than they are stored with.
    """

    attention: bool
    inner: Tensor
    outer: Tensor
    seen: list[tuple[Tensor, ...]]
    stored: Callable[[Tensor], Tensor] = lambda value: value

    def __call__(self, *inputs: Tensor) -> Tensor:
        if len(inputs) != len(self.inner):
            names = ", ".join(WAYS) if self.attention else "what it reads"
            raise TypeError(f"this branch takes {names}, and was called with {len(inputs)} tensors.")
        rounded = [self.stored(x) for x in inputs]
        self.seen.append(tuple(rounded))
        hidden = torch.tanh(torch.stack([x.double() @ w for x, w in zip(rounded, self.inner, strict=True)]).sum(0))
        return self.stored((hidden @ self.outer).to(inputs[0].dtype))


class Rounding:
    """Rounds values to a precision and returns them in their own dtype; each seed does it in another way.

    Args:
        dtype: the precision.
        seed: 0 rounds to the nearest; others move values by up to half a digit before.
    """

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self.dtype, self.seed = dtype, seed
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, value: Tensor) -> Tensor:
        moved = value
        if self.seed:
            noise = torch.rand(value.shape, generator=self.generator, dtype=torch.float64) - 0.5
            moved = value * (1 + torch.finfo(self.dtype).eps * noise).to(value.dtype)
        return moved.to(self.dtype).to(value.dtype)


def run(
    implementation: Implementation,
    case: Case,
    dtype: torch.dtype,
    device: str = "cpu",
    rounded: Rounding | None = None,
) -> dict[str, Tensor]:
    """The implementation's values, float64 on the CPU, in the order in which they are computed.

    By name: ``reads.t``, the read of unit t, [N, D]; or ``reads.t.queries`` and so on; if the unit is called again,
    ``again.reads.t``; ``output`` [N, D]; ``gradient.x`` and ``gradient.<weight>``.

    Args:
        implementation: what to run.
        case: what to run it on.
        dtype: of hidden states. Weights are float32, or float64 if these are.
        device: where to run it.
        rounded: for references: everything is computed in float32, and rounded only where it is stored.
    """
    held = torch.float32 if rounded else dtype
    x = case.x.to(device, dtype).to(held).requires_grad_()
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    weights = {name: value.to(device, precise).requires_grad_() for name, value in case.weights.items()}
    seen: list[list[tuple[Tensor, ...]]] = [[] for _ in case.inner]
    branches = [
        Branch(t in case.attention, case.inner[t - 1].to(device), case.outer[t - 1].to(device), seen[t - 1])
        for t in range(1, case.depth + 1)
    ]
    if rounded:
        branches = [dataclasses.replace(branch, stored=rounded) for branch in branches]
    output = implementation(x, weights, branches)
    gradients = torch.autograd.grad(
        output, [x, *weights.values()], case.upstream.to(device, output.dtype).view_as(output), allow_unused=True
    )
    found: dict[str, Tensor] = {}
    for t, calls in enumerate(seen, start=1):
        for number, call in enumerate(calls):
            names = [f".{way}" for way in WAYS] if len(call) > 1 else [""]
            found |= {"again." * number + f"reads.{t}{name}": x for name, x in zip(names, call, strict=True)}
    found["output"] = output
    flat = {name: value.reshape(-1, x.shape[-1]) for name, value in found.items()}
    flat |= {
        f"gradient.{name}": gradient
        for name, gradient in zip(["x", *weights], gradients, strict=True)
        if gradient is not None
    }
    return {name: value.detach().double().cpu() for name, value in flat.items()}


def of_reference(
    reference: Reference, options: Options, kept: Callable[[Tensor], Tensor] = lambda state: state
) -> Implementation:
    """The reference as an implementation."""

    def implementation(x: Tensor, weights: Mapping[str, Tensor], branches: Sequence[Branch]) -> Tensor:
        return reference.forward(x.flatten(0, -2), weights, branches, kept, **options).view(x.shape)

    return implementation


def of_module(
    module: torch.nn.Module, names: Mapping[str, str | Callable[[Mapping[str, Tensor]], Tensor]]
) -> Implementation:
    """An implementation that is a module, called as ``module(x, branches)``.

    Args:
        module: its parameters are replaced by the weights of each case.
        names: for each of its parameters, by path, the weight that it is, or a function of all weights that makes it.

    Example:
        >>> class Plain(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.scale = torch.nn.Parameter(torch.zeros(1))
        ...     def forward(self, x, branches):
        ...         for t, branch in enumerate(branches):
        ...             x = x + self.scale[t] * branch(x)
        ...         return x
        >>> rezero = rewire.conformance.of_module(Plain(), {"scale": "alpha"})
        >>> rewire.conformance.check("rezero", rezero).agrees
        True
    """

    def implementation(x: Tensor, weights: Mapping[str, Tensor], branches: Sequence[Branch]) -> Tensor:
        given = {path: weights[make] if isinstance(make, str) else make(weights) for path, make in names.items()}
        return torch.func.functional_call(module, given, (x, branches))

    return implementation
