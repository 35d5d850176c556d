"""rewire.diagnose: how signals and gradients pass through the residual streams of a model."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from rewire.console import Shown, progress, table
from rewire.copies import Inputs, Writes, seeded, uncompiled
from rewire.diagnostics.observing import Record, Run, called, inputs_of, observed, own
from rewire.diagnostics.signals import (
    BlockSignals,
    Chi,
    SiteSignals,
    TrunkSignals,
    mean_squared_singular_value,
    precise,
)
from rewire.errors import BadExampleInputs, RewireError, check_count
from rewire.passes.validating.tensors import tensors_in
from rewire.topologies.base import total
from rewire.torch_internals import pytree


@dataclasses.dataclass(frozen=True)
class Diagnosis(Shown):
    """What `rewire.diagnose` measured. Printing it shows tables.

    Attributes:
        trunks: the residual streams that the batch reached.
        loss: the scalar whose gradients were taken.
        unreached: names of a rewired model's trunks that the batch did not reach; empty for a plain model, whose trunks
            are only known if the batch reaches them.
    """

    trunks: tuple[TrunkSignals, ...]
    loss: float
    unreached: tuple[str, ...] = ()

    def shown(self) -> Iterator[RenderableType]:
        for trunk in self.trunks:
            yield Text(_headline(trunk), style="bold", overflow="fold")
            yield _table(trunk)
        if self.unreached:
            yield Text(f"Not reached by the batch: {', '.join(self.unreached)}")

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write a figure: norms, gradients and cosines along the depth, one row for each trunk.

        Args:
            path: file to write; its suffix selects the format (.png, .pdf, .svg).

        Raises:
            ImportError: matplotlib is missing.
        """
        from rewire.diagnostics.plot import plot_signals  # needs matplotlib

        plot_signals(self.trunks, path)


def diagnose(
    model: nn.Module,
    batch: Any = None,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    probes: int = 16,
    seed: int = 0,
    evaluate: bool = True,
) -> Diagnosis:
    """Measure how signals and gradients pass through the residual streams of ``model``.

    A copy that shares the weights runs one forward and one backward pass, then for each trunk a forward and one
    backward pass per probe. The model itself is not touched: no hooks, no gradients, no flags, no random state. The
    copy keeps all hidden states, about as much as training keeps.

    Args:
        model: a plain, rewired or frozen model; in a rewired one, the rewired trunks are measured. It must not be
            sharded, wrapped or compiled: measure it before, or pass the model inside the wrapper.
        batch: what the model is called with: a tensor, a tuple of args, a dict of kwargs, or a pair of both. None:
            inputs that the pattern registry makes.
        loss: from the model's output to the scalar whose gradients are taken. None: the ``loss`` in the output
            (transformers, given labels); else the product of all outputs with a fixed random direction,
            ``sum_k v_k y_k / sqrt(n)``, which shows how gradients grow or shrink, not how large they are in training.
        probes: random probes for chi where the trunk's output has more than 512 numbers (see
            `rewire.diagnostics.signals.mean_squared_singular_value`); 0: no chi.
        seed: of the random direction, the probes, and random numbers in the model.
        evaluate: run in evaluation mode. False: modules in their present mode (dropout drops, batch norms use the
            batch; the model's running averages stay as they are).

    Raises:
        NoResidualAdds: the model has no residual stream.
        AlreadyConnected, WrappedModel: it cannot be diagnosed as it is.
        BadExampleInputs: it does not run on the batch, or does not reach any residual stream.
        RewireError: the loss is no scalar that depends on the weights or hidden states; the model is on the meta
            device.
        ValueError: ``probes`` is negative.

    Example:
        >>> found = rewire.diagnose(rewired, (x,))
        >>> [site.name for site in found.trunks[0].sites][:2]
        ['blocks.0.attn', 'blocks.0.mlp']
    """
    check_count("probes", probes, 0)
    inputs = inputs_of(model, batch)
    if any(tensor.numel() == 0 for tensor in tensors_in(inputs)):
        raise BadExampleInputs("the batch is empty: there is nothing to measure.")
    copy, records = observed(model, inputs)
    if evaluate:
        copy.eval()
    about = f"diagnosing {type(model).__name__}"
    # Eager: what is recorded inside a compiled graph would have no gradient from the graph's output.
    with torch.enable_grad(), seeded(seed, copy), uncompiled(), Writes(copy), progress(about):
        value = _loss(called(copy, inputs, seed), loss, seed)
        reached = [record for record in records if record.runs and record.runs[0].output is not None]
        if not reached:
            raise BadExampleInputs(f"the batch reaches no residual stream of {type(model).__name__}.")
        gradients = _gradients(value, copy, reached)
        chis = [_chi(copy, inputs, record, probes, seed) if probes else None for record in reached]
    trunks = tuple(_signals(*found) for found in zip(reached, gradients, chis, strict=True))
    unreached = tuple(record.trunk.name for record in records if record not in reached)
    return Diagnosis(trunks, float(value.detach()), unreached)


