"""The module that holds a trunk's connection weights."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rewire.attributes import CONNECTIONS, NO_WEIGHT_DECAY, WAITING
from rewire.errors import RewireError
from rewire.kernels.switch import listened
from rewire.mixes.autograd import under_transforms
from rewire.mixes.history import History
from rewire.mixes.tokens import outside_autocast
from rewire.placement import Placement, check_whole, is_dtensor, unwrapped
from rewire.ranks.forward import compare, compare_sharded
from rewire.ranks.meeting import agree, facts_of
from rewire.ranks.watch import Watched
from rewire.runtime.adapters import tell_if_left_out
from rewire.runtime.hooks import show_tensors_to_global_hooks
from rewire.runtime.layout import Layout
from rewire.runtime.optimizers import known
from rewire.runtime.pieces import apart, pieces, together
from rewire.runtime.recipe import read_recipe, recipe_of, scales_in
from rewire.runtime.shared import Shared
from rewire.runtime.stream import Stream
from rewire.topologies.base import Start, States
from rewire.topologies.registry import topology_in
from rewire.torch_internals import (
    buffers_of,
    drop_parameters,
    gather_for_forward_only,
    only_inlined,
    parameters_of,
    unseen_by_selective_checkpoints,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from rewire.trunk import Report, Trunk

logger = logging.getLogger("rewire.saving")

_NUMBERS = itertools.count()
#: The last effective weights computed without gradients, with the layout and copies of the stored weights behind them.
_LAST: WeakKeyDictionary[Connection, tuple[Layout, dict[str, Tensor], Any]] = WeakKeyDictionary()


class Connection(Watched):
    """The connection weights of one trunk; calling it begins the trunk's stream.

    As it is called once per forward, it can have its own FSDP group. Its parameters are plain float32 parameters, and
    stay float32 under ``model.bfloat16()``; so do its buffers, the constants of a frozen topology.

    Args:
        layout: topology and units of the trunk.
        start: ``"preserve"`` or ``"paper"``.
        device: device of the parameters.
        trunk: the trunk as it was found; None in a flat graph.

    Attributes:
        report: what `rewire.compile` found in the model; None if the model was loaded.
        placement: where hidden states that are plain tensors lie on a device mesh, if `parallelize` was called.
        stored_in: the scale by which each learned weight is divided where it is stored (`Topology.natural_scales`).
        learned_names: names of the learned weights.
        rows: number of rows of each unit, for learned weights that have such rows (`Topology.unit_rows`).
        travelling: names of the other learned weights, which pipeline stages receive with the stream.
        dims: sizes of the trunk; on a pipeline stage also the units whose rows are here, as separate parameters.
        others: number of the model's other parameters when it was rewired; a model that was cut has fewer.
        number: how many connections were made before this one in this process; copies keep it.
    """

    #: Hooks on all modules skip it.
    is_rewires_own = True
    placement: Placement | None = None
    report: Report | None = None
    learned_names: tuple[str, ...] = ()
    others = 0

    def __init__(
        self, layout: Layout, start: Start, device: torch.device | str | None = None, trunk: Trunk | None = None
    ) -> None:
        super().__init__()
        self.trunk, self.number = trunk, next(_NUMBERS)
        self._connect(layout, start, device)
        known(self)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        known(self)

    def _connect(self, layout: Layout, start: Start, device: torch.device | str | None) -> None:
        self.layout, self.start, self.dims = layout, start, layout.dims
        given = layout.parameters(start)
        fixed = {name: value for name, value in given.items() if isinstance(value, nn.Buffer)}
        learned = {name: value for name, value in given.items() if name not in fixed}
        self.learned_names = tuple(learned)
        rows = layout.topology.unit_rows(layout.dims)
        self.rows = {n: [len(learned[n]) if k < 0 else k for k in rows[n]] for n in learned if n in rows}
        self.row_shapes = {name: learned[name].shape[1:] for name in self.rows}
        self.travelling = [name for name in learned if name not in rows]
        scales = layout.topology.natural_scales(layout.dims)
        self.stored_in = {name: scales.get(name, 1.0) for name in learned}
        for name, value in learned.items():
            stored = (value / self.stored_in[name]).to(device=device, dtype=torch.float32)
            self.register_parameter(name, nn.Parameter(stored))
            setattr(self.get_parameter(name), NO_WEIGHT_DECAY, True)  # patched code may have registered another object
        for name, value in fixed.items():
            self.register_buffer(name, value.to(device=device, dtype=torch.float32))

    def become(self, layout: Layout) -> None:
        """Replace the layout by another one, with weights at its preserving start."""
        device = next((p.device for p in (*self.parameters(), *self.buffers())), None)
        for name in [*parameters_of(self), *buffers_of(self)]:
            delattr(self, name)
        self._connect(layout, "preserve", device)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Self:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__dict__, memo))
        for entry in memo.pop((WAITING, id(self)), ()):
            entry.connection = made
        return made

    def reset_parameters(self) -> None:
        """Reset weights and constants to their start values (after ``to_empty``, for example)."""
        start = self.layout.parameters(self.start)
        held = {*parameters_of(self), *buffers_of(self)}
        own = start if self.dims.here is None else apart(start, self.rows)
        self.set_values({name: value for name, value in own.items() if name in held})

    @torch.no_grad()
    def set_values(self, values: Mapping[str, Tensor]) -> None:
        """Set weights, by name, to values as in the formulas, which are stored divided by their scales."""
        stored = {**parameters_of(self), **buffers_of(self)}
        for name, value in values.items():
            _set(stored[name], value / self.stored_in.get(name, 1.0))

    def values(self) -> dict[str, Tensor]:
        """The learned weights by name, differentiable, as in the formulas: the stored values times their scales."""
        self._check_all_here()
        return self._values(self.learned())

    def __call__(self, x: Tensor, *resume: Callable[[Tensor], Stream]) -> Stream:
        show_tensors_to_global_hooks()
        with unseen_by_selective_checkpoints(self):
            stream: Stream = super().__call__(x, *resume)
        return stream

    def forward(self, x: Tensor, resume: Callable[[Tensor], Stream] | None = None) -> Stream:
        """Begin the trunk's stream.

        Args:
            x: the trunk's input [..., width]; or the message that a pipeline stage inside the trunk has received.
            resume: for a message, the function that makes the stream of it (`resume`).

        Raises:
            RewireError: the weights were cast to another dtype than float32, or hidden states are sharded in a way
                that was not declared.
        """
        if resume is not None:
            return resume(x)
        placement, layout = self.placement, self.layout
        if is_dtensor(x):
            x, placement = unwrapped(x, layout.channel_dim, layout.trunk)
        elif placement is None:
            check_whole(x, layout.channel_dim, layout.trunk)
        learned = self.learned(placement)
        return Stream.begin(x, self._effective(learned), layout, placement, learned)

    def check_ranks(self, x: Any) -> None:
        """Before a training forward: compare recipes with the other ranks that run it.

        Raises:
            RewireError: the ranks rewired the model differently.
        """
        if not torch.compiler.is_compiling():
            compare(self, x, x.device_mesh if is_dtensor(x) else self.placement and self.placement.mesh)

    def register_state_dict_pre_hook(self, hook: object) -> Any:
        """As for every module, but FSDP2's call, before it first gathers weights, is the last chance to compare ranks.

        The gathered weights are copied when the stream begins (`learned`), and need not be gathered again for backward.

        Raises:
            RewireError: the ranks rewired the model differently; gathering weights of different shapes would fail.
        """
        compare_sharded(self)
        gather_for_forward_only(self)
        return super().register_state_dict_pre_hook(hook)

    def facts(self) -> dict[str, Any]:
        return facts_of({self.layout.trunk: self.trunk_facts()})

    def here(self) -> str:
        return str(self.dims.here or "")

    def trunk_facts(self) -> dict[str, Any]:
        """The facts of the trunk that have to agree on all ranks that train one model."""
        layout = self.layout
        more = {"start": self.start, "norms behind adds": sorted(layout.posts), "channel dimension": layout.channel_dim}
        return {**self.recipe(), **more}

    def staged(self, first: int, last: int | None) -> Connection:
        """The connection for a pipeline stage: with the rows of its units, and on the first stage the other weights.

        Args:
            first, last: numbers of residual adds before the stage, and up to its end; None: the trunk's end.

        Raises:
            RewireError: the weights are sharded.
        """
        units, given = self.layout.units, dict(self.named_parameters(recurse=False))
        if not self.rows and first == 0:
            return self
        if self.rows and any(map(is_dtensor, given.values())):
            raise RewireError(
                f"the connection weights of trunk '{self.layout.trunk}' are already sharded, and each stage needs "
                "those of its own units: call rewire.pipeline_stage before you shard the stage."
            )
        other = copy.copy(self)
        drop_parameters(other)
        own = {name: name for name in self.travelling if first == 0}
        if self.rows:
            here = range(units[first], self.dims.depth + 2 if last is None else units[last - 1] + 1)
            other.dims = dataclasses.replace(self.dims, here=here)
            own |= {piece: name for piece, (name, t) in pieces(self.rows).items() if t in here}
        other.stored_in = self.stored_in | {piece: self.stored_in[name] for piece, name in own.items()}
        values = apart(given, self.rows)
        for piece, name in own.items():
            learned = nn.Parameter(values[piece].detach().clone(), given[name].requires_grad)
            setattr(learned, NO_WEIGHT_DECAY, True)
            other.register_parameter(piece, learned)
        return other

    def weight_of(self, name: str) -> str:
        """Name of the learned weight to which a parameter belongs, as a whole or as the rows of one unit."""
        return pieces(self.rows).get(name, (name, 0))[0]

    def resume(
        self, states: States, learned: Mapping[str, Tensor], position: int, placement: Placement | None
    ) -> Stream:
        """The stream after ``position`` residual adds, from its states and the learned weights.

        Args:
            states: the topology's states, with a `History` as the tuple of its states.
            learned: the learned weights: those received with the states, and those that are here.
            position: number of residual adds.
            placement: placement of the hidden states.
        """
        weights, layout = self._effective(learned), self.layout
        token = layout.channels_last(layout.token(states[0].device))
        histories = iter([s for s in layout.topology.start(token, weights) if isinstance(s, History)])
        states = tuple(next(histories).after(s) if isinstance(s, tuple) else s for s in states)
        return Stream(states, None, Shared(weights, learned), layout, position, placement)

    def effective(self) -> Any:
        """The weights that the topology's formulas use, computed from the learned ones, in float32.

        Raises:
            RewireError: weights were cast, or some are on other pipeline stages.
        """
        self._check_all_here()
        return self._effective(self.learned())

    def _check_all_here(self) -> None:
        if not parameters_of(self).keys() >= {*self.learned_names}:
            raise RewireError(
                f"the connection weights of trunk '{self.layout.trunk}' are on the pipeline stages of its units, and "
                "those that many units read on the first stage of the trunk. This call needs all of them."
            )

    def learned(self, placement: Placement | None = None) -> dict[str, Tensor]:
        """The learned weights, unsharded, for hidden states of this placement."""
        sharded = any(cls.__name__ == "FSDPModule" for cls in type(self).__mro__)
        own: dict[str, Tensor] = dict(self.named_parameters())
        if any(name not in own and hasattr(self, name) for name in self.learned_names):
            own = {name: getattr(self, name) for name in self.learned_names}  # torch.nn.utils.parametrize, and prune
        learned = {name: _gathered(p) if sharded or is_dtensor(p) else p for name, p in own.items()}
        return learned if placement is None else placement.reduced(learned)

    def _effective(self, learned: Mapping[str, Tensor]) -> Any:
        stored = {**learned, **{name: value for name, value in buffers_of(self).items() if value is not None}}
        if not _may_keep(stored.values()):
            return self._computed(stored)
        # Compared by value: writes to `parameter.data`, which are common, do not change the version counter.
        layout, before, weights = _LAST.get(self, (None, {}, None))
        known = layout is self.layout and before.keys() == stored.keys()
        if known and all(torch.equal(before[name], value) for name, value in stored.items()):
            return weights
        weights = self._computed(stored)
        _LAST[self] = self.layout, {name: value.detach().clone() for name, value in stored.items()}, weights
        return weights

    def _computed(self, stored: Mapping[str, Tensor]) -> Any:
        for name, parameter in stored.items():
            if hasattr(parameter, "ds_id"):
                raise RewireError(
                    f"DeepSpeed's ZeRO-3 partitions connection weight '{name}' of trunk '{self.layout.trunk}', and "
                    "frees it before the blocks and the backward pass have used it. Use FSDP2, or stage 1 or 2 of ZeRO."
                )
            if parameter.dtype != torch.float32:
                raise RewireError(
                    f"connection weight '{name}' of trunk '{self.layout.trunk}' is {parameter.dtype}: connection "
                    "weights have to stay float32. Under FSDP2 mixed precision give them a group of their own: "
                    "`for c in rewire.connections(model).values(): fully_shard(c)`; the policy of a whole "
                    "pipeline stage needs cast_forward_inputs=False."
                )
        device = next(iter(stored.values())).device if stored else torch.device("cpu")
        with outside_autocast(device):
            values = self._values(stored)
            if self.dims.here is not None:
                values = together(values, self.rows, self.row_shapes)
            return self.layout.topology.weights(values, self.dims)

    def _values(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scales = {name: self.stored_in.get(name, 1.0) for name in stored}
        return {name: tensor if scales[name] == 1 else tensor * scales[name] for name, tensor in stored.items()}

    def matrix(self) -> Tensor:
        """Effective weights as a [destination, source] matrix, float32."""
        return self.layout.topology.matrix(self.effective(), self.layout.dims)

    def extra_repr(self) -> str:
        return f"{self.layout.topology}, {len(self.layout.units)} residual adds in {self.layout.dims.depth} units"

    def recipe(self) -> dict[str, Any]:
        """Topology, options and sizes of the trunk, without which the weights have no meaning."""
        scales = {name: scale for name, scale in sorted(self.stored_in.items()) if scale != 1}
        scales = {name: scale for name, scale in scales.items() if name in self.learned_names}
        return recipe_of(self.layout) | ({"scales": scales} if scales else {})

    def get_extra_state(self) -> Tensor:
        """The recipe as bytes, so that a state dict says what its connection weights mean."""
        return self._beside_weights(json.dumps(self.recipe(), sort_keys=True))

    def _beside_weights(self, text: str) -> Tensor:
        """A text as a state-dict entry; a DTensor if the weights are, as Accelerate needs all entries to be."""
        state = torch.tensor(list(text.encode()), dtype=torch.uint8)
        weights: Iterator[Any] = self.parameters()
        mesh = next((weight.device_mesh for weight in weights if is_dtensor(weight)), None)
        if mesh is None:
            return state
        from torch.distributed.tensor import DTensor, Replicate

        return DTensor.from_local(state, mesh, [Replicate()] * mesh.ndim, run_check=False)

    def set_extra_state(self, state: object) -> None:
        """Check that the weights being loaded belong to this topology.

        Raises:
            RewireError: the weights were saved from another topology, or with other options or sizes.
        """
        if not isinstance(state, Tensor):
            return  # torch's placeholder for a key that a partial state dict does not have
        saved, here = ({**recipe, "scales": {}} for recipe in (read_recipe(state), self.recipe()))
        if topology_in(saved) == self.layout.topology:  # perhaps under another name
            saved |= {"topology": here["topology"], "options": here["options"]}
        if saved != here:
            differing = [f"{k}: {saved.get(k)} (saved), {v} (here)" for k, v in here.items() if saved.get(k) != v]
            raise RewireError(
                f"the saved weights of trunk '{self.layout.trunk}' belong to another rewiring; {'; '.join(differing)}. "
                "Compile the model with the saved options and start first: start='paper' leaves options as they are."
            )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: object, strict: bool, missing: list[str], *args: object
    ) -> None:
        """Load weights, converted from the scales of the file to those used here.

        If the state dict is a plain model's, the weights stay as they are, and a warning is logged.
        """
        if not state_dict and not missing:  # no key has the prefix, and none before was missing
            told = "The state dict is one of a plain model: the connection weights of trunk '%s' stay as they are."
            logger.warning(told, self.layout.trunk)
            return
        state_dict = self._in_dtypes(self._in_form(state_dict, prefix), prefix)
        recipe = state_dict.get(f"{prefix}_extra_state")
        if isinstance(recipe, Tensor):
            ratios = {prefix + name: ratio for name, ratio in self._ratios(read_recipe(recipe)).items()}
            changed = [key for key in ratios if key in state_dict]
            state_dict = {**state_dict, **{key: state_dict[key].detach() * ratios[key] for key in changed}}
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *args)

    def _in_dtypes(self, state_dict: dict[str, Any], prefix: str) -> dict[str, Any]:
        """The state dict with the weights in the dtypes used here: one that was cast may be assigned, not copied."""
        kept = {**parameters_of(self), **buffers_of(self)}
        held = {prefix + name: own.dtype for name, own in kept.items() if own is not None}
        other = {key for key, dtype in held.items() if key in state_dict and state_dict[key].dtype != dtype}
        return state_dict | {key: state_dict[key].detach().to(held[key]) for key in other}

    def _in_form(self, state_dict: dict[str, Any], prefix: str) -> dict[str, Any]:
        """The state dict with weights split by unit if they are split here, and whole otherwise."""
        known, cut = pieces(self.rows), len(prefix)
        own = {key[cut:]: value for key, value in state_dict.items() if key.startswith(prefix)}
        others = {key: value for key, value in state_dict.items() if not key.startswith(prefix)}
        if self.dims.here is not None:
            held = parameters_of(self)
            own = {name: value for name, value in apart(own, self.rows).items() if name in held or name not in known}
        elif known and known.keys() <= own.keys():
            own = together(own, self.rows, self.row_shapes)
        return others | {prefix + name: value for name, value in own.items()}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        tell_if_left_out(self, prefix.rstrip("."))
        super()._save_to_state_dict(destination, prefix, keep_vars)

    @torch.no_grad()
    def convert_from(self, recipe: dict[str, Any]) -> None:
        """Convert the scales of weights that were copied here unchanged from a file with this recipe."""
        for name, ratio in self._ratios(recipe).items():
            self.get_parameter(name).mul_(ratio)

    def _ratios(self, recipe: dict[str, Any]) -> dict[str, float]:
        """The factors other than 1 that convert weights of a file with this recipe to the scales used here."""
        before = scales_in(recipe)
        ratios = {name: before.get(self.weight_of(name), 1.0) / scale for name, scale in self.stored_in.items()}
        if not all(1e-12 < ratio < 1e12 for ratio in ratios.values()):  # the weights would vanish or overflow
            raise RewireError(f"the recipe among the weights is damaged: scales {before}, here {self.stored_in}.")
        return {name: ratio for name, ratio in ratios.items() if ratio != 1}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Follow moves between devices, but not changes of dtype."""

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)


