"""Loops that make residual adds themselves, of which a call skips iterations: what is skipped adds nothing."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from written_nets import WIDTH, written_input, written_net

import rewire

HEAD = "self.stem(x).relu()"
ADDS = "    x = x + block.f(x)\n    x = x + block.g(x)\n"
INNER = ADDS.replace("    x", "        x")
LOOP = "for n, block in enumerate(self.blocks):\n"
SKIP = "    if n in self.skip:\n        continue\n"
END = f"y = {HEAD}\nx = y"
BODIES = {
    "continue": f"{LOOP}{SKIP}{ADDS}{END}",
    "if": f"{LOOP}    if n not in self.skip:\n{INNER}{END}",
    "else": f"{LOOP}    if n in self.skip:\n        pass\n    else:\n{INNER}{END}",
    "by number": f"for n in range(3):\n{SKIP}{ADDS.replace('block.', 'self.blocks[n].')}{END}",
    "by names": "for n, (f, g) in enumerate([(block.f, block.g) for block in self.blocks]):\n"
    f"{SKIP}{ADDS.replace('block.', '')}{END}",
    "in place": f"x = x.clone()\n{LOOP}{SKIP}    x += block.f(x.clone())\n    x += block.g(x.clone())\n{END}",
    "named before": f"{LOOP}{SKIP}    f = block.f(x)\n    x = f + x\n    g = block.g(x)\n    x = g + x\n{END}",
    "kept beside": f"{LOOP}{SKIP}    kept = x\n    x = block.f(x)\n    x = kept + x\n"
    f"    kept = x\n    x = block.g(x)\n    x = x + kept\n{END}",
    "checkpointed": f"{LOOP}{SKIP}    x = x + checkpoint(block.f, x, use_reentrant=False)\n"
    f"    x = x + checkpoint(block.g, x, use_reentrant=False)\n{END}",
    "nested": "for group in ([self.blocks[0], self.blocks[1]], [self.blocks[2]]):\n    for block in group:\n"
    f"        if [*self.blocks].index(block) in self.skip:\n            continue\n{INNER}{END}",
    "two loops": f"for n, block in enumerate(self.blocks[:2]):\n{SKIP}{ADDS}"
    f"for block in self.blocks[2:]:\n    if 2 in self.skip:\n        continue\n{ADDS}{END}",
    "kept blocks": f"for block in [b for n, b in enumerate(self.blocks[:]) if n not in self.skip]:\n{ADDS}{END}",
    "on one line": f"{LOOP}    if n in self.skip: continue\n{ADDS}{END}",
}
EXITS = {
    "break": f"{LOOP}{ADDS}    if n == self.exit:\n        break\n{END}",
    "return": f"{LOOP}{ADDS}    if n == self.exit:\n        return {HEAD}\n{END}",
    "variable": f"{LOOP}{ADDS}    if n == self.exit:\n        y = {HEAD}\n        return y\n{END}",
    "before": f"{LOOP}    if n == self.exit + 1 > 0:\n        return {HEAD}\n{ADDS}{END}",
    "slice": f"for block in self.blocks[: self.exit + 1 or None]:\n{ADDS}{END}",
    "line by line": "x = x + self.blocks[0].f(x)\nx = x + self.blocks[0].g(x)\nx = x + self.blocks[1].f(x)\n"
    f"x = x + self.blocks[1].g(x)\nif self.exit == 1:\n    return {HEAD}\n"
    f"x = x + self.blocks[2].f(x)\nx = x + self.blocks[2].g(x)\n{END}",
}
TOPOLOGIES = ["denseformer", "hc-static", "ancre-ingoing"]


def net_of(body: str) -> nn.Module:
    net = written_net(body=body)
    net.skip, net.exit = (), -1
    return net


def moved(model: nn.Module) -> nn.Module:
    for connection in rewire.connections(model).values():
        for weight in connection.parameters():
            nn.init.normal_(weight, 0.5, 0.5)
    return model


def without(model: nn.Module, x: Tensor, *skipped: int, branches: str = "fg") -> Tensor:
    """What a model computes if these branches of some blocks are zero."""
    model = copy.deepcopy(model)
    for n in skipped:
        for branch in branches:
            getattr(model.blocks[n], branch).register_forward_hook(lambda _, args, made: torch.zeros_like(made))
    result: Tensor = model(x)
    return result


def assert_right_without(rewired: nn.Module, skips: Sequence[tuple[int, ...]], branches: str) -> None:
    """What is skipped is as if it were zero."""
    x = written_input()
    for skip in skips:
        expected = without(rewired, x, *skip, branches=branches)
        rewired.skip = skip
        torch.testing.assert_close(rewired(x), expected)
        rewired.skip = ()


@pytest.mark.each_once
@pytest.mark.parametrize("skip", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("way", BODIES)
def test_skipped_iterations(way: str, topology: str, skip: tuple[int, ...]) -> None:
    """Where all are, the trunk does not start."""
    plain = net_of(BODIES[way])
    rewired = moved(rewire.compile(plain, topology, example_inputs=(written_input(),)))
    x = written_input()
    expected = without(plain if len(skip) == 3 else rewired, x, *skip)
    rewired.skip = skip
    torch.testing.assert_close(rewired(x), expected)


@pytest.mark.parametrize("topology", ["denseformer", "ancre-ingoing"])
def test_states_that_a_norm_makes(topology: str) -> None:
    """A skipped iteration makes none."""
    body = f"{LOOP}{SKIP}    x = block.f[0](x + block.f(x))\n    x = block.g[0](x + block.g(x))\n{END}"
    rewired = rewire.compile(net_of(body), topology, example_inputs=(written_input(),))
    x = written_input()
    plain = rewire.restore(rewired)
    for skip in ((0,), (1,), (2,), (0, 1)):
        rewired.skip = plain.skip = skip
        torch.testing.assert_close(rewired(x), plain(x))


@pytest.mark.each_once
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    ("body", "skipped"),
    [
        (f"{LOOP}    if n not in self.skip:\n        x = x + block.f(x)\n    x = x + block.g(x)\n", "f"),
        (f"{LOOP}    x = x + block.f(x)\n    if n not in self.skip:\n        x = x + block.g(x)\n", "g"),
        (
            f"{LOOP}    if n not in self.skip:\n        x = x + block.f(x)\n"
            "    if n not in self.skip:\n        x = x + block.g(x)\n",
            "fg",
        ),
        (f"{LOOP}    x = x + block.f(x)\n{SKIP}    x = x + block.g(x)\n", "g"),
        (f"{LOOP}    if n not in self.skip:\n{INNER}    x = x + self.extra[n](x)\n", "fg"),
        (f"{LOOP}    x = x if n in self.skip else x + block.f(x)\n    x = x + block.g(x)\n", "f"),
        (f"{LOOP}    x = x + block.f(x)\n    x = x + block.g(x) if n not in self.skip else x\n", "g"),
    ],
)
def test_some_adds_of_an_iteration(body: str, skipped: str, topology: str) -> None:
    net = net_of(body + END)
    net.extra = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    rewired = moved(rewire.compile(net, topology, example_inputs=(written_input(),)))
    assert_right_without(rewired, ((0,), (1,), (2,), (0, 2)), skipped)


@pytest.mark.each_once
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("way", EXITS)
def test_early_exits(way: str, topology: str) -> None:
    rewired = moved(rewire.compile(net_of(EXITS[way]), topology, example_inputs=(written_input(),)))
    x = written_input()
    expected = without(rewired, x, 2)
    rewired.exit = 1
    torch.testing.assert_close(rewired(x), expected)


ONE = "    if n not in self.skip:\n        x = x + block.f(x)\n"
SUMMED = "x = torch.stack([self.stem(x), *seen]).mean(0)"


@pytest.mark.each_once
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    "body",
    [
        f"seen = []\n{LOOP}{ONE}    seen.append(block.g(x))\n{SUMMED}",
        f"seen = []\n{LOOP}{ONE}    seen.append(x)\n{SUMMED}",
        f"h = self.blocks[0].g(x)\n{LOOP}{ONE.replace('f(x)', 'f(h)')}    h = self.blocks[(n + 1) % 3].g(x)\nx = h",
    ],
)
def test_what_is_read_behind_a_skipped_add_is_what_the_next_one_reads(body: str, topology: str) -> None:
    rewired = moved(rewire.compile(net_of(body), topology, example_inputs=(written_input(),)))
    assert_right_without(rewired, ((0,), (1,), (2,), (0, 1), (1, 2)), "f")


@pytest.mark.each_once
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("start", "item"), [("[x]", "0"), ("{'x': x}", "'x'")])
def test_states_in_an_item(start: str, item: str, topology: str) -> None:
    add = f"        state[{item}] = state[{item}] + block.f(state[{item}])\n"
    body = f"state = {start}\n{LOOP}    if n not in self.skip:\n{add}x = self.stem(state[{item}])"
    rewired = moved(rewire.compile(net_of(body), topology, example_inputs=(written_input(),)))
    assert_right_without(rewired, ((0,), (1,), (2,), (0, 1), (1, 2)), "f")


@pytest.mark.each_once
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("leave", ["continue", "break"])
@pytest.mark.parametrize(
    ("before", "keep", "name"),
    [
        ("", "out = x", "out"),
        ("", "out = head = x", "head"),
        ("seen = []\n", "seen.append(x)", "seen[-1]"),
        ("seen = ()\n", "seen = seen + (x,)", "seen[-1]"),
        ("seen = ()\n", "seen += (x,)", "seen[-1]"),
    ],
)
def test_states_under_other_names_behind_the_loop(before: str, keep: str, name: str, leave: str, topology: str) -> None:
    """What ends the trunk is also what they hold, if the last iterations are skipped."""
    skip = SKIP.replace("continue", leave)
    body = f"{before}{LOOP}{skip}    x = x + block.f(x)\n    {keep}\nx = self.stem({name})"
    rewired = moved(rewire.compile(net_of(body), topology, example_inputs=(written_input(),)))
    assert_right_without(rewired, ((2,), (1, 2)), "f")


def test_names_that_have_no_value_behind_the_loop() -> None:
    """They are not read there, either."""
    kept = "    if n == self.exit:\n        out = x\n"
    body = f"{LOOP}{SKIP}    x = x + block.f(x)\n{kept}x = self.stem(x)\nif self.exit >= 0:\n    x = out"
    rewired = rewire.compile(net_of(body), "denseformer", example_inputs=(written_input(),))
    x = written_input()
    plain = rewire.restore(rewired)
    for rewired.exit, rewired.skip in ((-1, ()), (1, ()), (-1, (2,)), (1, (2,))):
        plain.exit, plain.skip = rewired.exit, rewired.skip
        torch.testing.assert_close(rewired(x), plain(x))


def test_states_that_were_collected_stay_as_they_are() -> None:
    body = f"seen = []\n{LOOP}{SKIP}    x = x + block.f(x)\n    seen.append(x)\nx = self.stem(seen[0] + 2 * seen[-1])"
    rewired = moved(rewire.compile(net_of(body), "denseformer", example_inputs=(written_input(),)))
    assert_right_without(rewired, ((1,), (2,)), "f")


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_blocks_that_are_removed_or_moved_later(topology: str) -> None:
    body = f"for block in self.blocks:\n{ADDS}{END}"
    rewired = moved(rewire.compile(net_of(body), topology, example_inputs=(written_input(),)))
    x = written_input()
    for gone in (0, 1, 2):
        fewer = copy.deepcopy(rewired)
        expected = without(fewer, x, gone)
        del fewer.blocks[gone]
        torch.testing.assert_close(fewer(x), expected)
        torch.testing.assert_close(copy.deepcopy(fewer)(x), expected)
    rewired.blocks = nn.ModuleList([rewired.blocks[n] for n in (1, 0, 2)])
    with pytest.raises(rewire.OutOfOrder, match="iterations run in another order"):
        rewired(x)


class Steps(nn.Module):
    """A method makes the adds, by blocks that it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.skip = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), ()

    def step(self, x: Tensor, n: int) -> Tensor:
        block = self.blocks[n]
        return x + block(x.tanh())

    def forward(self, x: Tensor) -> Tensor:
        for n in range(3):
            if n in self.skip:
                continue
            x = self.step(x, n)
        return x.relu()


