"""One fused projection, applied to three inputs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from rewire.mixes.fused_qkv import Fused, project_fused

LAYOUTS = [Fused(1, (6, 6, 6)), Fused(3, (4, 4, 4)), Fused(2, (8, 4, 4)), Fused(1, (12, 3, 3)), Fused(2, (6, 2, 5))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", "conv1d", "wrapped"])
def test_each_takes_its_rows(layout: Fused, bias: bool, kind: str) -> None:
    from transformers.pytorch_utils import Conv1D

    linear = nn.Linear(10, layout.rows, bias=bias, dtype=torch.float64)
    projection: nn.Module = linear
    if kind == "conv1d":
        projection = Conv1D(layout.rows, 10).double()
        with torch.no_grad():
            projection.weight.copy_(linear.weight.T)
            projection.bias.copy_(linear.bias if bias else torch.zeros(layout.rows))
    elif kind == "wrapped":
        projection = nn.Sequential(linear)
    inputs = torch.randn(3, 2, 5, 10, dtype=torch.float64)
    got = project_fused(projection, layout.groups, layout.sizes, *inputs)
    features = itertools.cycle([way for way, size in enumerate(layout.sizes) for _ in range(size)])
    for feature, way in zip(range(layout.rows), features, strict=False):
        torch.testing.assert_close(got[..., feature], linear(inputs[way])[..., feature])


def test_the_weight_is_not_copied() -> None:
    """The largest tensor made is the output; a copy of the weight's rows would be larger."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and not func.is_view:
                self.largest = max(self.largest, out.numel())
            return out

    for layout in LAYOUTS:
        linear, inputs = nn.Linear(64, layout.rows), torch.randn(3, 2, 64)
        with Largest() as seen, torch.no_grad():
            out = project_fused(linear, layout.groups, layout.sizes, *inputs)
        assert seen.largest <= max(out.numel(), inputs[0].numel())


def test_bfloat16_and_autocast() -> None:
    linear, inputs = nn.Linear(8, 18).bfloat16(), torch.randn(3, 4, 8)
    assert project_fused(linear, 3, (2, 2, 2), *inputs.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert project_fused(linear.float(), 3, (2, 2, 2), *inputs).dtype == torch.bfloat16


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook", "on all modules"])
def test_hooks_on_the_projection_are_called(register: str) -> None:
    called: list[nn.Module] = []

    def hook(module: nn.Module, *_: object) -> None:
        called.append(module)

    linear, inputs = nn.Linear(8, 18), torch.randn(3, 4, 8, requires_grad=True)
    on_all = nn.modules.module.register_module_forward_hook
    handle = on_all(hook) if register == "on all modules" else getattr(linear, register)(hook)
    project_fused(linear, 3, (2, 2, 2), *inputs).sum().backward()
    handle.remove()
    assert called and set(called) == {linear}
