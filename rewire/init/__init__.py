"""Initialisers: rules from a weight's role in the graph to its values."""

from __future__ import annotations

from rewire.init.apply import InitReport, initialize
from rewire.init.functional import identity_, idi_, idic_, idiz_, idizc_, near_identity_, zero_hadamard_
from rewire.init.initializers.idinit import IDInit
from rewire.init.initializers.mup import MuP
from rewire.init.initializers.scaled_weights import Scaled
from rewire.init.registry import Initializer, Rule, list_initializers, make_initializer, register_initializer
from rewire.init.table import ROLES, Roles, Weight

__all__ = [
    "ROLES",
    "IDInit",
    "InitReport",
    "Initializer",
    "MuP",
    "Roles",
    "Rule",
    "Scaled",
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
