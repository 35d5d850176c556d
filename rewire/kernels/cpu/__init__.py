"""Sums and their gradients on a CPU: plain torch, and loops in C++ that are compiled when they are first needed."""
