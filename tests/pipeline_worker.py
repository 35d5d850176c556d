"""One of two or four processes: pipeline schedules on stages of rewired models, against one process. A script."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import operator
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from every_topology import FAMILIES, mixed
from parallel_worker import WIDTH, Block
from torch import Tensor, nn
from torch.distributed import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
    schedules,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from worker import errors, full, in_seconds, play

import rewire
from rewire.ranks import chain
from rewire.ranks.chain import Part
from rewire.runtime.pieces import apart

BATCH, LENGTH, VOCABULARY, MICRO_BATCHES = 8, 6, 23, 4
CPU = torch.device("cpu")
#: One of each kind: static and dense, per token and dense, softmax over sources, streams, separate q/k/v, with x_0.
KINDS = ["ancre-ingoing", "grn-v1", "grn-v3", "attnres", "attnres-groups", "hc-dynamic", "dca", "muddformer"]
KINDS += ["x0-lambdas", "muddformer-norms", "mhc-delayed"]


class Model(nn.Module):
    """Blocks by name, as torchtitan has them; a part of it works without the rest."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(depth)})
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x) if self.norm is not None else x
        return self.head(x) if self.head is not None else x


def make(key: str, depth: int = 4, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return mixed(Model(depth), key, example_inputs=(tokens(),)).to(dtype)


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))


def targets(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(BATCH, LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(4)).to(dtype)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).square().mean()


def cut(model: nn.Module, stage: int, stages: int) -> nn.Module:
    """Blocks ``stage / stages`` of a model; what is lost with the others is what torchtitan's split loses."""
    part: Any = copy.deepcopy(model)
    names = list(part.layers)
    size = len(names) / stages
    keep = names[round(stage * size) : round((stage + 1) * size)]
    for name in names:
        if name not in keep:
            del part.layers[name]
    part.depth_connections = nn.ModuleDict()
    if stage > 0:
        part.embed = None
    if stage + 1 < stages:
        part.norm = part.head = None
    return part


def gradients(model: nn.Module, by_units: bool = True) -> dict[str, Tensor]:
    """Those of the whole batch, in one process."""
    dtype = next(model.parameters()).dtype
    loss(model(tokens()), targets(dtype)).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return by_unit(model, found) if by_units else found


def by_unit(model: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values of a whole model's parameters as its stages name them: connection weights by unit."""
    found = dict(values)
    for connection in rewire.connections(model).values():
        prefix = next(name for name, module in model.named_modules() if module is connection) + "."
        own = {name.removeprefix(prefix): found.pop(name) for name in values if name.startswith(prefix)}
        found |= {prefix + name: value for name, value in apart(own, connection.rows).items()}
    return found


def check(expected: dict[str, Tensor], parts: list[nn.Module], what: str, tolerance: float = 1e-10) -> None:
    """All gradients of a rank; and that all ranks together have each gradient of the model once."""
    found = [(name, p.grad) for part in parts for name, p in part.named_parameters() if p.grad is not None]
    actual = {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in found}
    for name, error in errors({name: expected[name] for name in actual}, actual).items():
        limit = max(tolerance, 1e-6) if "depth_connections" in name else tolerance
        assert error <= limit, f"{what}: gradient of {name} differs by {error:.1e}"
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, [name for name, _ in found])
    assert sorted(functools.reduce(operator.iadd, names, [])) == sorted(expected), what


def stages_of(schedule: type, stages: int) -> list[int]:
    """Numbers of this rank's stages."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return [rank, stages - 1 - rank] if schedule is ScheduleZBVZeroBubble else list(range(rank, stages, ranks))


def step(
    schedule: type,
    parts: dict[int, nn.Module],
    stages: int,
    steps: int = 1,
    dtype: Any = torch.float64,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Forward and backward of the batch, in micro-batches."""
    made: Any = [PipelineStage(part, number, stages, CPU, group=group) for number, part in parts.items()]
    several = schedule not in (ScheduleGPipe, Schedule1F1B)
    runner = schedule(made if several else made[0], MICRO_BATCHES, loss_fn=loss)
    for _ in range(steps):
        for part in parts.values():
            part.zero_grad()
        given = (tokens(),) if 0 in parts else ()
        runner.step(*given, target=targets(dtype) if stages - 1 in parts else None)
    return made


