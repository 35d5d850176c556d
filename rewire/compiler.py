"""rewire.compile: the passes, one after the other."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rewire.connection import CONNECTIONS, Connection, connections
from rewire.errors import (
    AlreadyConnected,
    AlreadyRewired,
    BadExampleInputs,
    EditError,
    NoResidualAdds,
    RewireError,
    ShardedModel,
    UnknownName,
    UnsupportedTopology,
    WidthMismatch,
)
from rewire.init import Initializer, initialize, make_initializer
from rewire.passes.apply import apply, undo
from rewire.passes.connect import StreamsToTensors, convert_collected, register
from rewire.passes.copies import shared
from rewire.passes.edit import edited
from rewire.passes.edits import Plans
from rewire.passes.find import Found, definitions, find, prepared_copy
from rewire.passes.install import is_edited
from rewire.passes.plan import plan
from rewire.passes.projections import find_projections
from rewire.passes.validate import STARTS, compare, normalise_inputs
from rewire.patterns import Pattern, first_given, patterns_for
from rewire.patterns.pattern import Inputs
from rewire.stream import Layout
from rewire.topologies import Topology, make_topology
from rewire.topologies.base import Start
from rewire.topologies.residual import Residual
from rewire.trunk import LeftAlone, Report, Trunk, told

log = logging.getLogger("rewire")
_SHOWN = 12  # reasons in an error


def inspect(model: nn.Module, example_inputs: Any = None) -> Report:
    """Find the residual streams of ``model`` without changing it.

    It is traced. Where that leaves doubts and the pattern registry knows inputs, copies are run on them: on the meta
    device, where nothing is computed, else on the model's own.

    Args:
        model: any module; parameters may be on the meta device.
        example_inputs: if given (tuple of args, dict of kwargs, or a pair of both), the model is rewired with plain
            residual connections and run on them, and the report says where that failed.

    Returns:
        A report with ``.trunks`` and ``.left`` (what was left alone, where and why), which prints as a table. Of a
        rewired model it shows the plain one.
    """
    if connections(model):
        model = restore(model)
    found = patterns_for(model)
    learned = first_given(found, "learned")
    if learned:
        return Report((), (LeftAlone("", f"it already has learned depth connections: {learned}"),))
    prepared, inputs = prepared_copy(model, found), known_inputs(model, found, example_inputs)
    if example_inputs is None:
        return find(prepared, found, inputs, run=False)[0].report
    try:
        report = find(prepared, found, inputs)[0].report
        if report.trunks:
            compile(model, "residual", example_inputs=example_inputs)
    except RewireError as error:
        report = find(prepared, found, None)[0].report
        return dataclasses.replace(report, left=(*report.left, LeftAlone("", str(error))))
    return report


def compile(
    model: nn.Module,
    topology: str | Topology | Mapping[str, str | Topology] = "ancre-ingoing",
    *,
    init: str | Initializer | None = None,
    granularity: Literal["auto", "block", "sublayer"] = "auto",
    start: Start = "preserve",
    example_inputs: Any = None,
    trunks: Sequence[str] | None = None,
    validate: bool = True,
    **options: Any,
) -> nn.Module:
    """Replace the fixed residual connections of ``model`` by learned depth connections.

    Args:
        model: any module, on any device (meta, too). It keeps behaving as before; its parameters are shared.
        topology: a name (`rewire.topologies` lists them) or a `Topology` object; or a dict of these by trunk, for
            trunks with different topologies: the key is the name of a trunk or a part of its path (``"encoder"``).
            Trunks that the dict does not name are left as they are.
        init: an initialiser or its name (`rewire.initializers` lists them): the rewired model gets weights of its own,
            with new values (see `rewire.initialize`); validation comes before. None keeps the weights. On the meta
            device nothing is initialised, and a warning is logged: call `rewire.initialize` after ``to_empty``.
        granularity: what the topology connects: whole ``"block"``s, each ``"sublayer"`` (residual add) by itself, or
            what the topology's paper does (``"auto"``).
        start: ``"preserve"``: start as the original network, up to rounding; ``"paper"``: start as published.
        example_inputs: what to validate on: a tuple of args, a dict of kwargs, or a pair of both. Without it, inputs
            that the pattern registry knows how to make are used; where it knows none, a warning is logged.
        trunks: names of the trunks to rewire (`rewire.inspect` shows them); default: all.
        validate: compare outputs and gradients with the original's before returning. With a start that is not the
            original network, the same rewrite is compared with plain residual connections in it. On the meta device a
            small model of the same classes takes the model's place, where the registry can make one; the log says so.
        options: options of the named topology.

    Returns:
        A model of the same class with the same parameters and state-dict keys, plus the connection weights: children
        named ``depth_connections``.

    Raises:
        NoResidualAdds: nothing to rewire was found; the message says what was looked at.
        UnknownName: no such topology, initialiser or trunk; near names are given.
        TypeError, ValueError: an argument is not one of what is said above; a trunk has two keys.
        RewireError: the initialiser has no meaning for this model.
        AlreadyRewired, AlreadyConnected, ShardedModel: the model cannot be rewired as it is.
        UnsupportedTopology: the topology does not fit a trunk, or has no such start.
        WidthMismatch: a trunk's states have different widths.
        BadExampleInputs: the original does not run on the example inputs.
        ValidationMismatch: the rewritten model differs from the original.
    """
    chosen = chosen_topologies(topology, options, trunks)
    check_choices(granularity, start)
    initializer = None if init is None else make_initializer(init, {})
    check_model(model)
    found = patterns_for(model)
    learned = first_given(found, "learned")
    if learned:
        raise AlreadyConnected(
            f"{type(model).__name__} already has learned depth connections: {learned}. Rewiring would replace the "
            "shortcuts inside them; start from a plain residual model."
        )

    def layouts(trunks_found: list[Trunk]) -> list[Layout]:
        check_names(chosen, trunks_found)
        return [layout_of(trunk, chosen[key], granularity) for trunk, key in assigned(trunks_found, chosen)]

    inputs = known_inputs(model, found, example_inputs)
    prepared = prepared_copy(model, found)
    everything = any(topology.reads_qkv for topology in chosen.values())
    seen = find(prepared, found, inputs, run=validate, everything=everything)
    rewired = rewrite(prepared, found, seen, layouts, start, all_of_them=any(chosen))
    if validate and _on_meta(model):
        _validate_twin(model, found, chosen, granularity, start)
    elif validate:
        _validate(model, rewired, inputs, start)
    return rewired if initializer is None else _initialized(rewired, initializer)


def restore(model: nn.Module) -> nn.Module:
    """The plain model of a rewired one: original forwards, no connection weights, the same (shared) parameters.

    Raises:
        RewireError: the model was not rewired.
    """
    if not connections(model):
        raise RewireError(f"{type(model).__name__} was not rewired: there is nothing to restore.")
    plain = shared(model)
    for module in plain.modules():
        undo(module)
        module._modules.pop(CONNECTIONS, None)
        for key in [k for k, hook in module._forward_hooks.items() if isinstance(hook, StreamsToTensors)]:
            del module._forward_hooks[key]
    return plain


def coefficients(model: nn.Module) -> dict[str, Tensor]:
    """Effective connection weights of a rewired model.

    Returns:
        Trunk name -> matrix [destination, source], float32, detached.

    Raises:
        RewireError: the model was not rewired.
    """
    found = connections(model)
    if not found:
        raise RewireError(f"{type(model).__name__} was not rewired: it has no connection weights.")
    return {name: connection.matrix().detach() for name, connection in found.items()}


# -- steps of compile --------------------------------------------------------------------------------------------------


def _initialized(rewired: nn.Module, initializer: Initializer) -> nn.Module:
    """A copy with weights of its own, initialised: the caller's model keeps its values."""
    rewired = copy.deepcopy(rewired)
    if initialize(rewired, initializer).deferred:
        log.warning("%s was not initialised: its parameters are on the meta device.", type(rewired).__name__)
    return rewired


