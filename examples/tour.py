# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A tour of rewire
#
# A small language model is typed into this notebook, gets learned connections between all of its blocks, trains, and
# shows what it has learned. On a CPU that takes about two minutes.

# %%
# Installs rewire where it is missing, from the clone that this notebook is in. Elsewhere, set SOURCE to the path of a
# clone, or to what pip takes for a repository: `rewire-torch[viz] @ git+https://...`.
import importlib.util
import subprocess
import sys

SOURCE = "..[viz]"
if importlib.util.find_spec("rewire") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", SOURCE], check=True)

# %% [markdown]
# ## A model
#
# Nothing in it knows of rewire. `x + self.attention(...)` and `x + self.mlp(...)` are its residual adds.

# %%
import torch
from torch import nn
from torch.nn import functional as F

STEPS, LENGTH, WIDTH, DEPTH = 200, 64, 64, 6


class Attention(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids):
        x = self.bytes(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


torch.manual_seed(0)
plain = Model()

# %% [markdown]
# ## What would be connected?

# %%
import rewire

ids = torch.randint(256, (2, LENGTH))
rewire.inspect(plain, example_inputs=(ids,))

# %% [markdown]
# ## Rewire it
#
# `compile` edits the forwards in a copy, and compares outputs and gradients with the original's before it returns.

# %%
model = rewire.compile(plain, "ancre-ingoing", example_inputs=(ids,))
torch.testing.assert_close(model(ids), plain(ids))  # the same function, until it is trained
print(rewire.diff(model))

# %% [markdown]
# ## Train
#
# On the text behind Python's `help()`. Connection weights get a rate of their own, and no weight decay.

# %%
from pydoc_data.topics import topics

text = torch.tensor(list("\n\n".join(topics.values()).encode()))
optimizer = torch.optim.AdamW(rewire.parameter_groups(model, lr=3e-3, weight_decay=0.1, connection_lr=1e-3))
model.train()
for step in range(1, STEPS + 1):
    batch = text[torch.randint(len(text) - LENGTH - 1, (8, 1)) + torch.arange(LENGTH + 1)]
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0 or step == STEPS:
        print(f"step {step}: {loss.item():.3f}")

# %% [markdown]
# ## What was learned
#
# Row t says what block t reads; the diagonal is the plain shortcut.

# %%
from IPython.display import Image

rewire.plot(model, "weights.png")
Image("weights.png", width=500)

# %% [markdown]
# How signals and gradients pass through the blocks:

# %%
rewire.diagnose(model, (batch[:, :-1],))

# %% [markdown]
# ## Freeze, save, load
#
# Frozen, the learned weights are constants, and those below the threshold are dropped. `rewire.report(model,
# "report.html")` writes all of this on one page.

# %%
frozen, dropped = rewire.freeze(model, threshold=0.25, example_inputs=(ids,))
dropped

# %%
rewire.save(model.eval(), "rewired")
again = rewire.load("rewired", Model(), example_inputs=(ids,)).eval()
torch.equal(again(ids), model(ids))

# %% [markdown]
# Next: other topologies (`rewire.list_topologies()`), models of transformers and timm, the guides of the documentation.
