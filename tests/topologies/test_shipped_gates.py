"""Schemes of shipped models: the plain form of each architecture, rewired, computes what the shipped one computes.

Everything is float64, connection weights, too (as modules they are float32 only): equal to 1e-10, with all gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.doge.modeling_doge import DogeDecoderLayer
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextLaurelBlock
from transformers.models.neomme.modeling_neomme import NeoMMEEncoderLayer

import rewire
from rewire.patterns.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("double_connections")
IDS = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(1))
Weights = dict[str, Sequence[Tensor | None]]


def drawn(model: nn.Module) -> nn.Module:
    """In float64, all weights away from their start."""
    torch.manual_seed(0)
    model = model.double().eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others are for 32 bits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def state_of(model: nn.Module) -> Tensor:
    out: Tensor = model(input_ids=IDS).last_hidden_state
    return out


def check(
    shipped: nn.Module,
    plain: nn.Module,
    topology: str,
    theirs: Weights,
    run: Callable[[nn.Module], Tensor] = state_of,
    granularity: Any = "auto",
    transposed: bool = False,
    **options: Any,
) -> None:
    """Rewire ``plain`` and compare; ``theirs`` are the scheme's weights, unit by unit, under the names of ours.

    None in their place is a unit that has none, and gets the value at which the scheme is the plain network.
    """
    rewired = rewire.compile(
        plain, topology, start="paper", granularity=granularity, example_inputs=((), {"input_ids": IDS}),
        validate=False, **options,
    )  # fmt: skip
    (connection,) = rewire.connections(rewired).values()
    ours = dict(connection.named_parameters())
    assert ours.keys() == theirs.keys()
    layout = connection.layout
    neutral = layout.topology.for_start("preserve").parameters(layout.dims, "preserve")
    for name, values in theirs.items():
        rows = [neutral[name][t] if value is None else value.detach() for t, value in enumerate(values)]
        stored = torch.stack([row.T if transposed and row.dim() > 1 else row for row in rows]).double()
        ours[name].data = stored / connection.stored_in[name]
    outs = run(shipped), run(rewired)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-10, atol=1e-10)
    assert (outs[0] - run(plain)).abs().max() > 1e-3  # the scheme matters
    upstream = torch.randn_like(outs[0])
    shared = [name for name, _ in plain.named_parameters()]
    flat = [(name, t, value) for name, values in theirs.items() for t, value in enumerate(values) if value is not None]
    of_shipped = gradients(outs[0], shipped, shared, [value for _, _, value in flat], upstream)
    of_rewired = gradients(outs[1], rewired, shared, list(ours.values()), upstream)
    of_ours = zip(ours, of_rewired[len(shared) :], strict=True)
    own = {name: gradient / connection.stored_in[name] for name, gradient in of_ours}
    of_rows = [own[name][t].T if transposed and value.dim() > 1 else own[name][t] for name, t, value in flat]
    for want, got in zip(of_shipped, [*of_rewired[: len(shared)], *of_rows], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def gradients(out: Tensor, model: nn.Module, shared: list[str], more: list[Tensor], upstream: Tensor) -> Any:
    named = dict(model.named_parameters())
    return torch.autograd.grad(out, [*(named[name] for name in shared), *more], upstream, allow_unused=True)


# -- scales, biases and gates ------------------------------------------------------------------------------------------


class Add(nn.Module):
    """In place of a module that adds branch and shortcut, in whatever order."""

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return one + other


def without(model: nn.Module, *names: str) -> Any:
    """A copy that is no known architecture, with `Add` in place of the submodules of such names."""
    plain: Any = copy.deepcopy(model)
    plain.config.model_type = "plain"
    for layer in plain.layers:
        for name in names:
            setattr(layer, name, Add())
    return plain


def test_muse_spark() -> None:
    names = ("post_attention_residual_gate", "post_feedforward_residual_gate")
    shipped: Any = drawn(tiny_model("muse_spark_text"))
    gates = [getattr(layer, name).gate for layer in shipped.layers for name in names]
    with torch.no_grad():
        gates[0].mul_(10)  # some at the smallest weight of the shortcut
    check(shipped, without(shipped, *names), "variance-gate", {"gates": gates})


class PlainDogeLayer(DogeDecoderLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def test_doge() -> None:
    shipped: Any = drawn(tiny_model("doge")).model
    scales = [getattr(x, f"{name}_residual") for x in shipped.layers for name in ("input", "post_attention")]
    plain = without(shipped)
    for layer in plain.layers:
        layer.__class__ = PlainDogeLayer
        del layer.input_residual, layer.post_attention_residual
    check(shipped, plain, "residual-scale", {"shortcut": scales})


class ZayaLayers(nn.Module):
    """The layers of ZAYA1 in float64: the model itself casts its states to float32."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embed_tokens, self.layers, self.rotary_emb = model.embed_tokens, model.layers, model.rotary_emb
        self.config = model.config

    def forward(self, input_ids: Tensor) -> Tensor:
        x, router = self.embed_tokens(input_ids), None
        positions = torch.arange(x.shape[1])[None]
        for kind, layer in zip(self.config.layer_types, self.layers, strict=True):
            masks = {"causal": None, "conv": None}
            x, router = layer(x, router, masks, position_embeddings=self.rotary_emb(x, positions, kind))
        return x


