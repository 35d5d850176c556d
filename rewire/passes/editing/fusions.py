"""The norms that a kernel may compute together with a read of the stream."""

from __future__ import annotations

import dataclasses

from torch import nn

from rewire.attributes import NORMS
from rewire.mixes.norms import obstacle


@dataclasses.dataclass(frozen=True)
class Fusion:
    """A norm that follows a read of the residual stream.

    Attributes:
        module: path of the norm; in a flat graph, of the module in which it ran.
        obstacle: why kernels do not compute it together with the read; None if they do.
    """

    module: str
    obstacle: str | None


def fusions(model: nn.Module) -> list[Fusion]:
    """The norms of a rewired model that follow a read of the residual stream, and what prevents fusion.

    A fused norm is computed by the kernel that computes what it reads (on CUDA devices, for widths up to 8192). Hooks
    on a norm, an FSDP group of its own, or another module in its place prevent that: then it is called as usual.

    Args:
        model: a rewired model, in its present state.

    Example:
        >>> [fusion.module for fusion in rewire.fusions(rewired) if fusion.obstacle is None][:2]
        ['blocks.0.ln_1', 'blocks.0.ln_2']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    rows = []
    for name, block in model.named_modules():
        for path, reason in block.__dict__.get(NORMS, {}).items():
            full = f"{name}.{path}" if name else path
            rows.append(Fusion(full, reason or obstacle(model.get_submodule(full))))
    return rows
