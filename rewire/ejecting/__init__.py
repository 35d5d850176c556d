"""rewire.eject: a rewired model as Python files that do not need rewire.

`eject` is the driver; `modules` writes the edited functions, `runtime` gathers what they need of rewire, of which
`connecting` sets up a model, and `plain` holds the sums without kernels.
"""
