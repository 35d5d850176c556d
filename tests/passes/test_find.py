"""How residual adds are linked into trunks: order, names, blocks, owners, widths."""

from __future__ import annotations

import pytest
import torch
from comparing import assert_close, evaluate
from models import (
    CASES,
    EDSR,
    WIDTH,
    Backwards,
    ConvNet,
    EncoderDecoder,
    LoopGPT,
    MaskedStack,
    NanoGPT,
    PostNorm,
    PreNorm,
    ProjectionNet,
    Shared,
    Stack,
    TwoWidths,
    WithMask,
    vectors,
    wrapped,
)
from torch import Tensor, nn
from written_nets import written_input, written_net

import rewire
from rewire.patterns.tiny import tiny_model


@pytest.mark.parametrize("name", list(CASES))
def test_hand_written_models(name: str) -> None:
    model, expected = CASES[name].make(), CASES[name].trunks
    assert {t.name: (len(t.sites), t.blocks) for t in rewire.inspect(model).trunks} == expected


@pytest.mark.parametrize("name", list(CASES))
def test_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        model = CASES[name].make()
    assert rewire.inspect(model) == rewire.inspect(CASES[name].make())


def test_nanogpt() -> None:
    (trunk,) = rewire.inspect(NanoGPT()).trunks
    assert [site.name for site in trunk.sites] == [
        f"transformer.h.{i}.{branch}" for i in range(3) for branch in ("attn", "mlp")
    ]
    assert trunk.units == (1, 1, 2, 2, 3, 3) and trunk.owner == "" and not trunk.post_norm
    assert {site.width for site in trunk.sites} == {WIDTH}


def test_adds_in_the_loop_of_the_parent() -> None:
    (trunk,) = rewire.inspect(LoopGPT()).trunks
    assert [(site.name, site.block) for site in trunk.sites[:3]] == [
        ("layers.0.0", ""),
        ("layers.0.1", ""),
        ("layers.1.0", ""),
    ]
    assert trunk.units == (1, 1, 2, 2, 3, 3) and trunk.owner == ""


def test_wrappers_in_sequentials() -> None:
    (trunk,) = rewire.inspect(wrapped()).trunks
    assert [site.name for site in trunk.sites] == [f"{i}.{j}.fn" for i in (1, 2, 3) for j in (0, 1)]
    assert trunk.units == (1, 1, 2, 2, 3, 3)


def test_post_norm() -> None:
    (trunk,) = rewire.inspect(Stack(PostNorm)).trunks
    assert trunk.post_norm and trunk.units == (1, 1, 2, 2, 3, 3)


def test_encoder_and_decoder_are_two_trunks() -> None:
    encoder, decoder = rewire.inspect(EncoderDecoder()).trunks
    assert (encoder.name, decoder.name) == ("encoder", "decoder")
    assert [site.kind for site in decoder.sites[:3]] == ["attention", "cross-attention", "ffn"]


def test_a_shared_block_is_counted_as_often_as_it_is_called() -> None:
    (trunk,) = rewire.inspect(Shared()).trunks
    assert [site.name for site in trunk.sites] == ["layers.0.attn", "layers.0.mlp"] * 3
    assert trunk.units == (1, 1, 2, 2, 3, 3) and trunk.blocks == 3


def test_albert_shares_its_layer() -> None:
    (trunk,) = rewire.inspect(tiny_model("albert")).trunks
    assert len(trunk.sites) == 6 and trunk.blocks == 3 and trunk.post_norm
    assert len({site.name for site in trunk.sites}) == 2 and trunk.owner == "albert.encoder"


def test_a_projected_shortcut_starts_a_trunk() -> None:
    first, second = rewire.inspect(ProjectionNet()).trunks
    assert [site.block for site in first.sites] == ["layer1.0", "layer1.1"]
    assert [site.block for site in second.sites] == ["layer2.0", "layer2.1", "layer2.2"]
    assert {site.width for site in first.sites} == {8} and 16 in {site.width for site in second.sites}
    assert all("relu" in site.post[-1] for trunk in (first, second) for site in trunk.sites)


