"""Loops that run the same blocks several times: recurrent depth."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import rewire
from rewire.cli.app import app

WIDTH = 8
TOPOLOGIES = ["ancre-ingoing", "hc-dynamic", "muddformer", "attnres"]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(F.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PostNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


class Core(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Recurrent(nn.Module):
    """Passes that take up what the one before has made, the first ones without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.core = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, passes: int = 3, no_grad: int = 0) -> Tensor:
        x = self.stem(x)
        for number in range(no_grad + passes):
            with torch.set_grad_enabled(torch.is_grad_enabled() and number >= no_grad):
                for block in self.core:
                    x = block(x)
        return self.norm(x)


class Normed(Recurrent):
    def forward(self, x: Tensor, passes: int = 3) -> Tensor:
        x = self.stem(x)
        for _ in range(passes):
            for block in self.core:
                x = block(x)
            x = self.norm(x)
        return x


class Whole(Recurrent):
    """The loop calls the core as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Core()  # type: ignore[assignment]

    def forward(self, x: Tensor, passes: int = 3) -> Tensor:
        x = self.stem(x)
        for _ in range(passes):
            x = self.core(x)
        return self.norm(x)


class Inline(Recurrent):
    """The loop makes the residual adds itself."""

    def forward(self, x: Tensor, passes: int = 3) -> Tensor:
        x, (f, g) = self.stem(x), self.core
        for _ in range(passes):
            x = x + f.attn(self.norm(x))
            x = x + g.mlp(self.norm(x))
        return self.norm(x)


class Placed(Recurrent):
    """A position is added in each pass: a table of weights, which makes no state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x: Tensor, passes: int = 3) -> Tensor:
        x = self.stem(x)
        for number in range(passes):
            x = x + self.places[number]
            for block in self.core:
                x = block(x)
        return self.norm(x)


class Prelude(nn.Module):
    """Prelude, core and coda: `core(x)`."""

    block: type[nn.Module] = Block
    checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.prelude, self.core, self.coda = (nn.ModuleList(self.block() for _ in range(2)) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def begun(self, e: Tensor) -> Tensor:
        return e

    def injected(self, x: Tensor, e: Tensor) -> Tensor:
        return x

    def one_pass(self, x: Tensor, e: Tensor) -> Tensor:
        x = self.injected(x, e)
        for block in self.core:
            x = block(x)
        return x

    def forward(self, x: Tensor, passes: int = 3, no_grad: int = 0) -> Tensor:
        for block in self.prelude:
            x = block(x)
        e = x
        x = self.begun(e)
        with torch.no_grad():
            for _ in range(no_grad):
                x = self.one_pass(x, e)
        for _ in range(passes):
            x = checkpoint(self.one_pass, x, e, use_reentrant=False) if self.checkpointing else self.one_pass(x, e)
        for block in self.coda:
            x = block(x)
        return self.norm(x)


class Raven(Prelude):
    """`core(adapter(cat([x, e])))`."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(2 * WIDTH, WIDTH)

    def begun(self, e: Tensor) -> Tensor:
        return torch.zeros_like(e)

    def injected(self, x: Tensor, e: Tensor) -> Tensor:
        return self.adapter(torch.cat([x, e], -1))


class Summed(Prelude):
    """`core(x + e)`."""

    def begun(self, e: Tensor) -> Tensor:
        return torch.zeros_like(e)

    def injected(self, x: Tensor, e: Tensor) -> Tensor:
        return x + e


class Level(Core):
    def forward(self, x: Tensor, injection: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(self.norm(x + injection))

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__(block)
        self.norm = nn.LayerNorm(WIDTH)


class Hierarchical(nn.Module):
    """Two states that read each other (HRM): only the last passes have gradients."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.low = Level(self.block)
        self.high = self._second()
        self.register_buffer("z", torch.randn(2, WIDTH))

    def _second(self) -> nn.Module:
        return Level(self.block)

    def forward(self, x: Tensor, passes: int = 2, cycles: int = 2) -> Tensor:
        e = self.stem(x)
        high, low = (z.expand_as(e) for z in self.z)  # type: ignore[union-attr]
        with torch.no_grad():
            for cycle in range(cycles):
                for number in range(passes):
                    if cycle < cycles - 1 or number < passes - 1:
                        low = self.low(low, high + e)
                if cycle < cycles - 1:
                    high = self.high(high, low)
        low = self.low(low, high + e)
        return self.head(self.high(high, low))


class Tiny(Hierarchical):
    """The same level for both (TRM)."""

    def _second(self) -> nn.Module:
        return self.low


def outcome(model: nn.Module, x: Tensor, **options: Any) -> list[Tensor]:
    """Output and gradients."""
    model.zero_grad()
    output = model(x, **options)
    output.square().mean().backward()
    named = sorted((n, p) for n, p in model.named_parameters() if "depth_connections" not in n)
    return [output.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for _, p in named)]


