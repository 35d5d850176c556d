"""What generated forwards call to refuse a call that they were not rewritten for."""

from __future__ import annotations

from typing import NoReturn

from rewire.errors import UnsupportedCall


def refuse(condition: object, refused: bool, what: str) -> None:
    """Raise if ``bool(condition) == refused``.

    Raises:
        UnsupportedCall: naming ``what`` is not supported.
    """
    if bool(condition) == refused:
        unsupported(what)


def unsupported(what: str) -> NoReturn:
    """Raise for a path through a block that could not be rewritten."""
    raise UnsupportedCall(f"the rewritten block does not support this call: {what}.")
