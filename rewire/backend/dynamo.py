"""A torch.compile backend that adds learned depth connections to graphs that are captured whole.

``torch.compile(model, backend=rewire.Backend("denseformer"))``
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, fx, nn

from rewire.attributes import CONNECTIONS
from rewire.backend.captured import check_captured, copied
from rewire.backend.flat import rewrite_chain
from rewire.backend.flat_attention import find_attention
from rewire.backend.flat_norms import FlatNorm, find_norm
from rewire.errors import RewireError, UnsupportedCall, UnsupportedTopology
from rewire.kernels.switch import uses_kernels
from rewire.passes.checks import check_choices
from rewire.passes.choose import assigned, check_names, chosen_topologies, layout_of
from rewire.passes.editing.fusions import Fusion
from rewire.passes.find import Finding, finding_in
from rewire.passes.finding.chains import Chain
from rewire.passes.finding.graphs import flow_of, tensor_of
from rewire.runtime.connection import Connection, connections
from rewire.runtime.layout import Layout
from rewire.topologies import Topology
from rewire.topologies.base import Start
from rewire.torch_internals import (
    compiled_by,
    compiled_frame,
    declare_parameters,
    options_of_mode,
    propagate,
    pytree,
    recompile_limit,
)
from rewire.trunk import Report, Trunk

log = logging.getLogger("rewire")

_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True)
class BackendReport:
    """What a `Backend` did to the graphs that it compiled.

    Attributes:
        graphs: number of graphs.
        residuals: the trunks that were rewired, and what was left alone, with the reason.
        norms: on devices with kernels, the norms that read a stream first, each with the reason if it cannot be
            computed together with the read.
    """

    graphs: int
    residuals: Report
    norms: tuple[Fusion, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.graphs} graph{'s' * (self.graphs != 1)}"]
        lines += [f"{norm.module}: {norm.obstacle or 'computed together with what it reads'}" for norm in self.norms]
        return "\n".join(lines) + f"\n{self.residuals}"


class Backend:
    """A backend of ``torch.compile``. Each object is for one model, whose graphs share the connection weights.

    The residual adds of each graph are replaced by learned connections, as `rewire.compile` replaces them in a model's
    blocks. The rewritten graph goes to AOTAutograd and then to ``inner``.

    The weights belong to this object, not to the model: give `parameters` to the optimiser, and save `state_dict`.
    They exist once a graph has been compiled, that is, after the first call of the compiled model.

    Args:
        topology: a name, a `Topology` object, or a dict of these by trunk, as for `rewire.compile`.
        granularity, start, trunks: as for `rewire.compile`.
        inner: the backend that compiles the rewritten graphs: ``"inductor"`` or any other of ``torch.compile``.
        inner_options: options of Inductor, such as ``{"triton.cudagraphs": True}``.
        validate: compare outputs and gradients of each rewired graph with those of the captured one, on the inputs of
            the first call, before it is compiled.
        options: options of the named topology.

    Raises:
        UnknownName: no such topology; the message suggests similar names. (For a trunk that no graph has, this is
            raised when the last graph of the model is compiled.)
        TypeError, ValueError: another argument has a wrong type or value.

    Example:
        >>> backend = rewire.Backend("denseformer", inner="eager")
        >>> compiled = torch.compile(model, backend=backend)
        >>> torch.allclose(compiled(x), model(x), atol=1e-6)  # it starts as the original network
        True
        >>> connections = {"params": backend.parameters(), "weight_decay": 0.0}
        >>> optimizer = torch.optim.AdamW([{"params": model.parameters()}, connections])
    """

    def __init__(
        self,
        topology: str | Topology | Mapping[str, str | Topology],
        *,
        granularity: Literal["auto", "block", "sublayer"] = "auto",
        start: Start = "preserve",
        trunks: Sequence[str] | None = None,
        inner: str = "inductor",
        inner_options: Mapping[str, Any] | None = None,
        validate: bool = True,
        **options: object,
    ) -> None:
        check_choices(granularity, start)
        if inner_options and inner != "inductor":
            raise ValueError(f"inner_options are options of Inductor; '{inner}' takes none.")
        self.topologies = chosen_topologies(topology, options, trunks, start)
        self.granularity: Literal["auto", "block", "sublayer"] = granularity
        self.start, self.validate = start, validate
        self.inner, self.inner_options = inner, dict(inner_options or {})
        self._connections = nn.ModuleDict()
        self._trunks: dict[str, Trunk] = {}
        self._owners: dict[str, list[weakref.ref[nn.Parameter]]] = {}  # by trunk: parameters of the model
        self._kept: dict[int, weakref.WeakSet[Callable[..., Any]]] = {}  # by Dynamo's frame: its compiled graphs
        self._seen: list[Trunk] = []  # trunks found in any graph of the model that is being compiled
        self._break = ""  # the last graph break
        self.__name__ = "rewire"  # for torch.compile's messages
        self._report = BackendReport(0, Report(()))

    @classmethod
    def of(cls, options: dict[str, Any]) -> Backend:
        """The backend of ``torch.compile(model, backend="rewire", options=options)``, for this dict.

        Its keys are arguments of `Backend`; keys with a dot (``"triton.cudagraphs"``) and others that Inductor knows
        are Inductor's options. The backend is stored in the dict itself, under ``"rewire"``, and lives as long as it.
        """
        if _KEPT not in options:
            own = {key: value for key, value in options.items() if key in _ARGUMENTS}
            others = {key: value for key, value in options.items() if key not in _ARGUMENTS}
            own["inner_options"] = {**own.get("inner_options", {}), **others}
            options[_KEPT] = cls(**own)
        backend: Backend = options[_KEPT]
        return backend

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., Any]:
        """Compile one graph; ``torch.compile`` calls this.

        Raises:
            UnsupportedCall: a graph break cuts a trunk; a trunk differs from the one of that name in earlier graphs; or
                there are so many graphs that Dynamo would no longer compile new kinds of inputs.
            UnsupportedTopology, WidthMismatch, ValidationMismatch: as for `rewire.compile`.
        """
        rewired = self._rewrite(graph, example_inputs)
        kept = self._kept_with_room() if rewired else weakref.WeakSet()
        declare_parameters(graph)
        compiled = compiled_by(self.inner, graph, example_inputs, self.inner_options)
        run = self._for_one_model(compiled, rewired, example_inputs)
        kept.add(run)
        return run

    def rewrite(self, program: fx.GraphModule | torch.export.ExportedProgram, *inputs: object) -> fx.GraphModule:
        """Rewrite an exported program or a graph module into a new module, which can be run, trained or compiled.

        It has the connection weights of this backend, and shares its other parameters with ``program``.

        Args:
            program: a program or module whose graph consists of torch functions or of ATen operators.
            inputs: positional arguments for a graph module whose nodes have no shapes; without shapes, widths are
                unknown.
        """
        given: Sequence[Any] = inputs
        if isinstance(program, torch.export.ExportedProgram):
            graph: Any = program.module()
            given = pytree.tree_leaves(program.example_inputs or ())
        else:
            memo = {id(tensor): tensor for tensor in (*program.parameters(), *program.buffers())}
            graph = copy.deepcopy(program, memo)
        if inputs:
            propagate(graph, inputs)
        self._rewrite(graph, given)
        return graph

    def parameters(self) -> Iterator[nn.Parameter]:
        """The connection weights.

        Raises:
            RewireError: there are none yet.
        """
        return self._made().parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The connection weights with their names in `state_dict`.

        Raises:
            RewireError: there are none yet.
        """
        return self._made().named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """The connection weights, and for each trunk its recipe.

        Raises:
            RewireError: there are none yet.
        """
        return self._made().state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load the result of `state_dict`.

        Raises:
            RewireError: there are no weights yet, or the state belongs to another rewiring.
        """
        self._made().load_state_dict(state)

    def coefficients(self) -> dict[str, Tensor]:
        """Effective connection weights: trunk name -> matrix [destination, source], float32, detached."""
        return {name: connection.matrix().detach() for name, connection in connections(self._connections).items()}

    @property
    def report(self) -> BackendReport:
        """What was rewired and fused in the graphs so far, and what was not."""
        return self._report

    def _rewrite(self, graph: fx.GraphModule, inputs: Sequence[object]) -> list[str]:
        """Rewrite a graph in place, compare it with the original on ``inputs``, and return the names of its trunks."""
        captured = copied(graph)
        found = _found(graph)
        rewired, norms = list[Trunk](), list[Fusion]()
        trunks = list(found.trunks.values())
        chosen = {trunk.name: self.topologies[key] for trunk, key in assigned(trunks, self.topologies)}
        self._check_names(graph, trunks)
        self._check_whole(graph, found, chosen)
        for name, topology in chosen.items():
            norms += self._connect(graph, found, name, topology)
            rewired.append(found.trunks[name])
        graph.graph.lint()
        graph.recompile()
        if rewired and self.validate and inputs:
            check_captured(captured, graph, inputs, self.start)
        self._note(BackendReport(1, Report(tuple(rewired), tuple(found.left)), tuple(norms)))
        return [trunk.name for trunk in rewired]

    def _check_names(self, graph: fx.GraphModule, trunks: Sequence[Trunk]) -> None:
        """Raise UnknownName, at the model's last graph, for names of trunks that no graph has."""
        self._seen += trunks
        reason = getattr(graph, "compile_subgraph_reason", None)
        if reason is None or not reason.graph_break:
            seen, self._seen = self._seen, []
            if seen or reason is None:
                check_names(self.topologies, seen)

    def _connect(self, graph: fx.GraphModule, found: Finding, name: str, topology: Topology) -> list[Fusion]:
        """Replace a trunk's adds by a stream of this backend's connection; returns the norms that read it first."""
        trunk, chain, key = found.trunks[name], found.chains[name], name.replace(".", "_")
        if key not in self._connections:
            layout = layout_of(trunk, topology, self.granularity)
            if layout.dims.attention and topology.separate_norms:
                raise UnsupportedTopology(
                    "separate_norms=True gives a model more norms, and a flat graph has no modules for them: use "
                    "rewire.compile, and pass its result to torch.compile."
                )
            self._connections[key] = Connection(layout, self.start, _device(graph))
            self._trunks[key] = trunk
        elif (known := self._trunks[key]).units != trunk.units or _names(known) != _names(trunk):
            raise UnsupportedCall(
                f"trunk '{trunk.name}' has residual adds {_span(trunk)} in this graph and had {_span(known)} in an "
                "earlier one, and both would share its connection weights. Switch layer dropping off, and use a "
                "separate Backend for each model. Or use rewire.compile, which does not depend on graphs."
            )
        layout = connections(self._connections)[name].layout
        if len(chain.adds) - 1 not in layout.posts:
            chain.adds[-1].post = []
        adds = [number for number in range(len(chain.adds)) if layout.sites[number].reads_qkv]
        attentions = {n: find_attention(found.flow, chain.adds[n], trunk.sites[n]) for n in adds}
        norms = _norms(graph, chain, layout)
        gate = f"{CONNECTIONS}.{key}"
        graph.add_submodule(gate, self._connections[key])  # called by `rewrite_chain`'s nodes
        rewrite_chain(graph.graph, chain, gate, attentions, {n: norm for n, (norm, _) in norms.items() if norm})
        return [fusion for _, fusion in norms.values() if fusion]

    def _check_whole(self, graph: fx.GraphModule, found: Finding, chosen: Collection[str]) -> None:
        """Raise UnsupportedCall for trunks that continue outside this graph, as far as one Dynamo graph can tell."""
        reason = getattr(graph, "compile_subgraph_reason", None)
        if reason is None:  # not Dynamo's
            return
        if reason.graph_break:
            at = f" at {reason.user_stack[-1].filename}:{reason.user_stack[-1].lineno}" if reason.user_stack else ""
            self._break = f"{reason.reason.splitlines()[0]}{at}"
            if not chosen:
                log.warning("no residual stream was found in a graph that ends in a break: %s.", self._break)
        output = next(iter(reversed(graph.graph.nodes)))
        for name in chosen:
            chain = found.chains[name]
            handed_in = chain.entry.node.op == "placeholder"
            handed_out = chain.adds[-1].result.node in output.all_input_nodes
            what = f"trunk '{name}', of which this graph holds {_span(found.trunks[name])},"
            if (reason.graph_break and handed_out) or (handed_in and self._break):
                raise UnsupportedCall(
                    f"{what} borders on a graph break ({self._break}), which may cut it, and its "
                    "connections have to lie within one graph. Remove the break (torch.compile(.., "
                    "fullgraph=True) shows it), or use rewire.compile, which does not depend on graphs."
                )
            if handed_in and handed_out and not any(site.block for site in found.trunks[name].sites):
                raise UnsupportedCall(
                    f"{what} is one block by itself, compiled apart from the others whose stream it shares. Compile "
                    "the whole model, or use rewire.compile, which does not depend on graphs."
                )

    def _kept_with_room(self) -> weakref.WeakSet[Callable[..., Any]]:
        """The graphs that Dynamo keeps for the frame that it compiles, if it can still add another one after this.

        Raises:
            UnsupportedCall: it cannot: it would run new kinds of inputs as Python, without the connections.
        """
        frame = compiled_frame()
        if frame is None:  # not Dynamo's
            return weakref.WeakSet()
        kept = self._kept.setdefault(frame, weakref.WeakSet())
        limit = recompile_limit()
        if len(kept) + 1 >= limit:
            raise UnsupportedCall(
                f"this is graph {len(kept) + 1} of the same code, and torch._dynamo.config.recompile_limit is "
                f"{limit}: for the next kind of inputs, torch.compile would run the model without the connections. If "
                "sizes change from call to call, pass torch.compile(.., dynamic=True); TORCH_LOGS=recompiles shows "
                "what else changes. Or raise the limit, or use rewire.compile, which does not depend on graphs."
            )
        return kept

    def _for_one_model(
        self, compiled: Callable[..., Any], trunks: Sequence[str], inputs: Sequence[object]
    ) -> Callable[..., Any]:
        """Restrict ``compiled`` to the model to which the weights of these trunks belong.

        Parameters are inputs of the graph, so Dynamo would also run it for other models of the same class.
        """
        first = next((n for n, value in enumerate(inputs) if isinstance(value, nn.Parameter)), None)
        if first is None or not trunks:
            return lambda *args: compiled(*args)  # a new object, for the weak set
        self._check_owner(trunks, inputs)
        known = weakref.ref(inputs[first])

        def run(*args: object) -> Any:
            nonlocal known
            if args[first] is not known():
                self._check_owner(trunks, args)
                known = weakref.ref(args[first])
            return compiled(*args)

        return run

    def _check_owner(self, trunks: Sequence[str], inputs: Sequence[object]) -> None:
        """Raise an error for a graph without any parameter of the earlier graphs with these trunks."""
        parameters = [value for value in inputs if isinstance(value, nn.Parameter)]
        for trunk in trunks:
            owners = self._owners.get(trunk)
            if owners and not any(owner() is parameter for parameter in parameters for owner in owners):
                raise UnsupportedCall(
                    f"this backend already has connection weights for a trunk '{trunk}', and they belong to another "
                    "model. Use a separate Backend, or a separate dict of options, for each model."
                )
            self._owners[trunk] = [weakref.ref(parameter) for parameter in parameters]

    def _note(self, new: BackendReport) -> None:
        old = self._report
        residuals = Report(
            _both(old.residuals.trunks, new.residuals.trunks), _both(old.residuals.left, new.residuals.left)
        )
        self._report = BackendReport(old.graphs + new.graphs, residuals, _both(old.norms, new.norms))

    def _made(self) -> nn.ModuleDict:
        if not self._connections:
            raise RewireError(
                "this backend has no connection weights yet: it creates them for the trunks that it finds at the "
                "first call. Call the compiled model once before, for example under torch.no_grad()."
            )
        return self._connections


