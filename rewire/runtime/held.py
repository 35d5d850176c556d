"""What a stream holds besides its states, while a unit is running."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from rewire.topologies.base import QKVInputs
from rewire.torch_internals import pytree


@dataclasses.dataclass(eq=False)  # not changed after __init__, but not frozen, as `Stream`
class Reading:
    """Held by a stream while a branch of the next unit is running.

    Attributes:
        parts: the tensors whose sum the branch reads: one, or ``r, f_1, ...`` inside a unit of several sites.
        branch: between the sites of a unit, the sum of the branch outputs so far; otherwise None.
        qkv: what was read, if queries, keys and values have separate inputs.
    """

    parts: tuple[Tensor, ...]
    branch: Tensor | None = None
    qkv: QKVInputs | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Unsummed:
    """Held by a stream whose last state is yet to be computed, by one kernel together with the norm of the next read.

    Attributes:
        branches: outputs of the last unit's branches.
    """

    branches: tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Post:
    """Held by a stream until `Stream.push`: the model makes the next state of the last add's sum, as post-norms do.

    Attributes:
        sum: the sum, or what its post has made of it so far.
        reading: set if the sum is not the topology's next state (it keeps streams or increments, or the unit goes on),
            but what the next branch reads. That branch then reads the post's result instead, and the difference is
            added to what it writes.
    """

    sum: Tensor
    reading: Reading | None = None


class Begun(Post):
    """A `Post` in which some operations have already made a new tensor of the sum, and more may follow."""


for _held in (Reading, Unsummed, Post, Begun, QKVInputs):
    pytree.register_dataclass(_held, serialized_type_name=f"{__name__}.{_held.__name__}")