def test_a_map_between_stages_splits_them() -> None:
    narrow, wide = rewire.inspect(TwoWidths()).trunks
    assert ({site.width for site in narrow.sites}, {site.width for site in wide.sites}) == ({16}, {WIDTH})


class Video(nn.Module):
    """Blocks over the patches of each frame, then over the frames of each patch, behind a norm and positions."""

    def __init__(self, frames: int) -> None:
        super().__init__()
        self.frames, self.norm = frames, nn.LayerNorm(WIDTH)
        self.spatial, self.temporal = (nn.ModuleList([PreNorm(), PreNorm()]) for _ in range(2))
        self.times = nn.Parameter(torch.randn(1, frames, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.spatial:
            x = block(x)
        x = self.norm(x).view(-1, self.frames, *x.shape[1:]).transpose(1, 2)
        x = x.reshape(-1, self.frames, WIDTH) + self.times
        for block in self.temporal:
            x = block(x)
        return x


@pytest.mark.parametrize("frames", [2, 4])
def test_states_in_another_order_are_another_trunk(frames: int) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(2 * frames, 4, WIDTH), Video(frames)
    rewired = rewire.compile(model, "ancre-ingoing", start="paper", example_inputs=(x,))
    assert list(rewire.connections(rewired)) == ["spatial", "temporal"]
    before = rewired(x)
    with torch.no_grad():
        for weight in rewire.connections(rewired)["temporal"].parameters():
            weight.add_(torch.randn_like(weight))
    assert not torch.equal(before, rewired(x))


class CastNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x.to(dtype=self.norm.weight.dtype)))


def test_the_width_is_read_behind_a_cast() -> None:
    net = nn.Sequential(CastNorm(), CastNorm(), CastNorm())
    (trunk,) = rewire.inspect(net).trunks
    assert {site.width for site in trunk.sites} == {WIDTH}


class MapInside(nn.Module):
    """One list of blocks, with a linear map in the middle of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(PreNorm(), PreNorm(), nn.Linear(WIDTH, WIDTH), PreNorm(), PreNorm())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def test_a_map_inside_one_container_splits_it() -> None:
    first, second = rewire.inspect(MapInside()).trunks
    assert [site.block for site in first.sites] == ["blocks.0"] * 2 + ["blocks.1"] * 2
    assert [site.block for site in second.sites] == ["blocks.3"] * 2 + ["blocks.4"] * 2
    assert first.name != second.name


def test_a_long_skip_is_rejected_and_the_trunk_inside_found() -> None:
    report = rewire.inspect(EDSR())
    (trunk,) = report.trunks
    assert [site.block for site in trunk.sites] == ["body.0", "body.1", "body.2"]
    assert report.skipped == {"body": "a shortcut around a whole trunk"}


def test_a_single_add_is_reported() -> None:
    report = rewire.inspect(ConvNet(depth=1))
    assert report.trunks == () and list(report.skipped) == ["blocks.0.conv1"]
    assert "a single residual add" in report.skipped["blocks.0.conv1"]


def test_models_inside_a_model_are_found() -> None:
    pair = nn.ModuleDict({"first": NanoGPT(), "second": Stack(PreNorm)})
    assert [(t.name, t.owner) for t in rewire.inspect(pair).trunks] == [
        ("first.transformer.h", "first"),
        ("second.layers", "second"),
    ]


def test_one_block_by_itself() -> None:
    (trunk,) = rewire.inspect(PreNorm()).trunks
    assert [site.name for site in trunk.sites] == ["attn", "mlp"] and trunk.name == "PreNorm"


def test_blocks_that_return_tuples() -> None:
    (trunk,) = rewire.inspect(MaskedStack(WithMask)).trunks
    assert trunk.units == (1, 1, 2, 2, 3, 3)


@pytest.mark.parametrize("model_type", ["llama", "t5", "bert", "swin", "gpt_neox"])
def test_transformers_on_the_meta_device(model_type: str) -> None:
    with torch.device("meta"):
        model = tiny_model(model_type)
    assert rewire.inspect(model) == rewire.inspect(tiny_model(model_type))


def test_t5_names_its_trunks_and_kinds() -> None:
    encoder, decoder = rewire.inspect(tiny_model("t5")).trunks
    assert (encoder.name, encoder.owner, decoder.name, decoder.owner) == (
        "encoder.block",
        "encoder",
        "decoder.block",
        "decoder",
    )
    assert [site.kind for site in encoder.sites] == ["attention", "ffn"] * 3
    assert [site.kind for site in decoder.sites] == ["attention", "cross-attention", "ffn"] * 3


def test_the_report_prints_as_tables() -> None:
    text = " ".join(str(rewire.inspect(NanoGPT())).split())
    assert "transformer.h: 6 residual adds in 3 blocks, width 32, pre-norm" in text
    assert "transformer.h.2" in text and "ffn" in text
    assert "a shortcut around a whole trunk" in str(rewire.inspect(EDSR()))
    assert "No residual stream was found." in str(rewire.inspect(nn.Linear(2, 2)))


def test_blocks_are_linked_in_the_order_in_which_their_parent_calls_them() -> None:
    (trunk,) = rewire.inspect(Backwards()).trunks
    assert list(dict.fromkeys(site.block for site in trunk.sites)) == ["blocks.2", "blocks.1", "blocks.0"]


class Adding(nn.Module):
    """A block of two adds, the second branch a container."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x.sin())
        return x + self.mlp(x.cos())


class Encoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adding() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Staged(nn.Module):
    """Two stages of a U-net, of one width, each with a list of its own; only the first of each side is in the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.ModuleList([Encoder(2)]), nn.ModuleList([Encoder(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.up[0](self.down[0](x))


class WithAnAdd(Encoder):
    """An encoder that adds something before its layers do."""

    def __init__(self) -> None:
        super().__init__(2)
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.own(x))


class InParts(nn.Module):
    """One stream through lists of blocks, a block by itself, and a module with a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = (nn.ModuleList(Adding() for _ in range(2)) for _ in range(2))
        self.mid, self.encoder = Adding(), Encoder(2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.early:
            x = block(x)
        x = self.mid(x)
        for block in self.late:
            x = block(x)
        return self.encoder(x)


class BlockThenEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.encoder = Adding(), WithAnAdd()

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.block(x))


class AddsToParts(nn.Module):
    """The same, with the adds in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(n)) for n in (2, 3))

    def forward(self, x: Tensor) -> Tensor:
        for f in self.early:
            x = x + f(x.sin())
        for f in self.late:
            x = x + f(x.cos())
        return x


@pytest.mark.parametrize("given", [(), (torch.ones(2, 3, WIDTH),)], ids=["traced", "run"])
def test_the_elements_of_several_containers_are_units(given: tuple[Tensor, ...]) -> None:
    (trunk,) = rewire.inspect(InParts(), example_inputs=given or None).trunks
    assert [site.name for site in trunk.sites][:4] == ["early.0.attn", "early.0.mlp", "early.1.attn", "early.1.mlp"]
    assert trunk.units == (1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7)
    (trunk,) = rewire.inspect(AddsToParts(), example_inputs=given or None).trunks
    assert trunk.units == (1, 2, 3, 4, 5)
    (trunk,) = rewire.inspect(Staged(), example_inputs=given or None).trunks
    assert trunk.units == (1, 1, 2, 2, 3, 3, 4, 4, 5, 5)
    (trunk,) = rewire.inspect(BlockThenEncoder(), example_inputs=given or None).trunks
    assert trunk.units == (1, 1, 2, 3, 3, 4, 4)


class Joint(nn.Module):
    """Two streams; they are returned in another order than that in which they come, as in Flux."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = PreNorm(), PreNorm()

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        mean = image.mean(1, keepdim=True)
        image = image + self.image.attn(self.image.ln_1(image))
        image = image + self.image.mlp(self.image.ln_2(image))
        text = text + self.text.attn(self.text.ln_1(text + mean))
        text = text + self.text.mlp(self.text.ln_2(text))
        return text, image


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Joint() for _ in range(3))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        for layer in self.layers[: sum(1 for _ in image)]:  # no trace knows how many
            text, image = layer(image, text)
        return torch.cat([text, image], dim=1)


