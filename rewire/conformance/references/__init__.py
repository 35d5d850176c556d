"""The schemes as their papers write them: plain torch, loops over units and tokens, no import but torch.

Each file stands alone and may be copied. It has no type annotations, nothing but formulas, and two functions:

- ``parameters(depth, width, attention, **options)``: the weights by name, at the paper's start; NaN if the paper draws
  them at random (``DRAWN`` says how). Row t - 1 of a weight belongs to unit t. If units have different numbers of
  sources, rows have the length of the longest, and entries after a unit's own sources are not read.
- ``forward(x, weights, branches, kept, **options)``: the output of a trunk for ``x`` [N, D], N tokens. ``branches[t -
  1]`` computes unit t from its read. Every state that an implementation would hold passes through ``kept``, which
  returns it: there states are recorded, or rounded to the precision in which they are held.
"""
