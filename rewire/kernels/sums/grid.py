"""Generated kernels and their grids: tiles, and the division of rows and columns among programs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from rewire.kernels import cache
from rewire.kernels.kernel import PROGRAMS, Code
from rewire.kernels.sums.generator import source
from rewire.kernels.sums.spec import MAX_DOTS, MixSpec


@dataclasses.dataclass(frozen=True)
class Grid:
    """A generated kernel, and the division of rows and columns for it.

    Attributes:
        spec, backward: as for `generator.source`.
        row_programs, col_programs: the grid.
        block_rows, block_cols: the tile that a program holds at a time.
        warps: number of warps of a program.
    """

    spec: MixSpec
    backward: bool
    row_programs: int
    col_programs: int
    block_rows: int
    block_cols: int
    warps: int

    @classmethod
    def of(cls, spec: MixSpec, backward: bool, rows: int, cols: int, itemsize: int) -> Grid:
        """The grid, with tiles that fit into registers (see `_tile`); few programs, which loop, for sums over rows."""
        sums = backward or spec.probe
        block_rows, block_cols, warps = _tile(spec, cols, sums, itemsize)
        row_programs, col_programs = -(-rows // block_rows), -(-cols // block_cols)
        if sums and spec.along_rows:  # columns are divided only if there are few rows
            col_programs = min(col_programs, 1 if spec.attended else max(1, PROGRAMS // max(1, row_programs)))
        if sums and (spec.weights != "none" or spec.norm is not None):
            row_programs = min(row_programs, max(1, PROGRAMS // max(1, col_programs)))
        return cls(spec, backward, row_programs, col_programs, block_rows, block_cols, warps)

    def parts(self, sums: str) -> int:
        """Number of programs that each leave a partial sum for the parameter named ``sums``."""
        if sums == "score_partials":
            return self.col_programs
        of_all = sums == "weight_partials" and self.spec.weights == "scalar"
        return self.row_programs * (self.col_programs if of_all else 1)

    def code(self) -> Code:
        constants = {
            "BLOCK_ROWS": self.block_rows,
            "BLOCK_COLS": self.block_cols,
            "num_warps": self.warps,
            "enable_fp_fusion": True,  # explicit, as Triton's default is about to change
        }
        programs = (self.row_programs, self.col_programs, 1)
        return Code(lambda: kernel(self.spec, self.backward), programs, constants, self)


def _tile(spec: MixSpec, cols: int, sums: bool, itemsize: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a tile.

    Each thread loads 16 bytes of a tensor at once. In bfloat16 it loads half of that if it also holds sums per channel
    for every source, weights per channel for 3 or more mixes, or 6 or more mixes, gradients and probes; and a quarter
    for sums per channel of more than 16 pairs. A warp holds whole rows of the tile, so that sums along them stay in the
    warp. With a norm, a tile has whole rows; in backward, which holds several tensors' rows, more warps share them.
    """
    width = max(16, 1 << (cols - 1).bit_length()) if cols else 16  # the next power of two
    if spec.norm:
        warps = min(16, max(4, width // (256 if sums else 512)))
        return max(1, 512 // width), width, warps
    many = spec.outputs * (1 + spec.probe) >= 6
    by_channel = spec.weights == "channel" and (sums or spec.outputs >= 3)
    elements = 4 if many or by_channel else 16 // itemsize
    if by_channel and sums and spec.pairs > MAX_DOTS["channel"]:
        elements = 2
    block_cols = min(width, 32 * elements)
    return 128 * elements // block_cols, block_cols, 4


@functools.cache
def kernel(spec: MixSpec, backward: bool) -> Any:
    """The decorated kernel, whose source is generated and imported once per process."""
    module = cache.load(source(spec, backward))
    return module.mix_backward if backward else module.mix_forward
