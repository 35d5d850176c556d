"""Initialisers: registered here by name. None is built in yet."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rewire.registry import Registry

_REGISTRY: Registry[Callable[..., Any]] = Registry("initialiser", "initializers", entry_points="rewire.initializers")


def initializers() -> dict[str, str]:
    """Name of every initialiser, and what it is in one line."""
    return {name: (inspect.getdoc(function) or "").split("\n")[0] for name, function in _REGISTRY.items()}
