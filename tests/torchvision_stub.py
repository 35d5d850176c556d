"""Import torchvision even where its compiled operators do not load.

A torchvision whose binary does not match torch's build (not every CPU build of torch has a partner) fails on
import with "operator torchvision::nms does not exist", and takes timm and most of transformers with it. Only
its Python half is needed here. Import this module before either of them::

    import torchvision_stub  # noqa: F401
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def missing_operators_tolerated(namespace: str) -> Iterator[None]:
    """Within this context, fake kernels for operators of ``namespace`` that do not exist are dropped."""
    register_fake = torch.library.register_fake

    def tolerant(op: Any, func: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        if not str(op).startswith(f"{namespace}::"):
            return register_fake(op, func, **options)

        def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
            with contextlib.suppress(RuntimeError):
                register_fake(op, kernel, **options)
            return kernel

        return register if func is None else register(func)

    torch.library.register_fake = tolerant
    try:
        yield
    finally:
        torch.library.register_fake = register_fake


# Not installed is fine: timm and transformers say themselves what they miss.
with missing_operators_tolerated("torchvision"), contextlib.suppress(ImportError):
    import torchvision  # noqa: F401
