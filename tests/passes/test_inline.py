"""Forwards of frozen models: what they show, and that they compute what the stream's own calls do."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from models import LoopGPT, MaskedStack, Parallel, PostNorm, PreNorm, Shared, Stack, WithMask, vectors, wrapped
from torch import Tensor, nn

import rewire
from rewire.patterns.tiny import tiny_model


def frozen(
    model: nn.Module, topology: str, weights: dict[str, Any], threshold: float = 0.0, **options: Any
) -> nn.Module:
    """``model`` rewired and frozen, its one trunk with these learned weights."""
    learned = rewire.compile(model, topology, start="paper", validate=False, **options)
    (connection,) = rewire.connections(learned).values()
    with torch.no_grad():
        for name, values in weights.items():
            parameter = connection.get_parameter(name)
            parameter.copy_(torch.as_tensor(values, dtype=torch.float32).expand_as(parameter))
    return rewire.freeze(learned, threshold)[0]


def body(model: nn.Module, path: str) -> str:
    """The generated forward without its head."""
    return textwrap.dedent(rewire.source(model, path).partition(":\n")[2])


#: x_1 = x_0 + f_1; x_2 = 0.5 x_0 + 0.75 x_1 + f_2; x_3 = 0.25 x_1 + 2 x_2 + f_3.
ROWS = [1.0, 0.5, 0.75, 0.0, 0.25, 2.0]


def pre_norm(states: str, read: str, middle: str, *write: str) -> str:
    """The forward of a frozen `PreNorm`: it takes its states, reads ``read``, and adds the attention to it."""
    lines = [
        "stream = self._depth.enter(x)",
        f"{states} = stream.states{'' if ',' in states else '[0]'}",
        f"ln_1 = self.ln_1({read})",
        "attn = self.attn(ln_1)",
        f"{middle} = {read} + attn",
        f"ln_2 = self.ln_2({middle})",
        "mlp = self.mlp(ln_2)",
        *write,
    ]
    return "\n".join(lines) + "\n"


def test_a_whole_trunk() -> None:
    model = frozen(Stack(PreNorm), "ancre-none", {"logits": ROWS})
    step, leave = "stream = stream.step(({}), 2)", "return stream.leave()"
    assert body(model, "layers.0") == pre_norm("x0", "x0", "h1", "x1 = h1 + mlp", step.format("x0, x1"), leave)
    x2 = "x2 = mix((x0, x1), (0.5, 0.75), (attn, mlp))"
    assert body(model, "layers.1") == pre_norm("x0, x1", "x1", "h2", x2, step.format("x1, x2"), leave)
    x3 = "x3 = mix((x1, x2), (0.25, 2.0), (attn, mlp))"
    assert body(model, "layers.2") == pre_norm("x1, x2", "x2", "h3", x3, "return x3")


def test_plain_connections_are_plain_adds() -> None:
    model = frozen(Stack(PreNorm), "ancre-none", {"logits": [1.0, 0.0, 1.0, 1e-4, 0.0, 1.0]}, threshold=1e-3)
    text = body(model, "layers.1")
    assert "mix" not in text and "x2 = h2 + mlp\nstream = stream.step((x2,), 2)\n" in text


def test_parallel_branches() -> None:
    model = frozen(Stack(Parallel), "ancre-none", {"logits": [1.0, 1.0, 1.0, 0.5, 0.0, 1.0]})
    assert "x2 = x0 + x1 + attn + mlp\n" in body(model, "layers.1")
    assert "x3 = mix((x0, x2), (0.5, 1.0), (attn, mlp))\n" in body(model, "layers.2")


def test_scaled_branches() -> None:
    model = frozen(Stack(PreNorm), "rezero", {"scales": 0.5})
    assert body(model, "layers.2") == textwrap.dedent("""\
        stream = self._depth.enter(x)
        x4 = stream.states[0]
        ln_1 = self.ln_1(x4)
        attn = self.attn(ln_1)
        x5 = mix((x4, attn), (1.0, 0.5))
        ln_2 = self.ln_2(x5)
        mlp = self.mlp(ln_2)
        x6 = mix((x5, mlp), (1.0, 0.5))
        return x6
        """)


def test_weights_per_channel_are_looked_up() -> None:
    scales = torch.ones(6, 32)
    scales[0], scales[3] = torch.linspace(1, 2, 32), torch.linspace(2, 3, 32)
    model = frozen(Stack(PreNorm), "layerscale", {"scales": scales})
    assert body(model, "layers.1") == textwrap.dedent("""\
        stream = self._depth.enter(x)
        channels = stream.weights.value.channels
        x2 = stream.states[0]
        ln_1 = self.ln_1(x2)
        attn = self.attn(ln_1)
        x3 = x2 + attn
        ln_2 = self.ln_2(x3)
        mlp = self.mlp(ln_2)
        x4 = mix((x3, mlp), (1.0, channels[1]))
        stream = stream.step((x4,), 2)
        return stream.leave()
        """)


def test_post_norm() -> None:
    model = frozen(Stack(PostNorm), "ancre-cascaded", {"scales": [1, 1, 0.5, 1, 1, 1]})
    assert body(model, "layers.1") == textwrap.dedent("""\
        stream = self._depth.enter(x)
        x2 = stream.states[0]
        attn = self.attn(x2)
        merged = mix((x2,), (0.5,), (attn,))
        ln_1 = self.ln_1(merged)
        mlp = self.mlp(ln_1)
        merged_1 = ln_1 + mlp
        ln_2 = self.ln_2(merged_1)
        stream = stream.step((ln_2,), 2)
        return stream.leave()
        """)


def test_a_trunk_in_one_forward() -> None:
    model = frozen(LoopGPT(), "denseformer", {"alpha": [0, 1, 0.5, 0, 1, 0, 0, 0, 1]})
    text = body(model, "")
    assert "stream = self._depth.enter(emb)\nx0 = stream.states[0]\n" in text
    assert "y2 = mix((x0, x2), (0.5, 1.0))\n" in text and "norm = self.norm(x3)\n" in text
    assert "step" not in text and "leave" not in text


def test_increments_are_kept_by_name() -> None:
    model = frozen(Stack(PreNorm), "grn-v1", {"b": [1, 1, 0.5, 1, 0, 1, 0, 1, 0, 2]})
    text = body(model, "layers.1")
    assert "r2 = mix((x0, f1), (1.0, 0.5))\n" in text and "f2 = attn + mlp\n" in text
    assert "stream = stream.step((x0, f1, f2), 2)\n" in text
    assert "out = mix((f1, f3), (1.0, 2.0))\nreturn out\n" in body(model, "layers.2")


def test_a_child_that_goes_on_with_the_stream() -> None:
    """BERT: the attention adds inside a child, the feed-forward beside it."""
    model = frozen(tiny_model("bert"), "ancre-none", {"logits": 0.5})
    text = body(model, "bert.encoder.layer.1")
    assert "attention = self.attention(stream, " in text
    assert "stream = attention[0]\nx0, x1, x2, x3 = stream.states\nintermediate = self.intermediate(x3)\n" in text
    assert "merged = mix((x0, x1, x2, x3), (0.5, 0.5, 0.5, 0.5), (output_dropout,))\n" in text
    assert "stream = stream.step((x0, x1, x2, x3, output_layer_norm))\nreturn stream.leave()\n" in text


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: Stack(PreNorm), ""),
        (Shared, "layers.0"),
        (wrapped, "1.0"),
    ],
    ids=["learned", "shared", "part of a unit"],
)
def test_where_the_stream_does_the_work(make: Any, path: str) -> None:
    if path:
        text = rewire.source(frozen(make(), "ancre-none", {"logits": 0.5}), path)
    else:
        text = rewire.source(rewire.compile(make(), validate=False), "layers.1")
    assert "stream.read()" in text or "stream.read_normed(" in text
    assert "stream.write(" in text and "step" not in text


@pytest.mark.parametrize("name", ["x0", "h1", "states", "mix"])
def test_names_that_are_taken(name: str) -> None:
    """A child and a global of the block's file have the names that the pass would choose."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.get_submodule(name)(x)

    model, x = Stack(Block), vectors()
    result = frozen(model, "ancre-none", {"logits": [1, 1, 0.5, 1, 1, 0.5]})
    a, b, c = (layer.get_submodule(name) for layer in model.layers)
    x0 = model.inp(x)
    x1 = x0 + a(x0)
    x2 = x0 + 0.5 * x1 + b(x1)
    torch.testing.assert_close(result(x), model.out(x0 + x1 + 0.5 * x2 + c(x2)))


