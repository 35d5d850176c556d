"""One of several processes: trains a rewired model under DDP, FSDP2 or HSDP; compares with one process. A script."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from every_topology import FAMILIES, LEARNED, mixed
from every_topology import compiled as compiled_by_key
from mixing import keeping, shaken
from models import PreNorm, Stack
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from worker import errors, in_seconds, kept, mine, play, refuses

import rewire
from rewire.kernels.switch import uses_kernels

STEPS = 2
RATE = 0.05


def make(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = rewire.compile(Stack(PreNorm).to(dtype), "ancre-ingoing", start="paper", validate=False)
    return shaken(model, 0.01, 1)


def batch(dtype: torch.dtype) -> Tensor:
    """[4, 9, 8]: two rows for each of two ranks, or one for each of four."""
    return torch.randn(4, 9, 8, generator=torch.Generator().manual_seed(2)).to(dtype)


def train(model: nn.Module, x: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the first step, weights after the last; SGD, so that an update is as exact as its gradient."""
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    first: dict[str, Tensor] = {}
    for number in range(STEPS):
        optimiser.zero_grad()
        model(x).float().square().mean().backward()
        if number == 0:
            first = {name: kept(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        optimiser.step()
    return first, {name: kept(p) for name, p in model.named_parameters()}


def shard(model: nn.Module, policy: MixedPrecisionPolicy | None = None, own_group: bool = True) -> nn.Module:
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    if policy is not None:
        options["mp_policy"] = policy
    if own_group:
        for connection in rewire.connections(model).values():
            fully_shard(connection, mesh=options["mesh"])
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def compare(expected: tuple[dict[str, Tensor], ...], actual: tuple[dict[str, Tensor], ...], tolerance: float) -> None:
    for what, left, right in zip(("gradient", "weight"), expected, actual, strict=False):
        right = {name.removeprefix("module."): value for name, value in right.items()}
        for name, value in left.items():
            other = right[name]
            assert value.dtype == other.dtype and value.shape == other.shape, (what, name, value.dtype, other.dtype)
        for name, error in errors(left, right).items():
            assert error <= tolerance, f"{what} of {name} differs by {error:.1e}"
    assert any("depth_connections" in name and bool(value.any()) for name, value in expected[0].items())


def ddp() -> None:
    model = make()
    expected = train(copy.deepcopy(model), batch(torch.float32))
    wrapped = nn.parallel.DistributedDataParallel(model)
    compare(expected, train(wrapped, mine(batch(torch.float32))), 1e-5)


def fsdp() -> None:
    model = make()
    expected = train(copy.deepcopy(model), batch(torch.float32))
    sharded = shard(model)
    weights = {p for c in rewire.connections(sharded).values() for p in c.parameters()}
    assert weights and all(isinstance(p, DTensor) for p in weights)
    assert "enter(" in rewire.source(sharded, "layers.0")
    compare(expected, train(sharded, mine(batch(torch.float32))), 1e-5)


class Collectives(TorchDispatchMode):
    """Bytes of each all-gather and reduce-scatter, whole."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: list[int] = []
        self.reduced: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in str(func):
            self.gathered.append(args[0].nbytes)
        if "reduce_scatter" in str(func):
            self.reduced.append(args[1].nbytes)
        return func(*args, **(kwargs or {}))


def fsdp_collectives() -> None:
    """Connections of a group of their own are gathered once a micro-batch; of the model's, as its other weights."""
    x = mine(batch(torch.float32))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def seen(model: nn.Module) -> Collectives:
        model(x)  # compares recipes
        with Collectives() as collectives:
            model(x).float().square().mean().backward()
        return collectives

    for key, mixed_precision in (("ancre-ingoing", None), ("mhc", None), ("mhc", policy)):
        plain = seen(shard(Stack(PreNorm), mixed_precision))
        torch.manual_seed(0)
        model = mixed(Stack(PreNorm), key)
        own = seen(shard(copy.deepcopy(model), mixed_precision))
        padded = sum(2 * math.ceil(len(p) / 2) * p[0].nbytes for p in rewire.connections(model)["layers"].parameters())
        assert [len(own.gathered), sum(own.gathered)] == [len(plain.gathered) + 1, sum(plain.gathered) + padded]
        assert len(own.reduced) == len(plain.reduced) + 1
        if mixed_precision is None:
            within = seen(shard(model, own_group=False))
            assert len(within.gathered) == len(plain.gathered) and len(within.reduced) == len(plain.reduced)
    plain = seen(shard(checkpointed(Stack(PreNorm))))
    torch.manual_seed(0)
    model = checkpointed(mixed(Stack(PreNorm), "mhc"))
    own = seen(shard(copy.deepcopy(model)))  # once more in backward, where the block that begins the stream runs again
    assert len(own.gathered) == len(plain.gathered) + 2 and len(own.reduced) == len(plain.reduced) + 1
    assert len(seen(shard(model, own_group=False)).gathered) == len(plain.gathered)
    model = make()
    expected = train(copy.deepcopy(model), batch(torch.float32))
    (connection,) = rewire.connections(model).values()
    fully_shard([connection, model.out], mesh=init_device_mesh("cpu", (2,)))  # whose weights backward needs
    compare(expected, train(shard(model, own_group=False), x), 1e-5)


def fsdp_hooks() -> None:
    """Hooks that change hidden states, registered before and after sharding, and one on all modules."""

    def steer(_m: Any, _args: Any, out: Tensor) -> Tensor | None:
        return 0.5 * out + out.roll(1, -1) if isinstance(out, Tensor) else None

    def halve(_m: Any, args: tuple[Tensor, ...]) -> Any:
        return (0.5 * args[0],) if isinstance(args[0], Tensor) else None

    def scale(_m: Any, _args: Any, out: Any) -> Any:
        return 1.01 * out if isinstance(out, Tensor) else None

    handle = register_module_forward_hook(scale)
    for key in ("ancre-ingoing", "grn-v2", "hc-static", "muddformer"):
        torch.manual_seed(0)
        model = mixed(Stack(PreNorm), key)
        model.layers[0].register_forward_hook(steer)
        one = copy.deepcopy(model)
        sharded = shard(model)
        for other in (one, sharded):
            other.layers[1].register_forward_hook(steer)
            other.layers[2].register_forward_pre_hook(halve)
        expected = train(one, batch(torch.float32))
        compare(expected, train(sharded, mine(batch(torch.float32))), 1e-4)
        keep(sharded)
    handle.remove()


def hsdp_every_kind() -> None:
    """Two groups of two ranks: parameters are sharded in each, and replicated between them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for key in (*FAMILIES, "dca"):
        torch.manual_seed(0)
        model = mixed(Stack(PreNorm), key)
        expected = train(copy.deepcopy(model), batch(torch.float32))
        for module in (*rewire.connections(model).values(), *model.layers, model):
            fully_shard(module, mesh=mesh)
        compare(expected, train(model, mine(batch(torch.float32))), 1e-4)
        keep(model)


def fsdp_bfloat16() -> None:
    """A bfloat16 model with float32 connection weights: one dtype in each group."""
    model = make(torch.bfloat16)
    expected = train(copy.deepcopy(model), batch(torch.bfloat16))
    sharded = shard(model)
    assert {p.dtype for p in sharded.parameters()} == {torch.bfloat16, torch.float32}
    compare(expected, train(sharded, mine(batch(torch.bfloat16))), 5e-2)


def fsdp_mixed() -> None:
    """float32 weights, cast for computing: the reference is a bfloat16 copy whose connection weights stay float32."""
    model = make()
    reference = copy.deepcopy(model).bfloat16()
    expected, _ = train(reference, batch(torch.bfloat16))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    opened: list[torch.dtype] = []
    sharded = shard(model, policy)
    for connection in rewire.connections(sharded).values():
        connection.register_forward_hook(lambda _m, _args, stream: opened.append(stream.shared.weights.rows[0].dtype))
    actual, weights = train(sharded, mine(batch(torch.float32)))
    assert opened == [torch.float32] * STEPS
    assert all(value.dtype == torch.float32 for value in (*actual.values(), *weights.values()))
    compare(({name: value.float() for name, value in expected.items()},), (actual,), 5e-2)


#: Models that were trained: gloo's threads may still write to what FSDP gathered ahead and did not use.
KEPT: list[nn.Module] = []


def keep(model: nn.Module) -> None:
    KEPT.append(model)
    dist.barrier()


def fsdp_every_topology() -> None:
    """Streams of every topology pass between sharded blocks; q, k and v apart where they are."""
    for key in LEARNED:
        torch.manual_seed(0)
        model = mixed(Stack(PreNorm), key)
        expected = train(copy.deepcopy(model), batch(torch.float32))
        sharded = shard(model)
        compare(expected, train(sharded, mine(batch(torch.float32))), 1e-4)
        keep(sharded)


def fsdp_mixed_every_topology() -> None:
    mixed_precision(LEARNED)


def fsdp_mixed_kernels() -> None:
    """Those that were meant for kernels are theirs."""
    assert uses_kernels(torch.zeros(1))
    mixed_precision(("ancre-ingoing", "hc-dynamic", "attnres", "muddformer"))


def mixed_precision(keys: Iterable[str]) -> None:
    """Activations in bfloat16, connection weights in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for key in keys:
        torch.manual_seed(0)
        model = mixed(Stack(PreNorm), key)
        expected, _ = train(copy.deepcopy(model), batch(torch.float32))
        sharded = shard(model, policy)
        actual, _ = train(sharded, mine(batch(torch.float32)))
        keep(sharded)
        assert list(expected) == list(actual) and all(value.isfinite().all() for value in actual.values())
        flat = [torch.cat([value.flatten() for value in values.values()]) for values in (expected, actual)]
        assert torch.cosine_similarity(*flat, dim=0) > 0.99, key


def fsdp_penalty() -> None:
    """Connection weights outside a forward, where they are sharded."""
    model = make()
    want = rewire.sparsity_penalty(model).item()
    table = rewire.coefficients(model)["layers"]
    sharded = shard(model)
    penalty = rewire.sparsity_penalty(sharded)
    penalty.backward()
    assert abs(penalty.item() - want) < 1e-6
    assert torch.equal(rewire.coefficients(sharded)["layers"], table)
    (weight,) = rewire.connections(sharded)["layers"].parameters()
    assert weight.grad is not None and bool(kept(weight.grad).any())


def checkpointed(model: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer, **options)
    return model


def fsdp_checkpointed() -> None:
    """Wholly; and selectively, where hooks of FSDP2 on the connection run other operations in backward."""
    prefix = "._checkpoint_wrapped_module"
    for options in ({}, {"context_fn": keeping("mm", "bmm", "addmm")}):
        model = make()
        expected = train(copy.deepcopy(model), batch(torch.float32))
        trained = train(shard(checkpointed(model, **options)), mine(batch(torch.float32)))
        compare(expected, tuple({n.replace(prefix, ""): v for n, v in d.items()} for d in trained), 1e-5)


def fsdp_resume() -> None:
    """A distributed checkpoint of the whole state dict, recipe included, loads into one process."""
    sharded = shard(make())
    train(sharded, mine(batch(torch.float32)))
    state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    with torch.no_grad():
        expected = sharded(batch(torch.float32))
    if dist.get_rank() == 0:
        single = make()
        assert not single.load_state_dict(state).missing_keys
        with torch.no_grad():
            torch.testing.assert_close(single(batch(torch.float32)), expected)
    dist.barrier()


def fsdp_loads_whole() -> None:
    """Whole weights of a plain model, and of a rewired one, that one rank has read; into a model made on meta."""
    torch.manual_seed(0)
    plain = Stack(PreNorm)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for key in ("ancre-ingoing", "mhc", "dca"):
        start = compiled_by_key(copy.deepcopy(plain), key, validate=False)
        moved = shaken(copy.deepcopy(start), 0.2, 7)
        for given, expected in ((plain, start), (moved, moved)):
            model = shard(copy.deepcopy(start).to("meta"))
            model.to_empty(device="cpu")
            for connection in rewire.connections(model).values():
                connection.reset_parameters()
            set_model_state_dict(model, given.state_dict() if dist.get_rank() == 0 else {}, options=options)
            with torch.no_grad():
                torch.testing.assert_close(model(batch(torch.float32)), expected(batch(torch.float32)))


def sharded_before() -> None:
    sharded = fully_shard(Stack(PreNorm), mesh=init_device_mesh("cpu", (2,)))
    refuses("the model is already sharded", lambda: rewire.compile(sharded), rewire.WrappedModel)
    inner = Stack(PreNorm)
    fully_shard(inner.layers[1], mesh=init_device_mesh("cpu", (2,)))
    refuses("'layers.1' is already sharded", lambda: rewire.compile(inner), rewire.WrappedModel)
    wrapped = nn.parallel.DistributedDataParallel(Stack(PreNorm))
    refuses(r"rewire what is inside \(\.module\), then wrap that", lambda: rewire.compile(wrapped), rewire.WrappedModel)


def differing(one: tuple[str, dict[str, Any]], two: tuple[str, dict[str, Any]]) -> nn.Module:
    """A model that rank 1 rewires in another way than rank 0."""
    torch.manual_seed(0)
    topology, options = (one, two)[dist.get_rank()]
    return rewire.compile(Stack(PreNorm), topology, validate=False, **options)


def other_recipes() -> None:
    """One error on both ranks, which says what differs; before weights of other shapes are gathered, too."""
    ingoing: tuple[str, dict[str, Any]] = ("ancre-ingoing", {"start": "paper"})
    alike = [
        (("ancre-outgoing", {"start": "paper"}), "rank 1 has topology ancre-outgoing where rank 0 has ancre-ingoing"),
        (("ancre-ingoing", {"start": "paper", "temperature": 0.1}), "rank 1 has temperature 0.1 where rank 0 has 0.01"),
    ]
    x = mine(batch(torch.float32))
    for other, words in alike:
        in_seconds(words, lambda other=other: nn.parallel.DistributedDataParallel(differing(ingoing, other))(x))
        in_seconds(words, lambda other=other: shard(differing(ingoing, other), own_group=False)(x))
        in_seconds(words, lambda other=other: shard(differing(ingoing, other))(x))
    starts = (("denseformer", {"start": "preserve"}), ("denseformer", {"start": "paper"}))
    in_seconds("rank 1 has start paper where rank 0 has preserve", lambda: shard(differing(*starts))(x))
    units = (("denseformer", {}), ("denseformer", {"granularity": "sublayer"}))
    in_seconds("rank 1 has units .* where rank 0 has", lambda: shard(differing(*units))(x))
    shapes = (("ancre-ingoing", {}), ("muddformer", {}))
    for own in (True, False):
        in_seconds("rank 1 has topology muddformer where", lambda own=own: shard(differing(*shapes), own_group=own)(x))
    with mock.patch("rewire.ranks.meeting.__version__", f"0.{dist.get_rank()}"):
        in_seconds("rank 1 has rewire 0.1 where rank 0 has 0.0", lambda: shard(make())(x))


def compiled() -> None:
    """FSDP asks before it gathers, whatever is compiled. Without FSDP other recipes show at the third step."""
    recipes: Any = [("ancre-ingoing", {"start": "paper"}), ("ancre-outgoing", {"start": "paper"})]
    words, x = "rank 1 has topology ancre-outgoing where rank 0 has ancre-ingoing", mine(batch(torch.float32))

    def blocks(model: nn.Module) -> nn.Module:
        for layer in model.layers:
            layer.compile(backend="aot_eager")
        return model

    for own in (True, False):
        in_seconds(words, lambda own=own: shard(blocks(differing(*recipes)), own_group=own)(x), 60)
    model = make()
    expected = train(copy.deepcopy(model), batch(torch.float32))
    compare(expected, train(shard(blocks(model)), x), 1e-5)
    whole = nn.parallel.DistributedDataParallel(torch.compile(make(), backend="aot_eager", fullgraph=True))
    train(whole, x)
    whole = nn.parallel.DistributedDataParallel(torch.compile(differing(*recipes), backend="aot_eager", fullgraph=True))
    optimiser = torch.optim.SGD(whole.parameters(), lr=RATE)

    def steps() -> None:
        for _ in range(3):
            optimiser.zero_grad()
            whole(x).square().mean().backward()
            optimiser.step()

    in_seconds(words, steps, 60)
    torch._dynamo.reset()


def other_values() -> None:
    """Replicas of one recipe begin with the same weights."""
    wrapped = nn.parallel.DistributedDataParallel(make())
    with torch.no_grad():
        for connection in rewire.connections(wrapped).values():
            for weight in connection.parameters():
                weight.add_(dist.get_rank())
    in_seconds("rank 1 has connection weights with sum", lambda: wrapped(mine(batch(torch.float32))))


def extra_forwards() -> None:
    """A rank may run more than others, on a model of its own or on one that all train."""
    model = make()
    expected = train(copy.deepcopy(model), batch(torch.float32))
    begun = time.monotonic()
    if dist.get_rank() == 0:
        train(copy.deepcopy(model), batch(torch.float32))
        model(batch(torch.float32)).mean()
    wrapped = nn.parallel.DistributedDataParallel(model)
    if dist.get_rank() == 0:
        with torch.no_grad():
            wrapped.eval()(batch(torch.float32))
            wrapped.train()
    compare(expected, train(wrapped, mine(batch(torch.float32))), 1e-5)
    other = differing(("ancre-ingoing", {}), ("muddformer", {}))  # independent models in one process group
    train(other, batch(torch.float32) + dist.get_rank())
    assert time.monotonic() - begun < 20


def no_own_group() -> None:
    sharded = shard(make(), MixedPrecisionPolicy(param_dtype=torch.bfloat16), own_group=False)
    refuses("a group of their own", lambda: sharded(mine(batch(torch.float32))))


if __name__ == "__main__":
    play(globals())
