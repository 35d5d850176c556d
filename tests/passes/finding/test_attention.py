"""Queries, keys and values are what an attention uses as such, whatever they are called and however that is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from reading_apart import Reader, check_reads, projections_of
from torch import Tensor, nn

import rewire
from rewire.passes.find import find
from rewire.passes.finding.projections import find_projections
from rewire.passes.prepare import prepare

WIDTH, HEADS = 16, 2


class Attention(nn.Module):
    names = ("c_q", "c_k", "c_v")

    def __init__(self) -> None:
        super().__init__()
        for name in self.names:
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (getattr(self, name)(x) for name in self.names)
        return self.out(F.scaled_dot_product_attention(q, k, v))


class Calls(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.scaled_dot_product_attention(self.c_q(x), self.c_k(x), self.c_v(x)))


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maps, self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        v, q, k = [project(x) for project in self.maps]
        return self.out(F.scaled_dot_product_attention(q, k, v))


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def turned(x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[-2])[:, None] * torch.linspace(1, 0.1, x.shape[-1])
    return x * angle.cos() + x.flip(-1) * angle.sin()


class ByHand(Attention):
    """Heads, norms of queries and keys, rotary embeddings, a mask, dropout, a softmax."""

    names = ("one", "two", "three")

    def __init__(self) -> None:
        super().__init__()
        self.norm_q, self.norm_k = nn.LayerNorm(WIDTH // HEADS), nn.LayerNorm(WIDTH // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        k, v, q = heads(self.one(x)), heads(self.two(x)), heads(self.three(x))
        q, k = turned(self.norm_q(q)), turned(self.norm_k(k))
        scores = q @ k.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = F.dropout(scores.masked_fill(mask, -1e4).softmax(-1), 0.0, self.training)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class ByEinsum(Attention):
    def forward(self, x: Tensor) -> Tensor:
        weights = torch.einsum("bqd,bkd->bqk", self.c_q(x), self.c_k(x)).softmax(-1)
        return self.out(torch.einsum("bqk,bkd->bqd", weights, self.c_v(x)))


class OfPositions(Attention):
    """As Transformer-XL: queries are multiplied by positions, too."""

    names = ("one", "two", "three")

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Linear(1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.two(x), self.three(x), self.one(x)
        places = self.place(torch.arange(x.shape[1], dtype=x.dtype)[:, None])
        scores = torch.einsum("bqd,bkd->bqk", q, k) + 0.1 * torch.einsum("bqd,kd->bqk", q, places)
        return self.out(scores.softmax(-1) @ v)


class Delegating(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class ByHelper(Attention):
    def attend(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.c_q(x), self.c_k(x), self.c_v(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attend(x))


class Fused(nn.Module):
    """As Segment Anything has it: heads are told by -1."""

    def __init__(self) -> None:
        super().__init__()
        self.everything, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.everything(x).reshape(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Gated(Attention):
    """As iFormer: values have a gate, in a row of modules that are called in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.scaled_dot_product_attention(self.c_q(x), self.c_k(x), self.gate(x) * self.c_v(x)))


class FusedInARow(Fused):
    def __init__(self) -> None:
        super().__init__()
        self.everything = nn.Sequential(self.everything, nn.Dropout(0.0))


class WithMemory(nn.Module):
    """As Stable Cascade: keys and values are made of the state and of something else, and come as another argument."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.inner = nn.Parameter(torch.randn(2, 3, WIDTH)), TwoArguments()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, torch.cat([x, self.memory], 1))


class TwoArguments(Attention):
    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.out(F.scaled_dot_product_attention(self.c_q(x), self.c_k(context), self.c_v(context)))


class Block(nn.Module):
    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize(
    "attention",
    [Attention, Calls, Listed, ByHand, ByEinsum, Delegating, ByHelper, Fused, Gated, FusedInARow],
    ids=lambda cls: cls.__name__,
)
def test_each_reads_its_own(attention: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block(attention) for _ in range(2)))
    check_reads(Reader(model, (torch.randn(2, 5, WIDTH),)))


class OfItsPrecision(Attention):
    """Its mask has the least number of its precision, which others do not hold."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_q(x), self.c_k(x), self.c_v(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.out((q @ k.mT).masked_fill(mask, torch.finfo(x.dtype).min).softmax(-1) @ v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_of_a_precision(dtype: torch.dtype) -> None:
    model = nn.Sequential(*(Block(OfItsPrecision) for _ in range(2))).to(dtype)
    rewired = rewire.compile(model, "dca", example_inputs=(torch.randn(2, 5, WIDTH, dtype=dtype),))
    (connection,) = rewire.connections(rewired).values()
    assert [site.reads_qkv for site in connection.layout.sites] == [True, False] * 2


def test_a_second_product_of_positions(caplog: pytest.LogCaptureFixture) -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block(OfPositions) for _ in range(2))), torch.randn(2, 5, WIDTH)
    assert projections_of(model, (x,)).paths == ("1.attn.two", "1.attn.three", "1.attn.one")
    rewire.compile(model, "muddformer", example_inputs=(x,))  # validated
    assert not caplog.text


