from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import INTERPRETED, interpret, starts_interpreter
from timm import layers as timm_layers
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from rewire.mixes.mix import pending_mix
from rewire.mixes.norms import mark, norm_of, normed, obstacle, unmark

WIDTH = 24

NORMS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), "layer"),
    "LayerNorm, no bias": (lambda: nn.LayerNorm(WIDTH, bias=False), "layer"),
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH, eps=1e-6), "rms"),
    "RMSNorm, torch's eps": (lambda: nn.RMSNorm(WIDTH), "rms"),
    "Llama": (lambda: LlamaRMSNorm(WIDTH), "rms"),
    "Gemma": (lambda: GemmaRMSNorm(WIDTH), "rms"),
    "T5": (lambda: T5LayerNorm(WIDTH), "rms"),
    "timm LayerNorm": (lambda: timm_layers.LayerNorm(WIDTH), "layer"),
    "timm RmsNorm": (lambda: timm_layers.RmsNorm(WIDTH), "rms"),
}


def drawn(make: Callable[[], nn.Module]) -> nn.Module:
    """With random parameters."""
    module = make()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(WIDTH))
    return module


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_recognised(name: str) -> None:
    make, kind = NORMS[name]
    module, x = drawn(make), torch.randn(5, WIDTH)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    assert mark(module) is None and obstacle(module) is None
    norm = norm_of(module, x)
    assert norm is not None and norm.kind == kind and (norm.bias is None) == (len(before) == 1)
    for rows in (x, 1e-3 * x):
        torch.testing.assert_close(normed(rows, norm), module(rows))
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("name", NORMS)
def test_whatever_device_and_dtype_they_have(name: str) -> None:
    for module in (NORMS[name][0]().to(torch.bfloat16), NORMS[name][0]().to("meta"), NORMS[name][0]().eval()):
        assert mark(module) is None


def test_the_eps_of_torch_is_another_one_in_float64() -> None:
    for eps in (None, 1e-6):
        module = nn.RMSNorm(WIDTH, eps).double()
        assert mark(module) is None and (norm_of(module, torch.ones(WIDTH).double()) is None) == (eps is None)


class Centred(nn.Module):
    """Subclasses have a weight and an eps, and are almost norms."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x - x.mean(-1, keepdim=True))


class EpsAfterTheRoot(Centred):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)


class Unbiased(Centred):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)


class ReturnsMore(Centred):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return nn.functional.rms_norm(x, (WIDTH,), self.weight, self.eps), x


class ThenDropout(Centred):
    """In eval mode it is an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(nn.functional.rms_norm(x, (WIDTH,), self.weight, self.eps))


class ShiftedRMSNorm(Centred):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (WIDTH,), self.weight, self.eps) + self.bias


OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "Olmo, no weight": (lambda: OlmoLayerNorm(WIDTH), "its parameters"),
    "LayerNorm, no weight": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), "its parameters"),
    "LayerNorm of two dimensions": (lambda: nn.LayerNorm((3, WIDTH)), "its parameters"),
    "Dropout": (nn.Dropout, "its parameters"),
    "Linear": (lambda: nn.Linear(WIDTH, WIDTH), "its parameters"),
    "parametrized": (
        lambda: parametrize.register_parametrization(nn.LayerNorm(WIDTH), "weight", nn.Tanh()),
        "parameters",
    ),
    "BatchNorm": (lambda: nn.BatchNorm1d(WIDTH), "it has buffers"),
    "GroupNorm of one group": (lambda: nn.GroupNorm(1, WIDTH), "it cannot be run on rows"),
    "InstanceNorm": (lambda: nn.InstanceNorm1d(WIDTH, affine=True), "it cannot be run on rows"),
    "timm LayerNorm2d": (lambda: timm_layers.LayerNorm2d(WIDTH), "it cannot be run on rows"),
    "timm LayerNormAct": (lambda: timm_layers.LayerNormAct(WIDTH), "it calls other modules"),
    "dropout inside": (ThenDropout, "it calls other modules"),
    "PReLU": (lambda: nn.PReLU(WIDTH), "it does not say its eps"),
    "timm SimpleNorm": (lambda: timm_layers.SimpleNorm(WIDTH), "computes neither"),
    **{
        cls.__name__: (cls, "computes neither")
        for cls in (Centred, EpsAfterTheRoot, Unbiased, ReturnsMore, ShiftedRMSNorm)
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_modules_are_refused_with_a_reason(name: str) -> None:
    make, why = OTHERS[name]
    module = make()
    found = mark(module)
    assert found is not None and why in found
    reason = obstacle(module)
    assert reason is not None and "not found to be a norm" in reason
    assert norm_of(module, torch.randn(2, WIDTH)) is None


def hooked(register: str) -> Callable[[nn.Module], Any]:
    return lambda module: getattr(module, register)(lambda *_: None)


class FSDPModule:
    """As `torch.distributed.fsdp` names the class that it adds."""


def as_fsdp(module: nn.Module) -> None:
    module.__class__ = type("FSDPLayerNorm", (FSDPModule, nn.LayerNorm), {})


def as_other_tensor(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.ones(WIDTH).as_subclass(type("Sharded", (Tensor,), {})))  # type: ignore[assignment]


CHANGES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "hook": (hooked("register_forward_hook"), "it has hooks"),
    "pre-hook": (hooked("register_forward_pre_hook"), "it has hooks"),
    "backward hook": (hooked("register_full_backward_hook"), "it has hooks"),
    "backward pre-hook": (hooked("register_full_backward_pre_hook"), "it has hooks"),
    "forward": (lambda module: setattr(module, "forward", torch.tanh), "its forward was replaced"),
    "FSDP": (as_fsdp, "FSDP"),
    "weight": (as_other_tensor, "its weight is no plain parameter"),
    "parametrized": (lambda m: parametrize.register_parametrization(m, "weight", nn.Tanh()), "no plain parameter"),
    "unmarked": (unmark, "not found to be a norm"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_done_to_a_norm_later_stands_in_the_way(name: str) -> None:
    change, why = CHANGES[name]
    module = nn.LayerNorm(WIDTH)
    mark(module)
    change(module)
    reason = obstacle(module)
    assert reason is not None and why in reason
    assert norm_of(module, torch.randn(2, WIDTH)) is None


def test_hooks_stand_in_the_way_while_they_are_there() -> None:
    module = nn.LayerNorm(WIDTH)
    mark(module)
    handle = module.register_forward_hook(lambda *_: None)
    assert obstacle(module) == "it has hooks"
    handle.remove()
    assert obstacle(module) is None
    with_all = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert obstacle(module) == "there are hooks on all modules"
    finally:
        with_all.remove()
    assert obstacle(module) is None


def test_copies_are_norms_and_a_module_in_its_place_is_not() -> None:
    block = nn.Sequential(nn.LayerNorm(WIDTH))
    mark(block[0])
    assert obstacle(copy.deepcopy(block)[0]) is None
    block[0] = nn.LayerNorm(WIDTH)
    assert obstacle(block[0]) is not None
    assert list(block.state_dict()) == ["0.weight", "0.bias"]


def test_a_norm_is_left_alone_where_the_dtype_or_width_of_its_input_is_another() -> None:
    module = nn.LayerNorm(WIDTH)
    mark(module)
    assert norm_of(module, torch.randn(2, WIDTH)) is not None
    assert norm_of(module, torch.randn(2, WIDTH, dtype=torch.bfloat16)) is None
    assert norm_of(module, torch.randn(2, 2 * WIDTH)) is None


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter(tmp_path: Path) -> None:
    interpret(f"{__file__}::TestFused", tmp_path)


class TestFused:
    """The sum and its norm from one kernel."""

    __test__ = INTERPRETED

    @pytest.mark.parametrize("name", NORMS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_equals_the_module(self, name: str, dtype: torch.dtype) -> None:
        module = drawn(NORMS[name][0]).to(dtype)
        mark(module)
        xs, weights = [torch.randn(3, WIDTH).to(dtype) for _ in range(2)], torch.randn(2)
        leaves = [x.requires_grad_() for x in (*xs, weights)] + list(module.parameters())
        total, after = pending_mix(xs, weights).normed(module)
        assert after.grad_fn is total.grad_fn  # one function returned both
        want = module(total.detach())
        assert total.dtype == after.dtype == want.dtype == dtype
        bits = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(after, want, rtol=2 * bits, atol=2 * bits)
        up = torch.randn(3, WIDTH).to(dtype)
        got = torch.autograd.grad(after, leaves, up)
        exact, twin = [x.detach().float().requires_grad_() for x in leaves[:3]], copy.deepcopy(module).float()
        precise = twin(pending_mix(exact[:2], exact[2]).value())
        wanted = torch.autograd.grad(precise, [*exact, *twin.parameters()], up.float())
        for a, b in zip(got, wanted, strict=True):
            assert float((a.float() - b).norm() / b.norm()) < max(4 * bits, 1e-5)

    def test_mixed_dtypes_are_left_to_the_module(self) -> None:
        """T5 in bfloat16 returns bfloat16 even if a branch in float32 made the states float32."""
        module = T5LayerNorm(WIDTH).bfloat16()
        mark(module)
        total, after = pending_mix([torch.randn(3, WIDTH)], torch.ones(1)).normed(module)
        assert total.dtype == torch.float32 and after.dtype == torch.bfloat16

    def test_gemma_adds_one_to_its_weight_in_float32(self) -> None:
        module = GemmaRMSNorm(WIDTH).bfloat16()
        nn.init.constant_(module.weight, 2**-9)
        mark(module)
        x = torch.full((1, WIDTH), 3.0, dtype=torch.bfloat16)
        norm = norm_of(module, x)
        assert norm is not None and torch.equal(norm.weight, torch.full((WIDTH,), 1 + 2**-9))
