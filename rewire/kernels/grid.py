"""How kernels are started: tiles, the grid of programs, and the kernels themselves."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rewire.kernels import cache
from rewire.kernels.generator import source
from rewire.kernels.spec import MixSpec

#: Programs among which a kernel that sums over rows is divided, about: a few for each processor of a large GPU. Fixed,
#: so that results do not depend on the device.
PROGRAMS = 1024


@dataclasses.dataclass(frozen=True)
class Grid:
    """How rows and columns are divided.

    Attributes:
        row_programs, col_programs: the grid.
        block_rows, block_cols: the tile that a program holds at a time.
        warps: of a program.
    """

    row_programs: int
    col_programs: int
    block_rows: int
    block_cols: int
    warps: int

    @classmethod
    def of(cls, spec: MixSpec, like: Tensor, sums: bool) -> Grid:
        """Tiles that registers hold: see `_tile`. Kernels that sum over rows get few programs, which loop."""
        rows, cols = like.shape
        block_rows, block_cols, warps = _tile(spec, cols, sums, like.dtype.itemsize)
        row_programs, col_programs = -(-rows // block_rows), -(-cols // block_cols)
        if sums:
            row_programs = min(row_programs, max(1, PROGRAMS // max(1, col_programs)))
        return cls(row_programs, col_programs, block_rows, block_cols, warps)


def _tile(spec: MixSpec, cols: int, sums: bool, itemsize: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a tile.

    Each thread loads 16 bytes of a tensor at once; half of that in bfloat16 where it also holds sums per channel for
    every source, or 6 or more mixes, gradients and probes. A warp holds whole rows of the tile, so that sums along
    them stay in the warp. With a norm the rows of the tile are whole; in backward, which holds several at once, more
    warps share them.
    """
    width = max(16, 1 << (cols - 1).bit_length()) if cols else 16  # the next power of two
    if spec.norm:
        warps = min(16, max(4, width // (256 if sums else 512)))
        return max(1, 512 // width), width, warps
    many = spec.outputs * (1 + spec.probe) >= 6
    elements = 4 if many or (sums and spec.weights == "channel") else 16 // itemsize
    block_cols = min(width, 32 * elements)
    return 128 * elements // block_cols, block_cols, 4


class Launch(NamedTuple):
    """One kernel, and what it is started with; without a spec and a grid one that is written by hand."""

    spec: MixSpec | None
    backward: bool
    grid: Grid | None
    arguments: dict[str, Any]


#: Where launches on tensors without storage are noted.
_noted: contextvars.ContextVar[list[Launch]] = contextvars.ContextVar("noted")


@contextlib.contextmanager
def noted() -> Iterator[list[Launch]]:
    """The launches on tensors of the meta device, in turn: they are noted, not started."""
    launches: list[Launch] = []
    token = _noted.set(launches)
    try:
        yield launches
    finally:
        _noted.reset(token)


def start(launch: Launch, device: torch.device) -> None:
    """Start a generated kernel on tensors of ``device``; on the meta device, note it."""
    if device.type == "meta":
        _noted.get([]).append(launch)
        return
    assert launch.spec is not None
    assert launch.grid is not None
    programs = (launch.grid.row_programs, launch.grid.col_programs)
    run(kernel(launch.spec, launch.backward), programs, device, launch.arguments, constants(launch.grid))


def run(
    kernel: Any, programs: tuple[int, int], device: torch.device, arguments: dict[str, Any], constants: dict[str, Any]
) -> None:
    """Start a kernel with its tensors and all else; on the meta device, note it."""
    if device.type == "meta":
        _noted.get([]).append(Launch(None, False, None, arguments))
        return
    if not math.prod(programs):
        return  # no elements
    # Triton launches on the current device.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[programs](**arguments, **constants)


@functools.cache
def kernel(spec: MixSpec, backward: bool) -> Any:
    """The decorated kernel; its source is generated and imported once per process."""
    module = cache.load(source(spec, backward))
    return module.mix_backward if backward else module.mix_forward


def constants(grid: Grid) -> dict[str, Any]:
    """Arguments of a kernel that are fixed when it is compiled, and options of the compiler."""
    return {
        "BLOCK_ROWS": grid.block_rows,
        "BLOCK_COLS": grid.block_cols,
        "num_warps": grid.warps,
        "enable_fp_fusion": True,  # said explicitly: the default of Triton is about to change
    }