def test_two_streams_through_blocks_whose_parent_cannot_be_traced() -> None:
    """They are told by the names of what a block returns and of what the next one takes."""
    model, inputs = Untraceable(), (torch.randn(3, 5, WIDTH), torch.randn(3, 4, WIDTH))
    rewired = rewire.compile(model, "residual", validate=False)
    assert [len(connection.layout.units) for connection in rewire.connections(rewired).values()] == [6, 6]
    assert torch.equal(rewired(*inputs), model(*inputs))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_inputs_that_were_given_count_more_than_a_trace(device: str) -> None:
    """Without validation, or on the meta device, copies are run there, where nothing is computed."""
    inputs = torch.randn(3, 5, WIDTH), torch.randn(3, 4, WIDTH)
    model = Untraceable()
    rewired = rewire.compile(model.to(device), "residual", validate=False, example_inputs=inputs)
    assert [len(connection.layout.units) for connection in rewire.connections(rewired).values()] == [6, 6]
    rewired, model = rewired.to_empty(device="cpu"), Untraceable()
    rewired.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(rewired(*inputs), model(*inputs))


class Experts(nn.Module):
    """Each expert runs if a token chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows, chosen = torch.zeros_like(x), self.gate(x).argmax(-1)
        for number, expert in enumerate(self.experts):
            if (chosen == number).any():
                rows = rows + expert(x) * (chosen == number).unsqueeze(-1)
        return rows


class Routed(nn.Module):
    """Without values, only every second add has a branch with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for linear, experts in self.layers:
            x = x + linear(x)
            x = x + experts(x)
        return x


def test_what_a_model_decides_by_values_is_seen_without_validation() -> None:
    """The meta device has no values: it is run on its own."""
    inputs = torch.randn(2, 5, WIDTH)
    rewired = rewire.compile(Routed(), "ancre-ingoing", example_inputs=inputs, validate=False)
    (trunk,) = rewire.inspect(rewired).trunks
    assert len(trunk.sites) == 6 and not rewire.inspect(rewired).left


def test_what_a_model_on_the_meta_device_decides_by_values_is_told(caplog: pytest.LogCaptureFixture) -> None:
    (left,) = rewire.inspect(Routed().to("meta"), torch.randn(2, 5, WIDTH)).left
    assert "decides by the value of a tensor" in left.why and left.written == "if (chosen == number).any():"
    assert "decides by the value of a tensor" in caplog.text


BRANCHES = [
    "h = self.f(x)\nh.add_(x)",
    "h = self.f(x)\nh.add_(x, alpha=1)",
    "h = self.f(x)\nh += x",
    "h = self.f(x).add_(x)",
]


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_trace_sees_what_is_added_to_a_branch_in_place(branch: str) -> None:
    net = written_net(f"{branch}\nx = h\nh = x * 1\nh.relu_()\nh = self.g(h)\nh.add_(x)\nreturn h")
    assert [len(trunk.sites) for trunk in rewire.inspect(net).trunks] == [6]
    rewired = rewire.compile(net, "ancre-ingoing", validate=False)
    given = (written_input(),)
    assert_close(evaluate(net, given, {}), evaluate(rewired, given, {}), 1e-5, 1e-4)


