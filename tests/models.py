"""Small hand-written models in the ways in which people write residual connections."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 32
DEPTH = 3
VOCABULARY = 61


def token_ids(batch: int = 2, length: int = 9, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


def vectors(batch: int = 2, length: int = 9, width: int = 8) -> Tensor:
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(2))


def images(batch: int = 2, size: int = 12, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(3))


# -- branches ----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.qkv(x).split(c, dim=2)
        q, k, v = (part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class SeparateAttention(nn.Module):
    """With a projection each for queries, keys and values."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(F.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


class Mlp(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


# -- blocks ------------------------------------------------------------------------------------------------------------


class LinearBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class LinearNet(nn.Module):
    """Blocks of one linear map each."""

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LinearBlock() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class WithExits(nn.Module):
    """Each block has an exit: the loss may take any of them, and their gradients begin inside the trunk."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(LinearBlock() for _ in range(5))

    def forward(self, x: Tensor) -> list[Tensor]:
        x, exits = self.stem(x), []
        for block in self.blocks:
            x = block(x)
            exits.append(self.head(x))
        return exits


class PreNorm(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width)
        self.ln_2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class SeparatePreNorm(PreNorm):
    """Which every topology connects: queries, keys and values can be read apart."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.attn = SeparateAttention(width)  # type: ignore[assignment]


class PostNorm(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = self.ln_1(x + self.attn(x))
        return self.ln_2(x + self.mlp(x))


class Parallel(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.ln_1(x)) + self.mlp(self.ln_2(x))


class ParallelFirst(PreNorm):
    """The branches are added up before the stream."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        return self.mlp(y) + self.attn(y) + x


class Scaled(PreNorm):
    """A constant, a learned gate computed from the input, and a layer scale on the branches."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.gamma = nn.Parameter(torch.linspace(0.1, 0.5, width))
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.attn(self.ln_1(x))
        x = x + self.gamma * self.mlp(self.ln_2(x))
        y = self.ln_2(x)
        return x + torch.sigmoid(self.gate(y)) * self.mlp(y)


class AddNorm(nn.Module):
    """A helper that does the add of the block that calls it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.ln, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.ln(self.dropout(y) + x)


class WithAddNorm(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.attn, self.addnorm1 = Attention(width), AddNorm(width)
        self.mlp, self.addnorm2 = Mlp(width), AddNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.addnorm1(x, self.attn(x))
        return self.addnorm2(y, self.mlp(y))


class DropPath(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device) >= self.rate
        return x * kept / (1 - self.rate)


class WithDropPath(PreNorm):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.drop_path, self.drop = DropPath(0.3), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.drop(self.attn(self.ln_1(x))))
        return x + self.drop_path(self.drop(self.mlp(self.ln_2(x))))


class InPlace(PreNorm):
    """``+=`` on a branch's own result."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.attn(self.ln_1(x))
        y += x
        return self.mlp(self.ln_2(y)).add_(y)


class WithMask(PreNorm):
    """An optional argument, keyword arguments and a tuple as the result."""

    def forward(self, hidden: Tensor, mask: Tensor | None = None, *, flag: bool = False) -> tuple[Tensor, Tensor]:
        residual = hidden
        hidden = self.attn(self.ln_1(hidden))
        if mask is not None:
            hidden = hidden * mask
        hidden = residual + hidden
        residual = hidden
        hidden = residual + self.mlp(self.ln_2(hidden))
        return hidden, residual.detach().mean()


class OtherSelf(nn.Module):
    """Its forward does not call itself ``self``."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(this, x):  # type: ignore[no-untyped-def]  # noqa: N805
        return x + this.mlp(this.norm(x))


class ResidualUnit(nn.Module):
    """``relu(x + f)``."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + x)


class BasicBlock(nn.Module):
    """torchvision's way: the shortcut is projected where the width changes."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or before != width:
            self.downsample = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


# -- models ------------------------------------------------------------------------------------------------------------


class NanoGPT(nn.Module):
    """Returns (logits, loss); with targets all logits, without only the last ones."""

    def __init__(self, block: Callable[[], nn.Module] = PreNorm, depth: int = DEPTH, context: int = 32) -> None:
        super().__init__()
        self.context = context
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(context, WIDTH),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList([block() for _ in range(depth)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, t = idx.size()
        assert t <= self.context, f"cannot forward a sequence of length {t}"
        positions = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(positions))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Stack(nn.Module):
    """Blocks in a list, called in a loop."""

    def __init__(self, block: Callable[[], nn.Module], depth: int = DEPTH) -> None:
        super().__init__()
        self.inp = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList([block() for _ in range(depth)])
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class MaskedStack(Stack):
    """Hands an optional mask to blocks that return tuples."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x, mask=mask)[0]
        return self.out(x)


class LoopGPT(nn.Module):
    """``x = attn(x) + x`` in the parent's loop."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            [
                nn.ModuleList(
                    [nn.Sequential(nn.LayerNorm(WIDTH), Attention()), nn.Sequential(nn.LayerNorm(WIDTH), Mlp())]
                )
                for _ in range(depth)
            ]
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.emb(idx)
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.fn(x, *args, **kwargs) + x


class PlusMlp(nn.Module):
    """x + f(x) with a ReLU after the add, no norm and no bias: IDInit's network of Figure 18."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.w1, self.w2 = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.w2(torch.relu(self.w1(x))))


def wrapped(depth: int = DEPTH) -> nn.Module:
    blocks = [
        nn.Sequential(
            Residual(nn.Sequential(nn.LayerNorm(WIDTH), Attention())),
            Residual(nn.Sequential(nn.LayerNorm(WIDTH), Mlp())),
        )
        for _ in range(depth)
    ]
    return nn.Sequential(nn.Linear(8, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5))


class ShortcutUnit(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) * 0.1


class EDSR(nn.Module):
    """Residual blocks inside a long skip."""

    def __init__(self, width: int = 8, depth: int = DEPTH) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(*[ShortcutUnit(width) for _ in range(depth)], nn.Conv2d(width, width, 3, padding=1))
        self.tail = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        res = self.body(x)
        res += x
        return self.tail(res)


class ConvNet(nn.Module):
    """One stage of equal ``relu(x + f)`` blocks."""

    def __init__(self, width: int = 8, depth: int = DEPTH) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*[ResidualUnit(width) for _ in range(depth)])
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class ProjectionNet(nn.Module):
    """Two stages of different widths; the second begins with a projected shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1), BasicBlock(16, 16, 1))
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = self.layer2(self.layer1(x))
        return self.fc(x.mean((2, 3)))


class TwoWidths(nn.Module):
    """A linear map between two stages of blocks in one list each."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 16)
        self.narrow = nn.ModuleList([PreNorm(16) for _ in range(2)])
        self.widen = nn.Linear(16, WIDTH)
        self.wide = nn.ModuleList([PreNorm(WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.narrow:
            x = layer(x)
        x = self.widen(x)
        for layer in self.wide:
            x = layer(x)
        return x


class KeepsStates(nn.Module):
    """An encoder that shortens its states half-way, and returns all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([PreNorm() for _ in range(4)])

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        kept: tuple[Tensor, ...] = ()
        for number, block in enumerate(self.blocks):
            x = block(x[:, ::2] if number == 2 else x)
            kept = (*kept, x)
        return x, kept


class TakesStates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([PreNorm(), PreNorm()])

    def forward(self, last: Tensor, first: Tensor) -> Tensor:
        x = last.repeat_interleave(2, 1) + first
        for block in self.blocks:
            x = block(x)
        return x


class TakesKept(nn.Module):
    """A long skip around blocks at half the length, from a module that keeps its states to one that takes them."""

    def __init__(self, encoder: type[nn.Module] = KeepsStates) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder(), TakesStates()

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.encoder(x)
        return self.decoder(x, kept[1])


class CrossBlock(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1, self.self_attn = nn.LayerNorm(width), Attention(width)
        self.norm2, self.cross_attn = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm3, self.ffn = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm1(x))
        x = x + self.cross_attn(self.norm2(x), memory, memory)[0]
        return x + self.ffn(self.norm3(x))


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.src, self.tgt = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)
        self.encoder = nn.ModuleList([PreNorm() for _ in range(2)])
        self.decoder = nn.ModuleList([CrossBlock() for _ in range(2)])
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.src(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.tgt(target)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.out(x)


class Shared(Stack):
    """One block, called several times."""

    def __init__(self, depth: int = DEPTH) -> None:
        block = PreNorm()
        super().__init__(lambda: block, depth)


class Reordered(Stack):
    """Calls its blocks in the order `order`."""

    order: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for number in self.order:
            x = self.layers[number](x)
        return self.out(x)


class Interrupted(Stack):
    """Turns what flows between its blocks into a new tensor, when told to."""

    interrupt = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
            if self.interrupt:
                x = torch.zeros(2, 9, WIDTH)
        return self.out(x)


# -- the hand-written models as a table --------------------------------------------------------------------------------


class CollectsFeatures(nn.Module):
    """Uses the hidden states after every second block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(PreNorm(width) for _ in range(4))
        self.head = nn.Linear(2 * width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        features = []
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number % 2:
                features.append(x)
        return self.head(torch.cat(features, -1))


class UNet(nn.Module):
    """Each stage's output is used again later; stages on the way up begin with a linear map."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.down = nn.ModuleList(nn.Sequential(PreNorm(width), PreNorm(width)) for _ in range(2))
        self.up = nn.ModuleList(nn.Sequential(PreNorm(width), PreNorm(width)) for _ in range(2))
        self.join = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        kept = []
        for stage in self.down:
            x = stage(x)
            kept.append(x)
        for stage, join in zip(self.up, self.join, strict=True):
            x = stage(join(torch.cat([x, kept.pop()], -1)))
        return x


class Backwards(nn.Module):
    """Blocks in another order than their container's."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(PreNorm(width) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in reversed(self.blocks):
            x = block(x)
        return x


class TwoStreamBlock(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.left, self.right, self.cross = Mlp(width), Mlp(width), nn.Linear(width, width)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.left(x) + self.cross(y).mean(1, keepdim=True)
        y = y + self.right(y)
        return x, y


class TwoStreams(nn.Module):
    """Blocks that two streams run through, as in multimodal diffusion transformers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Linear(8, width) for _ in range(2))
        self.blocks = nn.ModuleList(TwoStreamBlock(width) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x, y = self.embed[0](x), self.embed[1](x)
        for block in self.blocks:
            x, y = block(x, y)
        return x + y


class ReturnsMore(PreNorm):
    """Returns what came in and what stood between its adds beside the result."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        middle = x + self.attn(self.ln_1(x))
        return middle + self.mlp(self.ln_2(middle)), middle, x


class UsesMore(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.layers = nn.ModuleList(ReturnsMore(width) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        others = []
        for layer in self.layers:
            x, middle, before = layer(x)
            others += [middle.square().mean(), before.square().mean()]
        return x * torch.stack(others).tanh().mean()


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with inputs, and what the finder should say: residual adds and blocks of each trunk."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    trunks: dict[str, tuple[int, int]]


def _stack(block: Callable[[], nn.Module], adds: int, inputs: Callable[[], Tensor] = vectors) -> Case:
    return Case(lambda: Stack(block), lambda: (inputs(),), {"layers": (DEPTH * adds, DEPTH)})


CASES: dict[str, Case] = {
    "nanogpt": Case(NanoGPT, lambda: (token_ids(), token_ids()), {"transformer.h": (6, 3)}),
    "nanogpt-no-targets": Case(NanoGPT, lambda: (token_ids(),), {"transformer.h": (6, 3)}),
    "loop": Case(LoopGPT, lambda: (token_ids(),), {"layers": (6, 3)}),
    "wrapped": Case(wrapped, lambda: (vectors(),), {"Sequential": (6, 3)}),
    "pre-norm": _stack(PreNorm, 2),
    "post-norm": _stack(PostNorm, 2),
    "parallel": _stack(Parallel, 1),
    "parallel-first": _stack(ParallelFirst, 1),
    "scaled": _stack(Scaled, 3),
    "add-norm": _stack(WithAddNorm, 2),
    "drop-path": _stack(WithDropPath, 2),
    "in-place": _stack(InPlace, 2),
    "other-self": _stack(OtherSelf, 1),
    "masked": Case(lambda: MaskedStack(WithMask), lambda: (vectors(), torch.ones(9, 1)), {"layers": (6, 3)}),
    "unmasked": Case(lambda: MaskedStack(WithMask), lambda: (vectors(),), {"layers": (6, 3)}),
    "edsr": Case(EDSR, lambda: (images(),), {"body": (3, 3)}),
    "conv": Case(ConvNet, lambda: (images(),), {"blocks": (3, 3)}),
    "projection": Case(ProjectionNet, lambda: (images(),), {"layer1": (2, 2), "layer2": (3, 3)}),
    "two-widths": Case(TwoWidths, lambda: (vectors(),), {"narrow": (4, 2), "wide": (4, 2)}),
    "encoder-decoder": Case(
        EncoderDecoder, lambda: (vectors(), vectors(length=5)), {"encoder": (4, 2), "decoder": (6, 2)}
    ),
    "collects-features": Case(CollectsFeatures, lambda: (vectors(),), {"blocks": (8, 4)}),
    "u-net": Case(UNet, lambda: (vectors(),), {"down": (8, 2), "up.0": (4, 2), "up.1": (4, 2)}),
    "returns-more": Case(UsesMore, lambda: (vectors(),), {"layers": (6, 3)}),
    "backwards": Case(Backwards, lambda: (vectors(),), {"blocks": (6, 3)}),
    "two-streams": Case(TwoStreams, lambda: (vectors(),), {"blocks": (3, 3), "blocks'": (3, 3)}),
    "shared": Case(Shared, lambda: (vectors(),), {"layers.0": (6, 3)}),
}


class Keyed:
    """Is read and written by key alone."""

    def __init__(self, **held: Any) -> None:
        self.held = held

    def keys(self) -> list[str]:
        return [*self.held]

    def __contains__(self, key: str) -> bool:
        return key in self.held

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.held[key] = value
