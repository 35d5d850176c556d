"""The version of rewire, and the name under which it is installed."""

__version__ = "0.2.0"

#: The distribution's name; `rewire` is another project's.
DISTRIBUTION = "rewire-torch"


def how_to_install(extra: str) -> str:
    """The command that installs rewire with the packages of an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
