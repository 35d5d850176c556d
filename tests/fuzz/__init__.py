"""Random nets, and what has to hold for each. A package, so that benchmarks/fuzz.py does not take its name."""