@pytest.mark.parametrize("calls", [False, True])
def test_blocks_that_stand_in_the_place_of_others_too(calls: bool) -> None:
    """Such a block tells nothing about what was left out: the first iteration's block may run in the last one."""
    net = Steps() if calls else net_of(BODIES["continue"])
    rewired = moved(rewire.compile(net, "denseformer", example_inputs=(written_input(),)))
    x = written_input()
    twin = copy.deepcopy(rewired)
    twin.blocks[2] = copy.deepcopy(twin.blocks[0])
    rewired.blocks[2] = rewired.blocks[0]
    torch.testing.assert_close(rewired(x), twin(x))
    for rewired.skip in ((0, 1), (1,), (2,)):
        with pytest.raises(rewire.OutOfOrder, match="a module was put in another one's place, too"):
            rewired(x)
    rewired.blocks[2] = copy.deepcopy(rewired.blocks[0])
    for skip in ((0, 1), (1,), (2,)):
        twin = copy.deepcopy(rewired)
        for block in (twin.blocks[n] for n in skip):
            for linear in (part for part in block.modules() if isinstance(part, nn.Linear)):
                linear.register_forward_hook(lambda _, args, made: torch.zeros_like(made))
        rewired.skip = twin.skip = ()
        expected = twin(x)
        rewired.skip = skip
        torch.testing.assert_close(rewired(x), expected)


