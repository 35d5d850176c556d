"""Check whether an implementation of a scheme computes what the paper says: references, test cases, and a checker.

report = rewire.conformance.check("mhc", implementation)
"""

from rewire.conformance.checker import Difference, Report, check
from rewire.conformance.running import Branch, Implementation, of_module
from rewire.conformance.schemes import Reference, list_schemes, reference
from rewire.conformance.vectors import write

__all__ = [
    "Branch",
    "Difference",
    "Implementation",
    "Reference",
    "Report",
    "check",
    "list_schemes",
    "of_module",
    "reference",
    "write",
]
