"""Every error, with a message that says what was done, where, and what to do instead."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from false_friends import Gated
from models import (
    EDSR,
    WIDTH,
    Interrupted,
    LinearNet,
    NanoGPT,
    PostNorm,
    PreNorm,
    Reordered,
    SeparatePreNorm,
    Stack,
    TakesKept,
    TwoWidths,
    token_ids,
    vectors,
)
from torch import Tensor, nn

import rewire
from rewire import compiler
from rewire.runtime.stream import Stream
from rewire.topologies import registry

ANCRE = "ancre-ingoing"


@dataclasses.dataclass(frozen=True)
class PreNormOnly(rewire.Topology):
    """Plain connections, for pre-norm trunks."""

    def parameters(self, dims: rewire.Dims, start: str) -> dict[str, Tensor]:
        return {}

    def weights(self, parameters: dict[str, Tensor], dims: rewire.Dims) -> None:
        return None

    def read(self, states: Any, weights: Any, t: int) -> Any:
        return states[0], states

    def write(self, states: Any, weights: Any, t: int, *branches: Tensor) -> Any:
        return (states[0] + sum(branches),)

    def finish(self, states: Any, weights: Any, dims: rewire.Dims) -> Tensor:
        return states[0]

    def matrix(self, weights: Any, dims: rewire.Dims) -> Tensor:
        return torch.eye(dims.depth)


@dataclasses.dataclass(frozen=True)
class Wrong(rewire.Residual):
    """Plain connections that lose a hundredth of unit 3's branch."""

    def merge(self, states: Any, weights: Any, t: int, *branches: Tensor) -> Tensor:
        return super().merge(states, weights, t, *(0.99 * f if t == 3 else f for f in branches))


@dataclasses.dataclass(frozen=True)
class WrongBackward(rewire.Residual):
    """Plain connections whose branch outputs get no gradient."""

    def merge(self, states: Any, weights: Any, t: int, *branches: Tensor) -> Tensor:
        return super().merge(states, weights, t, *(f.detach() for f in branches))


@pytest.fixture
def _own_topology() -> Iterator[None]:
    rewire.register_topology("pre-norm-only")(PreNormOnly)
    yield
    del registry._FACTORIES._entries["pre-norm-only"]


# -- names and arguments -----------------------------------------------------------------------------------------------


def test_unknown_topology() -> None:
    with pytest.raises(rewire.UnknownName, match=r"no topology 'ancre-ingoin'.*Did you mean 'ancre-ingoing'"):
        rewire.compile(Stack(PreNorm), "ancre-ingoin")


def test_unknown_option() -> None:
    with pytest.raises(TypeError, match="'ancre-ingoing' has no option 'temprature': it takes temperature, cascade"):
        rewire.compile(Stack(PreNorm), ANCRE, temprature=0.1)
    with pytest.raises(ValueError, match=r"temperature=-1.*positive"):
        rewire.compile(Stack(PreNorm), ANCRE, temperature=-1)


