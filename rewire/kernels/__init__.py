"""Kernels of the mixes. Only absolute imports: this package is also reachable through a link at the root."""

from rewire.kernels.sums.generator import source
from rewire.kernels.sums.spec import MixSpec

__all__ = ["MixSpec", "source"]
