from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from mixing import shaken
from models import LinearNet
from torch import Tensor, nn

import rewire
from rewire.errors import RewireError, UnknownName
from rewire.saving.checkpoint import matrices
from rewire.topologies import ANCRe, DenseFormer, registry


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = LinearNet(3), LinearNet(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * self.right(x)


def rewired(model: nn.Module, topology: Any = "ancre-ingoing", **options: Any) -> nn.Module:
    """Rewired, with connection weights that are not the start's."""
    model = rewire.compile(model, topology, example_inputs=(torch.randn(2, 8),), **options)
    return shaken(model, 0.01)


def save(model: nn.Module, path: Path) -> Path:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(model.state_dict(), path)
    else:
        torch.save(model.state_dict(), path)
    return path


def with_recipe(tmp_path: Path, **changes: Any) -> Path:
    """A checkpoint whose recipe was changed after it was saved."""
    state = rewired(LinearNet()).state_dict()
    key = next(key for key in state if key.endswith("_extra_state"))
    recipe = {**json.loads(bytes(state[key].tolist())), **changes}
    state[key] = torch.tensor(list(json.dumps(recipe).encode()), dtype=torch.uint8)
    torch.save(state, tmp_path / "changed.pt")
    return tmp_path / "changed.pt"


@pytest.mark.each_once
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    ("topology", "options"),
    [
        ("ancre-ingoing", {"temperature": 0.1}),
        ("ancre-outgoing", {"start": "paper"}),
        ("ancre-ingoing", {"cascade": "keep", "start": "paper", "granularity": "sublayer"}),
        ("ancre-constant", {"start": "paper"}),
        ("denseformer", {"dilation": 2, "period": 2}),
        ("residual", {}),
    ],
)
def test_the_matrix_is_that_of_the_model(topology: str, options: dict[str, Any], suffix: str, tmp_path: Path) -> None:
    model = rewired(LinearNet(), topology, **options)
    found = matrices(save(model, tmp_path / f"model{suffix}"))
    expected = rewire.coefficients(model)
    assert found.keys() == expected.keys() == {"blocks"}
    assert torch.equal(found["blocks"], expected["blocks"])
    assert not found["blocks"].requires_grad


def test_every_trunk_is_found_under_its_name(tmp_path: Path) -> None:
    model = rewired(Two())
    found, expected = matrices(save(model, tmp_path / "two.pt")), rewire.coefficients(model)
    assert found.keys() == expected.keys() == {"left.blocks", "right.blocks"}
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("whole", [False, True])
def test_cast_weights_are_read(dtype: torch.dtype, whole: bool, tmp_path: Path) -> None:
    """Those that are numbers, or all of a state dict, the bytes of the recipe in it, too."""
    model = rewired(LinearNet())
    state = {n: x.to(dtype) if whole or x.is_floating_point() else x for n, x in model.state_dict().items()}
    torch.save(state, tmp_path / "cast.pt")
    matrix = matrices(tmp_path / "cast.pt")["blocks"]
    assert matrix.dtype == torch.float32
    torch.testing.assert_close(matrix.sum(1), torch.ones(5))
    model.load_state_dict(state)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(RewireError, match="does not exist"):
        matrices(tmp_path / "missing.pt")
    with pytest.raises(RewireError, match="a folder"):
        matrices(tmp_path)
    with pytest.raises(RewireError, match=r"no folder '.*missing' here\. Fetch a model of the Hub first"):
        rewire.from_pretrained(tmp_path / "missing")


def test_an_ejected_model_is_said_to_be_one(tmp_path: Path) -> None:
    rewire.eject(rewired(LinearNet()), tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(RewireError, match=r"those of an ejected model.*rewire_runtime\.py shows"):
            matrices(path)
    with pytest.raises(RewireError, match="those of an ejected model"):
        rewire.from_pretrained(tmp_path)
    with pytest.raises(RewireError, match="those of an ejected model"):
        rewired(LinearNet()).load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_no_connection_weights(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(RewireError, match=r"has no connection weights: none of its 20 entries"):
        matrices(save(LinearNet(), tmp_path / f"plain{suffix}"))


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"no checkpoint at all", b"PK\x03\x04 cut off", b"hi\n", b"R.", b"\x85"])
def test_not_a_checkpoint(content: bytes, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"broken{suffix}"
    path.write_bytes(content)
    with pytest.raises(RewireError, match="broken"):
        matrices(path)


def test_something_else_than_a_dict(tmp_path: Path) -> None:
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    with pytest.raises(RewireError, match="holds a Tensor, not a state dict"):
        matrices(tmp_path / "tensor.pt")


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["PAYLOAD"],)


