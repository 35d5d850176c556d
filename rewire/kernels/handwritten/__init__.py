"""Triton kernels that are written by hand."""
