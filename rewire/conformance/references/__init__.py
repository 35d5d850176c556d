"""The schemes as their papers write them: plain torch, loops over units and tokens, nothing imported but torch.

Each file stands by itself and may be copied; tensors have no types in them, and formulas are all there is. It has two
functions:

- ``parameters(depth, width, attention, **options)``: the weights by name, at the start that the paper gives; NaN where
  it draws them (``DRAWN`` says how). Row t - 1 of a weight is that of unit t. Where units have different numbers of
  sources, rows have the length of the longest, and what lies behind a unit's own sources is not read.
- ``forward(x, weights, branches, kept, **options)``: the output of a trunk for ``x`` [N, D], N tokens. ``branches[t -
  1]`` is what unit t computes of what it reads. Every state that an implementation would hold is passed through
  ``kept``, which hands it back: that is where states are noted, or rounded to the precision they are held in.
"""
