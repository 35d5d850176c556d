"""What a study compares: plain models, topologies, and their controls."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any, Literal

from torch import nn

from rewire.compiler import compile
from rewire.init.roles import roles
from rewire.init.table import LAST
from rewire.runtime.connection import connections

#: What a study compares unless told otherwise.
DEFAULT = (
    *("ancre-ingoing", "ancre-ingoing:start=paper", "denseformer", "grn-v3", "hc-static", "hc-dynamic", "mhc"),
    *("laurel-rw", "laurel-lr", "layerscale", "attnres", "muddformer"),
)


@dataclasses.dataclass(frozen=True)
class Scales:
    """Factors on the plain model's weights at their start.

    Attributes:
        embedding: of the weights that make the trunk's input: tables of embeddings, and the first layer.
        branch: of the weights that branches end with.
    """

    embedding: float = 1.0
    branch: float = 1.0

    def apply(self, model: nn.Module) -> None:
        factors = {"embedding": self.embedding, "first": self.embedding, **dict.fromkeys(LAST, self.branch)}
        if factors := {role: factor for role, factor in factors.items() if factor != 1}:
            names = {row.name: factors[row.role] for row in roles(model) if row.role in factors}
            for name, factor in names.items():
                model.get_parameter(name).data.mul_(factor)


@dataclasses.dataclass(frozen=True)
class Contender:
    """One row of the table.

    Attributes:
        name: as in the table.
        settings: keywords of `rewire.compile`, the topology's options among them; None: the model stays plain.
        held: how the connection weights stay at their start, if they do: ``"frozen"``, without gradients, or
            ``"still"``, with gradients, which clipping counts, and a rate of 0.
    """

    name: str
    settings: dict[str, Any] | None = None
    held: Literal["", "frozen", "still"] = ""

    def rewired(self, model: nn.Module, **validation: Any) -> nn.Module:
        """``model`` with these connections.

        Raises:
            RewireError: as `rewire.compile`.
        """
        if self.settings is None:
            return model
        rewired = compile(model, **self.settings, **validation)
        for connection in connections(rewired).values():
            connection.requires_grad_(self.held != "frozen")
        return rewired

    @property
    def control(self) -> Contender | None:
        """The same with weights that stay at their start: frozen, or still, where the start is the plain model.

        What the first gains was not learned. The second has to train as the plain model does: if it does not, clipping
        takes the connections' gradients out of the model's steps.
        """
        if self.held or self.settings is None:
            return None
        held: Literal["frozen", "still"] = "still" if self.settings.get("start", "preserve") == "preserve" else "frozen"
        return Contender(f"{self.name}, {held}", self.settings, held)


#: The model as it is, and with the scales of its embeddings and branches tuned.
PLAIN, SCALED = Contender("residual"), Contender("residual, scaled")


def parse(text: str) -> Contender:
    """The contender that ``topology:option=value:option=value`` names.

    Options are those of the topology and of `rewire.compile`, as ``start``; values are Python's, or words.

    Raises:
        ValueError: an option has no value.
    """
    topology, *options = text.split(":")
    settings: dict[str, Any] = {"topology": topology}
    for option in options:
        name, separator, value = option.partition("=")
        if not (name and separator and value):
            raise ValueError(f"'{text}': an option is written name=value, as in 'ancre-ingoing:start=paper'.")
        settings[name] = _value(value)
    return Contender(text, settings)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text  # a word, as paper in start=paper
