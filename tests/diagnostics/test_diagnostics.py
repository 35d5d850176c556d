"""What `rewire.diagnose` measures, against the same numbers from hooks on hand-written nets."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from every_topology import NOT_PRESERVING, mixed
from models import WIDTH, ConvNet, LoopGPT, PlusMlp, PostNorm, PreNorm, Stack, images, token_ids, vectors
from torch import Tensor, nn
from typer.testing import CliRunner

import rewire
from rewire.cli import app
from rewire.diagnostics.measure import Diagnosis, diagnose, effective_streams
from rewire.diagnostics.observing import observed
from rewire.diagnostics.signals import BlockSignals, TrunkSignals, mean_squared_singular_value
from rewire.errors import AlreadyRewired, BadExampleInputs, NoResidualAdds, RewireError, WrappedModel
from rewire.patterns import tiny


def squared(output: Tensor) -> Tensor:
    return output.square().sum()


def norm(x: Tensor, dim: int = -1) -> float:
    return x.detach().square().sum(dim).sqrt().mean().item()


def only(diagnosis: Diagnosis) -> TrunkSignals:
    (trunk,) = diagnosis.trunks
    return trunk


class Naive:
    """Hidden states, branch outputs and gradients of a plain pre-norm `Stack`, by hooks."""

    def __init__(self, model: Stack, x: Tensor) -> None:
        self.hidden: list[Tensor] = []
        self.branches: list[Tensor] = []
        hooks = [model.layers[0].register_forward_pre_hook(lambda _m, args: self.hidden.append(args[0]))]
        for layer in model.layers:
            for branch in (layer.attn, layer.mlp):
                hooks.append(branch.register_forward_hook(lambda _m, _a, output: self.branches.append(output)))
        output = model(x)
        for hook in hooks:
            hook.remove()
        for branch in self.branches:
            self.hidden.append(self.hidden[-1] + branch)
        self.loss = squared(output)
        self.gradients = torch.autograd.grad(self.loss, [self.hidden[0], *self.branches], retain_graph=True)
        self.weights = [
            torch.autograd.grad(self.loss, list(branch.parameters()), retain_graph=True)
            for layer in model.layers
            for branch in (layer.attn, layer.mlp)
        ]


def test_a_plain_model_against_hooks() -> None:
    model, x = Stack(PreNorm), vectors()
    naive, found = Naive(model, x), diagnose(model, x, loss=squared)
    trunk = only(found)
    assert found.loss == pytest.approx(float(naive.loss.detach()))
    assert [site.name for site in trunk.sites] == [f"layers.{n}.{b}" for n in range(3) for b in ("attn", "mlp")]
    assert [site.kind for site in trunk.sites] == ["attention", "ffn"] * 3
    for site, (before, after), branch, gradient, weights in zip(
        trunk.sites, itertools.pairwise(naive.hidden), naive.branches, naive.gradients[1:], naive.weights, strict=True
    ):
        cosine = (before * after).sum(-1) / (before.norm(dim=-1) * after.norm(dim=-1))
        assert site.stream == pytest.approx(norm(before), rel=1e-5)
        assert site.branch == pytest.approx(norm(branch), rel=1e-5)
        assert site.update == pytest.approx(norm(branch), rel=1e-5)
        assert site.cosine == pytest.approx(cosine.mean().item(), abs=1e-6)
        assert site.gradient == pytest.approx(float(gradient.norm()), rel=1e-5)
        total = math.sqrt(sum(float(g.square().sum()) for g in weights))
        assert site.weight_gradient == pytest.approx(total, rel=1e-5)
    assert trunk.output == pytest.approx(norm(naive.hidden[-1]), rel=1e-5)
    assert trunk.input_gradient == pytest.approx(float(naive.gradients[0].norm()), rel=1e-5)
    blocks = naive.hidden[::2]
    assert [block.path for block in trunk.blocks] == [f"layers.{n}" for n in range(3)]
    for block, (before, after) in zip(trunk.blocks, itertools.pairwise(blocks), strict=True):
        cosine = torch.cosine_similarity(before, after, dim=-1).mean()
        assert block.cosine == pytest.approx(cosine.item(), abs=1e-6)
        assert block.influence == pytest.approx(1 - cosine.item(), abs=1e-6)


def test_post_norm_blocks_update_more_than_the_branch_adds() -> None:
    model, x = Stack(PostNorm), vectors()
    h, trunk = model.inp(x), only(diagnose(model, x, probes=0))
    for n, layer in enumerate(model.layers):
        for site, branch, after in zip(
            trunk.sites[2 * n : 2 * n + 2], (layer.attn, layer.mlp), (layer.ln_1, layer.ln_2), strict=True
        ):
            f = branch(h)
            new = after(h + f)
            assert site.stream == pytest.approx(norm(h), rel=1e-5)
            assert site.branch == pytest.approx(norm(f), rel=1e-5)
            assert site.update == pytest.approx(norm(new - h), rel=1e-5)
            h = new


def test_channels_of_images_are_not_their_columns() -> None:
    model, x = ConvNet(), images()
    trunk = only(diagnose(model, x, probes=0))
    seen: list[Tensor] = []
    model.get_submodule(trunk.blocks[0].path).register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    model(x)
    assert trunk.sites[0].stream == pytest.approx(norm(seen[0], dim=1), rel=1e-5)
    assert trunk.sites[0].stream != pytest.approx(norm(seen[0]), rel=1e-2)


class Turning(nn.Module):
    """Adds on [B, S, D], then on [S, B, D]."""

    def __init__(self, turns: bool) -> None:
        super().__init__()
        self.turns, self.branches = turns, nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branches[0](x)
        x = x + self.branches[1](x)
        if self.turns:
            x = x.transpose(0, 1)
        x = x + self.branches[2](x)
        return x + self.branches[3](x)


@pytest.mark.parametrize("topology", [None, "ancre-ingoing"])
def test_states_whose_dimensions_change_on_the_way(topology: str | None) -> None:
    torch.manual_seed(0)
    turning, straight = Turning(True), Turning(False)
    straight.load_state_dict(turning.state_dict())
    x = torch.randn(3, 3, WIDTH)  # of the same shape either way
    found = []
    for model in (turning, straight):
        rewired = rewire.compile(model, topology, example_inputs=(x,)) if topology else model
        found.append(only(diagnose(rewired, x, loss=squared, probes=0)))
    for a, b in zip(found[0].sites, found[1].sites, strict=True):
        for name in ("stream", "branch", "update", "cosine", "gradient", "weight_gradient"):
            assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-5), name


def test_effective_depth() -> None:
    def trunk(*influences: float) -> TrunkSignals:
        blocks = tuple(BlockSignals(str(n), value) for n, value in enumerate(influences))
        return TrunkSignals("layers", (), blocks, 0.0, 0.0, None)

    assert trunk(0.1, 0.1, 0.1).effective_depth == pytest.approx(3)
    assert trunk(0.5, 0.0, 0.0).effective_depth == pytest.approx(1)
    assert trunk(0.2, 0.1).effective_depth == pytest.approx(3 / 2 ** (2 / 3))
    assert trunk(0.0, 0.0).effective_depth == 0


# -- the observed copy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [k for k in rewire.list_topologies() if k != "dca"])
def test_observed_copies_compute_the_same(key: str) -> None:
    model, x = mixed(Stack(PreNorm), key), vectors()
    copy, (record,) = observed(model)
    assert torch.equal(copy(x), model(x))
    assert len(record.runs[0].reads) == len(record.runs[0].branches) == 6
    assert {p.data_ptr() for p in copy.parameters()} == {p.data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("granularity", ["block", "sublayer"])
def test_observed_reads_are_those_of_the_stream(granularity: str) -> None:
    model, x = rewire.compile(Stack(PreNorm), "ancre-ingoing", granularity=granularity, start="paper"), vectors()
    normed: list[Tensor] = []
    for layer in model.layers:
        for part in (layer.ln_1, layer.ln_2):
            part.register_forward_pre_hook(lambda _m, args: normed.append(args[0]))
    model(x)
    copy, (record,) = observed(model)
    copy(x)
    for position, read in enumerate(normed[:6]):
        torch.testing.assert_close(record.runs[0].reads[position], read)


def test_a_frozen_model_and_its_learned_one_have_the_same_signals() -> None:
    learned = mixed(Stack(PreNorm), "ancre-ingoing")
    frozen, _ = rewire.freeze(learned, 0.0)
    a, b = (only(diagnose(model, vectors(), seed=3)) for model in (learned, frozen))
    assert [site.stream for site in a.sites] == pytest.approx([site.stream for site in b.sites], rel=1e-4)
    assert [site.gradient for site in a.sites] == pytest.approx([site.gradient for site in b.sites], rel=1e-3)
    assert a.chi and b.chi and a.chi.value == pytest.approx(b.chi.value, rel=1e-3)


@pytest.mark.parametrize("key", ["residual", "grn-v3", "hc-dynamic", "denseformer", "ancre-ingoing"])
def test_a_preserving_start_has_the_signals_of_the_plain_model(key: str) -> None:
    assert key not in NOT_PRESERVING
    model = Stack(PreNorm)
    rewired = rewire.compile(model, key, validate=False)
    a, b = only(diagnose(model, vectors())), only(diagnose(rewired, vectors()))
    assert [site.stream for site in a.sites] == pytest.approx([site.stream for site in b.sites], rel=1e-4)
    assert a.chi and b.chi and a.chi.value == pytest.approx(b.chi.value, rel=1e-3)


@pytest.mark.parametrize("name", ["llama", "bert", "vit", "t5"])
def test_models_of_transformers(name: str) -> None:
    found = diagnose(tiny.tiny_model(name), probes=2)
    assert all(trunk.chi and 0 < trunk.chi.value < 1e4 for trunk in found.trunks)
    assert {site.kind for trunk in found.trunks for site in trunk.sites} >= {"attention", "ffn"}
    for site in (site for trunk in found.trunks for site in trunk.sites):
        assert min(site.stream, site.branch, site.update, site.gradient or 0, site.weight_gradient or 0) > 0


def test_queries_keys_and_values_apart() -> None:
    model = mixed(tiny.tiny_model("llama"), "dca")
    copy, (record,) = observed(model)
    ids = token_ids()
    torch.testing.assert_close(copy(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert len(record.runs[0].reads) == 6
    assert only(diagnose(model, {"input_ids": ids}, probes=2)).chi is not None


def test_bfloat16() -> None:
    model = Stack(PreNorm)
    exact, rounded = diagnose(model, vectors(), seed=1), diagnose(model.bfloat16(), vectors().bfloat16(), seed=1)
    for a, b in zip(only(exact).sites, only(rounded).sites, strict=True):
        assert b.stream == pytest.approx(a.stream, rel=2e-2)
        assert b.gradient == pytest.approx(a.gradient, rel=5e-2)


# -- nothing is left behind --------------------------------------------------------------------------------------------


class Dropping(Stack):
    def __init__(self) -> None:
        super().__init__(PreNorm)
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(9)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls.add_(1)  # type: ignore[operator]
        return super().forward(self.drop(self.norm(x)))


@pytest.mark.parametrize("topology", [None, "ancre-ingoing"])
@pytest.mark.parametrize("evaluate", [True, False])
def test_nothing_is_left_behind(topology: str | None, evaluate: bool) -> None:
    model: nn.Module = Dropping().train()
    if topology:
        model = rewire.compile(model, topology, validate=False)
    model.layers[1].eval()  # type: ignore[union-attr, operator]

    def state() -> list[Any]:
        modules = list(model.modules())
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in modules]
        return [
            [m.training for m in modules],
            hooks,
            [type(m) for m in modules],
            [p.grad is None for p in model.parameters()],
            torch.random.get_rng_state().tolist(),
        ]

    values = {name: value.clone() for name, value in model.state_dict().items()}
    before = state()
    diagnose(model, vectors(), probes=2, evaluate=evaluate)
    assert state() == before
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name


def test_evaluation_mode_is_the_default_and_seeds_count() -> None:
    model = Dropping()
    first, second = (only(diagnose(model, vectors(), seed=s)).sites[0].stream for s in (0, 1))
    assert first == second
    a, b, c = (only(diagnose(model, vectors(), seed=s, evaluate=False)).sites[0].stream for s in (0, 0, 1))
    assert a == b != c


def test_in_the_middle_of_evaluation_without_gradients() -> None:
    with torch.no_grad():
        trunk = only(diagnose(Stack(PreNorm), vectors(), probes=2))
    assert trunk.sites[0].gradient and trunk.chi


def test_weights_that_are_not_trained_have_no_gradient() -> None:
    model = Stack(PreNorm).requires_grad_(False)
    sites = only(diagnose(model, vectors(), probes=0)).sites
    assert all(site.weight_gradient is None and site.gradient for site in sites)
    model.layers[2].mlp.requires_grad_(True)
    sites = only(diagnose(model, vectors(), probes=0)).sites
    assert [site.weight_gradient is not None for site in sites] == [False] * 5 + [True]


# -- chi --------------------------------------------------------------------------------------------------------------


def test_chi_of_a_linear_map() -> None:
    weight = torch.randn(6, 6, dtype=torch.float64)
    found = mean_squared_singular_value(lambda x: x @ weight.T, torch.randn(6, dtype=torch.float64))
    assert found.value == pytest.approx(float(torch.linalg.svdvals(weight).square().mean()))
    assert (found.error, found.probes) == (0, 0)
    wide = mean_squared_singular_value(lambda x: x @ weight[:2].T, torch.randn(6, dtype=torch.float64))
    assert wide.value == pytest.approx(float(torch.linalg.svdvals(weight[:2]).square().mean()))


def test_probes_are_unbiased_and_seeded() -> None:
    weight = torch.randn(600, 600) / 600**0.5
    exact = float(weight.square().sum() / 600)
    found = mean_squared_singular_value(lambda x: x @ weight.T, torch.randn(600), probes=200, seed=1)
    assert abs(found.value - exact) < 4 * found.error < 0.1 * exact
    assert found.probes == 200
    few = [mean_squared_singular_value(lambda x: x @ weight.T, torch.randn(600), 4, s).value for s in (0, 0, 1)]
    assert few[0] == few[1] != few[2]
    assert math.isnan(mean_squared_singular_value(lambda x: x @ weight.T, torch.randn(600), 1).error)
    with pytest.raises(ValueError, match="probes=0"):
        mean_squared_singular_value(lambda x: x, torch.randn(2), 0)


class Linear(nn.Module):
    def __init__(self, width: int, size: float) -> None:
        super().__init__()
        self.f = nn.Linear(width, width, bias=False)
        nn.init.normal_(self.f.weight, std=size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


@pytest.mark.parametrize("width", [8, 400])  # 2 x 8 outputs: exact; 2 x 400: by probes
def test_chi_of_a_linear_residual_network(width: int) -> None:
    model = nn.Sequential(nn.Linear(3, width), *(Linear(width, 0.3 / width**0.5) for _ in range(4)))
    product = torch.eye(width)
    for block in model[1:]:
        product = (torch.eye(width) + block.f.weight.detach()) @ product
    expected = float(product.square().sum() / width)
    chi = only(diagnose(model, torch.randn(2, 3), probes=100)).chi
    assert chi is not None
    assert chi.value == pytest.approx(expected, rel=1e-5 if width == 8 else 0.05)
    assert (chi.probes == 0) == (width == 8)


def test_chi_is_about_1_under_idinit() -> None:
    """IDInit's Figure 18: about 1, and far above under the usual initialisers."""

    def chi(init: str) -> float:
        model = nn.Sequential(*[PlusMlp() for _ in range(64)])
        rewire.initialize(model, init, generator=torch.Generator().manual_seed(0))
        found = only(diagnose(model, torch.rand(1, WIDTH) + 0.1)).chi
        assert found is not None
        return found.value

    assert abs(chi("idinit") - 1) < 0.01
    assert chi("kaiming") > 2000


