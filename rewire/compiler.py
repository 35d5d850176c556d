"""`rewire.compile` and `rewire.inspect`: they run the passes in order."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from torch import nn

from rewire import logs
from rewire.copies import M, check_can_be_trained, outside_inference_mode, uncompiled
from rewire.diffs import diff
from rewire.errors import (
    AlreadyConnected,
    EditError,
    OutOfOrder,
    RewireError,
    UnsupportedCall,
    UnsupportedTopology,
    ValidationMismatch,
    WidthMismatch,
    with_notes,
)
from rewire.init import Initializer, initialize, make_initializer
from rewire.logs import timed
from rewire.passes.checks import check_choices, check_model, check_not_cut, on_meta
from rewire.passes.choose import choose, chosen_topologies
from rewire.passes.find import Found, Method, check_found, find
from rewire.passes.inputs import inputs_for
from rewire.passes.prepare import Prepared, prepare, without_inputs
from rewire.passes.rewrite import edits, restore, rewrite
from rewire.passes.validate import STARTS, check, compare
from rewire.patterns import Pattern, first_given
from rewire.registry import with_said
from rewire.runtime.connection import connections
from rewire.topologies import Topology
from rewire.topologies.base import Start
from rewire.topologies.registry import make_topology
from rewire.topologies.residual import Residual
from rewire.trunk import LeftAlone, Loop, Report

log = logging.getLogger("rewire")


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """The checked arguments of one call of `compile`; `topologies` are by trunk name, "" for all trunks."""

    topologies: Mapping[str, Topology]
    granularity: Literal["auto", "block", "sublayer"] = "auto"
    start: Start = "preserve"
    loop: Loop = "continue"
    validate: bool = True


@outside_inference_mode
def inspect(model: nn.Module, example_inputs: object = None, *, loop: Loop = "continue") -> Report:
    """Find the residual streams of ``model`` without changing it.

    The model is traced. If the trace is inconclusive and the pattern registry knows inputs for the model, copies of it
    are run on these: on the meta device, which computes nothing, or else on the model's device.

    Args:
        model: any module; parameters may be on the meta device.
        example_inputs: a tuple of args, a dict of kwargs, a pair of both, or one tensor. If given, a copy is rewired
            with plain residual connections and run on them, and the report says what failed.
        loop: as for `rewire.compile`.

    Returns:
        A report with ``.trunks``, ``.left`` (what was left alone, where and why) and ``.dropped`` (layer dropping),
        which prints as a table. For a rewired model it is the report of `compile`; with inputs, of the plain model.

    Example:
        >>> report = rewire.inspect(model)
        >>> [(trunk.name, len(trunk.sites)) for trunk in report.trunks]
        [('blocks', 6)]
    """
    check_choices(loop=loop)
    made = connections(model)
    known = next((connection.report for connection in made.values()), None)
    if known is not None and example_inputs is None:
        return known
    if made:
        model = restore(model)
    prepared = prepare(model, example_inputs)
    learned = first_given(prepared.patterns, "learned")
    if learned:
        return Report((), (LeftAlone("", f"it already has learned depth connections: {learned}"),))
    restart = loop == "restart"
    try:
        with _uncompiled():
            found = find(prepared, restart=restart)
    except RewireError as error:
        if example_inputs is None:
            raise
        # the model does not run on the inputs: report what a trace finds
        return _with_reason(find(without_inputs(model), restart=restart).report, error)
    if found.trunks:
        try:
            if example_inputs is None:
                edits(prepared, found, choose(list(found.trunks.values()), {"": Residual()}, "auto"))
            else:
                check_model(model)
                check_not_cut(model, found.trunks.values())
                _rewired(model, prepared, found, _Wanted({"": Residual()}))
        except EditError:
            pass  # the report's `left` says so
        except RewireError as error:
            return _with_reason(found.report, error)
    return found.report


def _with_reason(report: Report, error: RewireError) -> Report:
    return dataclasses.replace(report, left=(*report.left, LeftAlone("", with_notes(error))))


@outside_inference_mode
def compile(
    model: M,
    topology: str | Topology | Mapping[str, str | Topology] = "ancre-ingoing",
    *,
    init: str | Initializer | None = None,
    granularity: Literal["auto", "block", "sublayer"] = "auto",
    start: Start = "preserve",
    loop: Loop = "continue",
    example_inputs: object = None,
    trunks: Sequence[str] | None = None,
    validate: bool = True,
    **options: object,
) -> M:
    """Replace the fixed residual connections of ``model`` by learned depth connections.

    Args:
        model: any module, on any device, including meta. It is not changed; the rewired model shares its parameters.
        topology: a name (`rewire.list_topologies` lists them) or a `Topology` object. To give trunks different
            topologies, a dict of these: each key is the name of a trunk or a part of its path (``"encoder"``), and
            trunks without a key are left as they are.
        init: an initialiser or its name (`rewire.list_initializers` lists them), with options as in
            ``"scaled:branch=4"``. The rewired model then gets its own parameters with new values, after validation (see
            `rewire.initialize`). None keeps the weights. On the meta device nothing is initialised, and a warning is
            logged: after ``to_empty``, call ``reset_parameters`` of all modules that have it, then `rewire.initialize`.
        granularity: what the topology connects: whole ``"block"``s, each ``"sublayer"`` (residual add) by itself, or
            whatever the topology's paper connects (``"auto"``).
        start: ``"preserve"``: start as the original network, up to rounding; ``"paper"``: start as published.
        loop: how to treat blocks that run several times. ``"continue"``: all passes form one trunk, and their number is
            fixed; passes that start from a new state are trunks of their own. ``"restart"``: the stream begins
            anew in each pass, all passes share one set of connection weights, and their number may vary.
        example_inputs: inputs on which copies of the model are run, to find its residual adds and to validate: a tuple
            of args, a dict of kwargs, a pair of both, or one tensor. By default the pattern registry makes inputs;
            if it cannot, the model is only traced, and a warning is logged.
        trunks: names of the trunks to rewire (`rewire.inspect` shows them); default: all.
        validate: compare outputs, gradients and graphs with the original's before returning. If the start is not the
            original network, the same rewrite is compared with plain residual connections in it. On the meta device a
            small model of the same classes is validated instead, if the registry can make one; the log says so.
        options: options of the named topology.

    Returns:
        A model of the same class, or a generated subclass of it, with the same parameters and state-dict keys, plus
        the connection weights, in children named ``depth_connections``.

    Raises:
        NoResidualAdds: nothing to rewire was found; the message lists the adds that were left alone.
        UnknownName: no such topology, initialiser or trunk; the message suggests similar names.
        TypeError, ValueError: an argument has a wrong type or value; two keys of the dict match one trunk.
        RewireError: the initialiser does not apply to this model, or the model is one stage of a pipeline.
        AlreadyRewired, AlreadyConnected, WrappedModel: the model cannot be rewired as it is.
        UnsupportedTopology: the topology does not fit a trunk, or has no such start.
        WidthMismatch: the states of a trunk have different widths.
        BadExampleInputs: the original does not run on the example inputs.
        ValidationMismatch: the rewritten model differs from the original.

    Example:
        >>> rewired = rewire.compile(model, "denseformer", example_inputs=(x,))
        >>> torch.equal(rewired(x), model(x))  # it starts as the original network
        True
    """
    if isinstance(topology, str) and ":" in topology:
        own: dict[str, Any] = {"init": init, "granularity": granularity, "start": start, "loop": loop}
        topology, more = with_said("topology", topology, options)
        others: dict[str, Any] = {"example_inputs": example_inputs, "trunks": trunks, "validate": validate}
        return compile(model, topology, **(own | more), **others)
    topologies = chosen_topologies(topology, options, trunks, start)
    check_choices(granularity, start, loop)
    initializer = None if init is None else make_initializer(init, {})
    check_model(model)
    check_can_be_trained(model)
    prepared = prepare(model, example_inputs)
    learned = first_given(prepared.patterns, "learned")
    if learned:
        raise AlreadyConnected(
            f"{prepared.name} already has learned depth connections: {learned}. Rewiring would replace the shortcuts "
            "inside them. Start from a plain residual model."
        )
    method: Method = "run" if validate and not on_meta(model) else "meta" if prepared.given else "trace"
    with timed(logs.find, f"looked for residual streams in {prepared.name}"), _uncompiled():
        found = find(prepared, method, loop == "restart")
    logs.find.info("found:\n%s", found.report)
    check_found(found, prepared)
    if trunks is None:
        check_not_cut(model, found.trunks.values())
    rewired = _rewired(model, prepared, found, _Wanted(topologies, granularity, start, loop, validate))
    made = rewired if initializer is None else _initialized(rewired, initializer)
    return cast("M", made)  # its class is derived from the model's


def check_named(topology: str, options: Mapping[str, Any]) -> None:
    """Check a topology's name and options, including arguments of `compile`, without a model.

    Raises:
        UnknownName, TypeError, ValueError: as for `compile`.
    """
    settings = ("granularity", "init", "loop", "start")
    make_topology(topology, {name: value for name, value in options.items() if name not in settings})
    check_choices(**{name: options[name] for name in options.keys() & set(settings) - {"init"}})
    if options.get("init") is not None:
        make_initializer(options["init"], {})


def _rewired(model: nn.Module, prepared: Prepared, found: Found, wanted: _Wanted) -> nn.Module:
    """The prepared copy with connections in it, validated against the model if that is wanted."""
    with _naming_trunks(found.trunks):
        layouts = choose(list(found.trunks.values()), wanted.topologies, wanted.granularity)
        with timed(logs.rewrite, f"rewrote {prepared.name}"):
            rewired = rewrite(prepared, found, layouts, wanted.start, all_of_them=any(wanted.topologies))
        if logs.rewrite.isEnabledFor(logging.INFO):
            logs.rewrite.info("changed:\n%s", diff(rewired))
        if wanted.validate:
            with timed(logs.validate, f"validated {prepared.name}"), _uncompiled():
                if on_meta(model):
                    _validate_twin(model, prepared.patterns, wanted)
                else:
                    check(model, rewired, found, prepared.inputs, wanted.start, prepared.patterns)
    for connection in connections(rewired).values():
        connection.report = found.report
    return rewired


def _uncompiled() -> contextlib.AbstractContextManager[None]:
    """A context in which functions that the model itself compiles run as Python, so that they can be traced.

    FlexAttention compiles itself whenever it is called.
    """
    compiles = not sys.modules.keys().isdisjoint({"torch._dynamo", "torch.nn.attention.flex_attention"})
    return uncompiled() if compiles else contextlib.nullcontext()  # importing torch._dynamo takes seconds


@contextlib.contextmanager
def _naming_trunks(trunks: Collection[str]) -> Iterator[None]:
    """A context that adds the names of the other trunks to errors about one of several."""
    try:
        yield
    except (EditError, OutOfOrder, UnsupportedCall, UnsupportedTopology, ValidationMismatch, WidthMismatch) as error:
        if len(trunks) > 1:
            names = ", ".join(map(repr, trunks))
            error.add_note(f"The trunks are {names}. To leave one out, pass trunks=[...] with the names of the others.")
        raise


def _initialized(rewired: nn.Module, initializer: Initializer) -> nn.Module:
    """A copy with its own, newly initialised parameters: the caller's model keeps its values."""
    rewired = copy.deepcopy(rewired)
    report, name = initialize(rewired, initializer), type(rewired).__name__
    if report.deferred:
        log.warning("%s was not initialised: its parameters are on the meta device.", name)
    elif not report.applied:
        log.warning("%s was not initialised: %s leaves all of its weights as they are.", name, initializer)
    return rewired


def _validate_twin(model: nn.Module, patterns: list[Pattern], wanted: _Wanted) -> None:
    """Rewire and validate a small real model of the same classes, in place of one on the meta device."""
    name, make = type(model).__name__, first_given(patterns, "twin")
    if make is None:
        log.warning("%s was rewired but not validated: its parameters are on the meta device.", name)
        return
    try:
        twin = make(model)
        compare(twin, twin, inputs_for(twin, patterns, None), STARTS)
    except Exception as error:  # a made-up configuration need not work
        log.warning(
            "%s was rewired but not validated: its parameters are on the meta device, and a small model with its "
            "config does not run: %s",
            *(name, error),
        )
        return
    given = wanted.topologies.get("", wanted.topologies)
    compile(twin, given, granularity=wanted.granularity, start=wanted.start, loop=wanted.loop)
    log.warning("%s is on the meta device: a small model of the same classes was validated instead.", name)
