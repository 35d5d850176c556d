"""rewire.initialize: apply an initialiser's rules to the parameters of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import RenderableType
from rich.text import Text
from torch import Generator, Tensor, nn

from rewire.console import Shown, table
from rewire.errors import check_type
from rewire.init.registry import Initializer, Rule, make_initializer
from rewire.init.roles import roles as roles_of
from rewire.init.table import Roles, Weight
from rewire.placement import is_dtensor

_META = "on the meta device: call initialize again after to_empty"


@dataclasses.dataclass(frozen=True)
class InitReport(Shown):
    """What `rewire.initialize` did. Printing it shows a table.

    Attributes:
        applied: (weight, rule) for each parameter or part of one that got new values.
        kept: (name, reason) for each that kept its values.
    """

    applied: tuple[tuple[Weight, str], ...]
    kept: tuple[tuple[str, str], ...]

    @property
    def deferred(self) -> bool:
        """Whether parameters were left alone because they are on the meta device."""
        return any(reason == _META for _, reason in self.kept)

    def shown(self) -> Iterator[RenderableType]:
        applied = ((w.name, w.role, " x ".join(map(str, w.shape)), rule) for w, rule in self.applied)
        yield table(("parameter", "role", "values", "rule"), applied)
        if self.kept:
            yield Text("Left as they were", style="bold")
            yield table(("parameter", "reason"), self.kept)


@torch.no_grad()
def initialize(
    model: nn.Module,
    init: str | Initializer,
    *,
    generator: Generator | None = None,
    roles: Roles | None = None,
    **options: object,
) -> InitReport:
    """Give the parameters of ``model`` new values, in place, each by its role in the network.

    A shared parameter is initialised once. Values are computed in float32 (float64 for float64) and then rounded.
    Parameters on the meta device are left alone: call this again after ``to_empty``. Sharded parameters (DTensor) get
    the values that they would have unsharded; all ranks have to call this.

    Args:
        model: any module, rewired or not.
        init: a name (`rewire.list_initializers` lists them), which options may follow (``"scaled:branch=4"``), or a
            `rewire.init.Initializer`.
        generator: source of random numbers, on any device; default: torch's. Without it the values of a sharded model
            are those of the first rank.
        roles: the result of `rewire.roles` for this model from before it was sharded, compiled or wrapped; default:
            computed now.
        options: options of the named initialiser.

    Returns:
        A report of which rule was applied to which parameter, and which were left alone, and why.

    Raises:
        UnknownName: no such initialiser; near names are given.
        TypeError: no such option.
        RewireError: the initialiser has no meaning for this model.

    Example:
        >>> report = rewire.initialize(model, "idinit")
        >>> report.deferred  # nothing was left to be initialised later
        False
    """
    chosen = make_initializer(init, options)
    if generator is not None:
        check_type("generator", generator, Generator)
    roles = roles_of(model) if roles is None else roles
    check_type("roles", roles, Roles)
    chosen.check(roles)
    applied: list[tuple[Weight, str]] = []
    kept: list[tuple[str, str]] = []
    for name, parameter in model.named_parameters():
        weights = roles.of(name)
        rules = [chosen.rule(weight, roles) for weight in weights]
        if not weights:
            kept.append((name, "not in the table of roles"))
        elif parameter.is_meta:
            kept.append((name, _META))
        else:
            _set(parameter, weights, rules, generator)
            applied += [(weight, rule.name) for weight, rule in zip(weights, rules, strict=True) if rule]
            kept += [(w.name, _reason(w)) for w, rule in zip(weights, rules, strict=True) if not rule]
    return InitReport(tuple(applied), tuple(kept))


def _reason(weight: Weight) -> str:
    if weight.role == "other":
        return weight.because
    return f"the initialiser says nothing of this role: {weight.role}"


def _set(
    parameter: nn.Parameter, weights: Sequence[Weight], rules: Sequence[Rule | None], generator: Generator | None
) -> None:
    if not any(rules):
        return
    stored = _whole(parameter).to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
    for weight, rule in zip(weights, rules, strict=True):
        if rule is not None:
            device = stored.device if generator is None else generator.device
            view = weight.layout.view(stored)
            values = view.reshape(weight.shape).to(device).clone()  # contiguous, and a copy
            for matrix in values if weight.layout.stacked else (values,):
                rule.fill(matrix, generator)
            view.copy_(values.view(view.shape))
    _store(parameter, stored.to(parameter.dtype))


def _whole(parameter: Any) -> Tensor:
    """The whole of a parameter, which may be sharded."""
    return parameter.full_tensor() if is_dtensor(parameter.data) else parameter.detach()


def _store(parameter: Any, values: Tensor) -> None:
    if not is_dtensor(parameter.data):
        parameter.copy_(values)
        return
    from torch.distributed.tensor import distribute_tensor

    # takes the values of the first rank
    parameter.copy_(distribute_tensor(values, parameter.device_mesh, parameter.placements))
