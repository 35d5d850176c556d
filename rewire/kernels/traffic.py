"""What a mix would launch, and the bytes that it reads and writes: counted, without running anything."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rewire.kernels.grid import Launch, noted
from rewire.kernels.launch import mix_backward, mix_forward
from rewire.kernels.spec import MixSpec


def plan(
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
    norm_weight = empty(cols) if spec.scaled else None
    with noted() as launches:
        if backward:
            mix_backward(
                spec,
                of_outputs,
                states,
                weights,
                scores,
                mixes=of_outputs if spec.norm else (),
                rstd=empty(rows, dtype=torch.float32) if spec.norm else None,
                grad_mixes=of_outputs if spec.keep_mix else (),
                norm_weight=norm_weight,
                carried=states * spec.carried,
            )
        else:
            mix_forward(
                spec,
                states,
                weights,
                scores,
                [empty(rows, cols)] * (o * spec.added),
                accumulators=[empty(rows, cols, dtype=torch.float32)] * (o * spec.accumulate),
                norm_weight=norm_weight,
                norm_bias=empty(cols) if spec.shifted else None,
                probes=[empty(rows, cols)] * (o * spec.probe),
                dtype=out or dtype,
            )
    return launches


def bytes_moved(
    spec: MixSpec, rows: int, cols: int, itemsize: int, backward: bool = False, out_itemsize: int | None = None
) -> int:
    """Bytes that the kernels of a mix and the second step of their sums read and write: see `plan`.

    Args:
        spec, rows, cols, backward: as for `plan`.
        itemsize: of the states, 2 or 4.
        out_itemsize: of the mixes and their gradients; by default that of the states.
    """
    dtypes = {2: torch.bfloat16, 4: torch.float32}
    return bytes_of(plan(spec, rows, cols, dtypes[itemsize], backward, dtypes[out_itemsize or itemsize]))


def bytes_of(launches: Iterable[Launch]) -> int:
    """Bytes that kernels and the second step of their sums read and write."""
    total = 0
    for launch in launches:
        total += bytes_of_kernel(launch)
        for name, argument in launch.arguments.items():
            if name.endswith("_partials") and (len(argument) > 1 or name == "score_partials"):
                total += argument.nbytes + argument[0].nbytes
    return total


def bytes_of_kernel(launch: Launch) -> int:
    """Bytes that one kernel reads and writes: each argument once."""
    of_each = (argument if isinstance(argument, tuple) else (argument,) for argument in launch.arguments.values())
    return sum(x.nbytes for tensors in of_each for x in tensors if isinstance(x, Tensor))


def bytes_floor(
    spec: MixSpec, rows: int, cols: int, itemsize: int, backward: bool = False, out_itemsize: int | None = None
) -> int:
    """Bytes of all that a mix is computed from and of all that it returns, each counted once.

    Args as for `bytes_moved`.
    """
    n, o, out = spec.sources, spec.outputs, out_itemsize or itemsize
    per_pair = {"none": 0, "scalar": 4, "channel": 4 * cols}[spec.weights] + 4 * rows * spec.scores
    factors = spec.pairs * per_pair
    rstd = 4 * rows * o if spec.norm else 0
    if backward:
        states = n * (1 + spec.has_dots + spec.carried) * itemsize
        grads = o * (1 + (spec.norm is not None) + spec.keep_mix) * out  # with a norm, the mix is read, too
        added = out if spec.norm and spec.added else 0
        norm = cols * (spec.scaled * (itemsize + 4) + spec.shifted * 4)
        return rows * cols * (states + grads + added) + 2 * factors + rstd + norm
    states = n + o * (spec.added + spec.probe)
    results = o * (spec.mixed + (spec.norm is not None))
    norm = cols * (spec.scaled + spec.shifted) * itemsize
    values = states * itemsize + results * out + 4 * o * spec.accumulate
    return rows * cols * values + factors * (1 + spec.probe) + rstd + norm


def bytes_of_history(
    mixes: int, block: int | None, rows: int, cols: int, itemsize: int, first: int = 1
) -> tuple[int, int]:
    """Bytes that the kernels of a `History` move, forward and backward; each mix adds one branch output.

    This is `history.tensors_moved`, with branches, weights, partial sums, and the accumulators between chained kernels.

    Args:
        mixes, first: as in `history.Table`; all weights are scalars.
        block: mixes that are begun together, up to 8; None: without blocks.
        rows, cols, itemsize: of the states.
    """
    states, block = first + mixes - 1, block or first + mixes
    forward = [MixSpec(first + start, outputs=min(block, mixes - start)) for start in range(block, mixes, block)]
    moved = sum(bytes_moved(spec, rows, cols, itemsize, out_itemsize=4) for spec in forward)
    for number in range(mixes):
        near = number % block + (first if number < block else 0)
        spec = MixSpec(near, "scalar" if near else "none", added=1, accumulate=number >= block)
        moved += bytes_moved(spec, rows, cols, itemsize)
    backward = []
    for start in range(0, states, block):
        inside = range(start, min(start + block, states))
        later = max(0, mixes - max(0, start + block - first))
        for state in inside:
            near = mixes - max(0, state + 1 - first) - later
            backward += [MixSpec(near, added=int(later > 0), probe=True)] if near else []
        backward += [MixSpec(later, outputs=block, probe=True)] if later else []
    return moved, sum(bytes_moved(spec, rows, cols, itemsize) for spec in backward)
