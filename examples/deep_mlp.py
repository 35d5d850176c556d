"""Start a deep residual MLP without norms from different initialisers.

    python examples/deep_mlp.py --depth 64

With Kaiming's variance, right for ReLU networks without shortcuts, the stream doubles its variance in each block: after
64 blocks nothing trains. IDInit and ZAS begin (nearly) as the identity; ReZero, a topology, learns a scale for each
branch that begins at 0. PyTorch's default, a sixth of Kaiming's variance, is the control.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from sklearn.datasets import load_digits
from torch import Tensor, nn

import rewire
from rewire.plotting import plot_curves


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x).relu())


def make(depth: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), *(Block(64) for _ in range(depth)), nn.Linear(64, 10))


def main(
    depth: Annotated[int, typer.Option(min=2)] = 64,
    steps: Annotated[int, typer.Option(min=1)] = 300,
    out: Path = Path("out/deep_mlp"),
) -> None:
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    held_out = torch.arange(len(x)) % 6 == 0
    x_train, y_train = x[~held_out], y[~held_out]

    models = {"PyTorch's default": make(depth)}
    for name in ("kaiming", "idinit", "zas"):
        models[name] = make(depth)
        rewire.initialize(models[name], name)
    models["rezero"] = rewire.compile(make(depth), "rezero", start="paper", example_inputs=(x[:4],))
    optimizers = {
        name: torch.optim.AdamW(rewire.parameter_groups(model, lr=1e-3, weight_decay=0.0))
        for name, model in models.items()
    }

    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in models}
    for step in range(1, steps + 1):
        rows = torch.randint(len(x_train), (64,))
        for name, model in models.items():
            nn.functional.cross_entropy(model(x_train[rows]), y_train[rows]).backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            if step % max(1, steps // 30) == 0:
                with torch.no_grad():
                    loss = nn.functional.cross_entropy(model(x[held_out]), y[held_out]).item()
                curves[name].append((step, loss))
    for name, points in curves.items():
        print(f"{name}: {points[-1][1]:.4g}")
    out.mkdir(parents=True, exist_ok=True)
    shown = {name: [(step, min(loss, 3.0)) for step, loss in points] for name, points in curves.items()}
    plot_curves(shown, out / "loss.png", "step", "validation loss (3 and more: 3)")


if __name__ == "__main__":
    typer.run(main)
