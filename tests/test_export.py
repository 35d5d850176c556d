"""torch.export, AOTInductor and ONNX of rewired models, frozen and learned: the outputs stay what they are."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from mixing import ids, llama, mixed
from models import PostNorm, PreNorm, Stack, vectors
from slow_cases import one_in
from torch import Tensor, nn
from torch.export import Dim

import rewire
from rewire.kernels import switch

STATIC = ["ancre-ingoing", "denseformer", "grn-v2", "hc-static"]


class Logits(nn.Module):
    """A language model as a function of its token ids."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def frozen(model: nn.Module, topology: str, inputs: Any) -> nn.Module:
    constant, report = rewire.freeze(mixed(model, topology).eval(), 0.02, example_inputs=inputs)
    assert report.trunks[0].topology
    return constant


def frozen_llama(topology: str) -> nn.Module:
    return Logits(frozen(llama(), topology, {"input_ids": ids()})).eval()


def exported(model: nn.Module) -> torch.export.ExportedProgram:
    """For any batch and length."""
    return torch.export.export(model, (vectors(),), dynamic_shapes=({0: Dim("batch", min=2), 1: Dim("length", min=2)},))


def run_onnx(model: nn.Module, x: Tensor, path: Path, **options: Any) -> onnxruntime.InferenceSession:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the exporter says to itself
        torch.onnx.export(model, (x,), path, dynamo=True, verbose=False, input_names=["x"], **options)
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def same(model: nn.Module, other: Any, x: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(other(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("topology", one_in(2, STATIC))
def test_export_of_a_frozen_model(topology: str) -> None:
    model = frozen(Stack(PreNorm), topology, (vectors(),)).eval()
    program = exported(model).module()
    for x in (vectors() + 1, vectors(5, 7)):
        same(model, program, x)


@pytest.mark.slow
def test_export_of_a_frozen_language_model_with_any_batch() -> None:
    model = frozen_llama("ancre-ingoing")
    program = torch.export.export(model, (ids(),), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    for x in (ids(), ids(batch=5)):
        same(model, program.module(), x)


def test_what_was_pruned_is_not_exported() -> None:
    """At threshold 0.9 all edges but each unit's own go: no sums with weights are left."""
    model = rewire.compile(Stack(PreNorm), "ancre-ingoing", validate=False)
    constant, _ = rewire.freeze(model, 0.9, example_inputs=(vectors(),))
    multiplied, plain = (exported(m).graph_module.code.count("ops.aten.mul") for m in (constant, Stack(PreNorm)))
    assert multiplied == plain


@pytest.mark.parametrize(
    "topology",
    ["ancre-outgoing", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dca", "muddformer", "mhc"))],
)
def test_export_of_a_learned_model(topology: str, tmp_path: Path) -> None:
    model = mixed(Stack(PreNorm), topology).eval()
    torch.export.save(exported(model), tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    for x in (vectors(), vectors(5, 7)):
        same(model, loaded.module(), x)
    assert any("depth_connections" in name for name in loaded.state_dict)


@pytest.mark.parametrize("topology", ["ancre-ingoing", "mhc:iterations=2"])
def test_an_exported_program_needs_no_rewire(topology: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels run, too; nor does it need rewire's operators, which ONNX does not know."""
    monkeypatch.setattr(switch, "INTERPRETED", True)
    graph = exported(mixed(Stack(PreNorm, depth=2), topology).eval()).graph
    assert not [node for node in graph.nodes if "rewire" in str(node.target)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, about its own code
@pytest.mark.parametrize(("topology", "constant"), [("ancre-ingoing", True), ("hc-static", False), ("grn-v3", False)])
def test_aot_inductor(topology: str, constant: bool, tmp_path: Path) -> None:
    model = frozen(Stack(PreNorm), topology, (vectors(),)) if constant else mixed(Stack(PreNorm), topology)
    quick = {"aot_inductor.debug_compile": True}  # C++ that is not optimised
    path = torch._inductor.aoti_compile_and_package(
        exported(model.eval()), package_path=str(tmp_path / "model.pt2"), inductor_configs=quick
    )
    for x in (vectors(), vectors(5, 7)):
        same(model, torch._inductor.aoti_load_package(path), x)


@pytest.mark.parametrize("topology", [STATIC[0], *(pytest.param(name, marks=pytest.mark.slow) for name in STATIC[1:3])])
def test_onnx_of_a_frozen_model(topology: str, tmp_path: Path) -> None:
    model = frozen(Stack(PreNorm), topology, (vectors(),)).eval()
    session = run_onnx(model, vectors(), tmp_path / "model.onnx")
    same(model, lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), vectors() + 1)


@pytest.mark.slow
def test_onnx_of_a_frozen_post_norm_model(tmp_path: Path) -> None:
    model = frozen(Stack(PostNorm), "ancre-ingoing", (vectors(),)).eval()
    session = run_onnx(model, vectors(), tmp_path / "model.onnx")
    same(model, lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), vectors() + 1)


@pytest.mark.slow
def test_onnx_of_a_frozen_language_model_with_any_batch(tmp_path: Path) -> None:
    model = frozen_llama("ancre-ingoing")
    batch = ({0: torch.export.Dim("batch", min=2)},)
    session = run_onnx(model, ids(), tmp_path / "model.onnx", dynamic_shapes=batch)
    for x in (ids(), ids(batch=5)):
        same(model, lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), x)


@pytest.mark.parametrize("topology", ["residual", "denseformer", "dca"])
def test_a_symbolic_trace_is_refused(topology: str) -> None:
    with pytest.raises(rewire.UnsupportedCall, match=r"torch.fx traces block 'layers\.0'.*: use torch\.export"):
        torch.fx.symbolic_trace(mixed(Stack(PreNorm), topology))