@pytest.mark.parametrize("legacy", [False, True])
def test_other_objects_are_never_unpickled(legacy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAYLOAD", str(tmp_path / "ran"))
    state = {**rewired(LinearNet()).state_dict(), "extra": Payload()}
    torch.save(state, tmp_path / "evil.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(RewireError, match="weights_only=True"):
        matrices(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


def test_a_topology_class_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"'os.system'.*known are .*ancre-ingoing"):
        matrices(with_recipe(tmp_path, topology="os.system"))


def test_a_topology_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry._FACTORIES, "_entries", dict(registry._FACTORIES._entries))

    @rewire.register_topology("mine")
    @dataclasses.dataclass(frozen=True)
    class Mine(ANCRe):
        pass

    model = rewired(LinearNet(), Mine(temperature=0.5))
    found = matrices(save(model, tmp_path / "mine.pt"))
    assert torch.equal(found["blocks"], rewire.coefficients(model)["blocks"])


@pytest.mark.parametrize(
    "changes",
    [
        {"options": {"temperature": 0.01, "cascade": "replace", "more": 1}},
        {"options": {"temperature": "hot"}},
        {"options": {"dilation": 1}},
        {"units": [1, 2, 3]},
        {"topology": "denseformer", "options": {}},
    ],
)
def test_weights_that_do_not_fit_their_recipe(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RewireError, match=r"weights of 'depth_connections.blocks' do not fit"):
        matrices(with_recipe(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [{"units": units} for units in ([], [1, 3], [10**9], [2, 1], ["a"], None, 7, [1.5])],
)
def test_damaged_recipes(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RewireError, match=r"the recipe of 'depth_connections.blocks' is damaged"):
        matrices(with_recipe(tmp_path, **changes))


def test_a_recipe_that_is_no_recipe(tmp_path: Path) -> None:
    for broken in (torch.zeros(4), torch.tensor([255, 254], dtype=torch.uint8), "text", None):
        state = {**rewired(LinearNet()).state_dict(), "depth_connections.blocks._extra_state": broken}
        torch.save(state, tmp_path / "broken.pt")
        with pytest.raises(RewireError, match="damaged"):
            matrices(tmp_path / "broken.pt")


def test_denseformer_has_a_column_more(tmp_path: Path) -> None:
    model = rewired(LinearNet(), DenseFormer())
    assert matrices(save(model, tmp_path / "dense.pt"))["blocks"].shape == (5, 6)


@pytest.mark.parametrize("key", ["model", "state_dict", "module"])
def test_state_dicts_inside_of_checkpoints(key: str, tmp_path: Path) -> None:
    """Those of training loops with their optimisers, and of Lightning, which puts a prefix before the names."""
    model = rewired(LinearNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {f"net.{name}": value for name, value in model.state_dict().items()}
    torch.save({"epoch": 3, key: state, "optimizer": optimizer.state_dict(), "loops": {"fit": {}}}, tmp_path / "c.pt")
    (found,) = matrices(tmp_path / "c.pt").items()
    assert found[0] == "net.blocks" and torch.equal(found[1], rewire.coefficients(model)["blocks"])
    torch.save({key: state, "ema": {"shadow": state}}, tmp_path / "two.pt")
    both = matrices(tmp_path / "two.pt")
    assert list(both) == [f"{key}: net.blocks", "ema.shadow: net.blocks"]
    assert all(torch.equal(matrix, found[1]) for matrix in both.values())
    for kind in ("heatmap", "arcs", "bars"):
        rewire.plot(tmp_path / "two.pt", tmp_path / f"{kind}.svg", kind)
        assert "ema.shadow: net.blocks" in (tmp_path / f"{kind}.svg").read_text()
