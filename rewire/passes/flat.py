"""Pass: find the residual streams of a flat graph, in which the forwards of all modules are written out.

Such are the graphs of torch.compile, torch.export and torch.fx. The finder is that of one forward (`residuals`). What
it asks of a child module is asked of operations here: which weights they read, and which module they ran in, as their
``nn_module_stack`` says.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from rewire.passes.naming import branch_kind, branch_name
from rewire.passes.residuals import Add, Chain, ChainFinder
from rewire.passes.trunks import CONTAINERS, common, common_path
from rewire.passes.values import POST_FUNCTIONS, Values
from rewire.trunk import Site, Trunk

_POST_NAMES = {function.__name__ for function in POST_FUNCTIONS}
_CONTAINER_NAMES = {cls.__name__ for cls in CONTAINERS}
#: How Dynamo writes the module that it compiles: a local or a global variable.
_ROOT = re.compile(r"^[LG]\['\w+'\]\.?")


@dataclasses.dataclass(frozen=True)
class Place:
    """A call of a module, as ``nn_module_stack`` shows it.

    Attributes:
        path: path of the module.
        cls: its class, with the module that defines it.
        call: differs between two calls of one module.
    """

    path: str
    cls: str
    call: str


@dataclasses.dataclass
class FlatTrunk:
    """A trunk, and the chain of residual adds that it is in the graph."""

    trunk: Trunk
    chain: Chain


@dataclasses.dataclass
class FoundFlat:
    """The trunks of a flat graph, and what was left alone: where, and why."""

    trunks: list[FlatTrunk]
    skipped: dict[str, str]


def find_flat(graph: fx.Graph, root: nn.Module) -> FoundFlat:
    """The residual streams of at least two adds in a flat graph.

    Args:
        graph: operations with shapes in their ``meta`` (see `shape_of`).
        root: the module that its attributes belong to.
    """
    values = FlatValues(graph, root)
    found = _FlatFinder(values, lambda _child: []).run()
    skipped = dict(found.rejected)
    chains = []
    for chain in found.chains:
        if len(chain.adds) > 1:
            chains.append(chain)
        else:
            name = _site(values, chain.adds[0]).name
            skipped.setdefault(name, "a single residual add: there is nothing to connect it with")
    trunks: list[FlatTrunk] = []
    for chain in chains:
        sites = [_site(values, add) for add in chain.adds]
        reason = next((reason for other in chains if (reason := _nested(values, chain, other))), "")
        if reason:
            skipped |= dict.fromkeys([site.name for site in sites], reason)
        else:
            trunks.append(FlatTrunk(_trunk(values, chain, sites, {t.trunk.name for t in trunks}), chain))
    return FoundFlat(trunks, skipped)


class FlatValues(Values):
    """Questions about the values of a flat graph, as the block that holds an add sees it."""

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        super().__init__(graph, root)
        self.depth = 0  # modules around the block
        self.weights: set[fx.Node] = set()
        for node in self.nodes:
            inputs = node.all_input_nodes
            made_of_weights = inputs and node.op != "output" and self.weights.issuperset(inputs)
            if made_of_weights or _is_weight(node, root):
                self.weights.add(node)

    def places(self, node: fx.Node) -> list[Place]:
        """The calls that ``node`` runs in, outermost first."""
        stack: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
        return [Place(_ROOT.sub("", path), _qualified(cls), call) for call, (path, cls) in stack.items()]

    def block(self, add: Add) -> list[str]:
        """Paths of the modules that hold both an add and all that its branches do with weights."""
        weighty = [node for branch in add.branches for node in self.between(add.source, branch) - {add.source}]
        nodes = [add.node, *filter(self.parametrised, weighty)]
        return common([[place.path for place in self.places(node)] for node in nodes])

    def around(self, add: Add) -> FlatValues:
        """The graph as the block that holds ``add`` sees it."""
        view = copy.copy(self)
        view.depth = len(self.block(add))
        return view

    def _called(self, node: fx.Node) -> Place | None:
        """The call of a child of the block that ``node`` is a part of."""
        places = self.places(node)
        return places[self.depth] if len(places) > self.depth else None

    def callee(self, node: fx.Node) -> str | None:
        called = self._called(node)
        if called is None:
            return super().callee(node)
        above = self.places(node)[self.depth - 1].path if self.depth else ""
        return called.path.removeprefix(above).lstrip(".")

    def described(self, node: fx.Node) -> str:
        called = self._called(node)
        if called is None:
            return super().described(node)
        plain = called.cls.startswith("torch.nn.") and not re.search(r"\.(Conv\dd|MultiheadAttention)$", called.cls)
        return str(self.callee(node)) + ("" if plain else f" {called.cls.rpartition('.')[-1]}")

    def is_norm(self, node: fx.Node) -> bool:
        called = self._called(node)
        return super().is_norm(node) if called is None else "norm" in f"{self.callee(node)} {called.cls}".lower()

    def parametrised(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return super().parametrised(node)
        return node not in self.weights and self.matrices(node) > 0

    def matrices(self, node: fx.Node) -> int:
        """Number of weights that mix channels: not those with a single long dimension."""
        if node.op == "call_module":
            return super().matrices(node)
        return sum(sum(size != 1 for size in sizes) >= 2 for sizes in self.sizes(node))

    def sizes(self, node: fx.Node) -> list[torch.Size]:
        """Shapes of the weights that ``node`` reads."""
        shapes = [shape_of(source, self.root) for source in node.all_input_nodes if source in self.weights]
        return [shape for shape in shapes if shape is not None]

    def behind(self, node: fx.Node, add: fx.Node) -> fx.Node | None:
        inputs = [source for source in node.all_input_nodes if source not in self.weights]
        paths, block = ([place.path for place in self.places(n)] for n in (node, add))
        inside = len(paths) > len(block) and paths[: len(block)] == block
        return inputs[0] if inside and len(inputs) == 1 else None

    def is_post(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return super().is_post(node)
        name = str(getattr(node.target, "__name__", "")).partition(".")[0]  # an operator's is "relu.default"
        return name in _POST_NAMES and sum(source not in self.weights for source in node.all_input_nodes) == 1


class _FlatFinder(ChainFinder):
    values: FlatValues

    def _around(self, add: Add) -> FlatValues:
        return self.values.around(add)

    def _name(self, shortcut: fx.Node, link: Any) -> str:
        block, name = self.values.block(link), super()._name(shortcut, link)
        return f"{block[-1]}.{name}" if block and block[-1] else name

    def _joins_parallel(self, node: fx.Node, inner: fx.Node, branch: fx.Node) -> bool:
        same_forward = self.values.places(node) == self.values.places(inner)
        return same_forward and super()._joins_parallel(node, inner, branch)

    def _post_path(self, tip: fx.Node, shortcut: fx.Node) -> list[fx.Node] | None:
        """A state that somebody else reads before the norm is not that of a post-norm block."""
        return super()._post_path(tip, shortcut) if len(tip.users) == 1 else None

    def _restores(self, chain: Chain, view: fx.Node) -> bool:
        shape = shape_of(view, self.values.root)
        return shape is not None and shape == shape_of(chain.entry, self.values.root)

    def _close(self, chain: Chain) -> None:
        """The chain ends in this graph: after the norms and activations of the last add's own block."""
        last = chain.adds[-1]
        block = self.values.block(last)
        while len(last.state.users) == 1:
            (user,) = last.state.users
            inside = [place.path for place in self.values.places(user)][: len(block)] == block
            if not (block and inside and self.values.is_post(user)):
                break
            last.post.append(user)
        chain.exit = last.state


