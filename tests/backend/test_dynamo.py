"""The backend of torch.compile: residual adds rewired in graphs that are captured whole."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchvision_stub  # noqa: F401
from mixing import assert_same
from models import DEPTH, WIDTH, PreNorm, Residual, Stack, WithDropPath, images, token_ids, vectors
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import rewire
from rewire.backend import by_name
from rewire.backend.flat import rewrite_chain
from rewire.patterns.tiny import timm_model, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which Dynamo hides


def backend(topology: str = "denseformer", inner: str = "eager", **options: Any) -> rewire.Backend:
    return rewire.Backend(topology, inner=inner, **options)


def logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def step(call: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
    """The output, and the gradients of the parameters that the plain model has."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad()
    output = logits(call(*args, **kwargs))
    output.square().mean().backward()
    with torch.no_grad():  # BatchNorm's statistics
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return output.detach(), gradients


def scrambled(weights: nn.Parameter) -> None:
    with torch.no_grad():
        weights.add_(torch.randn(weights.shape, generator=torch.Generator().manual_seed(3)), alpha=1.0)


class WithMultihead(PreNorm):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


# -- residual adds -----------------------------------------------------------------------------------------------------

VIT = {"depth": 3, "img_size": 32, "embed_dim": 32, "num_heads": 2}
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any], str]] = {
    "llama": (lambda: tiny_model("llama"), (token_ids(),), {"use_cache": False}, "denseformer"),
    "vit": (lambda: timm_model("vit_tiny_patch16_224", **VIT), (images(size=32),), {}, "hc-dynamic"),
    "resnet": (lambda: tiny_model("resnet"), (images(size=32),), {}, "ancre-ingoing"),
    "three projections": (lambda: tiny_model("llama"), (token_ids(),), {"use_cache": False}, "muddformer"),
    "one for all, addmm": (lambda: tiny_model("gpt2"), (token_ids(),), {"use_cache": False}, "dca"),
    "one for all, reshaped": (lambda: timm_model("vit_tiny_patch16_224", **VIT), (images(size=32),), {}, "dca"),
    "nn.MultiheadAttention": (lambda: Stack(WithMultihead), (vectors(),), {}, "dca"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_flat_graph_gives_the_numbers_of_rewired_blocks(name: str) -> None:
    make, args, kwargs, topology = MODELS[name]
    model = make().train()
    rewired = rewire.compile(model, topology, start="paper", validate=False).train()
    flat = backend(topology, inner="aot_eager", start="paper")
    compiled = torch.compile(model, backend=flat, fullgraph=True)
    with torch.no_grad():
        buffers = copy.deepcopy(dict(model.named_buffers()))
        compiled(*args, **kwargs)
        for key, buffer in model.named_buffers():
            buffer.copy_(buffers[key])
    theirs = [p for c in rewire.connections(rewired).values() for p in c.parameters()]
    ours = list(flat.parameters())
    for a, b in zip(ours, theirs, strict=True):
        scrambled(a)
        scrambled(b)
    expected, gradients = step(rewired, model, *args, **kwargs)
    output, others = step(compiled, model, *args, **kwargs)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
    assert_same(gradients, others, 1e-4)
    assert_same({str(n): p.grad for n, p in enumerate(theirs)}, {str(n): p.grad for n, p in enumerate(ours)}, 1e-4)
    assert flat.coefficients().keys() == rewire.coefficients(rewired).keys()


@pytest.mark.slow
def test_the_default_start_is_the_plain_model_also_under_inductor() -> None:
    model, flat = Stack(lambda: Residual(nn.Linear(WIDTH, WIDTH))), rewire.Backend("denseformer")
    expected, gradients = step(model, model, vectors())
    output, others = step(torch.compile(model, backend=flat, fullgraph=True), model, vectors())
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert_same(gradients, others, 1e-5)
    (weights,) = flat.parameters()
    assert weights.grad is not None and bool(weights.grad.any())


@pytest.mark.slow
def test_all_graphs_share_the_weights() -> None:
    model, flat = Stack(WithDropPath), backend("ancre-ingoing", inner="aot_eager", start="paper")
    compiled = torch.compile(model, backend=flat)
    for train in (True, False):
        for length in (7, 9, 11):
            model.train(train)
            compiled(vectors(length=length))
    assert flat.report.graphs >= 3  # two for training (the second of any length), one or two for evaluation
    (weights,) = flat.parameters()
    for train in (True, False):
        weights.grad = None
        model.train(train)
        compiled(vectors(length=7)).sum().backward()
        assert weights.grad is not None and bool(weights.grad.any())
    scrambled(weights)
    rewired = rewire.compile(model, "ancre-ingoing", start="paper", validate=False).eval()
    (theirs,) = rewire.connections(rewired)["layers"].parameters()
    with torch.no_grad():
        theirs.copy_(weights)
    for length in (7, 9, 13):
        torch.testing.assert_close(compiled(vectors(length=length)), rewired(vectors(length=length)))
    assert [trunk.name for trunk in flat.report.residuals.trunks] == ["layers"]
    assert "6 residual adds in 3 blocks" in str(flat.report)


@pytest.mark.slow
def test_training_moves_the_weights() -> None:
    model, flat = Stack(PreNorm), backend(inner="aot_eager")
    compiled = torch.compile(model, backend=flat)
    with torch.no_grad():
        compiled(vectors())
    optimiser = torch.optim.SGD([*model.parameters(), *flat.parameters()], lr=0.1)
    before = [p.detach().clone() for p in flat.parameters()]
    first = compiled(vectors()).square().mean()
    first.backward()
    optimiser.step()
    assert compiled(vectors()).square().mean() < first
    assert not any(torch.equal(a, b) for a, b in zip(before, flat.parameters(), strict=True))


def test_weights_are_saved_and_loaded() -> None:
    model, saved, loaded = Stack(PreNorm), backend(), backend()
    first, second = torch.compile(model, backend=saved), torch.compile(model, backend=loaded)
    first(vectors()), second(vectors())
    scrambled(next(saved.parameters()))
    loaded.load_state_dict(saved.state_dict())
    torch.testing.assert_close(second(vectors()), first(vectors()))
    other = backend("denseformer", granularity="sublayer")
    torch.compile(model, backend=other)(vectors())
    with pytest.raises((rewire.RewireError, RuntimeError)):
        other.load_state_dict(saved.state_dict())


def test_trunks_can_be_chosen() -> None:
    model = nn.ModuleDict({"first": Stack(PreNorm, depth=1), "second": Stack(PreNorm, depth=1)})
    flat = backend(trunks="second")
    torch.compile(lambda x: model["first"](x) + model["second"](x), backend=flat)(vectors())
    assert list(flat.coefficients()) == ["second.layers.0"]


def test_a_dict_names_topologies_by_trunk() -> None:
    model = nn.ModuleDict({"first": Stack(PreNorm), "second": Stack(PreNorm), "third": Stack(PreNorm)})
    flat = rewire.Backend({"first": "denseformer", "second": rewire.ANCRe()}, inner="eager")
    torch.compile(lambda x: model["first"](x) + model["second"](x) + model["third"](x), backend=flat)(vectors())
    assert {name: list(matrix.shape) for name, matrix in flat.coefficients().items()} == {
        "first.layers": [3, 4],
        "second.layers": [3, 3],
    }


def test_a_trunk_that_no_graph_has() -> None:
    flat = backend(trunks=["layer", "layers"])
    with pytest.raises(Exception, match="the model has no trunk 'layer'; its trunks are layers"):
        torch.compile(Stack(PreNorm), backend=flat)(vectors())


def test_the_trunks_of_a_model_may_lie_in_several_graphs() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Stack(PreNorm), Stack(PreNorm)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            torch._dynamo.graph_break()
            return y + self.second(x)

    flat = backend(trunks=["first", "second"])
    torch.compile(Halves(), backend=flat)(vectors())
    assert sorted(flat.coefficients()) == ["first.layers", "second.layers"]


@pytest.mark.parametrize("make", [lambda **kw: rewire.compile(Stack(PreNorm), **kw), rewire.Backend])
def test_trunks_mean_the_same_in_both(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="trunks is empty: it names no trunk"):
        make(topology="denseformer", trunks=[])
    with pytest.raises(ValueError, match="the dict of topologies is empty"):
        make(topology={})
    with pytest.raises(TypeError, match="cannot be combined with a dict of topologies"):
        make(topology={"layers": "denseformer"}, trunks=["layers"])


# -- validation -------------------------------------------------------------------------------------------------------


class Normalised(Stack):
    """With statistics that training changes, and random numbers."""

    def __init__(self) -> None:
        super().__init__(WithDropPath)
        self.norm = nn.BatchNorm1d(self.out.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x).flatten(0, -2))


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_validation_leaves_no_trace(dynamic: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rewire.validate")
    model, outputs, state = Normalised().train(), [], []
    before = copy.deepcopy(model.state_dict())
    for validate in (False, True):
        model.load_state_dict(before)
        torch.manual_seed(0)
        compiled = torch.compile(model, backend=backend(validate=validate), dynamic=dynamic)
        outputs.append(compiled(vectors()))
        state.append(copy.deepcopy(model.state_dict()))
        assert all(p.grad is None for p in model.parameters())
        torch._dynamo.reset()
    assert_same(dict(enumerate(outputs)), {0: outputs[1], 1: outputs[0]}, 0)
    assert_same(*state, 0)
    runs = [record.getMessage() for record in caplog.records if "outputs and" in record.getMessage()]
    assert len(runs) >= 2 and all("gradients agree" in run and "perturbed weights" in run for run in runs)


@pytest.mark.parametrize("start", ["preserve", "paper"])
def test_validation_shows_a_bar(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[list[Any]] = []

    @contextlib.contextmanager
    def progress(what: str, steps: int) -> Iterator[Callable[[], None]]:
        bars.append([what, steps, 0])

        def step() -> None:
            bars[-1][-1] += 1

        yield step

    monkeypatch.setattr("rewire.passes.validate.progress", progress)
    torch.compile(Stack(PreNorm), backend=rewire.Backend("denseformer", start=start, inner="eager"))(vectors())
    steps = 4 if start == "preserve" else 2
    assert bars == [["validating a graph", steps, steps]]


@pytest.mark.parametrize("start", ["preserve", "paper"])
def test_a_wrong_rewrite_is_refused(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(graph: torch.fx.Graph, *args: Any) -> None:
        rewrite_chain(graph, *args)
        (read, *_) = (node for node in graph.nodes if node.target == "write")
        read.args = (read.args[0], read.args[0])  # a branch is forgotten

    def doubled(graph: torch.fx.Graph, *args: Any) -> None:
        rewrite_chain(graph, *args)
        written = next(node for node in graph.nodes if node.target == "write")
        with graph.inserting_before(written):
            twice = graph.call_function(torch.mul, (written.args[1], 2))
        written.args = (written.args[0], twice)

    for rewrite in (wrong, doubled):
        torch._dynamo.reset()
        monkeypatch.setattr("rewire.backend.dynamo.rewrite_chain", rewrite)
        with pytest.raises(BackendCompilerFailed, match="graph as torch") as info:
            torch.compile(Stack(PreNorm), backend=backend(start=start))(vectors())
        assert isinstance(info.value.inner_exception, rewire.ValidationMismatch)
    unchecked = backend(start=start, validate=False)
    torch._dynamo.reset()
    torch.compile(Stack(PreNorm), backend=unchecked)(vectors())


def test_later_graphs_are_validated_when_the_weights_have_learned() -> None:
    model, flat = Stack(PreNorm), backend()
    compiled = torch.compile(model, backend=flat, dynamic=False)
    compiled(vectors(length=7))
    scrambled(next(flat.parameters()))
    rewired = rewire.compile(model, "denseformer", validate=False)
    for theirs, ours in zip(rewire.connections(rewired)["layers"].parameters(), flat.parameters(), strict=True):
        theirs.data.copy_(ours.data)
    torch.testing.assert_close(compiled(vectors(length=9)), rewired(vectors(length=9)))
    assert flat.report.graphs == 2


# -- what is refused ---------------------------------------------------------------------------------------------------


class Broken(Stack):
    """A graph break before or after the trunk, or behind its last use."""

    def __init__(self, where: str) -> None:
        super().__init__(PreNorm)
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        if self.where == "before":
            torch._dynamo.graph_break()
        for layer in self.layers:
            x = layer(x)
        if self.where == "after":
            torch._dynamo.graph_break()
        y = self.out(x)
        if self.where == "behind":
            torch._dynamo.graph_break()
        return y * 2


@pytest.mark.parametrize("where", ["before", "after"])
def test_graph_breaks_at_a_trunk_are_refused(where: str) -> None:
    with pytest.raises(
        BackendCompilerFailed, match=r"(?s)borders on a graph break .*graph_break.*rewire.compile"
    ) as info:
        torch.compile(Broken(where), backend=backend())(vectors())
    assert isinstance(info.value.inner_exception, rewire.UnsupportedCall)


def test_graph_breaks_elsewhere_do_no_harm() -> None:
    model, flat = Broken("behind"), backend()
    output = torch.compile(model, backend=flat)(vectors())
    torch.testing.assert_close(output, model(vectors()), atol=1e-5, rtol=1e-5)
    assert flat.report.graphs == 2 and len(list(flat.parameters())) == 1


class Cut(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        torch._dynamo.graph_break()
        return x + self.mlp(self.ln_2(x))


def test_trunks_in_pieces_of_one_add_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model, flat = Stack(Cut), backend()
    torch.testing.assert_close(torch.compile(model, backend=flat)(vectors()), model(vectors()))
    assert "no residual stream was found in a graph that ends in a break" in caplog.text
    assert any("a single residual add" in reason for reason in flat.report.residuals.skipped.values())
    with pytest.raises(rewire.RewireError, match="no connection weights yet"):
        flat.parameters()


def test_blocks_compiled_one_by_one_are_refused() -> None:
    model = Stack(PreNorm)
    for layer in model.layers:
        layer.compile(backend=backend())
    with pytest.raises(BackendCompilerFailed, match="one block by itself"):
        model(vectors())


class Dropping(Stack):
    def forward(self, x: Tensor, layers: int = DEPTH) -> Tensor:
        x = self.inp(x)
        for layer in self.layers[:layers]:
            x = layer(x)
        return self.out(x)


def test_another_trunk_of_the_same_name_is_refused() -> None:
    compiled = torch.compile(Dropping(PreNorm), backend=backend())
    compiled(vectors())
    with pytest.raises(BackendCompilerFailed, match=r"'layers.0.attn' to 'layers.1.mlp' \(4\) in this graph and had"):
        compiled(vectors(), layers=2)


class KeysFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maps, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        k, q, v = self.maps(x).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v))


class OtherOrder(PreNorm):
    def __init__(self) -> None:
        super().__init__()
        self.attn: nn.Module = KeysFirst()


def test_projections_that_cannot_be_fed_are_refused() -> None:
    message = r"'layers.0.attn' cannot have separate .* maps: layers.0.attn.maps\)"
    with pytest.raises(BackendCompilerFailed, match=message):
        torch.compile(Stack(OtherOrder), backend=backend("dca", start="paper"))(vectors())


def test_separate_norms_are_refused() -> None:
    with pytest.raises(BackendCompilerFailed, match="separate_norms=True gives a model more norms"):
        torch.compile(Stack(PreNorm), backend=backend("dca", start="paper", separate_norms=True))(vectors())


def test_wrong_arguments() -> None:
    with pytest.raises(rewire.UnknownName, match="denseformer"):
        rewire.Backend("densformer")
    with pytest.raises(ValueError, match="granularity"):
        rewire.Backend("denseformer", granularity="layer")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'aot_eager' takes none"):
        rewire.Backend("denseformer", inner="aot_eager", inner_options={"max_autotune": True})


# -- the name ----------------------------------------------------------------------------------------------------------


def test_the_backend_by_name() -> None:
    assert torch._dynamo.lookup_backend("rewire") is by_name
    options = {"topology": "denseformer", "inner": "aot_eager"}
    model = Stack(PreNorm)
    compiled = torch.compile(model, backend="rewire", options=options)
    torch.testing.assert_close(compiled(vectors()), model(vectors()), atol=1e-5, rtol=1e-5)
    assert len(list(rewire.Backend.of(options).parameters())) == 1
    assert rewire.Backend.of(options) is options["rewire"]


def test_a_backend_by_options_is_freed_with_its_model() -> None:
    options: dict[str, Any] = {"topology": "denseformer", "inner": "aot_eager"}
    compiled = torch.compile(Stack(PreNorm), backend="rewire", options=options)
    compiled(vectors())
    made = weakref.ref(rewire.Backend.of(options))
    del compiled, options
    torch._dynamo.reset()
    gc.collect()
    assert made() is None


def test_a_backend_is_for_one_model() -> None:
    flat = backend()
    torch.compile(Stack(PreNorm), backend=flat, dynamic=False)(vectors())
    for length in (7, 9):  # the graph of the first model, and one of its own
        with pytest.raises(Exception, match="they belong to another model") as info:
            torch.compile(Stack(PreNorm), backend=flat, dynamic=False)(vectors(length=length))
        assert isinstance(getattr(info.value, "inner_exception", info.value), rewire.UnsupportedCall)


@pytest.mark.parametrize(("topology", "dynamic"), [("denseformer", None), ("grn-v3", True)])
def test_lengths_may_change(topology: str, dynamic: bool | None) -> None:
    """At once, or from the second length on: further ones are no new graphs."""
    model, flat = Stack(PreNorm), backend(topology)
    compiled, rewired = torch.compile(model, backend=flat, dynamic=dynamic), rewire.compile(model, topology)
    graphs = []
    for number, length in enumerate((7, 9, 12, 20)):
        if number == 1:
            for theirs, ours in zip(rewire.connections(rewired)["layers"].parameters(), flat.parameters(), strict=True):
                scrambled(ours)
                theirs.data.copy_(ours.data)
        torch.testing.assert_close(compiled(vectors(length=length)), rewired(vectors(length=length)))
        graphs.append(flat.report.graphs)
    assert len(set(graphs)) == (1 if dynamic else 2) and graphs[1] == graphs[-1]


@torch._dynamo.config.patch(recompile_limit=3)
def test_more_graphs_than_are_kept_are_refused() -> None:
    """The next kind of inputs would run as Python code, and train the plain model."""
    compiled = torch.compile(Stack(PreNorm), backend=backend(), dynamic=False)
    for length in (7, 9):
        compiled(vectors(length=length))
    for length in (12, 12, 20):
        with pytest.raises(BackendCompilerFailed, match=r"graph 3 of the same code.* dynamic=True"):
            compiled(vectors(length=length))
    compiled(vectors(length=9))
    torch._dynamo.reset()  # which forgets them
    gc.collect()
    compiled(vectors(length=12))


def test_options_that_are_not_ours_are_inductors() -> None:
    flat = rewire.Backend.of({"topology": "denseformer", "triton.cudagraphs": True})
    assert flat.inner_options == {"triton.cudagraphs": True}
    with pytest.raises(BackendCompilerFailed, match=r"mode='reduce-overhead' .* pass options=.*cudagraphs"):
        torch.compile(Stack(PreNorm), backend="rewire", mode="reduce-overhead")(vectors())


# -- other graphs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "topology"), [pytest.param("exported", "grn-v2", marks=pytest.mark.slow), ("symbolic", "dca")]
)
def test_programs_are_rewritten(kind: str, topology: str) -> None:
    model, flat = Stack(PreNorm), backend(topology, start="paper")
    exported = kind == "exported"
    program: Any = torch.export.export(model, (vectors(),)) if exported else torch.fx.symbolic_trace(model)
    module = flat.rewrite(program, *(() if exported else (vectors(),)))
    rewired = rewire.compile(model, topology, start="paper", validate=False)
    for theirs, ours in zip(rewire.connections(rewired)["layers"].parameters(), flat.parameters(), strict=True):
        scrambled(ours)
        theirs.data.copy_(ours.data)
    torch.testing.assert_close(module(vectors()), rewired(vectors()), atol=1e-5, rtol=1e-5)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(vectors()), rewired(vectors()), atol=1e-5, rtol=1e-5)
    compiled(vectors()).sum().backward()
    assert all(p.grad is not None for p in flat.parameters())
    names = {id(p) for p in module.parameters()}
    assert names >= {id(p) for p in (*flat.parameters(), *(model.parameters() if kind == "symbolic" else ()))}
    if kind == "symbolic":
        torch.testing.assert_close(program(vectors()), model(vectors()))


def test_adds_with_a_factor_are_left_alone() -> None:
    class Halved(PreNorm):
        def forward(self, x: Tensor) -> Tensor:
            return torch.add(x, self.mlp(self.ln_1(x)), alpha=0.5)

    model, flat = Stack(Halved).eval(), rewire.Backend("ancre-none", inner="eager")
    x = vectors()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=flat)(x), model(x))
    assert not flat.report.residuals.trunks and "have a factor" in flat.report.residuals.skipped["layers"]
