"""One of several processes that save into one folder at once, or load from it meanwhile.

    save_worker.py RANK FOLDER TRIALS

The last rank loads, the others save: each a model of its own weights and topology. Prints a JSON line for each trial:
what went wrong, if anything did.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from models import PreNorm, Stack

import rewire

TOPOLOGIES = ["ancre-ingoing", "ancre-outgoing", "denseformer", "hc-static"]


def stack():
    return Stack(PreNorm).eval()


def model_of(rank):
    """A model whose weights are all one number, by which it is known: another process's is seen in any of them."""
    model = rewire.compile(stack(), TOPOLOGIES[rank % len(TOPOLOGIES)], start="paper", validate=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(rank + 1)
    return model


def rank_of(model):
    """Whose it is, whole."""
    (rank,) = {int(value) - 1 for parameter in model.parameters() for value in parameter.unique()}
    (connection,) = rewire.connections(model).values()
    assert connection.recipe()["topology"] == TOPOLOGIES[rank % len(TOPOLOGIES)]
    return rank


def meet(folder, rank, ranks):
    """Go on when all have come."""
    (folder / f"met-{rank}").touch()
    while len(list(folder.glob("met-*"))) < ranks:
        time.sleep(0)


def trial(model, rank, ranks, folder):
    saved, marks = folder / "saved", folder / "marks"
    if rank:
        meet(marks, rank, ranks)
    else:
        rewire.save(model, saved)
        meet(marks, rank, ranks)
    if model is not None:
        for _ in range(3):
            rewire.save(model, saved, max_shard_bytes=8_000)
            rank_of(rewire.load(saved, stack()))
        (marks / f"done-{rank}").touch()
        return
    while len(list(marks.glob("done-*"))) < ranks - 1:
        assert rank_of(rewire.load(saved, stack())) in range(ranks - 1)


def main():
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    base, trials = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    model = model_of(rank) if rank < ranks - 1 else None
    for number in range(trials):
        folder = base / str(number)
        with contextlib.suppress(FileExistsError):
            (folder / "marks").mkdir(parents=True)
        try:
            trial(model, rank, ranks, folder)
            print(json.dumps(""), flush=True)
        except Exception as error:
            print(json.dumps(f"{number}: {type(error).__name__}: {error}"), flush=True)
            (folder / "marks" / f"met-{rank}").touch()
            (folder / "marks" / f"done-{rank}").touch()


if __name__ == "__main__":
    main()
