"""ANCRe: learned shortcuts between all states of a trunk (arXiv 2602.09009), and the paper's ablations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from rewire.errors import UnsupportedTopology, check_choice, check_positive
from rewire.mixes.claimed import Table
from rewire.mixes.history import History
from rewire.mixes.mix import Mix
from rewire.topologies.base import OF_STATES, Dims, Granularity, Start, States, W, no_preserving_start, total
from rewire.topologies.dense import Dense, count
from rewire.topologies.program import Program, Term, recurrence
from rewire.topologies.registry import register_topology
from rewire.topologies.scaled_sum import ScaledSum, Scales
from rewire.topologies.wiring import Few, Sources, Units

Normalize = Literal["ingoing", "outgoing", "none"]
Cascade = Literal["replace", "keep"]
Form = Literal["softmax", "difference"]


class Destinations(Dense[W]):
    """Base of ANCRe and its ablations: unit t reads ``x_{t-1}``, and all states are mixed into ``x_t``."""

    cascade: Cascade = "replace"

    granularity: ClassVar[Granularity] = "block"  # Section 4.2, Table 1
    reads_newest: ClassVar[bool] = True
    first: ClassVar[int] = 1

    def reads(self, dims: Dims) -> range:
        """The units, each of which mixes its new state; the output is ``x_T``."""
        return range(1, dims.depth + 1)

    def mix(self, history: History, weights: W, t: int) -> Tensor:
        return history.newest

    def newest(self, states: States, weights: W, t: int) -> tuple[int, ...]:
        return (0,)

    def row(self, weights: Any, t: int, x: Tensor) -> Any:
        """The weights with which the states are mixed into ``x_t``; x is any one of the states."""
        return weights[t]

    def merge(self, states: States, weights: W, t: int, *branches: Tensor) -> Tensor | Mix:
        x, history = states
        if isinstance(weights, Few) and t not in weights:
            return total((x, *branches))
        kept = (x,) if self.cascade == "keep" else ()
        return history.mix(self.row(weights, t, x), added=(*kept, *branches))

    def program(self, weights: W, dims: Dims) -> Program:
        """As in `Dense`, with a kept shortcut ``x_{t-1}`` as the first term."""
        rows = []
        mixing = set(self.mixing(dims))
        for t in range(1, dims.depth + 1):
            if t not in mixing:
                rows.append([Term(f"x{t - 1}", 1.0, fixed=self.cascade == "keep", learned=False)])
                continue
            terms = zip(self.sources_of(t, dims), self.static(weights, t).tolist(), strict=True)
            kept = [Term(f"x{t - 1}", 1.0, fixed=True)] if self.cascade == "keep" else []
            rows.append([*kept, *(Term(f"x{i}", p) for i, p in terms)])
        return recurrence(rows)

    def norms_again(self, dims: Dims) -> tuple[()]:
        return ()

    def finish(self, states: States, weights: W, dims: Dims) -> Tensor:
        return states[0]


@dataclasses.dataclass(frozen=True)
class ANCRe(Destinations[Table | Few]):
    """Learned shortcuts from every earlier state, ``x_t = f_t + sum_{i<t} p_it x_i`` (ANCRe, Section 4.1).

    Unit t reads ``r_t = x_{t-1}``; the trunk's output is ``x_T``; the states are ``x_0 .. x_t``. The shortcut
    weights come from logits c by a softmax at temperature tau:

    - ``ingoing``: ``p_it = exp(c_it / tau) / sum_{k<t} exp(c_kt / tau)``, so that ``sum_i p_it = 1`` for each
      t. (The paper prints the sum from k = 1; its constraint starts at 0.)
    - ``outgoing``: the same over destinations, so that ``sum_{t>i} p_it = 1`` for each i.
    - ``none``: ``p = c``; the paper's ablation (Table 4), which diverges there.

    ``cascade="replace"`` is the paper's formula: the mix replaces the block's own shortcut. The authors' released code
    keeps the shortcut and adds the mix, which is ``cascade="keep"``:
    ``x_t = x_{t-1} + f_t + sum_{i<t} p_it x_i``.

    **Paper start.** Logits 0: uniform weights, ``1/t`` (ingoing) or ``1/(T - i)`` (outgoing). The paper gives
    no start for ``none``; here it is the function of ingoing's, ``c_it = 1/t``.

    **Preserving start.** A softmax is never one-hot: ``start="preserve"`` takes ``form="difference"``, which is ours:

        P = E + softmax(c / tau) - softmax(0),

    where E is the original network, ``e_it = 1`` for ``i = t - 1`` (with ``cascade="keep"``, 0). With logits 0 this is
    exactly E, and the logits have the same gradients as at the paper's start. Rows (for outgoing: columns) sum to 1 (to
    0 with keep), like E's, but entries may be negative. A softmax over one entry is constant: the shortcut 0:1 (for
    outgoing: T-1:T) keeps its weight, and its logit has no gradient. For ``none`` the start is ``c = E``.

    **Groups.** With ``block=S`` (ours; see `dense`) the sources are ``x_0, x_S, x_2S, ..`` and the newest state:
    ``x_t = f_t + sum_{i in K_t} p_it x_i`` with ``K_t = {i < t: i = 0 (mod S) or i = t - 1}``, and softmaxes are over
    these shortcuts only. Only these states are held, and 1/t above becomes ``1/|K_t|``. The shortcuts of E remain, so
    the preserving start is still exact. (Outgoing, a state between groups has one destination, and weight 1.)

    **Few shortcuts.** With ``units`` and ``sources`` (ours; see `dense`) only some ``x_t`` are such sums, of some
    states, and softmaxes are over these shortcuts only; the others are ``x_t = x_{t-1} + f_t``.

    Args:
        normalize: "ingoing", "outgoing" or "none".
        temperature: tau > 0; the paper uses 0.01 for language models and 0.1 for DiT. Not used by "none".
        cascade: "replace" or "keep".
        form: "softmax", the paper's, or "difference".
        block: S, 1 or more; None is 1, no groups.

    Raises:
        ValueError: an option has another value.

    Example:
        >>> topology = rewire.ANCRe(temperature=0.1)
        >>> rewired = rewire.compile(model, topology, example_inputs=(x,))
    """

    normalize: Normalize = "ingoing"
    temperature: float = 0.01
    cascade: Cascade = "replace"
    form: Form = "softmax"
    block: int | None = None

    def __post_init__(self) -> None:
        check_choice("normalize", self.normalize, get_args(Normalize))
        check_choice("cascade", self.cascade, get_args(Cascade))
        check_choice("form", self.form, get_args(Form))
        super().__post_init__()
        check_positive("temperature", self.temperature, 0.01)

    @property
    def registered_name(self) -> str:
        return f"ancre-{self.normalize}" if type(self) is ANCRe else super().registered_name

    def for_start(self, start: Start) -> ANCRe:
        normalized = self.normalize != "none"
        return dataclasses.replace(self, form="difference") if start == "preserve" and normalized else self

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``logits``, float32, flat: for each t = 1..T, one entry for each of its sources, ascending.

        Raises:
            UnsupportedTopology: a preserving start with the plain softmax; or each softmax has only one shortcut, so
                that nothing would be learned.
        """
        if self.few and self.normalize != "none" and all(len(places) == 1 for places in self._together(dims).values()):
            raise UnsupportedTopology(
                f"topology '{self.registered_name}' would learn nothing: each of these sources is read by one unit, "
                "and a softmax over one weight is 1. Name more units, or use 'ancre-ingoing'."
            )
        table = self._start_table(dims, start)  # [T, T]
        return {"logits": table[self._entries(dims)]}

    def natural_scales(self, dims: Dims) -> dict[str, float]:
        """``c / tau`` is stored, the argument of the softmax; under Adam, a rate lr for c is ``lr / tau`` for it."""
        return {"logits": OF_STATES if self.normalize == "none" else self.temperature}

    def depth_powers(self) -> dict[str, int]:
        return {"logits": 1} if self.normalize == "none" and self.sources is None else {}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Table | Few:
        """The effective shortcut weights: for each t, p of its sources."""
        depth, p = dims.depth, parameters["logits"].float()
        if self.normalize == "none":
            return self.table(dims, p)
        if self.few:
            return self.table(dims, self._few_weights(p, dims))
        row, column = self._entries(dims, p.device)
        matrix = self._normalized(p, row, column, depth)  # P [T, T], 0 where ``x_i`` is not a source of ``x_t``
        if self.form == "difference":
            start = self._normalized(torch.zeros_like(p), row, column, depth)
            matrix = self._original(depth).to(p.device) + (matrix - start)
        return self.table(dims, matrix[row, column])

    def _few_weights(self, logits: Tensor, dims: Dims) -> Tensor:
        """p of few shortcuts, without index tensors: CUDA graphs could not capture their creation from lists."""
        single = logits.unbind()
        found: dict[int, Tensor] = {}  # not dict[..](), which Dynamo does not know
        for places in self._together(dims).values():
            c = torch.stack([single[place] for place in places])[None] / self.temperature
            p = _softmax(c, 1)
            if self.form == "difference":
                p = p - _softmax(torch.zeros_like(c), 1)
            found.update(zip(places, p[0].unbind(), strict=True))
        original = self.form == "difference" and self.cascade == "replace"
        pairs = enumerate(self._pairs(dims))
        return torch.stack([found[place] + float(original and i == t - 1) for place, (t, i) in pairs])

    def _pairs(self, dims: Dims) -> list[tuple[int, int]]:
        """(t, i) of each shortcut, if they are few."""
        return [(t, i) for t, numbers in self.wired(dims).items() for i in numbers]

    def _together(self, dims: Dims) -> dict[int, list[int]]:
        """t (or, outgoing, i) -> the places of the few shortcuts that share its softmax."""
        together: dict[int, list[int]] = {}
        for place, (t, i) in enumerate(self._pairs(dims)):
            together.setdefault(t if self.normalize == "ingoing" else i, []).append(place)
        return together

    def _entries(self, dims: Dims, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Row t - 1 and column i of each source ``x_i`` of ``x_t``, t by t."""
        if not self.few:
            return _entries(dims.depth, self.block, device)
        row, column = torch.tensor(self._pairs(dims), device=device).unbind(1)
        return row - 1, column

    def _normalized(self, logits: Tensor, row: Tensor, column: Tensor, depth: int) -> Tensor:
        table = logits.new_full((depth, depth), -math.inf).index_put((row, column), logits / self.temperature)
        return _softmax(table, dim=1 if self.normalize == "ingoing" else 0)

    def _original(self, depth: int) -> Tensor:
        """E, the P of the original network."""
        table = torch.eye if self.cascade == "replace" else torch.zeros
        return table(depth, depth, dtype=torch.float32)

    def distributions(self, weights: Table | Few, dims: Dims) -> Sequence[Tensor]:
        """The weights into each state (ingoing), or out of each (outgoing); empty in difference form."""
        if self.normalize == "none" or self.form == "difference":
            return ()
        static = {t: self.static(weights, t) for t in self.mixing(dims)}
        if self.normalize == "ingoing":
            return [*static.values()]
        out_of: dict[int, list[Tensor]] = {}
        for t, row in static.items():
            for i, p in zip(self.sources_of(t, dims), row, strict=True):
                out_of.setdefault(i, []).append(p)
        return [torch.stack(column) for _, column in sorted(out_of.items())]

    def _start_table(self, dims: Dims, start: Start) -> Tensor:
        """Start logits, float32 [T, T]; entries above the diagonal are not used."""
        depth, sizes = dims.depth, dict(zip(self.mixing(dims), self.sizes(dims), strict=True))
        if start == "paper":
            each = [1 / sizes.get(t, 1) if self.normalize == "none" else 0.0 for t in range(1, depth + 1)]
            return torch.tensor(each, dtype=torch.float32)[:, None].expand(depth, depth)
        if self.normalize == "none":
            return self._original(depth)
        if self.form == "softmax":
            raise no_preserving_start(self, "a softmax is never one-hot; that of form='difference' is")
        return torch.zeros(depth, depth)


@register_topology("ancre-ingoing")
def ancre_ingoing(
    temperature: float = 0.01,
    cascade: Cascade = "replace",
    form: Form = "softmax",
    block: int | None = None,
    units: Units = None,
    sources: Sources = None,
) -> ANCRe:
    """ANCRe: learned shortcuts between all states; weights into each state sum to 1 (arXiv 2602.09009)."""
    return ANCRe("ingoing", temperature, cascade, form, block, units=units, sources=sources)


@register_topology("ancre-outgoing")
def ancre_outgoing(
    temperature: float = 0.01,
    cascade: Cascade = "replace",
    form: Form = "softmax",
    block: int | None = None,
    units: Units = None,
    sources: Sources = None,
) -> ANCRe:
    """ANCRe whose weights out of each state sum to 1 (arXiv 2602.09009, Table 4)."""
    return ANCRe("outgoing", temperature, cascade, form, block, units=units, sources=sources)


@register_topology("ancre-none")
def ancre_none(
    cascade: Cascade = "replace", block: int | None = None, units: Units = None, sources: Sources = None
) -> ANCRe:
    """ANCRe with free weights, its diverging ablation (arXiv 2602.09009, Table 4)."""
    return ANCRe("none", cascade=cascade, block=block, units=units, sources=sources)


@register_topology("ancre-constant")
@dataclasses.dataclass(frozen=True)
class ANCReConstant(Destinations[Few | None]):
    """All shortcuts with the fixed weights 1/t, ANCRe's diverging ablation (arXiv 2602.09009, Table 5).

    ``x_t = f_t + (x_0 + .. + x_{t-1}) / t``, read ``x_{t-1}``, output ``x_T`` (Section 5.4). Nothing is
    learned. ``cascade="keep"`` adds ``x_{t-1}``, and ``block=S`` takes the mean over ``K_t``, as for `ANCRe`.

    Args:
        cascade: "replace" or "keep".
        block: S, 1 or more; None is 1, no groups.
    """

    cascade: Cascade = "replace"
    block: int | None = None

    def __post_init__(self) -> None:
        check_choice("cascade", self.cascade, get_args(Cascade))
        super().__post_init__()

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """No parameters."""
        if start == "preserve":
            raise no_preserving_start(self, "its weights are fixed at 1/t")
        return {}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Few | None:
        return self.by_read(dims, [None for _ in self.mixing(dims)]) if self.few else None

    def row(self, weights: Few | None, t: int, x: Tensor) -> Tensor:
        n = len(weights.sources[t]) if isinstance(weights, Few) else count(t, self.block)
        return x.new_full((n,), 1 / n, dtype=torch.float32)  # without parameters, `weights` does not know the device

    def static(self, weights: Few | None, t: int) -> Tensor:
        return self.row(weights, t, torch.empty(()))


@register_topology("ancre-cascaded")
@dataclasses.dataclass(frozen=True)
class ANCReCascaded(ScaledSum):
    """A learned scalar on each plain shortcut, ANCRe's other ablation (arXiv 2602.09009, Table 5).

    ``x_t = f_t + a_t x_{t-1}``, output ``x_T`` (Section 5.4); both starts are ``a_t = 1``, the original
    network. ``cascade="keep"`` adds ``x_{t-1}``, as for `ANCRe`; the preserving start is then ``a_t = 0``.

    Args:
        cascade: "replace" or "keep".
    """

    granularity: ClassVar[Granularity] = "block"
    reads_newest: ClassVar[bool] = True
    of_states: ClassVar[frozenset[str]] = frozenset({"scales"})

    cascade: Cascade = "replace"

    def __post_init__(self) -> None:
        check_choice("cascade", self.cascade, get_args(Cascade))

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        """``scales``, float32 [T]: a_1..a_T."""
        kept = start == "preserve" and self.cascade == "keep"
        return {"scales": torch.zeros(dims.depth) if kept else torch.ones(dims.depth)}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Scales:
        return Scales(parameters["scales"].float(), kept=self.cascade == "keep")


def _entries(depth: int, block: int | None, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Row t - 1 and column i of each source ``x_i`` of ``x_t``, t by t; made on the device, without synchronising."""
    row, column = torch.tril_indices(depth, depth, device=device)
    if block in (None, 1):
        return row, column
    counts = -(-torch.arange(depth, device=device) // block) + 1
    size = sum(count(t, block) for t in range(1, depth + 1))
    row = torch.repeat_interleave(torch.arange(depth, device=device), counts, output_size=size)
    number = torch.arange(size, device=device) - (counts.cumsum(0) - counts)[row]  # of the source among those of x_t
    return row, torch.minimum(number * block, row)


def _softmax(table: Tensor, dim: int) -> Tensor:
    """Softmax of float32 [T, T] whose backward is exact near one-hot.

    The gradient ``p (g - sum p g)`` of the largest entry cancels to rounding noise where 1 - p is about 1e-7,
    as at the preserving start, and Adam would follow the noise at full step. Written as 1 minus the others,
    that entry gets its gradient from their small weights instead, to full relative precision. The value is
    the same.
    """
    p = torch.softmax(table, dim, dtype=torch.float32)
    largest = torch.zeros_like(p).scatter(dim, p.argmax(dim, keepdim=True), 1.0)
    others = p * (1 - largest)
    return others + largest * (1 - others.sum(dim, keepdim=True))