# -- batches, losses, errors, the table --------------------------------------------------------------------------------


def test_losses() -> None:
    model = LoopGPT()
    ids = token_ids()
    projected = diagnose(model, ids, probes=0)
    assert diagnose(model, (ids,), probes=0) == projected == diagnose(model, {"idx": ids}, probes=0)
    assert diagnose(model, ids, probes=0, seed=1).loss != projected.loss
    llama = tiny.tiny_model("llama").eval()
    own = llama(input_ids=ids, labels=ids).loss
    assert diagnose(llama, {"input_ids": ids, "labels": ids}, probes=0).loss == pytest.approx(float(own.detach()))
    with pytest.raises(RewireError, match=r"a tensor \[2, 9, 61\].*Pass loss="):
        diagnose(model, ids, loss=lambda logits: logits)
    with pytest.raises(RewireError, match="the loss is a float"):
        diagnose(model, ids, loss=lambda logits: 1.0)  # type: ignore[arg-type, return-value]


def test_how_many_streams_differ() -> None:
    x, y, z = torch.linalg.qr(torch.randn(3, 5, 3)).Q.movedim(-1, 0)
    assert effective_streams(torch.stack([x, x, -2 * x], -2)) == pytest.approx(1, abs=1e-6)
    assert effective_streams(torch.stack([x, y, z], -2)) == pytest.approx(3, abs=1e-6)
    assert effective_streams(torch.stack([x, y, y], -2)) == pytest.approx(3 / 2 ** (2 / 3), abs=1e-6)  # 1/3 and 2/3
    assert effective_streams(torch.zeros(4, 3, 5)) == 1


