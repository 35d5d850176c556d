"""Attention over depth in shipped models: the same outputs and gradients from their plain form, in float64."""

from __future__ import annotations

import torchvision_stub  # noqa: F401  isort: skip
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.inkling2.configuration_inkling2 import Inkling2TextConfig
from transformers.models.inkling2.modeling_inkling2 import Inkling2TextModel

import rewire
from rewire.patterns import Pattern, pattern
from rewire.registry import Registry

D = 16
LENGTH = 7


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch, double_connections: None) -> None:
    """Casts of float64 tensors to float32, in the models' code, do nothing; connection weights may be float64."""
    cast, to = Tensor.float, Tensor.to

    def float_or_double(x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 else cast(x)

    def to_or_double(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return float_or_double(x) if args == (torch.float32,) else to(x, *args, **kwargs)

    monkeypatch.setattr(Tensor, "float", float_or_double)
    monkeypatch.setattr(Tensor, "to", to_or_double)


@pytest.fixture
def inkling2_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says that the convolutions of keys and values compute their weights from what keys and values are made of."""
    registry: Registry[Pattern] = Registry("pattern", "patterns", entry_points="rewire.patterns")
    monkeypatch.setattr(pattern, "_REGISTRY", registry)
    beside = {f"{{branch}}.{way}_sconv.weight_proj": way for way in "kv"}
    pattern.register_pattern("inkling2", Pattern("", lambda model: isinstance(model, Plain), beside=beside))


class PlainLayer(nn.Module):
    """A layer of Inkling 2 with plain residual adds."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.full = layer.attention_type == "full_attention"
        self.attention_type = layer.attention_type
        self.norm = layer.q_input_layernorm if self.full else layer.input_layernorm
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.post_attention_convolution = layer.post_attention_convolution
        self.post_mlp_convolution = layer.post_mlp_convolution

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        residual = hidden_states
        x = self.norm(hidden_states)
        others = {"key_hidden_states": x, "value_hidden_states": x} if self.full else {}
        x, _ = self.self_attn(x, attention_mask=attention_mask, position_ids=position_ids, **others)
        hidden_states = residual + self.post_attention_convolution(x)
        residual = hidden_states
        x = self.mlp(self.post_attention_layernorm(hidden_states))
        return residual + self.post_mlp_convolution(x)


class Plain(nn.Module):
    """Inkling 2 without attention residuals, of the same modules."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(PlainLayer, model.layers))
        self.norm = model.norm

    def forward(self, x: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, attention_mask, position_ids)
        return self.norm(x)


def inkling2() -> Inkling2TextModel:
    """Five layers in three groups of at most two, three of them with separate queries."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"head_dim": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Inkling2TextConfig(
        **{"hidden_size": D, "vocab_size": 32, "num_hidden_layers": 5, "n_layers_per_attn_res_block": 2},
        **sizes,
        **{f"swa_{name}": size for name, size in sizes.items()},
        layer_types=["hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
        **{"d_rel": 4, "rel_extent": 8, "sliding_window_size": 8, "pad_token_id": 0},
        **{"moe_intermediate_size": 12, "n_routed_experts": 4, "num_experts_per_tok": 2},
        attn_implementation="eager",
        experts_implementation="batched_mm",
    )
    model = Inkling2TextModel(config).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def query_rows(model: Any) -> list[nn.Parameter]:
    """The queries of the reads of units 2, 3, .. and of the output, in turn."""
    reads = [read for layer in model.layers for read in (layer.attention_input, layer.mlp_input)]
    return [read.query for read in (*reads[1:], model.final_input)]


def counterparts(theirs: Any, plain: nn.Module, ours: Any) -> dict[nn.Parameter, list[nn.Parameter]]:
    """For weights of theirs, queries aside, those of ours in their place: the same ones, and copies of norms."""
    found = {parameter: [parameter] for parameter in plain.parameters()}
    for layer, rewired in zip(theirs.layers, ours.layers, strict=True):
        for way in "kv":
            norm = getattr(layer, f"{way}_input_layernorm", None) or layer.input_layernorm
            copy = rewired.norm.get_submodule(f"depth_connections.{way}")
            found.setdefault(norm.weight, []).append(copy.weight)
    return found


def check_equal(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert theirs.norm() > 1e-6
        assert (ours - theirs).norm() <= 1e-10 * theirs.norm()


@pytest.mark.usefixtures("double", "inkling2_pattern")
def test_inkling2() -> None:
    """Layers with a sliding window have one query and one norm for all three inputs: here three times the same."""
    theirs = inkling2()
    plain = Plain(theirs)
    x, upstream = torch.randn(2, 2, LENGTH, D, dtype=torch.float64)
    positions = torch.arange(LENGTH)[None]
    mask = torch.full((LENGTH, LENGTH), -math.inf, dtype=torch.float64).triu(1)[None, None]
    options: dict[str, Any] = {"block": 4, "qkv": True, "normed": True, "separate_norms": True}
    ours = rewire.compile(plain, "attnres", start="paper", example_inputs=(x, mask, positions), **options)
    (connection,) = rewire.connections(ours).values()
    rows, weights = query_rows(theirs), counterparts(theirs, plain, ours)
    ways = [1, 3] * (len(rows) // 2 - 1) + [1, 1]  # of feed-forwards and attentions; of the output
    with torch.no_grad():
        apart = [row.view(-1, D).expand(n, D) for row, n in zip(rows, ways, strict=True)]
        connection.queries = nn.Parameter(torch.cat(apart) / D**0.5 / connection.stored_in["queries"])
        for weight, places in weights.items():
            for place in places:
                place.copy_(weight)

    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    masks = {"full_attention": mask, "sliding_attention": mask, "linear_attention": None}
    want = theirs(inputs_embeds=a, attention_mask=masks, position_ids=positions, use_cache=False).last_hidden_state
    got = ours(b, mask, positions)
    check_equal([got], [want])
    want.backward(upstream)
    expected, of_rows = [a.grad, *(weight.grad for weight in weights)], [row.grad.view(-1, D) for row in rows]
    theirs.zero_grad()
    got.backward(upstream)
    check_equal([b.grad, *(sum(place.grad for place in places) for places in weights.values())], expected)
    of_ours = (connection.queries.grad / D**0.5 / connection.stored_in["queries"]).split(ways)
    summed = [g if len(g) == len(of_theirs) else g.sum(0, True) for g, of_theirs in zip(of_ours, of_rows, strict=True)]
    check_equal(summed, of_rows)
