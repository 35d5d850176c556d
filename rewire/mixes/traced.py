"""Autograd functions under torch.compile: each call is one operator of Dynamo's graph, ``torch.ops.rewire.<name>``.

Dynamo would follow both passes of an autograd function, and leave a node that torch's cache of traced graphs does not
take by default. An operator that is composed of others it leaves to AOTAutograd, which runs the function.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from rewire.kernels import switch
from rewire.torch_internals import SESSIONS_ARE_SEEN

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _state() -> str:
    """Everything on which the graph of such an operator depends, beside its arguments."""
    package = Path(__file__).parents[1]
    files = sorted([*package.glob("mixes/*.py"), *package.glob("kernels/**/*.py")])
    sources = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    return f"{sources} {switch.ON} {switch.INTERPRETED}"


#: An argument of each operator, as torch's cache knows a graph by the names and arguments in it.
_STATE = _state()


def by_operator() -> bool:
    """Whether autograd functions are to be called as operators: Dynamo is tracing."""
    return SESSIONS_ARE_SEEN and torch.compiler.is_dynamo_compiling()


def whole_in_graphs(function: _Function) -> _Function:
    """Decorator: while Dynamo traces, the function, which calls an autograd function, is one operator.

    Its schema comes from its signature. It must not return the tensors that it is given, but may return views of them.
    """
    schema = torch.library.infer_schema(function, mutates_args=())
    name, start = f"rewire::{function.__name__}", schema.rindex(") ->")
    torch.library.define(name, f"{schema[:start]}, str state{schema[start:]}")
    torch.library.impl(name, "CompositeImplicitAutograd")(lambda *args: function(*args[:-1]))
    operator = getattr(torch.ops.rewire, function.__name__).default

    @functools.wraps(function)
    def call(*args: object) -> object:
        return operator(*args, _STATE) if by_operator() else function(*args)

    return call  # type: ignore[return-value]
