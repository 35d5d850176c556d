"""Kernels of the mixes. Only absolute imports: this package is also reachable through a link at the root."""
