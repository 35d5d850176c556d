"""What the states of a trunk look like in a model that runs: `rewire.diagnose` and `rewire.Monitor`."""
