"""How long models take, plain and rewired, measured in turn: `rewire bench`."""