def check_choices(granularity: str, start: str) -> None:
    if granularity not in ("auto", "block", "sublayer"):
        raise ValueError(f"granularity must be 'auto', 'block' or 'sublayer', not {granularity!r}.")
    if start not in ("preserve", "paper"):
        raise ValueError(f"start must be 'preserve' or 'paper', not {start!r}.")


def check_model(model: nn.Module) -> None:
    """Refuse what cannot be rewired."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    check_whole(model)
    for path, module in model.named_modules():
        if is_edited(module) or isinstance(module, Connection):
            where = f"'{path}'" if path else "the model"
            raise AlreadyRewired(f"{where} was rewired before: call rewire.restore(model) first.")


def check_whole(model: nn.Module) -> None:
    """Refuse models that are sharded, wrapped or compiled.

    Raises:
        ShardedModel: saying which module is.
    """
    for path, module in model.named_modules():
        where = f"'{path}'" if path else "the model"
        kind = " ".join(cls.__name__ for cls in type(module).__mro__)
        if "FSDPModule" in kind or "FullyShardedDataParallel" in kind or "DistributedDataParallel" in kind:
            raise ShardedModel(f"{where} is already sharded or distributed: rewire the model first, then shard it.")
        if "OptimizedModule" in kind:
            raise ShardedModel(f"{where} is already compiled: rewire the model first, then torch.compile it.")
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise ShardedModel("the model's parameters are already sharded: rewire the model first, then shard it.")


def known_inputs(model: nn.Module, found: list[Pattern], example_inputs: Any) -> Inputs | None:
    """The example inputs that were given, else those of the registry; None if it has none, which is logged."""
    try:
        return inputs_for(model, found, example_inputs)
    except BadExampleInputs as error:
        if example_inputs is not None:
            raise
        log.info("%s: %s", type(model).__name__, error)
        return None


def _validate(model: nn.Module, rewired: nn.Module, inputs: Inputs | None, start: Start) -> None:
    """Compare the same rewrite with plain connections in it; and at a preserving start the learned ones, too."""
    name = type(model).__name__
    if inputs is None:
        log.warning("%s was rewired but not validated: there are no inputs to run it on; pass example_inputs.", name)
        return
    compare(model, with_plain_connections(rewired), inputs)
    if start == "preserve":
        compare(model, rewired, inputs, STARTS)


def _on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _validate_twin(
    model: nn.Module, patterns: list[Pattern], topologies: Mapping[str, Topology], granularity: Any, start: Start
) -> None:
    """In place of a model on the meta device, rewire and validate a small real one of the same classes."""
    name, make = type(model).__name__, first_given(patterns, "twin")
    if make is None:
        log.warning("%s was rewired but not validated: its parameters are on the meta device.", name)
        return
    try:
        twin = make(model)
        compare(twin, twin, inputs_for(twin, patterns, None), STARTS)
    except Exception as error:  # what is made up need not work
        log.warning(
            "%s was rewired but not validated: its parameters are on the meta device, and a small model with its "
            "config does not run: %s",
            *(name, error),
        )
        return
    given: Any = topologies.get("", topologies)
    compile(twin, given, granularity=granularity, start=start)
    log.warning("%s is on the meta device: validated was a small model of the same classes.", name)


def with_plain_connections(rewired: nn.Module) -> nn.Module:
    """A copy of a rewired model with plain residual connections in place of the learned ones; q, k, v stay apart."""
    plain = shared(rewired)
    for connection in connections(plain).values():
        old, sites = connection.layout, range(len(connection.layout.units))
        apart = [site + 1 for site in sites if old.reads_apart(site)]
        units = [site + 1 for site in sites]
        connection.become(Layout(old.trunk, Residual(), units, old.dims.width, apart, old.channel_dim, old.posts))
    return plain


def inputs_for(model: nn.Module, found: list[Pattern], example_inputs: Any) -> Inputs:
    """The example inputs that were given, else ones that the registry of architectures makes.

    Raises:
        BadExampleInputs: what was given is none, or nothing was and the registry has none.
    """
    if example_inputs is not None:
        return normalise_inputs(example_inputs)
    make = first_given(found, "example_inputs")
    if make is None:
        raise BadExampleInputs("the registry of architectures knows no inputs for it")
    try:
        inputs: Inputs = make(model)
    except (AttributeError, KeyError) as error:
        raise BadExampleInputs(f"the registry's inputs do not fit its config: {error}") from error
    return inputs


def chosen_topologies(
    topology: str | Topology | Mapping[str, str | Topology], options: dict[str, Any], names: Sequence[str] | None
) -> dict[str, Topology]:
    """Topology by trunk name, or part of one; the empty key stands for all trunks."""
    if not isinstance(topology, Mapping):
        if names is not None and len(names) == 0:
            raise ValueError("trunks is empty: it names no trunk. Leave it out to rewire all of them.")
        chosen = make_topology(topology, options)
        return dict.fromkeys([names] if isinstance(names, str) else names or ("",), chosen)
    if options or names is not None:
        given = "trunks" if names is not None else f"options {sorted(options)}"
        raise TypeError(
            f"{given} cannot be combined with a dict of topologies: its keys name the trunks, and options go into "
            'Topology objects, as in {"encoder": rewire.ANCRe(temperature=0.1)}.'
        )
    if not topology:
        raise ValueError("the dict of topologies is empty: it names no trunk.")
    return {name: make_topology(value, {}) for name, value in topology.items()}


def named_by(key: str, trunks: Sequence[Trunk]) -> list[Trunk]:
    """The trunks that ``key`` names: the one of that name, else those of whose name it is a part."""
    return [trunk for trunk in trunks if trunk.name == key] or [t for t in trunks if has_part(t.name, key)]


def assigned(trunks: Sequence[Trunk], keys: Collection[str]) -> list[tuple[Trunk, str]]:
    """Trunks that a key names, with that key."""
    pairs = []
    for trunk in trunks:
        own = [key for key in keys if trunk in named_by(key, trunks)]
        if len(own) > 1:
            raise ValueError(f"trunk '{trunk.name}' is named by several keys: {', '.join(map(repr, own))}.")
        pairs += [(trunk, key) for key in own]
    return pairs


def check_names(keys: Collection[str], trunks: Sequence[Trunk]) -> None:
    """Refuse keys that name none of ``trunks``.

    Raises:
        UnknownName: saying which trunks there are.
    """
    for key in keys:
        if key and not named_by(key, trunks):
            known = ", ".join(trunk.name for trunk in trunks) or "none"
            raise UnknownName(f"the model has no trunk '{key}'; its trunks are {known}.")


def has_part(name: str, key: str) -> bool:
    """Whether ``key`` is a run of parts of the dotted ``name``; the empty key is one of every name."""
    return not key or f".{key}." in f".{name}."


def rewrite(
    rewired: nn.Module,
    patterns: list[Pattern],
    found: list[Found],
    layouts: Callable[[list[Trunk]], list[Layout]],
    start: Start,
    all_of_them: bool = True,
) -> nn.Module:
    """Rewire a copy of a model.

    Args:
        rewired: what `prepared_copy` made; changed in place.
        patterns: those that match the model.
        found: its trunks.
        layouts: chooses the trunks, and what connects them.
        start: of the connections.
        all_of_them: whether a trunk that cannot be edited is an error; else it is left as it is, with a warning, if
            others can.

    Raises:
        NoResidualAdds: nothing was found.
        EditError: a trunk cannot be edited.
    """
    trunks = {linked.trunk.name: linked.trunk for linked in found[0].trunks}
    if not trunks:
        raise NoResidualAdds(_nothing_found(type(rewired).__name__, found[0]))
    chosen = {layout.trunk: layout for layout in layouts(list(trunks.values()))}
    while True:
        plans: Plans = {}
        name = ""
        try:
            for name, layout in chosen.items():
                _plan(trunks[name], layout, found, patterns, plans)
            texts = {}
            for key, function in plans.items():
                name = function.trunks[-1] if function.trunks else name
                texts[key] = edited(function)
            break
        except EditError as error:
            if all_of_them or len(chosen) == 1:
                raise EditError(f"trunk '{name}' cannot be edited: {error}") from error
            log.warning("trunk '%s' was left as it is: %s", name, error)
            del chosen[name]
    made = {}
    for name, layout in chosen.items():
        trunk = trunks[name]
        made[name] = Connection(layout, start, _device_of(rewired.get_submodule(trunk.owner)), trunk)
        register(rewired, trunk, made[name])
        convert_collected(rewired, trunk)
    apply(rewired, found[0].flow.model, [(function, texts[key]) for key, function in plans.items()], made)
    return rewired


def _plan(trunk: Trunk, layout: Layout, found: list[Found], patterns: list[Pattern], plans: Plans) -> None:
    """Plan what changes for a trunk, in all ways of looking at the model."""
    apart = [number for number in range(len(trunk.sites)) if layout.reads_apart(number)]
    pairs = [(one, linked) for one in found for linked in one.trunks if linked.trunk.name == trunk.name]
    for one, linked in pairs:
        if len(linked.trunk.sites) != len(trunk.sites):
            log.warning(
                "trunk '%s' makes %d residual adds in training mode, and %d in evaluation mode: calls that skip some "
                "will raise OutOfOrder; layer dropping has to be off.",
                *(trunk.name, len(linked.trunk.sites), len(trunk.sites)),
            )
            continue
        projections = {n: find_projections(one.flow, trunk.sites[n], patterns) for n in apart}
        plan(one, linked, plans, definitions(patterns), projections)


def _nothing_found(name: str, found: Found) -> str:
    """What was looked at, and why each add in it is none that could be connected."""
    rows = told(found.left)
    if not rows:
        return (
            f"no residual stream was found in {name}: nothing in its forwards adds to a value what is computed from it "
            "through weights. If only a run shows that, pass example_inputs."
        )
    lines = [f"\n  {path}: {why}{f' ({place})' if place else ''}" for path, why, place in rows[:_SHOWN]]
    more = f"\n  ... and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return (
        f"no residual stream of two adds or more was found in {name}. Left alone:{''.join(lines)}{more}\nAn add is "
        "connected where the value that it makes is the shortcut of the next one; weights on the way, other than a "
        "norm's, end the stream. If a forward could not be traced, pass example_inputs."
    )


def layout_of(trunk: Trunk, topology: Topology, granularity: str) -> Layout:
    """Which residual adds the topology connects as one unit."""
    widths = {site.width for site in trunk.sites if site.width is not None}
    if len(widths) > 1:
        raise WidthMismatch(
            f"the residual adds of trunk '{trunk.name}' have different widths ({', '.join(map(str, sorted(widths)))}), "
            "and states of one trunk are mixed: pass trunks=[...] to leave it out."
        )
    if topology.needs_width and not widths:
        raise UnsupportedTopology(
            f"{type(topology).__name__} has weights per channel, and the width of trunk '{trunk.name}' is not known: "
            "nothing next to its residual adds has a weight that tells. Use a topology with one weight per state."
        )
    if trunk.post_norm and not topology.supports_post_norm:
        after = next(site.post[0] for site in trunk.sites if site.post)
        raise UnsupportedTopology(
            f"trunk '{trunk.name}' is post-norm (its states pass {after} after the residual add), and "
            f"{type(topology).__name__} connects the branch outputs of pre-norm blocks only."
        )
    one_add_each = trunk.blocks == len(trunk.sites)
    if granularity == "block" and trunk.post_norm and not one_add_each:
        raise UnsupportedTopology(
            f"trunk '{trunk.name}' is post-norm: inside a block the state passes a norm, so that the block has no "
            "branch output of its own. Use granularity='sublayer'."
        )
    if granularity == "block" and trunk.blocks == 1:
        raise UnsupportedTopology(
            f"trunk '{trunk.name}' is one block: there is nothing to connect it with. Use granularity='sublayer', "
            f"which connects its {len(trunk.sites)} residual adds."
        )
    resolved = topology.granularity if granularity == "auto" else granularity
    separate = resolved == "sublayer" or trunk.post_norm or trunk.blocks == 1
    units = tuple(range(1, len(trunk.sites) + 1)) if separate else trunk.units
    channel_dim = next((site.channel_dim for site in trunk.sites if site.width), -1)
    attention = _attention_units(trunk, topology, units)
    posts = [number for number, site in enumerate(trunk.sites) if site.post]
    return Layout(trunk.name, topology, units, next(iter(widths), 0), attention, channel_dim, posts)


def _attention_units(trunk: Trunk, topology: Topology, units: Sequence[int]) -> list[int]:
    """Units that begin with an attention, for a topology that feeds its queries, keys and values apart."""
    if not topology.reads_qkv:
        return []
    opening = [n for n in range(len(units)) if n == 0 or units[n] != units[n - 1]]
    return [units[n] for n in opening if trunk.sites[n].kind in ("attention", "parallel")]


def _device_of(module: nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in module.parameters()), None)
