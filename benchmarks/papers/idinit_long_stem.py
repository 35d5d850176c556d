"""A residual stem of 109 layers (arXiv 2503.04626, Section C.6, Figure 19, Table 10)

One residual block whose stem is 109 convolutions with ReLUs, without norms, and a projected shortcut; SGD at rate 0.2,
weight decay 1e-8, cosine schedule. Smaller than the paper's: scikit-learn's digits (8 x 8 pixels; the paper: CIFAR-10),
8, 16 and 32 channels (16, 32, 64), batches of 32 (768), 12 epochs (35). Table 10 gives no strides: here 2 where the
channels grow. Kaiming and Fixup also train with circular padding, which keeps the borders from damping the signal. With
batches of 128 and 20 epochs, a third of the steps, IDInit was still at chance (0.10).
"""

from __future__ import annotations

import itertools
import math

import torch
from common import Claim, Outcome, axes, digits, main
from torch import Tensor, nn
from torch.nn import functional as F

import rewire

LAYERS, CHANNELS, EPOCHS, BATCH = 109, 8, 12, 32
CHANCE = 0.1


class LongStem(nn.Module):
    """x -> shortcut(x) + stem(x), from c channels to 4c."""

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        third = layers // 3
        plan = [channels] * (third + 1) + [2 * channels] * third
        plan += [4 * channels] * (layers + 1 - len(plan))
        convolutions = [conv(i, o, 1 + (o > i)) for i, o in itertools.pairwise(plan)]
        activated = [module for convolution in convolutions for module in (convolution, nn.ReLU())]
        self.stem = nn.Sequential(*activated[:-1])
        self.shortcut = nn.Conv2d(channels, 4 * channels, 1, stride=4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.stem(x)


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def network(init: str) -> nn.Sequential:
    torch.manual_seed(0)
    c = CHANNELS
    head = [nn.ReLU(), conv(4 * c, 4 * c), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * c, 10)]
    net = nn.Sequential(conv(1, c), nn.ReLU(), LongStem(c, LAYERS), *head)
    rewire.initialize(net, init)
    return net


def train(init: str) -> tuple[list[float], list[float]]:
    """Accuracy on the test images and standard deviation of the outputs, after each epoch."""
    images, classes, test_images, test_classes = digits()
    net = network(init)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, weight_decay=1e-8)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    accuracies, deviations = [], []
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(BATCH):
            loss = F.cross_entropy(net(images[batch]), classes[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            logits = net(test_images)
        accuracies.append((logits.argmax(1) == test_classes).float().mean().item())
        deviations.append(logits.std().item())
        schedule.step()
        if not math.isfinite(deviations[-1]):
            break
    return accuracies, deviations


def run() -> Outcome:
    found = {name: train(name.lower()) for name in ("IDInit", "Kaiming", "Fixup")}
    accuracy = {name: accuracies[-1] for name, (accuracies, _) in found.items()}
    spread = {name: deviations[-1] for name, (_, deviations) in found.items()}
    others = {name: value for name, value in accuracy.items() if name != "IDInit"}
    claims = (
        Claim(
            "IDInit trains the network",
            "trains, outputs stay bounded",
            f"accuracy {accuracy['IDInit']:.2f}, outputs of std {spread['IDInit']:.2g}",
            accuracy["IDInit"] > 5 * CHANCE,
        ),
        Claim(
            "Kaiming and Fixup fail",
            "outputs explode",
            "; ".join(f"{name}: accuracy {value:.2f}, std {spread[name]:.2g}" for name, value in others.items()),
            all(value < 2 * CHANCE for value in others.values()),
        ),
    )
    with axes(2) as (figure, (left, right)):
        for name, (accuracies, deviations) in found.items():
            left.plot(range(1, len(accuracies) + 1), accuracies, marker="o", markersize=3, label=name)
            right.semilogy(range(1, len(deviations) + 1), deviations, marker="o", markersize=3, label=name)
        left.set(xlabel="epoch", ylabel="test accuracy", ylim=(0, 1))
        right.set(xlabel="epoch", ylabel="std of the outputs")
    return Outcome(claims, figure)


if __name__ == "__main__":
    main(run)