def test_zaya() -> None:
    names = ("post_attention_residual_scale", "post_mlp_residual_scale")
    shipped: Any = ZayaLayers(drawn(tiny_model("zaya")).model)
    units = [getattr(layer, name) for layer in shipped.layers for name in names]
    theirs = {
        "shortcut": [unit.residual_scale for unit in units],
        "branch": [unit.hidden_states_scale for unit in units],
        "shortcut_bias": [unit.residual_bias for unit in units],
        "branch_bias": [unit.hidden_states_bias for unit in units],
    }
    options = {"branch": True, "bias": True}
    check(shipped, without(shipped, *names), "residual-scale", theirs, lambda m: m(input_ids=IDS), **options)


# -- the input read again, and skips -----------------------------------------------------------------------------------


class PlainNeoMMELayer(NeoMMEEncoderLayer):
    def forward(self, hidden_states: Tensor, initial_hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), value_embeds=args[0], **kwargs)
        hidden_states = hidden_states + self.residual_multiplier * attended
        mlp_output = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + self.residual_multiplier * mlp_output


def test_neomme() -> None:
    shipped: Any = drawn(tiny_model("neomme")).model
    plain = without(shipped)
    for layer in plain.layers:
        layer.__class__ = PlainNeoMMELayer
        del layer.lambdas
    lambdas = [[x.clone().requires_grad_() for x in layer.lambdas.detach()] for layer in shipped.layers]
    for layer, pair in zip(shipped.layers, lambdas, strict=True):
        del layer.lambdas
        layer.lambdas = pair  # apart, to get gradients each
    newest, first = ([x for pair in lambdas for x in (pair[i], None)] for i in range(2))  # the MLPs have none
    theirs: Weights = {"resid_lambdas": newest, "x0_lambdas": first}
    check(shipped, plain, "x0-lambdas", theirs, granularity="sublayer", shortcut="state")


def hooked(plain: Any, before: Callable[[int, Tensor], Tensor], after: Callable[[int, Tensor, Tensor], Tensor]) -> Any:
    """A copy whose layer i gets ``before(i, x)`` in place of x, and returns ``after(i, x, y)`` in place of y."""
    shipped = copy.deepcopy(plain)
    for i, layer in enumerate(shipped.layers):
        layer.register_forward_pre_hook(lambda _, args, i=i: (before(i, args[0]), *args[1:]))
        layer.register_forward_hook(lambda _, args, out, i=i: after(i, args[0], out))
    return shipped


def nanochat(depth: int) -> Any:
    """transformers' class: nanochat's blocks in plain residual form."""
    model: Any = tiny_model("nanochat").model
    more = [copy.deepcopy(model.layers[i % len(model.layers)]) for i in range(depth)]
    model.layers, model.config.num_hidden_layers = nn.ModuleList(more), depth
    return drawn(model)


def scalars(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [x.requires_grad_() for x in torch.randn(count, generator=generator, dtype=torch.float64).unbind()]


def test_nanochat() -> None:
    """nanochat's lambdas, which transformers' class leaves out."""
    plain, newest, first, inputs = nanochat(4), scalars(4), scalars(8)[4:], list[Tensor]()

    def before(i: int, x: Tensor) -> Tensor:
        inputs[:] = inputs if i else [x]
        return newest[i] * x + first[i] * inputs[0]

    shipped = hooked(plain, before, lambda i, x, y: y)
    check(shipped, plain, "x0-lambdas", {"resid_lambdas": newest, "x0_lambdas": first})


@pytest.mark.parametrize("depth", [4, 5])
def test_modded_nanogpt(depth: int) -> None:
    """Its skips, between transformers' nanochat blocks; of an odd number of blocks, the middle one has none."""
    plain, skips, left = nanochat(depth), scalars(depth // 2), list[Tensor]()

    def before(i: int, x: Tensor) -> Tensor:
        return x + skips[i - (depth - depth // 2)] * left.pop() if i >= depth - depth // 2 else x

    def after(i: int, x: Tensor, y: Tensor) -> Tensor:
        if i < depth // 2:
            left.append(y)
        return y

    check(hooked(plain, before, after), plain, "unet", {"skip_weights": skips})


# -- LAuReL ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_gemma3n(weighted: bool) -> None:
    """Gemma 3n's low-rank block without its norm, around blocks of its plain sibling; with residual weights, too.

    The norm is not in the paper. Gemma 3n itself also feeds it the normed state, and has AltUp around all of it.
    """
    plain: Any = drawn(tiny_model("gemma3_text")).model
    depth, width = len(plain.layers), plain.config.hidden_size
    config = Gemma3nTextConfig(hidden_size=width, num_attention_heads=2, laurel_rank=4)
    blocks = [drawn(Gemma3nTextLaurelBlock(config)) for _ in range(depth)]
    for block in blocks:
        block.post_laurel_norm = nn.Identity()
    logits = [x.requires_grad_() for x in torch.randn(depth, 2, dtype=torch.float64).unbind()]

    def after(i: int, x: Tensor, y: Tensor) -> Tensor:
        a, b = 1.5 * logits[i].softmax(0) if weighted else torch.ones(2)
        return a * (y - x) + b * blocks[i](x)  # type: ignore[no-any-return]

    theirs: Weights = {
        "down": [block.linear_left.weight for block in blocks],
        "up": [block.linear_right.weight for block in blocks],
    }
    shipped = hooked(plain, lambda i, x: x, after)
    options: Any = {"total": 1.5} if weighted else {}
    theirs = {**theirs, "logits": logits} if weighted else theirs
    check(shipped, plain, "laurel-lr", theirs, transposed=True, rank=4, **options)
