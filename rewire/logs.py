"""Logs of what each stage saw and did: ``REWIRE_LOGS=find,rewrite,validate,kernels`` prints them.

The stages use the loggers ``rewire.find`` and so on of `logging`; the variable only makes these visible. ``+find`` also
shows what is usually too long: each operation of the model, its file and line, and its inputs.

| stage | shows |
|---|---|
| find | whether the model was run or traced, its trunks, what was left alone, seconds; ``+find``: the graph |
| rewrite | what connects each trunk, and the text of each changed function, before and after, as a diff; seconds |
| validate | what was compared in which setting, the largest difference, seconds |
| kernels | the kernels that were generated, and which were taken from the cache |
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator

from rewire.errors import did_you_mean

STAGES = ("find", "rewrite", "validate", "kernels")

find, rewrite, validate, kernels = (logging.getLogger(f"rewire.{stage}") for stage in STAGES)


def show(stages: str) -> None:
    """Print the logs of the named stages; ``stages`` has the form of ``REWIRE_LOGS``.

    Raises:
        ValueError: there is no such stage.
    """
    names = [name.strip() for name in stages.split(",") if name.strip()]
    for name in names:
        plain = name.removeprefix("+")
        if plain not in (*STAGES, "all"):
            hint = did_you_mean(plain, STAGES)
            raise ValueError(f"REWIRE_LOGS: there is no stage '{plain}'.{hint} Stages are {', '.join(STAGES)}, all.")
        for stage in STAGES if plain == "all" else (plain,):
            logger = logging.getLogger(f"rewire.{stage}")
            logger.setLevel(logging.DEBUG if name.startswith("+") else logging.INFO)
            logger.propagate = False  # or the root logger would print it again
            if not any(isinstance(handler, _Printer) for handler in logger.handlers):
                logger.addHandler(_Printer())


class _Printer(logging.StreamHandler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[%(name)s] %(message)s"))


@contextlib.contextmanager
def timed(logger: logging.Logger, what: str) -> Iterator[None]:
    """Log how long the block took, as "``what``, in 0.12 s"."""
    start = time.perf_counter()
    yield
    logger.info("%s, in %.2f s", what, time.perf_counter() - start)


def show_those_of_the_environment() -> None:
    """Show the stages that ``REWIRE_LOGS`` names; warn of unknown names, for which an import must not fail."""
    try:
        show(os.environ.get("REWIRE_LOGS", ""))
    except ValueError as error:
        logging.getLogger("rewire").warning("%s", error)