def shape_of(node: fx.Node, root: nn.Module) -> torch.Size | None:
    """Shape of the tensor that ``node`` is, from its ``meta`` or from the attribute that it gets."""
    value = tensor_of(node, root)
    return None if value is None else value.shape


def tensor_of(node: fx.Node, root: nn.Module) -> torch.Tensor | None:
    """A tensor like that of ``node``: as `torch.compile`, `torch.export` and `FakeTensorProp` leave it in ``meta``."""
    value = node.meta.get("example_value", node.meta.get("val"))
    if value is None and node.op == "get_attr":
        value = _attribute(root, str(node.target))
    return value if isinstance(value, torch.Tensor) else None


def _attribute(root: nn.Module, path: str) -> Any:
    value: Any = root
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def _is_weight(node: fx.Node, root: nn.Module) -> bool:
    """Whether ``node`` is a parameter or a buffer."""
    if node.op == "get_attr":
        return isinstance(_attribute(root, str(node.target)), torch.Tensor)
    return node.op == "placeholder" and "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})


def _qualified(cls: Any) -> str:
    return cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"


def _nested(values: FlatValues, chain: Chain, other: Chain) -> str:
    """Why ``chain`` is left alone beside ``other``; empty if they are apart.

    Residual adds inside a branch belong to the branch, except where they are a trunk of several blocks: then the add
    around them is a long skip.
    """
    if chain is other:
        return ""
    if _inside(values, chain, other) and not _is_body(values, chain):
        return "inside the branch of another residual add"
    if _inside(values, other, chain) and _is_body(values, other):
        return "a shortcut around a whole trunk"
    return ""


