"""What a topology is: four operations on the states of a residual stream, and the weights they use."""

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
#: Tensors, and histories of such (`rewire.mixes.history`).
States = tuple[Any, ...]
#: Effective connection weights of a topology.
W = TypeVar("W", default=Any)
#: Those of a topology that computes with what it learns as it is: the learned weights, float32, by name.
Named = dict[str, Tensor]
#: The natural scale of a weight that multiplies whole hidden states; a power of 2, so that storing it loses no digit.
OF_STATES = 1 / 8


@dataclasses.dataclass(frozen=True)
class Dims:
    """Sizes of a trunk, as far as connection weights depend on them.

    Attributes:
        depth: number of units, the T of the formulas.
        width: channels D of the hidden states; known wherever a topology says that it `needs_width`.
        attention: units t whose branch begins with an attention that has separate q/k/v inputs; empty for topologies
            that do not ask for it.
        here: on a pipeline stage, the units whose own weights are there (`Topology.unit_rows`), T + 1 being the output;
            None: all.

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
        """Those of the units 1..T whose weights are here."""
        return [t for t in range(1, self.depth + 1) if self.has(t)]


@dataclasses.dataclass(frozen=True, eq=False)
class QKVInputs:
    """What an attention reads when its queries, keys and values come from different mixes.

    Attributes:
        q, k, v: what each projection sees, of the hidden states' shape.
        residual: what everything else sees, first of all the shortcut around the attention inside a unit.

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
        """What hooks see of them, and what makes such inputs of what they leave."""
        return self.residual, self.instead

    def instead(self, residual: Tensor) -> QKVInputs:
        """Those with another residual: the difference is added to all; what is one tensor stays one."""
        change, given = residual - self.residual, (self.q, self.k, self.v, self.residual)
        made = {id(x): x + change for x in given} | {id(self.residual): residual}
        return QKVInputs(*(made[id(x)] for x in given))


