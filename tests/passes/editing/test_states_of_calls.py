"""States that calls make, with views and casts in them: post-norms in helpers, casts in one block for the next."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_bitwise, assert_close, evaluate
from mixing import shaken
from torch import Tensor, nn
from written_nets import assert_right, written_input, written_net

import rewire

WIDTH = 8
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def on_rows(f: nn.Module, x: Tensor) -> Tensor:
    return f(x.flatten(0, 1)).view(x.shape)


def turned(f: nn.Module, x: Tensor) -> Tensor:
    return f(x.transpose(0, 1)).transpose(0, 1)


def in_a_batch(f: nn.Module, x: Tensor) -> Tensor:
    return f(x[None])[0]


def add_or_not(f: nn.Module, x: Tensor, residual: bool = False) -> Tensor:
    made = f(x.flatten(0, 1)).view(x.shape)
    return x + made if residual else made


def as_it_is(f: nn.Module, x: Tensor) -> Tensor:
    return f(x)


class PostNorm(nn.Module):
    def __init__(self, through: Any, added: bool) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.through, self.added = through, added

    def forward(self, x: Tensor) -> Tensor:
        x = add_or_not(self.f, x, True) if self.added else x + self.f(x)
        x = self.through(self.ln_1, x)
        return self.through(self.ln_2, x + self.g(x))


class Flattened(PostNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        x = self.ln_1(x.flatten(0, 1)).view(x.shape)
        x = x + self.g(x)
        return self.ln_2(x.flatten(0, 1)).view(x.shape)


class Turned(PostNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        x = self.ln_1(x.transpose(0, 1)).transpose(0, 1)
        x = x + self.g(x)
        return torch.permute(self.ln_2(torch.permute(x, (1, 0, 2))), (1, 0, 2))


class InALoop(PostNorm):
    def forward(self, x: Tensor) -> Tensor:
        for f, norm in ((self.f, self.ln_1), (self.g, self.ln_2)):
            x = x + f(x)
            x = norm(x.mT.mT.transpose(0, 1)).transpose(0, 1)
        return x


class Axial(PostNorm):
    """Each norm brings its views back, and the state goes on in another order."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.through(self.ln_1, x + self.f(x))
        x = x.transpose(0, 1).contiguous()
        x = self.through(self.ln_2, x + self.g(x))
        return x.transpose(0, 1).contiguous()


class AxialFlattened(PostNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        x = self.ln_1(x.flatten(0, 1)).view(x.shape)
        x = x.transpose(0, 1).contiguous()
        x = x + self.g(x)
        x = self.ln_2(x.flatten(0, 1)).view(x.shape)
        return x.transpose(0, 1).contiguous()


def trunk(cls: type[PostNorm], through: Any, added: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*(cls(through, added) for _ in range(2))))


def moved(model: nn.Module, topology: str, given: Tensor = X) -> Any:
    with torch.no_grad():
        return shaken(rewire.compile(model, topology, example_inputs=(given,)), 0.3, seed=5)


