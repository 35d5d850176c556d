"""A state that is written to in place, and that something else holds, too: the edited forward makes a new tensor."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from written_nets import BODY, WIDTH, assert_right, written_input, written_net

import rewire

ADDED = "x = x.clone()\n{}\nx += self.f(x.clone())\n"


@pytest.mark.each_once
@pytest.mark.parametrize(
    ("block", "holder"),
    [
        (ADDED.format("other = x[..., :]") + "return x + 0.1 * other", "other"),
        (ADDED.format("other = x") + "return x + 0.1 * other", "other"),
        (ADDED.format("other = [x]") + "return x + 0.1 * other[0]", "other"),
        (ADDED.format("other = {'a': [x.view(-1)]}") + "return x + 0.1 * other['a'][0].view_as(x)", "other"),
        (ADDED.format("other = x.data") + "return x + 0.1 * other", "other"),
        (ADDED.format("other = x.detach()") + "return x + 0.1 * other", "other"),
        (ADDED.format("other = x.expand(2, *x.shape)") + "return x + 0.1 * other[0]", "other"),
        (ADDED.format("self.kept = x") + "return x + 0.1 * self.kept", "self"),
        ("x = x + self.f(x)\nother = x\nx *= 2\nreturn x + other.sum()", "other"),
        ("x = x + self.f(x)\nx.data.mul_(0.5)\nreturn x + self.g(x)", "x"),
        ("x = x + self.f(x)\nother = x[..., 0]\nother.zero_()\nreturn x + self.g(x)", "x"),
        ("first = x = x.clone()\nfor f in (self.f, self.g):\n    x += f(x.clone())\nreturn x + 0.1 * first", "first"),
    ],
)
@pytest.mark.parametrize("validate", [True, False])
def test_what_another_name_holds_is_refused(block: str, holder: str, validate: bool) -> None:
    with pytest.raises(rewire.EditError, match=rf"\.py:\d+ writes to .* in place, and '{holder}' in Block.forward has"):
        rewire.compile(written_net(block), "residual", example_inputs=(written_input(),), validate=validate)


@pytest.mark.parametrize(
    "body",
    [
        "states = []\nfor block in self.blocks:\n    states.append(x)\n    x = block(x)\nx = x + sum(states)",
        "first = x\nfor block in self.blocks:\n    x = block(x)\nx = x + first",
        "for block in self.blocks:\n    row = x[:, :1]\n    x = block(x)\n    x = x + 0.1 * row",
    ],
)
def test_what_the_caller_of_a_block_holds_is_refused(body: str) -> None:
    net = written_net("x += self.f(x.clone())\nreturn x", f"x = x * 1\n{body}")
    with pytest.raises(rewire.EditError, match=r"in Net\.forward has the same memory and is read afterwards"):
        rewire.compile(net, "residual", example_inputs=(written_input(),), validate=False)


@pytest.mark.parametrize(
    ("block", "adds"),
    [
        (ADDED.format("other = x") + "other = 1.0\nreturn x * other", 3),  # it is not read
        (ADDED.format("other = x\nmean = other.mean()") + "return x + 0 * mean", 3),
        (ADDED.format("scale = lambda: x * 0.1") + "return x + scale()", 3),  # a closure sees the variable
        ("residual = x\nx = self.f(x)\nx += residual\nx.relu_()\nreturn x", 3),
        ("x = x.clone()\nfor f in (self.f, self.g):\n    x += f(x.clone())\nreturn x", 6),
        ("self.kept = x.clone()\nself.kept += self.f(x)\nreturn self.kept", 3),
        ("x = x + self.f(x)\nx[..., 0] *= 2\nx[..., 1] = 0\nreturn x + self.g(x)", 6),
    ],
)
def test_what_nothing_else_reads_is_right(block: str, adds: int) -> None:
    assert_right(written_net(block, f"x = x * 1\n{BODY}"), adds)


KEPT = "x = x * 1\nstates = [x]\nfor block in self.blocks:\n    x = block(x)\n    states.append(x)\nx = sum(states)"


@pytest.mark.parametrize(
    ("block", "found"),
    [
        ("if self.on:\n    x = x * 2\nx += self.f(x.clone())", "x = x \\+ f"),
        ("if self.on:\n    x = x * 2\nx[:, 1:] += self.f(x[:, 1:].clone())", "x = x \\+ f"),
        ("x = x * 2 if self.on else x\nx += self.f(x.clone())", "residual add 2 writes to the state in place"),
        ("if self.on:\n    x = x * 2\nx = x + self.f(x.clone())", None),
    ],
)
def test_a_call_in_which_no_new_tensor_is_made_in_front(block: str, found: str | None) -> None:
    """Whoever holds the state sees what is added to it then, and nothing has looked for such names."""
    net = written_net(f"{block}\nreturn x", KEPT)
    for part in net.blocks:
        part.on = True
    rewired = rewire.compile(net, "ancre-ingoing", example_inputs=(written_input(),))
    for part in (*net.blocks, *rewired.blocks):
        part.on = False
    with contextlib.nullcontext() if found is None else pytest.raises(rewire.RewireError, match=found):
        given = written_input()
        torch.testing.assert_close(rewired(given), net(given))


IN_PLACE = [
    "x += self.f(x.clone())",
    "x[:, 1:] += self.f(x[:, 1:].clone())",
    "rows = torch.tensor([1])\nh = x[rows]\nx[rows] = self.f(h) + h",
    "x.add_(self.f(x.clone()))",
]


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("write", IN_PLACE)
def test_an_add_that_is_left_out_before_one_in_place(write: str, held: bool) -> None:
    """The write is then to the state before both."""
    net = written_net(f"if self.on:\n    x = x + self.g(x)\n{write}\nreturn x", KEPT if held else f"x = x * 1\n{BODY}")
    for part in net.blocks:
        part.on = True
    rewired = rewire.compile(net, "ancre-ingoing", example_inputs=(written_input(),))
    for part in (*net.blocks, *rewired.blocks):
        part.on = False
    refused = pytest.raises(rewire.UnsupportedCall, match=r"residual add 1, .* writes to the state in place")
    with refused if held else contextlib.nullcontext():
        given = written_input()
        torch.testing.assert_close(rewired(given), net(given))


class Embeds(nn.Module):
    """As NaFlexViT: positions are added in a method of its own, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.places = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(3, WIDTH))

    def place(self, x: Tensor) -> None:
        x.add_(self.places)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        self.place(x)
        return x


