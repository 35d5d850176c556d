"""Handwritten Triton kernels."""
