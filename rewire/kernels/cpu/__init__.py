"""Sums and their gradients on a CPU: in plain torch, and by C++ loops that are compiled on first use."""
