"""Autograd functions as operators of torch.compile's graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from every_topology import FAMILIES, mixed
from models import PreNorm, Stack, vectors
from slow_cases import one_in
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from rewire.kernels import switch
from rewire.mixes import traced

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo itself hides it


def targets_in_graph(model: nn.Module, x: Tensor) -> list[str]:
    """The names of all that Dynamo's graph calls."""
    called = list[str]()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs = [module.graph for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
        called.extend(str(node.target) for each in graphs for node in each.nodes)
        return graph

    torch.compile(model, fullgraph=True, backend=backend)(x)
    return called


@pytest.mark.parametrize("key", one_in(8, FAMILIES))
def test_graphs_have_no_functions_of_autograd(key: str) -> None:
    """Which Dynamo would follow both ways, and torch's cache would not take."""
    assert "autograd_function_apply" not in targets_in_graph(mixed(Stack(PreNorm, depth=4), key), vectors())


def test_graphs_have_operators() -> None:
    called = targets_in_graph(mixed(Stack(PreNorm, depth=4), "ancre-ingoing"), vectors())
    assert {"rewire.claim.default", "rewire.mix_of.default"} <= {*called}


def assert_compiles(backend: str) -> None:
    model = mixed(Stack(PreNorm, depth=4), "ancre-ingoing")
    parameters = list(model.parameters())
    runs = model, torch.compile(model, fullgraph=True, backend=backend)
    expected, actual = (torch.autograd.grad(run(vectors()).square().sum(), parameters) for run in runs)
    torch.testing.assert_close(expected, actual)


def test_graphs_that_run_as_they_are() -> None:
    """Without AOTAutograd, operators run the functions."""
    assert_compiles("eager")


def test_versions_of_torch_that_do_not_tell_functions_of_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "SESSIONS_ARE_SEEN", False)
    assert_compiles("aot_eager")
    assert "autograd_function_apply" in targets_in_graph(mixed(Stack(PreNorm), "ancre-ingoing"), vectors())


def test_other_states_of_the_code_are_other_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's cache may outlive a version of rewire, and processes with other settings share it."""
    before = traced._state()
    assert before == traced._STATE
    monkeypatch.setattr(switch, "ON", not switch.ON)
    assert traced._state() != before


@pytest.mark.slow
@pytest.mark.parametrize("key", ["ancre-ingoing", "attnres"])
def test_a_second_start_finds_the_graph(key: str) -> None:
    model = mixed(Stack(PreNorm, depth=2), key)
    parameters, found = list(model.parameters()), []
    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            result = torch.compile(model, fullgraph=True)(vectors())
            found.append(torch.autograd.grad(result.square().sum(), parameters))
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    torch.testing.assert_close(*found, rtol=0, atol=0)
