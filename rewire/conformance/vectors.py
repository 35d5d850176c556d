"""The test cases as files, for implementations that are not called from Python."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rewire.conformance.cases import KINDS, Case, cases
from rewire.conformance.checker import allowed, exactly
from rewire.conformance.running import Branch, of_reference, run
from rewire.conformance.schemes import Options, Reference, list_schemes, reference

#: Options with files of their own, besides the paper's.
VARIANTS: Mapping[str, tuple[Options, ...]] = {
    "mhc": ({"output": "learned", "eps": 1e-6}, {"output": "mean", "eps": 1e-6, "norm_eps": 1e-5}),
    "attnres": ({"block": 2}, {"qkv": True, "block": 2, "normed": True}),
    "dca": ({"last": 1},),
    "residual-scale": ({"branch": True, "bias": True},),
}


def write(folder: str | Path, schemes: list[str] | None = None) -> list[Path]:
    """Write the cases, one file for each, ``<folder>/<scheme>/<options>/<case>.safetensors``.

    The bytes are the same on each run with one version of torch on one kind of processor. Inputs and weights are the
    same everywhere; values computed from them may differ elsewhere in the last digits of float64.

    Args:
        folder: where to write.
        schemes: names of schemes; default: all.

    Returns:
        The files.

    Example:
        >>> files = rewire.conformance.write("vectors", ["residual"])
        >>> files[0].parts[-1]
        'typical.safetensors'
    """
    written = []
    for name in schemes or list_schemes():
        known = reference(name)
        for options in ({}, *VARIANTS.get(name, ())):
            for case in cases(known, options):
                path = Path(folder, name, _called(options), f"{case.name.replace(' ', '-')}.safetensors")
                path.parent.mkdir(parents=True, exist_ok=True)
                # A single entry: the order of several would change from run to run.
                save_file(tensors(known, case), path, {"case": json.dumps(about(known, case), sort_keys=True)})
                written.append(path)
    return written


def tensors(known: Reference, case: Case) -> dict[str, Tensor]:
    """All tensors of a case, float64."""
    states: list[Tensor] = []

    def noted(state: Tensor) -> Tensor:
        states.append(state.detach())
        return state

    found = {"x": case.x, "upstream": case.upstream, "outer": case.outer}
    found |= {f"weights.{name}": value for name, value in case.weights.items()}
    computed = run(of_reference(known, case.options, noted), case, torch.float64)
    start = known.parameters(case.depth, case.x.shape[-1], case.attention, **case.options)
    found |= {f"start.{name}": value for name, value in start.items() if not value.isnan().any()}
    for t in range(1, case.depth + 1):
        found[f"inner.{t}"] = case.inner[t - 1]
        reads = [value for name, value in computed.items() if f"{name}.".startswith(f"reads.{t}.")]
        found[f"returns.{t}"] = Branch(t in case.attention, case.inner[t - 1], case.outer[t - 1], [])(*reads)
    found |= {f"states.{t}": state for t, state in enumerate(states, start=1)}
    return {name: value.contiguous().clone() for name, value in (found | computed).items()}


def about(known: Reference, case: Case) -> dict[str, Any]:
    """Everything else about a case, as JSON."""
    want = exactly(known, case)
    dtypes = {"float32": torch.float32} | ({"bfloat16": torch.bfloat16} if KINDS[case.name].low else {})
    return {
        "scheme": known.name,
        "source": known.source,
        "case": case.name,
        "why": KINDS[case.name].why,
        "options": {name: case.options[name] for name in known.options},
        "attention": sorted(case.attention),
        "drawn": {name: how for name, how in known.drawn.items() if name in case.weights},
        "allowed": {name: allowed(known, case, want, dtype) for name, dtype in dtypes.items()},
    }


def _called(options: Options) -> str:
    return "-".join(f"{name}={value}" for name, value in options.items()) or "paper"
