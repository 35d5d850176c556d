"""What a model scales, and adds to, between its adds, under topologies that make no state of sums."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from every_topology import EVERY, FEW, NOT_PRESERVING, PRE_NORM_ONLY, WITH_ATTENTION, kinds_first
from mixing import learned, shaken
from runtime.test_skipped import Block, Net, results, vectors
from torch import Tensor, nn

import rewire
from rewire.passes.choose import layout_of


class Scaling(Net):
    """nanochat's and modded-nanogpt's: ``l x + m x_0`` in front of each block, and once behind the last."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.m = (nn.Parameter(torch.rand(len(self.blocks) + 1) + 0.3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x0 = self.stem(x)
        for n, block in enumerate(self.blocks):
            x = self.l[n] * x + self.m[n] * x0
            x = block(x)
        return self.norm(self.l[-1] * x + self.m[-1] * x0)


class Written(Scaling):
    """The same, written as branches: what is changed is a part of what the next branch returns."""

    def forward(self, x: Tensor) -> Tensor:
        x0 = self.stem(x)
        x = self.l[0] * x0 + self.m[0] * x0
        for n, block in enumerate(self.blocks):
            x = self.first(x, x0, n, block) if n else x + block.attn(block.norm1(x))
            x = x + block.mlp(block.norm2(x))
        return self.norm(self.l[-1] * x + self.m[-1] * x0)

    def first(self, x: Tensor, x0: Tensor, n: int, block: Any) -> Tensor:
        read = self.l[n] * x + self.m[n] * x0
        return x + (block.attn(block.norm1(read)) + (read - x))


