"""Tokenised text from a folder, in batches that depend on nothing but the seed and the step.

The format: files ``*.bin`` of little-endian uint16 tokens, one after the other, without a header. Files whose name
begins with ``val`` are for validation, all others for training. Such a file is one line of numpy::

    np.asarray(tokens, dtype="<u2").tofile("train_00.bin")
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Text for training and for validation: lists of uint16 arrays, and the size of the vocabulary."""

    train: list[np.ndarray]
    validation: list[np.ndarray]
    vocabulary: int

    def batch(self, size: int, length: int, seed: int, device: torch.device) -> Tensor:
        """int64 [size, length]: random pieces of the training text, equal for equal seeds."""
        generator = np.random.default_rng(seed)
        starts = np.array([max(0, len(part) - length) for part in self.train])
        parts = [self.train[index] for index in generator.choice(len(starts), size, p=starts / starts.sum())]
        pieces = [_piece(part, int(generator.integers(len(part) - length)), length) for part in parts]
        return torch.stack(pieces).to(device)

    def validation_batches(self, size: int, length: int, count: int, device: torch.device) -> list[Tensor]:
        """At most ``count`` batches int64 [size, length] from the start of the validation text."""
        starts = [(part, start) for part in self.validation for start in range(0, len(part) - length, length)]
        pieces = [_piece(part, start, length) for part, start in starts[: size * count]]
        return [torch.stack(pieces[first : first + size]).to(device) for first in range(0, len(pieces), size)]


def asked_for(args: argparse.Namespace, vocabulary: int, length: int) -> Tokens:
    """The text of ``--data``, or the bundled one for ``--small``.

    Raises:
        SystemExit: neither is given, or as in `read_tokens`.
    """
    if args.data is not None:
        return read_tokens(args.data, vocabulary, length)
    if args.small:
        return bundled_text()
    raise SystemExit("--data FOLDER is needed: tokenised text, see benchmarks/papers/tokens.py. Or try --small.")


def read_tokens(folder: Path, vocabulary: int, length: int) -> Tokens:
    """The tokenised text of a folder; files are mapped, not read.

    Raises:
        SystemExit: the folder is missing, has no file for training or for validation, or its files are too short or
            hold tokens outside of the vocabulary. The message says what to do.
    """
    if not folder.is_dir():
        raise SystemExit(f"--data {folder}: there is no such folder. {_HELP}")
    files = [path for path in sorted(folder.glob("*.bin")) if path.stat().st_size > 2 * length]
    parts = {path.name: np.memmap(path, dtype="<u2", mode="r") for path in files}
    train = [part for name, part in parts.items() if not name.startswith("val")]
    validation = [part for name, part in parts.items() if name.startswith("val")]
    if not train or not validation:
        missing = "training" if not train else "validation"
        raise SystemExit(f"--data {folder}: no file for {missing} has more than {length} tokens. {_HELP}")
    largest = max(int(part[:1_000_000].max()) for part in parts.values())
    if largest >= vocabulary:
        raise SystemExit(f"--data {folder}: token {largest} is outside of the model's vocabulary of {vocabulary}.")
    return Tokens(train, validation, vocabulary)


def bundled_text() -> Tokens:
    """The texts behind Python's ``help()``, byte by byte; every eighth topic is for validation."""
    names = sorted(topics)
    train = "\n\n".join(topics[name] for number, name in enumerate(names) if number % 8)
    validation = "\n\n".join(topics[name] for name in names[::8])
    return Tokens([_bytes(train)], [_bytes(validation)], 256)


_HELP = (
    "It needs files *.bin of uint16 tokens; those for validation are named val*.bin (see benchmarks/papers/tokens.py)."
)


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype("<u2")


def _piece(part: np.ndarray, start: int, length: int) -> Tensor:
    return torch.from_numpy(part[start : start + length].astype(np.int64))