def check_same(model: nn.Module, other: nn.Module, x: Tensor, **options: Any) -> None:
    for training in (False, True):
        outcomes = (outcome(each.train(training), x, **options) for each in (model, other))
        for one, two in zip(*outcomes, strict=True):
            torch.testing.assert_close(one, two, atol=1e-9, rtol=1e-7)


def made(cls: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return cls().double(), torch.randn(2, 3, WIDTH, dtype=torch.float64)


def moved(model: nn.Module) -> None:
    """Give all weights but those of connections other values, alike for all models that share them."""
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)


def perturbed(rewired: nn.Module) -> nn.Module:
    """A rewired model whose connection weights are no start."""
    generator = torch.Generator().manual_seed(1)
    for connection in rewire.connections(rewired).values():
        for parameter in connection.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return rewired


def units(rewired: nn.Module) -> dict[str, int]:
    return {name: len(connection.layout.units) for name, connection in rewire.connections(rewired).items()}


@pytest.mark.each_once
@pytest.mark.parametrize(("cls", "no_grad"), [(Raven, 0), (Summed, 2)])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_state_that_is_made_anew_runs_any_number_of_passes(cls: Any, topology: str, no_grad: int) -> None:
    model, x = made(cls)
    rewired = rewire.compile(model, topology, example_inputs=((x,), {"no_grad": no_grad}))
    assert units(rewired) == {"prelude": 4, "core": 4, "coda": 4}
    moved(model)
    for passes in (1, 2, 5):
        check_same(rewired, model, x, passes=passes, no_grad=no_grad)
    check_same(rewired, model, x, passes=2, no_grad=1)


@pytest.mark.each_once
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("cls", [Hierarchical, Tiny])
def test_states_that_read_each_other(cls: Any, topology: str) -> None:
    model, x = made(cls)
    rewired = rewire.compile(model, topology, example_inputs=(x,))
    levels = {"low.layers": 4, "high.layers": 4} if cls is Hierarchical else {"low.layers": 4}
    assert units(rewired) == levels
    moved(model)
    for passes, cycles in ((1, 1), (3, 3)):
        check_same(rewired, model, x, passes=passes, cycles=cycles)


@pytest.mark.parametrize("cls", [Raven, Summed, Hierarchical, Tiny])
def test_post_norm_blocks(cls: Any) -> None:
    model, x = made(type(cls.__name__, (cls,), {"block": PostNorm}))
    rewired = rewire.compile(model, example_inputs=(x,))
    moved(model)
    for passes in (1, 2, 5):
        check_same(rewired, model, x, passes=passes)


@pytest.mark.parametrize(
    ("cls", "topology"),
    [*((Prelude, key) for key in TOPOLOGIES), *zip([Recurrent, Whole, Normed], TOPOLOGIES[1:], strict=True)],
)
def test_restarting_in_each_pass(cls: Any, topology: str) -> None:
    model, x = made(cls)
    rewired = rewire.compile(model, topology, loop="restart", example_inputs=(x,))
    core = "core.layers" if cls is Whole else "core"
    assert units(rewired) == ({"prelude": 4, "core": 4, "coda": 4} if cls is Prelude else {core: 4})
    moved(model)
    for passes in (1, 5):
        check_same(rewired, model, x, passes=passes)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_each_pass_is_the_core_rewired_by_itself(topology: str) -> None:
    model, x = made(Whole)
    rewired = perturbed(rewire.compile(model, topology, loop="restart", example_inputs=(x,)))
    core = perturbed(rewire.compile(model.core, topology, example_inputs=(x,)))  # type: ignore[arg-type]
    for passes in (1, 4):
        state = model.stem(x)  # type: ignore[operator]
        for _ in range(passes):
            state = core(state)
        torch.testing.assert_close(rewired(x, passes=passes), model.norm(state))  # type: ignore[operator]


@pytest.mark.parametrize("loop", ["continue", "restart"])
def test_first_passes_without_gradients(loop: Any) -> None:
    model, x = made(Recurrent)
    rewired = rewire.compile(model, "hc-dynamic", loop=loop, example_inputs=((x,), {"no_grad": 2}))
    assert units(rewired) == {"core": 4}
    moved(model)
    for passes, no_grad in ((1, 0), (2, 1), (1, 4)):
        check_same(rewired, model, x, passes=passes, no_grad=no_grad)