class Topology(ABC, Generic[W]):
    """How the T units of a trunk are connected: `start`, `read`, `write`, `finish`, and the weights they use.

    Subclasses are frozen dataclasses; their fields are the options, and a value that their docstring does not allow
    raises `ValueError`. A `Topology[W]` has effective weights of type W.

    Units are numbered t = 1..T; unit t reads ``r_t`` from the stream, computes a branch output ``f_t`` and writes it.
    States are tuples of tensors; hidden states, branch outputs and what is read are [..., D], channels last for a
    topology that `needs_width` (the stream moves the channels of convolutional nets). Weights are float32. All
    methods are pure.

    Example:
        >>> class Halved(rewire.Residual):  # the smallest: one operation of another topology is replaced
        ...     'Plain residual connections, with half of each branch.'
        ...     def merge(self, states, weights, t, *branches):
        ...         return states[0] + 0.5 * sum(branches)
        >>> halved = rewire.compile(model, Halved(), example_inputs=(x,), start="paper")
    """

    #: Granularity that ``granularity="auto"`` selects.
    granularity: ClassVar[Granularity] = "block"
    #: Whether there are weights per channel, so that the trunk's width has to be known.
    needs_width: ClassVar[bool] = False
    #: Whether tokens have values of their own that are computed of their channels, and are changed as states are: the
    #: channels keep their place then between residual adds.
    by_token: ClassVar[bool] = False
    #: Whether `read` returns `QKVInputs` for the units in ``Dims.attention``.
    reads_qkv: ClassVar[bool] = False
    #: Whether the norms between these and the projections are three, one for each: learned copies, which start equal.
    separate_norms: bool = False
    #: Whether backward makes again what it needs of the norms of reads: False where a unit keeps no more than before.
    norms_again: ClassVar[bool] = True
    #: Learned weights that are matrices applied to states, by name, as a model's own linear maps are.
    matrices: ClassVar[frozenset[str]] = frozenset()
    #: Those that multiply whole states: their natural scale is `OF_STATES`.
    of_states: ClassVar[frozenset[str]] = frozenset()
    #: Those that are multiplied with vectors of the trunk's width, normed or like them: it is the less by its root.
    of_vectors: ClassVar[frozenset[str]] = frozenset()

    @property
    def registered_name(self) -> str:
        """The name by which `rewire.compile` and files know it; the path of its class, if that is not registered.

        `register_topology` notes it on the class, not for its subclasses, `make_topology` on what a function made.
        """
        cls = type(self)
        name: str | None = vars(self).get(REGISTERED_NAME) or vars(cls).get(REGISTERED_NAME)
        return name or f"{cls.__module__}.{cls.__qualname__}"

    def for_start(self, start: Start) -> Topology[W]:
        """The topology itself; or another form of its formulas, which has such a start."""
        return self

    def placed(self, kinds: Sequence[str]) -> Topology[W]:
        """The topology itself; or with numbers where options name units by what their branches are.

        Args:
            kinds: of the branch with which each unit of the trunk begins, as `rewire.inspect` shows them.
        """
        return self

    def attention_units(self, dims: Dims) -> Collection[int]:
        """Those of the units in ``dims.attention`` whose queries, keys and values get inputs of their own."""
        return dims.attention

    @abstractmethod
    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """Start values of the learned connection weights of a trunk, float32, by name.

        Those that are `torch.nn.Buffer`, as of a frozen topology, are saved and moved with the others, but not learned.

        Raises:
            UnsupportedTopology: the formulas have no such start, or do not fit the trunk's sizes.
        """

    def natural_scales(self, dims: Dims) -> dict[str, float]:
        """The unit in which each learned weight is stored, by name; 1 for a name that is missing.

        A `Connection` stores ``value / unit``, and `parameters` and `weights` see values. Everybody clips the gradients
        of all parameters by one norm: a small unit makes this weight's gradient as much smaller, so that connections
        leave the norm to the model. `rewire.parameter_groups` gives it a rate that is as much larger.
        """
        of_vectors = dict.fromkeys(self.of_vectors, OF_STATES * (dims.width or 1) ** -0.5)
        return dict.fromkeys(self.of_states, OF_STATES) | of_vectors

    def depth_powers(self) -> dict[str, int]:
        """For weights whose fan-in grows with the depth: as which power of it; without others.

        A read of t states learns t weights, and Adam moves all by as much: what is read moves by t times that, where
        states are as large in deep models, as with `rewire.init.MuP`. Its ``base_depth`` divides rates by this power.
        Increments get smaller as the depth grows, and a softmax moves as a whole: neither is named here.
        """
        return {}

    def unit_rows(self, dims: Dims) -> dict[str, list[int]]:
        """For learned weights each row of which one unit alone uses: how many each unit has, in turn, T + 1 the last;
        -1: all that there are.

        A stage of a pipeline then has those of its own units, and `weights` gets these rows and ``dims.here``. What is
        not named here goes from stage to stage with the stream.
        """
        return {}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> W:
        """Effective weights, computed once per forward in float32 from the learned ones; else these, by name."""
        return cast("W", {name: value.float() for name, value in parameters.items()})

    def start(self, x: Tensor, weights: W) -> States:
        """States at the trunk's input ``x_0``."""
        return (x,)

    @abstractmethod
    def read(self, states: States, weights: W, t: int) -> tuple[Tensor | Mix | QKVInputs, States]:
        """``r_t``, what unit t sees, and the states that `write` is to get.

        As a `Mix`, ``r_t`` is computed together with the norm that follows, if one does. The states are others where
        more than ``r_t`` is computed from them at once (hyper-connections mix their streams, too).
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
        """Which of the states are ``x_{t-1}``, if that is what unit t reads, as it is; none if it reads a mix.

        A hook that changes hidden states between blocks changes these.
        """
        return ()

    def lasting(self, states: States) -> States:
        """States between units without what `read` computes again if it is not there: what a pipeline's stage sends."""
        return states

    def viewed(self, states: States, view: Callable[[Tensor], Tensor]) -> States:
        """The states where hidden states get other dimensions of tokens by ``view``, which takes [..., C] alone."""
        channels = self.template(states).shape[-1]
        return tuple([viewed(s, channels, view) if isinstance(s, Tensor) else s.viewed(view) for s in states])

    def template(self, states: States) -> Tensor:
        """A tensor of the hidden states' shape, dtype and device; its values mean nothing."""
        return states[0]

    def parallel(self, states: States) -> Tensor | None:
        """The streams [..., n, D], of a topology that keeps several side by side; None of others."""
        return None

    @abstractmethod
    def matrix(self, weights: W, dims: Dims) -> Tensor:
        """Effective weights as a [destination, source] matrix, float32; entries that do not exist are 0.

        Weights per channel are averaged over the channels, those of q, k and v over the three; of input-dependent
        weights it is the part that does not depend on the input.
        """

    def by_destination(self, weights: W, dims: Dims) -> dict[str, Tensor]:
        """Effective weights into each destination, for plots: its name -> [ways, sources], or [ways, sources, D].

        Only of connections that exist; ways are the separate inputs of queries, keys and values.
        """
        return rows(self.matrix(weights, dims))

    def distributions(self, weights: W, dims: Dims) -> Sequence[Tensor]:
        """Effective weights that sum to 1 by a softmax, one [n] tensor for each; none if they are not normalised."""
        return ()

    def program(self, weights: W, dims: Dims) -> Program:
        """The same formulas as sums of named values, for `rewire.freeze`.

        Its matrix is that of `matrix`.

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
    """Tell that a `Recurrence.merge` makes the same of the same, and is cheap: backward may make the state again."""
    merge.repeatable = True
    return merge


class Recurrence(Topology[W]):
    """A topology whose unit t makes one new state ``x_t`` of its branch output and of earlier states.

    It says how in two steps, `merge` and `push`, in place of `write`. Between the two the model may do more: such
    topologies connect post-norm blocks (``norm(x + f)``), too.

    Example:
        >>> isinstance(rewire.ANCRe(), rewire.Recurrence)
        True
    """

    #: Whether units read the newest state just as `push` got it: `merge` may then wait for the norm of the next read.
    reads_newest: ClassVar[bool] = False

    @abstractmethod
    def merge(self, states: States, weights: W, t: int, *branches: Tensor) -> Tensor | Mix:
        """``x_t``, before the norm or activation of a post-norm block."""

    @abstractmethod
    def push(self, states: States, weights: W, t: int, x: Tensor) -> States:
        """States after ``x`` became ``x_t``."""

    def write(self, states: States, weights: W, t: int, *branches: Tensor) -> States:
        if not hasattr(self.merge, "repeatable"):
            return self.push(states, weights, t, materialize(self.merge(states, weights, t, *branches)))
        before = len(states) - 1

        def merge(x: Tensor, *others: Tensor) -> Tensor:
            return materialize(self.merge((*others[:before], x), weights, t, *others[before:]))

        return self.push(states, weights, t, merged_again(merge, states[-1], (*states[:-1], *branches)))


def as_recurrence(topology: Topology[W]) -> Recurrence[W] | None:
    """The topology if it is a `Recurrence`, which post-norm blocks need; else None."""
    return topology if isinstance(topology, Recurrence) else None


class FirstOrder(Recurrence[W]):
    """A recurrence whose only state is the newest: unit t reads ``x_{t-1}``, and the trunk's output is ``x_T``."""

    def read(self, states: States, weights: W, t: int) -> tuple[Tensor, States]:
        return states[0], states

    def push(self, states: States, weights: W, t: int, x: Tensor) -> States:
        return (x,)

    def newest(self, states: States, weights: W, t: int) -> tuple[int, ...]:
        return (0,)

    def finish(self, states: States, weights: W, dims: Dims) -> Tensor:
        return states[0]

    def matrix(self, weights: W, dims: Dims) -> Tensor:
        """float32 [T, T]: the identity, unit t reads ``x_{t-1}``."""
        return torch.eye(dims.depth)


