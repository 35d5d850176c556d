"""Hyper-connections of shipped models: the same outputs and gradients from their plain form, in float64."""

from __future__ import annotations

import torchvision_stub  # noqa: F401  isort: skip
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import AutoModel

import rewire
from rewire.patterns.tiny import tiny_config

pytestmark = pytest.mark.usefixtures("double_connections")
IDS = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(1))
#: The scheme's weights, shaped as ours are.
Weights = dict[str, Tensor]


class Double(TorchFunctionMode):
    """What the models' code casts to float32 is cast to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


class Fixed(nn.Module):
    """A module with what the model called it with, beside the hidden states; of several results the first."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.given = module, ((), {})
        module.register_forward_pre_hook(self.remember, with_kwargs=True)

    def remember(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.given = args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}

    def forward(self, x: Tensor) -> Tensor:
        args, kwargs = self.given
        out = self.module(x, *args, **kwargs)
        return out if isinstance(out, Tensor) else out[0]


class PlainLayer(nn.Module):
    """A layer with plain residual adds, of the modules of a shipped one."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        normed = hasattr(layer, "input_layernorm")
        self.input_layernorm = layer.input_layernorm if normed else nn.Identity()
        self.attention = Fixed(layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn)
        self.post_attention_layernorm = layer.post_attention_layernorm if normed else nn.Identity()
        self.mlp = Fixed(layer.mlp)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Plain(nn.Module):
    """The plain residual form of an architecture."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embed_tokens = model.embed_tokens
        self.layers = nn.ModuleList(map(PlainLayer, model.layers))
        self.norm = model.norm if hasattr(model, "norm") else nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def shipped(model_type: str, **sizes: float) -> Any:
    """A small one in float64, all weights away from their start."""
    config = tiny_config(model_type)
    for name, size in sizes.items():
        setattr(config, name, size)
    model = AutoModel.from_config(config).double().eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others are for 32 bits
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def check(model: Any, topology: str, theirs: Callable[[Any], Weights], **options: Any) -> None:
    """Rewire the plain form of ``model``, with the scheme's weights, and compare."""
    plain = Plain(model)
    with Double():
        want = model(input_ids=IDS, use_cache=False).last_hidden_state
        residual = plain(IDS)
    rewired = rewire.compile(plain, topology, start="paper", example_inputs=(IDS,), validate=False, **options)
    (connection,) = rewire.connections(rewired).values()
    ours = dict(connection.named_parameters())
    weights = theirs(model)
    assert {name: value.shape for name, value in ours.items()} == {name: w.shape for name, w in weights.items()}
    for name, value in weights.items():
        ours[name].data = value.detach() / connection.stored_in[name]
    with Double():
        got = rewired(IDS)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert (got - residual).abs().max() > 1e-2  # the scheme matters
    upstream, shared = torch.randn_like(want), dict(plain.named_parameters())
    own = list(dict.fromkeys(model.parameters()))
    given: dict[str, Any] = {"grad_outputs": upstream, "allow_unused": True, "materialize_grads": True}
    with Double():
        wanted = dict(zip(own, torch.autograd.grad(want, own, **given), strict=True))
        same = [dict(rewired.named_parameters())[name] for name in shared]
        found = list(torch.autograd.grad(got, [*same, *ours.values()], **given))
    for number, name in enumerate(ours, start=len(shared)):
        found[number] = found[number] / connection.stored_in[name]
    with torch.no_grad():
        for parameter in own:
            parameter.data = wanted[parameter]
        of_scheme = theirs(model)  # which only puts them in another order
    expected = [wanted[parameter] for parameter in shared.values()] + [of_scheme[name] for name in ours]
    for name, one, other in zip([*shared, *ours], found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10, msg=lambda why, name=name: f"{name}: {why}")
    assert all(grad.abs().max() > 1e-8 for grad in found[len(shared) :])


def manifold(model: Any) -> Weights:
    """Of DeepSeek-V4, and of those that took its code; they go from stream (row) to stream (column) in H_res."""
    units = [unit for layer in model.layers for unit in (layer.attn_hc, layer.ffn_hc)]
    n = units[0].hc_mult
    columns = torch.arange(2 * n)
    if len(units[0].base) > 2 * n:
        columns = torch.cat([columns, 2 * n + torch.arange(n * n).view(n, n).T.flatten()])
    found = {
        "static": torch.stack([unit.base[columns] for unit in units]),
        "dynamic": torch.stack([unit.fn[columns].T for unit in units]),
        "scale": torch.stack([unit.scale for unit in units]),
    }
    if hasattr(model.hc_head, "hc_fn"):
        head = model.hc_head
        found |= {"last_static": head.hc_base * 1, "last_dynamic": head.hc_fn.T, "last_scale": head.hc_scale * 1}
    return found


def gated(model: Any) -> Weights:
    """Of Qwen4-Exp."""
    units = [unit for layer in model.layers for unit in (layer.attn_hyper_connection, layer.mlp_hyper_connection)]
    reads = [*units, model.hyper_connection_mixer]
    n = model.config.hc_count
    return {
        "norm": torch.stack([read.hc_norm.weight.view(n, -1) for read in reads]),
        "down": torch.stack([read.input_mix_weight_down.weight.T for read in reads]),
        "up": torch.stack([read.input_mix_weight_up.weight.T for read in reads]),
        "inject": torch.stack([unit.block_inject_weight.weight.T for unit in units]),
    }


def test_deepseek_v4() -> None:
    check(shipped("deepseek_v4"), "mhc", manifold, output="learned", eps=1e-6)


def test_glm5_next() -> None:
    check(shipped("glm5_next_text", linear_num_heads=2, linear_head_dim=8), "mhc", manifold, eps=1e-6, norm_eps=1e-5)


def test_hy_v4() -> None:
    model = shipped("hy_v4", hc_magnitude=3.0)
    options = {"residual": "identity", "output": "learned", "magnitude": 3.0, "eps": 1e-6, "norm_eps": 1e-5}
    check(model, "mhc", manifold, **options)


def test_qwen4_exp() -> None:
    model = shipped("qwen4_exp_text", hc_lowrank=8, linear_num_key_heads=2, linear_num_value_heads=2)
    check(model, "hc-gated", gated, rank=model.config.hc_lowrank)