class Connections(nn.Module):
    """Holds the connections of one module's trunks, as children; PEFT could not replace an `nn.ModuleDict`."""


#: Why a plain model's state dict does not load into a model with copies of norms.
NO_COPIES = (
    "the state dict is one of a plain model, which has no norms for keys and values. Load it into the plain model, "
    "then call rewire.compile on that."
)


class SeparateNorms(nn.Module):
    """A norm's copies for keys and values, as a child of the norm, which itself serves queries and everything else.

    The child is named `CONNECTIONS`, like those with connections. The copies follow the norm to other devices and
    dtypes.

    Args:
        norm: the norm to copy.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.k, self.v = copy.deepcopy(norm), copy.deepcopy(norm)

    def _load_from_state_dict(
        self,
        state_dict: object,
        prefix: str,
        metadata: object,
        strict: bool,
        missing: list[str],
        more: object,
        errors: list[str],
    ) -> None:
        if not state_dict and not missing:  # as in `Connection`
            errors.append(f"'{prefix.rstrip('.')}': {NO_COPIES}")


def _may_keep(stored: Iterable[Tensor]) -> bool:
    """Whether effective weights may be reused in the next forward: nothing differentiates or traces them.

    Only on a CPU: on a GPU, comparing the stored values would synchronise.
    """
    traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined]
    if traced or torch.is_grad_enabled() or listened() or under_transforms():
        return False
    return all(type(x) in (Tensor, nn.Parameter) and x.is_cpu and x.dtype == torch.float32 for x in stored)


def _gathered(parameter: Any) -> Tensor:
    """A copy of the whole parameter under FSDP2, even if the DTensor is replicated.

    FSDP2 frees what it gathered when the connection returns, before the stream ends.
    """
    whole: Tensor = parameter.full_tensor() if is_dtensor(parameter) else parameter
    return whole.clone()


only_inlined(Connection.__call__, Connection.forward)  # as `Stream`


def _set(parameter: Any, value: Tensor) -> None:
    """Copy ``value`` to a parameter, or this rank's part of it if the parameter is sharded."""
    if is_dtensor(parameter):
        from torch.distributed.tensor import distribute_tensor

        value = value.to(parameter.device)
        # All ranks have the same value: nothing has to be sent.
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


