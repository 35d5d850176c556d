"""Other libraries' operators, called to do what a workload of the benchmarks does; imported when they run."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

Results = tuple[Tensor, ...]


def _same(*tensors: Tensor) -> Results:
    return tensors


def _as_given(results: Results) -> Results:
    return results


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One implementation to do the work of a workload.

    Attributes:
        run: the function that is timed, from inputs to results.
        into: turns the workload's inputs into those of ``run``, and ``back`` its results into the workload's;
            differentiable, not timed.
        compiled: whether ``run`` goes through torch.compile.
        note: what it computes differently.
        status: why it cannot run here; empty if it can.
        other_work: whether it does something else, to compare costs; its results are not checked.
        used: number of inputs, from the first, that the results depend on; None for all.
    """

    run: Callable[..., Results]
    into: Callable[..., Sequence[Tensor]] = _same
    back: Callable[[Results], Results] = _as_given
    compiled: bool = False
    note: str = ""
    status: str = ""
    other_work: bool = False
    used: int | None = None


def status(module: str, distribution: str, device: torch.device, needs_cuda: bool) -> str:
    """Why a peer cannot run on ``device``; empty if it can."""
    if importlib.util.find_spec(module) is None:
        return f"not installed: pip install {distribution}"
    return "not run: needs CUDA" if needs_cuda and device.type != "cuda" else ""


def attention_residuals(device: torch.device) -> dict[str, Implementation]:
    """Inputs: states [batch, length, D], then the query [D]. Its RMSNorm has no scale: here it is 1."""

    def liger(*given: Tensor) -> Results:
        functional = import_module("liger_kernel.transformers.functional")
        *xs, query, gain = given
        return (functional.liger_attn_res(torch.stack(xs), query, gain),)

    def fla(*given: Tensor) -> Results:
        attnres = import_module("fla.ops.attnres")
        *xs, query, gain = given
        return (attnres.fused_attnres(query, xs, gain),)

    def with_scale(*given: Tensor) -> Results:
        return (*given, torch.ones_like(given[-1]))

    def in_their_dtype(*given: Tensor) -> Results:
        return (*given[:-1], given[-1].to(given[0].dtype), torch.ones_like(given[-1], dtype=given[0].dtype))

    needs = "scale of the norm is learned, too"
    return {
        "liger-kernel": Implementation(
            liger,
            into=in_their_dtype,
            note=f"stacks the states; query and normed states in their dtype; {needs}",
            status=status("liger_kernel", "liger-kernel", device, needs_cuda=True),
        ),
        "fla-core": Implementation(
            fla, into=with_scale, note=needs, status=status("fla", "fla-core", device, needs_cuda=True)
        ),
    }


def hyper_connections(n: int, width: int, device: torch.device) -> dict[str, Implementation]:
    """Inputs: streams [batch, length, n, D], branch, static [n, 1 + n + 1], dynamic [D, 1 + n + 1], scale [2]."""
    names = (
        "static_alpha", "dynamic_alpha_fn", "dynamic_alpha_scale",
        "static_beta", "dynamic_beta_fn", "dynamic_beta_scale", "norm.gamma",
    )  # fmt: skip

    def run(streams: Tensor, branch: Tensor, *parameters: Tensor) -> Results:
        given = dict(zip(names, parameters, strict=True))
        read, write = torch.func.functional_call(_hyper_connections(n, width, device), given, (streams,))
        return read, write(branch)

    def into(streams: Tensor, branch: Tensor, static: Tensor, dynamic: Tensor, scale: Tensor) -> Results:
        gamma = static.new_zeros(width)
        parameters = (static[:, :-1], dynamic[:, :-1], scale[0], static[:, -1], dynamic[:, -1], scale[1], gamma)
        return (streams.movedim(-2, 1).flatten(0, 1), branch, *(p.to(streams.dtype) for p in parameters))

    def back(results: Results) -> Results:
        read, streams = results
        return read, streams.unflatten(0, (-1, n)).movedim(1, -2)

    note = "all in the states' dtype; its norm has a scale"
    missing = status("hyper_connections", "hyper-connections", device, needs_cuda=False)
    implementation = Implementation(run, into, back, note=note, status=missing)
    return {
        "hyper-connections": implementation,
        "hyper-connections, compiled": dataclasses.replace(implementation, compiled=True),
    }


_modules: dict[Any, torch.nn.Module] = {}


def _hyper_connections(n: int, width: int, device: torch.device) -> torch.nn.Module:
    """Made once: its own parameters are never used."""
    key = (n, width, device)
    if key not in _modules:
        _modules[key] = import_module("hyper_connections").HyperConnections(n, dim=width, layer_index=0).to(device)
    return _modules[key]


def manifold_hyper_connections(n: int, iterations: int, device: torch.device) -> dict[str, Implementation]:
    """Inputs: streams [batch, length, n, D], branch, bias [K], phi [n D, K], alpha [3], with K = n + n + n n."""

    def run(streams: Tensor, branch: Tensor, bias: Tensor, phi: Tensor, *alphas: Tensor) -> Results:
        liger = import_module("liger_kernel.transformers.functional")
        pre, post, carry = liger.liger_mhc_coeffs(
            streams, phi, bias, *alphas, allow_fp32=streams.dtype == torch.float32, tmax=iterations
        )
        return liger.liger_mhc_pre(streams, pre), liger.liger_mhc_post_res(streams, branch, post, carry)

    def into(streams: Tensor, branch: Tensor, bias: Tensor, phi: Tensor, alpha: Tensor) -> Results:
        return streams, branch, bias, phi.to(streams.dtype), *alpha.unbind()

    def back(results: Results) -> Results:
        return results[0].to(results[1].dtype), results[1]

    note = "phi in the states' dtype; adds 1e-6 in Sinkhorn, which has rows first"
    missing = status("liger_kernel", "liger-kernel", device, needs_cuda=True)
    return {"liger-kernel": Implementation(run, into, back, note=note, status=missing)}
