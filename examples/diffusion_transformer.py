"""Train a diffusion transformer (DiT, from diffusers) with learned depth connections on digits, and draw samples.

    python examples/diffusion_transformer.py --steps 1500

scikit-learn's digits, 8 x 8 pixels; the model predicts the noise. Nothing about the training loop is rewire's.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from diffusers import DDPMScheduler, DiTTransformer2DModel
from matplotlib import pyplot
from sklearn.datasets import load_digits

import rewire


def sample(model: torch.nn.Module, scheduler: DDPMScheduler, labels: torch.Tensor) -> torch.Tensor:
    """[n, 1, 8, 8] in -1..1: an image of each label."""
    images = torch.randn(len(labels), 1, 8, 8)
    model.eval()
    for t in scheduler.timesteps:
        with torch.no_grad():
            noise = model(images, timestep=t.expand(len(labels)), class_labels=labels).sample
        images = scheduler.step(noise, t, images).prev_sample
    return images.clamp(-1, 1)


def main(
    steps: Annotated[int, typer.Option(min=1)] = 1500,
    topology: str = "ancre-ingoing",
    out: Path = Path("out/diffusion_transformer"),
) -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # -1..1
    labels = torch.tensor(digits.target)
    scheduler = DDPMScheduler(num_train_timesteps=200, beta_schedule="squaredcos_cap_v2")
    plain = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=1, num_layers=8, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10,
    )  # fmt: skip

    example = {"hidden_states": images[:2], "timestep": torch.tensor([3, 70]), "class_labels": labels[:2]}
    model = rewire.compile(plain, topology, example_inputs=example)
    optimizer = torch.optim.AdamW(rewire.parameter_groups(model, lr=2e-3, weight_decay=0.01))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    model.train()
    for step in range(1, steps + 1):
        rows, times = torch.randint(len(images), (64,)), torch.randint(200, (64,))
        noise = torch.randn(64, 1, 8, 8)
        noisy = scheduler.add_noise(images[rows], noise, times)
        loss = (model(noisy, timestep=times, class_labels=labels[rows]).sample - noise).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps:
            print(f"step {step}: {loss.item():.4f}")

    out.mkdir(parents=True, exist_ok=True)
    scheduler.set_timesteps(200)
    drawn = sample(model, scheduler, torch.arange(10).repeat_interleave(4))
    sheet = drawn.view(10, 4, 8, 8).permute(1, 2, 0, 3).reshape(32, 80)
    pyplot.imsave(out / "samples.png", sheet.repeat_interleave(8, 0).repeat_interleave(8, 1), cmap="gray_r")
    rewire.plot(model, out / "weights.png")


if __name__ == "__main__":
    typer.run(main)
