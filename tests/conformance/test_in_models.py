"""The references against rewired models: edited forwards, streams, connections, and the backend of torch.compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import rewire
from rewire.conformance import check, reference
from rewire.conformance.ours import dims_of, ours, packed, topology_of
from rewire.conformance.running import Branch

SCHEMES: list[tuple[str, dict[str, Any]]] = [
    *(("ancre-ingoing", {}), ("denseformer", {}), ("grn-v3", {}), ("attnres", {}), ("attnres", {"block": 2})),
    *(("hc-static", {"output": "mean"}), ("hc-dynamic", {}), ("mhc", {}), ("laurel-pa", {}), ("layerscale", {})),
]


class Block(nn.Module):
    """A plain residual block around the branch of a case."""

    def __init__(self, branch: Branch) -> None:
        super().__init__()
        self.inner, self.outer = nn.Parameter(branch.inner[0].float()), nn.Parameter(branch.outer.float())

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.inner) @ self.outer


def rewired(name: str, options: Mapping[str, Any], compiled: bool = False) -> Any:
    """A model of such blocks, rewired, as an implementation; its branches are the model's own."""
    known, topology, alone = reference(name), topology_of(name, options), ours(name, **options)
    chosen = known.with_options(options)

    def implementation(x: Tensor, weights: Mapping[str, Tensor], branches: Sequence[Branch]) -> Tensor:
        if len(branches) == 1:
            return alone(x, weights, branches)  # one residual add is no stream
        made: Any = rewire.compile(
            nn.Sequential(*map(Block, branches)), topology, granularity="sublayer", start="paper", validate=False,
            example_inputs=(x.detach(),),
        )  # fmt: skip
        (connection,) = rewire.connections(made).values()
        prefix = {id(module): path for path, module in made.named_modules()}[id(connection)]
        values = packed(known.file, weights, dims_of(x, branches), chosen)
        given = {f"{prefix}.{at}": value / connection.stored_in[at] for at, value in values.items()}

        def run(given: Mapping[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(made, given, (x,))  # type: ignore[arg-type, no-any-return]

        return (torch.compile(run, backend="aot_eager") if compiled else run)(given, x)

    return implementation


class Through(torch.autograd.Function):
    """A call whose weights are parameters of its own: they are set, and what comes back is theirs."""

    @staticmethod
    def forward(ctx: Any, call: Any, parameters: Sequence[nn.Parameter], x: Tensor, *values: Tensor) -> Tensor:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data.copy_(value)
        with torch.enable_grad():
            ctx.inputs = [x.detach().requires_grad_(), *parameters]
            ctx.output = call(ctx.inputs[0])
        return ctx.output.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, *torch.autograd.grad(ctx.output, ctx.inputs, grad, allow_unused=True)


def by_backend(name: str, options: Mapping[str, Any]) -> Any:
    """The same blocks as they are, their graph rewired by `rewire.Backend`."""
    known, topology, alone = reference(name), topology_of(name, options), ours(name, **options)
    chosen = known.with_options(options)

    def implementation(x: Tensor, weights: Mapping[str, Tensor], branches: Sequence[Branch]) -> Tensor:
        if len(branches) == 1:
            return alone(x, weights, branches)
        backend = rewire.Backend(topology, granularity="sublayer", start="paper", inner="aot_eager", validate=False)
        torch._dynamo.reset()  # each case is another model, in the same code
        call = torch.compile(nn.Sequential(*map(Block, branches)), backend=backend)
        call(x.detach().requires_grad_())  # after which there are connections
        (trunk,) = backend.report.residuals.trunks
        assert len(trunk.units) == len(branches), str(backend.report)
        (connection,) = rewire.connections(backend._connections).values()
        values = packed(known.file, weights, dims_of(x, branches), chosen)
        stored = [values[at] / connection.stored_in[at] for at in dict(connection.named_parameters())]
        return Through.apply(call, [*connection.parameters()], x, *stored)  # type: ignore[no-any-return]

    return implementation


def check_outputs(name: str, options: dict[str, Any], compiled: bool) -> None:
    """And gradients; what units read is not noted in a model."""
    report = check(name, rewired(name, options, compiled), dtypes=[torch.float32], **options)
    assert not [one for one in report.differences if not one.what.startswith("reads")], str(report)


@pytest.mark.parametrize(("name", "options"), SCHEMES, ids=str)
def test_rewired_models(name: str, options: dict[str, Any]) -> None:
    check_outputs(name, options, compiled=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(("name", "options"), [SCHEMES[0], SCHEMES[3], SCHEMES[7]], ids=str)
def test_compiled_models(name: str, options: dict[str, Any]) -> None:
    check_outputs(name, options, compiled=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(("name", "options"), SCHEMES, ids=str)
def test_graphs_that_the_backend_rewires(name: str, options: dict[str, Any]) -> None:
    report = check(name, by_backend(name, options), dtypes=[torch.float32], **options)
    assert not [one for one in report.differences if not one.what.startswith("reads")], str(report)
