"""What a study compares: the plain model, topologies, and their controls."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from torch import Tensor, nn

from rewire.compiler import check_named, compile
from rewire.registry import said
from rewire.runtime.connection import connections

#: The topologies that a study compares by default.
DEFAULT = (
    *("ancre-ingoing", "ancre-ingoing:start=paper", "denseformer", "grn-v3", "hc-static", "hc-dynamic", "mhc"),
    *("laurel-rw", "laurel-lr", "layerscale", "attnres", "muddformer"),
)

#: Values at which connection weights are held: their start, the end of a run with another seed, or a fixed rule.
Held = Literal["", "start", "end", "rule"]
#: Connection weights by trunk and name, as the formulas use them.
Values = dict[str, dict[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class Contender:
    """What is trained: the plain model, or one with connections.

    Attributes:
        name: as in the table.
        settings: keywords of `rewire.compile`, including options of the topology; None: the model stays plain.
        held: the values at which connection weights are held, without gradients; empty: they are learned.
    """

    name: str
    settings: dict[str, Any] | None = None
    held: Held = ""

    def rewired(self, model: nn.Module, values: Values | None = None, **validation: Any) -> nn.Module:
        """Rewire ``model`` with these connections. Their weights are ``values``, or at their start.

        Raises:
            RewireError: as `rewire.compile`.
        """
        if self.settings is None:
            return model
        rewired = compile(model, **self.settings, **validation)
        for trunk, connection in connections(rewired).items():
            connection.set_values((values or {}).get(trunk, {}))
            connection.requires_grad_(not self.held)
        return rewired

    def holding(self, held: Held) -> Contender:
        """The same contender with weights that are held."""
        return Contender(f"{self.name}, held at {_AT[held]}", self.settings, held)

    @property
    def starts_plain(self) -> bool:
        """Whether, at its start, it computes what the plain model does."""
        return self.settings is not None and self.settings.get("start", "preserve") == "preserve"


_AT = {"": "", "start": "the start", "end": "the end of another run", "rule": "a fixed rule"}

#: The plain model.
PLAIN = Contender("residual")


def parse(text: str) -> Contender:
    """The contender that ``topology:option=value,option=value`` names.

    Options are those of the topology and of `rewire.compile`, such as ``start``. Values are Python literals, or words.

    Raises:
        UnknownName, TypeError, ValueError: there is no such topology or option, or an option has no such value.
    """
    topology, options = said(text)
    check_named(topology, options)
    return Contender(text, {"topology": topology, **options})
