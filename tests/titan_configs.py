"""A config module for torchtitan, as a user writes it, and what this environment needs beside it.

The debug models of torchtitan run on CPUs with gloo here, on random tokens. Worked around, in this file alone:

- torchtitan takes "cuda" where there is no accelerator: it is told "cpu";
- FlexAttention is compiled: `ScaledDotProductAttention` takes its place;
- tokens come from a generator, not from a tokenizer and a data set that would have to be there;
- gloo has no PREMUL_SUM, which FSDP2 takes to divide gradients: it is told to sum;
- torchtitan 0.3 gives schedules lists of micro-batches (``arg_mbs``), which torch 2.13's do not take: it gives them the
  batch, and they split it;
- experts compute in bfloat16, whatever the model's dtype is, and their gradients are then off by its rounding: they
  compute in the model's dtype;
- for CPU offload it asks for gloo beside the accelerator's backend, which is gloo here: one is enough; and memory is
  pinned for an accelerator only;
- context parallelism of torch does not know the attention operator of CPUs: `ring_on_cpu`;
- torch.cpu has no name, capacity or statistics of memory: there is a monitor that knows nothing. Nor is its current
  device a number, which a barrier takes that sets time limits: there are none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ring_on_cpu
import torch

torch._utils._get_available_device_type = lambda: "cpu"

from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.quantization import Float8LinearConverter  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.models import deepseek_v3, llama3, qwen3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.config_utils import decoder_vocab_size  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts  # noqa: E402
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.models.qwen3.config_registry import qwen3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

import rewire.titan  # noqa: E402


class NoMonitor:
    device_name = "cpu"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(*[0] * 6)

    def reset_peak_stats(self) -> None:
        pass


def _sum(module: FSDPModule, factor: float) -> None:
    assert factor == 1
    _divide(module, factor)
    module.set_force_sum_reduction_for_comms(True)


def _one_backend(*args: Any, **options: Any) -> int:
    return _begin(*args, **{**options, "enable_cpu_backend": False})


def _pipeline_step(
    trainer: Any, *, input_dict_mbs: list[Any], label_mbs: list[torch.Tensor], global_valid_tokens: torch.Tensor
) -> torch.Tensor:
    losses: list[torch.Tensor] = []
    trainer.pp_schedule.step(
        *([torch.cat([one["input"] for one in input_dict_mbs])] if trainer.pp_has_first_stage else []),
        target=torch.cat(label_mbs) if trainer.pp_has_last_stage else None,
        losses=losses if trainer.pp_has_last_stage else None,
        loss_kwargs={"global_valid_tokens": global_valid_tokens},
        return_outputs=False,
    )
    return torch.stack(losses).sum() if losses else torch.tensor([-1.0])


def _experts(experts: Any, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The feed-forwards of experts, in the dtype of the model."""
    up, down, gate = (
        (p.to_local() if isinstance(p, DTensor) else p).transpose(-2, -1)
        for p in (experts.w1_EFD, experts.w2_EDF, experts.w3_EFD)
    )
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    hidden = F.silu(F.grouped_mm(x, up, offs=ends)) * F.grouped_mm(x, gate, offs=ends)
    return F.grouped_mm(hidden, down, offs=ends)


ring_on_cpu.enable()
GroupedExperts.forward = _experts
Trainer.pp_forward_backward_step = _pipeline_step
metrics.build_device_memory_monitor = NoMonitor
utils.set_pg_timeouts = lambda **_: None
CPUOffloadPolicy.__init__.__defaults__ = (False,)
_begin, utils.init_distributed = utils.init_distributed, _one_backend
_divide, FSDPModule.set_gradient_divide_factor = FSDPModule.set_gradient_divide_factor, _sum


class Tokens(BaseDataLoader):
    """Random tokens, other ones on each data-parallel rank; they go on where a checkpoint was saved."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocabulary: int

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self.vocabulary, self.rank, self.shape = config.vocabulary, dp_rank, (local_batch_size, seq_len)
        self.number = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self.number + self.rank)
            batch, length = self.shape
            tokens = torch.randint(self.vocabulary, (batch, length + 1), generator=generator)
            self.number += 1
            yield {"input": tokens[:, :-1], "positions": torch.arange(length).repeat(batch, 1)}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.number = state_dict["number"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


def _small(config: Trainer.Config, family: Any, flavor: str = "debugmodel", **options: Any) -> Trainer.Config:
    """A debug model that trains on a CPU."""
    config.model_spec = family.model_registry(flavor, **options)
    model = config.model_spec.model
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    vocabulary = decoder_vocab_size(config.model_spec)
    config.loss = CrossEntropyLoss.Config(global_vocab_size=vocabulary)
    config.dataloader, config.tokenizer = Tokens.Config(vocabulary=vocabulary), NoTokenizer.Config()
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 4, 16, 3
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.debug.seed = 5
    config.training.max_norm = 1e9  # gradients as they are
    config.validator.enable = False
    config.activation_checkpoint = None
    config.checkpoint.enable = False
    return config


def _topology(config: Trainer.Config) -> Trainer.Config:
    topologies = os.environ.get("TOPOLOGY", "ancre-ingoing").split(",")  # of all ranks, or of each
    topology = topologies[int(os.environ.get("RANK", "0")) % len(topologies)]
    config.model_spec = rewire.titan.rewired(config.model_spec, topology)
    return config


def llama3_plain() -> Trainer.Config:
    return _small(llama3_debugmodel(), llama3)


def llama3_rewired() -> Trainer.Config:
    return _topology(llama3_plain())


def qwen3_plain() -> Trainer.Config:
    return _small(qwen3_debugmodel(), qwen3)


def qwen3_rewired() -> Trainer.Config:
    return _topology(qwen3_plain())


def deepseek_v3_plain() -> Trainer.Config:
    return _small(deepseek_v3_debugmodel(), deepseek_v3)


def deepseek_v3_rewired() -> Trainer.Config:
    return _topology(deepseek_v3_plain())


def qwen3_apart_plain() -> Trainer.Config:
    """With projections of q, k and v by themselves."""
    return _small(qwen3_debugmodel(), qwen3, "debugmodel_non_fused_qkv")


def qwen3_apart_rewired() -> Trainer.Config:
    return _topology(qwen3_apart_plain())


def qwen3_moe_plain() -> Trainer.Config:
    """With these projections, too."""
    config = _small(qwen3_debugmodel(), qwen3, "debugmodel_moe")
    for layer, other in zip(config.model_spec.model.layers, qwen3_apart_plain().model_spec.model.layers, strict=True):
        layer.attention = other.attention
        layer.moe.routed_experts.inner_experts.hidden_dim = 64
    del config.model_spec.model.layers[4:]
    return config


def qwen3_moe_rewired() -> Trainer.Config:
    return _topology(qwen3_moe_plain())


def llama3_float8_plain() -> Trainer.Config:
    return _small(llama3_debugmodel(), llama3, converters=[Float8LinearConverter.Config(emulate=True)])


def llama3_float8_rewired() -> Trainer.Config:
    return _topology(llama3_float8_plain())
