"""Every topology, with the options that change its formulas."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from mixing import shaken
from torch import Tensor, nn

import rewire

#: Test id -> name and options.
EVERY: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in rewire.list_topologies()},
    "ancre-keep": ("ancre-ingoing", {"cascade": "keep"}),
    "denseformer-2x2": ("denseformer", {"dilation": 2, "period": 2}),
    **{f"{name}-last": (name, {"last": 1}) for name in ("grn-v1", "grn-v2", "grn-v3", "dca")},
    "dca-norms": ("dca", {"separate_norms": True}),
    "ancre-groups": ("ancre-ingoing", {"block": 2}),
    **{f"{name}-groups": (name, {"block": 2}) for name in ("denseformer", "grn-v1", "dca", "muddformer")},
    "hc-dynamic-2": ("hc-dynamic", {"streams": 2}),
    "hc-static-sum": ("hc-static", {"output": "sum"}),
    "hc-static-learned": ("hc-static", {"output": "learned"}),
    "hc-dynamic-learned": ("hc-dynamic", {"output": "learned"}),
    "mhc-identity": ("mhc", {"residual": "identity", "output": "learned", "eps": 1e-6, "magnitude": 3.0}),
    "mhc-permutations": ("mhc", {"residual": "permutations", "streams": 3}),
    "mhc-cayley": ("mhc", {"residual": "cayley", "output": "learned"}),
    "mhc-kronecker": ("mhc", {"residual": "kronecker"}),
    "mhc-entry": ("mhc", {"entry_scales": True}),
    "mhc-delayed": ("mhc", {"delayed": True, "output": "learned"}),
    "hc-gated-streams": ("hc-gated", {"reads": "streams", "streams": 2, "rank": 3}),
    "frac-hc-static": ("frac-hc", {"dynamic": False}),
    "laurel-rw-softmax": ("laurel-rw", {"total": 1.0}),
    "laurel-rw-lr": ("laurel-lr", {"total": 1.0}),
    "laurel-rw-lr-pa": ("laurel-pa", {"total": 2.0}),
    "x0-lambdas-state": ("x0-lambdas", {"shortcut": "state"}),
    "residual-scale-branch": ("residual-scale", {"branch": True}),
    "residual-scale-all": ("residual-scale", {"branch": True, "bias": True}),
    "fixed-scale-deepnorm": ("fixed-scale", {"shortcut_power": 0.25}),
    "orthogonal-gated": ("orthogonal", {"form": "gated"}),
    "gpas-shortcut": ("gpas", {"scaled": "shortcut"}),
    "attnres-scaled": ("attnres", {"scaled": True}),
    "attnres-groups": ("attnres", {"scaled": True, "block": 2}),
    "attnres-rank": ("attnres", {"rank": 4}),
    "attnres-additive": ("attnres", {"additive": True}),
    "attnres-qkv": ("attnres", {"qkv": True, "heads": 2}),
    "attnres-normed": ("attnres", {"normed": True, "block": 2}),
    "ancre-few": ("ancre-ingoing", {"units": [-1], "sources": ["x0"]}),
    "denseformer-few": ("denseformer", {"units": [-1, "output"], "sources": ["x0"]}),
    "grn-v2-few": ("grn-v2", {"sources": [1]}),
    "grn-v3-few": ("grn-v3", {"units": [-1, "output"], "sources": ["x0", -1]}),
    "muddformer-few": ("muddformer", {"units": [-1, "output"], "sources": ["x0"], "channels": ["v", "shortcut"]}),
    "muddformer-norms": ("muddformer", {"norms": True}),
    "attnres-few": ("attnres", {"units": ["output"], "sources": [1]}),
}

#: Those whose formulas have no start that equals the plain residual network.
NOT_PRESERVING = {"ancre-constant", "attnres-normed", "fixed-scale-deepnorm", "multi-gate"}

#: Those that connect what branches add, which has no meaning where a norm follows the add.
PRE_NORM_ONLY = {
    *("grn-v1", "grn-v2", "grn-v3", "dca", "grn-v1-last", "grn-v2-last", "grn-v3-last", "dca-last", "dca-norms"),
    *("grn-v1-groups", "dca-groups"),
    *("hc-static", "hc-static-sum", "hc-static-learned", "hc-dynamic", "hc-dynamic-2", "hc-dynamic-learned"),
    *("frac-hc", "frac-hc-static", "mhc", "mhc-identity", "mhc-permutations", "mhc-cayley"),
    *("mhc-kronecker", "mhc-entry", "mhc-delayed", "two-lanes", "multi-gate"),
    *("hc-gated", "hc-gated-streams"),
    *("attnres", "attnres-scaled", "attnres-groups", "attnres-additive", "attnres-qkv", "attnres-normed"),
    *("grn-v2-few", "grn-v3-few", "attnres-few", "attnres-rank"),
}

#: Those whose weights are constant, and scale states.
STATIC = [
    *("residual", "ancre-ingoing", "ancre-outgoing", "ancre-none", "ancre-keep", "ancre-constant", "ancre-cascaded"),
    *("denseformer", "denseformer-2x2", "grn-v1", "grn-v2", "grn-v1-last", "grn-v2-last"),
    *("ancre-groups", "denseformer-groups", "grn-v1-groups", "ancre-few", "denseformer-few", "grn-v2-few"),
    *("rezero", "skipinit", "layerscale", "laurel-rw", "laurel-rw-softmax"),
    *("hc-static", "hc-static-sum", "hc-static-learned", "two-lanes"),
    *("x0-lambdas", "x0-lambdas-state", "unet", "residual-scale", "residual-scale-branch", "variance-gate"),
    *("fixed-scale", "fixed-scale-deepnorm"),
]

#: Those that need an attention.
WITH_ATTENTION = {"dca", "dca-last", "dca-norms", "dca-groups", "attnres-qkv"}

PRESERVING = [key for key in EVERY if key not in NOT_PRESERVING]
#: One for each way in which states are mixed, in any block.
FAMILIES = ["ancre-ingoing", "denseformer", "grn-v1", "grn-v2", "grn-v3", "hc-static", "hc-dynamic", "frac-hc", "mhc"]
FAMILIES += ["mhc-identity", "mhc-permutations", "mhc-cayley", "hc-gated"]
FAMILIES += ["laurel-pa", "layerscale", "attnres", "muddformer"]
#: Those without weights at the paper's start.
CONSTANT = ("residual", "ancre-constant", "fixed-scale", "fixed-scale-deepnorm", "orthogonal")
LEARNED = [key for key in EVERY if key not in CONSTANT]


#: Enough for a second model that is connected as the first one.
FEW = ("ancre-ingoing", "dca", "hc-dynamic", "grn-v2", "muddformer")
#: Of those alike one.
QUICK = (*FEW, "residual", "layerscale", "mhc", "attnres")


def kinds_first(cases: Iterable[Any], few: Collection[str] = ()) -> list[ParameterSet]:
    """Cases with a key of `EVERY` each, as parameters of a test: those with a key of `QUICK` are quick, others slow.

    Of cases with one of the words ``few``, those with one of the first three keys of `FEW` are quick.
    """
    listed = [case if isinstance(case, tuple) else (case,) for case in cases]
    quick = [FEW[:3] if set(few).intersection(case) else QUICK for case in listed]
    slow = [not set(keys).intersection(map(str, case)) for keys, case in zip(quick, listed, strict=True)]
    return [
        pytest.param(*case, marks=pytest.mark.slow if late else (), id="-".join(map(str, case)))
        for case, late in zip(listed, slow, strict=True)
    ]


def learned(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if "depth_connections" in name}


def compiled(model: nn.Module, key: str, **kwargs: Any) -> nn.Module:
    name, options = EVERY[key]
    return rewire.compile(model, name, **options, **kwargs)


def mixed(model: nn.Module, key: str, **kwargs: Any) -> nn.Module:
    """Rewired, with connection weights away from their start: an answer that ignores them is wrong."""
    rewired = compiled(model, key, start="paper", validate=False, **kwargs)
    return shaken(rewired, 0.2, 7, **({"logits": 0.01} if "ancre" in key else {}))
