"""Ways of writing a residual model that rewire once refused, or connected nothing of: one small model for each.

Each is rewired, validated, and compared in both modes; every trunk is shown to be connected by moving its weights.
Models that cannot be connected by nature are refused, by name.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
import torchvision_stub  # noqa: F401
from comparing import assert_close, evaluate, tensors_in
from mixing import learned, shaken
from models import WIDTH, Attention, BasicBlock, ConvNet, Mlp, PreNorm, images, vectors
from test_errors import Wrong
from torch import Tensor, nn

import rewire
from rewire.errors import OutOfOrder
from rewire.patterns.tiny import timm_model

Adds = dict[str, int]

DEPTH = 2  # blocks


class Stack(models.Stack):
    def __init__(self, block: Callable[[], nn.Module], depth: int = DEPTH) -> None:
        super().__init__(block, depth)


def assert_connected(model: nn.Module, adds: Adds, *args: Any, tolerance: float = 1e-5, **kwargs: Any) -> nn.Module:
    """Returns the model with plain connections; ``adds`` are the residual adds of each trunk."""
    model.eval()
    plain = rewire.compile(model, "residual", example_inputs=(args, kwargs), validate=False)
    assert {name: len(one.layout.units) for name, one in rewire.connections(plain).items()} == adds
    for training in (False, True):
        expected = evaluate(model, args, kwargs, training)
        assert_close(expected, evaluate(plain, args, kwargs, training), tolerance, 5 * tolerance)
    free = rewire.compile(model, "ancre-none", example_inputs=(args, kwargs))
    assert all(connection.layout.dims.depth > 1 for connection in rewire.connections(free).values())
    for name, connection in rewire.connections(free).items():
        before = _outputs(free, args, kwargs)
        connection.set_values({name: value + 0.3 for name, value in connection.values().items()})
        after = _outputs(free, args, kwargs)
        assert any(not torch.allclose(a, b, atol=1e-3) for a, b in zip(before, after, strict=True)), name
    return plain


def _outputs(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return [t.clone() for t in tensors_in(model(*args, **kwargs)) if t.is_floating_point()]


# -- 1: a cast is the shortcut -----------------------------------------------------------------------------------------


class InFloat32(nn.Module):
    """Mamba's way: the residual is kept in float32, whatever the branch computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, hidden: Tensor) -> Tensor:
        residual = hidden
        hidden = self.norm(hidden.to(dtype=self.norm.weight.dtype))
        residual = residual.to(torch.float32)
        hidden = self.mixer(hidden)
        return residual + hidden


class FloatAndBack(PreNorm):
    """Wan's way: each sum is computed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        x = (x.float() + self.attn(self.ln_1(x))).type_as(x)
        return (x.float() + self.mlp(self.ln_2(x).float().to(x.dtype)).float()).type_as(x)


class CastStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x.to(self.out.weight.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("block", "adds"), [(InFloat32, DEPTH), (FloatAndBack, 2 * DEPTH)])
def test_a_cast_as_the_shortcut(block: Callable[[], nn.Module], adds: int, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert_connected(CastStack(block).to(dtype), {"layers": adds}, vectors().to(dtype), tolerance=tolerance)


# -- 2, 3, 13: what a forward asks of its arguments and results --------------------------------------------------------


class OneOrMore(Attention):
    """Returns one tensor, or with a context more: the caller counts them."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, ...]:  # type: ignore[override]
        out = super().forward(x)
        return (out,) if context is None else (out, context)


class Counts(PreNorm):
    """Flux's way."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = OneOrMore()

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        outputs = self.attn(self.ln_1(x), context)
        if len(outputs) == 1:
            (attn,) = outputs
        elif len(outputs) == 2:
            attn, context = outputs
        x = x + attn
        x = x + self.mlp(self.ln_2(x))
        return x if context is None else x + context.mean()


def test_the_length_of_what_a_child_returns() -> None:
    assert_connected(Stack(Counts), {"layers": 2 * DEPTH}, vectors())


class LooksIntoKwargs(nn.Module):
    """diffusers' ResnetBlock2D."""

    def __init__(self, before: int = 8, width: int = 8) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, before), nn.GroupNorm(4, width)
        self.conv1, self.conv2 = nn.Conv2d(before, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.shortcut = None if before == width else nn.Conv2d(before, width, 1)
        self.output_scale_factor = 1.0

    def forward(self, x: Tensor, temb: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) > 0 or kwargs.get("scale") is not None:
            raise ValueError("the scale argument is deprecated")
        h = self.conv1(F.silu(self.norm1(x)))
        if temb is not None:
            h = h + temb[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        if self.shortcut is not None:
            x = self.shortcut(x)
        return (x + h) / self.output_scale_factor


class KwargsNet(ConvNet):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LooksIntoKwargs() for _ in range(DEPTH))

    def forward(self, x: Tensor, temb: Tensor | None = None) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, temb)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("temb", [None, torch.linspace(-1, 1, 16).reshape(2, 8)])
def test_a_forward_that_looks_into_its_keyword_arguments(temb: Tensor | None) -> None:
    assert_connected(KwargsNet(), {"blocks": DEPTH}, images(), temb)


