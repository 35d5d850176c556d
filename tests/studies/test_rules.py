from __future__ import annotations

import pytest
import torch
from regression import example, model

import rewire
from rewire.studies.rules import fixed_rule


def rewired(name: str, **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return rewire.compile(model(), name, validate=False, **options)  # type: ignore[arg-type]


def test_ancre_takes_the_newest_state_and_leaves_out_the_mean() -> None:
    net = rewired("ancre-ingoing")
    (connection,) = rewire.connections(net).values()
    rule = fixed_rule(connection)
    assert rule is not None
    connection.set_values(rule)
    (matrix,) = rewire.coefficients(net).values()
    expected = torch.eye(3) * 2 - torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]])
    torch.testing.assert_close(matrix, expected, atol=1e-5, rtol=0)
    x, _ = example(torch.Generator().manual_seed(0), 4)
    first, *blocks, last = net
    states = [x @ first.weight.T + first.bias]
    for t, block in enumerate(blocks, start=1):
        plain = states[-1] + block.outer(block.inner(states[-1]).relu())
        states.append(plain + states[-1] - sum(states) / t)  # what E + e_{t-1} - 1/t adds to the plain network
    torch.testing.assert_close(net(x), last(states[-1]), atol=1e-4, rtol=1e-4)


def test_scales_become_their_mean_over_the_depth() -> None:
    net = rewired("layerscale")
    (connection,) = rewire.connections(net).values()
    connection.set_values({"scales": torch.arange(24.0).view(3, 8)})
    rule = fixed_rule(connection)
    assert rule is not None
    assert torch.equal(rule["scales"], torch.arange(8.0, 16.0).expand(3, 8))


@pytest.mark.parametrize(("name", "start"), [("denseformer", "preserve"), ("ancre-ingoing", "paper")])
def test_others_have_no_rule(name: str, start: str) -> None:
    (connection,) = rewire.connections(rewired(name, start=start)).values()
    assert fixed_rule(connection) is None