def run(key: str, schedule: type, stages: int, blocks: int = 1, cache: bool = False) -> int:
    """Gradients are those of one process; how many bytes left a stage, of one micro-batch, on all ranks together."""
    model = make(key, stages * blocks)
    expected = gradients(copy.deepcopy(model))
    parts = {number: cut(model, number, stages) for number in stages_of(schedule, stages)}
    sent: dict[int, int] = {}
    for number, part in parts.items():
        rewire.pipeline_stage(part)

        def count(_part: Any, _args: Any, output: Any, number: int = number) -> None:
            sent[number] = sum(t.numel() * t.element_size() for t in output) if number < stages - 1 else 0

        part.register_forward_hook(count)
    if cache:
        rewire.pipeline_cache(list(parts.values()))
    step(schedule, parts, stages, steps=2)
    check(expected, list(parts.values()), f"{key}, {schedule.__name__}, {stages} stages")
    total = torch.tensor(sum(sent.values()))
    dist.all_reduce(total)
    return int(total)


def messages() -> None:
    """One message each way for each boundary and micro-batch, of the hidden states and nothing else."""
    stages, sizes = dist.get_world_size(), list[int]()
    for key in ("ancre-ingoing", "ancre-few", "dca", "attnres", "hc-dynamic", "mhc"):
        model, rank = make(key, 2 * stages), dist.get_rank()
        part = cut(model, rank, stages)
        rewire.pipeline_stage(part)
        sizes.clear()

        def counted(ops: Any, desc: str | None = None, real: Any = schedules._batch_p2p) -> Any:
            sizes.extend(op.tensor.numel() for op in ops if op.op is dist.isend)
            return real(ops, desc)

        with mock.patch.object(schedules, "_batch_p2p", counted):
            (stage,) = step(Schedule1F1B, {rank: part}, stages)
        received = itertools.chain(*stage.args_recv_info.values(), *stage.grad_recv_info.values())
        buffers = sum(info.buffer.numel() for info in received if info.buffer is not None)
        assert buffers == sum(sizes), key  # torch's stages keep all of them, as docs/scale.md says
        boundaries = (rank > 0) + (rank + 1 < stages)
        assert len(sizes) == boundaries * MICRO_BATCHES, (key, sizes)
        (connection,) = rewire.connections(part).values()
        states = {"ancre-ingoing": 3, "ancre-few": 2, "dca": 3, "attnres": 5, "hc-dynamic": 4, "mhc": 4}[key]
        padding = 2 * bool(connection.travelling)  # ancre's matrix: two numbers for each token, here
        if stages == 2:
            assert {*sizes} == {BATCH // MICRO_BATCHES * LENGTH * (states * WIDTH + padding)}, (key, sizes)


def first_of_all() -> None:
    stages = dist.get_world_size()
    run("ancre-ingoing", ScheduleGPipe, stages)
    run("grn-v3", Schedule1F1B, stages)
    run("attnres", ScheduleInterleaved1F1B, 2 * stages, cache=True)


def single_stages() -> None:
    stages = dist.get_world_size()
    for key in ("ancre-ingoing", "grn-v3", "attnres", "muddformer"):
        run(key, ScheduleGPipe, stages)
    run("hc-dynamic", Schedule1F1B, stages)
    run("dca", Schedule1F1B, stages)


def several_stages() -> None:
    stages = 2 * dist.get_world_size()
    run("ancre-ingoing", ScheduleInterleaved1F1B, stages)
    run("attnres", ScheduleInterleaved1F1B, stages)


def cached() -> None:
    """Ranks keep what they have of a stream. Boundaries in the middle of 8 blocks, after 2, 4 and 6 of them."""
    ranks = dist.get_world_size()
    assert ranks == 2
    state = BATCH // MICRO_BATCHES * LENGTH * WIDTH * 8
    plain, kept = (run("ancre-ingoing", ScheduleInterleaved1F1B, 4, 2, cache) for cache in (False, True))
    tokens = BATCH // MICRO_BATCHES * LENGTH
    weights = 2 * math.ceil(8 * 9 // 2 * 4 / 16 / tokens) * tokens * 8  # logits
    assert plain == (3 + 5 + 7) * state + 3 * weights
    assert kept == (3 + 2 + 2) * state + weights  # only stage 1 is its rank's first
    assert run("hc-dynamic", ScheduleInterleaved1F1B, 4, 1, True) == run("hc-dynamic", ScheduleInterleaved1F1B, 4)
    for key in ("grn-v3", "attnres", "attnres-groups", "dca", "muddformer", "x0-lambdas"):
        assert run(key, ScheduleInterleaved1F1B, 4, 1, True) < run(key, ScheduleInterleaved1F1B, 4), key
    for key in ("ancre-ingoing", "attnres"):
        run(key, ScheduleInterleavedZeroBubble, 6, 1, True)
        run(key, ScheduleZBVZeroBubble, 4, 1, True)


def out_of_turn() -> None:
    """What one stage alone was called for, as to count its operations, is not taken for a micro-batch of a step."""
    model = make("ancre-ingoing", 4)
    expected = gradients(copy.deepcopy(model))
    parts = {number: cut(model, number, 4) for number in stages_of(ScheduleInterleaved1F1B, 4)}
    for part in parts.values():
        rewire.pipeline_stage(part)
    rewire.pipeline_cache(list(parts.values()))
    step(ScheduleInterleaved1F1B, parts, 4)
    for enabled in (False, True):
        if 0 in parts:
            with torch.set_grad_enabled(enabled):
                parts[0](tokens()[:2])
        step(ScheduleInterleaved1F1B, parts, 4)
        check(expected, list(parts.values()), f"after an extra call, with gradients: {enabled}")
    if 2 in parts:
        count = next(hook for hook in parts[2]._forward_pre_hooks.values()).boundary.known.count(None)
        with pytest.raises(rewire.UnsupportedCall, match="was called before the stage of this rank before it"):
            parts[2](torch.zeros(2, 3, count * WIDTH, dtype=torch.float64))


def every_kind() -> None:
    for key in dict.fromkeys([*KINDS, *FAMILIES]):
        run(key, Schedule1F1B, dist.get_world_size())
        run(key, ScheduleInterleaved1F1B, 2 * dist.get_world_size())


def zero_bubble() -> None:
    """Schedules that compute gradients of inputs and of weights at different times."""
    stages = 2 * dist.get_world_size()
    for key in ("ancre-ingoing", "grn-v3", "hc-dynamic"):
        run(key, ScheduleInterleavedZeroBubble, stages)
        run(key, ScheduleZBVZeroBubble, stages)


def sharded() -> None:
    """Two stages of two ranks each, that shard them; with mixed precision, connection weights stay float32."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    for key in ("ancre-ingoing", "grn-v3", "hc-dynamic"):
        model = make(key)
        expected = gradients(copy.deepcopy(model))
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)):
            part = cut(model, mesh["pp"].get_local_rank(), 2)
            rewire.pipeline_stage(part)
            for connection in rewire.connections(part).values():
                fully_shard(connection, mesh=mesh["dp"])
            for layer in part.layers.values():
                fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
            fully_shard(part, mesh=mesh["dp"], mp_policy=policy)
            stage = PipelineStage(part, mesh["pp"].get_local_rank(), 2, CPU, group=mesh["pp"].get_group())
            given = (tokens(),) if stage.is_first else ()
            target = targets() if stage.is_last else None
            Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss).step(*given, target=target)
            grads = {name: p.grad.full_tensor() for name, p in part.named_parameters() if p.grad is not None}
            found = errors({name: expected[name] for name in grads}, grads)
            # In bfloat16 a scale's gradient, a sum of much that cancels, is off by 0.10 in one process, too.
            assert max(found.values()) < (1e-6 if policy.param_dtype is None else 0.15), (key, policy, found)
            assert (stage.is_last and key == "ancre-ingoing") or any("depth_connections" in name for name in grads)


def zero_bubble_sharded() -> None:
    """Stages that are one FSDP group each. With groups of their own, torch loses blocks' gradients, of plain models."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rank, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    for key, blocks in ((None, True), ("ancre-ingoing", False), ("hc-dynamic", False)):
        torch.manual_seed(0)
        model = Model(4) if key is None else make(key, dtype=torch.float32)
        expected = gradients(copy.deepcopy(model))
        parts = {number: cut(model, number, 4) for number in (rank, rank + 2)}
        for part in parts.values():
            if key is not None:
                rewire.pipeline_stage(part)
            for layer in part.layers.values() if blocks else ():
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(part, mesh=mesh["dp"])
        step(ScheduleInterleavedZeroBubble, parts, 4, dtype=torch.float32, group=group)
        found = {name: p.grad for part in parts.values() for name, p in part.named_parameters()}
        if blocks:  # once none is lost, `rewire.titan` need not refuse it
            assert any(grad is None for grad in found.values()) == (rank == 1)
            continue
        grads = {name: full(grad) for name, grad in found.items() if grad is not None}
        assert max(errors({name: expected[name] for name in grads}, grads).values()) < 1e-4, key
        assert grads.keys() == found.keys(), key


def two_passes_in_groups() -> None:
    """What loses gradients is refused, by each rank that runs it: the first pass alone shows it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for key in ("ancre-ingoing", "hc-dynamic"):
        first, last = (cut(make(key), number, 2) for number in range(2))
        for part in (first, last):
            rewire.pipeline_stage(part)
        (message,) = first(tokens())
        message = message.detach().requires_grad_()
        for connection in rewire.connections(last).values():
            fully_shard(connection, mesh=mesh)
        for layer in last.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(last, mesh=mesh)
        last(message).sum().backward(retain_graph=True)
        torch.autograd.grad(last(message).sum(), message)  # stages of torch do that to see which shape gradients have
        with pytest.raises(rewire.UnsupportedCall, match="FSDP2 has groups of weights inside this stage"):
            torch.autograd.grad(last(message).sum(), message, retain_graph=True)


def tensor_parallel(part: Any, tp: DeviceMesh, local: bool) -> None:
    """Tensor and sequence parallelism. Hidden states are plain tensors, or DTensors with ``local=False``."""
    whole: dict[str, Any] = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    plan: dict[str, ParallelStyle] = {}
    if part.embed is not None:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=local)
    if part.head is not None:
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    for number in part.layers:
        block = f"layers.{number}"
        plan |= {f"{block}.norm_{n}": SequenceParallel(use_local_output=local) for n in (1, 2)}
        plan |= {f"{block}.{name}": PrepareModuleInput(**whole) for name in ("self_attn", "mlp")}
        plan |= {f"{block}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan[f"{block}.mlp.up"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down"):
            plan[f"{block}.{name}"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=local)
    parallelize_module(part, tp, plan)
    if local:
        rewire.parallelize(part, tp, sequence=True)


def sharded_tokens() -> None:
    """Two stages of two ranks each, which share the tokens: the weights' gradients are summed on the first stage."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    for key, local in itertools.product(("ancre-ingoing", "attnres", "hc-dynamic", "dca"), (True, False)):
        model = make(key)
        expected = gradients(copy.deepcopy(model))
        part = cut(model, mesh["pp"].get_local_rank(), 2)
        rewire.pipeline_stage(part)
        tensor_parallel(part, mesh["tp"], local)
        stage = PipelineStage(
            part, mesh["pp"].get_local_rank(), 2, CPU, group=mesh["pp"].get_group(), get_mesh=lambda *_: mesh["tp"]
        )
        given = (tokens(),) if stage.is_first else ()
        Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss).step(*given, target=targets() if stage.is_last else None)
        found = {name: p.grad for name, p in part.named_parameters() if p.grad is not None}
        grads = {name: full(grad) for name, grad in found.items()}
        for name, error in errors({name: expected[name] for name in grads}, grads).items():
            limit = 1e-6 if "depth_connections" in name else 1e-10
            assert error <= limit, f"{key}, local={local}: gradient of {name} differs by {error:.1e}"
        assert (stage.is_last and key == "ancre-ingoing") or any("depth_connections" in name for name in grads)


def traced() -> None:
    """The front end that traces: of a model in two stages."""
    rank = dist.get_rank()
    for key in ("ancre-ingoing", "grn-v3", "hc-dynamic"):
        model = make(key)
        expected = gradients(copy.deepcopy(model), by_units=False)
        pipe = pipeline(model, (tokens()[: BATCH // MICRO_BATCHES],), split_spec={"layers.2": SplitPoint.BEGINNING})
        stage = pipe.build_stage(rank, CPU)
        given = (tokens(),) if rank == 0 else ()
        ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss).step(*given, target=targets() if rank else None)
        check(expected, [stage.submod], f"{key}, traced")


def other_recipes() -> None:
    """One error on every rank, before anything is sent; also where only one of several stages differs."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def parts_of(key: str, stages: list[int], count: int = ranks) -> list[nn.Module]:
        model = make(key, 2 * ranks)
        parts = [cut(model, number, count) for number in stages]
        for part in parts:
            rewire.pipeline_stage(part)
        return parts

    def late(part: Part, store: Store) -> None:
        time.sleep(0.3 if rank == last else 0)
        leave(part, store)

    last, leave = ranks - 1, chain._leave
    for other in ("ancre-outgoing", "muddformer"):  # the same shapes, and others
        key = other if rank == last else "ancre-ingoing"
        words = f"rank {last} has topology {other} where rank 0 has ancre-ingoing"
        in_seconds(words, lambda key=key: parts_of(key, [rank]))
        with mock.patch.object(chain, "_leave", late):  # a rank that has begun its round, and left nothing yet
            in_seconds(words, lambda key=key: parts_of(key, [rank]))
    key = "ancre-outgoing" if rank == last else "ancre-ingoing"
    words = f"rank {last} has topology ancre-outgoing where rank 0 has ancre-ingoing"
    numbers = stages_of(ScheduleInterleaved1F1B, 2 * ranks)
    in_seconds(words, lambda: parts_of(key, numbers, 2 * ranks))
    with mock.patch("rewire.ranks.chain.check_chains"):
        parts = parts_of(key, numbers, 2 * ranks)
    in_seconds(words, lambda: rewire.pipeline_cache(parts))
    run("ancre-ingoing", Schedule1F1B, ranks)


def two_pipelines() -> None:
    """Different models in one process group: one for ranks 0 and 1, another one for ranks 2 and 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "pp"))
    key, number = ("ancre-ingoing", "ancre-outgoing")[dist.get_rank() // 2], mesh["pp"].get_local_rank()
    part = cut(make(key), number, 2)
    rewire.pipeline_stage(part)
    stage = PipelineStage(part, number, 2, CPU, group=mesh["pp"].get_group())
    begun = time.monotonic()
    given = (tokens(),) if stage.is_first else ()
    Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss).step(*given, target=targets() if stage.is_last else None)
    assert time.monotonic() - begun < 10


if __name__ == "__main__":
    play(globals())
