"""Validation notices what differs, and leaves nothing behind."""

import collections
import dataclasses
import logging

import pytest
import torch
import torch.nn.functional as F
from models import WIDTH, NanoGPT, PreNorm, Stack, vectors
from torch import Tensor, nn

import rewire
from rewire.errors import ValidationMismatch
from rewire.passes import validate
from rewire.passes.inputs import normalise_inputs
from rewire.passes.validate import compare
from rewire.passes.validating.tensors import relative_error, tensors_in
from rewire.topologies.base import materialize
from rewire.topologies.residual import Residual

IDS = torch.arange(12).reshape(2, 6)


class Detached(Residual):
    """The right outputs, but no gradient through the shortcut after the first unit."""

    def merge(self, states, weights, t, *branches):
        shortcut = states[0] if t == 1 else states[0].detach()
        return shortcut + sum(branches)


class Drifting(Residual):
    """Wrong from the third unit on."""

    def merge(self, states, weights, t, *branches):
        return materialize(super().merge(states, weights, t, *branches)) * (1.01 if t >= 3 else 1.0)


def test_wrong_gradients_are_noticed_behind_right_outputs():
    with pytest.raises(rewire.ValidationMismatch, match="the gradient of '"):
        rewire.compile(NanoGPT(), Detached(), example_inputs=(IDS,))


def test_the_first_block_that_differs_is_named():
    # two adds a block: the third is the first of block 1
    with pytest.raises(rewire.ValidationMismatch, match=r"first block that differs is 'transformer\.h\.1'"):
        rewire.compile(NanoGPT(), Drifting(), example_inputs=(IDS,))


class SkipsTheMlp(PreNorm):
    def forward(self, x):
        return x + self.attn(self.ln_1(x))


class ReadsTheInput(PreNorm):
    """Parallel: the branch of the MLP does not read what the attention adds."""

    def forward(self, x):
        return x + self.attn(self.ln_1(x)) + self.mlp(self.ln_2(x))


class OtherNorm(PreNorm):
    """The same numbers until norms have weights of their own."""

    def forward(self, x):
        x = x + self.attn(self.ln_2(x))
        return x + self.mlp(self.ln_2(x))


class OtherOrder(PreNorm):
    def forward(self, x):
        x = x + self.mlp(self.ln_2(x))
        return x + self.attn(self.ln_1(x))


@pytest.mark.parametrize("block", [SkipsTheMlp, ReadsTheInput, OtherNorm, OtherOrder])
def test_what_an_edit_has_lost_or_mixed_up_shows_in_numbers(block, monkeypatch):
    def stack(of):
        torch.manual_seed(0)
        return Stack(of)

    monkeypatch.setattr(validate, "with_plain_connections", lambda rewired: stack(block))
    with pytest.raises(rewire.ValidationMismatch, match=r"differs from the original's|gradient in the original only"):
        rewire.compile(stack(PreNorm), "ancre-ingoing", example_inputs=(vectors(),))


def test_nothing_is_left_behind():
    model = NanoGPT()
    model.train()
    model.transformer.h[1].eval()
    flags = [module.training for module in model.modules()]
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    rewired = rewire.compile(model, example_inputs=(IDS,))
    assert torch.equal(torch.rand(3), expected), "the random state is as before"
    assert [module.training for module in model.modules()] == flags
    assert all(parameter.grad is None for parameter in rewired.parameters())
    assert not any(block._forward_hooks for block in rewired.transformer.h)


def test_validation_runs_without_dropout_and_with_gradients_switched_off_outside():
    with torch.no_grad():
        rewire.compile(NanoGPT().train(), example_inputs=(IDS,))


@dataclasses.dataclass
class Output:
    first: torch.Tensor
    rest: dict


def test_tensors_in_every_kind_of_output():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [len(t) for t in tensors_in((Output(a, {"x": [b, None, "text"]}), c))] == [1, 2, 3]


def test_tensors_in_an_object_that_is_called_and_read_by_key():
    """As batches of PyTorch Geometric are."""

    class Batch(collections.UserDict):
        def __call__(self, *keys):
            return [self[key] for key in keys]

    assert [len(t) for t in tensors_in([Batch(x=torch.ones(2), name="text")])] == [2]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((1, 2), ((1, 2), {})),
        ([1], ((1,), {})),
        ({"x": 1}, ((), {"x": 1})),
        (((1,), {"x": 2}), ((1,), {"x": 2})),
        ((1, {"x": 2}), ((1, {"x": 2}), {})),
    ],
)
def test_the_forms_of_example_inputs(given, expected):
    assert normalise_inputs(given) == expected


def test_relative_error_sees_infinities():
    a = torch.tensor([1.0, 2.0, float("inf")])
    assert relative_error(a, a) == 0
    assert relative_error(a, torch.tensor([1.0, 2.0, 3.0])) == float("inf")
    assert relative_error(a.bfloat16(), torch.tensor([1.0, 2.5, float("inf")])) == pytest.approx(0.5 / 5**0.5)