def _inside(values: FlatValues, inner: Chain, outer: Chain) -> bool:
    node = inner.adds[0].node
    return any(node in values.between(add.source, branch) for add in outer.adds for branch in add.branches)


def _is_body(values: FlatValues, chain: Chain) -> bool:
    """Whether the adds are those of several blocks in a row."""
    return len({tuple(values.block(add)) for add in chain.adds}) > 1


def _site(values: FlatValues, add: Add) -> Site:
    view = values.around(add)
    block = next(reversed(values.block(add)), "")
    branch = branch_name(view, add.source, add.branches)
    name = f"{block}.{branch}" if block else branch
    kind = branch_kind(view, add.source, add.branches)
    post = tuple(values.places(node)[-1].path if values.places(node) else node.name for node in add.post)
    return Site(name, block, branch, kind, post, *_channels(values, add))


def _channels(values: FlatValues, add: Add) -> tuple[int | None, int]:
    """Width of the stream and the dimension of its channels: an image's if a convolution is what reads it first."""
    region = {node for branch in add.branches for node in values.between(add.source, branch)} - {add.source}
    first = min(filter(values.parametrised, region), key=values.order.__getitem__)
    child = values.child(first)
    called = type(child).__name__ if child is not None else getattr(first.target, "__name__", "")
    weights = [p.shape for p in child.parameters()] if child is not None else values.sizes(first)
    dim = 1 - max(map(len, weights)) if "conv" in called.lower() else -1
    shape = shape_of(add.shortcut, values.root)
    return (None if shape is None else int(shape[dim])), dim


def _trunk(values: FlatValues, chain: Chain, sites: Sequence[Site], taken: set[str]) -> Trunk:
    places = [values.places(add.node) for add in chain.adds]
    classes = {place.path: place.cls for stack in places for place in stack}

    def is_container(path: str) -> bool:
        return classes.get(path, "ModuleList").rpartition(".")[-1] in _CONTAINER_NAMES

    prefix, above = common_path(sites, is_container)
    name = ".".join(prefix) or "trunk"
    while name in taken:
        name += "'"
    owner, units = ".".join(above), [1]
    keys = [_element(owner, site, stack) for site, stack in zip(sites, places, strict=True)]
    for before, key in itertools.pairwise(keys):
        units.append(units[-1] + (key != before))
    return Trunk(name, tuple(sites), tuple(units), owner)


def _element(container: str, site: Site, places: Sequence[Place]) -> str:
    """What tells the unit of ``site`` from others: the call of the container's element, or the element's name."""
    inside = [place for place in places if place.path != container and place.path.startswith(container)]
    if inside:
        return inside[0].call
    return site.name.removeprefix(container).lstrip(".").partition(".")[0]
