"""The topologies of rewire, with all their options, against the references: values and gradients, and the starts."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import INTERPRETED, interpret, starts_interpreter

import rewire
from rewire.conformance import check, checker, list_schemes, reference
from rewire.conformance.cases import KINDS, cases
from rewire.conformance.ours import ours, packed, topology_of
from rewire.conformance.running import of_reference
from rewire.errors import UnknownName
from rewire.kernels import switch
from rewire.topologies.base import Dims

ANCRE = [
    {"cascade": "keep", "temperature": 0.1},
    {"form": "difference", "temperature": 0.3},
    {"form": "difference", "cascade": "keep", "block": 2},
    {"block": 2},
    {"block": 9, "temperature": 1.0},
]
STREAMS = [{"streams": 1}, {"streams": 2, "output": "mean"}, {"streams": 3, "output": "learned"}]
STACKS = [{"last": 1}, {"last": 2}, {"block": 2}, {"block": 4}]
#: Options other than the paper's, by scheme. Each value of each option is in one of them.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ancre-ingoing": ANCRE,
    "ancre-outgoing": ANCRE,
    "ancre-none": [{"cascade": "keep"}, {"block": 2}],
    "ancre-constant": [{"cascade": "keep"}, {"block": 2}, {"cascade": "keep", "block": 3}],
    "ancre-cascaded": [{"cascade": "keep"}],
    "attnres": [
        *({"block": 2}, {"scaled": True}, {"form": "difference"}, {"additive": True}, {"qkv": True}, {"heads": 2}),
        *({"normed": True}, {"block": 3, "scaled": True, "heads": 4}, {"block": 2, "additive": True}),
        *({"additive": True, "form": "difference"}, {"heads": 3, "normed": True, "additive": True}),
        *({"qkv": True, "block": 2, "normed": True}, {"qkv": True, "heads": 2, "scaled": True}),
        *({"rank": 2}, {"rank": 3, "block": 2, "qkv": True}, {"rank": 2, "normed": True}, {"rank": 99}),
    ],
    "dca": STACKS,
    "ddl": [{"form": "difference"}],
    "denseformer": [
        {"dilation": 2},
        {"period": 2},
        {"dilation": 3, "period": 2},
        {"block": 2},
        {"block": 2, "period": 2},
    ],
    "fixed-scale": [
        {"shortcut_power": 0.25},
        {"shortcut": 0.5, "branch": 2.0, "branch_power": -1.0},
    ],
    "frac-hc": [{"fractions": 1}, {"fractions": 2}, {"fractions": 3, "dynamic": False}],
    "grn-v1": STACKS,
    "grn-v2": STACKS,
    "grn-v3": STACKS,
    "hc-dynamic": STREAMS,
    "hc-static": STREAMS,
    "hc-gated": [{"reads": "streams", "streams": 2, "rank": 3}, {"norm_eps": 1e-5}],
    "laurel-lr": [{"rank": 2}, {"total": 2.0}, {"total": 1.0, "form": "difference"}],
    "laurel-pa": [{"last": 1}, {"last": 2, "rank": 3, "total": 1.0}, {"total": 1.5, "form": "difference"}],
    "laurel-rw": [{"total": 2.0}, {"total": 1.0, "form": "difference"}],
    "layerscale": [{"start": 0.1}],
    "mhc": [
        *({"streams": 2, "output": "mean"}, {"output": "learned", "eps": 1e-6}, {"iterations": 1}, {"iterations": 3}),
        {"residual": "identity", "output": "learned", "magnitude": 3.0, "eps": 1e-3},
        *({"residual": "permutations", "streams": 3}, {"residual": "cayley", "norm_eps": 1e-5}, {"magnitude": 1.0}),
        *({"residual": "kronecker"}, {"residual": "kronecker", "streams": 2}),
        *({"residual": "spectral"}, {"residual": "spectral", "streams": 2}),
        *({"delayed": True, "output": "learned", "eps": 1e-6}, {"entry_scales": True, "streams": 3}),
        {"delayed": True, "output": "learned", "residual": "identity", "streams": 3},
    ],
    "muddformer": [{"block": 2}, {"block": 3}, {"norms": True}, {"norms": True, "block": 2}],
    "multi-gate": [{"streams": 2}, {"streams": 3, "bias": -1.0}],
    "orthogonal": [{"form": "gated"}],
    "review": [{"form": "difference"}],
    "gpas": [{"scaled": "shortcut"}],
    "residual-scale": [{"branch": True}, {"bias": True}, {"branch": True, "bias": True}],
    "two-lanes": [{"last": 2}, {"last": 1, "second": (1, 3)}],
    "variance-gate": [{"temperature": 1.0}, {"form": "difference"}],
    "x0-lambdas": [{"shortcut": "state"}],
}
ALL = [(name, options) for name in list_schemes() for options in ({}, *OPTIONS.get(name, []))]
#: What changes no formula (copies of norms), and few connections, which have references of their own (`test_few`).
ASIDE = {"separate_norms", "units", "sources", "channels"}


def test_every_topology_has_a_reference() -> None:
    assert rewire.list_topologies().keys() == list_schemes().keys()


@pytest.mark.parametrize("name", list_schemes())
def test_every_option_is_tried(name: str) -> None:
    topology = topology_of(name, {})
    known = dict(rewire.topologies.registry._FACTORIES.items())[name]
    names = {n for n in inspect.signature(known).parameters if hasattr(topology, n)} - ASIDE
    renamed = {"eps": "start"} if name == "layerscale" else {}
    assert {renamed.get(n, n) for n in names} <= reference(name).options.keys() | {"normalize"}
    tried = {option for options in OPTIONS.get(name, []) for option in options}
    assert {renamed.get(n, n) for n in names} <= tried


#: Of options other than the paper's a few cases are quick, and the others slow.
FEW = {"typical", "one unit", "deep"}
TRIED: dict[str, Collection[str]] = {"all": KINDS.keys(), "few": FEW, "others": KINDS.keys() - FEW}


@pytest.mark.parametrize(
    ("name", "options", "tried"),
    [(*case, "few" if case[1] else "all") for case in ALL]
    + [pytest.param(*case, "others", marks=pytest.mark.slow) for case in ALL if case[1]],
    ids=str,
)
def test_topologies(name: str, options: dict[str, Any], tried: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "cases", lambda *given: [case for case in cases(*given) if case.name in TRIED[tried]])
    report = check(name, ours(name, **options), dtypes=[torch.float32], **options)
    assert report.agrees, str(report)
    assert report.errors[torch.float32] < 1e-3


@pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(*case, marks=pytest.mark.slow if case[1] else ()) for case in ALL],
    ids=str,
)
def test_in_bfloat16(name: str, options: dict[str, Any]) -> None:
    report = check(name, ours(name, **options), dtypes=[torch.bfloat16], **options)
    assert report.agrees, str(report)


@pytest.mark.parametrize(("name", "options"), ALL, ids=str)
def test_starts(name: str, options: dict[str, Any]) -> None:
    """The paper's start is that of the reference, where that is not drawn at random."""
    known, depth, width = reference(name), 5, 12
    chosen, topology = known.with_options(options), topology_of(name, options)
    attention = frozenset({1, 3, 5}) if known.attention and chosen.get("qkv", True) else frozenset[int]()
    dims = Dims(depth, width, attention)
    want = packed(known.file, known.parameters(depth, width, dims.attention, **chosen), dims, chosen)
    got = topology.parameters(dims, "paper")
    assert {n: v.shape for n, v in got.items()} == {n: v.shape for n, v in want.items()}
    for n, value in want.items():
        drawn = value.isnan()
        torch.testing.assert_close(got[n][~drawn].double(), value[~drawn], rtol=1e-6, atol=0)
        if drawn.any():
            assert known.drawn and 0 < float(got[n][drawn].std()) < 1


