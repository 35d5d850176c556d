"""Rewired models in torchtitan's trainer (torchtitan 0.3).

It takes one more line in your config module::

    def llama3_8b_ancre() -> Trainer.Config:
        config = llama3_8b()
        config.model_spec = rewire.titan.rewired(config.model_spec, "ancre-ingoing")
        return config

``torchtitan.train --module my_configs --config llama3_8b_ancre`` then trains it, with all of torchtitan's options.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from rewire.version import how_to_install

try:
    import spmd_types as spmd
    from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
    from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh
    from torchtitan.models.common.decoder_sharding import dense_param_placement
    from torchtitan.protocols.model import BaseModel
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.protocols.module import Module, ModuleDict
    from torchtitan.protocols.sharding import ShardingConfig
except ImportError as error:
    raise ImportError(f"rewire.titan needs torchtitan 0.3: {how_to_install('titan')}") from error

from rewire.attributes import CONNECTIONS
from rewire.compiler import compile
from rewire.errors import UnsupportedCall
from rewire.pipeline import entries_of, pipeline_cache, pipeline_stage
from rewire.ranks.meeting import agree, facts_of
from rewire.runtime.connection import Connection, Connections, SeparateNorms, connections, parallelize
from rewire.topologies import Topology
from rewire.torch_internals import children_of

if TYPE_CHECKING:
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims

#: The tensors of a checkpoint, by name.
StateDict: TypeAlias = dict[str, Any]

#: Pipeline schedules that compute gradients of inputs and of weights in two backward passes.
SPLIT_BACKWARD = {"interleavedzerobubble", "zbvzerobubble", "dualpipev"}


def rewired(spec: ModelSpec, topology: str | Topology = "ancre-ingoing", **options: object) -> ModelSpec:
    """The specification of the rewired model.

    The model is rewired when it is built, on the meta device. Connection weights are initialised with the other
    weights, have their own float32 FSDP group, and are saved and loaded with the model, also in the Hugging Face
    format. All ranks have to rewire the model in the same way; this is checked when they build it.

    Args:
        spec: specification of one of torchtitan's decoders; it is not changed.
        topology, options: as for `rewire.compile`.

    Returns:
        A specification for torchtitan's trainer.
    """
    adapter = spec.state_dict_adapter
    return dataclasses.replace(
        spec,
        model=_rewired_config(spec.model, {"topology": topology, **options}),
        parallelize_fn=functools.partial(_parallelized, spec.parallelize_fn),
        pipelining_fn=None if spec.pipelining_fn is None else functools.partial(_pipelined, spec.pipelining_fn),
        state_dict_adapter=None if adapter is None else _rewired_adapter(adapter),
    )


def _rewired_config(config: BaseModel.Config, arguments: dict[str, Any]) -> BaseModel.Config:
    """A ``config`` that builds the rewired model."""
    base = type(config)

    @dataclass(kw_only=True, slots=True)
    class Rewired(base):  # type: ignore[misc, valid-type]
        rewiring: dict[str, Any]

        def build(self, **kwargs: object) -> nn.Module:
            model = compile(base.build(self, **kwargs), **self.rewiring)
            _adopt(model)
            facts = facts_of({name: connection.trunk_facts() for name, connection in connections(model).items()})
            agree("titan", range(dist.get_world_size() if dist.is_initialized() else 1), facts)
            return model

    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return Rewired(**fields, rewiring=arguments)


class TitanConnection(Connection, Module):
    """A connection that is also torchtitan's kind of module, whose ``init_states`` calls `reset_parameters`."""


class TitanNorms(SeparateNorms, Module):
    """A norm's copies, likewise."""


def _adopt(model: nn.Module) -> None:
    """Turn the modules that rewiring has added into torchtitan's kind of module."""
    for module in list(model.modules()):
        held = children_of(module).get(CONNECTIONS)
        if isinstance(held, Connections):
            children_of(module)[CONNECTIONS] = ModuleDict(held.named_children())
            for connection in held.children():
                connection.__class__ = TitanConnection
        elif isinstance(held, SeparateNorms):
            held.__class__ = TitanNorms


