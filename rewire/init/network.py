"""A network by its residual adds: its branches, the projections of attentions, the first and last weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from rewire.conventions import (
    EMBEDDING_TABLE,
    EXPERTS,
    LINEAR_CLASS,
    OUTPUT_LAYER,
    TRANSPOSED,
    is_conv1d,
    is_linear,
    is_norm,
)
from rewire.errors import UnsupportedTopology
from rewire.init.last_layers import depth_of, last_layers_of, parameters_of
from rewire.init.layout import StorageLayout
from rewire.mixes.fused_qkv import Fused
from rewire.passes.find import residual_sites
from rewire.passes.finding.adds import Add, between
from rewire.passes.finding.flow import Op
from rewire.passes.finding.follow import follow
from rewire.passes.finding.graphs import attribute_at
from rewire.passes.finding.projections import find_projections
from rewire.passes.prepare import without_inputs
from rewire.trunk import Site

#: Settings in Hugging Face configs that name the activation.
_ACTIVATIONS = ("hidden_act", "activation_function", "dense_act_fn", "hidden_activation")

#: Parameters of projections with their parts: (q, k or v; where it lies).
Parts: TypeAlias = list[tuple[str, StorageLayout]]


@dataclasses.dataclass(frozen=True)
class Branch:
    """The branch of one residual add.

    Attributes:
        site: the add.
        inside: names of the parameters in the branch.
        last: names of the weights at the end of the branch.
        norms: paths of the norms at the end of the branch.
        scales: names of the factors at the end of the branch.
        shortcut: names of the parameters on the add's shortcut.
        depth: number of weights on the longest path through the branch.
    """

    site: Site
    inside: frozenset[str]
    last: frozenset[str]
    norms: frozenset[str]
    scales: frozenset[str]
    shortcut: frozenset[str]
    depth: int


class Network:
    """A plain model, its parameters by name, and what its operations show about them.

    Args:
        model: the model.

    Attributes:
        flow: the model's operations, as far as they can be traced.
        parameters: by name; shared ones once.
        aliases: all names of each parameter.
        branches: one for each residual add; those of a shared block once.
        of_branch: parameter name -> the innermost branch that it belongs to.
        shortcuts: names of the parameters that project a shortcut.
        projections: parameter name -> its parts q, k, v.
        adds: number of residual adds; those of a shared block as often as it runs.
        classifier: name of the weight that makes the network's output; None if there is none, or it is unknown.
        first: names of the weights that come first.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        prepared = without_inputs(model)
        self.patterns = prepared.patterns
        self.flow = follow(prepared.model, prepared.forwards)
        self.parameters = dict(model.named_parameters())
        self.first_name = {id(parameter): name for name, parameter in self.parameters.items()}
        self.aliases: dict[str, list[str]] = {name: [] for name in self.parameters}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.aliases[self.first_name[id(parameter)]].append(name)

        self.of_branch: dict[str, Branch] = {}

        adds = residual_sites(self.flow, self.patterns)
        self.adds = len(adds)
        self._sums = {add.op for add, _ in adds}
        once = {(site.name, add.op.scope.code, add.op.place): (add, site) for add, site in adds}
        self.branches = [self._branch(add, site) for add, site in once.values()]
        for branch in sorted(self.branches, key=lambda b: -len(b.site.block)):
            for name in branch.inside:
                self.of_branch.setdefault(name, branch)
        self.shortcuts = frozenset[str]().union(*(branch.shortcut for branch in self.branches))
        self.projections = self._projections([add for add, _ in once.values()])
        taken = self.shortcuts.union(self.of_branch)
        outside = [name for name in self.parameters if name not in taken and self.layout(name) is not None]
        self.classifier = self._classifier(outside)
        self.first = self._first([name for name in outside if name != self.classifier])

    def owner(self, name: str) -> nn.Module:
        """The module that the parameter ``name`` belongs to."""
        return self.model.get_submodule(name.rpartition(".")[0])

    def relu(self) -> bool:
        """Whether the network's activation is a ReLU: by its config, else if any module is one."""
        config: Any = getattr(self.model, "config", None)
        named = [name for key in _ACTIVATIONS if isinstance(name := getattr(config, key, None), str)]
        if named:
            return "relu" in named
        if any(isinstance(module, nn.ReLU) for module in self.model.modules()):
            return True
        return any(op.name == "relu" for op in self.flow)

    def layout(self, name: str) -> StorageLayout | None:
        """The layout of the matrix in a parameter; None if the parameter is no matrix, or its layout is unknown."""
        leaf = name.rpartition(".")[2]
        owner, parameter = self.owner(name), self.parameters[name]
        if not parameter.is_floating_point():
            return None
        if leaf == "weight" and is_linear(owner):
            if isinstance(owner, TRANSPOSED):
                return StorageLayout(transposed=True, groups=owner.groups)
            return StorageLayout(transposed=is_conv1d(owner))
        if isinstance(owner, nn.MultiheadAttention) and leaf.endswith("proj_weight"):
            return StorageLayout()
        if leaf.endswith("bias") or is_norm(owner) or isinstance(owner, nn.Embedding) or EMBEDDING_TABLE.search(leaf):
            return None
        if parameter.ndim == 3 and EXPERTS.search(f"{name} {type(owner).__name__}"):
            return StorageLayout(stacked=True, transposed=self._stacked_transposed(name, owner))
        if parameter.ndim == 2 and leaf == "weight" and LINEAR_CLASS.search(type(owner).__name__):
            return StorageLayout()
        return None

    def _stacked_transposed(self, name: str, owner: nn.Module) -> bool:
        """Whether experts are [in, out]: as their module says, else by which of the two is the stream's width."""
        told = getattr(owner, "is_transposed", None)
        if told is not None:
            return bool(told)
        branch = self.of_branch.get(name)
        width = branch.site.width if branch else None
        _, rows, columns = self.parameters[name].shape
        is_last = branch is not None and name in branch.last
        return rows != columns and width == (columns if is_last else rows)

    def _branch(self, add: Add, site: Site) -> Branch:
        ends_with = last_layers_of(add.branches, stop=lambda op: op is add.source)
        inside = self._names(parameters_of(add.region))
        last, scales = self._names(ends_with.weights), self._names(ends_with.scales)
        matrices = [name for name in self.parameters if name in inside and self.layout(name) is not None]
        return Branch(
            site,
            inside=inside | last | scales,
            last=last or frozenset(matrices[-1:]),
            norms=self._names(ends_with.norms),
            scales=scales,
            shortcut=self._names(parameters_of(between(add.source, add.shortcut) - {add.source})),
            depth=max(depth_of(add.region), 1),
        )

    def _names(self, names: Iterable[str]) -> frozenset[str]:
        """Names of parameters, or paths of modules, without buffers; of several names for one the first."""
        found = set()
        for name in names:
            value = attribute_at(self.model, name)
            if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
                found.add(self.first_name.get(id(value), name))
        return frozenset(found)

    def _projections(self, adds: Sequence[Add]) -> dict[str, Parts]:
        """Parameter name -> its parts q, k, v, each with its layout."""
        found: dict[str, Parts] = {}
        for add, branch in zip(adds, self.branches, strict=True):
            if branch.site.kind == "ffn":
                continue
            try:
                projections = find_projections(self.flow, branch.site, self.patterns, add)
            except UnsupportedTopology:
                continue
            for path, parts in _parts(projections.paths, projections.fused, self.model):
                (name,) = self._names([path])
                if name in self.parameters:
                    found.setdefault(name, parts)
        return found

    def _classifier(self, outside: list[str]) -> str | None:
        """Name of the weight that makes the network's output: by the model's getter, its forward, or a name."""
        for getter in ("get_output_embeddings", "get_classifier"):
            weight = getattr(_called(getattr(self.model, getter, None)), "weight", None)
            if id(weight) in self.first_name:
                return self.first_name[id(weight)]
        last = self._names(last_layers_of(self.flow.outputs[:1], stop=self._in_branch).weights)
        own = [name for name in outside if name in last]
        if own:
            return own[-1]
        if (self.flow.outputs and "" not in self.flow.unread) or not outside or not self._after_branches(outside[-1]):
            return None
        is_row = type(self.model).forward is nn.Sequential.forward
        return outside[-1] if is_row or OUTPUT_LAYER.search(outside[-1]) else None

    def _in_branch(self, op: Op) -> bool:
        """Whether ``op`` is a residual add, or runs in a module of a branch."""
        leaf = op.leaf
        if leaf is None:
            return op in self._sums
        return any(self.first_name.get(id(parameter)) in self.of_branch for parameter in leaf.parameters())

    def _after_branches(self, name: str) -> bool:
        """Whether a parameter comes after those of all branches, in the model's order."""
        order = list(self.parameters)
        return order.index(name) > max((order.index(n) for n in self.of_branch), default=-1)

    def _first(self, outside: list[str]) -> frozenset[str]:
        """For each branch, the first weight before it in the model's order."""
        order = {name: number for number, name in enumerate(self.parameters)}
        starts = [min(order[name] for name in branch.inside) for branch in self.branches if branch.inside]
        first = [[name for name in outside if order[name] < start][:1] for start in starts]
        return frozenset(name for names in first or [outside[:1]] for name in names)


