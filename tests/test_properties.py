"""Properties that hold for every residual network: random depths, widths and kinds of blocks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from every_topology import (
    EVERY,
    PRE_NORM_ONLY,
    PRESERVING,
    WITH_ATTENTION,
    compiled,
    kinds_first,
    mixed,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Attention, Mlp
from torch import Tensor, nn

import rewire

SETTINGS = settings(max_examples=3, deadline=None, derandomize=True)
#: Topologies whose weights into each state sum to 1.
NORMALISED = ["ancre-ingoing", "ancre-keep", "ancre-constant", "attnres"]


class Sublayer(nn.Module):
    """``x + f(norm(x))``, or ``norm(x + f(x))``, or two branches at once, of a drawn kind."""

    def __init__(self, width: int, kind: str, style: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.style = style
        if kind == "attn":
            self.attn = Attention(width, heads=2)
        if kind != "attn" or style == "parallel":
            self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.style == "post" else self.norm(x)
        f = self.attn(y) if hasattr(self, "attn") else self.mlp(y)
        if self.style == "post":
            return self.norm(x + f)
        return x + f + self.mlp(y) if self.style == "parallel" else x + f


class Net(nn.Module):
    def __init__(self, width: int, layers: list[list[tuple[str, str]]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(*(Sublayer(width, *s) for s in layer)) for layer in layers])
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def nets(style: st.SearchStrategy[str], attention: bool = False) -> st.SearchStrategy[Net]:
    """Nets of 2 to 5 layers of one or two sublayers each, the first one an attention if asked for."""
    first = st.tuples(st.just("attn") if attention else st.sampled_from(["attn", "mlp"]), style)
    layer = st.builds(lambda a, more: [a, *more], first, st.lists(st.tuples(st.just("mlp"), style), max_size=1))

    def make(width: int, layers: list[list[tuple[str, str]]], seed: int) -> Net:
        torch.manual_seed(seed)
        return Net(width, layers)

    return st.builds(make, st.sampled_from([8, 16, 24]), st.lists(layer, min_size=2, max_size=5), st.integers(0, 99))


PRE = st.sampled_from(["pre", "parallel"])
ANY = st.sampled_from(["pre", "parallel", "post"])


def styles(key: str) -> st.SearchStrategy[Net]:
    return nets(PRE if key in PRE_NORM_ONLY else ANY, attention=key in WITH_ATTENTION)


def inputs(model: Net) -> Tensor:
    return torch.randn(2, 5, model.head.in_features)


@pytest.mark.parametrize("key", kinds_first(PRESERVING))
@SETTINGS
@given(data=st.data())
def test_preserving_topologies_preserve(key: str, data: st.DataObject) -> None:
    model = data.draw(styles(key))
    x = inputs(model)
    rewired = compiled(model, key, example_inputs=(x,))
    want, out = model(x), rewired(x)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    out.sum().backward()
    found = dict[str, Tensor]()
    for name, p in rewired.named_parameters():
        if p.grad is not None:
            place = re.sub(r"depth_connections\.[kv]\.", "", name)  # copies of a norm count for it
            found[place] = p.grad + found.get(place, 0)
    for (name, _), a in zip(model.named_parameters(), torch.autograd.grad(want.sum(), model.parameters()), strict=True):
        torch.testing.assert_close(found[name], a, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("key", NORMALISED)
@SETTINGS
@given(data=st.data())
def test_rows_of_normalised_topologies_sum_to_one(key: str, data: st.DataObject) -> None:
    for table in rewire.coefficients(mixed(data.draw(styles(key)), key)).values():
        torch.testing.assert_close(table.sum(dim=1), torch.ones(len(table)))
        assert (table >= 0).all()


@SETTINGS
@given(data=st.data())
def test_columns_of_outgoing_weights_sum_to_one(data: st.DataObject) -> None:
    for table in rewire.coefficients(mixed(data.draw(nets(ANY)), "ancre-outgoing")).values():
        torch.testing.assert_close(table.sum(dim=0), torch.ones(table.shape[1]))


@pytest.mark.parametrize("key", kinds_first(EVERY))
@SETTINGS
@given(data=st.data())
def test_two_forwards_do_not_disturb_each_other(key: str, data: st.DataObject) -> None:
    """Two forwards, the backward passes in either order, against one after the other."""
    model: Any = mixed(data.draw(styles(key)), key)
    xs = [inputs(model), inputs(model)]
    parameters = list(model.parameters())
    wanted = [torch.autograd.grad(model(x).square().sum(), parameters, allow_unused=True) for x in xs]
    losses = [model(x).square().sum() for x in xs]
    for number in (1, 0):
        actual = torch.autograd.grad(losses[number], parameters, allow_unused=True)
        for got, want in zip(actual, wanted[number], strict=True):
            assert (got is None and want is None) or torch.equal(got, want)
