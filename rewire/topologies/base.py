"""`Topology`, the base class: four operations on the states of a stream, and the weights that they use."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, cast

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from rewire.attributes import REGISTERED_NAME
from rewire.errors import UnsupportedTopology, check_choice
from rewire.mixes.again import merged_again
from rewire.mixes.mix import Mix

if TYPE_CHECKING:
    from rewire.topologies.program import Program

Start = Literal["preserve", "paper"]
Granularity = Literal["block", "sublayer"]
#: Tensors, and histories of tensors (`rewire.mixes.history`).
States = tuple[Any, ...]
#: Effective connection weights of a topology.
W = TypeVar("W", default=Any)
#: Effective weights of a topology that uses its learned weights unchanged: these, float32, by name.
Named = dict[str, Tensor]
#: The natural scale of weights that multiply whole hidden states; a power of 2, so that dividing by it is exact.
OF_STATES = 1 / 8


@dataclasses.dataclass(frozen=True)
class Dims:
    """The sizes of a trunk on which connection weights depend.

    Attributes:
        depth: number of units, T in the formulas.
        width: number of channels of the hidden states, D; 0 if unknown, which is refused if a topology `needs_width`.
        attention: units t whose branch begins with an attention that has separate q/k/v inputs; empty for topologies
            that do not use these.
        here: on a pipeline stage, the units whose own weights are there (`Topology.unit_rows`), with T + 1 for the
            output; None: all.

    Example:
        >>> sorted(rewire.ANCRe().parameters(rewire.Dims(depth=3), "paper"))
        ['logits']
    """

    depth: int
    width: int = 0
    attention: frozenset[int] = frozenset()
    here: range | None = None

    def has(self, t: int) -> bool:
        """Whether the weights of unit t are here."""
        return self.here is None or t in self.here

    @property
    def units(self) -> list[int]:
        """The units among 1..T whose weights are here."""
        return [t for t in range(1, self.depth + 1) if self.has(t)]


@dataclasses.dataclass(frozen=True, eq=False)
class QKVInputs:
    """The reads of an attention whose queries, keys and values come from different mixes.

    Attributes:
        q, k, v: inputs of the three projections, each in the shape of the hidden states.
        residual: input of everything else, such as the shortcut around the attention inside a unit.

    Example:
        >>> inputs = rewire.QKVInputs(x, x, x, residual=x)  # what `Topology.read` may return
        >>> inputs.q.shape == x.shape
        True
    """

    q: Tensor
    k: Tensor
    v: Tensor
    residual: Tensor

    def shown(self) -> tuple[Tensor, Callable[[Tensor], QKVInputs]]:
        """The tensor that hooks see, and a function that makes `QKVInputs` of the tensor that they leave."""
        return self.residual, self.instead

    def instead(self, residual: Tensor) -> QKVInputs:
        """The inputs with another residual; the difference is added to all, and equal inputs stay one tensor."""
        change, given = residual - self.residual, (self.q, self.k, self.v, self.residual)
        made = {id(x): x + change for x in given} | {id(self.residual): residual}
        return QKVInputs(*(made[id(x)] for x in given))


class Topology(ABC, Generic[W]):
    """How the T units of a trunk are connected: `start`, `read`, `write`, `finish`, and the weights they use.

    Subclasses are frozen dataclasses whose fields are the options; values that the docstring does not allow raise
    `ValueError`. A `Topology[W]` has effective weights of type W.

    Units are numbered t = 1..T; unit t reads ``r_t`` from the stream, computes a branch output ``f_t`` and writes it.
    States are tuples of tensors. Hidden states, branch outputs and reads are [..., D], with channels last for a
    topology that `needs_width` (the stream moves the channels of convolutional nets). Weights are float32. All
    methods are pure.

    Example:
        >>> class Halved(rewire.Residual):  # the smallest: overrides one operation of another topology
        ...     'Plain residual connections, with half of each branch.'
        ...     def merge(self, states, weights, t, *branches):
        ...         return states[0] + 0.5 * sum(branches)
        >>> halved = rewire.compile(model, Halved(), example_inputs=(x,), start="paper")
    """

    #: The granularity for ``granularity="auto"``.
    granularity: ClassVar[Granularity] = "block"
    #: Whether the topology has weights per channel, so that the trunk's width has to be known.
    needs_width: ClassVar[bool] = False
    #: Whether the states include values per token that were computed from its channels, and are reshaped with states:
    #: then the channels have to stay in their dimension between residual adds.
    by_token: ClassVar[bool] = False
    #: Whether `read` returns `QKVInputs` for the units in ``Dims.attention``.
    reads_qkv: ClassVar[bool] = False
    #: Whether q, k and v each get their own norm before the projections: learned copies, which start equal.
    separate_norms: bool = False
    #: Names of learned weights that are matrices applied to states, like a model's own linear maps.
    matrices: ClassVar[frozenset[str]] = frozenset()
    #: Names of learned weights that multiply whole states: their natural scale is `OF_STATES`.
    of_states: ClassVar[frozenset[str]] = frozenset()
    #: Names of learned weights that multiply normed vectors of the trunk's width D: their scale is smaller by sqrt(D).
    of_vectors: ClassVar[frozenset[str]] = frozenset()

    @property
    def registered_name(self) -> str:
        """The name in `rewire.compile` and in files; the path of its class if that is not registered.

        `register_topology` sets it on the class, but not on subclasses; `make_topology` on a function's result.
        """
        cls = type(self)
        name: str | None = vars(self).get(REGISTERED_NAME) or vars(cls).get(REGISTERED_NAME)
        return name or f"{cls.__module__}.{cls.__qualname__}"

    def for_start(self, start: Start) -> Topology[W]:
        """The topology itself, or another form of its formulas that has such a start."""
        return self

    def placed(self, kinds: Sequence[str]) -> Topology[W]:
        """The topology itself, or a copy with unit numbers in options that name units by kind of branch.

        Args:
            kinds: for each unit of the trunk, the kind of its first branch, as `rewire.inspect` shows it.
        """
        return self

    def attention_units(self, dims: Dims) -> Collection[int]:
        """The units in ``dims.attention`` whose queries, keys and values get separate inputs."""
        return dims.attention

    def norms_again(self, dims: Dims) -> Collection[int]:
        """The units where backward recomputes the norm of what is read, as they would keep more than the model does."""
        return range(1, dims.depth + 1)

    def drops(self, dims: Dims) -> Collection[int]:
        """The units whose `read` or `write` may be the last to use a state that is a tensor which the model knows.

        The model knows the trunk's input, what it reads, branch outputs, and results of post-norms. Streams check that
        it has not written to one that is a state: in these units, and at the trunk's end. What a unit reads itself
        does not count here: that is checked in every unit.
        """
        return range(1, dims.depth + 1)

    @abstractmethod
    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """Start values of the learned connection weights of a trunk, float32, by name.

        A `torch.nn.Buffer`, as in a frozen topology, is saved and moved with the others, but not learned.

        Raises:
            UnsupportedTopology: the formulas have no such start, or do not fit the trunk's sizes.
        """

    def natural_scales(self, dims: Dims) -> dict[str, float]:
        """The scale by which each stored weight is divided, by name; missing names have scale 1.

        A `Connection` stores ``value / scale``; `parameters` and `weights` use values. Training loops usually clip the
        gradients of all parameters by one norm. A scale below 1 makes the weight's gradient smaller, so that
        connections do not dominate that norm; `rewire.parameter_groups` raises the learning rate in return.
        """
        of_vectors = dict.fromkeys(self.of_vectors, OF_STATES * (dims.width or 1) ** -0.5)
        return dict.fromkeys(self.of_states, OF_STATES) | of_vectors

    def depth_powers(self) -> dict[str, int]:
        """Names of weights whose fan-in grows with the depth -> the power of the depth with which it grows.

        A read of t states learns t weights, and Adam moves each by the same step, so that the read moves by t times
        that if states do not shrink with depth, as with `rewire.init.MuP`. Its ``base_depth`` divides their rates by
        this power. Weights of increments, which do shrink, and of a softmax, which is normalised, are not listed.
        """
        return {}

    def unit_rows(self, dims: Dims) -> dict[str, list[int]]:
        """Names of learned weights whose rows are each used by one unit -> the number of rows of units 1..T + 1; -1:
        all rows.

        A pipeline stage then only has the rows of its own units, and `weights` gets these and ``dims.here``. Weights
        that are not listed are sent from stage to stage with the stream.
        """
        return {}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> W:
        """Effective weights, computed once per forward in float32 from the learned ones; by default these."""
        return cast("W", {name: value.float() for name, value in parameters.items()})

    def start(self, x: Tensor, weights: W) -> States:
        """States at the trunk's input ``x_0``."""
        return (x,)

    @abstractmethod
    def read(self, states: States, weights: W, t: int) -> tuple[Tensor | Mix | QKVInputs, States]:
        """``r_t``, what unit t reads, and the states for `write`.

        If ``r_t`` is a `Mix`, it is computed together with a norm that follows. The states may be new ones if more than
        ``r_t`` is computed from them at once (hyper-connections also mix their streams).
        """

    @abstractmethod
    def write(self, states: States, weights: W, t: int, *branches: Tensor) -> States:
        """States after unit t returned ``branches`` (several if they ran in parallel; ``f_t`` is their sum).

        Args:
            states: as `read` returned them.
        """

    @abstractmethod
    def finish(self, states: States, weights: W, dims: Dims) -> Tensor:
        """The trunk's output after its last unit."""

    def newest(self, states: States, weights: W, t: int) -> tuple[int, ...]:
        """Indices of the states that are ``x_{t-1}``, if unit t reads just that; empty if it reads a mix.

        A hook that changes hidden states between blocks changes these.
        """
        return ()

    def lasting(self, states: States) -> States:
        """The states that a pipeline stage sends: without values that `read` can compute again."""
        return states

    def viewed(self, states: States, view: Callable[[Tensor], Tensor]) -> States:
        """The states when ``view``, which takes [..., C], reshapes the token dimensions of hidden states."""
        channels = self.template(states).shape[-1]
        return tuple([viewed(s, channels, view) if isinstance(s, Tensor) else s.viewed(view) for s in states])

    def template(self, states: States) -> Tensor:
        """A tensor with the hidden states' shape, dtype and device, and arbitrary values."""
        return states[0]

    def parallel(self, states: States) -> Tensor | None:
        """The streams [..., n, D] of a topology with several parallel ones; None for others."""
        return None

    @abstractmethod
    def matrix(self, weights: W, dims: Dims) -> Tensor:
        """Effective weights as a [destination, source] matrix, float32; 0 where there is no connection.

        Weights per channel are averaged over the channels, those of q, k and v over the three. Of input-dependent
        weights, only the part that does not depend on the input is included.
        """

    def by_destination(self, weights: W, dims: Dims) -> dict[str, Tensor]:
        """Effective weights for plots: destination -> [ways, sources], or [ways, sources, D].

        Only connections that exist are included. Ways are the separate inputs of queries, keys and values.
        """
        return rows(self.matrix(weights, dims))

    def distributions(self, weights: W, dims: Dims) -> Sequence[Tensor]:
        """Effective weights that a softmax makes sum to 1, a tensor [n] for each softmax; empty if there are none."""
        return ()

    def program(self, weights: W, dims: Dims) -> Program:
        """The same formulas as sums of named values, for `rewire.freeze`; its matrix equals that of `matrix`.

        Args:
            weights: effective weights on the CPU, detached.

        Raises:
            UnsupportedTopology: there is no such form.
        """
        raise UnsupportedTopology(
            f"topology '{self.registered_name}' has no constant form: its weights depend on the input, or do more "
            "than scale states"
        )


