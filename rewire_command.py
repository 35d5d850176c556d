"""The ``rewire`` command. It is no part of the package, so that Ctrl-C ends it quietly while torch is imported, too."""

import sys


def main() -> None:
    """Entry point of the ``rewire`` command."""
    waiting = sys.stderr is not None and sys.stderr.isatty()
    try:
        if waiting:
            print("importing torch ...", end="", file=sys.stderr, flush=True)
        from rewire.cli import main as command

        if waiting:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)  # the line is erased
        command()
    except KeyboardInterrupt:
        sys.exit(130)  # as shells do