@pytest.mark.each_once
@pytest.mark.parametrize("topology", ["ancre-ingoing", "denseformer", "muddformer"])
@pytest.mark.parametrize(
    ("cls", "through", "added"),
    [
        (PostNorm, on_rows, False),
        (PostNorm, turned, False),
        (PostNorm, in_a_batch, False),
        (PostNorm, add_or_not, True),
        (Flattened, None, False),
        (Turned, None, False),
        (InALoop, None, False),
    ],
)
def test_views_in_a_call_are_of_the_state_alone_that_it_makes(
    cls: Any, through: Any, added: bool, topology: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rewire"):
        rewired = moved(trunk(cls, through, added), topology)
    assert "not validated" not in caplog.text
    plain = moved(trunk(PostNorm, as_it_is), topology)
    for training in (False, True):
        assert_close(evaluate(plain, (X,), {}, training), evaluate(rewired, (X,), {}, training))


@pytest.mark.each_once
@pytest.mark.parametrize("topology", ["ancre-ingoing", "muddformer"])
@pytest.mark.parametrize(("cls", "through"), [(Axial, on_rows), (Axial, in_a_batch), (AxialFlattened, None)])
def test_views_of_a_norm_that_are_turned_back_before_the_state_is_turned(cls: Any, through: Any, topology: str) -> None:
    rewired, plain = moved(trunk(cls, through), topology), moved(trunk(Axial, as_it_is), topology)
    assert [len(one.layout.units) for one in rewire.connections(rewired).values()] == [4]
    for training in (False, True):
        assert_close(evaluate(plain, (X,), {}, training), evaluate(rewired, (X,), {}, training))


class Switched(Turned):
    on = True

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        x = self.ln_1(x.transpose(0, 1)).transpose(0, 1)
        if self.on:
            x = 0.5 * x
        return x + self.g(x)


def test_a_state_among_views_where_what_followed_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    rewired = rewire.compile(trunk(Switched, None), "ancre-ingoing", example_inputs=(X,))
    monkeypatch.setattr(Switched, "on", False)
    assert_close(evaluate(trunk(Switched, None), (X,), {}), evaluate(rewired, (X,), {}))


class NormsNext(PostNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        x = self.ln_1(x.transpose(0, 1)).transpose(0, 1)
        return x + self.g(self.ln_2(x))


def test_a_norm_reads_a_state_when_its_views_are_turned_back() -> None:
    assert "norm=self.ln_2" not in rewire.diff(rewire.compile(trunk(NormsNext, None), "residual", example_inputs=(X,)))


def test_a_write_to_a_view_of_a_view_makes_a_state_once() -> None:
    assert_right(written_net("x = x + self.f(x)\nx[:, 1:][:, 1:].mul_(0.5)\nreturn x"), adds=3)


def test_what_makes_a_state_is_named_without_the_views_around_it() -> None:
    with pytest.raises(rewire.UnsupportedTopology, match=r"ln_1 makes the next state"):
        rewire.compile(trunk(Turned, None), "hc-static", example_inputs=(X,))


def test_what_a_gate_of_the_last_state_is_made_of_makes_no_state() -> None:
    net = written_net("x = x + self.f(x)\nreturn x * torch.sigmoid(self.g(x))")
    (found,) = rewire.inspect(net, (written_input(),)).trunks
    assert [site.post for site in found.sites] == [("mul",)] * 3


def test_a_call_that_makes_a_state_in_another_order_is_refused() -> None:
    model = trunk(PostNorm, lambda f, x: f(x).transpose(0, 1))
    with pytest.raises(rewire.EditError, match=r"\.py:\d+ makes the next state, and changes its dimensions or their"):
        rewire.compile(model, "denseformer", example_inputs=(torch.randn(5, 5, WIDTH),))


class AddsNext(nn.Module):
    """As Mamba's: each block adds what the one before it has made; the first has nothing to add."""

    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.norm, self.mixer, self.cast = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), cast

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        residual = (hidden + residual) if residual is not None else hidden
        hidden = self.norm(residual.to(dtype=self.norm.weight.dtype))
        if self.cast:
            residual = residual.to(torch.float32)
        return self.mixer(hidden), residual


class Mamba(nn.Module):
    def __init__(self, cast: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(AddsNext(cast) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden, residual = self.stem(x), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        total: Tensor = hidden + residual
        return total


@pytest.mark.parametrize("topology", ["ancre-ingoing", "grn-v2", "hc-static"])
def test_a_cast_in_the_block_that_has_nothing_to_add(topology: str) -> None:
    plain, cast = (moved(Mamba(cast), topology) for cast in (False, True))
    assert sum(len(c.layout.units) for c in rewire.connections(cast).values()) == 4
    assert_bitwise(evaluate(plain, (X,), {}), evaluate(cast, (X,), {}))


@pytest.mark.parametrize("topology", ["ancre-ingoing", "grn-v2", "hc-static"])
def test_states_keep_the_precision_that_a_block_gives_them_for_the_next(topology: str) -> None:
    model, given = Mamba(True).bfloat16(), (X.bfloat16(),)
    rewired = rewire.compile(model, topology, example_inputs=given)
    expected, actual = model(*given), rewired(*given)
    assert actual.dtype == torch.float32 and torch.equal(expected, actual)


@pytest.mark.parametrize("skip", ["y = 0.5 * skips.pop()\n    x = x + y", "x = x + 0.5 * skips.pop()"])
def test_the_skip_of_a_u_net_in_a_variable(skip: str) -> None:
    body = (
        "skips = []\nfor block in self.blocks:\n    x = block(x)\n    skips.append(x)\n"
        f"for block in self.blocks:\n    {skip}\n    x = block(x)"
    )
    assert_right(written_net(body=body), adds=12)


class Squashes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def squash(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.norm(x) * 0.9
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        return self.squash(x)


def test_a_state_that_a_loop_makes_in_several_passes_is_refused() -> None:
    block = "x = x + self.f(x)\nfor _ in range(3):\n    x = F.layer_norm(x, x.shape[-1:]) * 0.9\nreturn x"
    with pytest.raises(rewire.EditError, match=r"\.py:\d+ makes the next state, and runs 3 times between two residual"):
        rewire.compile(written_net(block), "ancre-ingoing", example_inputs=(written_input(),))
    rewired = rewire.compile(nn.Sequential(Squashes(), Squashes()), "ancre-ingoing", example_inputs=(X,))
    assert "depth.push(self.squash(x))" in rewire.diff(rewired)


def test_scaled_sums_between_two_adds_are_named() -> None:
    body = "x = x + self.blocks[0].f(x)\nfor b in self.blocks:\n    x = 0.9 * x + b.g(x)\nx = x + self.blocks[1].f(x)"
    shown = rewire.inspect(written_net(body=body), (written_input(),))
    assert any("its shortcut is scaled" in why for why in shown.skipped.values())


def test_what_a_skip_leads_around_makes_no_state() -> None:
    """The state behind it is the skip and what the inner blocks have made; they read it, and are no part of it."""
    body = (
        "skip = self.blocks[0](x)\nx = self.stem(skip)\nx = self.blocks[1](x)\n"
        "x = torch.lerp(skip, self.stem(x), 0.5)\nx = self.blocks[2](x)"
    )
    outer, inner = rewire.inspect(written_net(body=body), (written_input(),)).trunks
    assert len(inner.sites) == 2 and [site.post for site in outer.sites] == [(), ("lerp",), (), ()]


def test_a_first_state_that_a_lambda_makes_beside_others_is_refused() -> None:
    body = (
        "a, b = map(lambda t: t[:, :2], (x, x.flip(0)))\nfor block in self.blocks:\n"
        "    a = a + block.f(a * b)\nx = torch.cat([a, b])"
    )
    with pytest.raises(rewire.EditError, match="that runs 2 times, of which one makes its first state"):
        rewire.compile(written_net(body=body), "ancre-ingoing", example_inputs=(written_input(),))


@pytest.mark.parametrize(
    "between",
    [
        "block(x).float()",
        "block(x).contiguous()",
        "F.dropout(block(x), 0.0, self.training)",
    ],
)
def test_what_returns_the_state_itself_where_a_block_is_called(between: str) -> None:
    """In the expression that calls a block stands what does nothing here: no operation shows it."""
    assert_right(written_net(body=f"for block in self.blocks:\n    x = {between}"), 6)


class AddsOrNot(nn.RMSNorm):
    """As vLLM's fused norm: without a residual it only reads the state, of which it makes a cast."""

    def forward(self, x, residual=None):  # type: ignore[no-untyped-def]
        if residual is not None:
            x = x + residual
            residual = x
        x = super().forward(x.float().type_as(x))
        return x if residual is None else (x, residual)


class FirstHasNoResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = AddsOrNot(WIDTH), AddsOrNot(WIDTH)
        self.f, self.g = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, residual):  # type: ignore[no-untyped-def]
        if residual is None:
            residual = x
            x = self.first(x)
        else:
            x, residual = self.first(x, residual)
        x, residual = self.second(self.f(x), residual)
        return self.g(x), residual


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = nn.Linear(WIDTH, WIDTH), AddsOrNot(WIDTH)
        self.blocks = nn.ModuleList(FirstHasNoResidual() for _ in range(3))

    def forward(self, x):  # type: ignore[no-untyped-def]
        x, residual = self.stem(x), None
        for block in self.blocks:
            x, residual = block(x, residual)
        return self.last(x, residual)[0]


def test_a_norm_that_adds_only_with_a_residual() -> None:
    assert_right(Fused(), adds=6)


class AddsWhatItIsGiven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + sublayer(self.norm(x))


class GivesItsLayers(nn.Module):
    """A block that hands its layers to the modules that add, as those of the annotated transformer do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.two = AddsWhatItIsGiven(), AddsWhatItIsGiven()
        self.mixer, self.mlp, self.how = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        if self.how == "lambda":
            x = self.one(x, lambda y: self.mixer.forward(y) * scale)
        elif self.how == "named lambda":
            given = lambda y: self.mixer.forward(y) * scale  # noqa: E731
            x = self.one(x, given)
        elif self.how == "inner function":

            def run(y: Tensor) -> Tensor:
                return self.mixer(y) * scale

            x = self.one(x, run)
        elif self.how == "keyword":
            x = self.one(x, sublayer=lambda y: self.mixer(y) * scale)
        elif self.how == "partial":
            x = self.one.forward(x, functools.partial(self.mixer))
        return self.two(x, self.mlp)


class CallsThemWithAScale(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GivesItsLayers(how) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, x.new_full((WIDTH,), 0.5))
        return x


@pytest.mark.parametrize("how", ["lambda", "named lambda", "inner function", "keyword", "partial"])
def test_what_a_call_is_given_to_run_is_no_other_path(how: str) -> None:
    """The layer inside the function was taken for the same call without checkpointing, and handed the stream."""
    rewired = rewire.compile(CallsThemWithAScale(how), "ancre-ingoing", example_inputs=(X,))
    (connection,) = rewire.connections(rewired).values()
    assert len(connection.layout.units) == 6
