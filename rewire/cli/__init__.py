"""The ``rewire`` command."""

from rewire.cli import conformance, models, runs  # noqa: F401  # they add their commands
from rewire.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the ``rewire`` command."""
    app(prog_name="rewire")