def test_early_exits_from_a_loop_over_such_blocks() -> None:
    rewired = rewire.compile(net_of(EXITS["return"]), "denseformer", example_inputs=(written_input(),))
    rewired.blocks[2], rewired.exit = rewired.blocks[0], 0
    with pytest.raises(rewire.OutOfOrder, match="a module was put in another one's place, too"):
        rewired(written_input())


@pytest.mark.parametrize("loop", ["for n in range(self.count):\n    block = self.blocks[n]\n", ""])
def test_loops_of_a_number_that_changes(loop: str) -> None:
    added = ADDS if loop else ADDS.replace("block.", "self.blocks[n].")
    net = net_of(f"{loop or 'for n in range(self.count):' + chr(10)}{added}{END}")
    net.count = 3
    rewired = moved(rewire.compile(net, "denseformer", example_inputs=(written_input(),)))
    x = written_input()
    expected = without(rewired, x, 2)
    rewired.count = 2
    torch.testing.assert_close(rewired(x), expected)


@pytest.mark.parametrize("order", [(0, 2, 1), (0, 1, 1, 2), (2, 1, 0), (0, 1, 2, 0)])
def test_iterations_in_another_order_are_refused(order: tuple[int, ...]) -> None:
    net = net_of(f"for block in self.order():\n{ADDS}    if self.exit == 7:\n        break\n{END}")
    net.order = lambda: net.blocks
    rewired = rewire.compile(net, "denseformer", example_inputs=(written_input(),))
    rewired.order = lambda: [rewired.blocks[n] for n in order]
    with pytest.raises(rewire.OutOfOrder, match="iterations run in another order"):
        rewired(written_input())


