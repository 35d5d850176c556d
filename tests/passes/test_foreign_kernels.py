"""Models that compute in autograd functions, by kernels or in C++, which show no operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixing import ANCRE, all_gradients, assert_same, shaken
from models import WIDTH, Stack, vectors
from torch import Tensor, nn

import rewire


def function(reference: Callable[..., Tensor]) -> type[torch.autograd.Function]:
    """An autograd function that computes what ``reference`` does, where nobody sees it."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, memory: str, *args: Tensor) -> Tensor:
            ctx.args = args
            with torch._C.DisableTorchFunction():
                want = reference(*args)
            return start_kernel(memory, want)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            with torch.enable_grad(), torch._C.DisableTorchFunction():
                args = [x.detach().requires_grad_() for x in ctx.args]
                return None, *torch.autograd.grad(reference(*args), args, grad)

    return Function


def start_kernel(memory: str, values: Tensor) -> Tensor:
    """Memory of some kind that holds ``values``, in rows or not."""
    rows = values.numel() // values.shape[-1], values.shape[-1]
    if memory == "C++":  # which makes it
        with torch._C.DisableTorchFunction():
            return values.clone()
    if memory == "rows of C++":
        with torch._C.DisableTorchFunction():
            made = values.reshape(rows).clone()
        return made.view(values.shape)
    kinds = {"empty": torch.empty(values.shape), "like": torch.empty_like(values), "rows": values.new_zeros(rows)}
    filled = kinds[memory]
    with torch._C.DisableTorchFunction():
        filled.copy_(values.view(filled.shape))
    return filled.view(values.shape) if memory == "rows" else filled


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / 4, -1) @ v


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


FUNCTIONS = {reference: function(reference) for reference in (rms, attention, matmul)}


class Computes(nn.Module):
    memory = ""  # none: by operations

    def compute(self, reference: Callable[..., Tensor], *args: Tensor) -> Tensor:
        return FUNCTIONS[reference].apply(self.memory, *args) if self.memory else reference(*args)


class Norm(Computes):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(rms, x, self.weight)


class Attention(Computes):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.compute(attention, self.q(x), self.k(x), self.v(x)))