class InsideBlock(Block):
    """Changes between the adds of a block, in one of two ways, and behind the last one."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        if self.training:
            x = x * 0.7
        x = x + self.mlp(self.norm2(x))
        return x * 0.9


class Inside(Net):
    block = InsideBlock


#: All topologies in one, and what their options change in the other; one of each kind in both.
CASES = [(key, Scaling, "auto") for key in rewire.list_topologies() if key not in NOT_PRESERVING]
CASES += [(key, Inside, "block") for key in EVERY if key not in NOT_PRESERVING and (key in FEW or EVERY[key][1])]


@pytest.mark.parametrize(("key", "make", "granularity"), kinds_first(CASES))
def test_it_starts_as_the_plain_network(
    key: str, make: type[Net], granularity: Any, caplog: pytest.LogCaptureFixture
) -> None:
    name, options = EVERY[key]
    model = make()
    rewired = rewire.compile(model, name, granularity=granularity, example_inputs=(vectors(),), **options)
    assert not caplog.records  # with weights that mix, it is the branches as the formulas connect them
    for training in (False, True):
        expected, actual = named(model.train(training)), named(rewired.train(training))
        for part, value in expected.items():
            if key != "dca-norms" or "norm" not in part:  # of which there are copies
                torch.testing.assert_close(actual[part], value, rtol=1e-3, atol=1e-4, msg=part)


def named(model: nn.Module) -> dict[str, Tensor]:
    return dict(zip(["out", *dict(model.named_parameters())], results(model, vectors()), strict=True))


@pytest.mark.parametrize("key", kinds_first(sorted(PRE_NORM_ONLY - WITH_ATTENTION)))
def test_with_weights_that_mix_it_is_the_same_written_as_branches(key: str) -> None:
    name, options = EVERY[key]
    given = {"granularity": "sublayer", "start": "paper", "validate": False, **options}
    rewired = shaken(rewire.compile(Scaling(), name, **given), 0.2, seed=3)
    twin = rewire.compile(Written(), name, **given)
    assert len(rewire.connections(twin)) == 1
    for ours, theirs in zip(learned(rewired).values(), learned(twin).values(), strict=True):
        theirs.data.copy_(ours.data)
    ours, theirs = results(rewired.double(), vectors().double()), results(twin.double(), vectors().double())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class InPlace(Scaling):
    """Written to in place: what the next branch was to read, or a copy of it."""

    def forward(self, x: Tensor, copies: bool = False) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            x = x.clone() if copies else x
            x.mul_(0.5)
        return self.norm(x)


def test_what_is_written_to_in_place_is_refused_where_it_would_be_lost() -> None:
    with pytest.raises(rewire.OutOfOrder, match="was written to in place"):
        rewire.compile(InPlace(), "hc-static", example_inputs=(vectors(),))
    rewired = rewire.compile(InPlace(), "hc-static", validate=False)
    with pytest.raises(rewire.OutOfOrder, match="was written to in place"):
        rewired(vectors())
    model = InPlace()
    rewired = rewire.compile(model, "hc-static", example_inputs=(vectors(), True))
    torch.testing.assert_close(rewired(vectors(), True), model(vectors(), True))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["hc-dynamic", "grn-v1"])
def test_compiled_and_in_the_backend(name: str) -> None:
    model = Scaling()
    rewired = shaken(rewire.compile(model, name, example_inputs=(vectors(),)), 0.2, seed=3)
    compiled = torch.compile(rewired, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(vectors()), rewired(vectors()), rtol=1e-4, atol=1e-5)
    torch.compiler.reset()
    flat = torch.compile(model, backend=rewire.Backend(name, inner="eager"))
    torch.testing.assert_close(flat(vectors()), model(vectors()), rtol=1e-4, atol=1e-5)


def test_of_what_no_program_can_name_nothing_is_frozen() -> None:
    rewired = rewire.compile(Scaling(), "grn-v1", example_inputs=(vectors(),))
    with pytest.raises(rewire.UnsupportedTopology, match="scales what is read"):
        rewire.freeze(rewired)
    rewire.freeze(rewire.compile(Scaling(), "denseformer", example_inputs=(vectors(),)))


def test_it_is_no_post_norm() -> None:
    (trunk,) = rewire.inspect(Scaling(), (vectors(),)).trunks
    assert not trunk.post_norm and trunk.posts == (1, 3, 5)
    assert layout_of(trunk, rewire.ANCRe(), "auto").units == (1, 1, 2, 2, 3, 3, 4, 4)
    left = rewire.inspect(Scaling(), (vectors(),)).left
    assert all(re.search(r"self\.l\[-1\]", one.written) for one in left)  # behind the trunk


class Normed(Scaling):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x * (1 + x.mean()))
        return self.norm(x)


def test_what_is_multiplied_with_itself_is_not_only_scaled() -> None:
    with pytest.raises(rewire.UnsupportedTopology, match="mul makes the next state"):
        rewire.compile(Normed(), "hc-static", example_inputs=(vectors(),))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(F.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x)))  # type: ignore[no-any-return]


class Apart(nn.Module):
    """A block with an attention, in front of whose norm the state is perhaps scaled, and copied."""

    def __init__(self, copy: Callable[[Tensor], Tensor] | None, scaled: bool) -> None:
        super().__init__()
        self.norm, self.copy, self.scaled = nn.LayerNorm(8), copy, scaled
        self.attn = Attention()

    def forward(self, x: Tensor) -> Tensor:
        if self.scaled:
            x = x * 0.5
        if self.copy is None:
            return x + self.attn(self.norm(x))
        x = self.copy(x)
        return x + self.attn(self.norm(x))


COPIES = {
    "clone": lambda x: x.clone(),
    "cast": lambda x: x.double().float(),
    "contiguous": lambda x: x.contiguous(),
    "view": lambda x: x.view(2, 2, 2, 8).view(2, 4, 8),
}


@pytest.mark.each_once
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("topology", ["dca", "muddformer"])
def test_copies_of_what_queries_keys_and_values_read_apart(topology: str, copy: str, scaled: bool) -> None:
    """They are copies for each of the three: that of one was projected for all, in silence behind a product."""
    x, outputs = torch.randn(2, 4, 8), []
    for function in (None, COPIES[copy]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), *(Apart(function, scaled) for _ in range(3)))
        rewired = rewire.compile(model, topology, validate=False)
        outputs.append(shaken(rewired, 0.3, 1)(x))
    torch.testing.assert_close(outputs[1], outputs[0])
