"""What cannot be edited, and why."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from written_nets import BODY, assert_right, written_input, written_net

import rewire


@pytest.mark.parametrize(
    "block",
    [
        "return (y := x + self.f(x)) + self.g(x)",
        "return (x + self.f(x) if x.shape[0] > 1 else x) + self.g(x)",
        "return max([x + self.f(x)], key=id) + self.g(x)",
    ],
)
def test_a_sum_that_is_not_itself_the_operand_of_the_next(block: str) -> None:
    assert_right(written_net(block), adds=3)


@pytest.mark.parametrize(
    ("block", "runs", "others"),
    [
        ("h, y = [x, self.f(x)], x\nfor a in h[::-1]:\n    y = a + y\nreturn y", 2, 1),
        ("y = [x]\nfor f in (self.f, self.g, self.f):\n    y.append(y[0] + f(y[-1]))\nreturn y[-1]", 3, 2),
    ],
)
@pytest.mark.parametrize("validate", [True, False])
def test_an_expression_that_is_no_add_of_the_stream_each_time(
    block: str, runs: int, others: int, validate: bool
) -> None:
    said = rf"\.py:\d+ runs {runs} times in one call of 'blocks.0', and {others} of these are no residual adds"
    with pytest.raises(rewire.EditError, match=said):
        rewire.compile(written_net(block), "residual", example_inputs=(written_input(),), validate=validate)


CONTAINERS = {
    "a dict": ("return {**x, 'x': x['x'] + self.f(x['x'])}", "{'x': x}", "state['x']"),
    "a dict that changes": ("x['x'] = x['x'] + self.f(x['x'])\nreturn x", "{'x': x}", "state['x']"),
    "a dataclass": ("return dataclasses.replace(x, x=x.x + self.f(x.x), step=x.step + 1)", "Carried(x)", "state.x"),
    "a dataclass that changes": ("x.x = x.x + self.f(x.x)\nreturn x", "Carried(x)", "state.x"),
    "a dict in a tuple": ("h = x[1]['x']\nreturn x[0] + 1, {'x': h + self.f(h)}", "(0, {'x': x})", "state[1]['x']"),
    "a named tuple": ("return x._replace(x=x.x + self.f(x.x))", "collections.namedtuple('N', 'x')(x)", "state.x"),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_states_in_containers(name: str) -> None:
    block, opened, closed = CONTAINERS[name]
    body = f"state = {opened}\nfor block in self.blocks:\n    state = block(state)\nx = {closed}"
    assert_right(written_net(block, body), adds=3)


def test_a_dict_that_only_the_caller_holds() -> None:
    block = "x['x'] = x['x'] + self.f(x['x'])\nreturn None if x['x'] is None else 1"
    body = "state = {'x': x}\nfor block in self.blocks:\n    block(state)\nx = state['x']"
    assert_right(written_net(block, body), adds=3)


@pytest.mark.parametrize(
    ("block", "body", "said"),
    [
        (
            "x[0] = x[0] + self.f(x[0])",
            "x = [x]\nfor block in self.blocks:\n    block(x)\nx = x[0]",
            r"changes the state of the residual stream inside an object, and returns nothing",
        ),
        (
            "x.x = x.x + self.f(x.x)\nreturn x",
            "s = type('S', (), {'__slots__': 'x'})()\ns.x = x\nfor block in self.blocks:\n    block(s)\nx = s.x",
            r"does not enter .*\.py:\d+ as an argument, or in .* it is read from another object",
        ),
        (
            "def add(y):\n    return y + self.f(y)\nreturn checkpoint(add, x, use_reentrant=False)",
            BODY,
            r"at .*\.py:\d+ stands in a function inside the forward of 'blocks.0', which activation checkpointing runs",
        ),
        (
            "return checkpoint(lambda y: y + self.f(y), x, use_reentrant=False)",
            BODY,
            r"at .*\.py:\d+ stands in a function inside the forward of 'blocks.0', which activation checkpointing runs",
        ),
        (
            "x = x + self.f(x)\nx.register_hook(lambda gradient: 2 * gradient)\nreturn x + self.g(x)",
            BODY,
            r"`x\.register_hook\(.*` at .*\.py:\d+ hooks the gradient of a state",
        ),
        ("return Added.apply(x, self.f(x))", BODY, r"add at .*\.py:\d+ stands inside a torch\.autograd\.Function"),
    ],
)
@pytest.mark.parametrize("validate", [True, False])
def test_true_reasons(block: str, body: str, said: str, validate: bool) -> None:
    with pytest.raises(rewire.EditError, match=said):
        rewire.compile(written_net(block, body), example_inputs=(written_input(),), validate=validate)


@pytest.mark.parametrize(
    "block",
    [
        "x = checkpoint(self.add, x, use_reentrant=False)\nreturn x + self.g(x)",
        "return x + checkpoint(lambda y: self.f(y), x, use_reentrant=False)",
    ],
)
def test_checkpoints_of_methods_and_of_branches(block: str) -> None:
    assert_right(written_net(block), adds=6 if "self.add" in block else 3)


CHUNKS = """
def run(a, b, x):
    for block in self.blocks[a:b]:
        x = block(x)
    return x

