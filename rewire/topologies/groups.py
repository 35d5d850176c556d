"""Units in groups, so that fewer states are kept: the option ``block=S`` of the topologies that mix all of them.

S units in turn are a group, the last one perhaps fewer. Without groups, read t has t sources: ``x_0``, and what each of
the units 1..t-1 left. With groups it is ``x_0``, and what each group left, the current one as far as it has come:
``1 + ceil((t - 1) / S)`` sources. That follows Block AttnRes (arXiv 2603.15031), in two forms:

- Of topologies that mix increments, a group leaves its sum: ``g_j = f_{(j-1)S+1} + .. + f_{jS}``.
- Of topologies that mix states, a group leaves its last state, ``x_{jS}``: read t mixes the states of
  ``K_t = {0, S, 2S, .. < t}`` and the newest, ``x_{t-1}``.

These are the same choice. A state is a sum already: in the plain residual network ``x_{jS} = x_0 + g_1 + .. + g_j``, so
that mixes of the ``x_{jS}`` are mixes of ``x_0`` and the ``g_j``, and nothing that a unit computed is lost. Every S-th
increment would lose the others; sums of states would count increments of early units S times. Every unit still has a
mix of its own, and S = 1 is no groups.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from rewire.mixes.history import History
from rewire.topologies.base import States

T = TypeVar("T", int, Tensor)
H = TypeVar("H", bound=History)


def count(t: T, block: int | None) -> T:
    """Sources of read t."""
    return 1 - (1 - t) // (block or 1)


def with_increment(sources: States, t: int, block: int | None, f: Tensor) -> States:
    """The sources of read t + 1, where they are sums of increments: those of read t, and ``f_t``."""
    if (t - 1) % (block or 1):
        return (*sources[:-1], sources[-1] + f)
    return (*sources, f)


def kept(sources: States, t: int, block: int | None) -> States:
    """Of the sources of read t, where they are states, those that later reads have: not a newest inside a group."""
    return sources[:-1] if (t - 1) % (block or 1) else sources


def next_read(history: H, number: int, newest: Tensor) -> tuple[H, Tensor, H]:
    """Where states are a history: that of read ``number`` (of its table), with the newest state; this, as who reads it
    next is to take it; and the history that goes on, which a newest inside a group is no state of.
    """
    if history.table.blocks.joined(number):
        history = history.at(number)
        reading, newest = history.joined(number, newest)
        return reading, newest, history
    history = history.push(newest)
    return history, history.states[-1], history


def group(i: int, block: int | None) -> int:
    """The number of the source that ``f_i`` is part of, where sources are sums of increments; ``f_0 = x_0``."""
    return -(-i // (block or 1))


def numbers(t: int, block: int | None) -> list[int]:
    """The numbers i of the ``x_i`` that are the sources of read t, where they are states."""
    return [min(n * (block or 1), t - 1) for n in range(count(t, block))]


def entries(depth: int, block: int | None, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Row t - 1 and column i of each source ``x_i`` of the reads t = 1..T, where they are states, read by read."""
    row, column = torch.tril_indices(depth, depth, device=device)
    if block in (None, 1):
        return row, column
    counts = count(torch.arange(1, depth + 1, device=device), block)
    size = sum(count(t, block) for t in range(1, depth + 1))  # known here: a GPU need not be waited for
    row = torch.repeat_interleave(torch.arange(depth, device=device), counts, output_size=size)
    number = torch.arange(size, device=device) - (counts.cumsum(0) - counts)[row]  # of the source in its read
    return row, torch.minimum(number * block, row)
