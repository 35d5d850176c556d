"""The topologies of docs/guides/topology.md, as a reader of that page has them: run by the page's own code."""

from __future__ import annotations

import linecache
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_nets import WIDTH, net, run

import rewire
from rewire.patterns.tiny import tiny_model
from rewire.topologies import make_topology, registry
from rewire.topologies.base import Dims

PAGE = Path(__file__).parents[2] / "docs/guides/topology.md"
DENSE = [("token-dense", {}), ("token-dense", {"block": 2}), ("static-dense", {})]
each_topology = pytest.mark.parametrize(("name", "options"), DENSE, ids=str)


@pytest.fixture(scope="module", autouse=True)
def _page() -> Iterator[None]:
    """The page's code, run from top to bottom; other tests know nothing of what it registers."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    module, text = types.ModuleType("guide"), "\n".join(blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "guide", module)
        known = registry._FACTORIES._entries  # test_docs may have run the page in this process
        own = set(re.findall(r'register_topology\("(.*?)"', text))
        patch.setattr(registry._FACTORIES, "_entries", {name: known[name] for name in known if name not in own})
        linecache.cache[str(PAGE)] = (len(text), None, text.splitlines(keepends=True), str(PAGE))
        exec(compile(text, str(PAGE), "exec"), vars(module))
        yield


def moved(name: str, options: dict[str, Any]) -> nn.Module:
    """A tiny Llama whose connection weights are off their start."""
    model = rewire.compile(tiny_model("llama"), name, validate=False, **options)
    torch.manual_seed(2)
    for connection in rewire.connections(model).values():
        connection.set_values({key: p + 0.1 * torch.randn_like(p) for key, p in connection.values().items()})
    return model


def logits(model: nn.Module) -> Tensor:
    ids = torch.arange(12).view(2, 6) + 3
    out: Tensor = model(input_ids=ids).logits
    return out


def test_an_example_is_short() -> None:
    """The page promises less than 40 lines for weights per token."""
    (example,) = re.findall(r'^@rewire.register_topology\("token-dense"\)\n.*?^```$', PAGE.read_text(), re.M | re.S)
    assert len(example.splitlines()) < 40


@each_topology
def test_starts_as_the_original(name: str, options: dict[str, Any]) -> None:
    original = tiny_model("llama")
    model = rewire.compile(original, name, **options)  # validated: outputs and gradients
    assert torch.equal(logits(model), logits(original))
    logits(model).square().sum().backward()
    for connection in rewire.connections(model).values():
        assert all(p.grad is not None and bool(p.grad.any()) for p in connection.parameters())


@each_topology
def test_saved_and_loaded(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = moved(name, options)
    assert not torch.equal(logits(model), logits(tiny_model("llama")))
    rewire.save(model, tmp_path / "saved")
    assert torch.equal(logits(rewire.load(tmp_path / "saved", tiny_model("llama"))), logits(model))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_weights_per_token(size: int) -> None:
    """Against the formula, written out; in groups of ``size`` units."""
    depth, topology = 5, make_topology("token-dense", {"block": size})
    dims, blocks = Dims(depth, WIDTH), net(depth, torch.float64)
    parameters = {
        key: torch.randn_like(p).double().requires_grad_() for key, p in topology.parameters(dims, "preserve").items()
    }
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    static, dynamic, xs = iter(parameters["static"]), iter(parameters["dynamic"]), [x]

    def read() -> Tensor:
        newest, total = nn.functional.rms_norm(xs[-1], (WIDTH,), eps=1e-6), torch.zeros_like(x)
        for i in range(len(xs)):
            if i % size == 0 or i == len(xs) - 1:
                total = total + (next(static) + (newest * next(dynamic)).sum(-1, keepdim=True)) * xs[i]
        return total

    r = x
    for block in blocks:
        xs.append(r + block(r))
        r = read()
    got = run(topology, topology.weights(parameters, dims), x, blocks, dims)
    torch.testing.assert_close(got, r)
    inputs, upstream = [x, *parameters.values()], torch.randn_like(x)
    torch.testing.assert_close(*[torch.autograd.grad(out, inputs, upstream) for out in (got, r)])


def test_static_weights_are_frozen() -> None:
    model = moved("static-dense", {})
    frozen, report = rewire.freeze(model)
    torch.testing.assert_close(logits(frozen), logits(model), rtol=1e-4, atol=1e-4)
    (connection,) = rewire.connections(model).values()
    assert report.trunks[0].edges[0] == connection.static.numel()


def test_weights_per_token_are_not() -> None:
    with pytest.raises(rewire.UnsupportedTopology, match="'token-dense' has no constant form"):
        rewire.freeze(moved("token-dense", {}))


@each_topology
def test_matrix_is_that_of_the_original(name: str, options: dict[str, Any]) -> None:
    (table,) = rewire.coefficients(rewire.compile(tiny_model("llama"), name, validate=False, **options)).values()
    assert torch.equal(table, torch.eye(*table.shape).roll(1, 1))


def test_weights_that_do_not_fit_are_named() -> None:
    topology = make_topology("token-dense", {})
    history = topology.start(torch.ones(2, WIDTH), None)[1].read(1, torch.ones(2, WIDTH))
    with pytest.raises(ValueError, match="1 states are mixed, and there are 3 weights"):
        history.mix(None, per_token=torch.ones(2, 3))
    static = make_topology("static-dense", {})
    table = static.weights(static.parameters(Dims(3), "preserve"), Dims(3))
    with pytest.raises(ValueError, match="has to return the table itself"):
        history.mix(table[2])


@pytest.mark.slow
@each_topology
def test_compiles_in_one_graph(name: str, options: dict[str, Any]) -> None:
    model = moved(name, options)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(compiled), logits(model), rtol=1e-4, atol=1e-4)
