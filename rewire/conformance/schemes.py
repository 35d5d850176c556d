"""The schemes by name: the file of `references` that defines each, and its options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from rewire.errors import UnknownName, did_you_mean

#: Options of a scheme, by name.
Options: TypeAlias = Mapping[str, Any]

_FOLDER = Path(__file__).parent / "references"


@dataclasses.dataclass(frozen=True)
class Reference:
    """A scheme as its paper writes it.

    Attributes:
        name: of the scheme, as in `rewire.list_topologies`.
        title: what it is, in a few words.
        source: the paper or code that it comes from.
        file: its file in ``references``, without the suffix.
        fixed: options of that file that make it this scheme.
        defaults: options whose value in the paper differs from that of the file's other schemes.
        spreads: size of its weights in test cases, by name, if it is not 1; or the option that gives the size.
        least: smallest number of units.
        divides: the option that has to divide the width.
        attention: whether it treats units that begin with an attention differently.
        text: the file; of a known mistake, the file with that mistake.
    """

    name: str
    title: str
    source: str
    file: str
    fixed: Options = dataclasses.field(default_factory=dict)
    defaults: Options = dataclasses.field(default_factory=dict)
    spreads: Mapping[str, float | str] = dataclasses.field(default_factory=dict)
    least: int = 1
    divides: str | None = None
    attention: bool = False
    text: str = ""

    def __post_init__(self) -> None:
        if not self.text:
            object.__setattr__(self, "text", self.path.read_text())

    @property
    def path(self) -> Path:
        return _FOLDER / f"{self.file}.py"

    @property
    def formula(self) -> str:
        """The formulas of the scheme, from its file."""
        return _functions(self.text, str(self.path))["__doc__"] or ""

    @property
    def options(self) -> dict[str, Any]:
        """The options that can be chosen, with the paper's values."""
        function = _functions(self.text, str(self.path))["forward"]
        named = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        return {p.name: self.defaults.get(p.name, p.default) for p in named if p.name not in self.fixed}

    def with_options(self, given: Options) -> dict[str, Any]:
        """All options, with the given ones replaced.

        Raises:
            UnknownName: the scheme does not have one of them.
        """
        unknown = sorted(given.keys() - self.options.keys())
        if unknown:
            known = ", ".join(self.options) or "none"
            raise UnknownName(f"the scheme '{self.name}' has no option '{unknown[0]}': it has {known}.")
        return {**self.fixed, **self.options, **given}

    def parameters(self, depth: int, width: int, attention: Collection[int], **options: object) -> dict[str, Tensor]:
        """Start values of the weights, by name; NaN for random ones."""
        make = _functions(self.text, str(self.path))["parameters"]
        taken = inspect.signature(make).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        chosen = {name: value for name, value in options.items() if open_ended or name in taken}
        return make(depth, width, attention, **chosen)

    @property
    def drawn(self) -> dict[str, str]:
        """How random start values are drawn."""
        return dict(_functions(self.text, str(self.path)).get("DRAWN", {}))

    def forward(
        self,
        x: Tensor,
        weights: Mapping[str, Tensor],
        branches: Sequence[object],
        kept: Callable[[Tensor], Tensor],
        **options: object,
    ) -> Tensor:
        """The output [N, D] for ``x`` [N, D]; see `rewire.conformance.references`."""
        return _functions(self.text, str(self.path))["forward"](x, weights, branches, kept, **options)


@functools.cache
def _functions(text: str, path: str) -> dict[str, Any]:
    """The functions that a file defines, or its mistaken copy."""
    names: dict[str, Any] = {"__name__": Path(path).stem}
    exec(compile(text, path, "exec"), names)
    return names


def reference(name: str) -> Reference:
    """The scheme of this name.

    Raises:
        UnknownName: there is none.
    """
    if name not in SCHEMES:
        near = did_you_mean(name, SCHEMES) or f" There are {', '.join(SCHEMES)}."
        raise UnknownName(f"there is no reference of '{name}'.{near}")
    return SCHEMES[name]


def list_schemes() -> dict[str, str]:
    """Name of every scheme that has a reference -> a one-line description.

    Example:
        >>> "mhc" in rewire.conformance.list_schemes()
        True
    """
    return {name: f"{scheme.title} ({scheme.source})" for name, scheme in SCHEMES.items()}


_ANCRE = "arXiv 2602.09009"
_DCA = "arXiv 2502.06785"
_HC = "arXiv 2409.19606"
_LAUREL = "arXiv 2411.07501"
_STATIC = {"A_m": 0.5, "A_r": 0.5, "B": 0.5}
_PROJECTIONS = _STATIC | {"W_m": 0.5, "W_r": 0.5, "W_b": 0.5, "last_W_m": 0.5}
_LOW_RANK = {"A": 0.5, "B": 0.5}


def _listed(*references: Reference) -> dict[str, Reference]:
    return {one.name: one for one in references}


