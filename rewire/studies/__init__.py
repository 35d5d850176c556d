"""Which residual connections train a model best: `rewire.study`."""

from rewire.studies.run import study
from rewire.studies.task import Task

__all__ = ["Task", "study"]
