"""Depth blocking: which mixes of a history read which states, and which mixes are computed together."""

from __future__ import annotations

import itertools
from typing import NamedTuple, TypeVar

from torch import Tensor

from rewire.kernels import switch

T = TypeVar("T", int, Tensor)

#: In histories of at least `SHORTEST` states: mixes that one kernel begins, and states whose gradients one gathers.
BLOCK = 4
SHORTEST = 9
#: In groups, the most mixes whose gradients wait for each other, unless a single read has more.
WAITING = 8


class Blocks(NamedTuple):
    """Which of S successive mixes read which states, and which mixes are computed together.

    Blocks of mixes begin at mixes B, 2 B, ...; blocks of states at states 0, C, 2 C, ....

    Attributes:
        mixes: S; if reads have several mixes each (ways), the number of reads.
        first: number of states that the first mix reads; each further one reads one more.
        block: B, the number of mixes that kernels begin together.
        gathered: C, the number of states whose gradients kernels gather together.
        group: number of mixes until there is another state. With more than one there are no blocks, as there are few
            states; a mix then reads the complete states, and the next one as far as it is summed up.
        span: in groups, the number of successive mixes whose gradients come together: all of a group, or some.
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
        """The arrangement for tensors like this: by default `best_block`, without blocks in groups or without kernels.

        Reads of several ways have no blocks either: begun sums would move more memory than they save.
        """
        none = first + mixes
        block = block or (best_block(mixes, first) if switch.uses_kernels(like) and group == 1 else none)
        return cls(mixes, first, none if ways > 1 else block, block, group, min(group, max(1, WAITING // ways)))

    @property
    def states(self) -> int:
        """Number of complete states that some mix reads."""
        return self.newest(self.mixes - 1) // self.group + 1

    @property
    def sources(self) -> float:
        """Average number of states that a mix reads."""
        return self.first + (self.mixes - 1) / 2 / self.group

    def newest(self, mix: T) -> T:
        """The number that a mix's newest state would have without groups."""
        return mix + (self.first - 1)

    def count(self, mix: T) -> T:
        """Number of states that a mix reads."""
        return -(-self.newest(mix) // self.group) + 1

    def joined(self, mix: int) -> bool:
        """Whether a mix's newest state is an incomplete one, which only this mix reads."""
        return self.newest(mix) % self.group > 0

    def first_mix(self, state: T) -> T:
        """The first mix that reads a state when it is complete."""
        mix = state * self.group + (1 - self.first)
        return mix.clamp(min=0) if isinstance(mix, Tensor) else max(0, mix)

    @property
    def spans_of_group(self) -> int:
        """Number of spans in a group."""
        return -(-self.group // self.span)

    def span_of(self, mix: T) -> T:
        """Number of a mix's span."""
        newest = self.newest(mix)
        return newest // self.group * self.spans_of_group + newest % self.group // self.span

    def spans(self) -> list[range]:
        """The mixes of each span."""
        count, of_group = self.span_of(self.mixes - 1) + 1, self.spans_of_group
        newest = [n // of_group * self.group + n % of_group * self.span for n in range(count + 1)]
        starts = [min(self.mixes, max(0, state + 1 - self.first)) for state in newest]
        return [range(start, end) for start, end in itertools.pairwise(starts)]

    def near(self, state: int) -> int:
        """Number of mixes that read a state, but not its whole block of states."""
        return min(self.mixes, self.first_mix(self.last(state))) - self.first_mix(state)

    def later(self, state: int) -> int:
        """Number of mixes that read a state's whole block."""
        return max(0, self.mixes - self.first_mix(self.last(state)))

    def last(self, state: T) -> T:
        """The last state of a state's block."""
        return state // self.gathered * self.gathered + (self.gathered - 1)

    def before(self, mix: int) -> int:
        """Number of states before a mix's block of mixes, over which its sum is begun together with that block."""
        start = mix // self.block * self.block
        return self.first + start if self.beginning(self.first + start) else 0

    def beginning(self, states: int) -> range:
        """The mixes whose sums begin when there are that many states; empty for one mix, which is computed at once."""
        mix = states - self.first
        stop = min(mix + self.block, self.mixes)
        return range(mix, stop if mix > 0 and mix % self.block == 0 and stop > mix + 1 else mix)


def best_block(mixes: int, first: int = 1) -> int:
    """The best B for a chain of mixes; more than the number of states if blocks do not pay.

    Its memory traffic, including accumulators between chained kernels, is within 5 % of the optimum for chains of 10 to
    100 mixes (``benchmarks/traffic.py``; table in docs/kernels.md).
    """
    states = first + mixes - 1
    return BLOCK if states >= SHORTEST else states + 1