def connections(model: nn.Module) -> dict[str, Connection]:
    """The connections of a rewired model, by trunk name: the modules that hold its learned weights.

    A module may hold several rewired models whose trunks have one name. There, that is preceded by the path of the
    rewired model: ``actor.blocks`` and ``critic.blocks``.

    Example:
        >>> [parameter.shape for parameter in rewire.connections(rewired)["blocks"].parameters()]
        [torch.Size([21])]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    found = {path: module for path, module in model.named_modules() if isinstance(module, Connection)}
    times = collections.Counter(module.layout.trunk for module in found.values())
    return {
        module.layout.trunk if times[module.layout.trunk] == 1 else _with_owner(path, module.layout.trunk): module
        for path, module in found.items()
    }


def _with_owner(path: str, trunk: str) -> str:
    """A trunk's name below the path of its rewired model, from the path of its connection: ``actor.blocks``."""
    above, below = f".{path}".split(f".{CONNECTIONS}.")[0].split(".")[1:], trunk.split(".")
    shared = max(n for n in range(min(len(above), len(below)) + 1) if above[len(above) - n :] == below[:n])
    return ".".join([*above, *below[shared:]])


def learned_connections(
    model: nn.Module, nothing: str = "it has no connection weights", one_model: bool = False
) -> dict[str, Connection]:
    """The `connections` of a model that has to have some.

    Args:
        nothing: clause of the error message that says what is missing.
        one_model: whether to refuse a module that holds several rewired models whose trunks have one name.

    Raises:
        RewireError: the model was not rewired; or there are several.
    """
    found = connections(model)
    if not found:
        raise RewireError(f"{type(model).__name__} was not rewired: {nothing}.")
    if one_model and any(name != connection.layout.trunk for name, connection in found.items()):
        raise RewireError(
            f"{type(model).__name__} holds several rewired models, with trunks {', '.join(found)}: pass one of them."
        )
    return found


