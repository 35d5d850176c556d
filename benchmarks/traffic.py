"""What a mix would launch, and the bytes that it reads and writes: counted, without running anything.

Of the kernels alone: a count of what routines start, no part of the run time.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rewire.kernels.kernel import Launch, noted
from rewire.kernels.sums.launch import GradientInputs, MixInputs, mix_backward, mix_forward
from rewire.kernels.sums.spec import MixSpec
from rewire.mixes.blocks import Blocks


def launches_of(
    spec: MixSpec, rows: int, cols: int, dtype: torch.dtype, backward: bool = False, out: torch.dtype | None = None
) -> list[Launch]:
    """The kernels that `mix_forward` or `mix_backward` would launch for [rows, cols], on tensors without storage.

    Args:
        spec: what is computed.
        rows, cols: sizes.
        dtype: of the states.
        backward: the kernels of the gradients; where a norm follows and the mix is kept, it has a gradient, too.
        out: of the mixes and their gradients; by default that of the states.
    """

    def empty(*shape: int, dtype: torch.dtype | None = dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    n, o = spec.sources, spec.outputs
    weight_shape = (o, n, cols) if spec.weights == "channel" else (o, n)
    weights = None if spec.weights == "none" else empty(*weight_shape, dtype=torch.float32)
    states, of_outputs = [empty(rows, cols)] * n, [empty(rows, cols, dtype=out or dtype)] * o
    scores = [empty(rows, 1, dtype=torch.float32)] * (spec.pairs * spec.scores)
    norm_weight = empty(cols) if spec.norm else None
    with noted() as launches:
        if backward:
            inputs = GradientInputs(of_outputs, states, weights, scores, carried=states * spec.carried)
            if spec.norm:
                rstd = empty(rows, dtype=torch.float32)
                inputs = inputs._replace(mixes=of_outputs, rstd=rstd, norm_weight=norm_weight)
            if spec.keep_mix:
                inputs = inputs._replace(grad_mixes=of_outputs)
            mix_backward(spec, inputs)
        else:
            added, probes = ([empty(rows, cols)] * (o * count) for count in (spec.added, spec.probe))
            running = [empty(rows, cols, dtype=torch.float32)] * (o * spec.accumulate)
            norm_bias = empty(cols) if spec.shifted else None
            given = MixInputs(states, weights, scores, added, running, probes, norm_weight, norm_bias)
            if spec.attended:
                means = empty(n, rows, dtype=torch.float32)
                given = given._replace(means=means, scores=[means.expand(o, n, rows).contiguous().movedim(-1, 0)])
            mix_forward(spec, given, out or dtype)
    return launches


def bytes_moved(
    spec: MixSpec, rows: int, cols: int, itemsize: int, backward: bool = False, out_itemsize: int | None = None
) -> int:
    """Bytes that the kernels of a mix and the second step of their sums read and write: see `launches_of`.

    Args:
        spec, rows, cols, backward: as for `launches_of`.
        itemsize: of the states, 2 or 4.
        out_itemsize: of the mixes and their gradients; by default that of the states.
    """
    dtypes = {2: torch.bfloat16, 4: torch.float32}
    return bytes_of(launches_of(spec, rows, cols, dtypes[itemsize], backward, dtypes[out_itemsize or itemsize]))


def bytes_of(launches: Iterable[Launch]) -> int:
    """Bytes that kernels and the second step of their sums read and write."""
    launches = list(launches)
    written = [launch for launch in launches if launch.code.made_for is None]
    by_kernels = {id(x) for launch in written for x in launch.arguments.get("partials", ())}
    total = 0
    for launch in launches:
        total += bytes_of_kernel(launch)
        for name, argument in launch.arguments.items():
            made_for = launch.code.made_for
            if made_for is not None and name.endswith("_partials") and id(argument) not in by_kernels:
                parts = made_for.parts(name)
                total += argument.nbytes + argument.nbytes // parts if parts > 1 else 0  # torch adds them up
    return total


def bytes_of_kernel(launch: Launch) -> int:
    """Bytes that one kernel reads and writes: each argument once."""
    of_each = (argument if isinstance(argument, tuple) else (argument,) for argument in launch.arguments.values())
    return sum(x.nbytes for tensors in of_each for x in tensors if isinstance(x, Tensor))


def bytes_floor(spec: MixSpec, rows: int, cols: int, itemsize: int, backward: bool = False) -> int:
    """Bytes of all that a mix is computed from and of all that it returns, each counted once.

    Args as for `bytes_moved`.
    """
    n, o, normed = spec.sources, spec.outputs, spec.norm is not None
    per_pair = {"none": 0, "scalar": 4, "channel": 4 * cols}[spec.weights] + 4 * rows * spec.scores
    factors = spec.pairs * per_pair
    rstd = 4 * rows * o * normed
    if backward:
        states = n * (1 + spec.has_dots + spec.carried)
        grads = o * (1 + normed + spec.keep_mix)  # with a norm, the mix is read, too
        added = int(normed and spec.added > 0)
        norm = cols * (normed * (itemsize + 4) + spec.shifted * 4)
        return rows * cols * (states + grads + added) * itemsize + 2 * factors + rstd + norm
    states = n + o * (spec.added + spec.probe + spec.mixed + normed)
    norm = cols * (normed + spec.shifted) * itemsize
    return rows * cols * (states * itemsize + 4 * o * spec.accumulate) + factors * (1 + spec.probe) + rstd + norm


def bytes_of_history(
    mixes: int, block: int | None, rows: int, cols: int, itemsize: int, first: int = 1
) -> tuple[int, int]:
    """Bytes that the kernels of a `History` move, forward and backward; each mix adds one branch output.

    Branch outputs, weights, partial sums and the accumulators between chained kernels included; without them those of
    docs/kernels.md.

    Args:
        mixes, first: as in `claimed.Table`; all weights are scalars.
        block: mixes that are begun together, up to 8; None: without blocks.
        rows, cols, itemsize: of the states.
    """
    block = block or first + mixes
    blocks = Blocks(mixes, first, block, block)
    together = [blocks.beginning(states) for states in range(first, blocks.states + 1)]
    forward = [MixSpec(first + begun.start, outputs=len(begun)) for begun in together if begun]
    moved = sum(bytes_moved(spec, rows, cols, itemsize, out_itemsize=4) for spec in forward)
    for number in range(mixes):
        begun = blocks.before(number)
        near = first + number - begun
        spec = MixSpec(near, "scalar" if near else "none", added=1, accumulate=begun > 0)
        moved += bytes_moved(spec, rows, cols, itemsize)
    backward = []
    for state in range(blocks.states):
        near, later = blocks.near(state), blocks.later(state)
        backward += [MixSpec(near, added=int(later > 0), probe=True)] if near else []
        backward += (
            [MixSpec(later, outputs=blocks.gathered, probe=True)] if later and state == blocks.last(state) else []
        )
    return moved, sum(bytes_moved(spec, rows, cols, itemsize) for spec in backward)
