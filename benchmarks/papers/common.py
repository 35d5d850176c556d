"""What the experiments share: a claim, the figure, the report and the exit status."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "500")  # before torch: threads that spin for long are slow on shared cores

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

with contextlib.suppress(ModuleNotFoundError):  # where torchvision's operators do not match torch's build
    import torchvision_stub  # noqa: F401

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "out" / "papers"
FIGURES = ROOT / "docs" / "figures"


@dataclasses.dataclass(frozen=True)
class Claim:
    """One statement of a paper, its number and ours.

    Attributes:
        text: what is claimed.
        paper: what the paper says, in its words or numbers.
        ours: what was measured.
        holds: whether ours agrees.
    """

    text: str
    paper: str
    ours: str
    holds: bool


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an experiment returns: its claims and a figure."""

    claims: Sequence[Claim]
    figure: Figure


def main(experiment: Callable[[], Outcome]) -> None:
    """Run the experiment of a script: print its claims, save figure and results, and exit with 1 if one does not hold.

    The script's docstring is the description of the experiment: its first line the title, the rest the setup.
    """
    module = inspect.getmodule(experiment)
    name = Path(inspect.getfile(experiment)).stem
    parser = argparse.ArgumentParser(description=module.__doc__ if module else None)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for NAME.json (default: out/papers)")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="folder for NAME.png (default: docs/figures)")
    args = parser.parse_args()
    started = time.perf_counter()
    outcome = experiment()
    seconds = time.perf_counter() - started
    title, _, setup = inspect.cleandoc((module.__doc__ if module else None) or name).partition("\n")
    args.results.mkdir(parents=True, exist_ok=True)
    args.figures.mkdir(parents=True, exist_ok=True)
    outcome.figure.savefig(args.figures / f"{name}.png", dpi=110)
    report = {
        "name": name,
        "title": title,
        "setup": setup.strip(),
        "claims": [dataclasses.asdict(claim) for claim in outcome.claims],
        "seconds": seconds,
        "machine": machine(),
    }
    (args.results / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    show(title, outcome.claims)
    sys.exit(not all(claim.holds for claim in outcome.claims))


def show(title: str, claims: Sequence[Claim]) -> None:
    """Print the claims as a table."""
    table = Table("claim", "paper", "ours", "holds", title=title, box=box.SIMPLE_HEAD)
    for claim in claims:
        table.add_row(claim.text, claim.paper, claim.ours, "yes" if claim.holds else "NO")
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def machine() -> str:
    """The machine in one line: what numbers of seconds need."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    return f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}, Python {platform.python_version()}"


@contextlib.contextmanager
def axes(columns: int = 1, width: float = 3.6, height: float = 2.9) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure with panels side by side, in the style of all figures here."""
    style = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
    style |= {"grid.color": "#e4e4e4", "grid.linewidth": 0.5, "legend.frameon": False, "lines.linewidth": 1.3}
    with rc_context(style):
        figure = Figure(figsize=(width * columns + 0.4, height), layout="constrained")
        panels = list(figure.subplots(1, columns, squeeze=False).flatten())
        yield figure, panels
        for ax in panels:
            if ax.get_legend_handles_labels()[1] and ax.get_legend() is None:
                ax.legend(fontsize=7)


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's handwritten digits, for papers that use MNIST or CIFAR: no download.

    Returns:
        Images float32 [1500, 1, 8, 8] of mean 0 and variance 1 and classes int64 [1500] for training; images [297, ..]
        and classes [297] for testing.

    Raises:
        ImportError: scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the handwritten digits come with scikit-learn: pip install scikit-learn") from error
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None]
    images = (images - images.mean()) / images.std()
    classes = torch.tensor(data.target)
    return images[:1500], classes[:1500], images[1500:], classes[1500:]


def first_below(values: Iterable[float], goal: float) -> int | None:
    """Index of the first value that is at most the goal."""
    return next((index for index, value in enumerate(values) if value <= goal), None)


def fit_linear(
    model: nn.Module, target: Tensor, rate: float, steps: int, stop: float = 1e-12, ceiling: float = 1e6
) -> list[float]:
    """Gradient descent on ``||f(I) - A||_F^2 / 2`` for a linear network f, as in the papers' case studies.

    Args:
        model: maps rows [d, d] to rows [d, d'].
        target: A, [d', d].
        rate: learning rate; the time of gradient flow is steps times rate.
        steps: at most so many.
        stop: end when the loss is at most this.
        ceiling: end when the loss is above this, or no number.

    Returns:
        The losses before each step.
    """
    identity, parameters, losses = torch.eye(target.shape[1], dtype=target.dtype), list(model.parameters()), []
    for _ in range(steps):
        loss = 0.5 * (model(identity).T - target).square().sum()
        losses.append(loss.item())
        if not stop < losses[-1] < ceiling:
            break
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= rate * gradient
    return losses
