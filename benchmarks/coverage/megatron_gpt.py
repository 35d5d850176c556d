"""Megatron-Core's GPT, rewired: gradients under its tensor and sequence parallelism against those of one process.

    python benchmarks/coverage/megatron.py

Needs ``pip install --no-deps megatron-core`` (run with 0.16.1) beside torch and rewire. Two processes on a CPU, gloo.
`Layer` is all that a model needs to be rewired: the rest is for the CPU, and to compare.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

warnings.simplefilter("ignore")  # Megatron's, of what is not installed

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel import random  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

import rewire  # noqa: E402

TOPOLOGIES = ("ancre-ingoing", "grn-v3", "hc-dynamic", "mhc", "attnres")
LENGTH, BATCH, VOCABULARY = 12, 2, 64


class Layer(TransformerLayer):
    """The layer in training, with its two residual adds written out.

    Megatron's own adds in a function that may be fused, makes its result anew where it is a view, and is called through
    a ``__call__`` that replays CUDA graphs: none of these can hand on a stream.
    """

    __call__ = nn.Module.__call__

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        x = hidden_states
        branch, bias = self.self_attention(
            self.input_layernorm(x), attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb
        )
        x = x + self.dropped(branch, bias)
        branch, bias = self.mlp(self.pre_mlp_layernorm(x))
        x = x + self.dropped(branch, bias)
        return x, None

    def dropped(self, branch: Tensor, bias: Tensor | None) -> Tensor:
        return F.dropout(branch if bias is None else branch + bias, self.hidden_dropout, self.training)


class Norm:
    """Megatron's norms without Apex and Transformer Engine refuse sequence parallelism; this is what those do."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.LayerNorm:  # type: ignore[misc]
        norm = nn.LayerNorm(hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def on_cpu() -> None:
    """Megatron asks for the current GPU, and keeps states of its random numbers; there is no dropout here."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()


def make(topology: str, **parallel: Any) -> nn.Module:
    """Weights are drawn whole, then cut: the same ones, however many ranks there are."""
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=3,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **parallel,
    )
    spec = get_gpt_layer_local_spec()
    spec.module = Layer
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    block = TransformerBlockSubmodules([spec] * config.num_layers, layer_norm=Norm)
    model = GPTModel(config, block, VOCABULARY, LENGTH, position_embedding_type="rope")
    return model if topology == "plain" else rewire.compile(model, topology, validate=False)


def batch() -> tuple[Tensor, ...]:
    """Token ids, positions, mask (of what is not seen) and labels."""
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    return ids[:, :-1], torch.arange(LENGTH).repeat(BATCH, 1), mask, ids[:, 1:]


def gradients(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    """The loss; gradients of norms and connections, which all ranks of tensor parallelism have whole.

    Those of norms are summed over these ranks where each has its part of the sequence, as Megatron's own
    ``finalize_model_grads`` does.
    """
    ids, positions, mask, labels = batch()
    loss = model(ids, positions, mask, labels=labels).mean()
    loss.backward()
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
    whole = {n: p.grad.clone() for n, p in model.named_parameters() if not getattr(p, "tensor_model_parallel", False)}
    return float(loss), whole


def compare(rank: int, meeting_point: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=2)
    on_cpu()
    for topology in TOPOLOGIES:
        parallel_state.initialize_model_parallel()
        expected_loss, expected = gradients(make(topology))
        parallel_state.destroy_model_parallel()
        for sequence in (False, True):
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
            model = make(topology, tensor_model_parallel_size=2, sequence_parallel=sequence)
            if sequence:
                group = parallel_state.get_tensor_model_parallel_group()
                rewire.parallelize(model, DeviceMesh.from_group(group, "cpu"), sequence=True)
            loss, found = gradients(model)
            off = {name: float((found[name] - g).norm() / g.norm()) for name, g in expected.items() if g.norm() > 1e-6}
            if rank == 0:
                worst = max(off, key=off.__getitem__)
                print(
                    f"{topology:14} {'sequence' if sequence else 'tensor':8} parallel: loss off by "
                    f"{abs(loss - expected_loss):.1e}, gradients by {off[worst]:.1e} ({worst}; {len(off)} compared)"
                )
            parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(compare, (str(Path(folder, "meeting_point")),), nprocs=2)