def test_streams_that_have_collapsed() -> None:
    """Copies that are written alike are one stream; written differently, two at least."""
    model, x = Stack(PreNorm), vectors()
    alike, apart = (rewire.compile(model, name, example_inputs=(x,)) for name in ("hc-static", "mhc"))
    assert only(diagnose(alike, x)).streams == pytest.approx(1, abs=1e-3)
    differing = only(diagnose(apart, x)).streams
    assert differing is not None and 1.1 < differing < 4
    assert "streams differ" in str(diagnose(apart, x)) and only(diagnose(model, x)).streams is None


def test_errors() -> None:
    model = Stack(PreNorm)
    with pytest.raises(ValueError, match="probes=-1"):
        diagnose(model, vectors(), probes=-1)
    with pytest.raises(BadExampleInputs, match="Stack does not run on the example inputs: RuntimeError"):
        diagnose(model, torch.randn(2, 9, 7))
    with pytest.raises(BadExampleInputs, match="has no inputs"):
        diagnose(model)
    with pytest.raises(NoResidualAdds, match="no residual stream was found in Linear"):
        diagnose(nn.Linear(2, 2), torch.randn(1, 2))
    with pytest.raises(RewireError, match="is on the meta device"):
        diagnose(Stack(PreNorm).to("meta"), vectors())
    with pytest.raises((WrappedModel, AlreadyRewired)):
        diagnose(torch.compile(model), vectors())  # type: ignore[arg-type]


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Stack(PreNorm), Stack(PreNorm)

    def forward(self, x: Tensor, which: str) -> Tensor:
        return getattr(self, which)(x)


