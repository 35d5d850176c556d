"""One of two processes: gradients under tensor and sequence parallelism, against those of one process. A script."""

from __future__ import annotations

import copy
import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import ring_on_cpu
import torch
import torch.distributed as dist
import torch.nn.functional as F
from every_topology import FAMILIES, mixed
from torch import Tensor, nn
from torch.distributed._functional_collectives import reduce_scatter_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from worker import errors, full, play, refuses

import rewire

WIDTH, HEADS, LENGTH = 32, 4, 10
#: One of each kind, and those that read queries, keys and values apart.
KINDS = [*FAMILIES, "dca", "attnres-qkv"]


class Attention(nn.Module):
    """The number of heads is that of the features that come: a part of them under tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.self_attn = nn.LayerNorm(WIDTH), Attention()
        self.norm_2, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm_1(x))
        x = x + self.mlp(self.norm_2(x))
        return x


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, WIDTH)
        self.layers = nn.ModuleList([block() for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 23)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(23, (2, length), generator=torch.Generator().manual_seed(3))


def make(key: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = mixed(Model(), key, example_inputs=(tokens(),))
    return model.to(dtype)


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def sequence_parallel(model: nn.Module, tp: DeviceMesh, local: bool = True) -> nn.Module:
    """PyTorch's plan for sequence parallelism. Hidden states are plain tensors, or DTensors with ``local=False``."""
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=local),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    whole: dict[str, Any] = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    for number in range(len(model.layers)):
        block = f"layers.{number}"
        plan |= {
            f"{block}.norm_1": SequenceParallel(use_local_output=local),
            f"{block}.self_attn": PrepareModuleInput(**whole),
            **{f"{block}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
            f"{block}.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=local),
            f"{block}.norm_2": SequenceParallel(use_local_output=local),
            f"{block}.mlp": PrepareModuleInput(**whole),
            f"{block}.mlp.up": ColwiseParallel(),
            f"{block}.mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=local),
        }
    return parallelize_module(model, tp, plan)


def tensor_parallel(model: nn.Module, tp: DeviceMesh) -> nn.Module:
    """Hidden states are whole on each rank."""
    plan: dict[str, ParallelStyle] = {}
    for number in range(len(model.layers)):
        block = f"layers.{number}"
        plan |= {f"{block}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"{block}.self_attn.o_proj": RowwiseParallel()}
        plan |= {f"{block}.mlp.up": ColwiseParallel(), f"{block}.mlp.down": RowwiseParallel()}
    return parallelize_module(model, tp, plan)


def gradients(model: nn.Module, length: int = LENGTH) -> dict[str, Tensor]:
    """Of all parameters, of a loss that weighs every token and feature differently."""
    model.zero_grad()
    output = model(tokens(length))
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(4)).to(output.dtype)
    (full(output) * weight).square().mean().backward()
    return {name: full(p.grad).detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(expected: dict[str, Tensor], actual: dict[str, Tensor], tolerance: float, what: str) -> None:
    for name, error in errors(expected, actual).items():
        # In a float64 model, connection weights and so their gradients stay float32.
        limit = max(tolerance, 1e-6) if "depth_connections" in name else tolerance
        assert error <= limit, f"{what}: gradient of {name} differs by {error:.1e}"
        same = [torch.empty_like(actual[name]) for _ in range(2)]
        dist.all_gather(same, actual[name].contiguous())
        assert torch.equal(*same), f"{what}: the ranks' gradients of {name} differ"


def exact(key: str, parallel: Callable[[nn.Module], object], dtype: torch.dtype = torch.float64) -> None:
    model = make(key, dtype)
    expected = gradients(copy.deepcopy(model))
    assert any("depth_connections" in name and bool(value.any()) for name, value in expected.items())
    tolerance = 1e-10
    if dtype == torch.float32:  # muddformer and mhc-identity amplify rounding
        rounding = errors(gradients(copy.deepcopy(model).double()), expected)
        tolerance = max(1e-5, 10 * max(rounding.values()))
    parallel(model)
    compare(expected, gradients(model), tolerance, f"{key}, {dtype}")


def local(model: nn.Module) -> None:
    sequence_parallel(model, mesh())
    rewire.parallelize(model, mesh(), sequence=True)


def dtensors(model: nn.Module) -> None:
    sequence_parallel(model, mesh(), local=False)


def sequence() -> None:
    """Hidden states sharded along the sequence: plain tensors, which are declared, and DTensors, which say so."""
    exact("ancre-ingoing", local)
    exact("muddformer", dtensors)
    exact("dca", local, torch.float32)


def shards_of_different_sizes() -> None:
    for key in ("ancre-ingoing", "muddformer"):
        model = make(key, torch.float64)
        expected = gradients(copy.deepcopy(model), LENGTH + 1)
        dtensors(model)
        compare(expected, gradients(model, LENGTH + 1), 1e-10, key)


def every_kind() -> None:
    for key in KINDS:
        exact(key, local)
        exact(key, dtensors)
        exact(key, local, torch.float32)
        exact(key, dtensors, torch.float32)


def replicated() -> None:
    """Tensor parallelism by itself: nothing to call, and nothing to sum."""
    for key in ("ancre-ingoing", "muddformer"):
        exact(key, lambda model: tensor_parallel(model, mesh()))

    def declared(model: nn.Module) -> None:
        tensor_parallel(model, mesh())
        rewire.parallelize(model, mesh(), sequence=False)

    exact("dca", declared)


def transformers_plan() -> None:
    """A rewired folder, loaded with the tensor-parallel plan that transformers has for the architecture."""
    import torchvision_stub  # noqa: F401
    from transformers.distributed import DistributedConfig

    from rewire.patterns.tiny import tiny_model

    ids = tokens()
    for key in ("ancre-ingoing", "muddformer"):
        torch.manual_seed(0)
        model = mixed(tiny_model("llama"), key).double().train()
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        if dist.get_rank() == 0:
            model.save_pretrained(folder[0])
        dist.barrier()
        config = DistributedConfig(tp_size=2, tp_plan="auto")
        sharded = rewire.from_pretrained(folder[0], distributed_config=config, dtype=torch.float64).train()
        assert any(isinstance(p, DTensor) for p in sharded.parameters())
        found = []
        for one in (model, sharded):
            one(input_ids=ids, labels=ids).loss.backward()
            found.append({name: full(p.grad) for name, p in one.named_parameters() if p.grad is not None})
        compare(*found, 1e-10, key)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])


