"""DiT-S/2 and DiT-B/2 with and without ANCRe (arXiv 2602.09009, Table 3, Figure 7).

    python benchmarks/papers/dit.py --size s2 --data FOLDER [--compile] [--resume]
    python benchmarks/papers/dit.py --small            # 4 layers, on scikit-learn's digits

The folder holds ImageNet 256 x 256 as latents: files ``*.safetensors`` with ``latents`` [n, 4, 32, 32], scaled as the
autoencoder asks for, and ``labels`` int64 [n]. 400,000 steps, batches of 256, AdamW at 1e-4 without weight decay,
bfloat16, tau = 0.1. Trained and reported is the error of the predicted noise. The paper reports FID, which also needs
the learned variances, a moving average of the weights, the autoencoder and 50,000 samples: these are not here.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from common import digits
from diffusers import DiTTransformer2DModel
from diffusers.utils import logging
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from training import Log, Plan, adjusted, chosen, options, plot, train

import rewire
from rewire.bench.shapes import make_shape

TIMES = 1000
PLAN = Plan(steps=400_000, warmup=0, batch=256, micro=128, rate=1e-4, schedule="constant")
SMALL = dataclasses.replace(PLAN, steps=60, batch=32, micro=16, rate=1e-3, bf16=False, every=20)
RUNS: dict[str, dict[str, Any] | None] = {
    "residual": None,
    "ancre": {"topology": "ancre-ingoing", "start": "paper", "temperature": 0.1},
    "ancre-keep": {"topology": "ancre-ingoing", "start": "paper", "temperature": 0.1, "cascade": "keep"},
}


@dataclasses.dataclass(frozen=True)
class Images:
    """Latents [n, channels, size, size] and labels int64 [n]; the last 64 (at most a tenth) are for validation."""

    latents: Tensor
    labels: Tensor

    @property
    def held_out(self) -> int:
        return min(64, max(1, len(self.labels) // 10))


def read_images(folder: Path, shape: tuple[int, ...]) -> Images:
    """All shards of a folder.

    Raises:
        SystemExit: no folder, no shards, or shards of another shape; the message says what is needed.
    """
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    wanted = f"'latents' [n, {', '.join(map(str, shape))}] and 'labels' int64 [n]"
    if not files:
        raise SystemExit(f"--data {folder}: there are no files *.safetensors with {wanted}.")
    shards = [load_file(file) for file in files]
    for file, shard in zip(files, shards, strict=True):
        if set(shard) != {"latents", "labels"} or shard["latents"].shape != (len(shard["labels"]), *shape):
            found = {name: tuple(tensor.shape) for name, tensor in shard.items()}
            raise SystemExit(f"--data {file}: needs {wanted}, has {found}.")
    return Images(torch.cat([s["latents"] for s in shards]), torch.cat([s["labels"] for s in shards]).long())


def bundled_images() -> Images:
    images, classes, test_images, test_classes = digits()
    return Images(torch.cat([images, test_images]), torch.cat([classes, test_classes]).long())


def small_model() -> nn.Module:
    return DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=4,
        in_channels=1,
        out_channels=2,
        sample_size=8,
        num_embeds_ada_norm=10,
    ).train()


def noise_error(model: nn.Module, latents: Tensor, labels: Tensor, times: Tensor, noise: Tensor) -> Tensor:
    """Mean squared error of the predicted noise, DDPM with betas from 1e-4 to 0.02 in 1,000 steps."""
    kept = (1 - torch.linspace(1e-4, 0.02, TIMES, device=latents.device)).cumprod(0)[times].view(-1, 1, 1, 1)
    noisy = kept.sqrt() * latents + (1 - kept).sqrt() * noise
    predicted = model(noisy, timestep=times, class_labels=labels).sample[:, : latents.shape[1]]
    return F.mse_loss(predicted.float(), noise)


def train_on(images: Images, model: nn.Module, plan: Plan, folder: Path, resume: bool) -> Log:
    device, cut = next(model.parameters()).device, len(images.labels) - images.held_out

    def error(model: nn.Module, rows: Tensor, generator: torch.Generator) -> Tensor:
        latents = images.latents[rows].float()
        noise = torch.randn(latents.shape, generator=generator)
        times = torch.randint(TIMES, (len(rows),), generator=generator)
        return noise_error(model, *(x.to(device) for x in (latents, images.labels[rows], times, noise)))

    def loss_of(model: nn.Module, step: int, index: int) -> Tensor:
        seed = (plan.seed * plan.steps + step) * (plan.batch // plan.micro) + index
        generator = torch.Generator().manual_seed(seed)
        return error(model, torch.randint(cut, (plan.micro,), generator=generator), generator)

    def validate(model: nn.Module) -> float:
        return error(model, torch.arange(cut, len(images.labels)), torch.Generator().manual_seed(1)).item()

    return train(model, loss_of, validate, plan, folder, resume)


def main(arguments: list[str] | None = None) -> None:
    logging.set_verbosity_error()  # its attention warns of an argument that its own blocks pass
    parser = options(__doc__)
    parser.add_argument("--size", choices=("s2", "b2"), default="s2")
    args = parser.parse_args(arguments)
    size = "small" if args.small else args.size
    if not args.small and args.data is None:
        raise SystemExit("--data FOLDER is needed: shards of latents, see benchmarks/papers/dit.py. Or try --small.")
    plan = adjusted(SMALL if args.small else PLAN, args)
    shape = (1, 8, 8) if args.small else (4, 32, 32)
    images = read_images(args.data, shape) if args.data else bundled_images()
    out, logs = args.out / f"dit-{size}", {}
    for run, compiled in chosen(RUNS, args).items():
        torch.manual_seed(args.seed)
        model = small_model() if args.small else make_shape(f"dit-{size}")
        model = (model if compiled is None else rewire.compile(model, **compiled)).to(args.device)
        logs[run] = train_on(images, model, plan, out / run, args.resume)
    plot(logs, out / "loss.png")
    for run, log in logs.items():
        reached = f"validation error {log.validation[-1][1]:.4f}" if log.validation else "diverged"
        print(f"{run}: {reached} after {len(log.losses)} steps, {log.seconds:.0f} s")


if __name__ == "__main__":
    main()
