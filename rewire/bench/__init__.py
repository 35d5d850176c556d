"""Training times of plain and rewired models, measured in turn: `rewire bench`."""
