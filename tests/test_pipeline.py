"""Pipeline parallelism: parts of a rewired model, one after the other and on several real processes."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pipeline_worker as worker
import pytest
import torch
import two_processes
from every_topology import LEARNED
from models import PreNorm, Stack
from torch import nn

import rewire
from rewire.pipeline import Boundary

LIGHT = ["ancre-ingoing", "grn-v3", "attnres", "hc-dynamic", "dca", "muddformer", "x0-lambdas"]
HEAVY = [key for key in LEARNED if key not in LIGHT]


def parts_of(model: nn.Module, stages: int) -> list[nn.Module]:
    parts = [worker.cut(model, number, stages) for number in range(stages)]
    for part in parts:
        rewire.pipeline_stage(part)
    return parts


def check_one_after_the_other(key: str) -> None:
    """In one process, without a schedule: outputs and gradients of all parts are those of the model."""
    model = worker.make(key, depth=3)
    expected = worker.gradients(copy.deepcopy(model))
    parts = parts_of(model, 3)
    value: Any = (worker.tokens(),)
    for part in parts:
        value = part(*value)
    # Products with fewer columns, those of a stage's own units, may round otherwise.
    torch.testing.assert_close(value, model(worker.tokens()), rtol=1e-12, atol=1e-12)
    worker.loss(value, worker.targets()).backward()
    actual: dict[str, torch.Tensor] = {}
    for part in parts:
        found = {name: p.grad for name, p in part.named_parameters() if p.grad is not None}
        assert not found.keys() & actual.keys()
        actual |= found
    for name, error in worker.errors(expected, actual).items():
        assert error <= (1e-6 if "depth_connections" in name else 1e-10), f"{key}: {name}, {error:.1e}"


@pytest.mark.parametrize("key", LIGHT)
def test_parts_one_after_the_other_are_the_model(key: str) -> None:
    check_one_after_the_other(key)


@pytest.mark.slow
@pytest.mark.parametrize("key", HEAVY)
def test_parts_of_any_topology_are_the_model(key: str) -> None:
    check_one_after_the_other(key)


@pytest.mark.parametrize("key", ["ancre-ingoing", "muddformer"])
def test_a_block_that_reads_ahead(key: str) -> None:
    """A post-norm block hands on what the next one reads; the boundary goes back to what was there before that."""

    class PostNorm(worker.Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm_1(x + self.self_attn(x))
            return self.norm_2(x + self.mlp(x))

    torch.manual_seed(0)
    model = worker.Model(4)
    model.layers = nn.ModuleDict({str(number): PostNorm() for number in range(4)})
    model = worker.mixed(model, key, example_inputs=(worker.tokens(),)).double()
    first, second = parts_of(model, 2)
    (message,) = first(worker.tokens())
    # x_0 .. x_4, as post-norm units have one add each; and all logits
    weights = 9 * 8 // 2 if key == "ancre-ingoing" else 0
    assert message.numel() == worker.tokens().numel() * (5 * worker.WIDTH + 2 * math.ceil(weights / 4 / 48))
    torch.testing.assert_close(second(message), model(worker.tokens()), rtol=1e-12, atol=1e-12)


def run(tmp_path: Path, ranks: int, *scenarios: str) -> None:
    """Functions of pipeline_worker.py, one after the other in the same processes."""
    two_processes.play(Path(worker.__file__), tmp_path, *scenarios, ranks=ranks)


@pytest.mark.slow
def test_schedules(tmp_path: Path) -> None:
    run(tmp_path, 2, "first_of_all", "out_of_turn", "messages", "two_passes_in_groups")


@pytest.mark.slow
def test_schedules_on_four_processes(tmp_path: Path) -> None:
    run(tmp_path, 4, "single_stages", "several_stages", "sharded", "zero_bubble_sharded", "sharded_tokens")


@pytest.mark.slow
def test_only_what_is_new_to_a_rank_crosses(tmp_path: Path) -> None:
    run(tmp_path, 2, "cached")


@pytest.mark.slow
def test_ranks_with_other_recipes(tmp_path: Path) -> None:
    run(tmp_path, 4, "two_pipelines", "other_recipes")


@pytest.mark.slow
def test_every_kind_of_topology(tmp_path: Path) -> None:
    run(tmp_path, 2, "single_stages", "every_kind", "zero_bubble", "traced")


# -- what crosses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "states", "weights"),
    [
        ("ancre-ingoing", 3, 4 * 5 // 2),  # b + 1 after b = 2 of T = 4 blocks; T (T + 1) / 2 logits
        ("grn-v3", 3, 0),
        ("attnres", 5, 0),  # two units in a block
        ("muddformer", 3, 0),
        ("hc-dynamic", 4, 0),  # n streams
        ("hc-static", 4, 0),  # without the next read
        ("x0-lambdas", 2, 2 * 4),
    ],
)
def test_what_crosses(key: str, states: int, weights: int) -> None:
    """In hidden states, and numbers of connection weights: the plain model sends one hidden state."""
    model = worker.make(key, dtype=torch.float32)
    first, _ = parts_of(model, 2)
    tokens = worker.BATCH * worker.LENGTH
    (message,) = first(worker.tokens())
    assert message.numel() == tokens * (states * worker.WIDTH + 2 * math.ceil(weights / 2 / tokens))


def test_scores_of_attention_residuals_do_not_cross() -> None:
    """They are computed again from the states of the history."""
    first, _ = parts_of(worker.make("attnres-additive", dtype=torch.float32), 2)
    (message,) = first(worker.tokens())
    assert message.numel() == worker.tokens().numel() * (2 * 2 + 1) * worker.WIDTH  # two units a block


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("key", ["ancre-ingoing", "mhc-delayed", "hc-static"])
def test_a_message_is_what_was_packed(key: str, dtype: torch.dtype) -> None:
    """Bits of float32 numbers survive in any dtype, for any number of tokens."""
    (connection,) = rewire.connections(worker.make(key)).values()
    message = Boundary(connection, 4).message
    for tokens in ((3, 5), (1, 1), (7,)):
        shapes = [(*tokens, *shape) for shape in message.trailing]
        states = [torch.randn(shape, dtype=dtype) for shape in shapes]
        states = [
            x.float() if known and dtype.itemsize < 4 else x for x, known in zip(states, message.precise, strict=True)
        ]
        given = [*states, *(torch.randn(shape) for shape in message.weights)]
        packed = message.packed(given)
        assert packed.shape[:-1] == tokens and message.fits(packed) and not packed._is_view()
        assert all(torch.equal(a, b) for a, b in zip(message.parts(packed), given, strict=True))


@pytest.mark.parametrize(
    ("key", "pieces"),
    [
        ("grn-v3", [("b", "w")] * 4),
        ("hc-dynamic", [("dynamic", "scale", "static")] * 4),
        ("ancre-ingoing", [("logits",)]),
    ],
)
def test_weights_are_on_the_stage_of_their_unit(key: str, pieces: list[tuple[str, ...]]) -> None:
    model = worker.make(key)
    parts = parts_of(model, 4)
    found = [{name.rpartition("_")[0] or name for name, _ in c.named_parameters()} for c in map(only, parts)]
    assert found == [{*names} for names in pieces] + [set()] * (4 - len(pieces))
    assert sum(p.numel() for part in parts for p in only(part).parameters()) == sum(
        p.numel() for p in only(model).parameters()
    )
    with pytest.raises(rewire.RewireError, match=r"on the pipeline stages of its units"):
        rewire.coefficients(parts[1])


def only(model: nn.Module) -> Any:
    (connection,) = rewire.connections(model).values()
    return connection


@pytest.mark.parametrize("key", ["grn-v3", "attnres-groups", "mhc-cayley"])
def test_checkpoints_of_stages_and_of_whole_models(key: str) -> None:
    """Weights by unit load into other cuts as they are, and are converted into a whole model's and back."""
    model = worker.make(key)
    expected = {name: p.detach().clone() for name, p in only(model).named_parameters()}
    saved: dict[str, Any] = {}
    for part in parts_of(model, 4):
        saved |= only(part).state_dict()
    for cut in parts_of(model, 2):
        only(cut).reset_parameters()
        only(cut).load_state_dict(saved)
        kept = {**only(cut).state_dict()}
        only(cut).reset_parameters()
        only(cut).load_state_dict({**expected, "_extra_state": only(model).get_extra_state()})
        assert all(torch.equal(kept[name], value) for name, value in only(cut).state_dict().items())
    only(model).reset_parameters()
    only(model).load_state_dict(saved)
    assert all(torch.equal(expected[name], p) for name, p in only(model).named_parameters())


