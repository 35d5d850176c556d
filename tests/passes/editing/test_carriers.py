"""Which calls carry a trunk's stream, and which of their functions are opened."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from written_nets import BLOCK, BODY, WIDTH, assert_right, written_input, written_net

import rewire
from rewire.passes.editing.carriers import Carriers
from rewire.passes.editing.sources import Sources
from rewire.passes.find import find
from rewire.passes.prepare import prepare


def carriers(block: str = BLOCK, body: str = BODY, others: set[str] = frozenset()) -> Carriers:  # type: ignore[assignment]
    """Of the one trunk of a net of three blocks."""
    torch.manual_seed(0)
    finding = find(prepare(written_net(block, body), (written_input(),)), "run").evaluation
    (name,) = finding.trunks
    codes = {op.scope.path: op.scope.code for op in finding.flow}
    return Carriers(finding, name, Sources({}, {}), {(path, codes[path]) for path in others})


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def opened(found: Carriers) -> list[str]:
    return [scope.path for scope in found.entered]


def test_blocks_are_opened_and_what_calls_them_is_not() -> None:
    found = carriers()
    assert [scope.path for scope in found.scopes] == ["", *BLOCKS]
    assert opened(found) == BLOCKS
    assert found.begin.path == "blocks.0"


def test_stages_count_the_adds_before_a_value() -> None:
    found = carriers()
    states = [found.chain.entry, *(add.op for add in found.adds)]
    assert [found.stage[state] for state in states] == list(range(7))
    assert found.on_way == {add.op for add in found.adds} and not found.in_post


def test_what_is_read_behind_the_last_add_opens_nothing() -> None:
    """The trunk has ended: the value is a tensor."""
    assert opened(carriers(body=f"{BODY}\nx = torch.tanh(x) * x.mean()")) == BLOCKS


def test_what_is_read_between_the_blocks_opens_the_function_that_reads_it() -> None:
    body = "for block in self.blocks:\n    x = block(x)\n    self.seen = x.mean()"
    assert opened(carriers(body=body)) == ["", *BLOCKS]


def test_what_is_read_before_the_first_add_opens_nothing() -> None:
    assert opened(carriers(body=f"self.seen = x.mean()\n{BODY}")) == BLOCKS


def test_a_post_is_yet_to_be_made_of_a_sum() -> None:
    found = carriers("x = torch.tanh(x + self.f(x))\nreturn torch.tanh(x + self.g(x))")
    assert found.in_post == {add.op for add in found.adds}
    assert found.on_way == {op for add in found.adds for op in (add.op, *add.post)}
    assert opened(found) == BLOCKS


def test_functions_that_other_trunks_open_are_opened() -> None:
    assert opened(carriers(others={""})) == ["", *BLOCKS]


def test_adds_in_the_function_that_calls_the_branches_open_that_one_alone() -> None:
    found = carriers(body="for block in self.blocks:\n    x = x + block.f(x)")
    assert opened(found) == [""] and found.begin.path == ""


class Beside(nn.Module):
    """A helper that gets and returns two streams changes one of them first: in the first block, that is no add."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g, self.h = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def beside(self, pair: list[Tensor]) -> tuple[Tensor, Tensor]:
        x, y = pair
        y = y + self.h(x)
        return x, y

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.beside([x, y])
        x = x + self.f(x) * y.mean()
        y = y + self.g(y)
        return x, y


class Besides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Beside() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x.flip(-1)
        for block in self.blocks:
            x, y = block(x, y)
        return x + y


@pytest.mark.parametrize("topology", ["ancre-ingoing", "hc-dynamic"])
def test_a_trunk_begins_with_one_of_what_a_helper_returns(topology: str) -> None:
    rewired = rewire.compile(Besides(), topology, example_inputs=(torch.randn(2, 3, WIDTH),))
    assert [len(c.layout.units) for c in rewire.connections(rewired).values()] == [3, 3]


