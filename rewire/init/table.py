"""The role of every parameter of a model: what an initialiser needs besides its shape."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from rewire.console import Shown, table
from rewire.init.layout import StorageLayout

#: Role -> what it means.
ROLES = {
    "first": "the first weight of the network, or of one of its towers",
    "layer": "a weight outside of the branches",
    "branch": "a weight inside a branch",
    "last": "a weight that a branch ends with",
    "q": "projects an attention's queries",
    "k": "projects an attention's keys",
    "v": "projects an attention's values",
    "attention output": "a weight that an attention's branch ends with",
    "shortcut": "projects the shortcut of a residual add",
    "classifier": "the last weight of the network",
    "router": "scores the experts of a mixture",
    "modulation": "computes scales, shifts or gates from a condition, as in adaptive norms",
    "embedding": "a table of embeddings, tokens or positions",
    "norm": "gain or shift of a norm",
    "last norm": "gain of a norm that a branch ends with",
    "scale": "a learned factor that a branch ends with",
    "bias": "a bias",
    "connection": "a connection weight of a rewired trunk, which has the topology's own start",
    "other": "none of these",
}

#: Roles of weight matrices and kernels.
MATRICES = frozenset(
    {"first", "layer", "branch", "last", "q", "k", "v", "attention output", "shortcut", "classifier", "router"}
)
#: Roles of weights in which a branch's output is linear.
LAST = frozenset({"last", "attention output"})
#: Roles that are zero in initialisers that start with zero branches and a zero output.
ZERO = LAST | {"classifier", "bias"}


def row_of(block: str) -> str:
    """What all blocks in a row share: the path up to the first number, ``encoder.layers``."""
    number = re.search(r"\.\d+", block)
    return block[: number.start()] if number else ""


def layer_of(block: str) -> str:
    """The path of the layer that a block is, or belongs to: ``encoder.layers.3``."""
    number = re.search(r"\.\d+", block)
    return block[: number.end()] if number else block


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter, or one part of a fused one, with its role.

    Attributes:
        name: name of the parameter; a fused one has a row for each of its parts.
        role: one of `ROLES`.
        because: how the role is known; for ``other``, why no role fits.
        shape: of the values that an initialiser makes: [out, in], [out, in / groups, *kernel]; [experts, out, in] if
            ``layout.stacked``; the parameter's own shape if it is no matrix.
        layout: the location of these values in the parameter.
        branch: name of the branch (`Site.name`); empty outside of branches.
        block: path of the module whose forward adds it (`Site.block`).
        depth: number of weights on the longest path through that branch.
        width: channels of the stream; None if they are not known or the weight is in no branch.
        groups: of a convolution.
        offset: for a norm: its gain is ``offset`` plus the stored value.
    """

    name: str
    role: str
    because: str
    shape: tuple[int, ...]
    layout: StorageLayout = dataclasses.field(default_factory=StorageLayout)
    branch: str = ""
    block: str = ""
    depth: int = 0
    width: int | None = None
    groups: int = 1
    offset: float = 0.0

    @property
    def fan_in(self) -> int:
        """Inputs of one output: in, or in / groups times the taps of a kernel."""
        return math.prod(self.shape[2 if self.layout.stacked else 1 :])

    @property
    def fan_out(self) -> int:
        """Outputs of one input: out / groups, times the taps of a kernel."""
        first = 1 if self.layout.stacked else 0
        return self.shape[first] // self.groups * math.prod(self.shape[first + 2 :])


@dataclasses.dataclass(frozen=True)
class Roles(Shown):
    """The table that `rewire.roles` returns. Printing it shows it.

    Attributes:
        weights: all parameters in the model's order, each part of a fused one by itself.
        branches: number of branches in the model.
        relu: whether the model's activation is a ReLU.
    """

    weights: tuple[Weight, ...]
    branches: int
    relu: bool

    def __iter__(self) -> Iterator[Weight]:
        return iter(self.weights)

    @property
    def width(self) -> int | None:
        """Channels of the (first) residual stream; None if they are not known."""
        return next((weight.width for weight in self if weight.width is not None), None)

    def branches_until(self, block: str) -> int:
        """The number of branches up to the end of ``block``, counted over the blocks in its row."""
        here = row_of(block)
        found = dict.fromkeys((w.block, w.branch) for w in self if w.branch and row_of(w.block) == here)
        blocks = [of for of, _ in found]
        return len(blocks) - blocks[::-1].index(block)

    def layer(self, block: str) -> tuple[int, int]:
        """The number of the layer of ``block`` in its row of blocks, from 1, and the length of the row."""
        inside = (w.block for w in self if w.branch and row_of(w.block) == row_of(block))
        layers = list(dict.fromkeys(map(layer_of, inside)))
        return layers.index(layer_of(block)) + 1, len(layers)

    @functools.cached_property
    def layers(self) -> int:
        """The number of layers in the longest row of blocks."""
        blocks, rows = {w.block for w in self if w.branch}, dict[str, set[str]]()
        for block in blocks:
            rows.setdefault(row_of(block), set()).add(layer_of(block))
        return max(map(len, rows.values()), default=0)

    def of(self, name: str) -> tuple[Weight, ...]:
        """The rows of the parameter ``name``."""
        return tuple(weight for weight in self.weights if weight.name == name)

    def shown(self) -> Iterator[RenderableType]:
        yield Text(f"{len({w.name for w in self})} parameters, {self.branches} branches", style="bold")
        rows = ((w.name, w.role, " x ".join(map(str, w.shape)), w.because) for w in self)
        yield table(("parameter", "role", "values", "reason"), rows)