class Wrapped(nn.Module):
    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.wrapped(x)
        return result


def test_modules_that_are_replaced_are_known_by_their_places() -> None:
    """As PEFT replaces projections."""
    rewired = moved(rewire.compile(net_of(BODIES["continue"]), "denseformer", example_inputs=(written_input(),)))
    x = written_input()
    expected = without(rewired, x, 1)
    rewired.blocks[2].f = Wrapped(rewired.blocks[2].f)
    rewired.skip = (1,)
    torch.testing.assert_close(rewired(x), expected)


def test_modules_that_nobody_knows() -> None:
    """All iterations may run; which one was skipped, nothing tells."""
    net = net_of(BODIES["by names"].replace("block in self.blocks", "block in self.given()"))
    net.given = lambda: net.blocks
    rewired = rewire.compile(net, "denseformer", example_inputs=(written_input(),))
    x = written_input()
    expected = rewired(x)
    strangers = copy.deepcopy(rewired.blocks)
    rewired.given = lambda: strangers
    torch.testing.assert_close(rewired(x), expected)
    for rewired.skip in (0,), (1,), (2,):
        with pytest.raises(rewire.OutOfOrder):
            rewired(x)


def test_copies_and_compiled_models() -> None:
    """A copy has modules of its own."""
    rewired = moved(rewire.compile(net_of(BODIES["continue"]), "ancre-ingoing", example_inputs=(written_input(),)))
    x = written_input()
    expected = without(rewired, x, 1)
    rewired.skip = (1,)
    for model in (copy.deepcopy(rewired), torch.compile(rewired, backend="eager", fullgraph=True)):
        torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(
    "body",
    [
        f"{LOOP}    try:\n        if n in self.skip:\n            raise ValueError\n{INNER}    except ValueError:\n"
        f"        continue\n{END}",
        f"n = -1\nwhile n < 2:\n    n += 1\n    block = self.blocks[n]\n{SKIP}{ADDS}{END}",
    ],
)
def test_loops_of_which_nothing_tells_the_iteration(body: str) -> None:
    """They run as they did, and are refused when they do not."""
    rewired = rewire.compile(net_of(body), "denseformer", example_inputs=(written_input(),))
    assert "before=" not in rewire.source(rewired, "")
    x = written_input()
    plain = rewire.restore(rewired)
    torch.testing.assert_close(rewired(x), plain(x))
    rewired.skip = (1,)
    with pytest.raises(rewire.OutOfOrder):
        rewired(x)