def test_keys_of_more_than_the_state(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block(WithMemory) for _ in range(2)))
    rewired = rewire.compile(model, "muddformer", example_inputs=(torch.randn(2, 5, WIDTH),))  # validated
    assert [len(c.layout.dims.attention) for c in rewire.connections(rewired).values()] == [2] and not caplog.text


def test_names_that_mislead() -> None:
    class Misnamed(Attention):
        names = ("q_proj", "k_proj", "v_proj")

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.scaled_dot_product_attention(self.k_proj(x), self.v_proj(x), self.q_proj(x)))

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block(Misnamed) for _ in range(2)))
    found = projections_of(model, (torch.randn(2, 5, WIDTH),))
    assert found.paths == ("1.attn.k_proj", "1.attn.v_proj", "1.attn.q_proj")


class KeysWithValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = self.to_q(x), self.to_kv(x).chunk(2, dim=-1)
        y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v))
        return self.out(y.transpose(1, 2).flatten(2))


class QueriesWithKeys(KeysWithValues):
    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k = self.to_kv(x).view(b, t, HEADS, 2, -1).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, heads(self.to_q(x)))
        return self.out(y.transpose(1, 2).flatten(2))


class QueriesWithValues(KeysWithValues):
    def forward(self, x: Tensor) -> Tensor:
        z = self.to_kv(x)
        return self.out(F.scaled_dot_product_attention(z[..., :WIDTH], self.to_q(x), z[..., WIDTH:]))


class ValuesThenKeys(KeysWithValues):
    def forward(self, x: Tensor) -> Tensor:
        v, k = self.to_kv(x).chunk(2, dim=-1)
        return self.out(F.scaled_dot_product_attention(self.to_q(x), k, v))


@pytest.mark.parametrize(
    ("attention", "alone"), [(KeysWithValues, "q"), (QueriesWithKeys, "v"), (QueriesWithValues, "k")]
)
def test_two_of_one_projection(attention: type[nn.Module], alone: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block(attention) for _ in range(2)))
    found = projections_of(model, (torch.randn(2, 5, WIDTH),))
    assert found.paths == ("1.attn.to_q", "1.attn.to_kv") and found.ways["1.attn.to_q"] == alone
    check_reads(Reader(model, (torch.randn(2, 5, WIDTH),)))


def test_two_of_one_projection_in_another_order() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block(ValuesThenKeys) for _ in range(2)))
    with pytest.raises(rewire.UnsupportedTopology, match=r"'1\.attn\.to_kv' makes them in the order v, k\. Let it"):
        rewire.compile(model, "muddformer", example_inputs=(torch.randn(2, 5, WIDTH),))


def causal(scores: Tensor) -> Tensor:
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return torch.where(mask, scores, -1e4)


#: Attentions of queries, keys and values [batch, tokens, width] in which these stand in another order.
ORDERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "by name": lambda q, k, v: F.scaled_dot_product_attention(q, value=v, key=k),
    "all by name": lambda q, k, v: F.scaled_dot_product_attention(value=v, key=k, query=q),
    "masked, by name": lambda q, k, v: F.scaled_dot_product_attention(
        q, attn_mask=torch.ones(5, 5).tril().bool(), value=v, key=k
    ),
    "einsum": lambda q, k, v: torch.einsum("bkd,bqd->bqk", k, q).softmax(-1) @ v,
    "causal": lambda q, k, v: causal(torch.einsum("bkd,bqd->bqk", k, q)).softmax(-1) @ v,
    "keys in rows": lambda q, k, v: (k @ q.mT).softmax(-2).mT @ v,
    "keys in rows, by name": lambda q, k, v: torch.softmax(k @ q.mT, dim=1).mT @ v,
    "turned": lambda q, k, v: (k @ q.mT).transpose(1, 2).softmax(-1) @ v,
    "values first": lambda q, k, v: (v.mT @ (k @ q.mT).softmax(1)).mT,
    "bmm by name": lambda q, k, v: torch.bmm(mat2=v, input=torch.bmm(mat2=k.mT, input=q).softmax(-1)),
}


@pytest.mark.parametrize("how", ORDERS)
def test_orders(how: str) -> None:
    class Ordered(Attention):
        names = ("one", "two", "three")

        def forward(self, x: Tensor) -> Tensor:
            return self.out(ORDERS[how](self.one(x), self.two(x), self.three(x)))

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block(Ordered) for _ in range(2)))
    assert projections_of(model, (torch.randn(2, 5, WIDTH),)).paths == ("1.attn.one", "1.attn.two", "1.attn.three")