class TwoForms(Topology[W]):
    """A topology with a field ``form``: what the paper has, or what we make of it for a preserving start."""

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
        """Raise UnsupportedTopology if there is none in this form."""
        if start == "preserve" and self.form == self.forms[0]:
            raise no_preserving_start(self, f"{self.hindrance}; form='{self.forms[1]}' has one")


def in_increments(topology: Topology[W], weights: W, depth: int, device: torch.device, parts: int = 1) -> Tensor:
    """Reads of units 1..T and the output, as rows [T + 1, T + 1] of what they take of f_0 .. f_T.

    Run on increments f_t whose parts [p, (T + 1) p] are one-hot in (t, part), operations spell out the weights. Between
    p parts a weight is a p x p matrix: its diagonal is averaged.
    """
    sources = depth + 1
    increments = torch.eye(sources * parts, device=device).view(sources, -1)
    found = reads_of(topology, weights, increments, Dims(depth))
    return found.unflatten(-1, (parts, sources, parts)).diagonal(dim1=-3, dim2=-1).mean(-1)


def reads_of(topology: Topology[W], weights: W, increments: Tensor, dims: Dims) -> Tensor:
    """What units 1..T read, and the output, where ``increments`` [T + 1, ..] are the input and the branch outputs."""
    found, states = [], topology.start(increments[0], weights)
    for t, increment in enumerate(increments[1:], start=1):
        read, states = topology.read(states, weights, t)
        assert not isinstance(read, QKVInputs)
        found.append(materialize(read))
        states = topology.write(states, weights, t, increment)
    return torch.stack([*found, topology.finish(states, weights, dims)])


