"""Norms in flat graphs: which are found, and what kernels make of them in place of the operations."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision_stub  # noqa: F401
from interpreter import INTERPRETED, interpret, starts_interpreter
from mixing import assert_same
from models import WIDTH, Attention, Mlp, Parallel, PreNorm, Stack, token_ids, vectors
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed

import rewire
from rewire.backend import dynamo
from rewire.backend.flat_norms import find_norm
from rewire.kernels import operators
from rewire.passes.editing.fusions import fusions
from rewire.passes.finding.graphs import flow_of
from rewire.patterns.tiny import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which Dynamo hides


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """As Llama does, without its weight."""
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class Formula(nn.Module):
    """A function of a value, a weight and a bias."""

    def __init__(self, function: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function = function
        self.weight, self.bias = (nn.Parameter(torch.rand(WIDTH, dtype=dtype)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


# -- which are found ---------------------------------------------------------------------------------------------------


def found(module: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """What `find_norm` returns for the graph of a module."""
    flows = []
    torch.compile(module, backend=lambda graph, _: flows.append(flow_of(graph.graph, graph)) or graph, fullgraph=True)(
        torch.randn(4, 5, WIDTH, dtype=dtype)
    )
    ops = flows[0].ops
    return find_norm(next(op for op in ops if not op.constant), [op for op in ops if op.inputs])


def detached(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        return w * rms(x)


def cast_by_torch(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return w * rms(x)


def two_passes(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return b + w * (centred / (centred * centred).mean(dim=-1, keepdim=True).add(1e-5).sqrt())


#: name -> (function, kind, eps, operations behind the norm)
NORMS: dict[str, tuple[Callable[..., Tensor], str, float, int]] = {
    "Llama's": (lambda x, w, b: w * rms(x), "rms", 1e-6, 0),
    "Gemma's": (lambda x, w, b: rms(x) * (1.0 + w.float()), "rms+1", 1e-6, 0),
    "the eps in front": (lambda x, w, b: x * (1e-5 + x.square().mean(-1, True)) ** -0.5 * w, "rms", 1e-5, 0),
    "rms_norm": (lambda x, w, b: F.rms_norm(x, (WIDTH,), w, 1e-5), "rms", 1e-5, 0),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b, 1e-4), "layer", 1e-4, 0),
    "layer_norm, no bias": (lambda x, w, b: F.layer_norm(x, (WIDTH,), weight=w, eps=1e-5), "layer", 1e-5, 0),
    "layer norm by hand": (two_passes, "layer", 1e-5, 1),
    "shifted": (lambda x, w, b: w * rms(x) + b, "rms", 1e-6, 1),
    "then a table": (lambda x, w, b: w * rms(x) + 0.5, "rms", 1e-6, 1),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_found_by_what_they_compute(name: str) -> None:
    function, kind, eps, behind = NORMS[name]
    norm, report = found(Formula(function))
    assert (norm.kind, norm.eps, report.obstacle) == (kind, eps, None)
    last, rest = norm.operations.result, 0
    while next(iter(last.users)).op != "output":
        last, rest = next(iter(last.users)), rest + 1
    assert rest == behind
    x, module = torch.randn(2, 3, WIDTH), Formula(function)
    if not behind:
        parameters = [module.weight, module.bias][: len(norm.operations.parameters)]
        torch.testing.assert_close(norm.operations.function()(x, *parameters), module(x))


#: name -> (function, what is said)
OTHERS: dict[str, tuple[Callable[..., Tensor], str | None]] = {
    "no eps": (lambda x, w, b: w * x / x.norm(), "does not say its eps"),
    "eps outside the root": (
        lambda x, w, b: w * x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-6), "computes neither",
    ),
    "of all rows": (lambda x, w, b: w * x * torch.rsqrt(x.square().mean() + 1e-6), "computes neither"),
    "by the number of rows": (
        lambda x, w, b: w * x * torch.rsqrt(x.square().sum(1, keepdim=True) / 5 + 1e-6), "computes neither",
    ),
    "quantised": (lambda x, w, b: w * rms(x.to(torch.float8_e4m3fn).to(torch.float32)), "computes neither"),
    "in whole numbers": (lambda x, w, b: w * rms(x.to(torch.int32)), "computes neither"),
    "other rows": (lambda x, w, b: w * rms(x).view(4, 5, -1), "cannot be run on rows"),
    "no weight": (lambda x, w, b: rms(x), None),
    "a weight of its own": (lambda x, w, b: torch.ones(WIDTH) * rms(x), None),
    "a matrix": (lambda x, w, b: torch.outer(w, b).matmul(rms(x).mT).mT, None),
    "without gradients": (detached, "'_set_grad_enabled', between what it reads"),
    "under autocast": (cast_by_torch, "'_enter_autocast', between what it reads"),
    "the value was changed": (lambda x, w, b: (x.mul_(2), w * rms(x))[1], "'mul_', between what it reads"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_not(name: str) -> None:
    function, why = OTHERS[name]
    norm, report = found(Formula(function))
    assert norm is None
    if why is None:
        assert report is None
    else:
        assert report is not None and why in report.obstacle


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_are_followed_and_other_dtypes_left(dtype: torch.dtype) -> None:
    norm, _ = found(Formula(lambda x, w, b: w * rms(x), dtype), dtype)
    assert norm.kind == "rms"
    _, report = found(Formula(lambda x, w, b: w * rms(x)), dtype)
    assert report.obstacle == f"its weights are torch.float32, and what it reads is {dtype}"
    _, report = found(Formula(lambda x, w, b: w * rms(x.float()), dtype), dtype)
    assert report.obstacle == f"it makes torch.float32 of {dtype}"


def backend(topology: str = "ancre-ingoing", inner: str = "eager", **options: Any) -> rewire.Backend:
    return rewire.Backend(topology, inner=inner, start="paper", **options)


def targets(flat: rewire.Backend, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the rewritten graph of a model calls."""
    called: list[str] = []

    def seen(graph: fx.GraphModule, _: Any) -> fx.GraphModule:
        called.extend(node.target for node in graph.graph.nodes if node.op == "call_method")
        return graph

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: seen)
    torch.compile(model, backend=flat)(vectors())
    return called