def _parallelized(
    parallelize_fn: Callable[..., nn.Module],
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    **others: object,
) -> nn.Module:
    """Call the specification's ``parallelize_fn`` without connections, then shard these in their own FSDP groups.

    Raises:
        UnsupportedCall: ``spmd_backend="full_dtensor"``, or a zero-bubble schedule with FSDP.
    """
    if parallelism.spmd_backend == "full_dtensor":
        raise UnsupportedCall(
            "torchtitan's spmd_backend 'full_dtensor' has hidden states that are sharded over the data-parallel ranks, "
            "too: gradients of connection weights would be summed over them twice. Use 'spmd_types' or "
            "'partial_dtensor'."
        )
    if parallel_dims.pp_enabled:
        schedule = parallelism.pipeline_parallel_schedule
        if parallel_dims.fsdp_enabled and schedule.lower() in SPLIT_BACKWARD:
            raise UnsupportedCall(
                f"the schedule {schedule} computes gradients of inputs and of weights in two passes, and FSDP2 reduces "
                "them after the first: torch 2.13 loses gradients, those of plain models, too. Use 1F1B or "
                "Interleaved1F1B, or no data_parallel_shard_degree."
            )
        pipeline_stage(model)
    given = {"parallel_dims": parallel_dims, "training": training, "parallelism": parallelism}
    held = {module: children_of(module).pop(CONNECTIONS) for module in _owners(model)}
    model = parallelize_fn(model, **given, compile_config=compile_config, **others)
    for module, connections_of in held.items():
        children_of(module)[CONNECTIONS] = connections_of
    sequence = parallelism.enable_sequence_parallel
    if parallel_dims.tp_enabled and parallelism.spmd_backend == "spmd_types":  # hidden states are plain tensors
        parallelize(model, parallel_dims.get_mesh("tp"), sequence=sequence)
    for connection in connections(model).values():
        _shard(connection, **given)
    if compile_config.enable and "model" in compile_config.components:
        for block in model.layers.children():  # type: ignore[union-attr]
            if any(entry.begins for module in block.modules() for entry in entries_of(module)):
                # FSDP's hooks on the connection, which this block calls, break its graph: so no fullgraph=True here.
                block.compile(backend=compile_config.backend)
    return model


def _owners(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(children_of(module).get(CONNECTIONS), nn.ModuleDict)]


def _shard(
    connection: Connection, parallel_dims: ParallelDims, training: TrainingConfig, parallelism: ParallelismConfig
) -> None:
    """Replicate connection weights over tensor-parallel ranks, and shard them over data-parallel ranks."""
    assert isinstance(connection, Module)
    if parallelism.spmd_backend == "spmd_types":
        mesh, dims = resolve_fsdp_mesh(parallel_dims)
    else:
        replicas = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
        mesh, dims = parallel_dims.get_mesh([*replicas, "fsdp"]), None
    if parallel_dims.tp_enabled or parallelism.spmd_backend == "spmd_types":
        names = [name for name, _ in (*connection.named_parameters(), *connection.named_buffers())]
        connection._sharding_config = ShardingConfig(
            state_shardings={name: dense_param_placement(tp=spmd.I) for name in names}
        )
        connection.parallelize(parallel_dims)
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if training.enable_cpu_offload else {}
    if dims is not None:
        options["dp_mesh_dims"] = dims
    policy = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
    fully_shard(connection, mesh=mesh, mp_policy=policy, **options)
    disable_fsdp_gradient_division(connection)


def _pipelined(pipelining_fn: Callable[..., Any], model: nn.Module, **given: Any) -> Any:
    """Call the specification's ``pipelining_fn``; ranks with several stages get a `pipeline_cache`."""
    schedule, parts, first, last = pipelining_fn(model, **given)
    if len(parts) > 1:
        pipeline_cache(parts, given["parallel_dims"].get_mesh("pp").get_group())
    return schedule, parts, first, last


def _rewired_adapter(base: Any) -> Any:
    """A subclass of ``base`` that also converts connection weights, to their names in transformers' models.

    If a checkpoint has no connection weights, they stay at their start.
    """

    class Adapter(base):
        def to_hf(self, state_dict: StateDict) -> StateDict:
            plain, added = _apart(state_dict)
            self.converted = super().to_hf(plain) | {f"model.{name}": value for name, value in added.items()}
            if self.fqn_to_index_mapping:
                for name in added:
                    self.fqn_to_index_mapping.setdefault(f"model.{name}", 1)
            return self.converted

        def from_hf(self, hf_state_dict: StateDict) -> StateDict:
            plain, added = _apart(hf_state_dict)
            state_dict: StateDict = super().from_hf(plain)
            return state_dict | {name.removeprefix("model."): value for name, value in added.items()}

        def get_hf_storage_reader(self, path: str, *args: object, **kwargs: object) -> Any:
            """The reader of the folder from which the result of `to_hf` is loaded next."""
            reader = super().get_hf_storage_reader(path, *args, **kwargs)
            saved = reader.read_metadata().state_dict_metadata
            for name in [name for name in self.converted if CONNECTIONS in name and name not in saved]:
                if name.rpartition("_")[0] in saved:
                    raise UnsupportedCall(
                        f"'{name}' is a stage's part of a weight that {path} has whole: load it without pipelines once."
                    )
                del self.converted[name]
            return reader

    return Adapter


def _apart(state_dict: StateDict) -> tuple[StateDict, StateDict]:
    """The entries that do not belong to connections, and those that do."""
    added = {name: value for name, value in state_dict.items() if CONNECTIONS in name}
    return {name: value for name, value in state_dict.items() if name not in added}, added
