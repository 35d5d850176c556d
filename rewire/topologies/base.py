"""What a topology is: four operations on the states of a residual stream, and the weights they use."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from rewire.errors import UnsupportedTopology

Start = Literal["preserve", "paper"]
Granularity = Literal["block", "sublayer"]
States = tuple[Tensor, ...]


class Topology(ABC):
    """How the T units of a trunk are connected. Subclasses are frozen dataclasses; their fields are the options.

    Units are numbered t = 1..T; unit t reads ``r_t`` from the stream, computes a branch output ``f_t`` and writes it.
    States are tuples of tensors, each of the hidden states' shape; weights are float32. All methods are pure.

    A topology whose new state is one tensor made of the branch output and the earlier states implements `merge` and
    `push`; it then also serves post-norm blocks, whose norm comes between the two. Others override `write`.
    """

    #: Granularity that ``granularity="auto"`` selects.
    granularity: ClassVar[Granularity] = "block"
    #: Whether post-norm blocks (``norm(x + f)``) can be connected.
    supports_post_norm: ClassVar[bool] = True

    @abstractmethod
    def parameters(self, depth: int, start: Start) -> dict[str, Tensor]:
        """Start values of the learned connection weights of a trunk of ``depth`` units, float32, by name.

        Raises:
            UnsupportedTopology: the formulas have no such start.
        """

    @abstractmethod
    def weights(self, parameters: dict[str, Tensor], depth: int) -> Any:
        """Effective weights, computed once per forward in float32 from the learned ones."""

    def start(self, x: Tensor) -> States:
        """States at the trunk's input ``x_0``."""
        return (x,)

    @abstractmethod
    def read(self, states: States, weights: Any, t: int) -> Tensor:
        """``r_t``, what unit t sees."""

    def write(self, states: States, weights: Any, t: int, *branches: Tensor) -> States:
        """States after unit t returned ``branches`` (several if they ran in parallel; ``f_t`` is their sum)."""
        return self.push(states, weights, t, self.merge(states, weights, t, *branches))

    def merge(self, states: States, weights: Any, t: int, *branches: Tensor) -> Tensor:
        """The new state of unit t before the norm or activation of a post-norm block."""
        raise NotImplementedError

    def push(self, states: States, weights: Any, t: int, x: Tensor) -> States:
        """States after ``x`` became the new state of unit t."""
        raise NotImplementedError

    @abstractmethod
    def finish(self, states: States, weights: Any, depth: int) -> Tensor:
        """The trunk's output after its last unit."""

    @abstractmethod
    def matrix(self, weights: Any, depth: int) -> Tensor:
        """Effective weights as a [destination, source] matrix, float32; entries that do not exist are 0."""

    def options(self) -> dict[str, Any]:
        """The options of this topology, for saving and for messages."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]


def no_preserving_start(topology: str, why: str) -> UnsupportedTopology:
    """The error of a topology that cannot start as the plain residual network."""
    return UnsupportedTopology(
        f"topology '{topology}' has no start that equals the original network: {why}. Pass start='paper'."
    )


def one_hot_previous(depth: int) -> Tensor:
    """[T, T] matrix of the plain residual network: destination t (row t - 1) takes source t - 1 (column t - 1)."""
    return torch.eye(depth, dtype=torch.float32)