def test_what_was_not_validated_is_said(caplog):
    with caplog.at_level(logging.WARNING, logger="rewire"):
        rewire.compile(NanoGPT())
    assert "not validated" in caplog.text and "example_inputs" in caplog.text
    caplog.clear()
    with torch.device("meta"):
        model = NanoGPT()
    with caplog.at_level(logging.WARNING, logger="rewire"):
        rewire.compile(model)
    assert "meta device" in caplog.text


def test_frozen_models_are_compared_by_their_outputs():
    model = NanoGPT().requires_grad_(False)
    with pytest.raises(rewire.ValidationMismatch, match="output 0"):
        rewire.compile(model, Drifting(), example_inputs=(IDS,))


def test_a_different_number_of_outputs_is_noticed():
    class Two(nn.Module):
        def forward(self, x):
            return x, x

    class One(nn.Module):
        def forward(self, x):
            return x

    with pytest.raises(rewire.ValidationMismatch, match="1 tensors, not 2"):
        compare(Two(), One(), ((torch.ones(1),), {}))


class Strided(Residual):
    """The right values in other strides than the original's."""

    def finish(self, states, weights, dims):
        return super().finish(states, weights, dims).transpose(0, 1).contiguous().transpose(0, 1)


def test_strides_of_the_outputs_do_not_matter():
    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(PreNorm() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    rewired = rewire.compile(Body(), Strided(), example_inputs=(vectors(width=WIDTH),))
    assert rewired(vectors(width=WIDTH)).stride() != vectors(width=WIDTH).stride()


class ChannelsLast(nn.Module):
    """Its sum lies in memory as the branch does, which comes first; and so does what the next block drops of."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Conv2d(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        branch = F.dropout(self.map(x), 0.5, self.training)
        return branch.contiguous(memory_format=torch.channels_last) + x


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(ChannelsLast(), ChannelsLast(), ChannelsLast())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def test_dropout_on_other_strides_is_the_same_dropout():
    rewire.compile(Images(), "residual", example_inputs=(torch.randn(2, 6, 4, 4),))


class Amplifies(nn.Module):
    """Its output is rounding error, made large; or, with ``factor``, something else."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.randn(8)), factor

    def forward(self, x: Tensor) -> Tensor:
        large = 1e4 * self.weight * self.factor
        return (x + large - large) * 1e3


def test_a_model_that_amplifies_rounding_is_compared_in_float64():
    class Reordered(Amplifies):
        def forward(self, x: Tensor) -> Tensor:
            return (x + (1e4 * self.weight - 1e4 * self.weight * self.factor)) * 1e3

    original, inputs = Amplifies(), ((torch.randn(2, 8),), {})
    reordered = Reordered()
    reordered.load_state_dict(original.state_dict())
    compare(original, reordered, inputs)
    reordered.factor = 1 + 1e-6
    with pytest.raises(ValidationMismatch, match="output 0"):
        compare(original, reordered, inputs)


class PreciseHead(nn.Module):
    """A bfloat16 body, and a float32 head that gets what it needs."""

    def __init__(self):
        super().__init__()
        self.body, self.head = Stack(PreNorm).bfloat16(), nn.Linear(Stack(PreNorm).out.out_features, 5)

    def forward(self, x):
        return self.head(self.body(x.bfloat16()).float())


@pytest.mark.parametrize("by", ["source", "graph"])
def test_a_model_that_is_less_precise_than_its_output_is_compared_as_such(by):
    """A sum that is rounded once is not, to the last bit, what plain adds make; what is wrong by more is refused."""

    def rewired(topology):
        torch.manual_seed(0)
        if by == "source":
            return rewire.compile(PreciseHead(), topology, example_inputs=(vectors(),))(vectors())
        backend = rewire.Backend(topology, inner="eager")
        return torch.compile(PreciseHead(), backend=backend)(vectors())

    assert rewired("grn-v3").dtype == torch.float32
    with pytest.raises(Exception, match="differs from the original's by"):
        rewired(Scaled())


class Scaled(Residual):
    """Wrong in the first unit."""

    def merge(self, states, weights, t, *branches):
        return materialize(super().merge(states, weights, t, *branches)) * (1.2 if t == 1 else 1.0)


class Chaotic(Stack):
    """A thousand times the rounding error after each ten iterations, in float32 whatever the model's dtype is."""

    def forward(self, x):
        x = super().forward(x).float().sigmoid()
        for _ in range(60):
            x = 3.99 * x * (1 - x)
        return x


class Rounding(Residual):
    """Right, up to the last digit."""

    def merge(self, states, weights, t, *branches):
        return materialize(super().merge(states, weights, t, *branches)) * (1 + torch.finfo().eps)


def test_a_model_that_amplifies_rounding_is_refused_with_that_reason():
    with pytest.raises(rewire.ValidationMismatch, match=r"differs .*each of its weights is rounded to the next number"):
        rewire.compile(Chaotic(PreNorm), Rounding(), example_inputs=(vectors(),))
    rewire.compile(Stack(PreNorm), Rounding(), example_inputs=(vectors(),))


def test_and_that_reason_is_not_given_without_need():
    with pytest.raises(rewire.ValidationMismatch) as caught:
        rewire.compile(NanoGPT(), Drifting(), example_inputs=(IDS,))
    assert "rounded" not in str(caught.value)
