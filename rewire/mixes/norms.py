"""Norms that kernels can compute: which modules or operations are such norms, and why others are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from rewire.attributes import NORM
from rewire.kernels.sums.spec import NormKind
from rewire.torch_internals import has_global_hooks, has_hooks, parameters_of

#: The kind of a norm; "rms+1" scales by one plus its weight (Gemma's).
Kind = Literal["rms", "rms+1", "layer"]

#: The parameters that a norm may have.
_PARAMETERS = ("weight", "bias")


class Norm(NamedTuple):
    """A norm over the last dimension, as kernels take it.

    Attributes:
        kind: "rms" or "layer".
        weight: [D].
        bias: [D] or None.
        eps: epsilon of the norm.
    """

    kind: NormKind
    weight: Tensor
    bias: Tensor | None
    eps: float


@dataclasses.dataclass(frozen=True)
class Inlined:
    """A norm in a flat graph, which has only the norm's operations.

    Attributes:
        kind: kind of the norm.
        eps: epsilon of the norm.
        operations: a function of the value [..., D], the weight and, if there is one, the bias.
        weight: [D].
        bias: [D] or None.
    """

    kind: Kind
    eps: float
    operations: Callable[..., Tensor]
    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.operations(x, self.weight) if self.bias is None else self.operations(x, self.weight, self.bias)


def mark(module: nn.Module) -> str | None:
    """Determine whether ``module`` is a norm that kernels support, and record it.

    Returns:
        None if it is one, else the reason why not.
    """
    kind, why_not = recognise(module)
    if kind is not None:
        module.__dict__[NORM] = kind
    return why_not


def recognise(module: nn.Module) -> tuple[Kind, None] | tuple[None, str]:
    """Which norm ``module`` computes; or None, and the reason why it is not one that kernels support.

    Its forward, without hooks, is run on random rows and weights and compared with the formulas: the name of its class
    does not matter. Its parameters may be on the meta device.
    """
    parameters = dict(module.named_parameters(recurse=False))
    if set(parameters) - set(_PARAMETERS) or "weight" not in parameters or parameters["weight"].dim() != 1:
        return None, "its parameters are not those of an RMSNorm or LayerNorm with a weight"
    if any(True for _ in module.buffers()):
        return None, "it has buffers"
    if any(True for _ in module.children()):
        return None, "it calls other modules"
    eps = _eps(module)
    if eps is None:
        return None, "it does not say its eps"
    forward = _Forward(module)

    def run(rows: Tensor, *values: Tensor) -> object:
        given = {f"of.{name}": value for name, value in zip(_PARAMETERS, values, strict=False)}
        return torch.func.functional_call(forward, given, (rows,))

    return kind_of(run, parameters["weight"].shape[0], len(parameters), eps)


def kind_of(
    function: Callable[..., object], width: int, parameters: int, eps: float
) -> tuple[Kind, None] | tuple[None, str]:
    """Which norm a function computes; or None, and the reason why it is not one that kernels support.

    Args:
        function: a function of rows [..., D], a weight [D] and perhaps a bias [D]; it is run on random values.
        width: D.
        parameters: 2 if there is a bias, else 1.
        eps: epsilon of the norm.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    values = [torch.rand(width, generator=generator, device="cpu") + 0.5 for _ in range(parameters)]
    sizes = torch.tensor([[1.0], [10.0], [eps**0.5]], device="cpu")  # in the smallest rows, eps matters
    # Three dimensions: with two, norms over the second dimension would pass, too.
    rows = torch.randn(2, 3, width, generator=generator, device="cpu") * sizes
    try:
        with torch.no_grad():
            got = function(rows, *values)
    except Exception as error:  # a function that is not a norm may raise anything
        return None, f"it cannot be run on rows: {error}"
    weight, bias = values[0], values[1] if parameters > 1 else None
    kinds: tuple[Kind, ...] = ("rms", "rms+1", "layer") if bias is None else ("layer",)
    for kind in kinds:
        scale = weight + 1 if kind == "rms+1" else weight
        want = normed(rows, Norm("layer" if kind == "layer" else "rms", scale, bias, eps))
        if isinstance(got, Tensor) and got.shape == want.shape and torch.allclose(got, want, rtol=1e-5, atol=1e-5):
            return kind, None
    return None, "it computes neither an RMSNorm nor a LayerNorm"


class _Forward(nn.Module):
    """The forward of a module, without the module's hooks."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> object:
        return self.of.forward(x)


def copy_mark(source: nn.Module, target: nn.Module) -> None:
    """Copy the result of `mark` from ``source`` to its copy ``target``."""
    if NORM in source.__dict__:
        target.__dict__[NORM] = source.__dict__[NORM]


def unmark(module: nn.Module) -> None:
    """Remove the result of `mark`."""
    module.__dict__.pop(NORM, None)


def obstacle(module: nn.Module) -> str | None:
    """Why a kernel cannot compute a norm at present; None if it can."""
    if NORM not in module.__dict__:
        return "it was not found to be a norm when the model was rewired"
    return changed(module)


def changed(module: nn.Module) -> str | None:
    """The change to a norm since it was marked that keeps kernels from computing it, if any."""
    if has_hooks(module):
        return "it has hooks"
    if has_global_hooks():
        return "there are hooks on all modules"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    if any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__):
        return "it is an FSDP module of its own"
    if type(parameters_of(module).get("weight")) is not nn.Parameter:
        return "its weight is no plain parameter"
    return None


def norm_of(module: Callable[[Tensor], Tensor], x: Tensor) -> Norm | None:
    """The norm ``module`` for tensors like ``x`` [..., D], if a kernel can compute it.

    None if the weight has another dtype: then modules differ in the dtype of their result.
    """
    if isinstance(module, Inlined):
        kind = module.kind
    elif not isinstance(module, nn.Module) or obstacle(module) is not None:
        return None
    else:
        kind = module.__dict__[NORM]
    weight, bias, eps = module.weight, getattr(module, "bias", None), _eps(module)
    assert isinstance(weight, Tensor)
    assert eps is not None
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        return None
    if x.dtype == torch.float64 and getattr(module, "eps", eps) is None:
        return None
    # In float32, as Gemma does: 1 + w would lose most of a small w in bfloat16.
    return Norm("layer" if kind == "layer" else "rms", weight.float() + 1 if kind == "rms+1" else weight, bias, eps)


def normed(x: Tensor, norm: Norm) -> Tensor:
    """The norm of ``x`` [..., D] in plain torch, computed in float32 or better and returned in the dtype of ``x``."""
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    if norm.kind == "layer":
        precise = precise - precise.mean(-1, keepdim=True)
    result = precise * torch.rsqrt(precise.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
    return (result if norm.bias is None else result + norm.bias).to(x.dtype)


def _eps(module: nn.Module | Inlined) -> float | None:
    for name in ("eps", "variance_epsilon"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return torch.finfo(torch.float32).eps if type(module) is nn.RMSNorm else None  # its default, except for float64