def rows(matrix: Tensor) -> dict[str, Tensor]:
    """The connections that exist in [destinations, sources], by destination."""
    width = matrix.shape[1] - matrix.shape[0]
    return {f"destination {j}": row[None, : width + j] for j, row in enumerate(matrix, start=1)}


def no_preserving_start(topology: Topology, why: str) -> UnsupportedTopology:
    """The error of a topology that cannot start as the plain residual network."""
    return UnsupportedTopology(
        f"topology '{topology.registered_name}' has no start that equals the original network: {why}. Pass "
        "start='paper'."
    )


def no_attention(topology: Topology, depth: int, instead: str) -> UnsupportedTopology:
    """The error of a topology with separate reads for q, k and v, where no unit begins with an attention."""
    return UnsupportedTopology(
        f"topology '{topology.registered_name}' found, in a trunk of {depth} units, no attention with separate "
        f"inputs for q, k and v; {instead}."
    )


def materialize(value: Tensor | Mix) -> Tensor:
    """The tensor that ``value`` is, or that it stands for."""
    return value.value() if isinstance(value, Mix) else value


def total(branches: tuple[Tensor, ...]) -> Tensor:
    """``f_t``, the sum of the branches that ran in parallel."""
    f = branches[0]
    for branch in branches[1:]:
        f = f + branch
    return f


def viewed(values: Tensor, channels: int, view: Callable[[Tensor], Tensor], dims: int = 1) -> Tensor:
    """``view``, which takes hidden states [..., C], of values for each token: as parts of hidden states.

    Args:
        values: of each token those in the last dimensions.
        channels: C.
        view: of the dimensions of tokens.
        dims: how many the last dimensions are.
    """
    of_token = values.flatten(-dims)
    size = of_token.shape[-1]
    if size % channels or not size:  # a view that says its sizes takes no empty tensor
        of_token = nn.functional.pad(of_token, (0, -size % channels or channels))
    parts = [view(part) for part in of_token.split(channels, -1)]
    if size == channels == values.shape[-1]:
        return parts[0]
    if values.shape[-1] == channels:  # whole hidden states, whose last dimension may be another then
        return torch.cat(parts, -1).unflatten(-1, (*values.shape[-dims:-1], parts[0].shape[-1]))
    return torch.cat(parts, -1)[..., :size].unflatten(-1, values.shape[-dims:])