def chunk(a):
    return lambda x: run(a, a + 2, x)

x = x + self.blocks[0].f(x)
if torch.is_grad_enabled():
    for a in range(0, 3, 2):
        x = checkpoint(chunk(a), x, use_reentrant=False)
else:
    x = run(0, 3, x)
x = x + self.blocks[0].g(x)
"""


def test_checkpoints_of_closures_that_run_several_blocks() -> None:
    """A closure calls another one, which calls the blocks; without gradients that is called by itself."""
    net = written_net(body=CHUNKS)
    assert_right(net, adds=8)
    x, rewired = written_input(), rewire.compile(net, "ancre-ingoing", example_inputs=(written_input(),))
    with torch.no_grad():
        torch.testing.assert_close(rewired(x), net(x))


def joined(x: Tensor, y: Tensor) -> Tensor:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        raise TypeError(f"{type(x)}, {type(y)}")
    return (x * y).tanh()


class Edges(nn.Module):
    """Reads both streams and changes one."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.f(joined(x, y)), y


class Nodes(Edges):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y + self.f(joined(x, y))


class Segments(nn.Module):
    """Two streams through checkpointed closures, as in GraphCast's processor."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run, self.layers = run, nn.ModuleList(kind() for _ in range(4) for kind in (Edges, Nodes))

    def segment(self, a: int) -> Any:
        def custom(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            for layer in self.layers[a : a + 4]:
                x, y = layer(x, y)
            return x, y

        return custom

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for a in (0, 4):
            x, y = self.run(self.segment(a), x, y, use_reentrant=False)
        return torch.cat([x, y])


class ByName(Segments):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for a in (0, 4):
            x, y = checkpoint(self.segment(a), x, y, use_reentrant=False)
        return torch.cat([x, y])


class Unchecked(Segments):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x, y = layer(x, y)
        return torch.cat([x, y])


class Renamed(Segments):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        run = self.run
        for a in (0, 4):
            x, y = run(self.segment(a), x, y)
        return torch.cat([x, y])


@pytest.mark.parametrize("kind", [Segments, ByName, Renamed, Unchecked])
def test_closures_of_two_streams_under_any_name_of_checkpoint(kind: type[Segments]) -> None:
    net, given = kind(functools.partial(checkpoint, use_reentrant=False)), (written_input(), written_input())
    rewired = rewire.compile(net, "denseformer", example_inputs=given)
    assert [len(c.layout.units) for c in rewire.connections(rewired).values()] == [4, 4]


def test_a_loop_whose_adds_are_of_streams_that_start_at_one_place() -> None:
    body = "for n, block in enumerate(self.blocks):\n    if n:\n        x = self.stem(x)\n    x = x + block.f(x)"
    net = written_net(body=f"{body}\n    x = x + block.g(x)")
    left = {each.path: each.why for each in rewire.inspect(net, (written_input(),)).left}
    for path in ("blocks.1", "blocks.2"):
        assert "where the residual stream starts, runs again and starts another one" in left[path]
    assert "runs 3 times in one call of 'Net', and makes adds of other streams, too, which are left" in left["blocks.0"]


@pytest.mark.parametrize("topology", ["denseformer", "hc-static"])
def test_streams_that_modules_add_to_and_that_start_at_one_place(topology: str) -> None:
    """As those of x-transformers' U-nets (``unet_skips``), whose first halves are connected."""
    block = "x, residual = x\nreturn residual + x"
    body = "for n, block in enumerate([*self.blocks] * 2):\n    if n in (2, 4):\n        x = self.stem(x)\n"
    net = written_net(block, body + "    x = block((block.f(x), x))")
    rewired = rewire.compile(net, topology, example_inputs=(written_input(),))
    assert [len(c.layout.units) for c in rewire.connections(rewired).values()] == [2]


