from __future__ import annotations

import pytest
import torch
from models import LinearBlock
from torch import Tensor, nn

import rewire
from rewire.runtime.layout import Layout
from rewire.topologies import ANCRe, DenseFormer, Residual
from rewire.topologies.base import Dims, Topology


def test_sites_of_units() -> None:
    layout = Layout("trunk", Residual(), (1, 2, 2, 3), attention=(2, 3), posts=(1, 2))
    assert layout.dims == Dims(3, attention=frozenset({2, 3}))
    assert [site.unit for site in layout.sites] == [1, 2, 2, 3]
    assert [site.left for site in layout.sites] == [2, 1, 1, 0]
    assert [site.closes for site in layout.sites] == [True, False, True, True]
    assert [site.reads_qkv for site in layout.sites] == [False, True, False, True]
    assert [(site.post, site.makes_state) for site in layout.sites[1:]] == [(True, False), (True, True), (False, False)]


def test_norms_that_are_computed_again() -> None:
    """Those of units that read mixes, not those of states that the model keeps anyway."""

    def units(topology: Topology) -> list[int]:
        return [site.unit for site in Layout("trunk", topology, (1, 2, 3, 4)).sites if site.norm_again]

    assert units(Residual()) == units(ANCRe()) == []
    assert units(DenseFormer()) == [1, 2, 3, 4]
    assert units(DenseFormer(units=[3], sources=[0])) == [3]


class Picture(nn.Module):
    """A block that takes a view of channels, rows and columns together, and drops values in the order of memory."""

    def __init__(self, merges: bool) -> None:
        super().__init__()
        self.norm, self.conv, self.drop = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1), nn.Dropout(0.2)
        self.merges = merges

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.merges:
            h = h * h.view(h.shape[0], -1).std(1)[:, None, None, None]
        return x + self.conv(self.drop(h))


@pytest.mark.each_once
@pytest.mark.parametrize("topology", ["ancre-ingoing", "grn-v2", "muddformer", "hc-static", "hc-dynamic", "mhc"])
@pytest.mark.parametrize("last", [False, True])
def test_blocks_get_pictures_in_the_memory_format_that_the_model_has(
    topology: str, last: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = nn.Sequential(nn.Conv2d(8, 8, 1), *(Picture(not last) for _ in range(3))), torch.randn(2, 8, 6, 6)
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    rewired = rewire.compile(model, topology, example_inputs=(x,))
    assert "not validated" not in caplog.text
    made = []
    for each in (model, rewired):
        torch.manual_seed(1)
        made.append(each.train()(x))
    assert made[0].stride() == made[1].stride()
    torch.testing.assert_close(made[1], made[0], rtol=1e-5, atol=1e-6)


class Rows(nn.Module):
    """A block of rows between blocks of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.f, self.last = Picture(False), nn.Conv1d(8, 8, 1), Picture(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        h = x.flatten(2)
        h = h + self.f(h)
        return self.last(h.reshape(x.shape))


@pytest.mark.parametrize("topology", ["ancre-ingoing", "hc-static", "hc-dynamic"])
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_pictures_that_become_rows(topology: str, format: torch.memory_format) -> None:
    model, x = nn.Sequential(nn.Conv2d(8, 8, 1), Rows()), torch.randn(2, 8, 6, 6).contiguous(memory_format=format)
    model = model.to(memory_format=format).eval()
    rewired = rewire.compile(model, topology, example_inputs=(x,))
    torch.testing.assert_close(rewired(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("topology", [name for name in rewire.list_topologies() if name != "dca"])
def test_blocks_get_contiguous_values_with_and_without_gradients(topology: str) -> None:
    """They may take views of them."""
    net = nn.Sequential(*(LinearBlock() for _ in range(4)))
    rewired = rewire.compile(net, topology, example_inputs=(torch.randn(2, 5, 8),), start="paper")
    for block in rewired:
        block.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].is_contiguous()))
    for gradients in (True, False):
        seen: list[bool] = []
        with torch.set_grad_enabled(gradients):
            rewired(torch.randn(2, 5, 8))
        assert seen == [True] * 4