def test_a_sequence_of_blocks() -> None:
    """A stage need not be what is left of the model: any module around its blocks will do."""
    model = worker.make("ancre-ingoing")
    blocks = list(copy.deepcopy(model).layers.values())
    stages = [nn.Sequential(model.embed, *blocks[:2]), nn.Sequential(*blocks[2:], model.norm, model.head)]
    for stage in stages:
        rewire.pipeline_stage(stage)
    assert torch.equal(stages[1](*stages[0](worker.tokens())), model(worker.tokens()))
    assert [name for name, _ in stages[0].named_parameters() if "depth" in name] == [
        "1.depth_connections.layers.logits"
    ]


@pytest.mark.parametrize("key", ["ancre-ingoing", "hc-dynamic"])
@pytest.mark.parametrize("head", [True, False])
def test_a_stage_with_a_whole_trunk(key: str, head: bool) -> None:
    """[embedding] [all blocks], and [all blocks] [head]: plain hidden states cross."""
    model = worker.make(key)
    blocks, rest = copy.deepcopy(model), copy.deepcopy(model)
    rest.layers = nn.ModuleDict()
    for name in ("norm", "head") if head else ("embed",):
        setattr(blocks, name, None)
    for name in ("embed",) if head else ("norm", "head"):
        setattr(rest, name, None)
    stages = [blocks, rest] if head else [rest, blocks]
    for stage in stages:
        rewire.pipeline_stage(stage)
    assert torch.equal(stages[1](stages[0](worker.tokens())), model(worker.tokens()))