def test_a_topology_that_is_neither_name_nor_object() -> None:
    with pytest.raises(TypeError, match=r"name or a rewire.Topology, not int"):
        rewire.compile(Stack(PreNorm), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("granularity", "layer", "'auto', 'block' or 'sublayer', not 'layer'"),
        ("start", "original", "'preserve' or 'paper', not 'original'"),
    ],
)
def test_wrong_choices(argument: str, value: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rewire.compile(Stack(PreNorm), ANCRE, **{argument: value})  # type: ignore[arg-type]


def test_unknown_initialiser() -> None:
    with pytest.raises(rewire.UnknownName, match="no initialiser 'orthogonl'"):
        rewire.compile(Stack(PreNorm), ANCRE, init="orthogonl")


def test_unknown_trunk() -> None:
    with pytest.raises(rewire.UnknownName, match="no trunk 'layer'; its trunks are narrow, wide"):
        rewire.compile(TwoWidths(), ANCRE, trunks=["layer"])


def test_only_the_named_trunk_is_rewired() -> None:
    rewired = rewire.compile(TwoWidths(), ANCRE, trunks=["wide"], example_inputs=(vectors(),))
    assert list(rewire.connections(rewired)) == ["wide"]
    assert type(rewired.narrow[0]) is PreNorm and type(rewired.wide[0]) is not PreNorm


def test_a_topology_without_a_preserving_start() -> None:
    with pytest.raises(rewire.UnsupportedTopology, match=r"'ancre-constant'.*start='paper'"):
        rewire.compile(Stack(PreNorm), "ancre-constant")


# -- models ------------------------------------------------------------------------------------------------------------


def test_a_trunk_that_a_topology_does_not_fit_is_named() -> None:
    linear, x = LinearNet(), vectors()
    both = nn.Sequential(linear, nn.Linear(8, WIDTH), SeparatePreNorm(), SeparatePreNorm())
    with pytest.raises(rewire.UnsupportedTopology, match=r"^trunk '0\.blocks': .*; use grn-v3\. To leave .* trunks="):
        rewire.compile(both, "dca", example_inputs=(x,))
    with pytest.raises(rewire.UnsupportedTopology, match=r"^trunk 'blocks': .*; use grn-v3\.$"):
        rewire.compile(linear, "dca", example_inputs=(x,))


def test_no_module() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, not dict"):
        rewire.compile({}, ANCRE)  # type: ignore[arg-type]


def test_no_residual_adds() -> None:
    with pytest.raises(rewire.NoResidualAdds, match=r"in Stack: nothing in its forwards adds"):
        rewire.compile(Stack(Gated), ANCRE)


def test_no_residual_adds_names_what_was_left_alone() -> None:
    with pytest.raises(rewire.NoResidualAdds, match=r"(?s)in Stack.*layers\.0\.mlp: a single residual add"):
        rewire.compile(Stack(lambda: Half(), depth=1), ANCRE)


class Half(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.ln_2(x))


class Untraceable(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        for row in x:
            if row.sum() > 0:
                x = x + self.mlp(self.ln_2(x))
        return x


def test_a_forward_that_cannot_be_traced_is_named() -> None:
    report = rewire.inspect(Stack(Untraceable))
    assert not report.trunks and "cannot be traced: it loops over a traced value" in report.skipped["layers.0"]
    left = report.left[0]
    assert left.place == f"{__file__}:{Untraceable.forward.__code__.co_firstlineno + 1}"
    assert left.written == "for row in x:" and "pass example_inputs" in left.remedy
    with pytest.raises(rewire.NoResidualAdds, match=r"(?s)layers\.0 and \d more: its forward cannot be traced"):
        rewire.compile(Stack(Untraceable), ANCRE)


def test_already_rewired() -> None:
    rewired = rewire.compile(Stack(PreNorm), ANCRE, validate=False)
    with pytest.raises(rewire.AlreadyRewired, match=r"rewired before: call rewire\.restore"):
        rewire.compile(rewired, ANCRE)
    outer = nn.Sequential(nn.Linear(8, 8), rewired)
    with pytest.raises(rewire.AlreadyRewired, match=r"'1\.layers\.0'|'1'"):
        rewire.compile(outer, ANCRE)


def test_compiled_models() -> None:
    with pytest.raises(rewire.WrappedModel, match=r"already compiled: rewire what is inside \(\._orig_mod\), then"):
        rewire.compile(torch.compile(Stack(PreNorm)), ANCRE)  # type: ignore[arg-type]
    model = Stack(PreNorm)
    model.layers[1] = torch.compile(model.layers[1])
    with pytest.raises(rewire.WrappedModel, match=r"'layers\.1' is already compiled") as found:
        rewire.compile(model, ANCRE)
    assert found.type.__name__ == "WrappedModel"


def test_wrapped_and_scripted_models() -> None:
    with pytest.raises(rewire.WrappedModel, match=r"the model is wrapped in DataParallel: .* \(\.module\)"):
        rewire.compile(nn.DataParallel(Stack(PreNorm)), ANCRE, example_inputs=(vectors(),))
    scripted = torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8))
    with pytest.raises(rewire.WrappedModel, match=r"the model is TorchScript .* rewire the model that it was made"):
        rewire.compile(scripted, ANCRE, example_inputs=(torch.randn(2, 8),))
    with pytest.raises(rewire.WrappedModel, match="the model is TorchScript"):
        rewire.diagnose(scripted, torch.randn(2, 8))


def test_weights_that_are_no_numbers() -> None:
    model = Stack(PreNorm)
    with torch.no_grad():
        model.layers[1].ln_1.weight[0] = math.nan
    with pytest.raises(rewire.ValidationMismatch, match=r"'layers\.1\.ln_1\.weight' holds NaN or infinity"):
        rewire.compile(model, ANCRE, example_inputs=(vectors(),))


def test_diagnosis_without_a_batch() -> None:
    with pytest.raises(rewire.BadExampleInputs, match=r"pass batch=, what Stack is called with"):
        rewire.diagnose(Stack(PreNorm), None)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": "x"},
        {"lr": -1},
        {"lr": math.nan},
        {"weight_decay": -3},
        {"connection_lr": -1e-3},
    ],
)
def test_rates_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        rewire.parameter_groups(Stack(PreNorm), **({"lr": 1e-3, "weight_decay": 0.1} | options))


def test_distributed_models() -> None:
    """By its class: a real one needs a process group (see test_distributed)."""
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = Stack(PreNorm)
    with pytest.raises(rewire.WrappedModel, match=r"in DistributedDataParallel: rewire what is inside \(\.module\)"):
        rewire.compile(wrapped, ANCRE)


