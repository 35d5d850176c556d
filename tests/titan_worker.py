"""One process of torchtitan's trainer; rank 0 saves what the last step saw. A script."""

from __future__ import annotations

import os
import sys
from typing import Any

import titan_configs  # noqa: F401  (first: it tells torchtitan that there is no accelerator)
import torch
import torch.distributed as dist
from torchtitan.config import ConfigManager
from worker import kept

import rewire


def plain_name(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def main(folder: str, arguments: list[str]) -> None:
    """The trainer begins the process group itself."""
    torch.set_num_threads(1)
    trainer = ConfigManager().parse_args(["--module", "titan_configs", "--dump_folder", folder, *arguments]).build()
    seen: dict[str, dict[str, torch.Tensor]] = {"weights": {}, "grads": {}, "after": {}}
    step = trainer.optimizers.step

    def record() -> None:
        """Weights, buffers and gradients before the optimiser moves them."""
        for part in trainer.model_parts:
            held = [*part.named_parameters(remove_duplicate=False), *part.named_buffers()]
            seen["weights"] |= {plain_name(name): kept(tensor) for name, tensor in held}
            seen["grads"] |= {plain_name(n): kept(p.grad) for n, p in part.named_parameters() if p.grad is not None}
        step()

    trainer.optimizers.step = record
    trainer.train()
    connections = [c for part in trainer.model_parts for c in rewire.connections(part).values()]
    assert connections and all(p.dtype == torch.float32 for c in connections for p in c.parameters())
    for part in trainer.model_parts:
        seen["after"] |= {plain_name(name): kept(p) for name, p in part.named_parameters()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seen)
    if dist.get_rank() == 0:
        merged = {kind: {n: v for one in everyone for n, v in one[kind].items()} for kind in seen}
        torch.save(merged, os.path.join(folder, "seen.pt"))
    dist.barrier()
    trainer.close()
    print("passed")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
