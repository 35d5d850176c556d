"""Block-local tracing: from one module's ``forward`` to torch.fx graphs and back to Python source."""

from rewire.tracing.explore import Path, Traced, trace
from rewire.tracing.printer import print_forward
from rewire.tracing.tracer import Leaf, PathTracer, child_calls_recorded

__all__ = ["Leaf", "Path", "PathTracer", "Traced", "child_calls_recorded", "print_forward", "trace"]
