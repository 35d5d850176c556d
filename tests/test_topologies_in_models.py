"""Every topology in real models: it starts as the original, and works with what models are trained and run with."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from every_topology import (
    EVERY,
    FEW,
    LEARNED,
    NOT_PRESERVING,
    PRE_NORM_ONLY,
    PRESERVING,
    QUICK,
    WITH_ATTENTION,
    compiled,
    kinds_first,
    learned,
    mixed,
)
from mixing import all_gradients, nodes_behind
from models import LinearNet, PreNorm, Stack, token_ids, vectors
from slow_cases import one_in
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rewire
from rewire.kernels.cpu import plain
from rewire.patterns.tiny import timm_model, tiny_model
from rewire.plotting import plot_arcs, plot_heatmap
from rewire.saving.checkpoint import matrices

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def llama() -> nn.Module:
    model = tiny_model("llama").eval()
    model.generation_config.eos_token_id = None
    return model


def ids() -> Tensor:
    return token_ids(2, 12, 97)


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x, labels=x).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(expected: dict[str, Tensor], actual: dict[str, Tensor], tolerance: float) -> None:
    assert list(expected) == list(actual) and any("depth_connections" in name for name in expected)
    largest = max(float(value.norm()) for value in expected.values())
    for name, value in expected.items():
        error = float((value.double() - actual[name].double()).norm()) / max(float(value.norm()), 1e-3 * largest)
        assert error <= tolerance, (name, error)


# -- starts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "key"),
    kinds_first(
        [
            *(("llama", key) for key in PRESERVING),
            *(("gpt_neox", key) for key in FEW),
            *(("t5", key) for key in FEW),
            *(
                ("gpt2", key) for key in ("ancre-ingoing", "dca", "muddformer", "hc-dynamic")
            ),  # q, k and v in one weight
        ],
        few=["gpt_neox", "t5", "gpt2"],
    ),
)
def test_starts_as_the_original(model_type: str, key: str) -> None:
    """Validation compares outputs and gradients; here that it is not the validation that lets everything pass."""
    model = tiny_model(model_type).eval()
    rewired = compiled(model, key)
    inputs = {"input_ids": ids()} | ({"decoder_input_ids": ids()} if model_type == "t5" else {})
    with torch.no_grad():
        torch.testing.assert_close(rewired(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", sorted(NOT_PRESERVING))
def test_those_that_cannot_say_so(key: str) -> None:
    with pytest.raises(rewire.UnsupportedTopology, match="no start that equals the original"):
        compiled(llama(), key)
    compiled(llama(), key, start="paper")  # validated with plain connections in the same rewrite


@pytest.mark.each_once
@pytest.mark.parametrize("key", ["dca", "muddformer", "hc-dynamic", "layerscale"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_the_paper_s_start_is_validated_with_plain_connections(model_type: str, key: str) -> None:
    """In the same rewrite: where q, k and v are read apart, they are the same value three times."""
    compiled(tiny_model(model_type), key, start="paper")


@pytest.mark.parametrize("key", kinds_first(PRESERVING))
def test_post_norm_blocks(key: str) -> None:
    if key in PRE_NORM_ONLY:
        with pytest.raises(rewire.UnsupportedTopology, match=r"bert\.encoder\.layer' is post-norm"):
            compiled(tiny_model("bert"), key)
    else:
        compiled(tiny_model("bert"), key)


#: Convolutional nets of timm, made small; any other name is one of transformers.
NETS: dict[str, dict[str, Any]] = {
    "resnet18": {"channels": (16, 16, 32, 32), "stem_width": 8},
    "resnetv2_18": {"layers": (2, 2, 1, 1), "channels": (16, 32, 32, 32), "stem_chs": 16},
    "convnext_atto": {"depths": (2, 2, 2, 2), "dims": (16, 16, 32, 32)},
}


GROUPED = [key for key in EVERY if key.endswith("-groups")]
OF_CHANNELS = [key for key in PRESERVING if key not in WITH_ATTENTION]


@pytest.mark.parametrize(
    ("name", "key"),
    kinds_first(
        [
            *(("resnet18", key) for key in OF_CHANNELS if key not in PRE_NORM_ONLY),
            *(("resnetv2_18", key) for key in OF_CHANNELS if key in PRE_NORM_ONLY),
            *((n, key) for n in ("convnext_atto", "convnext") for key in ("ancre-ingoing", "grn-v2", "hc-dynamic")),
        ],
        few=["convnext_atto", "resnet18", "resnetv2_18"],
    ),
)
def test_convolutional_nets(name: str, key: str) -> None:
    of_timm = name in NETS
    made = timm_model(name, num_classes=10, **NETS[name]) if of_timm else tiny_model(name)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():  # branches that are (nearly) zero at their start
            if "bias" not in parameter_name and parameter.abs().max() < 1e-3:
                parameter.fill_(0.5)
    rewired = compiled(made, key, example_inputs=(images,))
    x = images.to(memory_format=torch.channels_last)
    for model in (made, rewired):
        model.eval()
    with torch.no_grad():
        out, want = (m(x) if of_timm else m(x).logits for m in (rewired, made))
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
        if key in LEARNED:
            other = mixed(made, key).eval()
            moved = other(images) if of_timm else other(images).logits
            assert moved.isfinite().all() and not torch.allclose(moved, want, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "key", "why"), [("resnet18", "grn-v1", "is post-norm"), ("convnext_atto", "dca", "attention")]
)
def test_convolutional_nets_that_are_refused(name: str, key: str, why: str) -> None:
    with pytest.raises(rewire.UnsupportedTopology, match=why):
        compiled(timm_model(name, num_classes=10, **NETS[name]), key)


def test_channels_of_images_are_weighted_apart() -> None:
    """Channel c scaled by w_c, in every image and place: against the formula on images."""

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.conv(x)

    model, x = nn.Sequential(Body(), Body()), torch.randn(2, 4, 5, 6)
    scaled = rewire.compile(model, "layerscale", example_inputs=(x,))
    grn = rewire.compile(model, "grn-v2", example_inputs=(x,))
    scales, b = torch.randn(2, 4), torch.randn(6, 4)
    for model_of, values in ((scaled, {"scales": scales}), (grn, {"b": b})):
        next(iter(rewire.connections(model_of).values())).set_values(values)
    with torch.no_grad():
        first = x + scales[0].view(4, 1, 1) * model[0].conv(x)
        want = first + scales[1].view(4, 1, 1) * model[1].conv(first)
        torch.testing.assert_close(scaled(x), want)
        w = b.view(6, 4, 1, 1)
        f1 = model[0].conv(w[0] * x)
        f2 = model[1].conv(w[1] * x + w[2] * f1)
        torch.testing.assert_close(grn(x), w[3] * x + w[4] * f1 + w[5] * f2)


# -- learning -----------------------------------------------------------------------------------------------------

#: Their scales multiply a product of weights that start at zero: where branches start at zero, too, a third step.
LATE_WITH_ZERO_BRANCHES = {key for key in EVERY if key.startswith(("hc-dynamic", "hc-gated", "frac-hc", "mhc", "ddl"))}

#: Elements of a parameter that are constant by construction: a softmax over one entry is 1.
CONSTANT: dict[str, list[list[int]]] = {
    **{key: [[0]] for key in ("ancre-ingoing", "ancre-keep", "ancre-groups")},
    "ancre-outgoing": [[5]],
}


#: ReZero's and SkipInit's published starts are left out of branches that are zero: both factors of each are, and stay
#: so; the classes say it.
STARTS = [
    (key, start, zero)
    for key in LEARNED
    for start in ("preserve", "paper")
    for zero in (False, True)
    if not (start == "preserve" and key in NOT_PRESERVING)
    and not (zero and start == "paper" and key in ("rezero", "skipinit"))
]


@pytest.mark.parametrize(("key", "start", "zero"), kinds_first(STARTS))
def test_every_connection_weight_moves(key: str, start: str, zero: bool) -> None:
    model = tiny_model("llama").train()
    if zero:
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
    rewired = compiled(model, key, start=start, validate=False)
    before = {name: p.detach().clone() for name, p in learned(rewired).items()}
    optimizer = torch.optim.AdamW(rewired.parameters(), lr=1e-2, weight_decay=0, eps=1e-15)
    for _ in range(3 if zero and key in LATE_WITH_ZERO_BRANCHES else 2):
        gradients(rewired, ids())
        optimizer.step()
    for name, value in before.items():
        still = (learned(rewired)[name] == value).nonzero().tolist()
        assert still == CONSTANT.get(key, []), (name, value.shape, still[:20])


# -- running -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", kinds_first(EVERY))
def test_generation(key: str) -> None:
    model = llama()
    other = mixed(model, key)
    cached = other.generate(ids(), use_cache=True, **OPTIONS)
    assert torch.equal(cached, other.generate(ids(), use_cache=False, **OPTIONS))
    assert key in ("residual", "fixed-scale") or not torch.allclose(other(ids()).logits, model(ids()).logits, atol=1e-3)


@pytest.mark.parametrize("key", ["dca", "muddformer"])
@pytest.mark.parametrize("model_type", ["gpt2", "falcon", "t5"])
def test_generation_with_q_k_v_apart(model_type: str, key: str) -> None:
    model = tiny_model(model_type).eval()
    model.generation_config.eos_token_id = None
    if model_type == "t5":
        model.generation_config.decoder_start_token_id = 0
    other = mixed(model, key)
    cached = other.generate(ids(), use_cache=True, **OPTIONS)
    assert torch.equal(cached, other.generate(ids(), use_cache=False, **OPTIONS))


@pytest.mark.parametrize("key", kinds_first(LEARNED))
def test_gradient_checkpointing(key: str) -> None:
    model = mixed(llama(), key).train()
    expected = gradients(model, ids())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_close(expected, gradients(model, ids()), 0.0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which Dynamo itself hides
@pytest.mark.slow
@pytest.mark.parametrize("key", [*(k for k in QUICK if k != "residual"), "ancre-keep", "laurel-rw", "rezero", *GROUPED])
def test_torch_compile(key: str) -> None:
    """Of hand-written blocks, which Dynamo reads faster than a library's; tests/test_torch_compile.py has those."""
    model = mixed(Stack(PreNorm, depth=2), key)
    names, parameters = zip(*model.named_parameters(), strict=True)
    whole = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected, actual = (
        dict(zip(names, torch.autograd.grad(run(vectors()).square().sum(), parameters), strict=True))
        for run in (model, whole)
    )
    assert_close(expected, actual, 1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which Dynamo itself hides
@pytest.mark.slow
@pytest.mark.parametrize("key", ["grn-v2", "grn-v3", "ancre-ingoing", "denseformer", "attnres", "ancre-groups"])
def test_inductor_leaves_weights_alone(key: str) -> None:
    """It may write over what AOTAutograd takes for memory of its own: copies that it has left out, say."""
    model = mixed(Stack(PreNorm, depth=4), key)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    compiled = torch.compile(model, fullgraph=True)
    for _ in range(2):
        compiled(vectors()).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(before[name], parameter), name


@pytest.mark.parametrize("key", kinds_first(LEARNED))
def test_interleaved_forwards(key: str) -> None:
    """Two micro-batches, block by block in turn, checkpointed or not, then one backward each."""
    model = mixed(Stack(PreNorm, depth=4), key).train()
    xs = [vectors(), 2 * vectors(3)]
    expected = [model(x) for x in xs]
    wanted = [torch.autograd.grad(y.square().sum(), list(model.parameters()), retain_graph=True) for y in expected]
    for replay in (False, True):
        a, b = (model.inp(x) for x in xs)
        for layer in model.layers:
            a, b = (checkpoint(layer, s, use_reentrant=False) if replay else layer(s) for s in (a, b))
        outputs = [model.out(s) for s in (a, b)]
        for out, want, grads in zip(outputs, expected, wanted, strict=True):
            assert torch.equal(out, want)
            for g, w in zip(torch.autograd.grad(out.square().sum(), list(model.parameters())), grads, strict=True):
                assert torch.equal(g, w)


#: The functions of autograd whose gradients are by hand where states are large.
BY_HAND = {f"{name}Backward" for name in ("_Sum", "_Claims", "_Several")}


@pytest.mark.parametrize("key", kinds_first(key for key in LEARNED if key != "review"))  # which has none of them
def test_small_states_are_left_to_autograd(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mixed(Stack(PreNorm), key), vectors()
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = []
    for worthwhile in (0, 1 << 20):
        monkeypatch.setattr(plain, "WORTHWHILE", worthwhile)
        output = model(x)
        functions = {type(node).__name__ for node in nodes_behind(output)}
        if worthwhile:
            assert not functions & BY_HAND
        else:  # projections are by hand however small the states
            assert functions & {*BY_HAND, "_ReadOffBackward"}
        found.append(dict(zip(names, torch.autograd.grad(output.square().sum(), parameters), strict=True)))
        found[-1]["output"] = output.detach()
    assert_close(*found, 1e-5)


@pytest.mark.parametrize("key", kinds_first(key for key in LEARNED if key not in WITH_ATTENTION))
def test_dimensions_of_tokens(key: str) -> None:
    """None, as those of one vector have, and one: as two are."""
    model, x = mixed(LinearNet(), key, example_inputs=(vectors(),)), vectors()[:1]

    def run(x: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        output = model(x)
        output.sin().sum().backward()
        return {"output": output.detach().flatten()} | all_gradients(model)

    assert_close(run(x), run(x[0]), 1e-5)
    assert_close(run(x[:, :1]), run(x[0, 0]), 1e-5)


class Windows(nn.Module):
    """Sees positions in rows and columns, and between its adds in one row, turned, or in other places."""

    def __init__(self, views: str) -> None:
        super().__init__()
        self.views, self.norm_1, self.norm_2 = views, nn.LayerNorm(8), nn.LayerNorm(8)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        x = x + self.one(self.norm_1(x))
        if self.views == "reshaped":
            x = x.reshape(b, -1, c)
        elif self.views == "turned":
            x = x.transpose(1, 2)
        elif self.views == "indexed":
            x = x[:, [2, 0, 1]].flip(2).roll(1, 2)[None, ..., None, :]
        x = x + self.two(self.norm_2(x))
        if self.views == "reshaped":
            x = x.reshape(b, h, w, c)
        elif self.views == "turned":
            x = x.transpose(1, 2)
        elif self.views == "indexed":
            x = x.select(0, 0)[:, :, :, 0].roll(-1, 2).flip(2).index_select(1, torch.tensor([1, 2, 0]))
        return x


class Channels(nn.GroupNorm):
    """Divides each position of a picture by the size of its channels; the picture may be in rows or in one row."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(1, keepdim=True) + self.eps).rsqrt()


class Pictures(nn.Module):
    """Has channels in front of positions, which it sees in one row, turned, or in other places between its adds."""

    def __init__(self, views: str) -> None:
        super().__init__()
        self.views, self.norm_1, self.norm_2 = views, Channels(1, 8), Channels(1, 8)
        self.one, self.two = nn.Conv2d(8, 8, 1), (nn.Conv1d if views == "reshaped" else nn.Conv2d)(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x + self.one(self.norm_1(x))
        if self.views == "reshaped":
            x = x.flatten(2)
        elif self.views == "turned":
            x = x.transpose(2, 3)
        elif self.views == "indexed":
            x = x[:, :, [2, 0, 1]].flip(3).roll(1, 3)
        x = x + self.two(self.norm_2(x))
        if self.views == "reshaped":
            x = x.view(shape)
        elif self.views == "turned":
            x = x.transpose(2, 3)
        elif self.views == "indexed":
            x = x.roll(-1, 3).flip(3).index_select(2, torch.tensor([1, 2, 0]))
        return x


VIEWS = [(views, block) for block in (Windows, Pictures) for views in ("reshaped", "turned", "indexed")]
FIRST = [(key, VIEWS[0]) for key in QUICK]


@pytest.mark.parametrize(
    ("key", "views", "block"),
    [
        pytest.param(key, *way, marks=() if key == "muddformer" or (key, way) in FIRST else pytest.mark.slow)
        for key in LEARNED
        if key not in WITH_ATTENTION
        for way in VIEWS
    ],
)
def test_other_dimensions_between_adds(key: str, views: str, block: type[nn.Module]) -> None:
    """Weights and scores of tokens go along: the network without the views is the same one."""
    x, found = torch.linspace(-2, 2, 2 * 3 * 5 * 8).sin().view(2, 3, 5, 8), []
    x = x.movedim(-1, 1) if block is Pictures else x
    for seen in ("", views):
        torch.manual_seed(0)
        blocks = nn.Sequential(*(block(seen) for _ in range(3)))
        model = mixed(blocks, key, example_inputs=(x,), granularity="sublayer")
        model(x).sin().sum().backward()
        found.append({name: grad.flatten() for name, grad in all_gradients(model).items()})
    assert_close(*found, 2e-4)


class Clips(Pictures):
    """Sees all pictures of a clip at once: channels are elsewhere in between."""

    def __init__(self) -> None:
        super().__init__("")
        self.two = nn.Conv3d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.one(self.norm_1(x))
        x = x.unflatten(0, (2, 3)).transpose(1, 2)
        x = x + self.two(self.norm_2(x))
        return x.transpose(1, 2).flatten(0, 1)


class ChannelsLast(nn.Module):
    """Adds in another order of dimensions than its caller knows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = x + self.f(self.norm(x))
        return x.permute(0, 3, 1, 2)


@pytest.mark.parametrize("size", [5, 8])  # as many columns as channels: their number does not tell
@pytest.mark.parametrize("block", [Clips, ChannelsLast])
@pytest.mark.parametrize("key", kinds_first(key for key in LEARNED if key not in WITH_ATTENTION))
def test_channels_that_are_elsewhere_between_views(key: str, block: type[nn.Module], size: int) -> None:
    """They come back, but values of tokens cannot go along where there are any."""
    blocks, x = nn.Sequential(block(), block(), block()), torch.randn(6, 8, 4, size)
    name, options = EVERY[key]
    if rewire.topologies.make_topology(name, options).by_token:
        with pytest.raises(
            rewire.UnsupportedTopology, match=r"channels leave their dimension, -?\d: .*'ancre-ingoing'"
        ):
            compiled(blocks, key, example_inputs=(x,), validate=False)
        return
    compiled(blocks, key, example_inputs=(x,), start="paper")


class Orders(nn.Module):
    """Turns its state by what an attribute says, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
        self.order = self.back = (0, 1, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(self.norm(x))
        return x.permute(self.order).permute(self.back)


@pytest.mark.parametrize("shape", [(6, 8, 4, 5), (8, 8, 8, 8)])  # of the second, sizes do not tell
@pytest.mark.parametrize("key", kinds_first(key for key in LEARNED if key not in WITH_ATTENTION))
def test_channels_that_are_elsewhere_where_no_run_has_shown_it(key: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    model = nn.Sequential(Orders(), Orders(), Orders())
    rewired = compiled(model, key, start="paper", example_inputs=(x,), validate=False)
    want = rewired(x)
    for block in rewired:
        block.order, block.back = (0, 2, 3, 1), (0, 3, 1, 2)
    name, options = EVERY[key]
    if rewire.topologies.make_topology(name, options).by_token:
        with pytest.raises(rewire.UnsupportedCall, match=r"dimension -3 is not that of their 8 channels"):
            rewired(x)
        return
    torch.testing.assert_close(rewired(x), want)


@pytest.mark.parametrize("key", kinds_first(EVERY))
def test_low_precision(key: str) -> None:
    model = mixed(llama(), key)
    with torch.no_grad():
        want = model(ids()).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(model(ids()).logits.float(), want, rtol=0.1, atol=0.1)
        low = copy.deepcopy(model).bfloat16()
        held = [p for connection in rewire.connections(low).values() for p in connection.parameters()]
        assert {p.dtype for p in held} <= {torch.float32}
        out = low(ids()).logits
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), want, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("key", kinds_first(LEARNED))
def test_saved_and_read_again(key: str, tmp_path: Path) -> None:
    model = mixed(llama(), key)
    again = compiled(llama(), key, start="paper", validate=False)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    again.load_state_dict(torch.load(tmp_path / "model.pt"))
    pickled = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        want = model(ids()).logits
        for other in (again, copy.deepcopy(model), pickled):
            assert torch.equal(other(ids()).logits, want)
    (table,) = rewire.coefficients(model).values()
    assert table.dtype == torch.float32 and table.dim() == 2 and not table.requires_grad and table.isfinite().all()
    assert torch.equal(table, matrices(tmp_path / "model.pt")["model.layers"])


@pytest.mark.parametrize(
    "key", one_in(3, ["residual", "ancre-ingoing", "denseformer-2x2", "grn-v2-last", "hc-dynamic", "mhc", *GROUPED])
)
def test_plots_of_its_matrix(key: str, tmp_path: Path) -> None:
    tables = rewire.coefficients(mixed(llama(), key))
    for plot in (plot_heatmap, plot_arcs):
        plot(tables, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").stat().st_size > 1000


class Mixer(nn.Module):
    """Mixes positions, then channels, and turns its state for it, or the branch alone."""

    def __init__(self, turns_state: bool) -> None:
        super().__init__()
        self.turns_state = turns_state
        self.across = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6))
        self.within = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        if self.turns_state:
            x = x.transpose(1, 2)
            x = x + self.across(x)
            x = x.transpose(1, 2)
        else:
            x = x + self.across(x.transpose(1, 2)).transpose(1, 2)
        return x + self.within(x)


@pytest.mark.parametrize("key", kinds_first(key for key in LEARNED if key not in WITH_ATTENTION))
def test_a_state_that_is_turned_to_mix_positions(key: str) -> None:
    x, found = torch.randn(2, 6, 8), []
    name, options = EVERY[key]
    start = "paper" if key in NOT_PRESERVING else "preserve"
    nets = [nn.Sequential(*(Mixer(turns) for _ in range(3))) for turns in (False, True)]
    nets[1].load_state_dict(nets[0].state_dict())
    if rewire.topologies.make_topology(name, options).needs_width:
        with pytest.raises(rewire.UnsupportedTopology, match="have their channels in dimension -"):
            compiled(nets[1], key, example_inputs=(x,), start=start)
        return
    for net in nets:
        model = mixed(net, key, example_inputs=(x,), granularity="sublayer")
        model(x).sin().sum().backward()
        found.append(all_gradients(model))
    assert_close(*found, 2e-4)


class Stage(nn.Module):
    """Takes its states in rows of its own width, without weights that change the width."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.width, self.blocks = width, nn.Sequential(*(PreNorm(width) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x.reshape(len(x), -1, self.width))


@pytest.mark.parametrize(
    ("stages", "trunks"),
    [
        (((16, 2), (8, 2), (4, 3)), ["0.blocks", "1.blocks", "2.blocks"]),
        (((16, 2), (8, 2), (16, 2)), ["0.blocks", "1.blocks", "2.blocks"]),
        (((16, 2), (8, 1), (16, 2)), ["0.blocks", "1.blocks.0", "2.blocks"]),
    ],
)
@pytest.mark.parametrize("key", FEW)
def test_stages_of_other_widths_behind_views(key: str, stages: tuple[tuple[int, int], ...], trunks: list[str]) -> None:
    x = torch.randn(2, 3, 16)
    net = nn.Sequential(*(Stage(width, depth) for width, depth in stages))
    assert [trunk.name for trunk in rewire.inspect(net, example_inputs=(x,)).trunks] == trunks
    model = compiled(net, key, example_inputs=(x,), start="paper" if key in NOT_PRESERVING else "preserve")
    homes = [module for name, module in model.named_modules() if name.endswith("depth_connections")]
    assert sum(len([*home.children()]) for home in homes) == len(trunks)
