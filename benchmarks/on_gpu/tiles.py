"""The kernels that are written by hand, in other tiles than theirs: what to choose for a new kind of GPU.

    python benchmarks/on_gpu/tiles.py [--out FILE] [--apply]

All tiles are compiled first, by many processes; then each is timed from cold caches, in microseconds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whether it is installed or not

import torch
from torch.utils import _pytree as pytree

from rewire.kernels.handwritten import projection, writes

Tile = tuple[int, ...]
ROWS, WIDTH = 8192, 1024
#: Columns of a weight that are measured, and those up to which the same tile is taken.
COLUMNS = {8: 16, 24: 32, 50: 64, 96: 128}
MODULES = {"projection": projection, "writes": writes}
#: Rows and columns of a tile, warps, and tiles that are loaded ahead.
FORWARD: tuple[Tile, ...] = ((64, 64, 4, 3), (64, 64, 4, 4), (128, 128, 8, 3), (32, 64, 4, 4))
BACKWARD: tuple[Tile, ...] = (
    *((32, 128, 4, 1), (16, 128, 4, 1), (64, 128, 4, 1), (64, 64, 4, 1), (32, 64, 4, 1), (64, 128, 8, 1)),
    *((16, 256, 4, 1), (16, 128, 4, 2), (32, 128, 4, 2), (32, 64, 4, 2)),
)
WEIGHTS: tuple[Tile, ...] = ((32, 128, 4, 3), (64, 128, 4, 3), (32, 64, 4, 3), (32, 64, 4, 4), (32, 128, 8, 3))
WRITE: tuple[Tile, ...] = (
    *((8, 128, 8, 1), (8, 128, 8, 2), (8, 128, 8, 3), (4, 128, 4, 1), (4, 128, 4, 2), (16, 128, 16, 1)),
    *((4, 128, 2, 1), (4, 128, 2, 2), (4, 128, 2, 3), (2, 128, 2, 1), (2, 128, 2, 2), (8, 128, 4, 2)),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel in one tile.

    Attributes:
        module: `projection` or `writes`, by name.
        table: what has the tile there.
        columns: of the weight.
    """

    module: str
    table: str
    tile: Tile
    columns: int

    @property
    def kind(self) -> tuple[str, str, int]:
        return self.module, self.table, self.columns


def cases() -> list[Case]:
    kinds = (("FORWARD", FORWARD), ("BACKWARD", BACKWARD), ("WEIGHTS", WEIGHTS))
    found = [Case("projection", name, tile, columns) for name, tiles in kinds for columns in COLUMNS for tile in tiles]
    return found + [Case("writes", name, tile, 6) for name in ("FORWARD", "BACKWARD") for tile in WRITE]


@contextlib.contextmanager
def patched(case: Case) -> Iterator[None]:
    caches = [projection._fitted_forward, projection._fitted_backward, projection._fitted_weights]
    caches += [writes._fitted_forward, writes._fitted_backward]
    module = MODULES[case.module]
    tiles = case.tile if case.module == "writes" else dict.fromkeys(COLUMNS.values(), case.tile)
    with mock.patch.object(module, case.table, tiles):
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()


def runs(case: Case) -> Callable[[], object]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda")

    if case.module == "writes":
        streams, branch = draw(ROWS, 4, WIDTH).bfloat16(), draw(ROWS, WIDTH).bfloat16()
        table, weight = draw(ROWS, 4, 5), draw(case.columns, WIDTH).T
        terms = (streams, [branch], table, weight)
        known = writes.forward(*terms, 1e-6, torch.bfloat16)
        if case.table == "FORWARD":
            return lambda: writes.forward(*terms, 1e-6, torch.bfloat16)
        read = projection.Read(branch[:, None], table[..., :1])
        return lambda: writes.backward(known[1], streams, read, *known, *terms)
    x, weight, grad = draw(ROWS, WIDTH).bfloat16(), draw(case.columns, WIDTH).T, draw(ROWS, case.columns)
    scores, inverse = projection.forward(x, weight, 1e-6)
    if case.table == "FORWARD":
        return lambda: projection.forward(x, weight, 1e-6)
    return lambda: projection.backward([grad], x, weight, scores, inverse, x)


def attempt(case: Case, timed: bool) -> Any:
    """Microseconds of one run, whose results are those of the tiles as they are; why there are none."""
    from triton.testing import do_bench

    try:
        torch.manual_seed(0)
        run = runs(case)
        wanted = run()
        with patched(case):
            found = run()
            torch.cuda.synchronize()
            for got, want in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
                error = (got.double() - want.double()).norm() / want.double().norm()
                assert error < 2e-3, f"off by {error:.1e}"
            return 1e3 * do_bench(run, warmup=3, rep=20, return_mode="median") if timed else 0.0
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:100]


def compile_only(case: Case) -> Any:
    return attempt(case, False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/tiles.json"))
    parser.add_argument("--apply", action="store_true", help="write the fastest into the sources")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(16, os.cpu_count() or 1), context) as pool:
        list(pool.map(compile_only, cases()))
    found = [dataclasses.asdict(case) | {"microseconds": attempt(case, True)} for case in cases()]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=0))
    kinds: dict[tuple[str, str, int], list[tuple[float, Tile]]] = {}
    for case, row in zip(cases(), found, strict=True):
        kinds.setdefault(case.kind, [])
        if isinstance(row["microseconds"], float):
            kinds[case.kind].append((row["microseconds"], case.tile))
        else:
            print(case, row["microseconds"])
    for kind, rows in kinds.items():
        print(*kind, " ".join(f"{tile}: {time:.0f}" for time, tile in sorted(rows)[:8]))
    if options.apply:
        apply({kind: min(rows)[1] for kind, rows in kinds.items() if rows})


def apply(best: dict[tuple[str, str, int], Tile]) -> None:
    """Write tiles into the sources."""
    for name, module in MODULES.items():
        path = Path(str(module.__file__))
        text = path.read_text()
        for table in {kind[1] for kind in best if kind[0] == name}:
            tiles = {COLUMNS.get(kind[2], 0): tile for kind, tile in best.items() if kind[:2] == (name, table)}
            value = tiles[0] if name == "writes" else getattr(module, table) | tiles
            text = re.sub(rf"^{table} = .*$", f"{table} = {value}", text, flags=re.MULTILINE)
        path.write_text(text)


if __name__ == "__main__":
    main()
