"""rewire.precompile: the kernels of a rewired model are compiled before its first step, in parallel."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

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
    batch: Any = None,
    *,
    target: str | None = None,
    jobs: int | None = None,
    compiled: bool = False,
) -> int:
    """Compile the kernels that a step of a rewired model starts, so that its first step on a GPU compiles none.

    A copy of the model runs once, and its kernels are noted, not started: what it computes is meaningless. Forward and
    backward, or under ``torch.no_grad()`` forward alone; in the mode, the precision and the region of
    ``torch.autocast`` in which it is called. Triton keeps what it compiles in its cache on disk, where processes find
    it that have the same versions of rewire, PyTorch and Triton.

    Kernels depend on widths, dtypes and strides, and on the number of tokens as far as few are summed by fewer
    programs: give a batch of the size that is to run. On the meta device it costs nothing, if the model's forward asks
    for no values: ``copy.deepcopy(model).to("meta")``.

    Args:
        model: a rewired model, on any device: the meta device, too. Not one that is sharded, wrapped or compiled.
        batch: what the model is called with: a tensor, a tuple of args, a dict of kwargs, or a pair of both; on any
            device for a model on the meta device. None: inputs that the pattern registry makes.
        target: the GPU, as ``"sm_90"`` (H100) or ``"gfx942"``; None: the one that is here.
        jobs: how many kernels are compiled at once; None: one for each processor.
        compiled: whether the whole model is to run under ``torch.compile``, where norms are not fused with reads, for
            one: its graphs are traced, which takes as long as it does there.

    Returns:
        How many kernels there are, those that were in the cache included.

    Raises:
        BadExampleInputs: the model does not run on the batch.
        WrappedModel: it is wrapped or compiled.
        RewireError: it is not rewired, or starts no kernels; there is no GPU, and no target.
        TypeError, ValueError: an argument is none.

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


def _launches(model: nn.Module, batch: Any, compiled: bool = False) -> list[Launch]:
    """Those of a step, of which nothing else counts."""
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
