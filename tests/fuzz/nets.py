"""Random residual nets, as source text: what people write, and what trips up those who rewrite it.

A net is a file of its own, so that its forwards have a text; `nets` is a hypothesis strategy, which shrinks to a plain
pre-norm stack.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from torch import nn

from fuzz import twins

WIDTH = 8

#: One residual add in a block's forward: ``{n}`` is its number; f and g are maps, norm a norm, gamma a vector.
ADDS = {
    "plain": "x = x + self.f{n}(self.norm{n}(x))",
    "branch first": "x = self.f{n}(self.norm{n}(x)) + x",
    "augmented": "x = x.clone()\nx += self.f{n}(self.norm{n}(x.clone()))",
    "residual": "residual = x\nx = self.norm{n}(x)\nx = self.f{n}(x)\nx = residual + x",
    "named branch": "h = self.norm{n}(x)\nh = self.f{n}(h)\nx = x + h",
    "torch.add": "x = torch.add(x, self.f{n}(self.norm{n}(x)))",
    "alpha": "x = torch.add(x, self.f{n}(self.norm{n}(x)), alpha=0.5)",
    "method": "x = x.add(self.f{n}(self.norm{n}(x)))",
    "in place": "x = x.clone()\nx.add_(self.f{n}(self.norm{n}(x.clone())))",
    "in place, a view": "x = x.clone()\ny = x[..., :]\nx += self.f{n}(self.norm{n}(x.clone()))\nx = x + 0.1 * y",
    "in place, a list": "x = x.clone()\nkept = [x]\nx += self.f{n}(self.norm{n}(x.clone()))\nx = x + 0.1 * kept[0]",
    "in place, a name": "x = x.clone()\ny = x\nx.add_(self.f{n}(self.norm{n}(x.clone())))\nx = x + 0.1 * y",
    "in place, a dead name": "x = y = x.clone()\ny = y.mean()\nx += self.f{n}(self.norm{n}(x.clone()))\nx = x + y",
    "in place through a view": "x = x.clone()\ny = x.view(-1)\ny += self.f{n}(self.norm{n}(x.clone())).view(-1)",
    "walrus": "x = (y := x + self.f{n}(self.norm{n}(x))) + self.g{n}(x)",
    "casts that change nothing": "x = x.float().contiguous() + self.f{n}(self.norm{n}(x.to(torch.float32)))",
    "parallel in a loop": "h = self.norm{n}(x)\nfor f in (self.f{n}, self.g{n}):\n    x = x + f(h)",
    "post-norm": "x = self.norm{n}(x + self.f{n}(x))",
    "post-activation": "x = F.relu(x + self.f{n}(x))",
    "parallel": "x = x + self.f{n}(self.norm{n}(x)) + self.g{n}(self.norm{n}(x))",
    "parallel sum": "x = x + (self.f{n}(self.norm{n}(x)) + self.g{n}(x))",
    "parallel in statements": "h = self.norm{n}(x)\ny = x + self.f{n}(h)\nx = y + self.g{n}(h)",
    "scaled": "x = x + self.gamma{n} * self.f{n}(self.norm{n}(x))",
    "dropout": "x = x + F.dropout(self.f{n}(self.norm{n}(x)), 0.3, self.training)",
    "drop path": "x = x + drop_path(self.f{n}(self.norm{n}(x)), self.training)",
    "helper function": "x = residual_add(x, self.f{n}(self.norm{n}(x)))",
    "helper method": "x = self.add(x, self.f{n}(self.norm{n}(x)))",
    "helper module": "x = self.adder(self.f{n}(self.norm{n}(x)), x)",
    "helper with the branch": "x = self.sub{n}(x)",
    "wrapped": "x = apply_residual(self.f{n}, self.norm{n}, x)",
    "inner residual": "x = x + self.r{n}(self.norm{n}(x))",
    "branch of two": "h = self.norm{n}(x)\nx = x + self.f{n}(h) * torch.sigmoid(self.g{n}(h))",
    "broadcast branch": "x = x + self.f{n}(self.norm{n}(x)).mean(1, keepdim=True)",
    "a constant, too": "x = x + self.f{n}(self.norm{n}(x)) + 0.5",
    "cast": "x = x + self.f{n}(self.norm{n}(x.float())).to(x.dtype)",
    "view": "b, t, d = x.shape\nh = self.f{n}(self.norm{n}(x).reshape(b * t, d)).view(b, t, d)\nx = x + h",
    "flat stream": (
        "b, t, d = x.shape\nx = x.reshape(b * t, d)\nx = x + self.f{n}(self.norm{n}(x))\nx = x.view(b, t, d)"
    ),
    "transposed": "x = x.transpose(0, 1)\nx = x + self.f{n}(self.norm{n}(x))\nx = x.transpose(0, 1)",
    "loop": "for f in (self.f{n}, self.g{n}):\n    x = x + f(self.norm{n}(x))",
    "if training": (
        "h = self.f{n}(self.norm{n}(x))\nif self.training:\n    h = h * 0.5\nelse:\n    h = h * 0.9\nx = x + h"
    ),
    "random scale": (
        "h = self.f{n}(self.norm{n}(x))\nif self.training:\n    h = h * (0.5 + random.random())\nx = x + h"
    ),
    "drawn scale": "x = x + self.f{n}(self.norm{n}(x)) * (torch.rand(()).item() if self.training else 0.5)",
    "grad mode in the branch": (
        "h = self.f{n}(self.norm{n}(x))\nif torch.is_grad_enabled():\n    h = h * 1.0\nx = x + h"
    ),
    "optional branch mask": ("h = self.f{n}(self.norm{n}(x))\nif mask is not None:\n    h = h * mask\nx = x + h"),
    "in-place branch mask": (
        "h = self.norm{n}(x)\nif mask is not None:\n    h = h.masked_fill(mask == 0, 0.0)\nx = x + self.f{n}(h)"
    ),
    "autocast in the branch": (
        'with torch.autocast("cpu", enabled=False):\n    h = self.f{n}(self.norm{n}(x))\nx = x + h'
    ),
    "noise in the branch": "h = self.norm{n}(x)\nx = x + self.f{n}(h + 0.1 * torch.randn_like(h) * self.training)",
    "two places": (
        "if self.training:\n    x = x + 0.5 * self.f{n}(self.norm{n}(x))\nelse:\n    x = x + self.f{n}(self.norm{n}(x))"
    ),
    "attention": "x = x + self.attn{n}(self.norm{n}(x))",
    "applied": "x = x + self.attn{n}(Identity.apply(self.norm{n}(x)))",
    "applied to a variable": "h = self.norm{n}(x)\nh = Identity.apply(h)\nx = x + self.attn{n}(h)",
    "applied inside": "x = x + self.attn{n}(self.norm{n}(Identity.apply(x)))",
    "static method": "x = x + self.attn{n}(Ops.static(self.norm{n}(x)))",
    "class method": "x = x + self.attn{n}(Ops.of_class(1, self.norm{n}(x)))",
    "method of an object": "x = x + self.attn{n}(self.ops.method(x=self.norm{n}(x)))",
    "local object": "ops = self.ops\nh = ops.method(self.norm{n}(x))\nx = x + self.attn{n}(h)",
    "partial": "x = x + self.attn{n}(PARTIAL(self.norm{n}(x)))",
    "function of a module": "lib = self.lib\nh = lib.functional.dropout(self.norm{n}(x), 0.0)\nx = x + self.attn{n}(h)",
    "a tuple": "x = x + self.attn{n}(Ops.first((self.norm{n}(x), mask)))",
    "a list back": "x = x + self.attn{n}(Ops.listed(self.norm{n}(x))[0])",
    "rows": "rows = torch.tensor([1])\nx = x.index_add(0, rows, self.f{n}(self.norm{n}(x[rows])))",
    "rows in place": "rows = torch.tensor([1])\nx[rows] += self.f{n}(self.norm{n}(x[rows]))",
    "rows assigned": "x, rows = x.clone(), torch.tensor([1])\nx[rows] = x[rows] + self.f{n}(self.norm{n}(x[rows]))",
    "rows of a part": "rows = torch.tensor([1])\nh = x[rows]\nx[rows] = self.f{n}(self.norm{n}(h)) + h",
    "rows, index_add_": "rows = torch.tensor([1])\nx.index_add_(0, rows, self.f{n}(self.norm{n}(x[rows])))",
    "rows, index_put_": (
        "x, rows = x.clone(), torch.tensor([1])\n"
        "x.index_put_((rows,), self.f{n}(self.norm{n}(x[rows])), accumulate=True)"
    ),
    "rows in a helper": "rows = torch.tensor([1])\nx = add_rows(x, rows, self.f{n}(self.norm{n}(x[rows])))",
    "tokens in place": "x[:, 1:] += self.f{n}(self.norm{n}(x[:, 1:].clone()))",
    "tokens assigned": "x = x.clone()\nx[:, 1:] = x[:, 1:] + self.f{n}(self.norm{n}(x[:, 1:].clone()))",
    "tokens added to": "x = x.clone()\nx[:, 1:].add_(self.f{n}(self.norm{n}(x[:, 1:].clone())), alpha=0.5)",
    "decorated": "x = logged_add(x, self.f{n}(self.norm{n}(x)))",
    "decorated method": "x = self.logged_add(x, self.f{n}(self.norm{n}(x)))",
    "static": "x = self.static_add(x, self.f{n}(self.norm{n}(x)))",
    "to the branch": "h = self.f{n}(self.norm{n}(x))\nh.add_(x)\nx = h",
    "keywords": "x = residual_add(out=self.f{n}(self.norm{n}(x)), x=x)",
    "partial helper": "x = functools.partial(residual_add, x)(self.f{n}(self.norm{n}(x)))",
    "conditional expression": "x = x + self.f{n}(self.norm{n}(x)) if x.shape[1] else x",
    "match": "match x.dim():\n    case 3:\n        x = x + self.f{n}(self.norm{n}(x))\n    case _:\n        x = 2 * x",
    "finally": "try:\n    x = x + self.f{n}(self.norm{n}(x))\nfinally:\n    self.calls += 1",
    "sandwich": "x = x + self.norm{n}(self.f{n}(x))",
    "fused": "x = x + self.fused{n}(self.norm{n}(x))",
    "checkpointed branch": (
        "x = x + torch.utils.checkpoint.checkpoint(lambda h: self.attn{n}(h), self.norm{n}(x), use_reentrant=False)"
    ),
    "if there is a mask": "if mask is not None:\n    x = x + self.f{n}(self.norm{n}(x))",
    "another branch without a mask": (
        "if mask is not None:\n    x = x + self.f{n}(self.norm{n}(x))\nelse:\n    x = x + 0.5 * self.g{n}(x)"
    ),
    "in place without a mask": (
        "if mask is None:\n    x = x.clone()\n    x += self.f{n}(self.norm{n}(x.clone()))\n"
        "else:\n    x = x + self.f{n}(self.norm{n}(x))"
    ),
    "a new shortcut without a mask": ("y = x\nif mask is None:\n    y = x * 1.0\nx = y + self.f{n}(self.norm{n}(x))"),
    "a mean of short ones": (
        "h = self.f{n}(self.norm{n}(x))\nif x.shape[1] < 4:\n    h = h.mean(1, keepdim=True)\nx = x + h"
    ),
    "masked in place": ("keep = torch.arange(x.shape[1]) % 2 == 0\nx[:, keep] += self.f{n}(self.norm{n}(x[:, keep]))"),
}

#: What else a forward does, before or after an add.
ASIDES = {
    "nothing": "",
    "counts": "self.calls += 1",
    "logs": "self.log.append(float(x.detach().mean()))",
    "statistic": "if self.training:\n    with torch.no_grad():\n        self.mean.mul_(0.9).add_(0.1 * x.mean())",
    "python's random": "if self.training:\n    x = x * (0.5 + random.random())",
    "numpy's random": "if self.training:\n    x = x * float(0.5 + np.random.rand())",
    "a drawn item": "if self.training and torch.rand(()).item() < 0.5:\n    x = x * 2",
    "noise": "if self.training:\n    x = x + 0.1 * torch.randn_like(x)",
    "grad mode": "if torch.is_grad_enabled():\n    x = x * 1.5",
    "autocast": 'with torch.autocast("cpu", enabled=False):\n    x = self.mix(x)',
    "no grad": "with torch.no_grad():\n    shift = x.mean()\nx = x - shift",
    "mask": "if mask is not None:\n    x = x * mask",
    "is tensor": "if torch.is_tensor(mask):\n    x = x * mask",
    "in-place mask": "if mask is not None:\n    x = x.clone()\n    x.masked_fill_(mask == 0, 0.0)",
    "isinstance": "x = x * (2.0 if isinstance(x, torch.Tensor) else 1.0)",
    "kwargs": 'x = x * kwargs.get("scale", 1.0)',
    "identity": "y = x\nx = x * 2 if y is x else x",
    "attribute": "self.last = x",
    "detached attribute": "self.last = x.detach()",
    "try": "try:\n    x = self.missing(x)\nexcept AttributeError:\n    pass",
    "assert": "assert x.dim() == 3 and x.shape[-1] == WIDTH",
    "cast there and back": "x = x.double().float()",
    "contiguous": "x = x.contiguous()",
    "writes to its data": "x = x * 1.0\nx.data.mul_(0.5)",
    "a view of it": "y = x[..., :4]\nx = x * (1 + 0.1 * y.mean())",
    "clone": "x = x.clone()",
    "scale": "x = x * 0.7",
    "subtract": "x = x - x.mean(-1, keepdim=True)",
    "add positions": "x = x + self.positions[: x.shape[1]]",
    "double": "x = x + x",
    "map": "x = self.mix(x)",
    "child's flag": "if self.mix.training:\n    x = x * 0.3",
    "a local class": "class Holder:\n    value = 0.5\nx = x * Holder.value",
    "comprehension": "x = x * sum([0.25 for _ in range(4)])",
    "lambda": "scale = lambda v: v * 0.5  # noqa: E731\nx = scale(x)",
    "folded": "x = Ops.fold(x)\nx = Ops.unfold(x)",
    "walrus": "if (n := x.shape[1]) > 1:\n    x = x / n",
    "scale without a mask": "if mask is None:\n    x = x * 0.5",
}

#: How the blocks are called: the body of the net's forward between its stem and its head.
BODIES = {
    "loop": "for block in self.blocks:\n    x = block(x, mask=mask)",
    "sequential": "x = self.row(x)",
    "indices": "for i in range(len(self.blocks)):\n    x = self.blocks[i](x, mask)",
    "collects": (
        "seen = []\nfor block in self.blocks:\n    x = block(x, mask)\n    seen.append(x)\nx = x + 0.1 * sum(seen)"
    ),
    "collects before": (
        "seen = ()\nfor block in self.blocks:\n    seen = seen + (x,)\n    x = block(x, mask)\nx = x * seen[0].mean()"
    ),
    "keeps": "for block in self.blocks:\n    x = block(x, mask)\n    self.hidden = x",
    "scales between": "for block in self.blocks:\n    x = block(x, mask)\n    x = x * 0.8",
    "if tensor": "for block in self.blocks:\n    x = block(x, mask)\n    if torch.is_tensor(x):\n        x = x * 0.8",
    "asks": (
        "for block in self.blocks:\n"
        "    x = block(x, mask)\n    assert x.shape[-1] == WIDTH and x.dtype == torch.float32"
    ),
    "reads": (
        "total = 0\nfor block in self.blocks:\n"
        "    x = block(x, mask)\n    total = total + x.abs().mean()\nx = x / (1 + total)"
    ),
    "slices": "for block in self.blocks:\n    x = block(x, mask)\nx = x[:, :2]",
    "skips in reverse": (
        "seen = []\nfor block in self.blocks:\n    x = block(x, mask)\n    seen.append(x)\n"
        "for h in seen[::-1]:\n    x = x + h"
    ),
    "skips that are popped": (
        "seen = []\nfor block in self.blocks:\n    seen.append(x)\n    x = block(x, mask)\n"
        "while seen:\n    x = seen.pop() + x"
    ),
    "in a dict": 'state = {"x": x}\nfor block in self.blocks:\n    state = block.on_dict(state, mask)\nx = state["x"]',
    "in a changing dict": 'state = {"x": x}\nfor block in self.blocks:\n    block.in_dict(state, mask)\nx = state["x"]',
    "in a dataclass": (
        "state = Output(None, x)\nfor block in self.blocks:\n    state = block.on_dataclass(state, mask)\n"
        "x = state.hidden"
    ),
    "long skip": "first = x\nfor block in self.blocks:\n    x = block(x, mask)\nx = first + x",
    "x0": "x0 = x\nfor block in self.blocks:\n    x = block(0.9 * x + 0.1 * x0, mask)",
    "norm between": "for block in self.blocks:\n    x = self.between(block(x, mask))",
    "checkpoint": (
        "for block in self.blocks:\n    x = torch.utils.checkpoint.checkpoint(block, x, mask, use_reentrant=False)"
    ),
    "last twice": "for block in [*self.blocks, self.blocks[-1]]:\n    x = block(x, mask)",
    "zip": "for block, scale in zip(self.blocks, (0.5, 1.0, 2.0, 3.0)):\n    x = block(x, mask, scale=scale)",
    "enumerate": "for i, block in enumerate(self.blocks):\n    x = block(x, mask)\n    if i == 1:\n        x = x * 0.5",
    "detaches": (
        "for i, block in enumerate(self.blocks):\n    x = block(x, mask)\n    if i == 1:\n        x = x.detach()"
    ),
    "stops gradients": (
        "for i, block in enumerate(self.blocks):\n    x = block(x, mask)\n    if i == 0:\n        x = Stop.apply(x)"
    ),
    "identity without gradients": (
        "for i, block in enumerate(self.blocks):\n    x = block(x, mask)\n    if i == 0:\n"
        "        with torch.no_grad():\n            x = x.clone()"
    ),
    "keywords": "for block in self.blocks:\n    x = block(mask=mask, x=x)",
    "partials": "for block in self.blocks:\n    x = functools.partial(block, mask=mask)(x)",
    "while": "i = 0\nwhile i < len(self.blocks):\n    x = self.blocks[i](x, mask)\n    i += 1",
    "in a list": "state = [x]\nfor block in self.blocks:\n    state = [block(state[0], mask)]\nx = state[0]",
    "forwards": "for forward in [block.forward for block in self.blocks]:\n    x = forward(x, mask)",
    "reduce": "x = functools.reduce(lambda h, block: block(h, mask), self.blocks, x)",
    "returns": (
        "for i, block in enumerate(self.blocks):\n    x = block(x, mask)\n"
        "    if i == len(self.blocks) - 1:\n        return self.head(x)"
    ),
    "half": (
        "half = len(self.blocks) // 2\nfor block in self.blocks[:half]:\n    x = block(x, mask)\nx = x * 0.5\n"
        "for block in self.blocks[half:]:\n    x = block(x, mask)"
    ),
}

#: What the net returns of ``x``.
RETURNS = {
    "head": "return self.head(self.last_norm(x))",
    "mean": "return x.mean(1)",
    "dict": 'return {"logits": self.head(x), "hidden": x}',
    "tuple": "return self.head(x), [x]",
    "object": "return Output(self.head(x), x)",
}

_FILE = '''
import dataclasses
import functools
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

WIDTH = {width}


@dataclasses.dataclass
class Output:
    logits: Any
    hidden: Any


def drop_path(x, training):
    if not training:
        return x
    keep = torch.rand(x.shape[0], 1, 1) < 0.7
    return x * keep / 0.7


def residual_add(x, out):
    """Adds what a branch made."""
    return x + out


def logged(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


@logged
def logged_add(x, out):
    return x + out


def add_rows(x, rows, out):
    x[rows] += out
    return x


def apply_residual(f, norm, x):
    return x + f(norm(x))


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad


class Stop(Identity):
    @staticmethod
    def backward(ctx, grad):
        return torch.zeros_like(grad)


class Ops:
    @staticmethod
    def static(x):
        return x * 1

    @classmethod
    def of_class(cls, factor, x):
        return x * factor

    @staticmethod
    def first(values):
        return values[0] * 1

    @staticmethod
    def listed(x):
        return [x * 1]

    @staticmethod
    def fold(x):
        return x.flatten(0, 1)

    @staticmethod
    def unfold(x):
        return x.unflatten(0, (2, -1))

    def method(self, x):
        return x * 1


def scaled(factor, x):
    return x * factor


PARTIAL = functools.partial(scaled, 1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        return self.o_proj(F.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj(F.scaled_dot_product_attention(q, k, v))


class Adder(nn.Module):
    def forward(self, out, x):
        return x + out


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class SubLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x):
        return x + self.fn(self.norm(x))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + torch.tanh(self.fc(x))
        return self.fc(x)


MAKES = {{
    "f": Mlp,
    "attn": Attention,
    "fused": Fused,
    "g": lambda: nn.Linear(WIDTH, WIDTH),
    "r": Inner,
    "sub": SubLayer,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "gamma": lambda: nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)),
    "mix": lambda: nn.Linear(WIDTH, WIDTH),
    "adder": Adder,
}}


class Base(nn.Module):
    lib = nn

    def __init__(self):
        super().__init__()
        self.ops = Ops()
        for name in self.parts:
            setattr(self, name, MAKES[name.rstrip("0123456789")]())
        self.positions = nn.Parameter(torch.randn(32, WIDTH))
        self.register_buffer("mean", torch.zeros(()))
        self.calls, self.log = 0, []

    def add(self, x, out):
        return x + out

    @logged
    def logged_add(self, x, out):
        return x + out

    @staticmethod
    def static_add(x, out):
        return x + out

    def on_dict(self, state, mask):
        return {{**state, "x": self(state["x"], mask)}}

    def in_dict(self, state, mask):
        state["x"] = self(state["x"], mask)

    def on_dataclass(self, state, mask):
        return dataclasses.replace(state, hidden=self(state.hidden, mask))

{blocks}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([{makes}])
        self.row = nn.Sequential(*self.blocks)
        self.between, self.last_norm, self.head = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)
        self.hidden = None

    def forward(self, x, mask=None):
        x = self.stem(x)
{body}
'''


@dataclasses.dataclass(frozen=True)
class Net:
    """A random net: the forwards of its classes of blocks, in which order they come, and how they are called.

    Its twin is written in the plainest style.
    """

    forwards: tuple[tuple[str, ...], ...]
    order: tuple[int, ...]
    body: str
    returns: str
    twin: bool = False

    @property
    def source(self) -> str:
        blocks = "\n".join(self._block(number, parts) for number, parts in enumerate(self.forwards))
        calls = self._written(BODIES, twins.BODIES, self.body)
        body = _indented(f"{calls}\n{RETURNS[self.returns]}", 8)
        makes = ", ".join(f"Block{kind}()" for kind in self.order)
        return _FILE.format(width=WIDTH, blocks=blocks, makes=makes, body=body)

    @property
    def adds(self) -> int:
        """Residual adds of a run."""
        blocks = [sum(2 if part == "loop" else part in ADDS for part in self.forwards[kind]) for kind in self.order]
        return sum(blocks) + blocks[-1] * (self.body == "last twice")

    @property
    def repeats_effects(self) -> bool:
        """Whether checkpoints run again, in training mode, what draws from Python's or numpy's generators, or counts.

        torch winds neither back: gradients depend on the order in which blocks are run again, and statistics on
        whether they are.
        """
        effects = {"python's random", "numpy's random", "random scale", "statistic"}
        return self.body == "checkpoint" and not effects.isdisjoint(part for parts in self.forwards for part in parts)

    @property
    def counts_the_start(self) -> bool:
        """Whether a statistic is made in front of the first add: of the tensor that the trunk starts with or, if it
        starts in this function and not in one that is called, of what is read of it.
        """
        parts = self.forwards[self.order[0]]
        return "statistic" in parts[: next(number for number, part in enumerate(parts) if part in ADDS)]

    def _written(self, forms: dict[str, str], plain: dict[str, str], name: str) -> str:
        return plain.get(name, forms[name]) if self.twin else forms[name]

    def _block(self, number: int, parts: tuple[str, ...]) -> str:
        count, lines = 0, []
        for part in parts:
            if part in ADDS:
                lines.append(self._written(ADDS, twins.ADDS, part).format(n=count))
            else:
                lines.append(self._written(ASIDES, twins.ASIDES, part))
            count += part in ADDS
        forward = _indented("\n".join(line for line in lines if line) or "pass", 8)
        used = sorted(set(re.findall(r"self\.((?:f|g|r|sub|norm|gamma|attn|fused)\d|mix|adder)\b", forward)))
        head = f"    parts = {used}\n\n    def forward(self, x, mask=None, scale=1.0, **kwargs):"
        return f"\nclass Block{number}(Base):\n{head}\n{forward}\n        return x\n"

    def build(self, folder: Path) -> nn.Module:
        """The model, from a file in ``folder``."""
        name = "net_" + hashlib.sha256(self.source.encode()).hexdigest()[:16]
        if name not in sys.modules:
            path = folder / f"{name}.py"
            path.write_text(self.source)
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
        made: Any = sys.modules[name]
        net: nn.Module = made.Net()
        return net


def _indented(text: str, by: int) -> str:
    return "\n".join(" " * by + line if line else line for line in text.splitlines())


def nets() -> st.SearchStrategy[Net]:
    """Nets of one to four blocks of one or two classes, with one to three residual adds each, and up to two asides."""
    adds = st.lists(st.sampled_from(list(ADDS)), min_size=1, max_size=3)
    asides = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(list(ASIDES))), max_size=2)
    forwards = st.lists(st.builds(_mixed, adds, asides), min_size=1, max_size=2)
    return st.builds(
        lambda forwards, order, body, returns: Net(
            tuple(forwards), tuple(kind % len(forwards) for kind in order), body, returns
        ),
        forwards,
        st.lists(st.integers(0, 1), min_size=1, max_size=4),
        st.sampled_from(list(BODIES)),
        st.sampled_from(list(RETURNS)),
    )


def _mixed(adds: list[str], asides: list[tuple[int, str]]) -> tuple[str, ...]:
    parts = list(adds)
    for place, aside in asides:
        parts.insert(min(place, len(parts)), aside)
    return tuple(parts)