@pytest.mark.parametrize(
    ("wrap", "inside"),
    [(nn.DataParallel, "module"), (lambda model: torch.compile(model, backend="eager"), "_orig_mod")],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda model: rewire.freeze(model),
        lambda model: rewire.eject(model, "ejected"),
        lambda model: rewire.save(model, "saved"),
        lambda model: rewire.diagnose(model, vectors()),
    ],
    ids=["freeze", "eject", "save", "diagnose"],
)
def test_a_rewired_model_that_is_wrapped_has_to_be_unwrapped(
    use: Any, wrap: Any, inside: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = rewire.compile(Stack(PreNorm), ANCRE, example_inputs=(vectors(),))
    with pytest.raises(rewire.WrappedModel, match=rf"pass the model that is inside \(\.{inside}\)"):
        use(wrap(model))
    use(model)


def test_models_with_learned_connections_of_their_own() -> None:
    from rewire.patterns.tiny import tiny_model

    model = tiny_model("gemma3n_text")
    with pytest.raises(rewire.AlreadyConnected, match=r"Gemma3nForCausalLM already has .*LAuReL"):
        rewire.compile(model, ANCRE)
    report = rewire.inspect(model)
    assert not report.trunks and "learned depth connections" in report.skipped[""]


def test_not_rewired() -> None:
    model = Stack(PreNorm)
    with pytest.raises(rewire.RewireError, match="Stack was not rewired: there is nothing to restore"):
        rewire.restore(model)
    with pytest.raises(rewire.RewireError, match="Stack was not rewired: it has no connection weights"):
        rewire.coefficients(model)
    rewired = rewire.compile(model, ANCRE, validate=False)
    with pytest.raises(
        rewire.RewireError, match=r"'layers\.0\.mlp' was not rewritten; rewritten are layers\.0, layers\.1"
    ):
        rewire.source(rewired, "layers.0.mlp")
    with pytest.raises(rewire.UnknownName, match=r"no module 'layers\.9'"):
        rewire.source(rewired, "layers.9")


def test_a_taken_attribute() -> None:
    model = Stack(PreNorm)
    model.depth_connections = 3
    with pytest.raises(rewire.RewireError, match="already has an attribute 'depth_connections'"):
        rewire.compile(model, ANCRE)


# -- topologies that do not fit ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_own_topology")
def test_post_norm_under_a_topology_for_pre_norm() -> None:
    with pytest.raises(rewire.UnsupportedTopology, match=r"'layers' is post-norm .*ln_1.*'pre-norm-only'"):
        rewire.compile(Stack(PostNorm), "pre-norm-only")
    assert rewire.connections(rewire.compile(Stack(PreNorm), "pre-norm-only", example_inputs=(vectors(),)))


def test_block_granularity_on_post_norm() -> None:
    with pytest.raises(rewire.UnsupportedTopology, match=r"'layers' is post-norm.*granularity='sublayer'"):
        rewire.compile(Stack(PostNorm), ANCRE, granularity="block")
    rewired = rewire.compile(Stack(PostNorm), ANCRE, example_inputs=(vectors(),))  # "auto" takes what fits
    assert rewire.connections(rewired)["layers"].layout.dims.depth == 6


class Growing(nn.Module):
    """Both widths run through one list: an identity shortcut that broadcasts hides it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([PreNorm(16), PreNorm(16), PreNorm(32)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_different_widths_in_one_trunk() -> None:
    with pytest.raises(rewire.WidthMismatch, match=r"'layers' have different widths \(16, 32\).*trunks=\[\.\.\.\]"):
        rewire.compile(Growing(), ANCRE)


# -- validation --------------------------------------------------------------------------------------------------------


def test_example_inputs_that_do_not_run() -> None:
    with pytest.raises(
        rewire.BadExampleInputs, match="Stack does not run on the example inputs: RuntimeError: mat1 and"
    ):
        rewire.compile(Stack(PreNorm), ANCRE, example_inputs=(torch.randn(2, 9, 7),))
    report = rewire.inspect(Stack(PreNorm), example_inputs=(torch.randn(2, 9, 7),))
    assert "does not run on the example inputs" in report.skipped[""]


def test_the_first_block_that_differs_is_named() -> None:
    with pytest.raises(
        rewire.ValidationMismatch, match=r"output 0 .*differs.*first block that differs is 'layers\.1[.']"
    ):
        rewire.compile(Stack(PreNorm), Wrong(), example_inputs=(vectors(),))
    assert rewire.compile(Stack(PreNorm), Wrong(), validate=False) is not None


def test_a_wrong_gradient_is_seen() -> None:
    with pytest.raises(rewire.ValidationMismatch, match="gradient"):
        rewire.compile(Stack(PreNorm), WrongBackward(), example_inputs=(vectors(),))


def test_validation_leaves_nothing_behind() -> None:
    model = NanoGPT().train()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    state = torch.random.get_rng_state()
    rewired = rewire.compile(model, ANCRE, example_inputs=(token_ids(),))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(module.training for module in (*model.modules(), *rewired.modules()))
    assert all(bool((p.grad == 2).all()) for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_without_inputs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    rewire.compile(Stack(PreNorm), ANCRE)
    assert "Stack was rewired but not validated" in caplog.text and "Pass example_inputs" in caplog.text


# -- calls that were not rewritten for ---------------------------------------------------------------------------------


def test_blocks_out_of_order() -> None:
    model = rewire.compile(Reordered(PreNorm), ANCRE, example_inputs=(vectors(),))
    model.order = (0, 2, 1)
    with pytest.raises(rewire.OutOfOrder, match=r"'layers\.1' was given a plain tensor.*after residual add 2"):
        model(vectors())
    model.order = (1, 0, 2)
    with pytest.raises(rewire.OutOfOrder, match=r"'layers\.1' was given a plain tensor.*after residual add 2"):
        model(vectors())
    model.order = (0, 0, 1)
    with pytest.raises(rewire.OutOfOrder, match=r"'layers\.0' was called out of order"):
        model(vectors())
    model.order = (0, 1, 2)
    assert model(vectors()).shape == (2, 9, 5)


def test_a_block_that_is_called_once_too_often() -> None:
    model = rewire.compile(Reordered(PreNorm), ANCRE, example_inputs=(vectors(),))
    model.order = (0, 1, 2, 2)
    with pytest.raises(rewire.OutOfOrder, match=r"'layers\.2'"):
        model(vectors())


def test_a_plain_tensor_in_the_middle() -> None:
    model = rewire.compile(Interrupted(PreNorm), ANCRE, example_inputs=(vectors(),))
    model.interrupt = True
    with pytest.raises(rewire.OutOfOrder, match=r"'layers\.1' was given a plain tensor"):
        model(vectors())


def test_a_stream_of_another_trunk() -> None:
    model = rewire.compile(TwoWidths(), ANCRE, example_inputs=(vectors(),))
    stream = model.narrow[0](torch.randn(2, 9, 16))
    with pytest.raises(rewire.OutOfOrder, match=r"'wide\.1' was called out of order.*at 2 of trunk 'narrow'"):
        model.wide[1](stream)


def test_of_several_trunks_the_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is found of one of them when the rewritten model runs."""
    x, check = torch.randn(2, 8, WIDTH), compiler.check

    def fails(model: nn.Module, rewired: nn.Module, *args: Any) -> None:
        if "TakesKept" in rewire.connections(rewired):
            raise rewire.OutOfOrder("trunk 'TakesKept' ended early.")
        check(model, rewired, *args)

    monkeypatch.setattr(compiler, "check", fails)
    with pytest.raises(rewire.OutOfOrder, match=r"'encoder\.blocks'\. To leave one out"):
        rewire.compile(TakesKept(), "residual", example_inputs=(x,))
    report = rewire.inspect(TakesKept(), example_inputs=(x,))
    assert "To leave one out, pass trunks=" in report.left[-1].why
    rewired = rewire.compile(TakesKept(), "residual", trunks=["encoder.blocks"], example_inputs=(x,))
    assert list(rewire.connections(rewired)) == ["encoder.blocks"]


def test_an_early_exit_says_what_to_do() -> None:
    """A head on a state between two blocks gets a stream, and names what it is given."""
    model = rewire.compile(Stack(PreNorm), ANCRE, example_inputs=(vectors(),))
    stream = model.layers[0](model.inp(vectors()))
    assert isinstance(stream, Stream) and stream.value().shape == (2, 9, 32)
    with pytest.raises(rewire.OutOfOrder, match="ends after 2 of its 6 residual adds: a block was skipped"):
        stream.finish()


def test_every_error_is_a_rewire_error() -> None:
    errors = [value for value in vars(rewire).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(errors) >= 12 and all(issubclass(error, rewire.RewireError) for error in errors)


def test_a_long_skip_is_reported() -> None:
    report = rewire.inspect(EDSR())
    assert [trunk.name for trunk in report.trunks] == ["body"]
    assert "a shortcut around a whole trunk" in report.skipped.values()


@pytest.mark.parametrize("topology", ["ancre-ingoing", "dca"])
def test_float16_states_that_are_clamped_between_sublayers(topology: str) -> None:
    from rewire.patterns.tiny import tiny_model

    model = rewire.compile(tiny_model("t5").half().eval(), topology, validate=False)
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(rewire.UnsupportedCall, match=r"clamp their states in float16.*use bfloat16 or float32"):
        model(input_ids=ids, decoder_input_ids=ids)
