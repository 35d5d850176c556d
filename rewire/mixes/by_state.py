"""Weights of reads, ordered by state: the order in which their gradients come."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rewire.mixes.blocks import Blocks


class ByState(NamedTuple):
    """Weights by state, [k] or [k, D] each. A mix is one way of a read.

    Attributes:
        near: for each state, its weights in the mixes that do not read its whole block.
        later: for each block of states, its weights in the mixes that do: of its first state, of its second, ..
        spans: in groups, for each span, the weights in its mixes: of the first complete state, of the second, ..
        joined: in groups, for each read, the weights of the incomplete state that only it reads, if any.
    """

    near: tuple[Tensor | None, ...] = ()
    later: tuple[Tensor | None, ...] = ()
    spans: tuple[Tensor | None, ...] = ()
    joined: tuple[Tensor | None, ...] = ()

    @classmethod
    def of(cls, flat: Tensor, blocks: Blocks, ways: Sequence[int]) -> ByState:
        """Reorder weights that are sorted by read, then by way, then by state."""
        first = first_mixes(ways)
        of_states = [first[blocks.first_mix(state)] for state in range(blocks.states)]
        read, state = _entries(flat, blocks, ways)
        if blocks.group > 1:
            span, complete = blocks.span_of(read), blocks.newest(read) // blocks.group + 1
            spans = blocks.spans()
            key = torch.where(state < complete, span, len(spans)) * blocks.states + state
            together = [
                (number // blocks.spans_of_group + 1) * (first[reads.stop] - first[reads.start])
                for number, reads in enumerate(spans)
            ]
            alone = [way if blocks.joined(number) else 0 for number, way in enumerate(ways)]
            pieces = parts(_sorted(flat, key), [*together, *alone])
            return cls(spans=pieces[: len(together)], joined=pieces[len(together) :])
        key = (read >= blocks.first_mix(blocks.last(state))) * blocks.states + state
        ends = [first[blocks.first_mix(state) + blocks.near(state)] for state in range(blocks.states)]
        near = [end - start for start, end in zip(of_states, ends, strict=True)]
        last = range(blocks.gathered - 1, blocks.states, blocks.gathered)
        later = [blocks.gathered * (first[-1] - of_states[state]) for state in last]
        pieces = parts(_sorted(flat, key), [*near, *later])
        return cls(pieces[: len(near)], pieces[len(near) :])


def first_mixes(ways: Sequence[int]) -> list[int]:
    """The number of the first mix of each read, followed by the number of mixes."""
    return [0, *itertools.accumulate(ways)]


def _entries(flat: Tensor, blocks: Blocks, ways: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The read and the state of each weight; made on the device, as CUDA graphs cannot capture copies of lists."""
    runs: list[Tensor] = []  # not list[Tensor](), which Dynamo does not know
    reads = 0
    for way, run in itertools.groupby(ways):
        length = len(list(run))
        runs.append(torch.arange(reads, reads + length, device=flat.device).repeat_interleave(way))
        reads += length
    of_mixes = torch.cat(runs)
    sizes, mixes = blocks.count(of_mixes), torch.arange(len(of_mixes), device=flat.device)
    mix = torch.repeat_interleave(mixes, sizes, output_size=len(flat))  # the known size saves a synchronisation
    return of_mixes[mix], torch.arange(len(flat), device=flat.device) - (sizes.cumsum(0) - sizes)[mix]


def _sorted(flat: Tensor, key: Tensor) -> Tensor:
    """``flat`` sorted by ``key``; selecting by masks would synchronise with the GPU."""
    return flat.index_select(0, key.argsort(stable=True))


def parts(x: Tensor, counts: list[int], dim: int = 0) -> tuple[Tensor, ...]:
    """``x`` split along ``dim``; in a compiled region, into new tensors.

    A region that begins a stream returns its table, and AOTAutograd cannot return several views of one split
    ("split_with_sizes expects split_sizes to sum exactly to 1"). Not by ``clone``: Inductor drops clones that it finds
    useless, but AOTAutograd still takes them for memory that may be overwritten, so that steps write to the weights.
    """
    if not torch.compiler.is_compiling():
        return x.split(counts, dim)
    ends = itertools.accumulate(counts)
    places = [torch.arange(end - n, end, device=x.device) for n, end in zip(counts, ends, strict=True)]
    return tuple([x.index_select(dim, of_part) for of_part in places])
