"""A warning for PEFT, which saves only adapters, if connection weights were trained, too."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from torch import nn

from rewire.attributes import CONNECTIONS

_SAVES = "get_peft_model_state_dict"  # PEFT's function that picks the adapters' entries of a state dict


def tell_if_left_out(connection: nn.Module, name: str) -> None:
    """Warn if PEFT is making a state dict, and will leave out connection weights that are trained.

    Args:
        connection: the connection whose state is asked for.
        name: its prefix in the state dict; PEFT also asks for the state of copies made for ``modules_to_save``.
    """
    parts = name.split(".")
    if CONNECTIONS not in parts or "modules_to_save" in parts:
        return
    if not any(parameter.requires_grad for parameter in connection.parameters()):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != _SAVES:
        frame = frame.f_back
    if frame is not None:
        warnings.warn(
            f"PEFT saves adapters without the connection weights that you also trained ({name}): in a newly rewired "
            f"model, they would compute something else. Pass modules_to_save=['{CONNECTIONS}'] to PEFT's config, or "
            "save the connection weights, too: rewire.save(model.get_base_model(), folder, weights='connections').",
            stacklevel=2,
        )
