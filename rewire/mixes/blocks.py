"""Depth blocking: which mixes of a history read which states, and which of them are made together."""

from __future__ import annotations

import itertools
from typing import NamedTuple, TypeVar

from torch import Tensor

from rewire.kernels import switch

T = TypeVar("T", int, Tensor)

#: Mixes that one kernel begins, and states whose gradients it gathers, in histories of at least `SHORTEST` states.
BLOCK = 4
SHORTEST = 9
#: In groups, mixes whose gradients wait for each other, at most, unless one read has more.
WAITING = 8


class Blocks(NamedTuple):
    """Which of S mixes in turn read which states, and which of them are made together.

    Blocks of mixes begin at mixes B, 2 B, ...; blocks of states at states 0, C, 2 C, ....

    Attributes:
        mixes: S. Where mixes are the ways of reads (`scored`), these are the reads.
        first: states that the first mix reads; each further one reads one more.
        block: B, mixes that kernels begin together.
        gathered: C, states whose gradients kernels gather together.
        group: mixes until there is another state. More than one go without blocks: there are few states. A mix reads
            the states that there are, and the next one as far as it has come.
        span: in groups, mixes in turn whose gradients come together: all of a group, or some.
    """

    mixes: int
    first: int
    block: int
    gathered: int
    group: int = 1
    span: int = 1

    @classmethod
    def of(
        cls,
        like: Tensor,
        mixes: int,
        first: int,
        block: int | None = None,
        group: int = 1,
        ways: int = 1,
    ) -> Blocks:
        """By default of `best_block`, and none where no kernels run on tensors like this, or in groups.

        Mixes of several ways are begun one by one: what is begun would move more than it saves.
        """
        none = first + mixes
        block = block or (best_block(mixes, first) if switch.uses_kernels(like) and group == 1 else none)
        return cls(mixes, first, none if ways > 1 else block, block, group, min(group, max(1, WAITING // ways)))

    @property
    def states(self) -> int:
        """That some mix reads, complete ones."""
        return self.newest(self.mixes - 1) // self.group + 1

    @property
    def sources(self) -> float:
        """That a mix reads, on average."""
        return self.first + (self.mixes - 1) / 2 / self.group

    def newest(self, mix: T) -> T:
        """The number that the newest state of a mix would have if there were no groups."""
        return mix + (self.first - 1)

    def count(self, mix: T) -> T:
        """States that a mix reads."""
        return -(-self.newest(mix) // self.group) + 1

    def joined(self, mix: int) -> bool:
        """Whether the newest of them is read as far as it has come, by this mix alone."""
        return self.newest(mix) % self.group > 0

    def first_mix(self, state: T) -> T:
        """The first that reads a state: all of it."""
        mix = state * self.group + (1 - self.first)
        return mix.clamp(min=0) if isinstance(mix, Tensor) else max(0, mix)

    @property
    def spans_of_group(self) -> int:
        """The spans of one group."""
        return -(-self.group // self.span)

    def span_of(self, mix: T) -> T:
        """The number of the span of a mix."""
        newest = self.newest(mix)
        return newest // self.group * self.spans_of_group + newest % self.group // self.span

    def spans(self) -> list[range]:
        """The mixes of each."""
        count, of_group = self.span_of(self.mixes - 1) + 1, self.spans_of_group
        newest = [n // of_group * self.group + n % of_group * self.span for n in range(count + 1)]
        starts = [min(self.mixes, max(0, state + 1 - self.first)) for state in newest]
        return [range(start, end) for start, end in itertools.pairwise(starts)]

    def near(self, state: int) -> int:
        """How many mixes read a state, but not all of its block of states."""
        return min(self.mixes, self.first_mix(self.last(state))) - self.first_mix(state)

    def later(self, state: int) -> int:
        """How many mixes read all of a state's block."""
        return max(0, self.mixes - self.first_mix(self.last(state)))

    def last(self, state: T) -> T:
        """The last state of the block."""
        return state // self.gathered * self.gathered + (self.gathered - 1)

    def before(self, mix: int) -> int:
        """States before a mix's block of mixes: their part of its sum is begun with that block."""
        start = mix // self.block * self.block
        return self.first + start if self.beginning(self.first + start) else 0

    def beginning(self, states: int) -> range:
        """Mixes whose sums begin when there are that many states; not a single one, which is made at once."""
        mix = states - self.first
        stop = min(mix + self.block, self.mixes)
        return range(mix, stop if mix > 0 and mix % self.block == 0 and stop > mix + 1 else mix)


def best_block(mixes: int, first: int = 1) -> int:
    """B for a chain of mixes; more than all states if blocks do not pay.

    Within 5 % of the fewest bytes for chains of 10 to 100 mixes, the accumulators between chained kernels included
    (``benchmarks/traffic.py``; table in docs/kernels.md).
    """
    states = first + mixes - 1
    return BLOCK if states >= SHORTEST else states + 1
