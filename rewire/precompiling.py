"""`rewire.precompile`: compile the kernels of a rewired model in parallel, before its first step."""

from __future__ import annotations

import contextlib
import warnings

import torch
from torch import nn

from rewire.copies import own_inputs, private, seeded, uncompiled
from rewire.diagnostics.observing import called, inputs_of
from rewire.errors import BadExampleInputs, RewireError, check_positive, check_type
from rewire.kernels import ahead, switch
from rewire.kernels.kernel import Launch, noted
from rewire.passes.checks import check_unwrapped, on_meta
from rewire.passes.validating.tensors import tensors_in
from rewire.runtime.connection import connections


def precompile(
    model: nn.Module,
    batch: object = None,
    *,
    target: str | None = None,
    jobs: int | None = None,
    compiled: bool = False,
) -> int:
    """Compile the kernels that a step of a rewired model launches, so that its first step on a GPU compiles none.

    A copy of the model runs once: forward and backward, or forward alone under ``torch.no_grad()``, in its present
    mode and precision and under the present ``torch.autocast``. Kernel launches are recorded instead of executed, so
    the computed values are meaningless. Triton keeps compiled kernels in its cache on disk, for all processes with the
    same versions of rewire, PyTorch and Triton.

    Kernels depend on widths, dtypes and strides, and for small batches on the number of tokens: pass a batch of the
    size that will be used. On the meta device (``copy.deepcopy(model).to("meta")``) the run costs nothing, but the
    model's forward must not depend on values.

    Args:
        model: a rewired model, on any device, including meta; not sharded, wrapped or compiled.
        batch: arguments of the model: a tensor, a tuple of args, a dict of kwargs, or a pair of both; on any device if
            the model is on the meta device. None: inputs that the pattern registry makes.
        target: the GPU's architecture, such as ``"sm_90"`` (H100) or ``"gfx942"``; None: the current GPU's.
        jobs: how many kernels are compiled at once; None: one for each processor.
        compiled: whether the whole model will run under ``torch.compile``, which needs other kernels (norms are not
            fused with reads, for example). Tracing its graphs takes as long as ``torch.compile`` does.

    Returns:
        The number of kernels, including those that were already in the cache.

    Raises:
        BadExampleInputs: the model does not run on the batch.
        WrappedModel: the model is wrapped or compiled.
        RewireError: the model is not rewired or launches no kernels; or there is no GPU, and no target is given.
        TypeError, ValueError: an argument has a wrong type or value.

    Example:
        >>> empty = copy.deepcopy(rewired).to("meta")
        >>> rewire.precompile(empty, (x,), target="sm_90") > 0
        True
    """
    check_type("model", model, nn.Module)
    for option, value, kind in (("target", target, str), ("jobs", jobs, int), ("compiled", compiled, bool)):
        if value is not None:
            check_type(option, value, kind)
    check_positive("jobs", jobs, like=8, optional=True)
    check_unwrapped(model)
    name = type(model).__name__
    if not connections(model):
        raise RewireError(f"{name} is not rewired: it has no kernels.")
    if switch.INTERPRETED or not switch.ON:
        which = "TRITON_INTERPRET=1" if switch.ON else "REWIRE_KERNELS=off"
        raise RewireError(f"with {which} no kernels are compiled.")
    gpu, launches = ahead.gpu_named(target), _launches(model, batch, compiled)
    if not launches:
        raise RewireError(f"{name} starts no kernels: its trunks are plain, or its states float64.")
    return ahead.compiled(launches, gpu, jobs)


def _launches(model: nn.Module, batch: object, compiled: bool = False) -> list[Launch]:
    """The kernel launches of one step; its values do not matter."""
    meta = on_meta(model)
    if meta and any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise RewireError("the meta device has no autocast: call rewire.precompile with the model on a CPU or a GPU.")
    inputs, copy = own_inputs(inputs_of(model, batch), "meta" if meta else None), private(model)
    for parameter in copy.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_forget)
    if compiled:
        copy.compile(backend="aot_eager")
    how = contextlib.nullcontext() if compiled else uncompiled()
    with noted() as launches, seeded(0, copy), how, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            results = called(copy, inputs, 0)
        except BadExampleInputs as error:
            if not meta:
                raise
            where = "a forward that depends on values does not run on the meta device: give the model on a CPU or a GPU"
            raise BadExampleInputs(f"{error} ({where}).") from error
        found = [x for x in tensors_in(results) if x.requires_grad]
        if found:
            torch.autograd.backward(found, [torch.zeros_like(x) for x in found])
    return launches


def _forget(parameter: torch.Tensor) -> None:
    parameter.grad = None