def parallelize(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Declare how the hidden states of a rewired model lie on the ranks of a mesh, if they are plain tensors.

    Under sequence parallelism each rank has a part of the tokens, and backward sums the gradients of connection weights
    over the mesh, with one all-reduce for each of its dimensions and each trunk. Models whose hidden states are
    DTensors need no call. Neither does data parallelism (DDP, FSDP): its ranks are not part of ``mesh``.

    Args:
        model: the rewired model; changed in place.
        mesh: the ranks that share one sequence. If it has several dimensions, hidden states are sharded along all.
        sequence: whether each rank has a part of the tokens. False: each has all tokens (tensor parallelism alone).

    All ranks of the mesh call it, and their recipes are compared.

    Raises:
        TypeError: ``mesh`` is not a device mesh.
        RewireError: the model was not rewired, or the ranks rewired it differently.

    Example:
        >>> mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))  # doctest: +SKIP
        >>> parallelize_module(rewired, mesh, plan)  # doctest: +SKIP
        >>> rewire.parallelize(rewired, mesh, sequence=True)  # doctest: +SKIP
    """
    found = connections(model)
    if type(mesh).__name__ != "DeviceMesh":
        raise TypeError(
            f"mesh must be a DeviceMesh, not {mesh!r}: make one with torch.distributed.device_mesh.init_device_mesh, "
            "and pass it or those of its dimensions whose ranks share one sequence, such as mesh['tp']."
        )
    if not found:
        raise RewireError(f"{type(model).__name__} has no connection weights: rewire it first, then parallelize it.")
    agree("parallelize", mesh.mesh.flatten().tolist(), facts_of({name: c.trunk_facts() for name, c in found.items()}))
    for connection in found.values():
        connection.placement = Placement(mesh, tuple(range(mesh.ndim)) if sequence else ())


def coefficients(model: nn.Module) -> dict[str, Tensor]:
    """The effective connection weights of a rewired model: those that the formulas use.

    Returns:
        Trunk name -> matrix [destination, source], float32, detached.

    Raises:
        RewireError: the model was not rewired.

    Example:
        >>> rewire.coefficients(rewired)["blocks"].shape  # [destination, source]
        torch.Size([6, 6])
    """
    return {name: connection.matrix().detach() for name, connection in learned_connections(model).items()}
