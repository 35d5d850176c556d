"""Weighted sums of states, and what their weights are computed with: topologies are written in these."""
