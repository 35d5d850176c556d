"""DCA against the package ``deep-cross-attention`` by Phil Wang, and what only DCA has."""

from __future__ import annotations

import pytest
import torch
from deep_cross_attention.dca_gpt import DCAGPT, GRN
from torch import Tensor, nn
from toy_nets import begin

from rewire.errors import UnsupportedTopology
from rewire.topologies import make_topology
from rewire.topologies.base import Dims, QKVInputs, materialize
from rewire.topologies.grn import DCA, GRNv3

WIDTH, DEPTH = 8, 3


def as_published(grn: GRN) -> GRN:
    """The package's GRN, random, without its norm: it computes ``relu(w . rmsnorm(f))``, the paper ``relu(w . f)``."""
    assert isinstance(grn.to_aggregate[0], nn.RMSNorm)
    grn.to_aggregate[0] = nn.Identity()
    nn.init.normal_(grn.to_aggregate[1].weight, std=0.4)
    nn.init.normal_(grn.bias, std=0.4)
    return grn


def flat(grns: list[GRN]) -> dict[str, Tensor]:
    """Their weights in this topology's order; the package, too, orders q, k, v, and x_0 first."""
    return {
        "b": torch.cat([grn.bias.detach().flatten(0, 1) for grn in grns]),
        "w": torch.cat([grn.to_aggregate[1].weight.detach() for grn in grns]),
    }


def test_grn_v3_equals_the_package() -> None:
    grns = [as_published(GRN(WIDTH, num_layers=t)).double() for t in range(1, DEPTH + 2)]
    topology, dims = GRNv3(), Dims(DEPTH, WIDTH)
    weights = topology.weights(flat(grns), dims)
    increments = torch.randn(DEPTH + 1, 2, 5, WIDTH, dtype=torch.float64)
    states = begin(topology, increments[0], weights)
    for t in range(1, DEPTH + 1):
        want = grns[t - 1](increments[:t])
        value, states = topology.read(states, weights, t)
        torch.testing.assert_close(materialize(value), want, rtol=1e-6, atol=1e-6)
        states = topology.write(states, weights, t, increments[t])
    want = grns[DEPTH](increments)
    torch.testing.assert_close(topology.finish(states, weights, dims), want, rtol=1e-6, atol=1e-6)


def decoder(past_layers_k: int) -> DCAGPT:
    model = DCAGPT(num_tokens=11, dim=WIDTH, depth=DEPTH, past_layers_k=past_layers_k, dim_head=4, heads=2)
    for module in model.modules():
        if isinstance(module, GRN):
            as_published(module)
    return model


def reads(model: DCAGPT) -> list[GRN]:
    return [*(block.qkv_grn for block in model.dca_blocks), model.final_grn]


def run(topology: DCA, parameters: dict[str, Tensor], model: DCAGPT, ids: Tensor, dims: Dims) -> Tensor:
    """The package's decoder with its connections replaced by the topology's."""
    weights = topology.weights(parameters, dims)
    states = begin(topology, model.token_emb(ids), weights)
    for t, block in enumerate(model.dca_blocks, start=1):
        ways, states = topology.read(states, weights, t)
        assert isinstance(ways, QKVInputs)
        attention = block.attn(ways.q, ways.k, ways.v)
        feed_forward = block.ff(block.pre_ff_norm(ways.residual + attention))
        states = topology.write(states, weights, t, attention, feed_forward)
    return model.to_logits(model.norm(topology.finish(states, weights, dims)))


def test_a_decoder_equals_the_package() -> None:
    # past_layers_k=2 is the package's first 2 and last 2 of at most 4 vectors: all of them, as in the paper without k.
    model, ids = decoder(past_layers_k=2), torch.randint(11, (2, 6))
    topology, dims = DCA(), Dims(DEPTH, WIDTH, frozenset(range(1, DEPTH + 1)))
    parameters = {name: nn.Parameter(value) for name, value in flat(reads(model)).items()}
    assert {name: value.shape for name, value in topology.parameters(dims, "paper").items()} == {
        name: value.shape for name, value in parameters.items()
    }
    out, want = run(topology, parameters, model, ids, dims), model(ids)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    cotangent = torch.randn_like(out)
    out.backward(cotangent)
    model.zero_grad()
    want.backward(cotangent)
    grns = reads(model)
    assert parameters["b"].grad is not None
    assert parameters["w"].grad is not None
    want_b = torch.cat([grn.bias.grad.flatten(0, 1) for grn in grns])
    want_w = torch.cat([grn.to_aggregate[1].weight.grad for grn in grns])
    torch.testing.assert_close(parameters["b"].grad, want_b, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(parameters["w"].grad, want_w, rtol=1e-4, atol=1e-4)


def test_last_1_differs_from_the_package_by_the_middle() -> None:
    """The package drops the middle increments, the paper sums them: equal where the middle has no weight."""
    model, ids = decoder(past_layers_k=1), torch.randint(11, (2, 6))
    topology, dims = DCA(last=1), Dims(DEPTH, WIDTH, frozenset(range(1, DEPTH + 1)))
    for grn in reads(model):
        nn.init.zeros_(grn.to_aggregate[1].weight)  # shared by all sources, the middle as well
    rows = []
    for t, grn in enumerate(reads(model), start=1):
        for way in grn.bias.detach():  # [1 or 2, D]
            rows.append(torch.stack((way[0], torch.zeros(WIDTH), way[1])) if t > 2 else way)
    parameters = flat(reads(model)) | {"b": torch.cat(rows)}
    want = model(ids)
    torch.testing.assert_close(run(topology, parameters, model, ids, dims), want, rtol=1e-4, atol=1e-5)
    middle = {**parameters, "b": torch.where(parameters["b"] == 0, 1.0, parameters["b"])}
    assert not torch.allclose(run(topology, middle, model, ids, dims), want, rtol=1e-2)


def test_needs_an_attention() -> None:
    with pytest.raises(UnsupportedTopology, match=r"no attention with separate inputs for q, k and v; use grn-v3"):
        make_topology("dca", {}).parameters(Dims(2, WIDTH), "preserve")
    assert make_topology("dca", {}).reads_qkv
    assert not make_topology("grn-v3", {}).reads_qkv
