"""The search for rates and scales: move from a setting to its best neighbour, until none is better."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from rewire.init.initializers.scaled_weights import SCALED_ROLES
from rewire.init.table import Roles
from rewire.studies.training import Setting

#: Factors on each number that lead to the neighbours of a setting.
STEPS = {"rate": 2.0, "connections": 4.0, "embedding": 4.0, "branch": 4.0}

Tried = dict[Setting, float]


def climb(
    start: Setting,
    names: Sequence[str],
    losses: Callable[[Sequence[Setting]], Sequence[float]],
    known: Tried | None = None,
    most: int | None = None,
) -> Tried:
    """Search from ``start``, and return all settings that were tried, with their losses.

    Where all diverge, it tries lower rates.

    Args:
        names: the numbers to search.
        losses: gives the losses of settings, each over the same seeds.
        known: settings that need not be tried again.
        most: largest number of settings to try; None: stop only when all neighbours of the best are worse.
    """
    tried = dict(known or {})
    while True:
        wanted = [each for each in _next(start, names, tried) if each not in tried]
        if most is not None:
            wanted = wanted[: max(0, most - len(tried))]
        if not wanted:
            return tried
        tried.update(zip(wanted, losses(wanted), strict=True))


def _next(start: Setting, names: Sequence[str], tried: Tried) -> list[Setting]:
    centre = best(tried)
    if centre is not None:
        return list(neighbours(centre, names))
    lowest = min((setting.rate for setting in tried), default=start.rate)
    if lowest < start.rate / 1e6:
        return []
    return [dataclasses.replace(start, rate=lowest / STEPS["rate"] ** 2)] if start in tried else [start]


def best(tried: Tried) -> Setting | None:
    """The setting with the lowest finite loss; None if there is none."""
    found = min(tried, key=tried.__getitem__, default=None)
    return found if found is not None and tried[found] < math.inf else None


def neighbours(setting: Setting, names: Sequence[str]) -> Iterator[Setting]:
    for name in names:
        for factor in (STEPS[name], 1 / STEPS[name]):
            yield dataclasses.replace(setting, **{name: getattr(setting, name) * factor})


def at_edge(tried: Tried, names: Sequence[str]) -> list[str]:
    """The numbers for which a neighbour of the best setting was not tried."""
    centre = best(tried)
    if centre is None:
        return []
    return [name for name in names if any(near not in tried for near in neighbours(centre, [name]))]


def scaled(roles: Roles) -> dict[str, bool]:
    """For each scale, whether this model has weights for it, by their roles."""
    present = {weight.role for weight in roles}
    return {name: not present.isdisjoint(of) for name, of in SCALED_ROLES.items()}


def effects(tried: Tried, has: dict[str, bool]) -> dict[str, str]:
    """The result of the search for each scale, in words."""
    centre = best(tried)
    found = {}
    for name, there in has.items():
        if not there or centre is None:
            found[name] = "not tried: the model has no such weights"
            continue
        alone = {getattr(s, name): loss for s, loss in tried.items() if _but(s, name) == _but(centre, name)}
        others = [loss for factor, loss in alone.items() if factor != getattr(centre, name)]
        if all(abs(loss - tried[centre]) <= 1e-6 * abs(tried[centre]) for loss in others):
            found[name] = f"no effect ({_listed(alone)})"
        else:
            found[name] = f"best {getattr(centre, name):g} of {_listed(alone)} in the search"
    return found


def _but(setting: Setting, name: str) -> Setting:
    return dataclasses.replace(setting, **{name: 1.0})


def _listed(factors: dict[float, float]) -> str:
    return ", ".join(f"{factor:g}" for factor in sorted(factors))