@pytest.mark.skipif(INTERPRETED, reason="kernels run there")
def test_without_kernels_the_graph_keeps_its_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = backend()
    assert targets(flat, Stack(PreNorm), monkeypatch).count("read") == 6
    assert flat.report.norms == ()


# -- in the interpreter ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter(tmp_path: Path) -> None:
    interpret(f"{__file__}::TestFused", tmp_path)


class HandNorm(nn.Module):
    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(WIDTH, dtype=dtype) + 0.5), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * rms(x, self.eps).to(self.weight.dtype)


class Used(nn.Module):
    """The norms of its blocks are also its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Hand() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, normed = self.inp(x), []
        for layer in self.layers:
            y = layer.ln_1(x)
            x = x + layer.attn(y)
            z = layer.ln_2(x)
            x = x + layer.mlp(z)
            normed += [y, z, 2 * x]
        return torch.cat([x, *normed], -1)


class Hand(PreNorm):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = HandNorm(), HandNorm()  # type: ignore[assignment]


class Bare(nn.Module):
    """Norms without modules; and what is made of a norm on its way is used, too."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.attn, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(F.layer_norm(x, (WIDTH,), self.w, self.b, 1e-5))
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return x + self.mlp(x * scale * self.w) * scale


class Behind(Stack):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y * 2


#: name -> (model, arguments, number of norms that kernels compute)
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, int]] = {
    "llama": (lambda: tiny_model("llama"), token_ids(1, 5), 5),
    "gemma": (lambda: tiny_model("gemma"), token_ids(1, 5), 5),
    "gpt2": (lambda: tiny_model("gpt2"), token_ids(1, 5), 5),
    "by hand": (lambda: Stack(Hand), vectors(), 5),
    "no modules": (lambda: Stack(Bare), vectors(), 5),
    "used elsewhere": (Used, vectors(), 5),
    "two norms read one state": (lambda: Stack(Parallel), vectors(), 2),
    "a graph break behind": (lambda: Behind(PreNorm), vectors(), 5),
}


def made(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor, int]:
    make, x, fused = MODELS[name]
    torch.manual_seed(0)
    return make().eval().to(dtype), x.to(dtype) if x.is_floating_point() else x, fused


