"""What initialisers promise: silent branches, identities, no dead weights, connection weights that move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from every_topology import compiled, learned
from models import WIDTH, ConvNet, NanoGPT, PlusMlp, PreNorm, ProjectionNet, Stack, images, token_ids, vectors
from torch import Tensor, nn

import rewire
from rewire.patterns import first_given, patterns_for
from rewire.patterns.tiny import tiny_model

SILENT = ("idinit", "zas", "mzas", "fixup", "zero")


def sums(model: nn.Module, run: Any) -> tuple[list[Tensor], list[Tensor]]:
    """What flows into and out of each block of ``model.layers``."""
    before: list[Tensor] = []
    after: list[Tensor] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, args: before.append(args[0]))
        layer.register_forward_hook(lambda _, _args, out: after.append(out))
    run()
    return before, after


@pytest.mark.parametrize("init", SILENT)
def test_blocks_are_identities(init: str) -> None:
    model = Stack(PreNorm)
    rewire.initialize(model, init)
    before, after = sums(model, lambda: model(vectors()))
    assert len(before) == 3
    for x, y in zip(before, after, strict=True):
        assert (y - x).abs().max() <= (5e-5 if init == "idinit" else 0) and x.abs().max() > 0.1


@pytest.mark.each_once
@pytest.mark.parametrize("init", SILENT)
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neox", "mixtral", "bert", "vit"])
def test_branches_of_real_models_are_silent(model_type: str, init: str) -> None:
    model = tiny_model(model_type).eval()
    args, kwargs = first_given(patterns_for(model), "example_inputs")(model)
    roles = rewire.roles(model)
    rewire.initialize(model, init, roles=roles)
    largest: list[float] = []
    last = {weight.name.removesuffix(".weight") for weight in roles if weight.role in ("last", "attention output")}
    for path, module in model.named_modules():
        if path in last or path.endswith("mlp.experts"):
            module.register_forward_hook(lambda _m, _a, out: largest.append(float(out.detach().abs().max())))
    model(*args, **kwargs)
    assert len(largest) >= 6 and max(largest) <= (1e-4 if init == "idinit" else 0)


def test_square_layers_are_identities() -> None:
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(5)])
    rewire.initialize(model, "idinit", loose=0.0)
    x = torch.randn(3, 6)
    assert torch.equal(model[:4](x), x)


def trained(model: nn.Module, steps: int, loss: Any, rate: float = 0.1) -> nn.Module:
    optimiser = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for step in range(steps):
        optimiser.zero_grad()
        loss(step).backward()
        optimiser.step()
    return model


@pytest.mark.parametrize(("init", "alive"), [("idinit", True), ("zero", False)])
def test_idiz_has_no_dead_weights_where_plain_zeros_have(init: str, alive: bool) -> None:
    """Figure 5: with zero gamma behind a zero weight, neither ever gets a gradient."""
    model = ConvNet()
    rewire.initialize(model, init)
    rewire.initialize(model, "zero-gamma")
    if init == "zero":
        nn.init.normal_(model.head.weight)
    start = [block.conv2.weight.clone() for block in model.blocks]
    target = torch.randint(5, (8,), generator=torch.Generator().manual_seed(0))
    trained(model, 10, lambda _: nn.functional.cross_entropy(model(images(8)), target))
    moved = [float((block.conv2.weight != w).float().mean()) for block, w in zip(model.blocks, start, strict=True)]
    assert min(moved) > 0.9 if alive else max(moved) == 0


@pytest.mark.parametrize("init", SILENT)
def test_training_moves_every_weight(init: str) -> None:
    model = NanoGPT()
    rewire.initialize(model, init)
    start = {name: parameter.clone() for name, parameter in model.named_parameters()}
    ids = token_ids(batch=8)
    trained(model, 10, lambda _: model(ids, ids)[1], rate=0.5)
    still = [name for name, p in model.named_parameters() if torch.equal(p, start[name])]
    assert still == [] and all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.each_once
@pytest.mark.parametrize("init", ["idinit", "mzas", "fixup"])
@pytest.mark.parametrize(
    "key",
    [
        "ancre-ingoing",
        "denseformer",
        "grn-v1",
        "grn-v3",
        "dca",
        "hc-static",
        "hc-dynamic",
        "mhc",
        "laurel-lr",
        "rezero",
    ],
)
def test_connection_weights_move(key: str, init: str) -> None:
    """The classifier gets a gradient at step 1, the branches' last weights at step 2, the connections at step 3."""
    model = compiled(Stack(PreNorm), key, init=init, validate=False)
    start = {name: weight.detach().clone() for name, weight in learned(model).items()}
    x, target = vectors(batch=8), torch.randn(8, 9, 5)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(x), target).backward()
        optimiser.step()
    still = [name for name, weight in learned(model).items() if torch.equal(weight, start[name])]
    assert still == []


def test_jacobian_of_64_blocks() -> None:
    """Figure 18: the mean squared singular value is about 1 under IDInit, and over 2,000 under Kaiming's."""

    def chi(init: str) -> float:
        model = nn.Sequential(*[PlusMlp() for _ in range(64)])
        rewire.initialize(model, init, generator=torch.Generator().manual_seed(0))
        jacobian = torch.func.jacrev(model)(torch.rand(WIDTH) + 0.1)
        return float(torch.linalg.svdvals(jacobian.detach()).square().mean())

    assert abs(chi("idinit") - 1) < 0.01 and chi("kaiming") > 2000


def test_image_models_train() -> None:
    model = ProjectionNet()
    rewire.initialize(model, "idinit")
    target = torch.arange(5)

    def loss() -> float:
        return nn.functional.cross_entropy(model(images(5)), target).item()

    first = loss()
    trained(model, 60, lambda _: nn.functional.cross_entropy(model(images(5)), target), rate=0.05)
    assert loss() < 0.2 * first
