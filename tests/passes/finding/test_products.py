"""Projections that are products with weights in a forward, and no modules: each of them reads its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reading_apart import Apart, Reader, check_reads, projections_of
from torch import Tensor, nn

import rewire

WIDTH, HEADS = 16, 2


class Attention(nn.Module):
    """Three weights, the output's beside them."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("w_q", "w_k", "w_v", "w_o"):
            self.register_parameter(name, nn.Parameter(torch.randn(WIDTH, WIDTH) / 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.w_q), F.linear(x, weight=self.w_k), F.linear(bias=None, weight=self.w_v, input=x)
        return F.linear(F.scaled_dot_product_attention(q, k, v), self.w_o)


class ByOperator(Attention):
    def forward(self, x: Tensor) -> Tensor:
        k, q, v = (x + 0) @ self.w_k.T, x @ self.w_q, torch.matmul(x, self.w_v)
        return F.scaled_dot_product_attention(q, k, v) @ self.w_o


class ByMethod(Attention):
    def forward(self, x: Tensor) -> Tensor:
        k, q, v = x.matmul(self.w_k), (x * 1.0).matmul(other=self.w_q), x.matmul(self.w_v.float())
        return F.scaled_dot_product_attention(q, k, v).matmul(self.w_o)


class ByEinsum(nn.Module):
    """As TransformerLens has it."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("W_Q", "W_K", "W_V"):
            self.register_parameter(name, nn.Parameter(torch.randn(HEADS, WIDTH, WIDTH // HEADS) / 4))
        self.W_O = nn.Parameter(torch.randn(HEADS, WIDTH // HEADS, WIDTH) / 4)
        self.b_Q = nn.Parameter(torch.zeros(HEADS, WIDTH // HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q = torch.einsum("btd,hde->bthe", x, self.W_Q) + self.b_Q
        k, v = (torch.einsum("btd,hde->bthe", x, self.W_K), torch.einsum("btd,hde->bthe", x, self.W_V))
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        weights = torch.where(mask, scores, torch.tensor(float("-inf"))).softmax(-1)
        weights = torch.where(weights.isnan(), torch.zeros_like(weights), weights)
        return torch.einsum("bqhe,hed->bqd", torch.einsum("bhqk,bkhe->bqhe", weights, v), self.W_O)


def product(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


class ByHelper(Attention):
    """One function for all three, that calls another one."""

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        return product(x, weight).unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x, self.w_q), self.project(x, self.w_k), self.project(x, self.w_v)
        return F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), self.w_o)


class Packed(nn.Module):
    """As open_clip has it."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 4)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * WIDTH))
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        return self.attend(q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class PackedByHead(Packed):
    """As timm's EVA has it, but laid out by head; another product than `F.linear`."""

    def forward(self, x: Tensor) -> Tensor:
        made = (x @ self.in_proj_weight.t() + self.in_proj_bias).unflatten(-1, (HEADS, 3, -1)).transpose(1, 2)
        out = F.scaled_dot_product_attention(*made.unbind(-2))
        return self.out_proj(out.transpose(1, 2).flatten(2))


class Sliced(Packed):
    """As fairseq has it: one weight, three products."""

    def forward(self, x: Tensor) -> Tensor:
        b = self.in_proj_bias
        k = F.linear(x, self.in_proj_weight[WIDTH : 2 * WIDTH], b[WIDTH : 2 * WIDTH])
        return self.attend(F.linear(x, self.in_proj_weight[:WIDTH]), k, F.linear(x, self.in_proj_weight[2 * WIDTH :]))


class Chunked(Packed):
    def forward(self, x: Tensor) -> Tensor:
        w_q, w_k, w_v = self.in_proj_weight.chunk(3)
        return self.attend(F.linear(x, w_q), F.linear(x, w_k), F.linear(x, w_v))


class Scaled(Packed):
    """As modded-nanogpt has it: a learned factor on a part of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        made = F.linear(x, self.factor[0] * self.in_proj_weight[: 3 * WIDTH].type_as(x))
        return self.attend(*made.chunk(3, -1))


class OfModules(nn.Module):
    """As timm's EVA and BEiT have it: a module's weight, with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])
        made = F.linear(input=x, weight=self.qkv.weight, bias=bias)
        q, k, v = made.view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class KeysAndValues(Packed):
    """Queries by a module, the others by one product."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.kv = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 4)
        del self.in_proj_weight, self.in_proj_bias

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.query(x), *(x @ self.kv).chunk(2, -1))


class Block(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm1, self.mixer, self.norm2 = nn.LayerNorm(WIDTH), attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


FORMS = [
    *(Attention, ByOperator, ByMethod, ByEinsum, ByHelper),
    *(Packed, PackedByHead, Sliced, Chunked, Scaled, OfModules, KeysAndValues),
]


def stack(attention: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block(attention) for _ in range(2)))


@pytest.mark.parametrize("attention", FORMS, ids=lambda cls: cls.__name__)
def test_each_reads_its_own(attention: type[nn.Module]) -> None:
    check_reads(Reader(stack(attention), (torch.randn(2, 5, WIDTH),)))


#: Each form, and two of them with each topology.
CASES = [*((form, "muddformer") for form in FORMS), *itertools.product([Attention, Packed], ["grn-v3", "dca"])]
COMPILED_FIRST = [(Attention, "muddformer"), (Packed, "dca")]


@pytest.mark.parametrize(("attention", "topology"), CASES, ids=lambda given: getattr(given, "__name__", given))
def test_validation_compares_them(attention: type[nn.Module], topology: str, caplog: pytest.LogCaptureFixture) -> None:
    """Outputs and gradients, with moved connection weights: by the formulas, on the original's branches."""
    rewired = rewire.compile(stack(attention), topology, example_inputs=(torch.randn(2, 5, WIDTH),))
    assert sum(len(c.layout.units) for c in rewire.connections(rewired).values()) == 4
    assert not caplog.text


