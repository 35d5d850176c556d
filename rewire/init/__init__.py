"""Initialisers: rules from a weight's role in the graph to its values. One family a file; importing registers all."""

from __future__ import annotations

import importlib
import pkgutil

from rewire.init.apply import InitReport, initialize
from rewire.init.idinit import IDInit
from rewire.init.registry import Initializer, Rule, list_initializers, make_initializer, register_initializer
from rewire.init.table import ROLES, Roles, Weight
from rewire.init.units import identity_, idi_, idic_, idiz_, idizc_, near_identity_, zero_hadamard_

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

__all__ = [
    "ROLES",
    "IDInit",
    "InitReport",
    "Initializer",
    "Roles",
    "Rule",
    "Weight",
    "identity_",
    "idi_",
    "idic_",
    "idiz_",
    "idizc_",
    "initialize",
    "list_initializers",
    "make_initializer",
    "near_identity_",
    "register_initializer",
    "zero_hadamard_",
]