def test_all_paths_through_a_forward() -> None:
    model = frozen(MaskedStack(WithMask).eval(), "ancre-none", {"logits": ROWS})
    given, absent = rewire.source(model, "layers.1").split("if mask is not None:")[1].split("return", 1)
    for text in (given, absent):
        assert "x2 = mix((x0, x1), (0.5, 0.75), (" in text
    x, ones = vectors(), torch.ones(2, 9, 1)
    torch.testing.assert_close(model(x), model(x, ones))
    assert not torch.allclose(model(x), model(x, 0.5 * ones), atol=1e-3)


def test_what_the_stream_looks_like_is_asked_of_the_one_at_the_entry() -> None:
    class Block(PreNorm):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attn(self.ln_1(x))
            y = self.mlp(self.ln_2(x)).to(x.dtype).reshape(x.shape)
            return x + y

    model = Stack(Block).to(torch.float64)
    result = frozen(model, "ancre-none", {"logits": [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]})
    assert torch.equal(result(vectors().double()), model(vectors().double()))
    assert "stream.shape" in body(result, "layers.1")


def test_an_element_of_what_a_child_returns_is_written_where_it_is_added() -> None:
    model = frozen(tiny_model("llama"), "ancre-none", {"logits": ROWS})
    text = body(model, "model.layers.1")
    assert "h2 = x1 + self_attn[0]\n" in text and "(0.5, 0.75), (self_attn[0], mlp))\n" in text
    assert "getitem" not in text
