"""Learn depth connections, drop the weak ones, and export what is left to ONNX.

    python examples/prune_to_onnx.py

After `rewire.freeze` the connection weights are constants: an exported graph has a few multiplications and additions.
"""

from pathlib import Path
from typing import Annotated

import numpy
import onnxruntime
import torch
import typer
from sklearn.datasets import load_digits
from torch import Tensor, nn

import rewire
from rewire.plotting import plot_heatmap


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(self.norm(x)).relu())


def accuracy(outputs: Tensor, y: Tensor) -> float:
    return (outputs.argmax(1) == y).float().mean().item()


def main(
    steps: Annotated[int, typer.Option(min=1)] = 500,
    threshold: float = 0.05,
    out: Path = Path("out/prune_to_onnx"),
) -> None:
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    held_out = torch.arange(len(x)) % 6 == 0
    plain = nn.Sequential(nn.Linear(64, 64), *(Block(64) for _ in range(8)), nn.Linear(64, 10))
    model = rewire.compile(plain, "ancre-ingoing", start="paper", example_inputs=(x[:4],))
    optimizer = torch.optim.AdamW(rewire.parameter_groups(model, lr=1e-3, weight_decay=0.01, connection_lr=1e-2))
    for _ in range(steps):
        rows = torch.nonzero(~held_out)[torch.randint(int((~held_out).sum()), (64,)), 0]
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows]) + 0.01 * rewire.sparsity_penalty(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    frozen, report = rewire.freeze(model, threshold=threshold, example_inputs=(x[held_out],))
    print(report)
    out.mkdir(parents=True, exist_ok=True)
    torch.onnx.export(frozen, (x[held_out],), out / "model.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(out / "model.onnx")
    exported = torch.tensor(numpy.asarray(session.run(None, {session.get_inputs()[0].name: x[held_out].numpy()})[0]))
    with torch.no_grad():
        results = {"learned": model(x[held_out]), "frozen": frozen(x[held_out]), "ONNX": exported}
    for name, outputs in results.items():
        print(f"{name}: {accuracy(outputs, y[held_out]):.3f} of the digits right")
    torch.testing.assert_close(exported, results["frozen"], rtol=1e-3, atol=1e-4)
    matrices = {"learned": rewire.coefficients(model), "frozen": rewire.coefficients(frozen)}
    plot_heatmap({name: next(iter(of.values())) for name, of in matrices.items()}, out / "weights.png")


if __name__ == "__main__":
    typer.run(main)
