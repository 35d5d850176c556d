"""Detects blocks that run inside an autograd function, as with re-entrant activation checkpointing."""

from __future__ import annotations

import linecache
import os
import sys
from types import CodeType, FrameType

import torch
from torch.autograd.function import FunctionCtx

#: Advice for error messages about it.
USE = "use torch.utils.checkpoint.checkpoint(.., use_reentrant=False), or set the flag that the model has for it"
#: Advice for error messages about an add inside an autograd function.
ADD_OUTSIDE = (
    f"if that is activation checkpointing, {USE}; if it is a fused add and norm, switch that off, or add outside of it"
)
_OTHERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
_EDITED = " (rewired "


def forwards() -> set[CodeType]:
    """Code objects of the forwards of all autograd functions; since torch 2.14, ``apply`` itself has no frame."""
    classes: list[type] = [torch.autograd.Function]
    for known in classes:
        classes += known.__subclasses__()
    found = (getattr(getattr(known, "forward", None), "__code__", None) for known in classes)
    return {code for code in found if code is not None}


def where_reentrant() -> str:
    """A sentence that names the running call of an autograd function; empty if there is none."""
    frame: FrameType | None = None if torch.compiler.is_compiling() else sys._getframe(1)
    inside, known = False, forwards()
    while frame is not None:
        function = isinstance(frame.f_locals.get("ctx"), FunctionCtx) or frame.f_code in known
        inside = inside or function
        if inside and not function and not frame.f_code.co_filename.startswith(_OTHERS):
            file, edited, _ = frame.f_code.co_filename.partition(_EDITED)
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            at = file if edited else f"{file}:{frame.f_lineno}"
            return f" That is `{line}` in {frame.f_code.co_qualname} ({at})."
        frame = frame.f_back
    return ""