def by_name(
    graph: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend ``"rewire"`` of ``torch.compile``: see `Backend.of` for its options.

    Raises:
        TypeError: ``options`` do not name a topology.
        ValueError: a ``mode`` was given; use ``options`` instead.
    """
    if mode is not None:
        same = options_of_mode(mode)
        raise ValueError(f"mode={mode!r} is not for the backend 'rewire': pass options={same}.")
    if not options:
        raise TypeError('The backend "rewire" needs a topology: pass options={"topology": "denseformer"}.')
    return Backend.of(options)(graph, example_inputs)


#: Arguments of `Backend`, as keys of the options of ``torch.compile``.
_ARGUMENTS = {"topology", "granularity", "start", "trunks", "inner", "inner_options", "validate"}
#: Key in these options under which their backend is stored.
_KEPT = "rewire"


def _found(graph: fx.GraphModule) -> Finding:
    """The trunks of a graph, without those that are reshaped between adds."""
    found = finding_in(flow_of(graph.graph, graph))
    for name, chain in list(found.chains.items()):
        if any(chain.passages) or any(add.shortcut is not add.state for add in chain.adds):
            found.leave(name, "its stream is cast or reshaped between the adds, which this backend does not follow")
        elif any(op.scale not in (None, 1) for add in chain.adds for op in (add.op, *add.inner)):
            found.leave(name, "its adds have a factor (alpha), which this backend ignores")
    return found


def _norms(graph: fx.GraphModule, chain: Chain, layout: Layout) -> dict[int, tuple[FlatNorm | None, Fusion | None]]:
    """By the number of the second add, the norm that reads the state between two adds first; empty without kernels."""
    like = tensor_of(chain.entry.node, graph)
    if like is None or not uses_kernels(like):
        return {}
    pairs = enumerate(itertools.pairwise(chain.adds), 1)
    return {n: find_norm(before.result, add.region) for n, (before, add) in pairs if not layout.sites[n].reads_qkv}


def _both(first: Iterable[_Item], second: Iterable[_Item]) -> tuple[_Item, ...]:
    """The items of both, without duplicates."""
    return tuple(dict.fromkeys((*first, *second)))


def _device(graph: fx.GraphModule) -> torch.device | None:
    """The device of a graph's parameters: its own, or those among Dynamo's inputs."""
    handed = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
    tensors = [*graph.parameters(), *(x for x in handed if isinstance(x, nn.Parameter))]
    return next((x.device for x in tensors), None)


def _names(trunk: Trunk) -> list[str]:
    return [site.name for site in trunk.sites]


def _span(trunk: Trunk) -> str:
    return f"'{trunk.sites[0].name}' to '{trunk.sites[-1].name}' ({len(trunk.sites)})"
