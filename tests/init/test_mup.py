from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rewire
from rewire.init import MuP
from rewire.patterns.tiny import tiny_model

WIDTH, DEPTH, TOKENS = 12, 6, 7


class Block(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(self.norm(x)).tanh())
        return x + (y if self.scale == 1 else self.scale * y)


class Net(nn.Module):
    def __init__(self, branch: float = 1.0, logits: float = 1.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(branch) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.logits = logits

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits if self.logits == 1 else self.logits * logits


def published(given: Net, m: float, k: float, lr: float, decay: float) -> tuple[Net, torch.optim.Optimizer]:
    """The same function as `given`, with the multipliers and rates of CompleteP's authors."""
    net = Net(1 / k, 1 / m).double()
    net.load_state_dict(given.state_dict())
    with torch.no_grad():
        net.head.weight *= m
        for block in net.blocks:
            block.down.weight *= k  # type: ignore[operator]
            block.down.bias *= k  # type: ignore[operator]
    hidden = [p for block in net.blocks for p in block.parameters() if p.dim() > 1]
    biases = [p for block in net.blocks for p in block.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": [net.embed.weight, net.head.weight, *biases], "lr": lr, "weight_decay": decay},
        {"params": hidden, "lr": lr / m, "weight_decay": decay * m},
    ]
    return net, torch.optim.AdamW(groups, eps=1e-8 / (m * k))


def test_it_trains_as_the_published_code() -> None:
    torch.manual_seed(0)
    mup, model = MuP(base_width=4, base_depth=2, std=0.3), Net().double()
    rewire.initialize(model, mup, generator=torch.Generator().manual_seed(1))
    m, k, lr, decay = WIDTH / 4, DEPTH / 2, 0.05, 0.2
    theirs, optimizer = published(model, m, k, lr, decay)
    own = torch.optim.AdamW(rewire.parameter_groups(model, lr=lr, weight_decay=decay, mup=mup))
    for _ in range(6):
        ids, targets = torch.randint(TOKENS, (2, 5, 4))
        out, want = model(ids), theirs(ids)
        torch.testing.assert_close(out, want, rtol=1e-8, atol=1e-10)
        for net, logits, step in ((model, out, own), (theirs, want, optimizer)):
            net.zero_grad()
            nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
            step.step()
    assert (out - Net().double()(ids)).abs().max() > 0.1


def test_starts() -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=4, tie_word_embeddings=False)
    rewire.initialize(model, "mup", base_width=64, base_depth=2, std=0.1, generator=torch.Generator().manual_seed(0))
    layer = model.model.layers[1]
    for linear, std in (
        *((layer.self_attn.q_proj, 0.1 / 2), (layer.mlp.up_proj, 0.1 / 2), (layer.mlp.down_proj, 0.1 / 2 / 2)),
        *((layer.self_attn.o_proj, 0.1 / 2 / 2), (model.lm_head, 0.1 / 4), (model.model.embed_tokens, 0.1)),
    ):
        assert abs(float(linear.weight.detach().std()) / std - 1) < 0.03


def test_connections_and_frozen_weights_keep_groups_of_their_own() -> None:
    model = tiny_model("llama", tie_word_embeddings=False)
    mup = MuP(base_width=16)
    rewired = rewire.compile(model, "mhc", init=mup)
    rewired.model.embed_tokens.weight.requires_grad_(False)
    plain, scaled = (rewire.parameter_groups(rewired, lr=1e-3, weight_decay=0.1, mup=given) for given in (None, mup))
    own = [{id(p) for p in group["params"]} for group in scaled]
    assert own[-1] == {id(p) for p in plain[-1]["params"]} and scaled[-1].keys() == plain[-1].keys()
    assert len(set.union(*own)) == sum(map(len, own)) == sum(p.requires_grad for p in rewired.parameters())
    torch.optim.AdamW(scaled)


@pytest.mark.parametrize(
    ("name", "options", "powers"),
    [
        ("denseformer", {}, {"alpha": 1}),
        ("muddformer", {}, {"static": 1, "w1": 0, "w2": 2}),
        ("ancre-none", {}, {"logits": 1}),
        ("ancre-ingoing", {}, {"logits": 0}),  # a softmax
        ("grn-v1", {}, {"logits": 0}),  # increments are the smaller, the deeper the model is
        ("denseformer", {"sources": ["x0"]}, {"alpha": 0}),
    ],
)
def test_rates_of_connections_go_with_their_fan_in(name: str, options: dict[str, Any], powers: dict[str, int]) -> None:
    plain = tiny_model("llama", tie_word_embeddings=False, num_hidden_layers=2)
    model = rewire.compile(plain, name, validate=False, **options)
    (connection,) = rewire.connections(model).values()

    def rates(mup: MuP | None) -> dict[int, dict[str, Any]]:
        groups = rewire.parameter_groups(model, lr=1e-3, weight_decay=0.1, decay_matrices=True, mup=mup)
        return {id(p): group for group in groups for p in group["params"]}

    wide, deep = rates(MuP(base_width=4)), rates(MuP(base_width=4, base_depth=1))
    assert wide.keys() == deep.keys()
    for stored, parameter in connection.named_parameters():
        was, now = wide[id(parameter)], deep[id(parameter)]
        assert now["lr"] == was["lr"] / 2 ** powers.get(connection.weight_of(stored), 0)
        assert now["lr"] * now["weight_decay"] == pytest.approx(was["lr"] * was["weight_decay"])


def test_errors() -> None:
    with pytest.raises(rewire.RewireError, match=r"mup: 'lm_head.weight|mup: '.*embed.*tie_word_embeddings=False"):
        rewire.initialize(tiny_model("llama", tie_word_embeddings=True), "mup")
    with pytest.raises(rewire.RewireError, match=r"mup: the branch .* ends with a norm.*fixed-scale"):
        rewire.initialize(tiny_model("gemma2", tie_word_embeddings=False), "mup", base_depth=2)
    with pytest.raises(ValueError, match=r"base_width=0"):
        MuP(base_width=0)
    model = tiny_model("llama", tie_word_embeddings=False)
    with pytest.raises(ValueError, match="leave out muon_lr"):
        rewire.parameter_groups(copy.deepcopy(model), lr=1e-3, weight_decay=0.1, mup=MuP(), muon_lr=0.02)
