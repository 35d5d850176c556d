"""The rewritten model is recorded once more, and has the graph of the original."""

from __future__ import annotations

import pytest
import torch
from models import PreNorm, Stack, vectors
from torch import Tensor, nn

import rewire
from rewire.copies import Inputs
from rewire.passes import validate
from rewire.passes.find import find
from rewire.passes.finding.flow import Flow
from rewire.passes.prepare import prepare
from rewire.passes.validating.same_graph import compare_graphs


def flows(model: nn.Module, inputs: Inputs) -> list[Flow]:
    return find(prepare(model, inputs)).flows


def stack_of(block: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return Stack(block)


class SkipsTheMlp(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.ln_1(x))


class ReadsTheInput(PreNorm):
    """Parallel: the branch of the MLP does not read what the attention adds."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.ln_1(x)) + self.mlp(self.ln_2(x))


class OtherNorm(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_2(x))
        return x + self.mlp(self.ln_2(x))


class OtherOrder(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.ln_2(x))
        return x + self.attn(self.ln_1(x))


def test_the_same_model_agrees_in_both_modes() -> None:
    model, inputs = stack_of(PreNorm), ((vectors(),), {})
    found = flows(model, inputs)
    operations = [op for flow in found for op in flow if op.weighted]
    assert compare_graphs(found, model, inputs) == len(operations) == 2 * (2 + 4 * 3)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (SkipsTheMlp, r"original runs 'linear' in module 'layers.0.mlp.up' \(.*models.py:\d+: self.up\(x\)\), it"),
        (OtherOrder, r"where the original runs 'linear' in module 'layers.0.attn"),
        (ReadsTheInput, r"'linear' in module 'layers.0.mlp.*is computed from 'linear' in module 'layers.0.attn"),
        (OtherNorm, r"parameter 'layers.0.ln_1.weight' in the original, and from parameter 'layers.0.ln_2.bias'"),
    ],
)
def test_what_differs_is_named_with_its_place(block: type[nn.Module], said: str) -> None:
    inputs: Inputs = ((vectors(),), {})
    with pytest.raises(rewire.ValidationMismatch, match=said):
        compare_graphs(flows(stack_of(PreNorm), inputs), stack_of(block), inputs)


class Unseen(PreNorm):
    """What the second branch computes makes no difference to any output or gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + 0 * self.mlp(self.ln_2(x)).detach()


class Leaves(Unseen):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.ln_1(x))


def test_compile_refuses_what_no_number_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = vectors()
    monkeypatch.setattr(validate, "with_plain_connections", lambda rewired: stack_of(Leaves))
    assert validate.compare(stack_of(Unseen), stack_of(Leaves), ((inputs,), {})).outputs > 0
    with pytest.raises(rewire.ValidationMismatch, match=r"original runs 'linear' in module 'layers.0.mlp.up'"):
        rewire.compile(stack_of(Unseen), "ancre-ingoing", example_inputs=(inputs,))
