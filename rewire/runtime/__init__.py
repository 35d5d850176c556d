"""What rewired models run, below `rewire.stream` and `rewire.depth`."""