def repeatable(merge: Any) -> Any:
    """Decorator for a deterministic and cheap `Recurrence.merge`: backward may recompute the state by it."""
    merge.repeatable = True
    return merge


class Recurrence(Topology[W]):
    """A topology whose unit t makes one new state ``x_t`` from its branch output and earlier states.

    In place of `write` it has two steps, `merge` and `push`. The model may change the state between the two, so these
    topologies can also connect post-norm blocks (``norm(x + f)``).

    Example:
        >>> isinstance(rewire.ANCRe(), rewire.Recurrence)
        True
    """

    #: Whether units read the newest state just as `push` got it: then `merge` may be delayed until the next read.
    reads_newest: ClassVar[bool] = False

    @abstractmethod
    def merge(self, states: States, weights: W, t: int, *branches: Tensor) -> Tensor | Mix:
        """``x_t`` before a post-norm block's norm or activation."""

    @abstractmethod
    def push(self, states: States, weights: W, t: int, x: Tensor) -> States:
        """States with ``x`` as ``x_t``."""

    def write(self, states: States, weights: W, t: int, *branches: Tensor) -> States:
        if not hasattr(type(self).merge, "repeatable"):  # of the method it would be slow to ask
            return self.push(states, weights, t, materialize(self.merge(states, weights, t, *branches)))
        before = len(states) - 1

        def merge(x: Tensor, *others: Tensor) -> Tensor:
            return materialize(self.merge((*others[:before], x), weights, t, *others[before:]))

        return self.push(states, weights, t, merged_again(merge, states[-1], (*states[:-1], *branches)))