def test_trunks_that_the_batch_does_not_reach() -> None:
    batch = (vectors(), "left")
    plain = diagnose(TwoTowers(), batch, probes=0)
    assert only(plain).name == "left.layers" and not plain.unreached  # what there is, the batch shows
    found = diagnose(rewire.compile(TwoTowers(), validate=False), batch, probes=0)
    assert only(found).name == "left.layers" and found.unreached == ("right.layers",)
    assert "Not reached by the batch: right.layers" in str(found)


def test_the_table() -> None:
    text = str(diagnose(Stack(PreNorm), vectors()))
    assert "layers: effective depth" in text and "of 3 blocks; chi " in text and "gradient at the input" in text
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert [row[:3] for row in rows] == [
        [str(n + 1), f"{n // 2}.{('attn', 'mlp')[n % 2]}", ("attention", "ffn")[n % 2]] for n in range(6)
    ]
    assert all(len(row) == 9 for row in rows)


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    options = ["--batch", "1", "--length", "8", "--probes", "2"]
    result = CliRunner().invoke(app, ["diagnose", "hf:llama", *options, "--out", str(tmp_path / "s.png")])
    assert result.exit_code == 0
    assert "model.layers: effective depth" in result.stdout and result.stdout.endswith("s.png\n")
    assert (tmp_path / "s.png").stat().st_size > 1000
    rewired = CliRunner().invoke(app, ["diagnose", "hf:llama", *options, "--topology", "ancre-ingoing"])
    assert rewired.exit_code == 0 and rewired.stdout.splitlines()[0] != result.stdout.splitlines()[0]
    wrong = CliRunner().invoke(app, ["diagnose", "hf:llama", *options, "--out", str(tmp_path / "s.xyz")])
    assert wrong.exit_code == 2 and "s.xyz" in wrong.stderr and ".svg" in wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["residual", "ancre-ingoing", "muddformer"])