class ListOrTensor(PreNorm):
    """DINO's way: a forward takes a tensor, or a list of tensors."""

    def forward(self, x_or_x_list: Any) -> Any:
        if isinstance(x_or_x_list, Tensor):
            return self.forward_one(x_or_x_list)
        return [self.forward_one(x) for x in x_or_x_list]

    def forward_one(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class ListOrTensorStack(Stack):
    def forward(self, x: Any) -> Any:
        x = [self.inp(one) for one in x] if isinstance(x, list) else self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return [self.out(one) for one in x] if isinstance(x, list) else self.out(x)


def test_a_list_or_a_tensor_as_the_argument() -> None:
    assert_connected(ListOrTensorStack(ListOrTensor), {"layers": 2 * DEPTH}, vectors())


def test_lists_where_tensors_were_are_refused() -> None:
    rewired = rewire.compile(ListOrTensorStack(ListOrTensor).eval(), "residual", example_inputs=(vectors(),))
    with pytest.raises(OutOfOrder, match="returned without the value of trunk 'layers'"):
        rewired([vectors(), vectors(length=5)])


# -- 4: memory layout --------------------------------------------------------------------------------------------------


class PreActivation(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(F.relu(self.norm(x)))


class Transposed(nn.Module):
    """Returns states whose memory another topology may lay out in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(PreActivation() for _ in range(DEPTH)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.blocks(self.stem(x))
        return x, x.permute(0, 2, 3, 1)


@pytest.mark.parametrize("topology", ["hc-dynamic", "hc-static", "grn-v3", "denseformer", "mhc", "layerscale"])
def test_outputs_that_differ_in_strides_alone(topology: str) -> None:
    model = Transposed().eval()
    rewired = rewire.compile(model, topology, start="paper", example_inputs=(images(),))
    assert len(rewire.connections(rewired)["blocks"].layout.units) == DEPTH


# -- 5: the branch ends in different code ------------------------------------------------------------------------------


class Clamps(PreNorm):
    """DETR's way."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln_1(x + self.attn(x))
        residual = x
        x = self.mlp(x)
        x = residual + x
        if self.training and not torch.isfinite(x).all():
            limit = torch.finfo(x.dtype).max - 1000
            x = torch.clamp(x, min=-limit, max=limit)
        return self.ln_2(x)


class ClampsTheBranch(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        h = self.mlp(self.ln_2(x))
        if self.training:
            if not torch.isfinite(h).all():
                h = torch.nan_to_num(h)
            h = h * 0.5
        else:
            h = h.contiguous()
        return x + h


@pytest.mark.parametrize("block", [Clamps, ClampsTheBranch])
def test_a_branch_that_ends_in_different_code(block: Callable[[], nn.Module]) -> None:
    assert_connected(Stack(block), {"layers": 2 * DEPTH}, vectors())


# -- 6: an empty Sequential is the identity ----------------------------------------------------------------------------


class EmptyShortcut(nn.Module):
    """The BasicBlock of the most copied CIFAR repository."""

    def __init__(self, before: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class CifarNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1)
        self.layer1 = nn.Sequential(EmptyShortcut(8, 8), EmptyShortcut(8, 8))
        self.layer2 = nn.Sequential(EmptyShortcut(8, 16, 2), EmptyShortcut(16, 16))
        self.linear = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.conv1(x))
        out = self.layer2(self.layer1(out))
        return self.linear(F.avg_pool2d(out, 4).mean((2, 3)))


def test_an_empty_sequential_as_the_shortcut() -> None:
    assert_connected(CifarNet(), {"layer1": 2, "layer2": 2}, images())


# -- 7, 8: which arguments are given, and which way runs ---------------------------------------------------------------


class Conditioned(PreNorm):
    """A required argument that may be None, and optional ones of which some are given."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.ln_3 = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.cross = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor, temb: Tensor | None, context: Tensor | None = None, mask: Any = None) -> Tensor:
        h = self.attn(self.ln_1(x))
        if temb is not None:
            h = h + self.project(temb)[:, None]
        x = x + h
        if context is not None:
            x = x + self.cross(self.ln_3(x), context, context, key_padding_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class ConditionedStack(Stack):
    def forward(self, x: Tensor, temb: Tensor | None, context: Tensor | None = None, mask: Any = None) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x, temb, context, mask=mask)
        return self.out(x)


@pytest.mark.parametrize("temb", [False, True])
@pytest.mark.parametrize("context", [False, True])
def test_arguments_that_are_none(temb: bool, context: bool) -> None:
    given = (torch.ones(2, WIDTH) if temb else None, torch.ones(2, 12, WIDTH) if context else None)
    assert_connected(ConditionedStack(Conditioned), {"layers": (3 if context else 2) * DEPTH}, vectors(), *given)


@pytest.mark.parametrize("temb", [False, True])
@pytest.mark.parametrize("context", [False, True])
def test_without_inputs_any_choice_of_arguments_is_right_or_refused(temb: bool, context: bool) -> None:
    """A trace leaves the branches out that need what is not given: the one on the context adds."""
    given = (torch.ones(2, WIDTH) if temb else None, torch.ones(2, 12, WIDTH) if context else None)
    model = ConditionedStack(Conditioned).eval()
    rewired = rewire.compile(model, "residual", validate=False)
    if context:
        with pytest.raises(OutOfOrder, match="has another shortcut"):
            rewired(vectors(), *given)
    else:
        assert torch.equal(rewired(vectors(), *given), model(vectors(), *given))


class QueryStates(PreNorm):
    """DeBERTa's way: the shortcut is another argument, if that is given."""

    def forward(self, hidden: Tensor, query: Tensor | None = None) -> Tensor:
        attended = self.attn(hidden)
        if query is None:
            query = hidden
        x = self.ln_1(attended + query)
        return self.ln_2(self.mlp(x) + x)


class QueryStack(Stack):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__(block)
        self.rereads, self.conv = False, None

    def forward(self, x: Tensor) -> Tensor:
        states = (hidden := self.inp(x),)
        query = None
        for number, layer in enumerate(self.layers):
            output = layer(hidden, query)
            if number == 0 and self.conv is not None:
                output = self.conv(hidden, output)
            if self.rereads:
                query = output
            else:
                hidden = output
            states = (*states, output)
        return self.out(states[-1])


def test_the_way_that_runs_and_not_the_longest() -> None:
    assert_connected(QueryStack(QueryStates), {"layers": 2 * DEPTH}, vectors())


class Multimodal(PreNorm):
    """BLIP's way: a mode says whether there is cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.cross, self.ln_3 = nn.MultiheadAttention(WIDTH, 4, batch_first=True), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, context: Tensor | None = None, mode: str | None = None) -> tuple[Tensor, ...]:  # type: ignore[override]
        x = self.ln_1(self.attn(x) + x)
        if mode == "multimodal":
            x = self.ln_3(self.cross(x, context, context)[0] + x)
        return (self.ln_2(self.mlp(x) + x),)


class MultimodalStack(Stack):
    def forward(self, x: Tensor, context: Tensor | None = None, mode: str = "multimodal") -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x, context, mode=mode)[0]
        return self.out(x)


@pytest.mark.parametrize(("mode", "adds"), [("text", 2 * DEPTH), ("multimodal", 3 * DEPTH)])
def test_a_mode_that_leaves_branches_out(mode: str, adds: int) -> None:
    context = torch.linspace(-1, 1, 2 * 4 * WIDTH).reshape(2, 4, WIDTH)
    assert_connected(MultimodalStack(Multimodal), {"layers": adds}, vectors(), context, mode)


# -- 9: the width changes ----------------------------------------------------------------------------------------------


class Widens(nn.Module):
    """Stages of two widths in one list; the map between them is a block, or is part of the first block behind it."""

    def __init__(self, projected: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        between = BasicBlock(8, 16, 2) if projected else nn.Conv2d(8, 16, 2, 2)
        blocks = [BasicBlock(8, 8, 1), BasicBlock(8, 8, 1), between, BasicBlock(16, 16, 1), BasicBlock(16, 16, 1)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("projected", [False, True])
def test_a_trunk_is_split_where_the_width_changes(projected: bool) -> None:
    assert_connected(Widens(projected), {"blocks": 2, "blocks'": 3 if projected else 2}, images())


class Pools(nn.Module):
    """The states are pooled inside a block, so that its second add has another size."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), Mlp()
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        if self.last:
            x = F.max_pool1d(x.transpose(1, 2), 2).transpose(1, 2)
        return x + self.mlp(self.ln_2(x))


class PoolsStack(Stack):
    def __init__(self) -> None:
        super().__init__(PreNorm)
        self.layers = nn.ModuleList(Pools(last) for last in (False, False, True, False))


class Pooled(nn.Module):
    """Funnel: in the first block of a stage the query is pooled, and so is the shortcut."""

    def __init__(self, pools: bool) -> None:
        super().__init__()
        self.norm, self.attn, self.pools = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True), pools
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        query = F.avg_pool1d(x.transpose(1, 2), 2).transpose(1, 2) if self.pools else x
        x = self.norm(query + self.attn(query, x, x)[0])
        return self.norm2(x + self.mlp(x))


class Funnel(Stack):
    def __init__(self) -> None:
        super().__init__(PreNorm)
        self.layers = nn.ModuleList(Pooled(pools) for pools in (False, False, True, False))


@pytest.mark.parametrize(("model", "adds"), [(PoolsStack, (5, 3)), (Funnel, (4, 4))])
def test_a_trunk_is_split_where_the_states_are_pooled(model: Callable[[], nn.Module], adds: tuple[int, int]) -> None:
    assert_connected(model(), dict(zip(("layers", "layers'"), adds, strict=True)), vectors())


# -- 10: starts that are right up to rounding --------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["ancre-ingoing", "ancre-outgoing"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_roundings_that_make_a_relu_flip(topology: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = ConvNet(depth=6).eval()
    rewired = rewire.compile(model, topology, example_inputs=(images(),))
    torch.testing.assert_close(rewired(images()), model(images()), rtol=1e-4, atol=1e-5)


class AddsLater(PreNorm):
    """Adds to its own result in place, behind what hooks see of its children."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.attn(self.ln_1(x))
        y += x
        z = self.mlp(self.ln_2(y))
        z += y
        return z


def test_the_block_that_differs_is_named_where_it_adds_in_place() -> None:
    with pytest.raises(rewire.ValidationMismatch, match=r"first block that differs is 'layers\.1[.']"):
        rewire.compile(Stack(AddsLater), Wrong(), example_inputs=(vectors(),))


# -- 11: helpers of one class that do not do the same ------------------------------------------------------------------


class MayAdd(nn.Module):
    """EfficientNet's last part of a block: some add the shortcut, the first of the network does not."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.project, self.skips = nn.Linear(WIDTH, WIDTH), skips

    def forward(self, shortcut: Tensor, hidden: Tensor) -> Tensor:
        hidden = self.project(hidden)
        if self.skips:
            hidden = hidden + shortcut
        return hidden


class WithMayAdd(nn.Module):
    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.norm, self.mlp, self.final = nn.LayerNorm(WIDTH), Mlp(), MayAdd(skips)

    def forward(self, x: Tensor) -> Tensor:
        return self.final(x, self.mlp(self.norm(x)))


class MayAddStack(Stack):
    def __init__(self) -> None:
        super().__init__(PreNorm)
        self.layers = nn.ModuleList(WithMayAdd(skips) for skips in (False, True, True, False, True, True, True))


def test_helpers_of_one_class_of_which_some_add() -> None:
    assert_connected(MayAddStack(), {"layers": 2, "layers'": 3}, vectors())


# -- 12: functions in attributes ---------------------------------------------------------------------------------------


class LambdaMlp(nn.Module):
    """minGPT's block."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, 64), "act": nn.GELU(), "down": nn.Linear(64, WIDTH)})
        m = self.mlp
        self.mlpf = lambda x: m.down(m.act(m.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlpf(self.ln_2(x))
        return x


def test_a_lambda_over_submodules() -> None:
    model = Stack(LambdaMlp)
    plain = assert_connected(model, {"layers": 2 * DEPTH}, vectors())
    with torch.no_grad():
        plain.layers[0].mlp.down.bias.add_(1)  # the copy's lambda holds the copy's modules
    assert torch.equal(model(vectors()), plain(vectors()))


# -- 14: branches without weights --------------------------------------------------------------------------------------


class Fourier(nn.Module):
    """FNet's block: the tokens are mixed without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real
        x = self.norm1(x + mixed)
        return self.norm2(x + self.mlp(x))


def test_a_branch_without_parameters() -> None:
    assert_connected(Stack(Fourier), {"layers": 2 * DEPTH}, vectors())


# -- 15: caches that are written in place ------------------------------------------------------------------------------


class Caches(nn.Module):
    """DeepSeek's inference code: keys are written into a buffer, which is read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.key, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("cache", torch.zeros(4, 16, WIDTH), persistent=False)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm(x)
        self.cache[:batch, start : start + length] = self.key(y)
        keys = self.cache[:batch, : start + length]
        return x + self.out((y @ keys.transpose(1, 2)).softmax(-1) @ keys)


@torch.no_grad()
def _generated(model: nn.Module) -> Tensor:
    return torch.cat([model(vectors()[:, :4]), model(vectors()[:, 4:], start=4)], 1)


class CachingStack(Stack):
    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x, start)
        return self.out(x)


def test_a_cache_that_is_written_in_place() -> None:
    model = CachingStack(Caches).eval()
    for topology in ("residual", "ancre-none"):
        rewired = rewire.compile(model, topology, example_inputs=(vectors(),))
        assert len(rewire.connections(rewired)["layers"].layout.units) == DEPTH
        assert not any(bool(layer.cache.any()) for layer in model.layers)
        torch.testing.assert_close(_generated(rewired), _generated(model))
        for layer in model.layers:
            layer.cache.zero_()
    with torch.no_grad():
        for weight in learned(rewired).values():
            weight.add_(2.4)  # 0.3 as the formulas have it
    assert not torch.allclose(_generated(rewired), _generated(model), atol=1e-3)


# -- 16: adds in the root's own loop -----------------------------------------------------------------------------------


class OwnLoop(nn.Module):
    """XLM's way: the lists hold the parts of the blocks, and the model's own forward adds."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, WIDTH)
        self.attentions, self.ffns = (nn.ModuleList(part() for _ in range(DEPTH)) for part in (Attention, Mlp))
        self.norm1, self.norm2 = (nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(DEPTH)) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            mask = torch.ones(x.shape[:2])
        tensor = self.inp(x)
        tensor *= mask.unsqueeze(-1).to(tensor.dtype)
        for i in range(DEPTH):
            attn = self.attentions[i](tensor)
            tensor = tensor + attn
            tensor = self.norm1[i](tensor)
            tensor = tensor + self.ffns[i](tensor)
            tensor = self.norm2[i](tensor)
            tensor *= mask.unsqueeze(-1).to(tensor.dtype)
        return tensor


class OwnLoopPreNorm(OwnLoop):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        tensor = self.inp(x)
        for i in range(DEPTH):
            tensor = tensor + self.attentions[i](self.norm1[i](tensor))
            tensor = tensor + self.ffns[i](self.norm2[i](tensor))
        return tensor


@pytest.mark.parametrize("model", [OwnLoop, OwnLoopPreNorm])
def test_adds_in_the_loop_of_the_root(model: Callable[[], nn.Module]) -> None:
    assert_connected(model(), {model.__name__: 2 * DEPTH}, vectors())  # type: ignore[attr-defined]


# -- 17: parts of modules that are called by other names ---------------------------------------------------------------


class Processor:
    """diffusers' way: a plain object computes with the projections of the module that it is handed."""

    def __call__(self, attn: nn.Module, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = attn.to_q(x), attn.to_k(x), attn.to_v(x)
        q = q * rotary[0] + q.roll(1, -1) * rotary[1]
        return attn.to_out[0](F.scaled_dot_product_attention(q, k, v))


class Processed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.processor = Processor()

    def prepare(self, length: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(length, dtype=torch.float32)[:, None] / (1 + torch.arange(WIDTH))
        return angles.cos(), angles.sin()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.processor(self, x, **kwargs)


class CallsMethods(nn.Module):
    """Calls methods of its children other than their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Processed()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        rotary = self.attn.prepare(x.shape[1])
        x = x + self.attn(self.norm1(x), rotary=rotary)
        return x + self.mlp.down(F.gelu(self.mlp.up(self.norm2(x))))


class Experts(nn.Module):
    """NucleusMoE's way: tokens are gathered by expert, in a loop over those that are hit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.gate, self.experts = nn.Linear(WIDTH, 4, bias=False), nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        tokens = self.norm2(x).flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        result = torch.zeros_like(tokens)
        for number in chosen.unique().tolist():
            row, place = torch.where(chosen == number)
            result.index_add_(0, row, self.experts[number](tokens[row]) * weights[row, place, None])
        return x + result.view_as(x)


@pytest.mark.parametrize("block", [CallsMethods, Experts])
def test_children_that_are_not_called_by_their_forward(block: Callable[[], nn.Module]) -> None:
    assert_connected(Stack(block), {"layers": 2 * DEPTH}, vectors())


# -- 18: stages inside another model -----------------------------------------------------------------------------------


class Stage(nn.Module):
    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.downsample = nn.Conv2d(before, width, 2, 2)
        self.blocks = nn.Sequential(*(PreActivation(width) for _ in range(DEPTH)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.downsample(x))


class Segments(nn.Module):
    """Runs an encoder's stages by name, keeps what each returns, and decodes from all."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"stages_0": Stage(3, 8), "stages_1": Stage(8, 16)})
        self.decoder = nn.Conv2d(24, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for _, module in self.encoder.named_children():
            features.append(module(features[-1]))
        _, fine, coarse = features
        return self.decoder(torch.cat([fine, F.interpolate(coarse, fine.shape[2:])], 1))


def test_a_stage_inside_a_segmentation_model_is_one_trunk() -> None:
    assert_connected(Segments(), {f"encoder.stages_{number}.blocks": DEPTH for number in range(2)}, images())


class AllChildren(nn.Module):
    """timm's RegNet: a stage runs whatever is registered on it."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(DEPTH):
            self.add_module(f"b{number}", PreActivation(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.children():
            x = block(x)
        return x


def test_connections_are_not_registered_where_all_children_run() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), AllChildren(), nn.Conv2d(8, 8, 1), AllChildren())
    assert_connected(model, {"1": DEPTH, "3": DEPTH}, images())


class Widened(nn.Module):
    """timm's NextViT: between two adds the stream gets more channels, which a trace does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.more, self.third = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.back = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        x = x + self.second(x)
        x = torch.cat([x, self.more(x)], -1)
        return self.back(x + self.third(x))


class Padded(Widened):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        x = x + self.second(x)
        x = F.pad(x, (0, WIDTH))
        return self.back(x + self.third(x))


@pytest.mark.parametrize("validate", [True, False])
def test_a_run_decides_where_a_trace_says_two_widths(validate: bool) -> None:
    model, x = nn.Sequential(Padded(), Padded()), vectors(width=WIDTH)
    rewired = rewire.compile(model, "residual", example_inputs=(x,), validate=validate)
    assert [len(c.layout.units) for c in rewire.connections(rewired).values()] == [2, 2]
    torch.testing.assert_close(rewired(x), model(x))


def test_a_trace_does_not_follow_a_stream_that_is_joined_with_another_tensor() -> None:
    trunks = rewire.inspect(nn.Sequential(Widened(), Widened())).trunks
    assert [len(trunk.sites) for trunk in trunks] == [2, 2]


@pytest.mark.parametrize("validate", [True, False])
def test_streams_that_become_wider_are_cut_there(validate: bool) -> None:
    model, x = nn.Sequential(Widened(), Widened()), vectors(width=WIDTH)
    rewired = rewire.compile(model, "residual", example_inputs=(x,), validate=validate)
    assert [len(c.layout.units) for c in rewire.connections(rewired).values()] == [2, 2]
    torch.testing.assert_close(rewired(x), model(x))


class Encoder(nn.Module):
    """A VAE's: one loop runs the blocks of two streams, and the second goes on behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.ModuleList(PreActivation(width) for _ in range(2)) for width in (8, 16))
        self.downsample, self.mid = nn.Conv2d(8, 16, 2, 2), nn.ModuleList(PreActivation(16) for _ in range(2))
        self.stem = nn.Conv2d(3, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for level in range(2):
            for number in range(2):
                h = self.down[level][number](h)
            if level == 0:
                h = self.downsample(h)
        h = self.mid[0](h)
        h = self.mid[1](h)
        return torch.tanh(h)


def test_two_streams_in_one_loop_of_which_one_goes_on() -> None:
    assert_connected(Encoder(), {"down.0": 2, "Encoder": 4}, images())


class JointHalf(nn.Module):
    """Of a block of the diffusion transformer SD3: its attention runs outside, and is handed back."""

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self.last, self.norm, self.qkv = last, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        if not last:
            self.proj, self.mlp = nn.Linear(WIDTH, WIDTH), Mlp(WIDTH)

    def before(self, x: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor] | None]:
        qkv = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return qkv, None if self.last else (x, x.mean(1, keepdim=True).sigmoid())

    def after(self, attention: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        x = x + gate * self.proj(attention)
        return x + self.mlp(self.norm(x))


def joint_attention(context: Tensor, x: Tensor, left: JointHalf, right: JointHalf) -> tuple[Tensor | None, Tensor]:
    context_qkv, context_rest = left.before(context)
    x_qkv, x_rest = right.before(x)
    joined = F.scaled_dot_product_attention(*(torch.cat(pair, 1) for pair in zip(context_qkv, x_qkv, strict=True)))
    context_part, x_part = joined[:, : context.shape[1]], joined[:, context.shape[1] :]
    rest = None if context_rest is None else left.after(context_part, *context_rest)
    return rest, right.after(x_part, *x_rest)  # type: ignore[misc]


class JointBlock(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.left, self.right = JointHalf(last), JointHalf()

    def forward(self, *args: Tensor, **kwargs: Any) -> tuple[Tensor | None, Tensor]:
        return joint_attention(*args, left=self.left, right=self.right, **kwargs)


class JointBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(JointBlock(number == 2) for number in range(3))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, context: Tensor | None) -> Tensor:
        for block in self.blocks:
            context, x = block(context, x)
        return self.out(x)


def test_branches_that_another_function_hands_back_and_two_streams_in_one_parameter() -> None:
    x, context = vectors(width=WIDTH), vectors(length=4, width=WIDTH)
    assert_connected(JointBlocks(), {"blocks": 4, "blocks'": 6}, x, context)


class Adding(PreNorm):
    def forward(self, x: Tensor, condition: Tensor) -> Tensor:  # type: ignore[override]
        x = x + condition
        return x + self.mlp(self.ln_1(x))


class AddingStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = condition = self.inp(x)
        for layer in self.layers:
            x = layer(x, condition)
        return self.out(x)


def test_what_is_added_in_each_block_is_no_stream() -> None:
    found = rewire.inspect(AddingStack(Adding, 3), example_inputs=(vectors(),))
    assert [len(trunk.sites) for trunk in found.trunks] == [3]


class OneStart(nn.Module):
    """Two streams that start with the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.ModuleList(Mlp(8) for _ in range(3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.left:
            x = x + layer(x)
        for layer in self.right:
            y = y + layer(y)
        return x * y


def test_of_two_streams_that_start_with_the_same_tensor_one_is_connected(caplog: pytest.LogCaptureFixture) -> None:
    assert_connected(OneStart(), {"left": 3}, vectors())
    assert "trunk 'right' was left as it is: 'x' at" in caplog.text


@pytest.mark.parametrize("given", [(), (vectors(),)])
def test_what_cannot_be_edited_is_told_with_its_place_and_is_no_trunk(given: tuple[Any, ...]) -> None:
    rewired = rewire.compile(OneStart(), "ancre-ingoing", example_inputs=(vectors(),))
    for report in (rewire.inspect(OneStart(), given or None), rewire.inspect(rewired)):
        assert [trunk.name for trunk in report.trunks] == ["left"]
        (left,) = report.left
        assert left.path == "right" and left.why.startswith("it cannot be edited: 'x' at")
        assert left.place and left.written == "y + layer(y)"
    with pytest.raises(rewire.EditError, match="trunk 'right' cannot be edited"):
        rewire.compile(OneStart(), "ancre-ingoing", example_inputs=(vectors(),), trunks=["left", "right"])


class InTraining(OneStart):
    """A stream of training mode beside one of both modes."""

    def forward(self, x: Tensor) -> Tensor:
        y = 2 * x
        for layer in self.left:
            x = x + layer(x)
        if self.training:
            for layer in self.right:
                y = y + layer(y)
        return x * y


def test_a_stream_of_training_mode_alone_is_told() -> None:
    rewired = rewire.compile(InTraining(), "ancre-ingoing", example_inputs=(vectors(),))
    (left,) = [one for one in rewire.inspect(rewired).left if "training mode only" in one.why]
    assert left.path == "right" and left.place and list(rewire.connections(rewired)) == ["left"]


class LoopedBlock(PreNorm):
    """Parallel branches that a loop adds, one in each turn."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln_1(x)
        for branch in (self.mlp, torch.tanh, self.attn):
            x = x + branch(h)
        return x


class WrittenOut(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        h = self.ln_1(x)
        return x + self.mlp(h) + torch.tanh(h) + self.attn(h)


@pytest.mark.parametrize("topology", ["ancre-ingoing", "hc-static", "attnres"])
def test_parallel_branches_that_a_loop_adds_are_one_add(topology: str) -> None:
    looped, written = (
        rewire.compile(Stack(block, 3), topology, start="paper", example_inputs=(vectors(),))
        for block in (LoopedBlock, WrittenOut)
    )
    (connection,) = rewire.connections(looped).values()
    assert connection.layout.units == (1, 2, 3) and "of=3" in str(rewire.diff(looped))
    written.load_state_dict(shaken(looped, 0.2, seed=3).state_dict())
    torch.testing.assert_close(looped(vectors()), written(vectors()))


class OneStep(OneStart):
    """A function that adds for two streams."""

    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x + layer(x)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        for layer in self.left:
            x = self.step(layer, x)
        for layer in self.right:
            y = self.step(layer, y)
        return x * y


class OneStepCut(OneStep):
    """The same, where gradients of the first of them are cut: it is left alone."""

    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        if layer in self.left:
            x = x.detach()
        return x + layer(x)


class OneStepOnce(OneStep):
    """The same, where the first of them is a single add: there is nothing to connect it with."""

    def __init__(self) -> None:
        super().__init__()
        del self.left[1:]


class Steps(OneStart):
    """`OneStep`, written out."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        for layer in self.left:
            x = x + layer(x)
        for layer in self.right:
            y = y + layer(y)
        return x * y


class StepsCut(Steps):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        for layer in self.left:
            x = x.detach() + layer(x.detach())
        for layer in self.right:
            y = y + layer(y)
        return x * y


class StepsOnce(Steps, OneStepOnce):
    forward = Steps.forward


@pytest.mark.parametrize("topology", ["ancre-ingoing", "hc-dynamic"])
@pytest.mark.parametrize("model", [(OneStep, Steps), (OneStepCut, StepsCut), (OneStepOnce, StepsOnce)])
def test_a_function_that_adds_for_two_streams(model: tuple[type[nn.Module], type[nn.Module]], topology: str) -> None:
    """Each begins in front of it, with its own tensor, whether the other one is connected or not."""
    one, written = model[0](), model[1]()
    written.load_state_dict(one.state_dict())
    found, wanted = (
        shaken(rewire.compile(net, topology, example_inputs=(vectors(),), validate=False), 0.2, seed=3)
        for net in (one, written)
    )
    assert found.state_dict().keys() == wanted.state_dict().keys()
    torch.testing.assert_close(found(vectors()), wanted(vectors()))


class Siamese(nn.Module):
    """One encoder for two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.scale = Stack(PreNorm), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.encoder(self.scale(x)) * self.encoder(self.scale(y))


def test_an_encoder_of_two_inputs_has_one_trunk(caplog: pytest.LogCaptureFixture) -> None:
    model, x, y = Siamese(), vectors(), vectors(length=4)[:, :1]
    rewired = assert_connected(model, {"encoder.layers": 4}, x, y)
    assert not caplog.text
    (connection,) = rewire.connections(rewired).values()
    calls: list[Any] = []
    handle = connection.register_forward_hook(lambda *_: calls.append(1))
    rewired(x, y)
    handle.remove()
    assert len(calls) == 2  # one stream for each input, with the same weights


class Rotations:
    """An object that is no module, and keeps what it computes for the next call."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.kept is None or self.kept.device != x.device:
            self.kept = torch.cos(torch.ones_like(x[:1]))
        return x * self.kept


class Rotated(Stack):
    def __init__(self) -> None:
        super().__init__(PreNorm)
        self.rotations = Rotations()

    def forward(self, x: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> Tensor:
        x = self.rotations(self.inp(x))
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


@pytest.mark.parametrize("validate", [True, False])
def test_a_trace_leaves_nothing_in_objects_that_modules_hold(validate: bool) -> None:
    model, x = Rotated(), vectors()
    rewired = rewire.compile(model, "residual", example_inputs=(x,), validate=validate)
    assert model.rotations.kept is None
    assert rewired.rotations.kept is None
    torch.testing.assert_close(rewired(x), model(x))


class Joint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f, self.context_norm, self.g = nn.LayerNorm(WIDTH), Mlp(), nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.f(self.norm(x))
        context = context + self.g(self.context_norm(context))
        return x, context


class JointStreams(nn.Module):
    """Hunyuan Video's: a function reads one stream, and hands both from block to block."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.context, self.out = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.refiner = nn.ModuleList(PreNorm() for _ in range(2))
        self.blocks = nn.ModuleList(Joint() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x, context = self.inp(x), self.context(x)
        for block in self.refiner:
            context = block(context)
        gate = torch.sigmoid(context.mean(1, keepdim=True))
        for block in self.blocks:
            x, context = block(x, context)
        return self.out(x * gate + context)


def test_a_function_that_reads_one_of_two_streams_gives_both_to_its_blocks() -> None:
    assert_connected(JointStreams(), {"JointStreams": 4 + DEPTH, "blocks": DEPTH}, vectors())


class Chained(Stack):
    """Latte's: the stream is viewed by calls of methods that go over several lines."""

    def __init__(self) -> None:
        super().__init__(PreNorm)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
            # fmt: off
            x = x.reshape(
                x.shape[0], x.shape[1], 1, x.shape[2]
            ).permute(1, 0, 2, 3)
            x = (
                x.flatten(2)
                .transpose(0, 1)
            )
            # fmt: on
        return self.out(x)


def test_methods_that_are_called_on_another_line() -> None:
    assert_connected(Chained(), {"layers": 2 * DEPTH}, vectors())


def gated(x: Tensor, f: Tensor, gate: Tensor, depth: float = 1.0) -> Tensor:
    return x + f * gate * depth


class Gated(nn.Module):
    """Kandinsky's: a helper has arguments with the names that an edited function would take."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f, self.gate = nn.LayerNorm(WIDTH), Mlp(), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return gated(x, self.f(self.norm(x)), self.gate, depth=0.5)


def test_a_helper_with_the_arguments_gate_and_depth() -> None:
    assert_connected(Stack(Gated), {"layers": DEPTH}, vectors())


class Unbound(nn.Module):
    """Z-Image's: the stream starts with the last of several tensors that one expression makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.blocks = nn.Linear(8, 2 * WIDTH), nn.ModuleList(PreNorm() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        made = list(torch.unbind(self.inp(x).unflatten(-1, (2, -1)), -2))
        x = made.pop(-1)
        for norm_and_branch in self.blocks:
            x = x + norm_and_branch.attn(norm_and_branch.ln_1(x))
        return torch.cat([*made, x], -1)


def test_a_stream_that_starts_with_one_of_several_tensors() -> None:
    assert_connected(Unbound(), {"blocks": 2}, vectors())


class Down(nn.Module):
    """A U-net's: it returns its states beside what it made of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.down = nn.ModuleList(PreActivation(8) for _ in range(2)), nn.Conv2d(8, 8, 2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        states: tuple[Tensor, ...] = ()
        for block in self.blocks:
            x = block(x)
            states = states + (x,)  # noqa: RUF005
        return self.down(x), states


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.down = nn.Conv2d(3, 8, 1), PreActivation(8), Down()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x))
        scale = x.mean()
        x, states = self.down(x)
        return scale * sum(x + F.avg_pool2d(state, 2) for state in states)


def test_states_that_a_block_returns_beside_another_value() -> None:
    assert_connected(UNet(), {"UNet": 3}, images())


class Sliced(nn.Module):
    """FT-Transformer's: behind the trunk the same helper adds to a slice of the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm = nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Mlp() for _ in range(DEPTH + 1))

    def added(self, x: Tensor, f: Tensor) -> Tensor:
        return x + f

    def forward(self, x: Tensor, lost: bool = False) -> Tensor:
        x = self.inp(x)
        for number, layer in enumerate(self.layers):
            f = layer(self.norm(x))
            if number == DEPTH:
                x, f = x[:, :1], f[:, :1]
            if lost and number == 1:
                x = x * 1
            x = self.added(x, f)
        return x


def test_a_helper_that_also_adds_outside_of_the_trunk() -> None:
    assert_connected(Sliced(), {"layers": DEPTH}, vectors())


def test_a_stream_that_is_lost_before_such_a_helper() -> None:
    rewired = rewire.compile(Sliced(), "residual", example_inputs=(vectors(),))
    with pytest.raises(rewire.OutOfOrder):
        rewired(vectors(), lost=True)


# -- compiled, and connected nothing -----------------------------------------------------------------------------------


class MixedWithStart(Stack):
    """nanochat's way: each block gets a mix of the stream and of its start."""

    def __init__(self) -> None:
        super().__init__(PreNorm)
        self.lambdas = nn.Parameter(torch.linspace(0.5, 1, 2 * DEPTH).reshape(DEPTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        x0 = x
        for number, layer in enumerate(self.layers):
            x = self.lambdas[number, 0] * x + self.lambdas[number, 1] * x0
            x = layer(x)
        return self.out(x)


class SkipsAcross(Stack):
    """modded-nanogpt's way: the second half of the blocks gets what the first half returned, backwards."""

    def __init__(self) -> None:
        super().__init__(PreNorm, 4)
        self.skip_weights = nn.Parameter(torch.linspace(0.5, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        skips = []
        for layer in self.layers[:2]:
            x = layer(x)
            skips.append(x)
        for number, layer in enumerate(self.layers[2:]):
            x = x + self.skip_weights[number] * skips.pop()
            x = layer(x)
        return self.out(x)


@pytest.mark.parametrize(("model", "adds"), [(MixedWithStart, 2 * DEPTH), (SkipsAcross, 8)])
def test_streams_that_are_mixed_between_the_blocks(model: Callable[[], nn.Module], adds: int) -> None:
    assert_connected(model(), {"layers": adds}, vectors())


class OneBlock(nn.Module):
    """Stable Diffusion's transformers of one block each."""

    def __init__(self, listed: bool) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 5)
        self.block = nn.Sequential(PreNorm()) if listed else PreNorm()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(self.inp(x)))


@pytest.mark.parametrize("listed", [False, True])
def test_a_single_block_is_connected_or_said_not_to_be(listed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """One unit at the granularity of blocks is nothing to learn: its adds are connected, or the user hears of it."""
    rewired = rewire.compile(OneBlock(listed).eval(), "ancre-none", example_inputs=(vectors(),))
    (connection,) = rewire.connections(rewired).values()
    assert connection.layout.dims.depth > 1 or "'block" in caplog.text


class ScalesTheState(PreNorm):
    """Gemma 4's way: a factor on the state, behind the last add."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("layer_scalar", torch.tensor([0.8]))

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.attn(self.ln_1(x))
        x = residual + x
        residual = x
        x = self.mlp(self.ln_2(x))
        x = residual + x
        x *= self.layer_scalar
        return x


def test_a_factor_on_the_state() -> None:
    assert_connected(Stack(ScalesTheState), {"layers": 2 * DEPTH}, vectors())


class CollectsAll(Stack):
    """MONAI's ViT: the states between the blocks are returned in a list."""

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:  # type: ignore[override]
        x = self.inp(x)
        hidden_states_out = []
        for layer in self.layers:
            x = layer(x)
            hidden_states_out.append(x)
        return self.out(x), hidden_states_out


def test_states_that_the_parent_collects() -> None:
    plain = assert_connected(CollectsAll(PreNorm), {"layers": 2 * DEPTH}, vectors())
    assert all(type(state) is Tensor for state in plain(vectors())[1])


class TwoStreams(nn.Module):
    """Flux' double block: text and image, each with its residual adds, and one attention over both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm1_context = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.norm2, self.norm2_context = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.ff, self.ff_context = Attention(), Mlp(), Mlp()

    def forward(self, x: Tensor, context: Tensor, temb: Tensor) -> tuple[Tensor, Tensor]:
        gate, gate_context = temb[:, None].chunk(2, -1)
        both = self.attn(torch.cat([self.norm1_context(context), self.norm1(x)], 1))
        attn_context, attn = both.split_with_sizes([context.shape[1], x.shape[1]], 1)
        x = x + gate * attn
        x = x + gate * self.ff(self.norm2(x))
        context = context + gate_context * attn_context
        context = context + gate_context * self.ff_context(self.norm2_context(context))
        return context, x


class OneStream(nn.Module):
    """Flux' single block: both streams joined, taken apart again at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(WIDTH), Attention(), Mlp()

    def forward(self, x: Tensor, context: Tensor, temb: Tensor) -> tuple[Tensor, Tensor]:
        length = context.shape[1]
        x = torch.cat([context, x], dim=1)
        residual = x
        y = self.norm(x)
        x = residual + temb[:, None].chunk(2, -1)[0] * (self.attn(y) + self.mlp(y))
        return x[:, :length], x[:, length:]


class DoubleAndSingle(nn.Module):
    def __init__(self, single: bool) -> None:
        super().__init__()
        self.inp, self.inp_context = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)
        self.time = nn.Linear(8, 2 * WIDTH)
        self.pairs = nn.ModuleList(TwoStreams() for _ in range(DEPTH))
        self.singles = nn.ModuleList(OneStream() for _ in range(DEPTH if single else 0))
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, context: Tensor, time: Tensor) -> Tensor:
        temb = self.time(time)
        x, context = self.inp(x), self.inp_context(context)
        for block in self.pairs:
            if torch.is_grad_enabled() and time.sum() > 1e9:  # a parent that cannot be traced
                raise ValueError
            context, x = block(x=x, context=context, temb=temb)
        for block in self.singles:
            context, x = block(x=x, context=context, temb=temb)
        return self.out(x), self.out(context)


def test_two_streams_through_each_block() -> None:
    inputs = (vectors(), vectors(length=4), vectors()[:, 0])
    assert_connected(DoubleAndSingle(False), {"pairs": 2 * DEPTH, "pairs'": 2 * DEPTH}, *inputs)


def test_two_streams_that_are_joined() -> None:
    """The joined ones are cut apart between the blocks: each is connected by itself, or the trunk is left out."""
    inputs = (vectors(), vectors(length=4), vectors()[:, 0])
    model = DoubleAndSingle(True).eval()
    rewired = rewire.compile(model, "residual", example_inputs=inputs)
    adds = {name: len(one.layout.units) for name, one in rewire.connections(rewired).items()}
    assert {"pairs": 2 * DEPTH, "pairs'": 2 * DEPTH}.items() <= adds.items() and 1 not in adds.values()
    for training in (False, True):
        assert_close(evaluate(model, inputs, {}, training), evaluate(rewired, inputs, {}, training))


class Reshapes(nn.Module):
    """Segformer's block: tokens inside, images between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(8), Attention(8), nn.LayerNorm(8), Mlp(8)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        x = x.flatten(2).transpose(1, 2)
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x.transpose(1, 2).view(b, c, h, w)


class ReshapesNet(ConvNet):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Reshapes() for _ in range(DEPTH)))


def test_views_at_the_ends_of_the_blocks() -> None:
    assert_connected(ReshapesNet(), {"blocks": 2 * DEPTH}, images())


class Nested(PreNorm):
    """Jamba's way: ``((x, logits), cache)``."""

    def forward(self, x: Tensor, cache: Any = None) -> Any:  # type: ignore[override]
        x = x + self.attn(self.ln_1(x))
        h = self.mlp(self.ln_2(x))
        return (x + h, h.detach().mean(-1)), cache


class NestedStack(Stack):
    def forward(self, x: Tensor) -> Any:
        x, logits = self.inp(x), ()
        for layer in self.layers:
            outputs, _ = layer(x)
            x = outputs[0]
            logits = (*logits, outputs[1])
        return self.out(x), logits


def test_nested_results() -> None:
    assert_connected(NestedStack(Nested), {"layers": 2 * DEPTH}, vectors())


class AddingProcessor:
    """Attention that is no module, as diffusers have it."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def __call__(self, attn: nn.Module, x: Tensor) -> Tensor:
        residual = x
        x = attn.attn(attn.ln_1(x))
        return residual + self.factor * x


class OtherProcessor(AddingProcessor):
    def __call__(self, attn: nn.Module, x: Tensor) -> Tensor:
        return x + attn.attn(x)


class ProcessedWithAdd(PreNorm):
    def __init__(self) -> None:
        super().__init__()
        self.processor = AddingProcessor()

    def forward(self, x: Tensor) -> Tensor:
        x = self.processor(self, x)
        return x + self.mlp(self.ln_2(x))


def test_adds_in_methods_of_plain_objects() -> None:
    rewired = assert_connected(Stack(ProcessedWithAdd), {"layers": 2 * DEPTH}, vectors())
    assert "return depth.leave(depth.add(residual, self.factor * x, last=True))" in rewire.source(rewired, "layers.0")
    before = rewired(vectors())
    for layer in rewired.layers:
        layer.processor = AddingProcessor(0.5)  # another of the same class: what runs is its own
    assert not torch.allclose(before, rewired(vectors()))
    for layer in rewired.layers:
        layer.processor = OtherProcessor()
    with pytest.raises(rewire.OutOfOrder):
        rewired(vectors())


def _plain_add(branch: Tensor, residual: Tensor, scale: float) -> Tensor:
    return residual + branch * scale


def _add_with(scale: float) -> Callable[[Tensor, Tensor], Tensor]:
    def add(branch: Tensor, residual: Tensor) -> Tensor:
        return _plain_add(branch, residual, scale)

    return add


class AddsByClosure(PreNorm):
    """The function that adds is made when the block is called, as in Megatron-LM."""

    def forward(self, x: Tensor) -> Tensor:
        add = _add_with(1.0 if self.training else 0.9)
        x = add(self.attn(self.ln_1(x)), x)
        return add(self.mlp(self.ln_2(x)), x)


def test_adds_in_closures_that_call_other_functions() -> None:
    rewired = assert_connected(Stack(AddsByClosure), {"layers": 2 * DEPTH}, vectors())
    written = rewire.source(rewired, "layers.0")
    assert "depth.through(gate.helpers['_depth__plain_add'], last=True)(branch, residual, scale)" in written


CLOSURES = """
from models import PreNorm

FACTOR = 1.0


def add_with():
    def add(branch, residual):
        return residual + branch * FACTOR

    return add


class Block(PreNorm):
    def forward(self, x):
        add = add_with()
        x = add(self.attn(self.ln_1(x)), x)
        return add(self.mlp(self.ln_2(x)), x)
"""


def test_closures_of_two_files_with_the_same_text(tmp_path: Path) -> None:
    for factor in (1.0, 0.5):
        path = tmp_path / f"closures_{factor:.0%}.py"
        path.write_text(CLOSURES)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.FACTOR = factor  # equal code, other globals
        assert_connected(Stack(module.Block), {"layers": 2 * DEPTH}, vectors())


def _counted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def wrapper(*args: Tensor) -> Tensor:
        wrapper.calls += 1  # type: ignore[attr-defined]
        return function(*args)

    wrapper.calls = 0  # type: ignore[attr-defined]
    return wrapper


@_counted
def _counted_add(branch: Tensor, residual: Tensor) -> Tensor:
    return residual + branch


class AddsByDecorated(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = _counted_add(self.attn(self.ln_1(x)), x)
        return _counted_add(self.mlp(self.ln_2(x)), x)


def test_decorators_of_functions_that_add_stay() -> None:
    rewired = assert_connected(Stack(AddsByDecorated), {"layers": 2 * DEPTH}, vectors())
    before = _counted_add.calls  # type: ignore[attr-defined]
    rewired(vectors())
    assert _counted_add.calls == before + 2 * DEPTH  # type: ignore[attr-defined]


class FusedAddNorm(nn.LayerNorm):
    """Adds and norms in one call, and returns both, as in vLLM."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return super().forward(x)
        residual = residual + x
        return super().forward(residual), residual


class AddsInNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = FusedAddNorm(WIDTH), FusedAddNorm(WIDTH)
        self.attn, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = x
            x = self.ln_1(x)
        else:
            x, residual = self.ln_1(x, residual)
        x, residual = self.ln_2(self.attn(x), residual)
        return self.mlp(x), residual


class AddsInNormsNet(Stack):
    def __init__(self) -> None:
        super().__init__(AddsInNorms, 3)
        self.norm = FusedAddNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, residual = self.inp(x), None
        for layer in self.layers:
            x, residual = layer(x, residual)
        return self.out(self.norm(x, residual)[0])


@pytest.mark.parametrize("validate", [False, True])
def test_norms_that_add_and_return_both(validate: bool) -> None:
    model, x = AddsInNormsNet(), vectors()
    rewired = rewire.compile(model, "residual", example_inputs=(x,), validate=validate)
    assert [len(c.layout.units) for c in rewire.connections(rewired).values()] == [6]
    assert_close(evaluate(model, (x,), {}), evaluate(rewired, (x,), {}))


class ReturnsList(PreNorm):
    """OpenAI GPT's way: a block returns a list, and hands its attention's result on in it."""

    def forward(self, x: Tensor) -> list[Tensor]:  # type: ignore[override]
        attn_outputs = [self.attn(x), x.detach().mean(-1)]
        n = self.ln_1(x + attn_outputs[0])
        return [self.ln_2(n + self.mlp(n)), *attn_outputs[1:]]


class ListStack(Stack):
    def forward(self, x: Tensor) -> Any:
        x = self.inp(x)
        others = []
        for layer in self.layers:
            outputs = layer(x)
            x = outputs[0]
            others.append(outputs[1])
        return self.out(x), others


def test_blocks_that_return_a_list() -> None:
    assert_connected(ListStack(ReturnsList), {"layers": 2 * DEPTH}, vectors())


def test_states_that_are_handed_on_beside_what_is_made_of_them() -> None:
    assert_connected(models.TakesKept(), {"encoder.blocks": 4, "TakesKept": 8}, torch.randn(2, 8, WIDTH))


class SmallUNet(nn.Module):
    """Stable Diffusion's way: residual units and one-block transformers in turn, skips across."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([LooksIntoKwargs(), LooksIntoKwargs()])
        self.attentions = nn.ModuleList([Reshapes(), Reshapes()])
        self.mid = nn.ModuleList([LooksIntoKwargs(), LooksIntoKwargs()])
        self.up = nn.ModuleList([LooksIntoKwargs(16, 8), LooksIntoKwargs(16, 8)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        kept: tuple[Tensor, ...] = ()
        for resnet, attention in zip(self.down, self.attentions, strict=True):
            x = attention(resnet(x))
            kept = (*kept, x)
        for resnet in self.mid:
            x = resnet(x)
        for resnet in self.up:
            x = torch.cat([x, kept[-1]], 1)
            kept = kept[:-1]
            x = resnet(x)
        return x


def test_a_unet_of_residual_units_and_attention() -> None:
    """Down and in the middle there is one stream; on the way up each unit begins with a projected shortcut."""
    plain = rewire.compile(SmallUNet().eval(), "residual", example_inputs=(images(),))
    adds = [len(one.layout.units) for one in rewire.connections(plain).values()]
    assert sum(adds) >= 8 and 1 not in adds


# -- crashed after they were compiled ----------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
def test_timm_features_of_blocks_in_between(norm: bool) -> None:
    shape: dict[str, Any] = {"embed_dim": 32, "num_heads": 4, "depth": 3, "img_size": 16, "patch_size": 8}
    model = timm_model("vit_tiny_patch16_224", **shape).eval()
    rewired = rewire.compile(model, "residual", example_inputs=(images(size=16),))
    with torch.no_grad():
        for call in (
            lambda m: m.forward_intermediates(images(size=16), indices=[0, 2], norm=norm),
            lambda m: m.get_intermediate_layers(images(size=16), n=2, norm=norm, return_prefix_tokens=True),
        ):
            expected, actual = (tensors_in(call(m)) for m in (model, rewired))
            assert len(expected) > 1
            for a, b in zip(expected, actual, strict=True):
                torch.testing.assert_close(b, a)


class Slices(Stack):
    """Longformer's way: what was padded is cut off each hidden state."""

    def forward(self, x: Tensor, states: bool = True) -> Any:
        x = self.inp(F.pad(x, (0, 0, 0, 3)))
        collected: tuple[Tensor, ...] = ()
        for layer in self.layers:
            if states:
                collected += (x,)
            x = layer(x)
        return self.out(x[:, :-3]), tuple(state[:, :-3] for state in collected)


def test_states_that_are_sliced() -> None:
    plain = assert_connected(Slices(PreNorm), {"layers": 2 * DEPTH}, vectors())
    model_without = plain(vectors(), states=False)
    assert len(model_without[1]) == 0 and torch.equal(model_without[0], plain(vectors())[0])


class SharedParts(nn.Module):
    """timm's CoaT: an encoding with an add of its own, which all blocks of a stage share."""

    def __init__(self, cpe: nn.Module) -> None:
        super().__init__()
        self.cpe, self.norm1, self.attn = cpe, nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.cpe(x)
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Encodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x.transpose(1, 2)).transpose(1, 2) + x


class SharedStack(Stack):
    def __init__(self) -> None:
        shared = Encodes()
        super().__init__(lambda: SharedParts(shared))


def test_an_add_in_a_part_that_several_blocks_share() -> None:
    assert_connected(SharedStack(), {"layers": 3 * DEPTH}, vectors())


# -- cannot be connected -----------------------------------------------------------------------------------------------


class Dense(nn.Module):
    """DenseNet: what was computed is appended, not added."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 4 * number, 4, 3, padding=1) for number in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(F.relu(x))], 1)
        return x


class Mixer(nn.Module):
    """ConvMixer: behind each residual add stands a map of the whole state."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.depthwise = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(DEPTH))
        self.pointwise = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for depthwise, pointwise in zip(self.depthwise, self.pointwise, strict=True):
            x = F.gelu(depthwise(x)) + x
            x = F.gelu(pointwise(x))
        return x


class Weighted(PreNorm):
    """MiniMax: shortcut and branch are weighted."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5 + self.attn(self.ln_1(x)) * 0.5
        return x * 1.5 + self.mlp(self.ln_2(x)) * 0.5


class WeightedByParameter(PreNorm):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.alpha + self.attn(self.ln_1(x))
        return x * self.alpha + self.mlp(self.ln_2(x))


NOT_CONNECTABLE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str]] = {
    "densenet": (Dense, images, "Dense"),
    "convmixer": (Mixer, images, r"depthwise\.0.*: a single residual add"),
    "weighted": (lambda: Stack(Weighted), vectors, r"layers\.0.*(weight|scale|factor)"),
    "weighted-by-parameter": (lambda: Stack(WeightedByParameter), vectors, r"layers\.0.*(weight|scale|factor)"),
}


@pytest.mark.parametrize("name", list(NOT_CONNECTABLE))
def test_what_cannot_be_connected_is_refused_and_named(name: str) -> None:
    make, inputs, words = NOT_CONNECTABLE[name]
    with pytest.raises(rewire.NoResidualAdds, match=re.compile(words, re.DOTALL)):
        rewire.compile(make().eval(), "ancre-ingoing", example_inputs=(inputs(),))


class Bridged(nn.Module):
    """BridgeTower: each block of a second tower gets a mix with what one of a first tower returned."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.text = nn.Linear(8, WIDTH), nn.ModuleList(PreNorm() for _ in range(DEPTH))
        self.cross, self.bridges = nn.ModuleList(PreNorm() for _ in range(DEPTH)), nn.ModuleList()
        self.bridges.extend(nn.LayerNorm(WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        y = x * 0.5
        for text, cross, bridge in zip(self.text, self.cross, self.bridges, strict=True):
            x = text(x)
            y = cross(bridge(y + x))
        return y


class AddsOutside(nn.Module):
    """DAB-DETR: a block returns the result of its branch and its shortcut; a function that is handed in adds them."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.layers = nn.Linear(8, WIDTH), nn.ModuleList(Mlp() for _ in range(DEPTH))
        self.join = torch.add

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = self.join(layer(x), x)
        return x


def test_adds_by_a_function_that_is_handed_in_are_refused_by_name() -> None:
    with pytest.raises(rewire.EditError, match=r"trunk 'layers' cannot be edited.*self\.join\(layer\(x\), x\)"):
        rewire.compile(AddsOutside().eval(), "ancre-none", example_inputs=(vectors(),))


def test_two_streams_with_a_bridge_are_connected() -> None:
    original = Bridged().eval()
    rewired = rewire.compile(original, "ancre-none", example_inputs=(vectors(),))
    assert all(one.layout.dims.depth > 1 for one in rewire.connections(rewired).values())
    for training in (False, True):
        expected, actual = (evaluate(m, (vectors(),), {}, training) for m in (original, rewired))
        assert_close(expected, actual, 1e-4, 1e-3)
    before = rewired(vectors())
    with torch.no_grad():
        for weight in learned(rewired).values():
            weight.add_(2.4)  # 0.3 as the formulas have it
    assert not torch.allclose(rewired(vectors()), before, atol=1e-3)


# -- streams that pass the code of others ------------------------------------------------------------------------------


class PairNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


class NormedInPairs(nn.Module):
    """I-BERT's way: a norm returns its value and a scale, which there is none of."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = Mlp(), PairNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.norm(x + self.mlp(x))
        return x


def test_a_norm_that_returns_more_than_its_value() -> None:
    plain = assert_connected(Stack(NormedInPairs), {"layers": DEPTH}, vectors())
    assert "depth.push(self.norm(depth.add(x, self.mlp(x))), item=(0,))" in str(rewire.source(plain, "layers.0"))


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.norm = *(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.norm(x + F.scaled_dot_product_attention(self.q(x), self.k(other), self.v(other)))


class Both(nn.Module):
    """LXMERT's way: two streams read each other by the same attention."""

    def __init__(self) -> None:
        super().__init__()
        self.cross, self.own, self.mlps = Cross(), nn.ModuleList([Cross(), Cross()]), nn.ModuleList([Mlp(), Mlp()])

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x_read, y_read = self.cross(x, y), self.cross(y, x)
        x, y = self.own[0](x_read, x_read), self.own[1](y_read, y_read)
        return x + self.mlps[0](x), y + self.mlps[1](y)


class TwoModalities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)
        self.words, self.patches = PreNorm(), PreNorm()
        self.layers = nn.ModuleList(Both() for _ in range(2))

    def forward(self, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.words(self.text(text)), self.patches(self.image(image))
        for layer in self.layers:
            x, y = layer(x, y)
        return x, y


def test_two_streams_through_one_attention() -> None:
    inputs = torch.randn(2, 5, 8), torch.randn(2, 3, 8)
    assert_connected(TwoModalities(), {"TwoModalities": 8, "TwoModalities'": 8}, *inputs)
    name = rewire.inspect(TwoModalities(), inputs).trunks[0].name
    rewired = rewire.compile(TwoModalities(), "ancre-none", trunks=[name], example_inputs=inputs)  # the other is plain
    assert list(rewire.connections(rewired)) == [name]


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        a, b = self.shift(t).chunk(2, -1)
        return x * (1 + a) + b


class Levels(nn.Module):
    """Stable Cascade's way: one loop calls the blocks of all levels, and what scales their states."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Linear(8, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.levels = nn.ModuleList(nn.ModuleList([PreNorm(), Shift(), PreNorm(), Shift()]) for _ in range(2))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = self.stem(x)
        for level, down in zip(self.levels, self.down, strict=True):
            x = down(x[:, ::2])
            for block in level:
                if isinstance(block, PreNorm):  # noqa: SIM108
                    x = block(x)
                else:
                    x = block(x, t)
        return x


def test_posts_of_several_streams_in_one_place() -> None:
    plain = assert_connected(Levels(), {"levels.0": 4, "levels.1": 4}, torch.randn(2, 8, 8), torch.randn(2, 1, WIDTH))
    assert "trunk=(0, 1)" in str(rewire.source(plain, ""))


class GatedBySum(nn.Module):
    """A gate that is made of the sum scales it, by numbers that a call makes together."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g, self.mlp, self.gate = Mlp(), Mlp(), Mlp(), nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.f(x))
        h = self.g(x)
        a, b = torch.sigmoid(self.gate(torch.cat([x, h], -1))).chunk(2, -1)
        x = a * x + b * h
        return self.norm2((x + self.mlp(x)).clamp(-1e4, 1e4))


class GatedBySequence(GatedBySum):
    """D-FINE's way: what the gate is made of is in other dimensions, on a way through weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.f(x))
        a, b = torch.sigmoid(self.gate(x.transpose(1, 2).mean(-1)))[:, None].chunk(2, -1)
        x = a * x + b * self.g(x)
        return self.norm2((x + self.mlp(x)).clamp(-1e4, 1e4))


@pytest.mark.parametrize("block", [GatedBySum, GatedBySequence])
def test_what_is_made_of_a_sum_beside_the_state_is_no_state(block: type[nn.Module]) -> None:
    assert_connected(Stack(block, 3), {"layers": 6}, vectors())


class TurnsInside(nn.Module):
    """A stream ends inside a block, where a norm reads turned states; another one starts there."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.norm, self.g = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        x = self.norm(x.transpose(1, 2))
        return x + self.g(x)


def test_what_follows_a_stream_is_not_that_of_the_next() -> None:
    assert_connected(Stack(TurnsInside, 3), {"layers": 2, "layers'": 2}, vectors(length=WIDTH))


class Shortened(nn.Module):
    """Funnel's way: queries are shortened between two levels, and a skip leads around the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.levels = nn.ModuleList(nn.ModuleList(Cross() for _ in range(2)) for _ in range(2))
        self.decoder = nn.ModuleList(Cross() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.stem(x), []
        for number, level in enumerate(self.levels):
            for first, block in enumerate(level):
                query = x[:, ::2] if number and not first else x
                x = block(query, x)
                kept.append(x)
        x = x.repeat_interleave(2, 1) + kept[1]
        for block in self.decoder:
            x = block(x, x)
        return x


def test_a_skip_around_blocks_that_read_the_state_ends_the_stream() -> None:
    assert_connected(Shortened(), {"levels.0": 2, "levels.1": 2, "decoder": 2}, torch.randn(2, 8, 8))


class InADict(PreNorm):
    """What changes the state in a dict returns nothing."""

    def change(self, state: dict[str, Tensor]) -> None:
        state["x"] = self(state["x"])


class DictStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        state = {"x": self.inp(x)}
        for layer in self.layers:
            layer.change(state)
        return self.out(state["x"])


def test_methods_that_change_a_dict_and_return_nothing() -> None:
    plain = assert_connected(DictStack(InADict), {"layers": 2 * DEPTH}, vectors())
    assert "depth.leave(None, state)" in str(rewire.source(plain, "layers.0"))
