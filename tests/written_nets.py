"""Small nets whose blocks, or the code around these, are written in a test, as text: one file for each."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import torch
from comparing import assert_close, evaluate
from torch import Tensor, nn

import rewire

WIDTH = 8
BLOCK = "x = x + self.f(x)\nreturn x + self.g(x)"
BODY = "for block in self.blocks:\n    x = block(x)"
_FILE = """
import collections
import dataclasses
import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def branch():
    return nn.Sequential(nn.LayerNorm({width}), nn.Linear({width}, {width}), nn.Tanh(), nn.Linear({width}, {width}))


@dataclasses.dataclass
class Carried:
    x: torch.Tensor
    step: int = 0


class Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, f):
        return x + f

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = branch(), branch()

    def add(self, x):
        return x + self.f(x)

    def forward(self, x):
{block}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Linear({width}, {width}), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
{body}
        return x
"""


def written_net(block: str = BLOCK, body: str = BODY) -> nn.Module:
    """A net of three blocks with these bodies of forwards: of a block, and of the net behind its stem."""
    source = _FILE.format(width=WIDTH, block=textwrap.indent(block, " " * 8), body=textwrap.indent(body, " " * 8))
    name = "written_" + hashlib.sha256(source.encode()).hexdigest()[:16]
    if name not in sys.modules:
        path = Path(tempfile.mkdtemp()) / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    made: Any = sys.modules[name]
    net: nn.Module = made.Net()
    return net


def written_input() -> Tensor:
    return torch.randn(2, 3, WIDTH)


def assert_right(model: nn.Module, adds: int) -> None:
    """Rewired, with and without validation, it has this many residual adds, and starts as what it was.

    What is validated is run on its inputs to find the adds, else on the meta device.
    """
    given = (written_input(),)
    for topology, validate in (("ancre-ingoing", True), ("residual", False)):
        rewired = rewire.compile(model, topology, example_inputs=given, validate=validate)
        assert sum(len(c.layout.units) for c in rewire.connections(rewired).values()) == adds
        for train in (False, True):
            assert_close(evaluate(model, given, {}, train), evaluate(rewired, given, {}, train), 1e-5, 1e-4)