SCHEMES: Mapping[str, Reference] = _listed(
    Reference(
        *("mhc", "Manifold-constrained hyper-connections (mHC)", "arXiv 2512.24880", "mhc"),
        spreads={"phi_pre": 0.125, "phi_post": 0.125, "phi_res": 0.125, "last_phi": 0.125},
    ),
    Reference("hc-static", "Hyper-connections with constant weights", _HC, "hc", {"dynamic": False}, spreads=_STATIC),
    Reference(
        *("hc-dynamic", "Hyper-connections whose weights depend on the token", _HC, "hc", {"dynamic": True}),
        spreads=_PROJECTIONS,
    ),
    Reference("multi-gate", "Multi-Gate Residuals", "arXiv 2605.23259", "multi_gate"),
    Reference("two-lanes", "Two lanes for attentions and MLPs", "modded-nanogpt", "lanes"),
    Reference(
        *("frac-hc", "Frac-connections", "arXiv 2503.14125", "frac_hc"), spreads=_PROJECTIONS, divides="fractions"
    ),
    Reference(
        *("hc-gated", "Gated hyper-connections of Qwen4-Exp", "transformers", "hc_gated"),
        spreads={"norm": 0.25, "down": 0.25, "up": 0.25, "inject": 0.25},
    ),
    Reference("attnres", "Attention Residuals", "arXiv 2603.15031", "attnres", divides="heads", attention=True),
    Reference(
        *("muddformer", "MUDDFormer: multiway dynamic dense connections", "arXiv 2502.12170", "muddformer"),
        spreads={"W1": 0.5, "W2": 0.25},
        attention=True,
    ),
    Reference(
        *("dca", "DeepCrossAttention", _DCA, "grn", {"channels": True, "dependent": True, "qkv": True}),
        spreads={"w": 0.25},
        attention=True,
    ),
    Reference(
        *("grn-v1", "Generalised residual network, a number for each source", _DCA, "grn"),
        fixed={"channels": False, "dependent": False, "qkv": False},
    ),
    Reference(
        *("grn-v2", "Generalised residual network, weights per channel", _DCA, "grn"),
        fixed={"channels": True, "dependent": False, "qkv": False},
    ),
    Reference(
        *("grn-v3", "Generalised residual network, weights that depend on the input", _DCA, "grn"),
        fixed={"channels": True, "dependent": True, "qkv": False},
        spreads={"w": 0.25},
    ),
    Reference("denseformer", "DenseFormer: depth-weighted averages", "arXiv 2402.02622", "denseformer"),
    *(
        Reference(f"ancre-{kind}", f"ANCRe, {what}", _ANCRE, "ancre", {"normalize": kind}, spreads={"c": spread})
        for kind, what, spread in (
            ("ingoing", "weights into each state sum to 1", "temperature"),
            ("outgoing", "weights out of each state sum to 1", "temperature"),
            ("none", "free weights", 1.0),
        )
    ),
    Reference("ancre-constant", "ANCRe's ablation with fixed weights", _ANCRE, "ancre_constant"),
    Reference("ancre-cascaded", "ANCRe's ablation with a scalar on each shortcut", _ANCRE, "ancre_cascaded"),
    Reference("ddl", "Deep Delta Learning", "arXiv 2601.00417", "ddl", spreads={"w": 0.5, "u": 0.5}),
    Reference(
        *("laurel-rw", "LAuReL with residual weights", _LAUREL, "laurel"),
        fixed={"low_rank": False, "previous": False, "rank": 1, "last": 1},
        defaults={"total": 1.0},
    ),
    Reference(
        *("laurel-lr", "LAuReL, low rank", _LAUREL, "laurel"),
        fixed={"low_rank": True, "previous": False, "last": 1},
        spreads=_LOW_RANK,
    ),
    Reference(
        *("laurel-pa", "LAuReL with previous activations", _LAUREL, "laurel"),
        fixed={"low_rank": True, "previous": True},
        spreads=_LOW_RANK,
    ),
    Reference("rezero", "ReZero", "arXiv 2003.04887", "branch_scale", {"channels": False, "start": None}),
    Reference("skipinit", "SkipInit", "arXiv 2002.10444", "branch_scale", {"channels": False, "start": None}),
    Reference("layerscale", "LayerScale", "arXiv 2103.17239", "branch_scale", {"channels": True}),
    Reference("residual-scale", "Scales of Doge and ZAYA1", "transformers", "residual_scale"),
    Reference("variance-gate", "Muse Spark's gate", "transformers", "variance_gate"),
    Reference("fixed-scale", "Constant scales, as of DeepNorm", "arXiv 2203.00555", "fixed_scale"),
    Reference("orthogonal", "Orthogonal residual updates", "arXiv 2505.11881", "orthogonal"),
    Reference("review", "Review residuals", "arXiv 2606.31859", "review", spreads={"W": 0.25}),
    Reference("gpas", "Gradient-preserving activation scaling (GPAS)", "arXiv 2506.22049", "gpas"),
    Reference("unet", "Skips of modded-nanogpt", "modded-nanogpt", "unet", least=2),
    Reference("x0-lambdas", "Learned scalars of nanochat", "nanochat, modded-nanogpt", "x0_lambdas"),
    Reference("residual", "Plain residual connections", "arXiv 1512.03385", "residual"),
)
