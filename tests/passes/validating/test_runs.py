"""What a comparison holds in memory, and what its sketches of gradients keep."""

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

import rewire
from rewire.passes.validating import runs
from rewire.passes.validating.runs import Setting, values_for
from rewire.passes.validating.tensors import sketch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


class Net(nn.Module):
    """Nearly all of its memory are weights, none of which is much of it."""

    def __init__(self, width: int = 256, depth: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.fixture
def net() -> nn.Module:
    return Net()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_validation_holds_at_most_1_3_models(net, dtype, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    peak = importlib.import_module("memory").Peak
    if dtype == torch.bfloat16:
        monkeypatch.setattr(runs, "LARGE", 0)
    net, x = net.to(dtype), torch.randn(1, 256, dtype=dtype)
    with peak() as counted:
        rewire.compile(net, "denseformer", example_inputs=(x,))
    assert counted.most < 1.3 * sum(p.numel() * p.element_size() for p in net.parameters())


def test_what_validation_perturbs_is_freed(net):
    values = values_for(Setting("", perturbed=True), net, net)
    memory = [value.untyped_storage()._weak_ref() for value in values.values()]
    runs.run(Setting("", perturbed=True), net, ((torch.randn(1, 256),), {}), values)
    del values
    assert all(torch.UntypedStorage._expired(ref) for ref in memory)


@pytest.mark.parametrize("topology", ["denseformer", "hc-static", "ancre-ingoing"])
def test_moved_weights_mix_as_much_in_deep_models(topology):
    """Stored are multiples of units: what is looked at are the weights that the formulas see."""
    rewired = rewire.compile(Net(64, 12), topology, example_inputs=(torch.randn(1, 64),), validate=False)
    (connection,) = rewire.connections(rewired).values()
    start = connection.matrix()
    for name, value in runs.movement(rewired).items():
        rewired.get_parameter(name).data.copy_(value)
    assert 0.05 < (connection.matrix() - start).abs().max() <= 0.5


def test_tied_values_differ_from_block_to_block(net, monkeypatch):
    monkeypatch.setattr(runs, "LARGE", 0)
    values = values_for(Setting("", perturbed=True, moved=True, dtype=torch.float64), net, net)
    weights = [values[f"blocks.{n}.1.weight"] for n in range(16)]
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    assert all((a != b).float().mean() > 0.99 for a in weights for b in weights if a is not b)
    assert {value.dtype for value in values.values()} == {torch.float64}
    assert torch.equal(weights[0], net.blocks[0][1].weight.double())


@pytest.mark.parametrize("elements", [1, 5000, 65536, 1_000_003])
def test_sketches_preserve_norms(elements):
    gradient = torch.randn(elements)
    made = sketch(gradient)
    assert made.numel() <= max(65536, elements / 16 + 65536)
    assert float(made.norm()) == pytest.approx(float(gradient.norm() * (1 if elements <= 65536 else 1.04)), rel=0.05)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_difference_in_a_row_or_a_column_is_in_the_sketch(dim):
    gradient = torch.randn(1024, 1024)
    other = gradient.clone()
    other.select(dim, 17).mul_(1.01)
    difference = float((sketch(gradient) - sketch(other)).norm())
    assert difference == pytest.approx(float((gradient - other).norm()), rel=0.3)
