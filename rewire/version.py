"""The version of rewire, and the name that it is installed by."""

__version__ = "0.2.0"

#: The name under which it is installed; a package `rewire` of somebody else has the other one.
DISTRIBUTION = "rewire-torch"


def how_to_install(extra: str) -> str:
    """What installs rewire with the packages of an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
