"""rewire.plot: a picture of the connection weights of a model or a checkpoint."""

from __future__ import annotations

import os
from typing import Literal

import torch
from torch import Tensor, nn

from rewire.diagnostics.averages import averages
from rewire.passes.checks import check_loaded
from rewire.plotting import plot_arcs, plot_bars, plot_heatmap
from rewire.runtime.connection import coefficients, learned_connections
from rewire.saving.checkpoint import matrices
from rewire.topologies.base import rows

Path = str | os.PathLike[str]
Kind = Literal["heatmap", "arcs", "bars"]


def plot(source: nn.Module | Path, path: Path, kind: Kind = "heatmap", batch: object = None) -> None:
    """Write a picture of learned connection weights, one part for each trunk.

    Args:
        source: a rewired model, or the path of a saved state dict of one (``torch.save`` or .safetensors).
        path: file to write; its suffix selects the format (.png, .pdf, .svg).
        kind: ``"heatmap"``: weights as a matrix, as in ANCRe's Figure 6. ``"arcs"``: the topology, states on a line and
            arcs between them. ``"bars"``: for each unit a bar chart of its weights, as in DCA's Figure 10; weights
            per channel by their median and percentiles if ``source`` is a model, by their mean if it is a checkpoint.
        batch: what a model is called with, as for `rewire.diagnose`. Weights that depend on the token are then shown by
            their mean on it, and in a heat map also by their standard deviation. Without it, only the part of them that
            does not depend on the input is shown: at the start, that of the plain network.

    Raises:
        ImportError: matplotlib is missing.
        RewireError: the model was not rewired, or is on the meta device; the checkpoint cannot be read, or holds no
            connection weights.
        BadExampleInputs: the model does not run on the batch.
        ValueError: there is no such kind, or it takes no batch.

    Example:
        >>> rewire.plot(rewired, "connections.png")
    """
    if kind not in ("heatmap", "arcs", "bars"):
        raise ValueError(f"kind must be 'heatmap', 'arcs' or 'bars', not {kind!r}.")
    if isinstance(source, nn.Module):
        check_loaded(source, "plotted")
    if batch is not None and (kind == "bars" or not isinstance(source, nn.Module)):
        raise ValueError("a batch is for heat maps and arcs of a model, not for bars or checkpoints.")
    if kind == "bars":
        plot_bars(_bars(source), path)
    elif batch is not None and isinstance(source, nn.Module):
        means, spreads = averages(source, batch)
        if kind == "arcs":
            return plot_arcs(means, path)
        panels = {name: {f"{name}, mean": m} | _spread(name, spreads) for name, m in means.items()}
        shown = {title: x for of_trunk in panels.values() for title, x in of_trunk.items()}
        plot_heatmap(shown, path, scales={f"{name}, spread": means[name] for name in spreads})
    else:
        found = coefficients(source) if isinstance(source, nn.Module) else matrices(source)
        (plot_heatmap if kind == "heatmap" else plot_arcs)(found, path)


def _spread(name: str, spreads: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}, spread": spreads[name]} if name in spreads else {}


def _bars(source: nn.Module | Path) -> dict[str, dict[str, Tensor]]:
    """The weights of each trunk and destination, [ways, sources] or [ways, sources, D]."""
    if not isinstance(source, nn.Module):
        return {trunk: rows(matrix) for trunk, matrix in matrices(source).items()}
    found = learned_connections(source)
    with torch.no_grad():
        return {
            trunk: connection.layout.topology.by_destination(connection.effective(), connection.layout.dims)
            for trunk, connection in found.items()
        }
