"""Try rewire on a model of a repository as it is: what is connected, and whether it stays the same function.

    python benchmarks/coverage/real.py PATH BUILDER [--topologies ancre-ingoing hc-dynamic muddformer]

PATH is put on sys.path. BUILDER is a Python file with functions that return a model and its inputs, as
`rewire.compile` takes them; each is tried. For each topology the model is rewired and validated. Then all weights are
moved alike in both models, and in both modes outputs and gradients are compared under one seed; ten steps are trained;
and torch.compile(fullgraph=True) is tried where the plain model takes it.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import inspect
import logging
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import rewire
from rewire.passes.inputs import normalise_inputs

DEFAULT = ("ancre-ingoing", "hc-dynamic", "muddformer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="of the repository")
    parser.add_argument("builder", type=Path, help="a file with functions that return a model and its inputs")
    parser.add_argument("--topologies", nargs="+", default=DEFAULT)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("rewire").setLevel(logging.ERROR)
    sys.path.insert(0, str(given.path))
    spec = importlib.util.spec_from_file_location("builder", given.builder)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own = {n: f for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == "builder" and n[0] != "_"}
    table = Table("model", "topology", "adds", "outcome")
    for name, build in own.items():
        for topology in given.topologies:
            adds, outcome = tried(build, topology)
            table.add_row(name, topology, adds, outcome)
            Console().print(f"{name}, {topology}: {adds} {outcome}", highlight=False, soft_wrap=True, markup=False)
    Console().print(table)


def tried(build: Callable[[], tuple[nn.Module, Any]], topology: str) -> tuple[str, str]:
    """How many residual adds were connected, and what came of it."""
    torch.manual_seed(0)
    model, inputs = build()
    shown = sum(len(trunk.sites) for trunk in rewire.inspect(model, inputs).trunks)
    try:
        rewired = rewire.compile(model, topology, example_inputs=inputs)
    except rewire.RewireError as error:
        return f"0 of {shown}", f"refused: {type(error).__name__}: {' '.join(str(error).split())[:240]}"
    adds = sum(len(connection.layout.units) for connection in rewire.connections(rewired).values())
    try:
        return f"{adds} of {shown}", compared(model, rewired, inputs)
    except rewire.RewireError as error:
        return f"{adds} of {shown}", f"refused later: {' '.join(str(error).split())[:240]}"


def compared(model: nn.Module, rewired: nn.Module, inputs: Any) -> str:
    """What differs, with all weights but those of connections moved, in both modes; and whether it trains."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # which the rewired model shares
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter)
    worst = 0.0
    for training in (False, True):
        ours, theirs = (run(each.train(training), inputs) for each in (rewired, model))
        worst = max(worst, *(float((a - b).norm() / (b.norm() + 1e-12)) for a, b in zip(ours, theirs, strict=True)))
    optimizer = torch.optim.AdamW(rewire.parameter_groups(rewired, lr=1e-3, weight_decay=0.0))
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        losses.append(loss(rewired, inputs))
        losses[-1].backward()
        optimizer.step()
    connections = [p for c in rewire.connections(rewired).values() for p in c.parameters()]
    still = sum(p.grad is None or not bool(p.grad.any()) for p in connections)
    moved = (
        "all connections learn" if not still else f"{still} of {len(connections)} connection weights have no gradient"
    )
    return f"off by {worst:.0e}; loss {losses[0]:.3f} to {losses[-1]:.3f}; {moved}; {fullgraph(model, rewired, inputs)}"


def run(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The outputs, and the gradients of all parameters that both models have, end to end."""
    torch.manual_seed(2), random.seed(2)
    model.zero_grad()
    args, kwargs = copy.deepcopy(normalise_inputs(inputs))
    outputs = [t for t in tree_leaves(model(*args, **kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
    total = sum(t.float().square().mean() for t in outputs if t.requires_grad)
    total.backward()  # type: ignore[union-attr]
    own = {name: p for name, p in model.named_parameters() if "depth_connections" not in name}
    gradients = [p.grad.flatten().float() for p in own.values() if p.grad is not None]
    return [*(t.detach().float() for t in outputs), torch.cat(gradients)]


def loss(model: nn.Module, inputs: Any) -> Tensor:
    args, kwargs = copy.deepcopy(normalise_inputs(inputs))
    outputs = [t for t in tree_leaves(model(*args, **kwargs)) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([t.float().square().mean() for t in outputs]).sum()


def fullgraph(model: nn.Module, rewired: nn.Module, inputs: Any) -> str:
    """Whether torch.compile takes the rewired model whole, where it takes the plain one."""
    args, kwargs = normalise_inputs(inputs)
    for name, each in (("plain", model), ("rewired", rewired)):
        torch.compiler.reset()
        try:
            torch.compile(each.eval(), fullgraph=True, backend="eager")(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        except Exception as error:
            return f"fullgraph fails for the {name} model ({type(error).__name__})"
    return "fullgraph"


if __name__ == "__main__":
    main()
