"""Norms of their own for queries, keys and values: copies, which start as the norm that the model has."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import NanoGPT, token_ids
from torch import Tensor, nn

import rewire
from rewire.patterns.tiny import tiny_model

OPTIONS: dict[str, dict[str, Any]] = {"dca": {}, "muddformer": {}, "attnres": {"qkv": True}}


def separate(model: nn.Module, topology: str = "dca", **options: Any) -> nn.Module:
    return rewire.compile(model, topology, separate_norms=True, **OPTIONS[topology], **options)


def copies(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if "norm.depth_connections" in name}


def outputs(model: nn.Module) -> Tensor:
    logits: Tensor = model(input_ids=token_ids(vocabulary=90), use_cache=False).logits
    return logits


@pytest.mark.parametrize("topology", OPTIONS)
def test_they_start_as_one_norm(topology: str) -> None:
    """Bitwise, and their gradients sum to that of the one norm."""
    model = tiny_model("llama")
    one, apart = rewire.compile(model, topology, **OPTIONS[topology]), separate(copy.deepcopy(model), topology)
    grads = []
    for rewired in (one, apart):
        out = outputs(rewired)
        (out * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
        grads.append({name: p.grad for name, p in rewired.named_parameters()})
    assert torch.equal(outputs(one), outputs(apart))
    norms = [name for name in grads[0] if name.endswith("input_layernorm.weight")]
    assert len(copies(apart)) == 2 * len(norms)
    for name in norms:
        place = name.removesuffix(".weight")
        parts = [grads[1][name], *(grads[1][f"{place}.depth_connections.{way}.weight"] for way in "kv")]
        assert all(part.norm() > 0 for part in parts)
        torch.testing.assert_close(sum(parts), grads[0][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", "kv")
def test_each_way_has_its_own(way: str) -> None:
    """A norm of weight zero makes what its projection sees zero, and no other."""
    rewired = separate(tiny_model("llama"))
    with torch.no_grad():
        for name, parameter in copies(rewired).items():
            if f"connections.{way}." in name:
                parameter.zero_()
    made: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
    for name, module in rewired.named_modules():
        if name.endswith("_proj") and name[-6] in made:
            module.register_forward_hook(lambda _module, _args, out, to=made[name[-6]]: to.append(out))
    outputs(rewired)
    for other, found in made.items():
        assert found and all(out.any() == (other != way) for out in found)


def test_restored_models_have_one_norm() -> None:
    model = tiny_model("llama")
    rewired = separate(model)
    plain = rewire.restore(rewired)
    assert list(plain.state_dict()) == list(model.state_dict())
    assert not copies(model) and copies(rewired)
    assert torch.equal(outputs(plain), outputs(model))


@pytest.mark.parametrize("weights", ["all", "connections"])
def test_saved_and_loaded(weights: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    base = copy.deepcopy(model)
    rewired = separate(model)
    with torch.no_grad():
        for parameter in copies(rewired).values():
            parameter.mul_(1 + torch.rand_like(parameter))
    rewire.save(rewired, tmp_path, weights=weights)
    loaded = rewire.load(tmp_path, base, weights=weights)
    assert torch.equal(outputs(loaded), outputs(rewired))
    assert torch.equal(outputs(copy.deepcopy(rewired)), outputs(rewired))


def test_on_the_meta_device_and_in_bfloat16() -> None:
    with torch.device("meta"):
        model = tiny_model("llama")
    assert all(parameter.is_meta for parameter in copies(separate(model, validate=False)).values())
    rewired = separate(tiny_model("llama")).bfloat16()
    assert {parameter.dtype for parameter in copies(rewired).values()} == {torch.bfloat16}
    assert outputs(rewired).dtype == torch.bfloat16


def test_checkpointed_blocks() -> None:
    grads = []
    for checkpointed in (False, True):
        rewired = separate(tiny_model("llama"), "muddformer").train()
        if checkpointed:
            rewired.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        outputs(rewired).square().mean().backward()
        grads.append([parameter.grad for parameter in copies(rewired).values()])
    torch.testing.assert_close(*grads)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x))


class Residuals(nn.Module):
    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Unnormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x.tanh())


@pytest.mark.parametrize(
    ("model", "inputs"),
    [(lambda: nn.Sequential(Unnormed(), Unnormed()), (torch.randn(2, 5, 32),)), (lambda: tiny_model("bert"), None)],
    ids=["no norm", "post-norm"],
)
def test_nothing_to_copy(model: Any, inputs: Any) -> None:
    with pytest.raises(rewire.UnsupportedTopology, match=r"separate norms.*none stands between.*separate_norms=True"):
        separate(model(), "muddformer", example_inputs=inputs)


def test_no_attention() -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(2)))
    with pytest.raises(rewire.UnsupportedTopology, match=r"muddformer.*2 units.*leave out separate_norms=True"):
        separate(Residuals(blocks), "muddformer", example_inputs=(torch.randn(2, 32),))


def test_a_hand_written_model() -> None:
    model = NanoGPT().eval()
    rewired = separate(model, "attnres", example_inputs=(token_ids(),))
    torch.testing.assert_close(rewired(token_ids()), model(token_ids()))
    assert len(list(rewired.parameters())) > len(list(model.parameters())) + 1
