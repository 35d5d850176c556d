"""Parameter groups: which parameter is in which, and that optimisers treat them so."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from mixing import ids, learned, llama, mixed
from models import PreNorm, Stack, vectors

import rewire
from rewire.patterns.tiny import tiny_model


def test_each_parameter_is_in_one_group() -> None:
    model = mixed(llama())
    others, own = rewire.parameter_groups(model, lr=1e-3, weight_decay=0.1, connection_lr=1e-2)
    assert {key: own[key] for key in ("lr", "weight_decay")} == {"lr": 1e-2 / 0.01, "weight_decay": 0.0}
    assert {key: others[key] for key in ("lr", "weight_decay")} == {"lr": 1e-3, "weight_decay": 0.1}
    assert [id(p) for p in own["params"]] == [id(p) for p in learned(model).values()]
    everything = [*others["params"], *own["params"]]
    assert len(everything) == len(list(model.parameters())) == len({id(p) for p in everything})


@pytest.mark.parametrize(("lr", "rate"), [(3e-4, 3e-4 / 0.01), (3e-3, 0.1)])
def test_the_rate_of_all_is_that_of_the_connections_by_default_up_to_a_tenth_of_their_unit(
    lr: float, rate: float
) -> None:
    groups = rewire.parameter_groups(mixed(llama()), lr=lr, weight_decay=0.1)
    assert [group["lr"] for group in groups] == [lr, pytest.approx(rate)]


def test_an_adam_step_moves_values_by_the_rate_whatever_their_unit() -> None:
    model = mixed(Stack(PreNorm), "muddformer")
    (connection,) = rewire.connections(model).values()
    before = {name: value.detach().clone() for name, value in connection.values().items()}
    step = torch.optim.Adam(rewire.parameter_groups(model, lr=1e-3, weight_decay=0.0), eps=0.0)
    model(vectors()).square().sum().backward()
    step.step()
    assert set(connection.stored_in.values()) == {1.0, 1 / 8, 1 / 64}
    for name, value in connection.values().items():
        moved = (value - before[name]).abs()
        assert moved[moved > 0].median().item() == pytest.approx(1e-3, rel=1e-2), name


def test_groups_that_would_be_empty_are_left_out() -> None:
    (group,) = rewire.parameter_groups(llama(), lr=1e-3, weight_decay=0.1)
    assert len(group["params"]) == len(list(llama().parameters())) and group["weight_decay"] == 0.1
    model = mixed(llama()).requires_grad_(False)
    assert rewire.parameter_groups(model, lr=1e-3, weight_decay=0.1) == []
    for weight in learned(model).values():
        weight.requires_grad_(True)
    (group,) = rewire.parameter_groups(model, lr=1e-3, weight_decay=0.1)
    assert len(group["params"]) == 1 and group["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("topology", "options", "matrices"),
    [
        ("laurel-lr", {}, {"down", "up"}),
        ("hc-dynamic", {}, {"dynamic"}),
        ("hc-dynamic", {"output": "learned"}, {"dynamic", "last_dynamic"}),
        ("hc-gated", {}, {"down", "up", "inject"}),
        ("mhc", {}, {"dynamic"}),
        ("mhc", {"output": "learned"}, {"dynamic", "last_dynamic"}),
        ("frac-hc", {}, {"dynamic"}),
        ("muddformer", {}, {"w1", "w2"}),
        ("denseformer", {}, set()),
    ],
)
def test_matrices_among_the_connections_decay_if_asked_for(
    topology: str, options: dict[str, Any], matrices: set[str]
) -> None:
    model = rewire.compile(Stack(PreNorm), topology, example_inputs=(vectors(),), **options)
    groups = rewire.parameter_groups(model, lr=1e-3, weight_decay=0.1, connection_lr=1e-2, decay_matrices=True)
    decays = {id(p): (group["weight_decay"], group["lr"]) for group in groups for p in group["params"]}
    assert len(decays) == len(list(model.parameters()))
    (connection,) = rewire.connections(model).values()
    assert matrices <= dict(connection.named_parameters()).keys()
    for name, weight in connection.named_parameters():
        decay, rate = decays[id(weight)]
        assert rate == 1e-2 / connection.stored_in[name]
        assert rate * decay == pytest.approx(1e-3 if name in matrices else 0.0)


def test_tied_weights_count_once() -> None:
    model = mixed(tiny_model("t5"))
    others, own = rewire.parameter_groups(model, lr=1e-3, weight_decay=0.1)
    assert len({id(p) for p in others["params"]}) == len(others["params"])
    assert len(own["params"]) == 2


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_decays_all_but_the_connections(optimizer: type[torch.optim.Optimizer]) -> None:
    model = mixed(Stack(PreNorm))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    step = optimizer(rewire.parameter_groups(model, lr=0.1, weight_decay=0.5))
    model(vectors()).sum().mul(0.0).backward()  # no gradient but decay
    step.step()
    for name, value in model.named_parameters():
        assert torch.allclose(value, before[name] * (1.0 if name in learned(model) else 0.95)), name


def test_connections_learn_at_their_own_rate() -> None:
    model = mixed(llama())
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    step = torch.optim.SGD(rewire.parameter_groups(model, lr=0.0, weight_decay=0.1, connection_lr=0.1))
    model(ids(), labels=ids()).loss.backward()
    step.step()
    assert {name for name, value in model.named_parameters() if not torch.equal(value, before[name])} == set(
        learned(model)
    )


def no_decay(groups: Any, model: Any) -> set[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)] for group in groups if not group["weight_decay"] for p in group["params"]}


@pytest.mark.parametrize("topology", ["ancre-ingoing", "hc-static", "muddformer", "attnres"])
@pytest.mark.parametrize("options", [{}, {"layer_decay": 0.7}])
def test_recipes_of_timm_do_not_decay_connection_weights(topology: str, options: dict[str, Any]) -> None:
    import timm
    from timm.optim import create_optimizer_v2

    plain = timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=32, num_heads=2, num_classes=3, img_size=32)
    model: Any = rewire.compile(plain, topology, validate=False)
    groups = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.1, **options).param_groups
    own = set(learned(model))
    assert own and own <= no_decay(groups, model)
    assert {"pos_embed", "cls_token"} <= no_decay(groups, model)  # as the model itself says
    assert model.no_weight_decay() >= own and plain.no_weight_decay() == rewire.restore(model).no_weight_decay()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: torch.optim.AdamW(p, weight_decay=0.1), "AdamW decays connection weights of rewire .*logits"),
        (lambda p: torch.optim.Muon([x for x in p if x.ndim == 2]), "Muon orthogonalises connection weights"),
    ],
)
def test_an_optimiser_that_treats_them_otherwise_is_told_once(make: Any, said: str) -> None:
    model = mixed(Stack(PreNorm), "attnres" if "Muon" in said else "ancre-ingoing")
    optimizer = make(list(model.parameters()))
    model(vectors()).square().mean().backward()
    with pytest.warns(UserWarning, match=f"(?s){said}.*parameter_groups"):
        optimizer.step()
    optimizer.step()


def test_groups_of_ours_warn_of_nothing() -> None:
    model = mixed(Stack(PreNorm), "muddformer")
    model(vectors()).square().mean().backward()
    torch.optim.AdamW(rewire.parameter_groups(model, lr=1e-3, weight_decay=0.1)).step()
    torch.optim.AdamW(rewire.parameter_groups(model, lr=1e-3, weight_decay=0.1, decay_matrices=True)).step()
    matrices, *others = rewire.parameter_groups(model, lr=1e-3, weight_decay=0.1, muon_lr=0.02)
    torch.optim.Muon(matrices["params"], lr=matrices["lr"]).step()
    torch.optim.AdamW(others).step()
    torch.optim.AdamW(torch.nn.Linear(2, 2).parameters(), weight_decay=0.1).step()


def test_muon_gets_the_matrices_of_the_blocks() -> None:
    model = mixed(llama(), "muddformer")
    groups = rewire.parameter_groups(model, lr=1e-3, weight_decay=0.1, muon_lr=0.02)
    names = {id(p): name for name, p in model.named_parameters()}
    of_muon = {names[id(p)] for p in groups[0]["params"]}
    assert of_muon == {n for n, p in model.named_parameters() if n.startswith("model.layers.") and p.ndim == 2}
    assert [group["use_muon"] for group in groups] == [True, *[False] * (len(groups) - 1)]
    assert groups[0]["lr"] == 0.02 and sum(len(g["params"]) for g in groups) == len(names)


def test_copies_are_known_too() -> None:
    model = copy.deepcopy(mixed(Stack(PreNorm), "ancre-ingoing"))
    model(vectors()).square().mean().backward()
    with pytest.warns(UserWarning, match="decays connection weights"):
        torch.optim.SGD(model.parameters(), lr=1e-3, weight_decay=0.1).step()
