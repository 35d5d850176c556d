"""What crosses pipeline boundaries, on paper: 70B and 405B models on 1,024 and 16,384 GPUs.

    python benchmarks/scale.py [--out FILE]

The models are built on the meta device at their real sizes and rewired; `rewire.pipeline` tells what of a stream
crosses each boundary, tensor by tensor. From that, the sizes of the cluster and one formula for the work of a stage,
follow: bytes per boundary and micro-batch, their time at the bandwidth of one 400 Gb/s link for each GPU, the share of
a micro-batch's computation that this is if nothing overlaps, what the stages keep of what they were sent and of their
weights for each micro-batch in flight, the receive buffers of torch's stages, one for each micro-batch and way, and
what checkpoints around layers keep on the first stage. No time is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

with contextlib.suppress(ModuleNotFoundError):  # where torchvision's operators do not match torch's build
    import torchvision_stub  # noqa: F401

import torch
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.utils import _pytree as pytree
from transformers import LlamaConfig, LlamaForCausalLM

import rewire
from rewire.mixes.history import History
from rewire.pipeline import outline
from rewire.runtime.connection import Connection

LINK = 50e9  # bytes/s of one 400 Gb/s link
WORK = 400e12  # operations/s of one GPU: Llama 3's 405B in bfloat16, arXiv 2407.21783, Table 4
DENSE: list[dict[str, Any]] = [{}, {"sources": ["x0", 20, 40, 60]}, {"block": 8}]
TOPOLOGIES: list[tuple[str, dict[str, Any]]] = [
    ("residual", {}),
    *((name, options) for name in ("ancre-ingoing", "grn-v3", "dca", "muddformer") for options in DENSE),
    *(("attnres", options) for options in ({}, {"block": 16})),
    ("hc-dynamic", {}),
    ("mhc", {}),
]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A model and how it is spread: the 405B as in Llama 3's Table 4, the 70B by the same rules.

    Attributes:
        tensor, pipeline, data: GPUs of each kind of parallelism; sequences are sharded over the tensor-parallel ones.
        length: tokens of a sequence, which is a micro-batch.
        micro_batches: of a data-parallel rank in one step.
    """

    name: str
    layers: int
    width: int
    inner: int
    heads: int
    tensor: int
    pipeline: int
    data: int
    micro_batches: int
    length: int = 8192

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def tokens(self) -> int:
        """Of a micro-batch on one GPU."""
        return self.length // self.tensor

    @property
    def state(self) -> int:
        """Bytes of a hidden state in bfloat16 on one GPU."""
        return self.tokens * self.width * 2

    def cuts(self) -> list[int]:
        """Layers before each boundary."""
        return [round(self.layers * stage / self.pipeline) for stage in range(1, self.pipeline)]

    def model(self) -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=128256,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=8,
            max_position_embeddings=self.length,
        )
        with torch.device("meta"):
            return LlamaForCausalLM(config)

    def forward_seconds(self, model: nn.Module) -> float:
        """Of a micro-batch on one stage: two operations for each weight and token, and attention's."""
        weights = sum(p.numel() for p in model.parameters())
        attention = 2 * self.layers * self.length * self.width  # causal: half of the products with all keys and values
        return (2 * weights + attention) * self.length / (self.pipeline * self.tensor * WORK)


CLUSTERS = [
    Cluster("70B", 80, 8192, 28672, 64, tensor=8, pipeline=8, data=16, micro_batches=64),
    Cluster("405B", 126, 16384, 53248, 128, tensor=8, pipeline=16, data=128, micro_batches=16),
]


def crossing(connection: Connection, cuts: Sequence[int]) -> list[int]:
    """Elements of the stream for each token, behind these numbers of layers, of two adds each."""
    found = []
    for stream in outline(connection, [2 * layers for layers in cuts]):
        tensors = pytree.tree_leaves([s.states if isinstance(s, History) else s for s in stream.states])
        found.append(sum({id(tensor): tensor.numel() for tensor in tensors}.values()))
    return found


def checkpointed(connection: Connection, layers: int) -> int:
    """Bytes for each token that checkpoints around the first layers keep in bfloat16: what these take, each once."""
    streams = outline(connection, [2 * number for number in range(layers)])
    tensors = pytree.tree_leaves([s.states if isinstance(s, History) else s for x in streams for s in x.states])
    return sum({id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def row(cluster: Cluster, name: str, options: dict[str, Any]) -> dict[str, Any]:
    model = cluster.model()
    seconds = cluster.forward_seconds(model)
    rewired = rewire.compile(model, name, validate=False, **options)
    (connection,) = rewire.connections(rewired).values()
    sizes = {name: 4 * p.numel() for name, p in connection.named_parameters()}
    weights = sum(sizes[name] for name in connection.travelling)
    states = [elements / cluster.width for elements in crossing(connection, cluster.cuts())]
    messages = [held * cluster.state + weights for held in states]
    sent = max(messages)
    own = (sum(sizes.values()) - weights) / cluster.pipeline  # on a stage
    in_flight = [cluster.pipeline - stage for stage in range(1, cluster.pipeline)]  # micro-batches, under 1F1B
    return {
        "model": cluster.name,
        "topology": name,
        "options": options,
        "hidden_states": max(states),
        "weight_bytes": weights,
        "own_bytes": own,
        "buffer_bytes": cluster.micro_batches * max(map(sum, zip([0, *messages], [*messages, 0], strict=True))),
        "bytes": sent,
        "seconds": sent / LINK,
        "forward_seconds_of_a_stage": seconds,
        "share": sent / LINK / seconds,
        "bytes_per_step": 2 * cluster.micro_batches * sent,
        "checkpointed_bytes": cluster.pipeline * checkpointed(connection, cluster.cuts()[0]) * cluster.tokens,
        "kept_bytes": max(n * (message + own) for n, message in zip(in_flight, messages, strict=True)),
    }


def table(rows: list[dict[str, Any]]) -> str:
    titles = [
        "model",
        "topology",
        "hidden states",
        "weights that cross",
        "of a stage",
        "a boundary",
        "at 50 GB/s",
        "of a forward",
        "a step",
        "kept",
        "torch's buffers",
        "checkpoints",
    ]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for r in rows:
        options = "".join(f", `{key}={value}`" for key, value in r["options"].items())
        name = "plain" if r["topology"] == "residual" else f"`{r['topology']}`{options}"
        lines.append(
            f"| {r['model']} | {name} | {r['hidden_states']:.1f} | {r['weight_bytes'] / 1e6:,.2f} MB "
            f"| {r['own_bytes'] / 1e6:,.1f} MB "
            f"| {r['bytes'] / 1e6:,.0f} MB | {1e3 * r['seconds']:.1f} ms | {r['share']:.0%} "
            f"| {r['bytes_per_step'] / 1e9:,.1f} GB | {r['kept_bytes'] / 1e9:.2f} GB "
            f"| {r['buffer_bytes'] / 1e9:.1f} GB | {r['checkpointed_bytes'] / 1e9:.1f} GB |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for all numbers")
    out = parser.parse_args().out
    logging.getLogger("rewire").setLevel(logging.ERROR)  # models without values are not validated
    cases = [(cluster, *topology) for cluster in CLUSTERS for topology in TOPOLOGIES]
    rows = [row(*case) for case in track(cases, "rewiring", console=Console(stderr=True), transient=True)]
    print(table(rows))
    if out is not None:
        out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
