"""`rewire.eject`: writes a rewired model as Python files that do not need rewire.

`eject` is the driver; `modules` writes the edited functions; `runtime` gathers the parts of rewire that they need,
including `connecting`, which sets up a model, and `plain`, which has the sums without kernels.
"""
