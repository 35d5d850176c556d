"""Projections in models that no pattern knows, and layouts of fused ones."""

from __future__ import annotations

from typing import Any

import pytest
from models import Mlp, NanoGPT, SeparateAttention, token_ids, vectors
from reading_apart import Apart, Reader, check_reads
from torch import Tensor, nn

import rewire


@pytest.mark.parametrize("options", [{"multi_query": False}, {"new_decoder_architecture": True, "num_kv_heads": 2}])
def test_grouped_layouts(options: dict[str, Any]) -> None:
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=97, alibi=False, **options
    )
    check_reads(Reader(FalconForCausalLM(config)))


def test_grouped_layouts_without_a_shared_head() -> None:
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    config = GPTBigCodeConfig(n_embd=64, n_layer=2, n_head=4, vocab_size=97, n_positions=32, multi_query=False)
    check_reads(Reader(GPTBigCodeForCausalLM(config)))


class OwnBlock(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(32), attention
        self.ln_2, self.mlp = nn.LayerNorm(32), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def test_a_split_tells_the_layout() -> None:
    check_reads(Reader(NanoGPT(), (token_ids(),)))


class OtherOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        k, q, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v))


class OtherOrderOfViews(OtherOrder):
    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x).view(*x.shape[:2], 3, 32)
        k, v, q = y[:, :, 0], y[:, :, 1], y[:, :, 2]
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v))


class Shared(OtherOrder):
    """Each feature is part of all three."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x)
        q, k, v = y + y.flip(-1), y - y.flip(-1), y
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v)[..., :32])


class Functional(nn.Module):
    """Its forward uses the projections' weights, and does not call them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (nn.functional.linear(x, m.weight, m.bias) for m in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (Shared, r"'0\.attn' cannot have separate.*0': attn\.qkv, attn\.out, mlp\.up.*pattern with `qkv`.*`fused`"),
        (OtherOrder, r"'0\.attn' cannot have.*'0\.attn\.qkv' makes them in the order k, q, v"),
        (OtherOrderOfViews, r"'0\.attn' cannot have.*'0\.attn\.qkv' makes them in the order k, v, q"),
        (
            Functional,
            r"'0\.attn' cannot have.*several projections with weights: give each.*pattern whose `qkv` names",
        ),
    ],
)
def test_what_cannot_be_taken_apart(attention: type[nn.Module], message: str) -> None:
    model = nn.Sequential(*[OwnBlock(attention()) for _ in range(2)])
    with pytest.raises(rewire.UnsupportedTopology, match=message):
        rewire.compile(model, Apart(), example_inputs=(vectors(width=32),))


class LowRank(nn.Module):
    """A projection beside maps of a low rank, as people write LoRA by hand: it has no weight of its own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


def low_rank() -> nn.Module:
    attention = SeparateAttention()
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(attention, name, LowRank(getattr(attention, name)))
    return OwnBlock(attention)


def test_projections_of_several_maps() -> None:
    check_reads(Reader(nn.Sequential(*[low_rank() for _ in range(2)]), (vectors(width=32),)))


class SideBySide(nn.ModuleList):
    def forward(self, x: Tensor) -> Any:
        return sum(attention(x) for attention in self)


def test_attentions_side_by_side() -> None:
    attentions = lambda: SideBySide([SeparateAttention(), SeparateAttention()])  # noqa: E731
    model = nn.Sequential(*[OwnBlock(attentions()) for _ in range(2)])
    with pytest.raises(rewire.UnsupportedTopology, match=r"'0\.attn' cannot .* it is 2 attentions side by side"):
        rewire.compile(model, Apart(), example_inputs=(vectors(width=32),))