def _parts(paths: tuple[str, ...], fused: Fused | None, block: nn.Module) -> Iterator[tuple[str, Parts]]:
    """Names, relative to ``block``, of the parameters of projections, with their parts."""
    modules = dict(block.named_modules(remove_duplicate=False))
    if any(path not in modules for path in paths):  # products with parameters, whose layout is unknown
        return
    module = modules[paths[0]]
    if isinstance(module, nn.MultiheadAttention):
        if module.kdim == module.vdim == module.embed_dim:  # one matrix
            size = module.embed_dim
            rows = [(role, StorageLayout(rows=(1, n * size, size))) for n, role in enumerate("qkv")]
            yield f"{paths[0]}.in_proj_weight", rows
        else:
            for role in "qkv":
                yield f"{paths[0]}.{role}_proj_weight", [(role, StorageLayout())]
    elif fused is not None:
        starts = (0, fused.sizes[0], fused.sizes[0] + fused.sizes[1])
        rows = [
            (role, StorageLayout(rows=(fused.groups, start, size)))
            for role, start, size in zip("qkv", starts, fused.sizes, strict=True)
            if size
        ]
        yield f"{paths[-1]}.weight", rows
        if len(paths) == 2:
            yield f"{paths[0]}.weight", [("qkv"[fused.sizes.index(0)], StorageLayout())]
    elif len(paths) == 3:
        for role, path in zip("qkv", paths, strict=True):
            yield f"{path}.weight", [(role, StorageLayout())]


def _called(getter: object) -> Any:
    """The result of a model's getter; None if it has none, or does not support it."""
    try:
        return getter() if callable(getter) else None
    except (AttributeError, NotImplementedError, TypeError):
        return None
