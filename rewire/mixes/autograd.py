"""Decides when hand-written gradients are used, and when autograd."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rewire.kernels import switch
from rewire.kernels.cpu import plain
from rewire.kernels.kernel import noting
from rewire.torch_internals import in_traced_transform, in_transform, is_batch_of_gradients, is_followed

_THREAD = threading.local()
#: Number of elements up to which copying tensors costs less than another call.
_FEW = plain.WORTHWHILE // 8


def left_to_autograd(x: Tensor, sources: float, static: bool = False) -> bool:
    """Whether mixes of tensors like ``x`` are plain torch operations, which autograd or torch.compile can take.

    Args:
        x: a tensor.
        sources: number of tensors in a mix; for several mixes, on average.
        static: whether the weights are the same for all tokens: then a CPU has operators for them, too.
    """
    if torch.compiler.is_compiling():
        return not (switch.opaque(x) if static else switch.uses_kernels(x)) or under_transforms()
    return (
        type(x) not in (Tensor, nn.Parameter)  # tensor subclasses
        or not (x.is_cuda or x.is_cpu or noting())
        or x.is_complex()
        or (sources * x.numel() < plain.WORTHWHILE and not switch.uses_kernels(x))  # first the cheap test
        or _transforms()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
    )


def by_product(x: Tensor) -> bool:
    """Whether to compute a sum of few tensors like ``x`` by copying them into one, and one matrix product.

    For few elements, as in decoding, the cost of an operation is its call. With gradients, the copies would be kept.
    """
    if torch.is_grad_enabled() or not exact_products(x) or x.numel() > _FEW or switch.INTERPRETED:
        return False
    return not (noting() or getattr(_THREAD, "plainly", False) or is_followed() or torch.is_autocast_enabled("cpu"))


def exact_products(x: Tensor) -> bool:
    """Whether a matrix product of tensors like ``x`` is as exact as sums are, and faster."""
    if torch.compiler.is_dynamo_compiling() or not x.is_cpu or type(x) not in (Tensor, nn.Parameter):
        return False
    return x.dtype == torch.float64 or (x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "medium")


def under_transforms() -> bool:
    """Whether transforms of torch.func or forward-mode AD are active, which our autograd functions do not support."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_dynamo_compiling() and in_traced_transform()
    return _transforms()


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """A context in which all mixes of this thread are plain torch operations, as under transforms."""
    before, _THREAD.plainly = getattr(_THREAD, "plainly", False), True
    try:
        yield
    finally:
        _THREAD.plainly = before


def _transforms() -> bool:
    return getattr(_THREAD, "plainly", False) or in_transform()


def by_torch(grad: Tensor | None) -> bool:
    """Whether a backward pass that got this gradient has to use plain torch operations.

    This is so if it is itself differentiated (``create_graph=True``, forward-mode AD), or is a batch of several passes
    (``is_grads_batched=True``, ``torch.func.vmap``).
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.is_grad_enabled()
    return _transforms() or (grad is not None and is_batch_of_gradients(grad))


def gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> list[Any]:
    """Gradients of ``function(*inputs)`` by torch's operations; None for inputs that need none.

    The inputs are treated as independent, even if one was computed from another.
    """
    if not any(x.requires_grad for x in inputs):
        return [None] * len(inputs)
    differentiated = torch.is_grad_enabled()
    with torch.enable_grad():
        given = [x.view_as(x) if x.requires_grad else x for x in inputs]
        result = function(*given)
    wanted = [x for x in given if x.requires_grad]
    found = iter(torch.autograd.grad(result, wanted, grad, create_graph=differentiated))
    return [next(found) if x.requires_grad else None for x in given]


def passes(x: Tensor, result: Tensor) -> bool:
    """Whether gradients of ``result``, which a few operations made from ``x``, may reach ``x``.

    This searches autograd's graph. Under torch.compile and transforms, which have their own, it only checks whether
    ``result`` requires gradients.
    """
    if not x.requires_grad or not torch.is_grad_enabled() or result is x:
        return True
    if not result.requires_grad or torch.compiler.is_compiling() or under_transforms():
        return result.requires_grad
    nodes = dict.fromkeys([result.grad_fn] if result.grad_fn is not None else [])
    for node in (todo := [*nodes]):
        if node is x.grad_fn or getattr(node, "variable", None) is x:
            return True
        new = [following for following, _ in node.next_functions if following is not None and following not in nodes]
        nodes |= dict.fromkeys(new)
        todo += new
    return False
