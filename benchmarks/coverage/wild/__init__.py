"""Small architectures as people write them: the forwards of well-known repositories, in their style, at toy size.

A fixed list for the coverage benchmark. Rewiring works on the source text of forwards, so what counts here
is how each forward is written: flags that are None or False, lambdas, loops over ModuleLists of ModuleLists, in-place
adds, tuples handed from block to block, streams that change shape, skips over half the network. All of it was written
for this benchmark, or for the tests (nanoGPT, EDSR), after the style of the repositories named, with 16 or 32 channels
and two or three blocks; no gate or scale starts at zero, so that a wrong rewrite shows in the outputs.

`WILD` maps a name to a function that returns a model and its positional arguments. Each has at least two residual adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from wild import (
    audio,
    convolutional,
    diffusion_transformers,
    gpts,
    llamas,
    recurrent,
    tables_and_graphs,
    transformers_by_hand,
    unets,
    vision,
)

WILD: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    **gpts.WILD,
    **llamas.WILD,
    **recurrent.WILD,
    **transformers_by_hand.WILD,
    **vision.WILD,
    **diffusion_transformers.WILD,
    **unets.WILD,
    **convolutional.WILD,
    **audio.WILD,
    **tables_and_graphs.WILD,
}
