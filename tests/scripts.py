"""Scripts of benchmarks/ as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def script(name: str) -> ModuleType:
    """The module of ``benchmarks/<name>.py``, which is in no package."""
    folder = Path(__file__).parents[1] / "benchmarks"
    if str(folder) not in sys.path:  # for what they import of each other
        sys.path.insert(0, str(folder))
    path = folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module