def test_gradients_that_are_switched_off_in_a_loop_that_had_them() -> None:
    model, x = made(Recurrent)
    rewired = rewire.compile(model, example_inputs=(x,))
    with pytest.raises(rewire.UnsupportedCall, match=r"switched off.*loop='restart'"):
        rewired(x, passes=2, no_grad=1)


@pytest.mark.parametrize("cls", [Recurrent, Whole, Normed, Inline, Placed, Prelude])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_stream_that_goes_on_runs_as_many_passes_as_were_seen(cls: Any, compiled: bool) -> None:
    model, x = made(cls)
    (trunk,) = rewire.inspect(model, (x,)).trunks
    adds = 2 if cls is Inline else 4
    assert trunk.loops == ((4 if cls is Prelude else 0, adds, 3),)
    rewired = rewire.compile(model, example_inputs=(x,))
    moved(model)
    check_same(rewired, model, x)
    run = torch.compile(rewired, backend="eager", fullgraph=True) if compiled else rewired
    for passes, ran in ((1, "1 times"), (2, "2 times"), (4, "more often"), (6, "more often")):
        with pytest.raises(Exception, match=rf"ran 3 times .* and runs {ran} .*loop='restart'"):
            run(x, passes=passes)


def test_a_loop_whose_adds_stand_in_one_forward_cannot_begin_anew() -> None:
    model, x = made(Inline)
    with pytest.raises(rewire.EditError, match="begins anew: make what the loop runs a module or a method"):
        rewire.compile(model, loop="restart", example_inputs=(x,))


def test_other_values_of_loop() -> None:
    model, x = made(Recurrent)
    with pytest.raises(ValueError, match="loop must be 'continue' or 'restart', not 'again'"):
        rewire.compile(model, loop="again", example_inputs=(x,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loop must be"):
        rewire.inspect(model, loop="again")  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", [Summed, Raven])
def test_checkpointed_passes(cls: Any) -> None:
    model, x = made(cls)
    model.checkpointing = True  # type: ignore[assignment]
    rewired = perturbed(rewire.compile(model, "hc-dynamic", example_inputs=(x,)))
    plain = perturbed(rewire.compile(model, "hc-dynamic", example_inputs=(x,), validate=False))
    plain.checkpointing = False  # type: ignore[assignment]
    for passes in (1, 4):
        check_same(rewired, plain, x, passes=passes)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Recurrent, Summed, Raven, Hierarchical, Tiny])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which Dynamo itself hides
def test_compiled_whole(cls: Any) -> None:
    model, x = made(cls)
    rewired = perturbed(rewire.compile(model, "hc-dynamic", loop="restart", example_inputs=(x,)))
    compiled = torch.compile(rewired, backend="aot_eager", fullgraph=True)
    for passes in (1, 3):
        for one, two in zip(outcome(compiled, x, passes=passes), outcome(rewired, x, passes=passes), strict=True):
            torch.testing.assert_close(one, two, atol=1e-9, rtol=1e-7)


@pytest.mark.each_once
@pytest.mark.parametrize("loop", ["continue", "restart"])
@pytest.mark.parametrize("inputs", [True, False])
def test_saved_and_loaded(loop: Any, inputs: bool, tmp_path: Path) -> None:
    model, x = made(Prelude)
    rewired = perturbed(rewire.compile(model, loop=loop, example_inputs=(x,)))
    rewire.save(rewired, tmp_path)
    loaded = rewire.load(tmp_path, made(Prelude)[0], example_inputs=(x,) if inputs else None)
    assert units(loaded) == units(rewired)
    check_same(loaded, rewired, x)
    for model in (loaded, rewired):
        if loop == "restart":
            check_same(loaded, rewired, x, passes=5)
        else:
            with pytest.raises(rewire.OutOfOrder, match="ran 3 times"):
                model(x, passes=5)


@pytest.mark.parametrize("loop", ["continue", "restart"])
def test_ejected(loop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(Prelude)
    rewired = perturbed(rewire.compile(model, loop=loop, example_inputs=(x,)))
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / f"ejected_loop_{loop}"
    rewire.eject(rewired, folder)
    (file,) = folder.glob("rewired_*.py")
    ejected = importlib.import_module(f"{folder.name}.{file.stem}").Prelude().double()
    load_model(ejected, folder / "model.safetensors")
    check_same(ejected, rewired, x)
    if loop == "restart":
        check_same(ejected, rewired, x, passes=5)
    else:
        with pytest.raises(Exception, match="ran 3 times when the model was rewired, and runs more often"):
            ejected(x, passes=5)


def test_on_the_command_line() -> None:
    for loop, adds in (("continue", 20), ("restart", 4)):
        result = CliRunner().invoke(app, ["inspect", "test_loops:Prelude", "--loop", loop])
        assert f"{adds} residual adds" in result.output
