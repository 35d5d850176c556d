"""Block-local tracing: from one module's ``forward`` to torch.fx graphs and back to Python source."""

from rewire.tracing.explore import Path, Traced, trace
from rewire.tracing.printer import print_forward
from rewire.tracing.tracer import Leaf

__all__ = ["Leaf", "Path", "Traced", "print_forward", "trace"]