def sharded_connections() -> None:
    """Connection weights that are DTensors themselves; they can be reset."""

    def parallel(model: nn.Module) -> None:
        local(model)
        for connection in rewire.connections(model).values():
            distribute_module(connection, mesh())

    exact("ancre-ingoing", parallel)
    exact("muddformer", parallel)
    want = rewire.compile(Model(), "muddformer", start="paper", example_inputs=(tokens(),))
    model = make("muddformer")
    (connection,) = rewire.connections(model).values()
    for name, parameter in list(connection.named_parameters()):
        sharded = distribute_tensor(parameter.detach(), mesh(), [Shard(0)])
        connection.register_parameter(name, nn.Parameter(sharded))
    connection.reset_parameters()
    (other,) = rewire.connections(want).values()
    for name, parameter in connection.named_parameters():
        assert torch.equal(full(parameter), other.get_parameter(name)), name


def with_fsdp() -> None:
    two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def parallel(model: nn.Module) -> None:
        sequence_parallel(model, two["tp"])
        rewire.parallelize(model, two["tp"], sequence=True)
        for connection in rewire.connections(model).values():
            fully_shard(connection, mesh=two["dp"])
        for layer in model.layers:
            fully_shard(layer, mesh=two["dp"])
        fully_shard(model, mesh=two["dp"])

    exact("ancre-ingoing", parallel)
    exact("muddformer", parallel)


def checkpointed() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for key, parallel in itertools.product(("ancre-ingoing", "muddformer"), (local, dtensors)):
        model = make(key, torch.float64)
        expected = gradients(copy.deepcopy(model))
        parallel(model)
        for number, layer in enumerate(model.layers):
            model.layers[number] = checkpoint_wrapper(layer)
        actual = {n.replace("._checkpoint_wrapped_module", ""): value for n, value in gradients(model).items()}
        compare(expected, actual, 1e-10, key)


