"""rewire.compile: the passes, one after the other."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from rewire import logs
from rewire.connection import connections
from rewire.diffs import diff
from rewire.errors import AlreadyConnected, OutOfOrder, RewireError
from rewire.init import Initializer, initialize, make_initializer
from rewire.logs import timed
from rewire.passes.checks import check_choices, check_model, check_not_cut, on_meta
from rewire.passes.choose import choose, chosen_topologies
from rewire.passes.find import Way, find, prepared_copy, trunks_of
from rewire.passes.inputs import inputs_for, known_inputs
from rewire.passes.rewrite import restore, rewrite
from rewire.passes.validate import STARTS, check, compare
from rewire.patterns import Pattern, first_given, patterns_for
from rewire.topologies import Topology
from rewire.topologies.base import Start
from rewire.trunk import LeftAlone, Report, Trunk

log = logging.getLogger("rewire")


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

    Example:
        >>> report = rewire.inspect(model)
        >>> [(trunk.name, len(trunk.sites)) for trunk in report.trunks]
        [('blocks', 6)]
    """
    if connections(model):
        model = restore(model)
    found = patterns_for(model)
    learned = first_given(found, "learned")
    if learned:
        return Report((), (LeftAlone("", f"it already has learned depth connections: {learned}"),))
    prepared, inputs = prepared_copy(model, found), known_inputs(model, found, example_inputs)
    if example_inputs is None:
        return find(prepared, found, inputs, "trace")[0].report
    report = None
    try:
        report = find(prepared, found, inputs)[0].report
        if report.trunks:
            compile(model, "residual", example_inputs=example_inputs)
    except RewireError as error:
        report = report or find(prepared, found, None)[0].report
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
        topology: a name (`rewire.list_topologies` lists them) or a `Topology` object; or a dict of these by trunk, for
            trunks with different topologies: the key is the name of a trunk or a part of its path (``"encoder"``).
            Trunks that the dict does not name are left as they are.
        init: an initialiser or its name (`rewire.list_initializers` lists them): the rewired model gets weights of its
            own, with new values (see `rewire.initialize`); validation comes before. None keeps the weights. On the
            meta device nothing is initialised, and a warning is logged: call `rewire.initialize` after ``to_empty``.
        granularity: what the topology connects: whole ``"block"``s, each ``"sublayer"`` (residual add) by itself, or
            what the topology's paper does (``"auto"``).
        start: ``"preserve"``: start as the original network, up to rounding; ``"paper"``: start as published.
        example_inputs: what copies of the model are run on, to find its residual adds and to validate: a tuple of args,
            a dict of kwargs, or a pair of both. Without it, inputs that the pattern registry knows how to make are
            used; where it knows none, the model is traced, and a warning is logged.
        trunks: names of the trunks to rewire (`rewire.inspect` shows them); default: all.
        validate: compare outputs, gradients and graphs with the original's before returning. With a start that is not
            the original network, the same rewrite is compared with plain residual connections in it. On the meta device
            a small model of the same classes takes the model's place, where the registry can make one; the log says so.
        options: options of the named topology.

    Returns:
        A model of the same class with the same parameters and state-dict keys, plus the connection weights: children
        named ``depth_connections``.

    Raises:
        NoResidualAdds: nothing to rewire was found; the message says what was looked at.
        UnknownName: no such topology, initialiser or trunk; near names are given.
        TypeError, ValueError: an argument is not one of what is said above; a trunk has two keys.
        RewireError: the initialiser has no meaning for this model; or it is one stage of a pipeline.
        AlreadyRewired, AlreadyConnected, ShardedModel: the model cannot be rewired as it is.
        UnsupportedTopology: the topology does not fit a trunk, or has no such start.
        WidthMismatch: a trunk's states have different widths.
        BadExampleInputs: the original does not run on the example inputs.
        ValidationMismatch: the rewritten model differs from the original.

    Example:
        >>> rewired = rewire.compile(model, "denseformer", example_inputs=(x,))
        >>> torch.equal(rewired(x), model(x))  # it starts as the original network
        True
    """
    topologies = chosen_topologies(topology, options, trunks, start)
    check_choices(granularity, start)
    initializer = None if init is None else make_initializer(init, {})
    check_model(model)
    patterns = patterns_for(model)
    learned = first_given(patterns, "learned")
    if learned:
        raise AlreadyConnected(
            f"{type(model).__name__} already has learned depth connections: {learned}. Rewiring would replace the "
            "shortcuts inside them; start from a plain residual model."
        )
    inputs = known_inputs(model, patterns, example_inputs)
    prepared = prepared_copy(model, patterns)
    everything = any(topology.reads_qkv for topology in topologies.values())
    how: Way = "run" if validate and not on_meta(model) else "trace" if example_inputs is None else "meta"

    name = type(model).__name__
    with timed(logs.find, f"looked for residual streams in {name}"):
        found = find(prepared, patterns, inputs, how, everything)
    logs.find.info("found:\n%s", found[0].report)
    found_trunks = trunks_of(found, name)
    if trunks is None:
        check_not_cut(model, found_trunks)
    layouts = choose(found_trunks, topologies, granularity)
    with timed(logs.rewrite, f"rewrote {name}"):
        rewired = rewrite(prepared, patterns, found, layouts, start, all_of_them=any(topologies))
    if logs.rewrite.isEnabledFor(logging.INFO):
        logs.rewrite.info("changed:\n%s", diff(rewired))
    if validate:
        with timed(logs.validate, f"validated {name}"):
            if on_meta(model):
                _validate_twin(model, patterns, topologies, granularity, start)
            else:
                try:
                    check(model, rewired, [one.flow for one in found], inputs, start)
                except OutOfOrder as error:
                    if len(found_trunks) == 1:
                        raise
                    raise OutOfOrder(f"{error} {_others(found_trunks)}") from error
    return rewired if initializer is None else _initialized(rewired, initializer)


def _others(found: Sequence[Trunk]) -> str:
    """What may be done with a model of several trunks, one of which cannot be connected."""
    names = ", ".join(repr(trunk.name) for trunk in found)
    return f"Or leave this trunk out: pass trunks=[...] with others of {names}."


def _initialized(rewired: nn.Module, initializer: Initializer) -> nn.Module:
    """A copy with weights of its own, initialised: the caller's model keeps its values."""
    rewired = copy.deepcopy(rewired)
    if initialize(rewired, initializer).deferred:
        log.warning("%s was not initialised: its parameters are on the meta device.", type(rewired).__name__)
    return rewired


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
