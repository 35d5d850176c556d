"""Connection weights taken apart by unit, as the stages of a pipeline hold them.

The rows of weight ``w`` that unit t alone uses are a parameter ``w_t`` there: names that do not depend on the cuts, so
that a checkpoint fits any number of stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

#: By name, how many rows each of the units 1..T + 1 has.
Rows = Mapping[str, Sequence[int]]


def pieces(rows: Rows) -> dict[str, tuple[str, int]]:
    """Names of all pieces: of which weight, and of which unit."""
    return {f"{name}_{t}": (name, t) for name, sizes in rows.items() for t, n in enumerate(sizes, start=1) if n}


def apart(values: Mapping[str, Tensor], rows: Rows) -> dict[str, Tensor]:
    """Weights by name, those that have rows in pieces."""
    found = {name: value for name, value in values.items() if name not in rows}
    for name in values.keys() & rows.keys():
        of_units = enumerate(values[name].split(list(rows[name])), start=1)
        found |= {f"{name}_{t}": piece for t, piece in of_units if len(piece)}
    return found


def together(values: Mapping[str, Tensor], rows: Rows, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """The opposite: what there is of each weight, of no, some or all units.

    Args:
        values: weights by name, and pieces.
        rows: as above.
        shapes: of one row, by name.
    """
    known = pieces(rows)
    found = {name: value for name, value in values.items() if name not in known}
    like = next(iter(values.values()), torch.empty(0))
    for name in rows:
        own = [values[piece] for piece, (of, _) in known.items() if of == name and piece in values]
        found[name] = torch.cat(own) if own else like.new_empty(0, *shapes[name], dtype=torch.float32)
    return found