@pytest.mark.parametrize(
    ("attention", "topology"),
    [pytest.param(*case, marks=() if case in COMPILED_FIRST else pytest.mark.slow) for case in CASES],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_they_compile_in_one_graph(attention: type[nn.Module], topology: str) -> None:
    rewired = rewire.compile(stack(attention), topology, validate=False)
    compiled = torch.compile(rewired, backend="eager", fullgraph=True)
    x = torch.randn(2, 5, WIDTH)
    torch.testing.assert_close(compiled(x), rewired(x))


def test_what_is_found_is_said() -> None:
    found = projections_of(stack(Chunked), (torch.randn(2, 5, WIDTH),))
    assert found.paths == tuple(f"1.mixer.in_proj_weight.chunk(3)[{n}]" for n in ("0", "1", "2"))
    found = projections_of(stack(OfModules), (torch.randn(2, 5, WIDTH),))
    assert found.paths == ("1.mixer.qkv.weight",)


def test_one_expression_for_all_three_is_refused() -> None:
    class Mapped(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (F.linear(x, weight) for weight in (self.w_q, self.w_k, self.w_v))
            return F.linear(F.scaled_dot_product_attention(q, k, v), self.w_o)

    with pytest.raises(
        rewire.UnsupportedTopology, match=r"1\.mixer' cannot have separate.*several projections with weights"
    ):
        rewire.compile(stack(Mapped), Apart(), example_inputs=(torch.randn(2, 5, WIDTH),))


class OfMemory(Attention):
    """Keys and values are none of the stream's."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(1, 5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.memory @ self.w_k, self.memory @ self.w_v
        return F.linear(F.scaled_dot_product_attention(x @ self.w_q, k, v), self.w_o)


@pytest.mark.parametrize(
    ("attention", "kind"), [(ByOperator, "attention"), (Packed, "attention"), (OfMemory, "branch")]
)
def test_kinds_are_told_by_use(attention: type[nn.Module], kind: str) -> None:
    (trunk,) = rewire.inspect(stack(attention), (torch.randn(2, 5, WIDTH),)).trunks
    assert [site.kind for site in trunk.sites] == [kind, "ffn"] * 2


@pytest.mark.parametrize("attention", [Attention, ByOperator, ByMethod, ByHelper, Packed, Sliced, Chunked])
def test_a_trace_tells_the_same(attention: type[nn.Module]) -> None:
    model, x = stack(attention), torch.randn(2, 5, WIDTH)
    traced, run = (rewire.compile(model, "dca", start="paper", example_inputs=given) for given in (None, (x,)))
    weights = {name: value for name, value in run.state_dict().items() if "depth_connections" in name}
    assert weights.keys() <= traced.state_dict().keys()
    torch.testing.assert_close(traced(x), run(x))


def test_where_a_trace_tells_nothing_inputs_are_asked_for(tmp_path: Path) -> None:
    model, x = stack(PackedByHead), torch.randn(2, 5, WIDTH)
    rewire.save(rewire.compile(model, "muddformer", example_inputs=(x,)), tmp_path)
    with pytest.raises(rewire.UnsupportedTopology, match="traced without inputs: pass example_inputs"):
        rewire.load(tmp_path, stack(PackedByHead))
    torch.testing.assert_close(rewire.load(tmp_path, stack(PackedByHead), example_inputs=(x,))(x), model(x))


@pytest.mark.parametrize("attention", [ByHelper, Packed])
def test_in_a_flat_graph(attention: type[nn.Module]) -> None:
    """Linear maps, as `rewire.compile` finds them."""
    model, x = stack(attention), torch.randn(2, 5, WIDTH)
    backend = rewire.Backend("dca", start="paper", inner="eager")
    rewired = rewire.compile(model, "dca", start="paper", example_inputs=(x,))
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), rewired(x))
