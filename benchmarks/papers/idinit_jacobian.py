"""Squared singular values of the input-output Jacobian of 64 blocks (arXiv 2503.04626, Figure 18)

Blocks x + W2 relu(W1 x) of width 64 without norms, on scikit-learn's digits (the paper: CIFAR-10), Adagrad at rate
0.01, batches of 100, as in the paper. chi is the mean squared singular value of the Jacobian of all blocks, over 8
images.
The paper's "default" is Kaiming's for ReLU nets (its Table 8); torch's own default for linear layers is shown too.
"""

from __future__ import annotations

import torch
from common import Claim, Outcome, axes, digits, main
from torch import Tensor, nn
from torch.nn import functional as F

import rewire

WIDTH, BLOCKS, EPOCHS, BATCH = 64, 64, 4, 100
STARTS = {"IDInit": "idinit", "Kaiming": "kaiming", "torch's": None}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.relu(self.inner(x)))


def network(init: str | None) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(WIDTH) for _ in range(BLOCKS)))
    net = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), blocks, nn.Linear(WIDTH, 10))
    if init:
        rewire.initialize(net, init)
    return net


@torch.no_grad()
def squared_singular_values(net: nn.Sequential, inputs: Tensor) -> Tensor:
    """Of the Jacobian of the blocks, [len(inputs), width]."""
    jacobians = torch.func.vmap(torch.func.jacrev(net[2]))(net[:2](inputs))
    return torch.linalg.svdvals(jacobians).square()


def train(init: str | None) -> tuple[list[Tensor], list[float]]:
    """Squared singular values at the start and after each epoch, and the mean loss of each epoch."""
    images, classes, _, _ = digits()
    inputs, net = images.flatten(1), network(init)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.01)
    spectra, losses = [squared_singular_values(net, inputs[:8])], []
    for _ in range(EPOCHS):
        epoch = []
        for batch in torch.randperm(len(inputs)).split(BATCH):
            loss = F.cross_entropy(net(inputs[batch]), classes[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            epoch.append(loss.item())
        spectra.append(squared_singular_values(net, inputs[:8]))
        losses.append(sum(epoch) / len(epoch))
    return spectra, losses


def run() -> Outcome:
    found = {name: train(init) for name, init in STARTS.items()}
    chi = {name: [values.mean().item() for values in spectra] for name, (spectra, _) in found.items()}
    listed = ", ".join(f"{value:.1f}" for value in chi["IDInit"][1:])
    plain = chi["torch's"][0]
    last = {name: losses[-1] for name, (_, losses) in found.items()}
    claims = (
        Claim(
            "IDInit is an isometry at the start",
            "chi about 1",
            f"chi = {chi['IDInit'][0]:.4f}",
            abs(chi["IDInit"][0] - 1) < 0.1,
        ),
        Claim(
            "the default is not",
            "chi over 2,000",
            f"chi = {chi['Kaiming'][0]:.0e} (Kaiming); torch's default {plain:.0f}",
            chi["Kaiming"][0] > 2000,
        ),
        Claim(
            "the loss falls faster under IDInit",
            "faster",
            f"mean loss of epoch {EPOCHS}: {last['IDInit']:.2f}, Kaiming {last['Kaiming']:.0e}",
            last["IDInit"] < last["Kaiming"],
        ),
        Claim(
            "IDInit stays an isometry during training",
            "chi around 1 in epochs 1 to 4",
            f"chi after epochs 1 to {EPOCHS}: {listed}",
            all(0.5 <= value <= 2 for value in chi["IDInit"]),
        ),
    )
    with axes(2) as (figure, (left, right)):
        for name, (spectra, _) in found.items():
            left.hist(spectra[0].clamp(min=1e-30).log10().flatten().tolist(), bins=range(-4, 36), label=name, alpha=0.7)
            right.semilogy(range(EPOCHS + 1), chi[name], marker="o", markersize=3, label=name)
        left.set(xlabel="log10 of squared singular values at the start", ylabel="count", yscale="log")
        right.set(xlabel="epoch", ylabel="chi")
    return Outcome(claims, figure)


if __name__ == "__main__":
    main(run)