def test_what_is_embedded_may_be_written_to_before_the_stream_starts() -> None:
    assert_right(nn.Sequential(Embeds(), *written_net().blocks), 6)


START = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.fs = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        {}
        for f in self.fs:
            x = x + f(torch.tanh(x))
        return x
"""


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize(
    ("write", "refused"),
    [
        *(("x[:, 0] += 1", False), ("x[:, 0, :].add_(1)", False), ("x[x > 0] = 0", False), ("x += 1", False)),
        *(("y = x.view(-1)\n        y += 1", True), ("y = x[:, 0]\n        y.mul_(2)", True)),
    ],
)
def test_a_first_state_that_is_written_to(write: str, refused: bool, validate: bool, tmp_path: Path) -> None:
    file = tmp_path / f"net_{abs(hash(write))}.py"
    file.write_text(START.format(write))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net, given = module.Net(), torch.randn(2, 4, 8)
    if refused:
        with pytest.raises(rewire.EditError, match=r"net_\d+.py:\d+ changes through 'y', a view of it"):
            rewire.compile(net, "hc-dynamic", example_inputs=(given,), validate=validate)
        return
    rewired = rewire.compile(net, "hc-dynamic", example_inputs=(given,), validate=validate)
    torch.testing.assert_close(rewired(given), net(given))