class Apart(nn.Module):
    """All adds stand in one method, and another one reads the stream first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.f, self.g = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def before(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x))

    def behind(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.f(y)
        return x + self.g(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.behind(x, self.before(x))


def test_a_stream_that_begins_outside_of_the_function_with_all_its_adds() -> None:
    assert_right(Apart(), adds=2)


class Completes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, f: Tensor) -> Tensor:
        return x + self.g(f * x)


class Prepares(nn.Module):
    """As EGNN's layers: a part of the branch is computed before the function that completes and adds it."""

    def __init__(self, apart: str) -> None:
        super().__init__()
        self.f, self.completes, self.apart = nn.Linear(WIDTH, WIDTH), Completes(), apart

    def complete(self, x: Tensor, f: Tensor) -> Tensor:
        return x + self.completes.g(f * x)

    def forward(self, x: Tensor) -> Tensor:
        f = torch.tanh(self.f(x))
        if self.apart == "method":
            return self.complete(x, f)
        return self.completes(x, f) if self.apart == "module" else x + self.completes.g(f * x)


class Loop(nn.Module):
    """The same, without blocks around it."""

    def __init__(self, apart: str) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Prepares(apart) for _ in range(3))

    def complete(self, block: Prepares, x: Tensor, f: Tensor) -> Tensor:
        return x + block.completes.g(f * x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            f = torch.tanh(block.f(x))
            if block.apart == "method":
                x = self.complete(block, x, f)
            else:
                x = block.completes(x, f) if block.apart == "module" else x + block.completes.g(f * x)
        return x


@pytest.mark.parametrize("topology", ["hc-static", "grn-v3"])
@pytest.mark.parametrize("blocks", [True, False])
def test_all_parts_of_the_first_branch_read_the_stream(topology: str, blocks: bool) -> None:
    outputs = []
    x = torch.randn(2, 3, WIDTH)
    for apart in ("no", "method", "module"):
        torch.manual_seed(0)
        layers = [Prepares(apart) for _ in range(3)]
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers) if blocks else Loop(apart)
        rewired = rewire.compile(net, topology, example_inputs=(x,))
        (connection,) = rewire.connections(rewired).values()
        for n, weight in enumerate(connection.parameters()):
            nn.init.normal_(weight, generator=torch.Generator().manual_seed(n))
        outputs.append(rewired(x))
    assert torch.equal(outputs[1], outputs[0]) and torch.equal(outputs[2], outputs[0])


class Shared(Loop):
    """What all branches read is no part of the first one alone."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        f = torch.tanh(self.blocks[0].f(x))
        for block in self.blocks:
            x = block.completes(x, f)
        return x


def test_what_all_branches_share_reads_the_first_state() -> None:
    rewired = rewire.compile(Shared("no"), "hc-static", example_inputs=(torch.randn(2, 3, WIDTH),))
    assert "open(" not in rewire.source(rewired, "")


class Projects(nn.Module):
    """As blocks of Kandinsky 3: a projection, or none, makes the state that the branch is added to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(width, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.shortcut = nn.Identity() if width == WIDTH else nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x)
        x = self.shortcut(x)
        return x + y