def test_a_stage_with_a_whole_trunk_and_a_tied_embedding() -> None:
    """It has every parameter of the model, but not the head that uses one of them once more."""
    model: Any = worker.Model(4)
    model.head = nn.Linear(worker.WIDTH, worker.VOCABULARY, bias=False)
    model.head.weight = model.embed.weight
    model = worker.mixed(model, "ancre-ingoing", example_inputs=(worker.tokens(),))
    first, last = copy.deepcopy(model), copy.deepcopy(model)
    first.head, last.embed, last.norm, last.layers = None, None, None, nn.ModuleDict()
    for stage in (first, last):
        rewire.pipeline_stage(stage)
    assert torch.equal(last(first(worker.tokens())), model(worker.tokens()))


@pytest.mark.parametrize("key", ["ancre-ingoing", "mhc"])
def test_a_stage_with_a_vision_tower(key: str) -> None:
    """The tower's trunk is whole on the first stage, that of the language model is cut."""

    class Seeing(worker.Model):
        def __init__(self) -> None:
            super().__init__(4)
            self.vision: nn.Module | None = worker.Model(2)
            self.vision.head = nn.Linear(worker.WIDTH, worker.WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.cat([self.vision(x), self.embed(x)], 1) if self.vision is not None else x
            for layer in self.layers.values():
                x = layer(x)
            return self.head(self.norm(x)) if self.norm is not None else x

    torch.manual_seed(0)
    trunks = ["layers", "vision.layers"]
    model = worker.mixed(Seeing(), key, example_inputs=(worker.tokens(),), trunks=trunks).double()
    stages: list[Any] = [worker.cut(model, number, 2) for number in range(2)]
    stages[1].vision = None
    for stage in stages:
        rewire.pipeline_stage(stage)
    output = stages[1](*stages[0](worker.tokens()))
    torch.testing.assert_close(output, model(worker.tokens()), rtol=1e-12, atol=1e-12)
    output.sum().backward()
    learned = [p for stage in stages for c in rewire.connections(stage).values() for p in c.parameters()]
    assert learned and all(p.grad is not None for p in learned)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_stage_that_was_rewired_by_itself() -> None:
    part = worker.cut(worker.Model(4), 0, 2)
    with pytest.raises(rewire.RewireError, match=r"'norm' beside trunk 'layers' was set to None"):
        rewire.compile(part, "ancre-ingoing", example_inputs=(worker.tokens(),))
    rewired = rewire.compile(part, "ancre-ingoing", example_inputs=(worker.tokens(),), trunks=["layers"])
    with pytest.raises(rewire.RewireError, match=r"Rewire the whole model, then cut it"):
        rewire.pipeline_stage(rewired)


def test_a_stage_that_gets_a_tensor() -> None:
    model = worker.make("ancre-ingoing")
    hidden = torch.randn(worker.BATCH, worker.LENGTH, worker.WIDTH, dtype=torch.float64)
    with pytest.raises(rewire.UnsupportedCall, match=r"takes the tensor .* and was given"):
        parts_of(model, 2)[1](hidden)
    with pytest.raises(rewire.OutOfOrder, match=r"call rewire.pipeline_stage on every stage"):
        worker.cut(model, 1, 2)(hidden)


def test_a_cut_inside_a_unit() -> None:
    class Halves(nn.Module):
        """Attentions and feed-forwards are blocks of their own."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Half(n % 2 == 0) for n in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    class Half(nn.Module):
        def __init__(self, attention: bool) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(worker.WIDTH)
            self.branch = nn.Linear(worker.WIDTH, worker.WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.branch(self.norm(x))

    x = torch.randn(2, 3, worker.WIDTH)
    model = rewire.compile(Halves(), "ancre-ingoing", example_inputs=(x,))
    (connection,) = rewire.connections(model).values()
    connection.layout = connection.layout.of(connection.layout.topology, (1, 1, 2, 2))
    with pytest.raises(rewire.UnsupportedCall, match=r"after residual add 1, in the middle of one of its units"):
        Boundary(connection, 1)


def test_two_streams_at_one_place() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = worker.Model(4).layers, worker.Model(4).layers

        def forward(self, x: torch.Tensor) -> Any:
            y = x
            for layer in self.left.values():
                x = layer(x)
            for layer in self.right.values():
                y = layer(y)
            return x, y

    x = torch.randn(2, 3, worker.WIDTH)
    model = rewire.compile(Two(), "ancre-ingoing", example_inputs=(x,))
    for name in "23":
        del model.left[name], model.right[name]
    with pytest.raises(rewire.RewireError, match=r"'left' and 'right' would cross"):
        rewire.pipeline_stage(model)


def test_a_stage_without_learned_weights_is_reset() -> None:
    model = rewire.compile(Stack(PreNorm), "ancre-ingoing", validate=False)
    (connection,) = rewire.connections(model).values()
    connection.staged(4, None).reset_parameters()
    assert not connection.logits.any()