class TokenBlock(Block):
    """No token sees another: a rank can have any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Mlp()


def by_hand() -> None:
    """Tokens cut by hand, blocks compiled one by one or not: the model's own gradients are summed here."""
    for key, backend in itertools.product(("ancre-ingoing", "grn-v3", "hc-dynamic"), (None, "aot_eager")):
        torch.manual_seed(0)
        model = mixed(Model(TokenBlock), key, example_inputs=(tokens(),)).double()
        weight = torch.randn(2, LENGTH, 23, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        (model(tokens()) * weight).sum().backward()
        expected = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        rewire.parallelize(model, mesh(), sequence=True)
        for layer in model.layers if backend else ():
            layer.compile(backend=backend)
        part = (x.chunk(2, 1)[dist.get_rank()] for x in (tokens(), weight))
        (model(next(part)) * next(part)).sum().backward()
        for name, p in model.named_parameters():
            if "depth_connections" not in name:
                dist.all_reduce(p.grad)
        compare(expected, {name: p.grad for name, p in model.named_parameters()}, 1e-10, f"{key}, {backend}")
        torch._dynamo.reset()


class Gathered(torch.autograd.Function):
    """All ranks' keys or values, in context parallelism that somebody wrote himself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(2, 2)[dist.get_rank()]


class ContextAttention(Attention):
    """Queries of this rank's tokens, keys and values of all."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, Gathered.apply(k), Gathered.apply(v))
        return self.o_proj(y.transpose(1, 2).flatten(2))


class ContextBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = ContextAttention()


def steps(model: nn.Module, count: int, optimizer: Any, clip: bool, sums: Callable[[str], bool], data: int = 0) -> None:
    """Training on this rank's part of a sequence; gradients of what ``sums`` names are summed by hand."""
    made = optimizer(model.parameters(), lr=1e-3)
    weight = torch.randn(2, LENGTH, 23, generator=torch.Generator().manual_seed(4))
    for number in range(count):
        ids = torch.randint(23, (2, LENGTH), generator=torch.Generator().manual_seed(100 * data + number))
        made.zero_grad()
        mine, weights = (x.chunk(2, 1)[dist.get_rank()] for x in (ids, weight))
        (model(mine) * weights).sum().backward()
        for name, p in model.named_parameters():
            if sums(name):
                dist.all_reduce(p.grad)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        made.step()


def context(key: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return mixed(Model(ContextBlock), key, example_inputs=(tokens(),), **options)


def drifting() -> None:
    """Context parallelism that nobody declared: found at the third step, on both ranks; also where all is clipped."""
    others = lambda name: "depth_connections" not in name  # noqa: E731
    cases: list[tuple[str, Any, bool]] = [("ancre-ingoing", torch.optim.SGD, False), ("mhc", torch.optim.SGD, True)]
    cases += [("ancre-ingoing", torch.optim.AdamW, True), ("muddformer", torch.optim.AdamW, False)]
    for key, optimizer, clip in cases:
        words = "ranks 0 and 1 have the same gradients of other weights and different gradients .*rewire.parallelize"
        refuses(words, lambda o=optimizer, c=clip, k=key: steps(context(k), 3, o, c, others))
    model = context("ancre-ingoing")  # by a loop that has them right until the fifth step
    count = itertools.count()
    sums = lambda name: others(name) or next(count) < 5  # noqa: E731
    refuses("different gradients", lambda: steps(model, 9, torch.optim.SGD, True, sums))


class ByHand:
    """An optimiser that is none of torch's."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for p in self.parameters:
            p.sub_(20 * self.lr * p.grad.sign())


def drifting_by_hand() -> None:
    """Steps of other optimisers are seen by what they have done: values of the embedding, and of connections."""
    others = lambda name: "depth_connections" not in name  # noqa: E731
    words = "ranks 0 and 1 have the same values of other weights and different values .*rewire.parallelize"
    for key in ("ancre-ingoing", "muddformer"):
        refuses(words, lambda key=key: steps(context(key), 10, ByHand, False, others))
        steps(context(key), 10, ByHand, False, lambda name: True)
        steps(context(key), 10, ByHand, False, lambda name: False)


def silent() -> None:
    """What ranks are right to do: a declared mesh, sums by hand, and models of their own in one process group."""
    for key in ("ancre-ingoing", "muddformer"):
        model = context(key)
        rewire.parallelize(model, mesh(), sequence=True)
        steps(model, 5, torch.optim.AdamW, True, lambda name: "depth_connections" not in name)
        steps(context(key), 5, torch.optim.AdamW, True, lambda name: True)
        torch.manual_seed(0)
        independent = mixed(Model(), key, example_inputs=(tokens(),))
        steps(independent, 5, torch.optim.AdamW, True, lambda name: False)  # from the same start
        torch.manual_seed(dist.get_rank())
        independent = mixed(Model(), key, example_inputs=(tokens(),))
        steps(independent, 5, torch.optim.AdamW, True, lambda name: False, data=dist.get_rank())


def torchs_context_parallel() -> None:
    """Ring attention over parts of a sequence that are put in another order, to balance the load."""
    ring_on_cpu.enable()
    ids, weight = tokens(12), torch.randn(2, 12, 23, generator=torch.Generator().manual_seed(4))
    for key in ("ancre-ingoing", "muddformer", "hc-dynamic", "mhc"):
        model = make(key)
        (model(ids) * weight).sum().backward()
        expected = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        rewire.parallelize(model, mesh(), sequence=True)
        mine = [ids.clone(), weight.clone()]
        with context_parallel(mesh(), buffers=mine, buffer_seq_dims=[1, 1]):
            assert mine[0].shape == (2, 6)
            (model(mine[0]) * mine[1]).sum().backward()
        for name, p in model.named_parameters():
            if "depth_connections" not in name:
                dist.all_reduce(p.grad)
        compare(expected, {name: p.grad for name, p in model.named_parameters()}, 1e-4, key)


class Collectives(TorchDispatchMode):
    """Counts collectives, those of DTensors included."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self.count[str(func.overloadpacket)] += 1
        return func(*args, **kwargs or {})


def collectives() -> None:
    """One more than the plain model has, in backward; and the same gathers, where q, k and v are read apart."""
    for key in ("ancre-ingoing", "muddformer"):
        counts = []
        for model in (Model(), make(key)):
            sequence_parallel(model, mesh())
            if rewire.connections(model):
                rewire.parallelize(model, mesh(), sequence=True)
            with Collectives() as calls:
                gradients(model)
            counts.append(calls.count)
        assert counts[1] - counts[0] == {"c10d.allreduce_": 1} and not counts[0] - counts[1], (key, counts)


def undeclared() -> None:
    """Sharded tokens that nobody declared are refused, in the first forward that could train."""
    model = sequence_parallel(make("ancre-ingoing"), mesh())
    refuses("rewire.parallelize", lambda: model(tokens()))
    with torch.no_grad():
        model(tokens())
    for parameter in (*model.embed.parameters(), *model.layers[0].parameters()):
        parameter.requires_grad_(False)  # hidden states without a history
    refuses("SequenceParallel.*rewire.parallelize", lambda: model(tokens()))

    class Sliced(nn.Module):
        """An embedding whose result is sliced by hand."""

        def __init__(self, whole: nn.Module) -> None:
            super().__init__()
            self.whole = whole

        def forward(self, ids: Tensor) -> Tensor:
            return self.whole(ids).chunk(2, 1)[dist.get_rank()]

    model = make("ancre-ingoing")
    model.embed = Sliced(model.embed)
    plan: dict[str, ParallelStyle] = {"layers.0.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1))}
    plan["layers.0.self_attn"] = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
    )
    plan |= {f"layers.0.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    refuses("a DTensor, .*rewire.parallelize", lambda: parallelize_module(model, mesh(), plan)(tokens()))

    class Scattered(Sliced):
        """An embedding whose result is reduced and scattered by hand, with a dropout behind it."""

        def forward(self, ids: Tensor) -> Tensor:
            x = self.whole(ids).transpose(0, 1)
            return F.dropout(reduce_scatter_single_autograd(x, "sum", 0, mesh()).transpose(0, 1), 0.1)

    model = make("ancre-ingoing")
    model.embed = Scattered(model.embed)
    refuses("reduce_scatter.*rewire.parallelize", lambda: model(tokens()))


def sharded_channels() -> None:
    model = make("ancre-ingoing")
    parallelize_module(model, mesh(), {"embed": ColwiseParallel(use_local_output=False)})
    refuses("sharded along their channels", lambda: model(tokens()))


def not_rewired() -> None:
    refuses("rewire it first", lambda: rewire.parallelize(Model(), mesh(), sequence=True))


def other_recipes() -> None:
    model = make(("ancre-ingoing", "ancre-outgoing")[dist.get_rank()])
    words = "rank 1 has topology ancre-outgoing where rank 0 has ancre-ingoing"
    refuses(words, lambda: rewire.parallelize(model, mesh(), sequence=True))


def no_mesh() -> None:
    for wrong in ("tp", None, 2):
        with pytest.raises(TypeError, match=f"mesh must be a DeviceMesh, not {wrong!r}.*init_device_mesh"):
            rewire.parallelize(make("ancre-ingoing"), wrong, sequence=True)


if __name__ == "__main__":
    play(globals())