def test_scores_that_are_added_up_from_block_to_block() -> None:
    """As in RealFormer: the sum of the last block is read in that block alone."""
    block = "x, s = x\nq = x @ x.mT\nif s is None:\n    s = q\nelse:\n    s = s + q\nreturn x + self.f(s @ x), s"
    net = written_net(block, "s = None\nfor block in self.blocks:\n    x, s = block((x, s))")
    rewired = rewire.compile(net, "denseformer", example_inputs=(written_input(),))
    assert sorted(len(c.layout.units) for c in rewire.connections(rewired).values()) == [2, 3]


def test_a_checkpoint_of_a_closure_that_is_switched_on_later() -> None:
    net = written_net(
        "def add(y):\n    return y + self.f(y)\n"
        "return checkpoint(add, x, use_reentrant=False) if getattr(self, 'often', False) else add(x)"
    )
    rewired = rewire.compile(net, "ancre-ingoing", example_inputs=(written_input(),))
    for block in rewired.blocks:
        block.often = True
    said = r"'blocks.\d' .* runs again after its forward has returned"
    with set_checkpoint_early_stop(False), pytest.raises(rewire.UnsupportedCall, match=said):
        rewired(written_input()).sum().backward()


class Hooked(nn.Module):
    """A hook of the block's adds what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)
        self.register_forward_hook(self.added)

    @staticmethod
    def added(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return given[0] + output

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.f(x))


@pytest.mark.parametrize("validate", [True, False])
def test_an_add_of_a_hook(validate: bool) -> None:
    said = r"`given\[0\] \+ output` at .*test_refused.py:\d+ is made by a forward hook"
    model = nn.Sequential(nn.Linear(8, 8), Hooked(), Hooked())
    with pytest.raises(rewire.EditError, match=said):
        rewire.compile(model, "ancre-ingoing", example_inputs=(torch.randn(2, 8),), validate=validate)


class Residual(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


class Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(torch.float32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nested.as_nested_tensor([2 * x[0], x[1, :2]], layout=torch.jagged)
        for block in self.blocks:
            x = block(x)
        return x.values()


@pytest.mark.parametrize("validate", [True, False])
def test_nested_tensors(validate: bool) -> None:
    given = torch.randn(2, 5, 8)
    with pytest.raises(rewire.UnsupportedCall, match="trunk 'blocks' are nested tensors: pad them"):
        rewire.compile(Jagged(), "ancre-ingoing", example_inputs=(given,), validate=validate)(given)


def test_complex_states_have_no_weights_per_channel() -> None:
    net, given = nn.Sequential(*(Residual(torch.cfloat) for _ in range(3))), torch.randn(2, 8, dtype=torch.cfloat)
    rewired = rewire.compile(net, "ancre-ingoing", example_inputs=(given,))
    torch.testing.assert_close(rewired(given), net(given))
    with pytest.raises(
        rewire.UnsupportedCall, match="are complex, and the weights per channel of topology 'hc-dynamic'"
    ):
        rewire.compile(net, "hc-dynamic", example_inputs=(given,))


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(torch.float32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        def of_a_row(x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block.f(x)
            return x

        return torch.vmap(of_a_row)(x)


def residual(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def wrapper(self: nn.Module, x: Tensor) -> Tensor:
        return x + forward(self, x)

    return wrapper


class AddsInADecorator(Residual):
    @residual
    def forward(self, x: Tensor) -> Tensor:
        return self.f(x)


class AddsInItsCall(Residual):
    def __call__(self, x: Tensor) -> Tensor:
        return x + super().__call__(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x)


class HasACall(Residual):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x)


class HasTwoCalls(HasACall):
    """As layers of Megatron's, which may replay a CUDA graph there."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x)