class Mlp(Computes):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Parameter(torch.randn(WIDTH, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(matmul, self.up(x).relu(), self.down)


class PreNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.attn, self.mlp = Norm(), Norm(), Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class PostNorm(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_1(x + self.attn(x))
        return self.norm_2(x + self.mlp(x))


def net(block: Callable[[], nn.Module], memory: str = "") -> nn.Module:
    model = Stack(block)
    for module in model.modules():
        if isinstance(module, Computes):
            module.memory = memory
    return model


@pytest.mark.parametrize("memory", ["empty", "like", "rows", "C++", "rows of C++"])
@pytest.mark.parametrize(
    ("block", "key"),
    [
        *((PreNorm, "muddformer"), (PostNorm, ANCRE)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(PreNorm, ANCRE), (PreNorm, "hc-dynamic")]),
        pytest.param(PostNorm, "muddformer", marks=pytest.mark.slow),
    ],
)
def test_it_is_what_operations_make_of_it(
    block: type[nn.Module], key: str, memory: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With moved weights, of the same attentions; and validation is not skipped."""
    x, found = vectors(), []
    for each in ("", memory):
        torch.manual_seed(0)
        model = shaken(rewire.compile(net(block, each), key, example_inputs=(x,)), 0.2, 7)
        (connection,) = rewire.connections(model).values()
        assert len(connection.layout.units) == 6
        output = model(x)
        output.sin().sum().backward()
        found.append({"output": output.detach()} | all_gradients(model))
    assert_same(*found, 1e-4)
    assert "not validated" not in caplog.text


@torch.jit.script
def scripted_gelu(x: Tensor, bias: Tensor) -> Tensor:
    x = x + bias
    return 0.5 * x * (1.0 + torch.tanh(0.79788456 * x * (1.0 + 0.044715 * x * x)))


class ScriptedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(scripted_gelu(self.up(x), self.up.bias))


class ScriptedBlock(PreNorm):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = ScriptedMlp()  # type: ignore[assignment]


@pytest.mark.parametrize("frozen", [False, True])
def test_branches_that_torchscript_computes(frozen: bool) -> None:
    """Their adds were left out, and nothing said so. Gradients show what they read, those of frozen weights, too."""
    model = net(ScriptedBlock).requires_grad_(not frozen)
    rewired = rewire.compile(model, ANCRE, example_inputs=(vectors(),))
    assert any(p.requires_grad for p in model.parameters()) == (not frozen)
    (connection,) = rewire.connections(rewired).values()
    assert len(connection.layout.units) == 6


class AddAndNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total, normed = torch.empty_like(x), torch.empty_like(x)
        with torch._C.DisableTorchFunction():
            total.copy_(x + residual)
            normed.copy_(rms(total, weight))
        return normed, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[1], grads[1], None


class FusedNorm(Norm):
    def forward(self, x: Tensor, residual: Tensor) -> Any:  # type: ignore[override]
        return AddAndNorm.apply(x, residual, self.weight)


class FusedBlock(PreNorm):
    def __init__(self) -> None:
        super().__init__()
        self.norm_2 = FusedNorm()

    def forward(self, x: Tensor) -> Tensor:
        residual, x = x, self.attn(self.norm_1(x))
        x, residual = self.norm_2(x, residual)
        return residual + self.mlp(x)


def test_adds_that_kernels_make_are_named() -> None:
    with pytest.raises(
        rewire.NoResidualAdds, match=r"layers\.0\.attn and 2 more: a kernel adds.*fused add and norm off"
    ):
        rewire.compile(net(FusedBlock), ANCRE, example_inputs=(vectors(),))


class Turn(torch.autograd.Function):
    """Rotates halves of the channels in place, by views that it makes where autograd is off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        turned = b.clone(), -a
        x[..., : WIDTH // 2].copy_(turned[0])
        x[..., WIDTH // 2 :].copy_(turned[1])
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        a, b = grad.chunk(2, dim=-1)
        return torch.cat((-b, a), -1)


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(Turn.apply(self.up(x) * 1.0))


class TurnsAround(nn.Module):
    """A skip around blocks that turn: whether gradients pass is looked for on the way that they are on."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.mid, self.up = (nn.Sequential(Turns(), Turns()) for _ in range(3))
        self.shrink = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        return self.up(torch.lerp(skip, self.mid(self.shrink(skip)), 0.5))


def test_views_that_an_autograd_function_writes_to() -> None:
    rewired = rewire.compile(TurnsAround(), ANCRE, example_inputs=(vectors(width=WIDTH),))
    assert {len(c.layout.units) for c in rewire.connections(rewired).values()} == {4, 2}


class Detaches(torch.autograd.Function):
    """A fused add and norm that detaches what it is given, which its backward passes gradients to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x.detach() + residual.detach()
        ctx.save_for_backward(total)
        return nn.functional.layer_norm(total, total.shape[-1:]), total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        return grad + total, grad + total


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        for layer in self.layers:
            x, residual = Detaches.apply(layer(x), residual)
        return x


def test_an_add_of_what_an_autograd_function_detaches_is_named_for_what_it_is() -> None:
    with pytest.raises(rewire.NoResidualAdds, match=r"stands inside a torch\.autograd\.Function(.|\n)*Detaches\.apply"):
        rewire.compile(Detached(), ANCRE, example_inputs=(vectors(width=WIDTH),))


class FlexBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torch.nn.attention.flex_attention import flex_attention  # which imports torch._dynamo

        self.norm, self.out, self.attend = nn.LayerNorm(16), nn.Linear(16, 16), flex_attention

    def forward(self, x: Tensor) -> Tensor:
        heads = self.norm(x)[:, None]
        return x + self.out(self.attend(heads, heads, heads, score_mod=nearer)[:, 0])


def nearer(score: Tensor, _batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score - (query - key).abs()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention() -> None:
    """It compiles itself where it is called, and torch.compile saw the recorder. On a CPU it has no gradients."""
    model, x = nn.Sequential(*(FlexBlock() for _ in range(3))).requires_grad_(False), torch.randn(2, 5, 16)
    rewired = rewire.compile(model, "residual", example_inputs=(x,))
    (connection,) = rewire.connections(rewired).values()
    assert len(connection.layout.units) == 3
    torch.testing.assert_close(rewired(x), model(x))
