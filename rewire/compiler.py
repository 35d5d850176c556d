"""rewire.compile: the passes, one after the other."""

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
    """What a call of `compile` asks for, as its arguments say; `topologies` are by trunk, "" for all."""

    topologies: Mapping[str, Topology]
    granularity: Literal["auto", "block", "sublayer"] = "auto"
    start: Start = "preserve"
    loop: Loop = "continue"
    validate: bool = True


@outside_inference_mode
def inspect(model: nn.Module, example_inputs: Any = None, *, loop: Loop = "continue") -> Report:
    """Find the residual streams of ``model`` without changing it.

    It is traced. Where that leaves doubts and the pattern registry knows inputs, copies are run on them: on the meta
    device, where nothing is computed, else on the model's own.

    Args:
        model: any module; parameters may be on the meta device.
        example_inputs: if given (tuple of args, dict of kwargs, a pair of both, or one tensor), the model is rewired
            with plain residual connections and run on them, and the report says where that failed.
        loop: as for `rewire.compile`.

    Returns:
        A report with ``.trunks``, ``.left`` (what was left alone, where and why) and ``.dropped`` (layer dropping),
        which prints as a table. Of a rewired model it is what `compile` found; with inputs it shows the plain one.

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
        # it does not run on them: what a trace shows
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
            pass  # what was left alone says so
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
    example_inputs: Any = None,
    trunks: Sequence[str] | None = None,
    validate: bool = True,
    **options: Any,
) -> M:
    """Replace the fixed residual connections of ``model`` by learned depth connections.

    Args:
        model: any module, on any device (meta, too). It keeps behaving as before; its parameters are shared.
        topology: a name (`rewire.list_topologies` lists them) or a `Topology` object; or a dict of these by trunk, for
            trunks with different topologies: the key is the name of a trunk or a part of its path (``"encoder"``).
            Trunks that the dict does not name are left as they are.
        init: an initialiser or its name (`rewire.list_initializers` lists them), with options as in
            ``"scaled:branch=4"``: the rewired model gets weights of its own, with new values (see `rewire.initialize`);
            validation comes before. None keeps the weights. On the meta device nothing is initialised, and a warning is
            logged: after ``to_empty`` call ``reset_parameters`` of all modules that have it, and `rewire.initialize`.
        granularity: what the topology connects: whole ``"block"``s, each ``"sublayer"`` (residual add) by itself, or
            what the topology's paper does (``"auto"``).
        start: ``"preserve"``: start as the original network, up to rounding; ``"paper"``: start as published.
        loop: of blocks that run several times: ``"continue"``: their passes are one trunk, and run as often as when the
            model was rewired; those whose state the model makes anew are trunks of their own. ``"restart"``: all are,
            with the same weights, and there may be any number of them.
        example_inputs: what copies of the model are run on, to find its residual adds and to validate: a tuple of args,
            a dict of kwargs, a pair of both, or one tensor. Without it, inputs that the pattern registry knows how to
            make are used; where it knows none, the model is traced, and a warning is logged.
        trunks: names of the trunks to rewire (`rewire.inspect` shows them); default: all.
        validate: compare outputs, gradients and graphs with the original's before returning. With a start that is not
            the original network, the same rewrite is compared with plain residual connections in it. On the meta device
            a small model of the same classes takes the model's place, where the registry can make one; the log says so.
        options: options of the named topology.

    Returns:
        A model of the same class with the same parameters and state-dict keys, plus the connection weights: children
        named ``depth_connections``.

    Raises:
        NoResidualAdds: nothing to rewire was found; the message lists the adds that were left alone.
        UnknownName: no such topology, initialiser or trunk; near names are given.
        TypeError, ValueError: an argument is not one of what is said above; a trunk has two keys.
        RewireError: the initialiser has no meaning for this model; or it is one stage of a pipeline.
        AlreadyRewired, AlreadyConnected, WrappedModel: the model cannot be rewired as it is.
        UnsupportedTopology: the topology does not fit a trunk, or has no such start.
        WidthMismatch: a trunk's states have different widths.
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
    return cast("M", made)  # its class is one that is derived from the model's


def check_named(topology: str, options: Mapping[str, Any]) -> None:
    """Refuse what is wrong by itself in a topology's name and options, settings of `compile` among them.

    Raises:
        UnknownName, TypeError, ValueError: as `compile`.
    """
    settings = ("granularity", "init", "loop", "start")
    make_topology(topology, {name: value for name, value in options.items() if name not in settings})
    check_choices(**{name: options[name] for name in options.keys() & set(settings) - {"init"}})
    if options.get("init") is not None:
        make_initializer(options["init"], {})


def _rewired(model: nn.Module, prepared: Prepared, found: Found, wanted: _Wanted) -> nn.Module:
    """The prepared copy with connections in it, compared with the model if that is wanted."""
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
    """While it lasts, what a model compiles by itself, helpers say, runs as Python, which shows what it does."""
    compiles = "torch._dynamo" in sys.modules  # which takes seconds to import
    return uncompiled() if compiles else contextlib.nullcontext()


@contextlib.contextmanager
def _naming_trunks(trunks: Collection[str]) -> Iterator[None]:
    """Errors about one trunk of several say which others there are."""
    try:
        yield
    except (EditError, OutOfOrder, UnsupportedCall, UnsupportedTopology, ValidationMismatch, WidthMismatch) as error:
        if len(trunks) > 1:
            names = ", ".join(map(repr, trunks))
            error.add_note(f"The trunks are {names}. To leave one out, pass trunks=[...] with the names of the others.")
        raise


def _initialized(rewired: nn.Module, initializer: Initializer) -> nn.Module:
    """A copy with weights of its own, initialised: the caller's model keeps its values."""
    rewired = copy.deepcopy(rewired)
    report, name = initialize(rewired, initializer), type(rewired).__name__
    if report.deferred:
        log.warning("%s was not initialised: its parameters are on the meta device.", name)
    elif not report.applied:
        log.warning("%s was not initialised: %s leaves all of its weights as they are.", name, initializer)
    return rewired


def _validate_twin(model: nn.Module, patterns: list[Pattern], wanted: _Wanted) -> None:
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
    given = wanted.topologies.get("", wanted.topologies)
    compile(twin, given, granularity=wanted.granularity, start=wanted.start, loop=wanted.loop)
    log.warning("%s is on the meta device: a small model of the same classes was validated instead.", name)