class Biased(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.f.bias + self.f(x)


@pytest.mark.parametrize(
    ("net", "said"),
    [
        (Mapped, "starts with a tensor that no operation makes .* inside torch.vmap"),
        (lambda: nn.Sequential(*(AddsInADecorator(torch.float32) for _ in range(3))), "in a decorator's wrapper, say"),
        (lambda: nn.Sequential(*(AddsInItsCall(torch.float32) for _ in range(3))), "passes the `__call__` of '0'"),
        (
            lambda: nn.Sequential(*(HasTwoCalls(torch.float32) for _ in range(3))),
            "add in its forward, and give the class",
        ),
        (lambda: nn.Sequential(*(Biased(torch.float32) for _ in range(3))), "a sum with a number or a weight"),
    ],
)
def test_the_reason_is_what_is_so(net: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(rewire.RewireError, match=said):
        rewire.compile(net(), "ancre-ingoing", example_inputs=(torch.randn(2, 5, 8),), validate=False)


class Sorted(nn.Module):
    """The order between blocks is computed from the state, whose way that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(torch.float32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = x.gather(1, x.sum(-1).argsort(1)[..., None].expand(-1, -1, 8))
        return x


class Mixer(nn.Module):
    """Every second add is written on the turned state."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm, self.f = nn.Linear(5, 5), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).transpose(1, 2)
        x = x.transpose(1, 2)
        x = x + self.tokens(y)
        x = x.transpose(1, 2)
        return x + self.f(self.norm(x))


@pytest.mark.parametrize("net", [Sorted, lambda: nn.Sequential(*(Mixer() for _ in range(3)))])
@pytest.mark.parametrize("topology", ["ancre-ingoing", "hc-static"])
def test_states_in_an_order_of_their_own(net: Callable[[], nn.Module], topology: str) -> None:
    plain, given = net(), torch.randn(2, 5, 8)
    rewired = rewire.compile(plain, topology, example_inputs=(given,))
    torch.testing.assert_close(rewired(given), plain(given))


@pytest.mark.parametrize("asked", ["type(m) is Block", "type(m) in (nn.Conv1d, Block)", "Block == m.__class__"])
def test_code_that_asks_for_the_very_class_of_a_block(asked: str) -> None:
    """The rewired one is of a subclass: without validation no block would run, and nothing say so."""
    body = f"for m in self.modules():\n    if {asked}:\n        x = m(x)"
    with pytest.raises(rewire.EditError, match=r"is False of rewired blocks.*isinstance\(.., Block\)"):
        rewire.compile(written_net(body=body), example_inputs=(written_input(),), validate=False)


@pytest.mark.parametrize("asked", ["type(m).__name__ == 'Block'", "isinstance(m, Block)", "type(m) is not nn.Linear"])
def test_other_questions_for_a_class(asked: str) -> None:
    assert_right(written_net(body=f"for m in self.blocks:\n    if {asked}:\n        x = m(x)"), adds=6)
