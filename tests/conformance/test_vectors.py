"""The files: the same bytes on each run, small, and what stands in them follows from what stands in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rewire.conformance import list_schemes, reference, write
from rewire.conformance.cases import KINDS, cases
from rewire.conformance.vectors import tensors

#: One case of each scheme; `write` made them.
COMMITTED = Path(__file__).parent / "vectors"


def test_the_same_bytes_each_time(tmp_path: Path) -> None:
    names = ["attnres", "residual-scale"]
    first, second = (write(tmp_path / run, names) for run in ("one", "two"))
    assert len(first) == (3 + 2) * len(KINDS)
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.slow
def test_the_whole_set_is_small(tmp_path: Path) -> None:
    assert sum(file.stat().st_size for file in write(tmp_path)) < 20e6


def about(path: Path) -> dict[str, object]:
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["case"])  # type: ignore[no-any-return]


def test_what_is_said_of_a_case(tmp_path: Path) -> None:
    file = next(path for path in write(tmp_path, ["hc-gated"]) if path.name == "typical.safetensors")
    said = about(file)
    assert (said["scheme"], said["source"], said["case"]) == ("hc-gated", "transformers", "typical")
    assert said["options"] == reference("hc-gated").options
    assert said["drawn"] == {"down": "normal(0, 0.02)", "up": "normal(0, 0.02)", "inject": "normal(0, 0.02)"}
    found = load_file(file)
    assert said["allowed"]["float32"].keys() == said["allowed"]["bfloat16"].keys() <= found.keys()  # type: ignore[index]
    assert {tensor.dtype for tensor in found.values()} == {torch.float64}
    assert found["states.3"].shape == (3, 4, 5)
    assert found["weights.norm"].shape == found["gradient.norm"].shape == (4, 4, 5)
    assert torch.equal(found["start.norm"], torch.zeros(4, 4, 5, dtype=torch.float64))
    assert "start.down" not in found
    for t in (1, 2, 3):
        want = torch.tanh(found[f"reads.{t}"] @ found[f"inner.{t}"][0]) @ found["outer"][t - 1]
        torch.testing.assert_close(found[f"returns.{t}"], want)


@pytest.mark.parametrize("name", list_schemes())
def test_committed(name: str) -> None:
    """Inputs and weights are the same everywhere, what follows from them to the last digits."""
    known = reference(name)
    got = tensors(known, next(case for case in cases(known, {}) if case.name == "one token"))
    want = load_file(COMMITTED / f"{name}.safetensors")
    assert got.keys() == want.keys()
    for key, value in want.items():
        if key.startswith(("x", "upstream", "weights", "inner", "outer", "start")):
            assert torch.equal(got[key], value), key
        else:
            torch.testing.assert_close(got[key], value, rtol=1e-11, atol=1e-11)