class FirstOrder(Recurrence[W]):
    """A recurrence whose only state is the newest: unit t reads ``x_{t-1}``, and the trunk's output is ``x_T``."""

    def read(self, states: States, weights: W, t: int) -> tuple[Tensor, States]:
        return states[0], states

    def push(self, states: States, weights: W, t: int, x: Tensor) -> States:
        return (x,)

    def drops(self, dims: Dims) -> Collection[int]:
        return ()

    def newest(self, states: States, weights: W, t: int) -> tuple[int, ...]:
        return (0,)

    def finish(self, states: States, weights: W, dims: Dims) -> Tensor:
        return states[0]

    def matrix(self, weights: W, dims: Dims) -> Tensor:
        """float32 [T, T]: the identity, unit t reads ``x_{t-1}``."""
        return torch.eye(dims.depth, dtype=torch.float32)


class TwoForms(Topology[W]):
    """A topology with a field ``form``: the paper's form, or our variant of it that has a preserving start."""

    form: str
    #: The paper's form, and ours.
    forms: ClassVar[tuple[str, ...]]
    #: Why the paper's form has no preserving start.
    hindrance: ClassVar[str]

    def __post_init__(self) -> None:
        check_choice("form", self.form, self.forms)

    def for_start(self, start: Start) -> Topology[W]:
        replace: Any = dataclasses.replace  # all such topologies are dataclasses
        return replace(self, form=self.forms[1]) if start == "preserve" else self

    def check_start(self, start: Start) -> None:
        """Raise UnsupportedTopology if this form has no such start."""
        if start == "preserve" and self.form == self.forms[0]:
            raise no_preserving_start(self, f"{self.hindrance}; form='{self.forms[1]}' has one")