@pytest.mark.parametrize(
    "names",
    [
        *(("c_q", "c_k", "c_v"), ("Wq", "Wk", "Wv"), ("w_q", "w_k", "w_v"), ("proj_q", "proj_k", "proj_v")),
        *(("linear_q", "linear_k", "linear_v"), ("fc_q", "fc_k", "fc_v"), ("q_linear", "k_linear", "v_linear")),
        *(("queries", "keys", "values"), ("q_map", "k_map", "v_map"), ("toqueries", "tokeys", "tovalues")),
    ],
)
def test_names(names: tuple[str, str, str]) -> None:
    model = nn.Sequential(*(Block(type("Named", (Attention,), {"names": names})) for _ in range(2)))
    check_reads(Reader(model, (torch.randn(2, 5, WIDTH),)))


class PairBlock(nn.Module):
    """A stream of sequences, and one of pairs: each is a branch of the other, as in an Evoformer."""

    biased = False

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.bias, self.outer = Attention(), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        bias = self.bias(pairs).mean(2)
        x = x + (self.attention(x + bias) if self.biased else bias * self.attention(x))
        pairs = pairs + self.outer(x[:, :, None] * x[:, None])
        return x, pairs


class Biased(PairBlock):
    biased = True


class Pairs(nn.Module):
    block: type[PairBlock] = PairBlock

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        pairs = x[:, :, None] * x[:, None]
        for block in self.blocks:
            x, pairs = block(x, pairs)
        return x.sum() + pairs.sum()


def test_a_branch_that_another_stream_makes_is_none_of_its_attentions() -> None:
    found = rewire.inspect(Pairs(), (torch.randn(2, 5, WIDTH),))
    assert {trunk.sites[0].name: trunk.sites[0].kind for trunk in found.trunks} == {
        "blocks.0.attention": "attention",
        "blocks.0.outer": "branch",
    }
    rewired = rewire.compile(Pairs(), "muddformer", example_inputs=(torch.randn(2, 5, WIDTH),))
    assert [len(c.layout.dims.attention) for c in rewire.connections(rewired).values()] == [3, 0]


def test_projections_that_read_what_was_made_of_the_state_before() -> None:
    class Net(Pairs):
        block = Biased

    with pytest.raises(rewire.UnsupportedTopology, match=r"'blocks\.0\.attention' .* of the same state outside"):
        rewire.compile(Net(), "muddformer", example_inputs=(torch.randn(2, 5, WIDTH),))


class Joint(nn.Module):
    """One attention of two streams; the projections of the first one have the usual names."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("to_q", "to_k", "to_v", "add_q", "add_k", "add_v", "out", "out_y"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (torch.cat([one(x), other(y)], 1) for one, other in self.pairs())
        both = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(both[:, : x.shape[1]]), y + self.out_y(both[:, x.shape[1] :])

    def pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        return [(self.to_q, self.add_q), (self.to_k, self.add_k), (self.to_v, self.add_v)]


class JointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Joint() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x, y = block(x, y)
        return x.sum() + y.square().sum()


def test_an_attention_of_two_streams() -> None:
    given = torch.randn(2, 5, WIDTH), torch.randn(2, 3, WIDTH)
    finding = find(prepare(JointNet(), given), "run").evaluation
    for (name, chain), kind in zip(finding.chains.items(), ("to", "add"), strict=True):
        found = find_projections(finding.flow, finding.trunks[name].sites[0], (), chain.adds[0])
        assert found.paths == tuple(f"blocks.0.{kind}_{way}" for way in "qkv")


class OfSomethingElse(Attention):
    """Its name says nothing of where keys and values come from."""

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.linspace(-1, 1, 3 * WIDTH).view(1, 3, WIDTH)
        scores = self.c_q(x) @ self.c_k(memory).transpose(-2, -1)
        return self.out(scores.softmax(-1) @ self.c_v(memory))


def test_of_a_cross_attention_only_the_queries_are_of_the_stream() -> None:
    model, x = nn.Sequential(*(Block(OfSomethingElse) for _ in range(2))), torch.randn(2, 5, WIDTH)
    (trunk,) = rewire.inspect(model, (x,)).trunks
    assert [site.kind for site in trunk.sites] == ["cross-attention", "ffn"] * 2
    rewired = rewire.compile(model, "muddformer", example_inputs=(x,))  # which reads one value there
    assert not [c.layout.dims.attention for c in rewire.connections(rewired).values() if c.layout.dims.attention]


class WithoutSoftmax(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.elu(self.c_q(x)) + 1, F.elu(self.c_k(x)) + 1, self.c_v(x)
        return self.out(q @ (k.transpose(-2, -1) @ v))


def test_a_linear_attention_reads_one_value_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, x = nn.Sequential(*(Block(WithoutSoftmax) for _ in range(2))), torch.randn(2, 5, WIDTH)
    (trunk,) = rewire.inspect(model, (x,)).trunks
    assert [site.kind for site in trunk.sites] == ["linear-attention", "ffn"] * 2
    rewired = rewire.compile(model, "muddformer", example_inputs=(x,))
    assert [len(c.layout.dims.attention) for c in rewire.connections(rewired).values()] == [0]
    assert "'0.attn' and 1 more: one read for queries, keys and values" in caplog.text
