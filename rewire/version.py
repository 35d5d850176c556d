"""The version of rewire."""

__version__ = "0.2.0"