def results(call: Callable[..., Any], model: nn.Module, weights: list[nn.Parameter], x: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of the model and of the connections."""
    parameters = {**dict(model.named_parameters()), **{f"connection {n}": p for n, p in enumerate(weights)}}
    for p in parameters.values():
        p.grad = None
    output = call(x)
    output = output.logits if hasattr(output, "logits") else output
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(6)).to(output.dtype))
    return {"output": output.detach(), **{n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}}


class Run:
    """What a model gives whose connections really mix."""

    def __init__(self, model: nn.Module, x: Tensor, fuse: bool = True, **options: Any) -> None:
        torch._dynamo.reset()
        self.flat = backend(**options)
        self.compiled = torch.compile(model, backend=self.flat)
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            if not fuse:
                patch.setattr(dynamo, "_norms", lambda *_: {})
            patch.setattr(self.flat, "validate", fuse and self.flat.validate)
            self.compiled(x)
        self.weights = list(self.flat.parameters())
        scramble(self.weights)
        with pytest.MonkeyPatch.context() as patch:  # under AOTAutograd, a graph for training is another one
            if not fuse:
                patch.setattr(dynamo, "_norms", lambda *_: {})
            self.results = results(self.compiled, model, self.weights, x)


def scramble(weights: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in weights:
            p.add_(0.1 * torch.randn(p.shape, generator=generator))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()

    def counted(name: str, operator: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            counts[name] += 1
            return operator(*args)

        return run

    for name in ("mix_norm", "mix_norm_backward"):
        monkeypatch.setattr(operators, name, counted(name, getattr(operators, name)))
    return counts


class TestFused:
    __test__ = INTERPRETED

    @pytest.mark.parametrize("name", ["llama", "used elsewhere", "two norms read one state", "a graph break behind"])
    def test_the_graph_gives_the_same_numbers(self, name: str, launched: Counter[str]) -> None:
        model, x, fused = made(name)
        got = Run(model, x)
        assert got.flat.report.norms and all(norm.obstacle is None for norm in got.flat.report.norms)
        launched.clear()
        assert_same(results(got.compiled, model, got.weights, x), got.results)
        assert launched == {"mix_norm": fused, "mix_norm_backward": fused}
        launched.clear()
        want = Run(model, x, fuse=False)
        assert not launched and not want.flat.report.norms
        assert_same(want.results, got.results, 1e-5)

    @pytest.mark.parametrize(("name", "inner"), [("llama", "aot_eager"), ("by hand", "inductor")])
    def test_in_compiled_graphs(self, name: str, inner: str, launched: Counter[str]) -> None:
        model, x, _ = made(name)
        got = Run(model, x, inner=inner)
        assert launched["mix_norm"] and launched["mix_norm_backward"]
        assert_same(Run(model, x, fuse=False).results, got.results, 1e-5)

    @pytest.mark.parametrize("name", ["gpt2", "by hand"])
    def test_as_the_edited_source(self, name: str, launched: Counter[str]) -> None:
        """Bit by bit, in bfloat16: what is rounded there is rounded here."""
        model, x, fused = made(name, torch.bfloat16)
        got = Run(model, x)
        rewired = rewire.compile(model, "ancre-ingoing", start="paper", validate=False)
        (connection,) = rewire.connections(rewired).values()
        scramble(theirs := list(connection.parameters()))
        launched.clear()
        originals = {n: p for n, p in rewired.named_parameters() if "depth_connections" not in n}
        want = results(rewired, Holder(originals), theirs, x)
        assert launched == {"mix_norm": fused, "mix_norm_backward": fused}
        assert {n.obstacle for n in fusions(rewired)} == {None} and len(fusions(rewired)) == fused + 1  # and the first
        assert_same(want, got.results)

    @pytest.mark.parametrize("name", ["gemma"])
    def test_roundings(self, name: str) -> None:
        """In bfloat16 it is as far from float32 as with the model's own norms."""
        model, x, _ = made(name, torch.bfloat16)
        exact = Run(copy.deepcopy(model).float(), x, fuse=False).results
        fused, plain = Run(model, x).results, Run(model, x, fuse=False).results
        assert {n: v.dtype for n, v in fused.items()} == {n: v.dtype for n, v in plain.items()}

        def error(got: dict[str, Tensor]) -> float:
            return sum(float((got[n].float() - v).norm() / v.norm()) for n, v in exact.items()) / len(exact)

        assert error(fused) < 1.1 * error(plain) < 0.05

    @pytest.mark.parametrize(("topology", "fused"), [("residual", 5), ("attnres", 5), ("denseformer", 0)])
    def test_topologies(self, topology: str, fused: int, launched: Counter[str]) -> None:
        """Where what is read is no sum yet to be computed, the norm's own operations run."""
        model, x, _ = made("no modules")
        got = Run(model, x, topology=topology, granularity="sublayer")
        launched.clear()
        results(got.compiled, model, got.weights, x)
        assert launched["mix_norm"] == fused
        assert_same(Run(model, x, fuse=False, topology=topology, granularity="sublayer").results, got.results, 1e-5)

    def test_norms_of_separate_inputs_are_left(self) -> None:
        model, x, _ = made("by hand")
        assert [norm.module for norm in Run(model, x, topology="dca").flat.report.norms] == [
            f"layers.{n}.ln_2" for n in range(3)
        ]

    def test_weights_of_another_dtype_are_left(self) -> None:
        model, x, _ = made("by hand", torch.bfloat16)
        model.layers[1].ln_2 = nn.Sequential(HandNorm(torch.float32), Bfloat16())  # type: ignore[index, union-attr]
        got = Run(model, x, validate=False)
        why = "its weights are torch.float32, and what it reads is torch.bfloat16"
        obstacles = {norm.module: norm.obstacle for norm in got.flat.report.norms}
        assert obstacles.pop("layers.1.ln_2.0") == why and list(obstacles.values()) == [None] * 4
        lines = str(got.flat.report).splitlines()
        assert f"layers.1.ln_2.0: {why}" in lines and "layers.0.ln_2: computed together with what it reads" in lines
        assert_same(Run(model, x, fuse=False).results, got.results, 0.05)

    def test_any_number_of_tokens(self) -> None:
        model, x, _ = made("by hand")
        flat = backend(inner="aot_eager")
        compiled = torch.compile(model, backend=flat)
        rewired = rewire.compile(model, "ancre-ingoing", start="paper", validate=False)
        for length in (5, 7, 9):
            x = vectors(length=length)
            torch.testing.assert_close(compiled(x), rewired(x), rtol=1e-5, atol=1e-5)
        assert flat.report.graphs > 1 and [norm.obstacle for norm in flat.report.norms] == [None] * 5

    def test_exported_programs(self, launched: Counter[str]) -> None:
        model, x, fused = made("no modules")
        flat = backend()
        module = flat.rewrite(torch.export.export(model, (x,)))
        scramble(weights := list(flat.parameters()))
        launched.clear()
        output = results(module, module, weights, x)["output"]
        assert launched == {"mix_norm": fused, "mix_norm_backward": fused}
        assert_same({"": Run(model, x, fuse=False).results["output"]}, {"": output}, 1e-5)

    def test_exported_programs_compute_norms_once(self) -> None:
        model, x, _ = made("by hand", torch.bfloat16)
        module = backend().rewrite(torch.export.export(model, (x,)))
        assert sum("rsqrt" in str(node.target) for node in module.graph.nodes) == 1  # of the first, behind no sum

    def test_rewritten_programs_are_compiled(self) -> None:
        model, x, _ = made("no modules")
        module = backend().rewrite(torch.export.export(model, (x,)))
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)

    def test_a_wrong_norm_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def wrong(*args: Any) -> Any:
            norm, report = find_norm(*args)
            return norm and dataclasses.replace(norm, eps=0.3), report

        monkeypatch.setattr(dynamo, "find_norm", wrong)
        model, x, _ = made("by hand")
        with pytest.raises(BackendCompilerFailed, match="graph as torch") as info:
            torch.compile(model, backend=backend())(x)
        assert isinstance(info.value.inner_exception, rewire.ValidationMismatch)


class Bfloat16(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16()


class Holder(nn.Module):
    """Parameters by the names that they have in a model."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self.parameters_by_name = parameters

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.parameters_by_name.items()
