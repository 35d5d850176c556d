"""Transforms of torch.func inside of a function that torch.compile compiles: as they are without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from every_topology import mixed
from slow_cases import one_in
from torch import Tensor, nn
from written_nets import written_input, written_net

TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x.cos(),))[1],
    "grad": lambda model, x: torch.func.grad(lambda y: model(y).sin().sum())(x),
    "vmap": lambda model, x: torch.vmap(model)(x.expand(2, *x.shape)),
}
#: One for each kind of mix. (Dynamo raises for jvp of `denseformer`: a real tensor is among fake ones.)
OTHERS = ["grn-v3", "attnres", "muddformer", "hc-static", "hc-dynamic", "mhc"]


@pytest.mark.parametrize("transform", one_in(3, TRANSFORMS))
@pytest.mark.parametrize("key", ["ancre-ingoing", *(pytest.param(key, marks=pytest.mark.slow) for key in OTHERS)])
def test_transforms_of_compiled_functions(transform: str, key: str) -> None:
    """Of `ancre`, those of forward-mode AD were wrong in silence: its operators have no tangents."""
    net = written_net("x = x + torch.tanh(self.f[1](x))\nreturn x + self.g[1](x)")  # Dynamo fails at tangents of a norm
    model, x = mixed(net, key), written_input()
    expected = TRANSFORMS[transform](model, x)
    found = torch.compile(lambda x: TRANSFORMS[transform](model, x), backend="aot_eager")(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