def test_compiled_and_checkpointed_models_are_measured_as_plain_ones(topology: str) -> None:
    model = rewire.compile(tiny.tiny_model("llama"), topology).train()
    ids = token_ids(2, 8)
    batch = {"input_ids": ids, "labels": ids}
    expected = diagnose(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": False})  # its hook calls requires_grad_
    assert str(diagnose(model, batch)) == str(expected)
    model.gradient_checkpointing_disable()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    model.compile(backend="eager")
    model(**batch)
    assert str(diagnose(model, batch)) == str(expected)
    assert "gradient at the input 0" not in str(expected)


def test_what_checkpointing_computes_again_is_not_measured() -> None:
    model = rewire.compile(tiny.tiny_model("llama"), "ancre-ingoing").train()
    ids = token_ids(2, 8)
    batch = {"input_ids": ids, "labels": ids}
    expected = diagnose(model, batch, evaluate=False, probes=0)
    assert all(site.gradient for site in only(expected).sites)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert str(diagnose(model, batch, evaluate=False, probes=0)) == str(expected)


def test_chi_through_functions_of_the_old_style() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad

    chi = mean_squared_singular_value(lambda x: Double.apply(x).relu_(), torch.ones(3))
    assert (chi.value, chi.probes) == (4.0, 0)