def in_increments(topology: Topology[W], weights: W, depth: int, device: torch.device, parts: int = 1) -> Tensor:
    """The weights of f_0 .. f_T in the reads of units 1..T and the output, as rows [T + 1, T + 1].

    The topology is run on increments f_t whose parts [p, (T + 1) p] are one-hot in (t, part), so that results are the
    weights. With p parts each weight is a p x p matrix: its diagonal is averaged.
    """
    sources = depth + 1
    increments = torch.eye(sources * parts, dtype=torch.float32, device=device).view(sources, -1)
    found = reads_of(topology, weights, increments, Dims(depth))
    return found.unflatten(-1, (parts, sources, parts)).diagonal(dim1=-3, dim2=-1).mean(-1)


def reads_of(topology: Topology[W], weights: W, increments: Tensor, dims: Dims) -> Tensor:
    """The reads of units 1..T, and the output, if ``increments`` [T + 1, ..] are the input and the branch outputs."""
    found, states = [], topology.start(increments[0], weights)
    for t, increment in enumerate(increments[1:], start=1):
        read, states = topology.read(states, weights, t)
        assert not isinstance(read, QKVInputs)
        found.append(materialize(read))
        states = topology.write(states, weights, t, increment)
    return torch.stack([*found, topology.finish(states, weights, dims)])


def rows(matrix: Tensor) -> dict[str, Tensor]:
    """The existing connections in a matrix [destinations, sources], by destination."""
    width = matrix.shape[1] - matrix.shape[0]
    return {f"destination {j}": row[None, : width + j] for j, row in enumerate(matrix, start=1)}


def no_preserving_start(topology: Topology, why: str) -> UnsupportedTopology:
    """The error for a topology that cannot start as the plain residual network."""
    return UnsupportedTopology(
        f"topology '{topology.registered_name}' has no start that equals the original network: {why}. Pass "
        "start='paper'."
    )


def no_attention(topology: Topology, depth: int, instead: str) -> UnsupportedTopology:
    """The error for a topology with separate reads for q, k and v if no unit begins with an attention."""
    return UnsupportedTopology(
        f"topology '{topology.registered_name}' found, in a trunk of {depth} units, no attention with separate "
        f"inputs for q, k and v; {instead}."
    )


def materialize(value: Tensor | Mix) -> Tensor:
    """``value`` if it is a tensor, or the tensor that a `Mix` computes."""
    return value.value() if isinstance(value, Mix) else value


def total(branches: tuple[Tensor, ...]) -> Tensor:
    """``f_t``, the sum of the branches that ran in parallel."""
    f = branches[0]
    for branch in branches[1:]:
        f = f + branch
    return f


def viewed(values: Tensor, channels: int, view: Callable[[Tensor], Tensor], dims: int = 1) -> Tensor:
    """Reshape the token dimensions of values per token by ``view``, which takes hidden states [..., C].

    Args:
        values: values of each token, in the last dimensions.
        channels: C.
        view: reshapes the token dimensions.
        dims: number of the last dimensions.
    """
    of_token = values.flatten(-dims)
    size = of_token.shape[-1]
    if size % channels or not size:  # a view with explicit sizes fails for empty tensors
        of_token = nn.functional.pad(of_token, (0, -size % channels or channels))
    parts = [view(part) for part in of_token.split(channels, -1)]
    if size == channels == values.shape[-1]:
        return parts[0]
    if values.shape[-1] == channels:  # whole hidden states: the view may change their last dimension
        return torch.cat(parts, -1).unflatten(-1, (*values.shape[-dims:-1], parts[0].shape[-1]))
    return torch.cat(parts, -1)[..., :size].unflatten(-1, values.shape[-dims:])
