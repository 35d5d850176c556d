"""Weighted sums of states, and the functions that compute their weights: topologies are built from these."""
