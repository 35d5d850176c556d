"""Pass: compare a rewritten flat graph with the captured one, on the inputs of the first call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx, nn

from rewire.copies import Inputs, shared
from rewire.errors import BadExampleInputs, ValidationMismatch
from rewire.logs import validate as log
from rewire.passes.finding.graphs import number
from rewire.passes.validate import compare_both
from rewire.passes.validating.runs import Setting
from rewire.runtime.connection import connections
from rewire.topologies.base import Start
from rewire.torch_internals import EXPORT_GUARDS, is_fake

#: The two comparisons; a captured graph is for one mode, and is compared in that.
_FIRST, _PERTURBED = "the inputs of the first call", "the inputs of the first call, perturbed weights"
SETTINGS = (Setting(_FIRST), Setting(_PERTURBED, perturbed=True))
STARTS = (
    Setting(f"{_FIRST}, at the start of the topology", rounding=True),
    Setting(f"{_PERTURBED}, at the start of the topology", perturbed=True, rounding=True),
)


class CapturedGraph(nn.Module):
    """A flat graph as a module that takes tensors as separate arguments, and owns parameters among Dynamo's inputs."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[object]) -> None:
        super().__init__()
        self.graph = graph
        self.names = [str(node.target) for node in graph.graph.nodes if node.op == "placeholder"]
        for name, value in zip(self.names, inputs, strict=True):
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)

    def forward(self, *inputs: object) -> Any:
        others = iter(inputs)
        own = dict(self.named_parameters(recurse=False, remove_duplicate=False))
        return self.graph(*(own[n] if n in own else next(others) for n in self.names))


def copied(graph: fx.GraphModule) -> fx.GraphModule:
    """A module with a copy of the graph, the same tensors and modules, and plain tuples as input and output."""
    own = fx.Graph()
    own.output(own.graph_copy(graph.graph, {}))
    for guards in own.find_nodes(op="call_module", target=EXPORT_GUARDS):  # torch.export's, which cannot be copied
        own.erase_node(guards)
    return fx.GraphModule(graph, own)


def check_captured(original: fx.GraphModule, rewritten: fx.GraphModule, inputs: Sequence[object], start: Start) -> None:
    """Compare the rewrite with plain connections in it to the original; with a preserving start, also as it is.

    Args:
        original: the captured graph.
        rewritten: the graph whose trunks go through streams.
        inputs: inputs of the first call, a value for each placeholder, including parameters.
        start: the connections' start.

    Raises:
        ValidationMismatch: outputs or gradients differ.
    """
    before: nn.Module = CapturedGraph(copied(original), inputs)
    after: nn.Module = CapturedGraph(copied(rewritten), inputs)
    if any(_has_no_values(value) for value in (*inputs, *before.parameters(), *before.buffers())):
        log.warning("a graph was rewired but not validated: it was captured for tensors without values.")
        return
    after = shared(after)
    if start == "preserve":
        for connection in connections(after).values():  # these may have learned since, in another graph
            connection.become(connection.layout)
    given: Inputs = tuple(number(value) for value in inputs if not isinstance(value, nn.Parameter)), {}
    try:
        compare_both("a graph", before, after, given, SETTINGS, STARTS if start == "preserve" else ())
    except BadExampleInputs as error:
        log.warning("a graph was rewired but not validated: %s", error)
    except ValidationMismatch as error:
        raise ValidationMismatch(
            f"{error} That is the graph as torch.compile captured it. Try rewire.compile, which edits the model's "
            "source instead."
        ) from error


def _has_no_values(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_meta or is_fake(value))
