"""Names and values of a model never become code: rewired forwards are Python source that is made from them."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from every_topology import mixed
from torch import Tensor, nn

import rewire

HOSTILE = [
    "ran('x')",
    "a') or ran('x') or ('",
    'a") or ran("x") or ("',
    "a\n        ran('x')\n        ",
    "]; ran('x'); x[0",
    "{ran('x')}",
    "é\u2028ran('x')",
]
AWKWARD = ["__import__", "_rewire_gate", "print", "self", "norm"]


class Block(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.mode, self.name = name, name
        self.norm, self.inner = nn.LayerNorm(8), nn.ModuleDict({name: nn.Linear(8, 8)})

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner[self.name](self.norm(x))
        return x + nn.functional.pad(y, (0, 0), mode="constant", value=0.0) * (1 + len(self.mode) / 100)


class Net(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Sequential(*(Block(name) for _ in range(3)))})

    def forward(self, x: Tensor) -> Tensor:
        return next(iter(self.parts.values()))(x)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(builtins, "ran", calls.append, raising=False)
    return calls


def called(source: str) -> set[str]:
    """Names that the source calls by themselves."""
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return {function.id for function in calls if isinstance(function, ast.Name)}


@pytest.mark.parametrize("name", HOSTILE + AWKWARD, ids=ascii)
def test_names_of_modules_parameters_and_values(name: str, ran: list[str], tmp_path: Path) -> None:
    x = torch.randn(2, 5, 8)
    model = Net(name)
    rewired = rewire.compile(model, "ancre-ingoing", example_inputs=(x,))
    torch.testing.assert_close(rewired(x), model(x), rtol=1e-5, atol=1e-5)
    (block,) = [
        path for path, module in rewired.named_modules() if path.endswith(".0") and type(module).__name__ == "Block"
    ]
    assert "ran" not in called(rewire.source(rewired, block))
    mixing = mixed(model, "ancre-ingoing")
    rewire.save(mixing, tmp_path)
    loaded = rewire.load(tmp_path, Net(name))
    frozen, _ = rewire.freeze(loaded, 0.0, example_inputs=(x,))
    for other in (loaded, frozen):
        torch.testing.assert_close(other(x), mixing(x), rtol=1e-5, atol=1e-5)
    assert ran == []


def hostile_class(name: str) -> Callable[[], nn.Module]:
    block = type(name, (Block,), {"__qualname__": name, "__module__": name})
    return lambda: nn.Sequential(*(block("inner_") for _ in range(3)))


@pytest.mark.parametrize("name", HOSTILE[:4], ids=ascii)
def test_names_of_classes(name: str, ran: list[str]) -> None:
    model, x = hostile_class(name)(), torch.randn(2, 5, 8)
    rewired = rewire.compile(model, "ancre-ingoing", example_inputs=(x,))
    torch.testing.assert_close(rewired(x), model(x), rtol=1e-5, atol=1e-5)
    assert type(rewired[0]).__name__ == name and "ran" not in called(rewire.source(rewired, "0"))
    assert ran == []
