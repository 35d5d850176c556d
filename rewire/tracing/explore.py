"""All paths through one module's forward, as far as they differ."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

from torch import fx, nn

from rewire.errors import TraceError
from rewire.tracing.forwards import inspects_keywords, parameters_of, plain_forward
from rewire.tracing.printer import statements
from rewire.tracing.tracer import Leaf, Opaque, PathTracer, child_calls_recorded

MAX_PATHS = 32
MAX_RUNS = 400  # of the tracer, over all paths and choices of arguments that are None
_MAX_OPAQUE = 8


@dataclasses.dataclass
class Path:
    """One path through a forward.

    Attributes:
        nones: tested parameters that are None here; the other tested parameters are not.
        graph: what runs on this path, or None where it cannot be traced.
        tests: the tests on traced values, in order, with their outcome.
        error: why there is no graph.
    """

    nones: frozenset[str]
    graph: fx.Graph | None
    tests: list[tuple[fx.Node, bool]]
    error: str = ""


@dataclasses.dataclass
class Traced:
    """A module's forward as graphs.

    Attributes:
        module: the module.
        function: its plain forward.
        tested: parameters whose None-ness selects different code.
        paths: all paths; at least one has a graph.
    """

    module: nn.Module
    function: FunctionType
    tested: tuple[str, ...]
    paths: list[Path]

    @property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.function)


def _never(_module: nn.Module) -> bool:
    return False


def trace(
    module: nn.Module,
    inline: Callable[[nn.Module], bool] = _never,
    function: FunctionType | None = None,
    leaves: Sequence[Leaf] = (),
    running: list[PathTracer] | None = None,
    through_functions: bool = True,
    varying: frozenset[str] = frozenset(),
) -> Traced:
    """Trace ``module``'s own forward with torch.fx, its children as leaves, without running it.

    Args:
        module: any module; it is not changed.
        inline: says for a child that is called with several traced values whether to trace through it.
        function: traced in place of the class's forward (for forwards with a hand-written fast path).
        leaves: library attributes to replace while tracing.
        running: what `child_calls_recorded` yielded, to trace many modules under one patch.
        through_functions: False records functions that the forward calls by their global name as such, instead of
            what they compute: a shorter forward that goes on calling them.
        varying: attributes that differ between equal modules (a layer's number): read when the forward runs, so that
            the modules get the same forward.

    Raises:
        TraceError: no path through the forward could be traced; the message says why.
    """
    if running is None:
        with child_calls_recorded() as running:
            return trace(module, inline, function, leaves, running, through_functions, varying)
    if function is None:
        function, _ = plain_forward(type(module))
    if inspects_keywords(function):
        raise TraceError("it looks into its own **kwargs")
    optional = [p.name for p in parameters_of(function)[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]

    runs = itertools.count()
    opaque = frozenset[tuple[str, bool]]()
    if not through_functions:
        called = (
            name for name in function.__code__.co_names if isinstance(function.__globals__.get(name), FunctionType)
        )
        opaque = frozenset((name, False) for name in called)

    def explore(nones: Sequence[str]) -> list[Path]:
        def tracer(decisions: Sequence[bool], hidden: frozenset[tuple[str, bool]]) -> PathTracer:
            return PathTracer(module, function, frozenset(nones), decisions, hidden, inline, leaves, running, varying)

        return _explore(tracer, frozenset(nones), opaque, runs)

    given = explore(())
    absent = [p.name for p in parameters_of(function)[1:] if p.default is None]
    tested: list[str] = []
    if _traced(given):
        if _text(given, absent) != _text(explore(absent)):
            for name in optional:
                paths = explore((name,))
                if _traced(paths) and _text(paths) != _text(given, (name,)):
                    tested.append(name)
    else:
        # Some optional argument cannot be traced when it is given: find which, starting from none given.
        if not absent or not _traced(explore(absent)):
            raise TraceError(given[0].error)
        for name in absent:
            rest = [other for other in absent if other != name]
            paths = explore(rest)
            if not _traced(paths) or _text(paths, (name,)) != _text(explore(absent)):
                tested.append(name)
    if len(tested) > 4:
        raise TraceError(f"its code depends on whether {', '.join(tested)} are None")
    paths = []
    for choice in range(2 ** len(tested)):
        nones = [name for bit, name in enumerate(tested) if choice >> bit & 1]
        paths += explore(nones)
    if not _traced(paths):
        raise TraceError(paths[0].error)
    return Traced(module, function, tuple(tested), paths)


def _explore(
    make_tracer: Callable[[Sequence[bool], frozenset[tuple[str, bool]]], PathTracer],
    nones: frozenset[str],
    opaque: frozenset[tuple[str, bool]],
    runs: Iterator[int],
) -> list[Path]:
    """Depth first over the outcomes of all tests on traced values.

    Args:
        make_tracer: makes a tracer of given decisions and opaque names.
        nones: parameters that are None.
        opaque: what is opaque from the start.
        runs: counts the runs.
    """
    limit = len(opaque) + _MAX_OPAQUE
    paths: list[Path] = []
    decisions: list[bool] = []
    while True:
        if next(runs) >= MAX_RUNS:
            raise TraceError(f"its code still branches after {MAX_RUNS} runs")
        tracer = make_tracer(decisions, opaque)
        try:
            graph, error = tracer.run(), ""
        except Opaque as request:
            if len(opaque) >= limit:
                raise TraceError(f"{type(request.error).__name__}: {request.error}") from request.error
            opaque, paths, decisions = opaque | {(request.name, request.is_method)}, [], []
            continue
        except TraceError as failure:
            graph, error = None, str(failure)
        paths.append(Path(nones, graph, tracer.branches(), error))
        if len(paths) > MAX_PATHS:
            return [Path(nones, None, [], f"its code branches into more than {MAX_PATHS} paths")]
        decisions = [outcome for _, outcome in tracer.branches()]
        while decisions and decisions[-1]:
            decisions.pop()
        if not decisions:
            return paths
        decisions[-1] = True


def _traced(paths: Sequence[Path]) -> bool:
    return any(path.graph is not None for path in paths)


def _text(paths: Sequence[Path], as_none: Sequence[str] = ()) -> list[Any]:
    """The paths as text, to compare them; arguments ``as_none`` are written as None."""
    written: dict[str, str] = dict.fromkeys(as_none, "None")
    return [
        path.error if path.graph is None else [line.text for line in statements(path.graph, {}, written)]
        for path in paths
    ]