#: Those whose sums, gates and projections are kernels of their own.
KERNELS = [
    *(("ancre-ingoing", {}), ("denseformer", {}), ("dca", {}), ("hc-static", {}), ("hc-dynamic", {}), ("frac-hc", {})),
    *(("mhc", {"delayed": True, "output": "learned"}), ("muddformer", {"norms": True}), ("multi-gate", {})),
    *(("attnres", {"qkv": True, "block": 2}), ("attnres", {"rank": 2}), ("two-lanes", {}), ("hc-gated", {})),
    *(("gpas", {}), ("orthogonal", {"form": "gated"}), ("residual-scale", {"branch": True, "bias": True}), ("ddl", {})),
]


@pytest.mark.slow
@starts_interpreter
def test_kernels(tmp_path: Path) -> None:
    interpret(f"{__file__}::TestKernels", tmp_path)


class TestKernels:
    """The topologies again, by Triton's interpreter."""

    __test__ = INTERPRETED

    @pytest.mark.parametrize(("name", "options"), KERNELS, ids=str)
    def test_topologies(self, name: str, options: dict[str, Any]) -> None:
        report = check(name, ours(name, **options), **options)
        assert report.agrees, str(report)


@pytest.mark.parametrize("name", ["ancre-ingoing", "dca", "mhc", "muddformer"])
def test_without_compiled_loops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By operations of torch alone, as on a machine without a compiler."""
    monkeypatch.setattr(switch, "ON", False)
    report = check(name, ours(name))
    assert report.agrees, str(report)


def test_references_are_plain_torch() -> None:
    for name in list_schemes():
        tree = ast.parse(reference(name).text)
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert imported <= {"__future__", "collections.abc", "itertools", "math", "torch", "typing"}, name


def test_unknown_names() -> None:
    with pytest.raises(UnknownName, match=r"'nothing'\. There are mhc"):
        check("nothing", of_reference(reference("mhc"), {}))
    with pytest.raises(UnknownName, match=r"'mhc' has no option 'stream': it has streams"):
        check("mhc", of_reference(reference("mhc"), {}), stream=4)
    with pytest.raises(ValueError, match=r"'attnres' has no option for norm_eps"):
        ours("attnres", norm_eps=1e-5)
