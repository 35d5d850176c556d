"""rewire.ablate: the loss without an edge, a source or a unit."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from typing import get_args

from torch import nn

from rewire.console import progress
from rewire.diagnostics.ablating import Bench, Part
from rewire.diagnostics.effects import Ablation, What
from rewire.diagnostics.losses import Loss, loss_of_model
from rewire.errors import BadExampleInputs, UnsupportedTopology, check_count
from rewire.passes.checks import check_loaded, check_unwrapped
from rewire.runtime.connection import learned_connections


def ablate(
    model: nn.Module,
    batches: Iterable[object],
    *,
    loss: Loss = loss_of_model,
    of: Sequence[What] | None = None,
    seconds: float | None = None,
    at_most: int | None = None,
    at_once: int = 8,
    seed: int = 0,
) -> Ablation:
    """Measure the loss of a rewired model without each edge, each source and each unit.

    Weights mislead: a large one may be on a state that nothing uses. So a weight is set to 0, and then to that of the
    plain network, with all other weights unchanged (a softmax is not normalised again), and the loss is measured. Edges
    are those that `rewire.freeze` counts: terms of the sums with learned weights. A unit is left out by setting its
    branch output to 0, which works for every topology.

    If all weights are constant, several sets of them run at once (`torch.func.vmap`). Weights that depend on the token
    are set where they are used, one after the other. The model stays as it is: a copy runs, in evaluation mode, without
    gradients, by plain torch operations.

    Args:
        model: a rewired or frozen model.
        batches: the loss is the mean over these; they are kept.
        loss: of (model, batch), a scalar; default: ``model(**batch).loss``. It may call the model, and read its
            attributes.
        of: "unit", "source", "edge", or some of these; None: all that a trunk has.
        seconds: stop after that time, but not before one pass. The edges that were measured are then a random sample.
        at_most: measure no more edges than that, chosen at random.
        at_once: sets of weights that run at once; fewer if memory does not suffice.
        seed: of that choice, and of random numbers in the model.

    Raises:
        RewireError: the model was not rewired, or is on the meta device; the loss is no single number.
        UnsupportedTopology: sources or edges were asked for, and a trunk has none that could be set.
        WrappedModel: the model is sharded or compiled.
        BadExampleInputs: there are no batches.
        ValueError, TypeError: an option is not one of those values.

    Example:
        >>> found = rewire.ablate(rewired, [x], loss=lambda model, batch: model(batch).square().mean())
        >>> len(found.units), found.units[0].path
        (6, 'blocks.0.attn')
    """
    if not (of is None or isinstance(of, Iterable)) or set(of or ()) - set(get_args(What)):
        raise ValueError(f"of={of!r}: it has to name some of {', '.join(map(repr, get_args(What)))}.")
    check_count("at_most", at_most, 0, optional=True)
    check_count("at_once", at_once, 1)
    if not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number, not {seed!r}.")
    learned = learned_connections(model, "there is nothing to ablate", one_model=True)
    check_unwrapped(model)
    check_loaded(model, "ablated")
    kept = list(batches)
    if not kept:
        raise BadExampleInputs("there are no batches: the loss is measured on them.")
    bench = Bench(model, learned, kept, loss, at_once, seed)
    base = bench.base()
    refused = {name: trunk.refused for name, trunk in bench.trunks.items() if trunk.refused}
    if refused and {"source", "edge"} & set(of or ()):
        raise UnsupportedTopology("; ".join(f"trunk '{name}': {why}" for name, why in refused.items()))
    wanted = [part for part in bench.parts() if of is None or part.what in of]
    chosen = _chosen(wanted, at_most, seconds is not None, seed)
    end = None if seconds is None else time.monotonic() + seconds
    with progress(f"ablating {type(model).__name__}", len(chosen)) as tick:
        effects = tuple(bench.run(chosen, end, tick))
    return Ablation(base, effects, len(wanted), refused, bench.in_turn)


def _chosen(wanted: Sequence[Part], at_most: int | None, stops: bool, seed: int) -> list[Part]:
    """The parts in order, edges last; a random sample of the edges, if some may be left out."""
    edges, draw = [part for part in wanted if part.what == "edge"], random.Random(seed)
    if at_most is not None and at_most < len(edges):
        edges = [edges[number] for number in sorted(draw.sample(range(len(edges)), at_most))]
    if stops:
        draw.shuffle(edges)
    return [part for part in wanted if part.what != "edge"] + edges