def test_a_trace_of_a_write_to_an_attribute_is_given_up() -> None:
    """As RWKV does to the scales of quantised weights; it raised AttributeError."""
    net = written_net("h = self.f(x)\nh.mT.mul_(1.0)\nx = x + h\nreturn x + self.g(x)")
    with pytest.raises(rewire.NoResidualAdds):
        rewire.compile(net, validate=False)
    assert [len(trunk.sites) for trunk in rewire.inspect(net, written_input()).trunks] == [6]


class Encoders(nn.Module):
    """One encoder for each kind of input."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = (nn.ModuleList(PreNorm(WIDTH) for _ in range(2)) for _ in range(2))

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        done = {}
        for name, x in given.items():
            for block in getattr(self, name):
                x = block(x)
            done[name] = x
        return done


def test_an_encoder_that_got_no_input_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Its blocks stay as they are."""
    net, given = Encoders(), {"image": vectors(width=WIDTH)}
    assert [each.path for each in rewire.inspect(net, (given,)).left if "did not run" in each.why] == ["text"]
    caplog.clear()
    rewired = rewire.compile(net, example_inputs=(given,))
    assert [*rewire.connections(rewired)] == ["image"] and "'text': its blocks" in caplog.text
    both = {"image": vectors(width=WIDTH), "text": vectors(width=WIDTH)}
    torch.testing.assert_close(rewired(both), net(both))
    assert not [each for each in rewire.inspect(net, (both,)).left if "did not run" in each.why]


class Answering(nn.Module):
    """An attention that may get keys and values from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, h: Tensor, past: Tensor | None) -> Tensor:
        q, k, v = self.q(h), self.k(h), self.v(h)
        k, v = (k, v) if past is None else (past, past)
        return nn.functional.scaled_dot_product_attention(q, k, v)


class AnsweringBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(8), Answering()

    def forward(self, x: Tensor, past: Tensor | None) -> Tensor:
        return x + self.attn(self.norm(x), past)


class Twice(nn.Module):
    """Runs its blocks with and without such keys, as one that learns to predict them does."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always, self.blocks, self.keys = always, nn.ModuleList(AnsweringBlock() for _ in range(3)), nn.Linear(8, 8)

    def run_blocks(self, x: Tensor, past: Tensor | None) -> Tensor:
        for block in self.blocks:
            x = block(x, past)
        return x

    def forward(self, x: Tensor) -> Tensor:
        y = self.run_blocks(x.tanh(), self.keys(x))
        return y * self.run_blocks(x.sigmoid(), None) if self.training or self.always else y


@pytest.mark.parametrize("topology", ["denseformer", "hc-static"])
@pytest.mark.parametrize("always", [False, True])
def test_two_passes_of_which_one_attends_to_something_else_are_of_one_trunk(always: bool, topology: str) -> None:
    rewired = rewire.compile(Twice(always), topology, example_inputs=(vectors(),))
    assert [len(connection.layout.units) for connection in rewire.connections(rewired).values()] == [3]


class CutBlock(nn.Module):
    """As the last layer of FlowState: it goes on with a part of the tokens."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.f, self.cut = nn.Linear(8, 8), cut

    def forward(self, x: Tensor) -> Tensor:
        skip = x[:, 2:] if self.cut else x
        f = torch.tanh(self.f(x))
        return (f[:, 2:] if self.cut else f) + skip


@pytest.mark.parametrize(("cuts", "connected"), [((0, 0, 0, 1), 3), ((0, 1, 0, 0), 2)])
def test_adds_to_a_part_of_the_state_are_named(cuts: tuple[int, ...], connected: int) -> None:
    net = nn.Sequential(*(CutBlock(bool(cut)) for cut in cuts), nn.Linear(8, 8))
    report = rewire.inspect(net, example_inputs=(torch.randn(2, 9, 8),))
    assert [len(trunk.sites) for trunk in report.trunks] == [connected]
    parts = [left.path for left in report.left if "a part of the state" in left.why]
    assert parts == [f"{cuts.index(1)}.f"]