def _loss(output: object, loss: Callable[[Any], Tensor] | None, seed: int) -> Tensor:
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        value = loss(output)
    elif isinstance(own, Tensor):
        value = own
    else:
        value = _projection([y for y in tensors_in(output) if y.is_floating_point()], seed)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        what = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise RewireError(
            f"the loss is {what}: it has to be a single number that depends on the model. Pass loss=, a function of "
            "what the model returns."
        )
    return value


def _projection(outputs: Sequence[Tensor], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = sum(y.numel() for y in outputs)
    parts = [(y.float() * torch.randn(y.shape, generator=generator).to(y.device)).sum() for y in outputs]
    return torch.stack([part.to(parts[0].device) for part in parts]).sum() / count**0.5 if parts else torch.zeros(0)


@dataclasses.dataclass(frozen=True)
class _Gradients:
    """L2 norms of the loss's gradients for one trunk: for its input; by site, for branch outputs and weights."""

    input: float
    branches: list[float | None]
    weights: list[float | None]


def _gradients(value: Tensor, copy: nn.Module, records: Sequence[Record]) -> list[_Gradients]:
    weights = [[_weights(copy, site.name) for site in record.trunk.sites] for record in records]
    wanted: dict[int, Tensor] = {}
    for record, of_sites in zip(records, weights, strict=True):
        run = record.runs[0]
        for x in (run.input, *(branches[0] for branches in run.branches.values()), *(w for ws in of_sites for w in ws)):
            if x.requires_grad:
                wanted[id(x)] = x
    found = torch.autograd.grad(value, list(wanted.values()), allow_unused=True)
    norms = {
        key: 0.0 if g is None else float(torch.linalg.vector_norm(precise(g)))
        for key, g in zip(wanted, found, strict=True)
    }
    return [
        _Gradients(
            norms[id(record.runs[0].input)],
            [norms.get(id(branches[0])) for _, branches in sorted(record.runs[0].branches.items())],
            [math.hypot(*(norms[id(w)] for w in ws)) if ws else None for ws in of_sites],
        )
        for record, of_sites in zip(records, weights, strict=True)
    ]


def _weights(copy: nn.Module, path: str) -> list[Tensor]:
    """Trained weights of the module at ``path``; empty if there is no such module."""
    try:
        module = copy.get_submodule(path)
    except AttributeError:
        return []
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _chi(copy: nn.Module, inputs: Inputs, record: Record, probes: int, seed: int) -> Chi:
    constants = {name: parameter.detach() for name, parameter in copy.named_parameters()}
    buffers = dict(copy.named_buffers())

    def output_for(x: Tensor) -> Tensor:
        record.given, record.runs = x, []
        torch.manual_seed(seed)
        counters = {name: buffer.clone() for name, buffer in buffers.items()}
        torch.func.functional_call(copy, constants | counters, *pytree.tree_map(own, inputs))
        output = record.runs[0].output
        assert output is not None
        return output

    measured = record.runs
    try:
        return mean_squared_singular_value(output_for, measured[0].input.detach(), probes, seed)
    finally:
        record.given, record.runs = None, measured


def _signals(record: Record, gradients: _Gradients, chi: Chi | None) -> TrunkSignals:
    run, trunk, dim = record.runs[0], record.trunk, record.trunk.channel_dim
    hidden = _hidden(run)
    sites = [
        SiteSignals(
            name=site.name,
            kind=site.kind,
            stream=_norm(hidden[t], dim),
            branch=_norm(total(run.branches[t]).detach(), dim),
            update=_norm(precise(hidden[t + 1]) - precise(hidden[t]), dim),
            cosine=1 - _influence(hidden[t], hidden[t + 1], dim),
            gradient=gradients.branches[t],
            weight_gradient=gradients.weights[t],
        )
        for t, site in enumerate(trunk.sites)
    ]
    starts = [t for t, unit in enumerate(trunk.units) if t == 0 or trunk.units[t - 1] != unit]
    blocks = [
        BlockSignals(trunk.sites[first].block, _influence(hidden[first], hidden[end], dim))
        for first, end in zip(starts, [*starts[1:], len(trunk.sites)], strict=True)
    ]
    streams = record.topology.parallel(run.states)
    differing = None if streams is None else effective_streams(streams.detach())
    ends = _norm(hidden[-1], dim), gradients.input, chi, differing
    return TrunkSignals(trunk.name, tuple(sites), tuple(blocks), *ends)


def effective_streams(streams: Tensor) -> float:
    """The effective number of different streams [..., n, D] of a token: see `TrunkSignals`."""
    wide = streams.double()
    squares = torch.linalg.eigvalsh(wide @ wide.mT).clamp(min=0)  # of the singular values
    shares = squares / squares.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return float(torch.special.entr(shares).sum(-1).exp().mean())


def _hidden(run: Run) -> list[Tensor]:
    """``h_0, .., h_T``."""
    assert run.output is not None
    return [*(read.detach() for _, read in sorted(run.reads.items())), run.output.detach()]


def _norm(x: Tensor, dim: int) -> float:
    return float(torch.linalg.vector_norm(precise(x), dim=dim).mean())


def _influence(a: Tensor, b: Tensor, dim: int) -> float:
    """``1 - cos(a, b)``, averaged over all positions, as half the squared distance of the unit vectors."""
    distance = F.normalize(precise(a), dim=dim) - F.normalize(precise(b), dim=dim)
    return float(distance.square().sum(dim).mean() / 2)


def _headline(trunk: TrunkSignals) -> str:
    chi = f"; chi {trunk.chi}" if trunk.chi else ""
    depth = f"effective depth {trunk.effective_depth:.1f} of {len(trunk.blocks)} blocks"
    ends = f"output norm {trunk.output:.3g}; gradient at the input {trunk.input_gradient:.3g}"
    streams = "" if trunk.streams is None else f"; {trunk.streams:.1f} streams differ"
    return f"{trunk.name}: {depth}{streams}{chi}; {ends}"


def _table(trunk: TrunkSignals) -> Table:
    made = table(("#", "branch", "kind"), ())
    for name in ("stream", "branch", "update", "cosine", "gradient", "weight gradient"):
        made.add_column(name, justify="right")
    for number, site in enumerate(trunk.sites, start=1):
        values = (site.stream, site.branch, site.update)
        branch = Text(site.name.removeprefix(f"{trunk.name}."))
        gradients = ("" if g is None else f"{g:.3g}" for g in (site.gradient, site.weight_gradient))
        made.add_row(str(number), branch, site.kind, *(f"{v:.3g}" for v in values), f"{site.cosine:.3f}", *gradients)
    return made