@pytest.mark.parametrize("ifs", [("n % 2", "n % 2 == 0"), ("n < 2", "n >= 2"), ("n >= 2", "n < 2")])
def test_iterations_that_make_different_adds_run_as_they_did(ifs: tuple[str, str]) -> None:
    loop = "for n, block in enumerate([*self.blocks, self.fourth]):\n"
    body = f"{loop}    if {ifs[0]}:\n        x = x + block.f(x)\n    if {ifs[1]}:\n        x = x + block.g(x)\n"
    net = net_of(body + END)
    net.fourth = copy.deepcopy(net.blocks[2])
    rewired = rewire.compile(net, "hc-static", example_inputs=(written_input(),))
    assert "before=" not in rewire.source(rewired, "")
    x = written_input()
    torch.testing.assert_close(rewired(x), net(x))


@pytest.mark.parametrize(
    "body",
    [
        # one of two adds in each iteration
        f"{LOOP}    if n in self.skip:\n        x = x + block.f(x)\n    else:\n        x = x + block.g(x)\n",
        # the second is in another list of the same `if`
        f"{LOOP}    if n not in self.skip:\n        x = x + block.f(x)\n        if n >= 0:\n"
        "            x = x + block.g(x)\n",
        # the same modules in two loops
        f"{LOOP}{SKIP}    x = x + block.f(x)\n{LOOP}{SKIP}    x = x + block.f(x)\n",
    ],
)
def test_modules_that_do_not_tell_which_add_runs(body: str) -> None:
    net = net_of(body + END)
    rewired = rewire.compile(net, "denseformer", example_inputs=(written_input(),))
    x = written_input()
    torch.testing.assert_close(rewired(x), net(x))
    rewired.skip = (1,)
    with pytest.raises(rewire.OutOfOrder):
        rewired(x)
