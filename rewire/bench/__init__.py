"""Workloads, other implementations to compare with, and the timing of both: `rewire bench`."""