class InTurns(nn.Module):
    """Its loop may leave out the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([Projects(WIDTH // 2), Projects(WIDTH)])
        self.second = nn.ModuleList(Projects(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for one, other in zip(self.first, self.second[0:], strict=True):
            x = one(x)
            x = other(x)
        return x


def test_a_block_that_makes_the_first_state_itself_begins_the_stream() -> None:
    x = torch.randn(2, 3, WIDTH // 2)
    model = nn.Sequential(nn.Linear(WIDTH // 2, WIDTH // 2), InTurns())
    rewired = rewire.compile(model, "residual", example_inputs=(x,))
    assert "open(" not in rewire.source(rewired, "1")


class Router(nn.Module):
    """Reads the state, and returns it with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.weight(x).sigmoid()


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.f = Router(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x, weight = self.router(x)
        return x + weight * self.f(x.tanh())


def test_what_a_block_gives_a_tensor_is_not_edited() -> None:
    net = nn.Sequential(*(Routed() for _ in range(3)))
    rewired = rewire.compile(net, "hc-static", example_inputs=(torch.randn(2, 5, 8),))
    assert len(rewire.connections(rewired)["Sequential"].layout.units) == 3
    assert "weight(x).sigmoid()" not in "".join(line for line in rewire.diff(rewired).splitlines() if line[0:1] in "+-")


class Projecting(nn.Module):
    """A block that projects its shortcut where the width changes."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.f = nn.Linear(inner, outer)
        self.shortcut = nn.Linear(inner, outer) if inner != outer else nn.Identity()

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return self.shortcut(x) + self.f(x.tanh() + shift)


class SongUNet(nn.Module):
    """One loop over the first layer, blocks, and a block that is in no trunk (EDM); it may leave each of them out."""

    def __init__(self, by_kind: bool) -> None:
        super().__init__()
        blocks = {"a": Projecting(8, 8), "b": Projecting(8, 8), "c": Projecting(8, 8), "down": Projecting(8, 12)}
        self.blocks, self.by_kind = nn.ModuleDict({"conv": nn.Linear(8, 8), **blocks}), by_kind

    def forward(self, x: Tensor) -> Tensor:
        beside = x
        for name, block in self.blocks.items():
            if "beside" in name:
                beside = block(beside)
            elif self.by_kind:
                x = block(x, 0.5) if isinstance(block, Projecting) else block(x)
            else:
                x = block(x)
        return x


@pytest.mark.parametrize("by_kind", [False, True])
def test_a_loop_that_makes_the_first_state_does_not_begin_the_stream(by_kind: bool) -> None:
    """It would begin again with what each of its calls returns."""
    rewired = rewire.compile(SongUNet(by_kind), "denseformer", example_inputs=(torch.randn(2, 3, 8),))
    assert len(rewire.connections(rewired)["blocks"].layout.units) == 3
    assert "open(" not in rewire.source(rewired, "")


class Mixed(nn.Module):
    """A block that adds what the one before it returned (Mamba)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        residual = x if residual is None else residual + x
        return self.f(self.norm(residual)), residual


class Vim(nn.Module):
    """Turns positions before each block, or flips the sequence before the first one."""

    def __init__(self, turns: bool) -> None:
        super().__init__()
        self.layers, self.embed, self.turns = nn.ModuleList(Mixed() for _ in range(4)), nn.Linear(8, 8), turns
        self.register_buffer("turn", torch.randn(8).cos())

    def forward(self, x: Tensor, flip: bool = False) -> Tensor:
        x = self.embed(x)
        if flip:
            x = x.flip([1])
        residual = None
        for layer in self.layers:
            if self.turns:
                x = x * self.turn
            x, residual = layer(x, residual)
        return residual + x  # type: ignore[operator, no-any-return]


class LastOnly(nn.Module):
    """Keeps the last position of what it is given, where it has seen the others before (x-transformers)."""

    def __init__(self, body: str = "adds") -> None:
        super().__init__()
        self.layers, self.body = (
            nn.ModuleList(nn.ModuleList([nn.LayerNorm(8), nn.Linear(8, 8)]) for _ in range(4)),
            body,
        )

    def forward(self, x: Tensor, last: bool = False) -> Tensor:
        length = x.shape[1]
        if length > 9:
            raise ValueError(f"{length} positions")
        if last:
            x = x[:, -1:]
        if self.body == "adds":
            for norm, f in self.layers:
                x = x + f(norm(x))
        elif self.body == "kept":
            for norm, f in self.layers:
                residual = x
                x = f(norm(x)) + residual
        else:
            x = self.helper(x)
        return x.tanh()

    def helper(self, x: Tensor) -> Tensor:
        for norm, f in self.layers:
            x = x + f(norm(x))
        return x


@pytest.mark.parametrize("body", ["adds", "kept", "helper"])
@pytest.mark.parametrize("topology", ["denseformer", "hc-static", "grn-v1"])
def test_what_stands_between_a_parameter_and_the_blocks(topology: str, body: str) -> None:
    """An operation that the example leaves out makes the first state."""
    x, model = torch.randn(2, 3, 8), LastOnly(body)
    rewired = rewire.compile(model, topology, example_inputs=(x,))
    for last in (False, True):
        torch.testing.assert_close(rewired(x, last), model(x, last))
    for connection in rewire.connections(rewired).values():
        for weight in connection.parameters():
            nn.init.normal_(weight, 0.5, 0.5)
    torch.testing.assert_close(rewired(x, True), rewired(x[:, -1:]))


class Masked(nn.Module):
    """Adds positions if it has some, and leaves out tokens if it is told which."""

    def __init__(self, positions: bool, renames: bool) -> None:
        super().__init__()
        self.embed, self.renames = nn.Linear(8, 8), renames
        self.positions = nn.Parameter(torch.randn(3, 8)) if positions else None
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        if self.positions is not None:
            x = x + self.positions
        if mask is not None:
            x = x * mask
        if self.renames:
            hidden = x
            for layer in self.layers:
                hidden = layer(hidden) + hidden
            return hidden
        for layer in self.layers:
            x = layer(x) + x
        return x


@pytest.mark.parametrize("renames", [False, True])
@pytest.mark.parametrize("positions", [False, True])
def test_what_stands_between_optional_operations_and_the_blocks(positions: bool, renames: bool) -> None:
    x, mask, model = torch.randn(2, 3, 8), torch.tensor([[[1.0], [0.0], [1.0]]]), Masked(positions, renames)
    for given in ((x,), (x, mask)):
        rewired = rewire.compile(model, "denseformer", example_inputs=given)
        for args in ((x,), (x, mask)):
            torch.testing.assert_close(rewired(*args), model(*args))
    rewired.positions = None
    torch.testing.assert_close(rewired(x, mask), rewire.restore(rewired)(x, mask))


class Renamed(LastOnly):
    """Keeps, too, what it was given."""

    def forward(self, x: Tensor, last: bool = False) -> Tensor:
        given = x
        if last:
            x = x[:, -1:]
        for norm, f in self.layers:
            given = x = given + f(norm(x))
        return x


def test_a_parameter_that_has_another_name_by_then() -> None:
    """The trunk starts at the beginning, as that is its first state under either name."""
    x, model = torch.randn(2, 3, 8), Renamed()
    rewired = rewire.compile(model, "denseformer", example_inputs=(x,))
    torch.testing.assert_close(rewired(x), model(x))


@pytest.mark.parametrize("topology", ["denseformer", "hc-static", "grn-v1"])
def test_what_stands_between_an_embedding_and_the_blocks(topology: str) -> None:
    x = torch.randn(2, 3, 8)
    for turns in (False, True):
        model = Vim(turns)
        rewired = rewire.compile(model, topology, example_inputs=(x,))
        torch.testing.assert_close(rewired(x), model(x))
        if not turns:
            torch.testing.assert_close(rewired(x, True), model(x, True))


def size(x: Tensor) -> Tensor:
    """A helper that only reads, and casts what it reads."""
    x = x.contiguous()
    return x.abs().mean()


class Sized(nn.Module):
    def __init__(self, shortcut: bool) -> None:
        super().__init__()
        self.f, self.shortcut = nn.Linear(WIDTH, WIDTH), shortcut

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.f(x))
        x = x + h if self.shortcut else h
        return x, size(x)


class Sizes(nn.Module):
    """As Uni-Mol's layers: the first makes the state that the trunk starts with."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sized(n > 0) for n in range(4))

    def forward(self, x: Tensor) -> Tensor:
        sizes = list[Tensor]()
        for block in self.blocks:
            x, found = block(x)
            sizes.append(found)
        return x * torch.stack(sizes).sum()


def test_a_helper_that_casts_what_it_reads() -> None:
    assert_right(Sizes(), adds=3)
