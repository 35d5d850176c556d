"""Measurements on models that run (`rewire.diagnose`, `rewire.Monitor`), depth graphs, ablations."""
