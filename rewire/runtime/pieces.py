"""Connection weights split by unit, as pipeline stages hold them.

The rows of weight ``w`` that only unit t uses are a parameter ``w_t``. These names do not depend on the cuts, so a
checkpoint fits any number of stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

#: Weight name -> number of rows of each of the units 1..T + 1.
Rows = Mapping[str, Sequence[int]]


def pieces(rows: Rows) -> dict[str, tuple[str, int]]:
    """Name of each piece -> its weight's name, and its unit."""
    return {f"{name}_{t}": (name, t) for name, sizes in rows.items() for t, n in enumerate(sizes, start=1) if n}


def apart(values: Mapping[str, Tensor], rows: Rows) -> dict[str, Tensor]:
    """Split the weights that have rows into pieces; keep the others."""
    found = {name: value for name, value in values.items() if name not in rows}
    for name in values.keys() & rows.keys():
        of_units = enumerate(values[name].split(list(rows[name])), start=1)
        found |= {f"{name}_{t}": piece for t, piece in of_units if len(piece)}
    return found


def together(values: Mapping[str, Tensor], rows: Rows, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Join the pieces of each weight that are there: those of no, some or all units.

    Args:
        values: weights and pieces, by name.
        rows: as above.
        shapes: shape of one row, by weight name.
    """
    known = pieces(rows)
    found = {name: value for name, value in values.items() if name not in known}
    like = next(iter(values.values()), torch.empty(0))
    for name in rows:
        own = [values[piece] for piece, (of, _) in known.items() if of == name and piece in values]
        found[name] = torch.cat(own) if own else like.new_empty(0, *shapes[name], dtype=torch.float32)
    return found
