"""Weighted sums: kernels whose source is generated from a `MixSpec`. Spec, source, routine, launch."""
