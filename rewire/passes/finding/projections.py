"""Finder: where an attention projects its queries, keys and values: by patterns, else by names, else by use."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from torch import nn

from rewire.conventions import FUSED_QKV, QKV, is_joint_attention, out_features
from rewire.errors import UnsupportedTopology
from rewire.mixes.fused_qkv import Fused
from rewire.passes.finding.adds import Add
from rewire.passes.finding.attention import MULTIHEAD, attentions, projections_in, shared_in, weight_of
from rewire.passes.finding.flow import Flow
from rewire.passes.finding.fused import as_fused, features_in
from rewire.patterns import Pattern
from rewire.torch_internals import module_at
from rewire.trunk import Site

#: Paths from the model's root, and the layout of a fused projection if known.
_Candidate: TypeAlias = tuple[tuple[str, ...], Fused | None]


@dataclasses.dataclass(frozen=True)
class Projections:
    """Where an attention projects its input.

    Attributes:
        where: path of the attention from the model's root.
        paths: the three projections (q, k, v); or one that is fused; or one of the three, and a fused one of the other
            two; or a torch.nn.MultiheadAttention. A product with a weight in a forward goes by the weight's name, or
            the slicing of one.
        fused: layout of a fused projection's output; None for three separate ones.
        beside: other maps that read the input of the queries, the keys or the values: path -> ``q``, ``k`` or ``v``.
    """

    where: str
    paths: tuple[str, ...]
    fused: Fused | None
    beside: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def ways(self) -> dict[str, str]:
        """Path of each map that reads one of the three inputs -> ``q``, ``k`` or ``v``; any of them for a fused one."""
        alone = "qkv"[self.fused.sizes.index(0)] if self.fused and len(self.paths) == 2 else "q"
        ways = "qkv" if len(self.paths) != 2 else (alone, *"qkv".replace(alone, ""))
        return {**dict(zip(self.paths, ways, strict=False)), **self.beside}

    @property
    def fused_path(self) -> str | None:
        """Path of the fused projection, if there is one."""
        return self.paths[-1] if self.fused else None

    def error(self, why: str) -> UnsupportedTopology:
        return UnsupportedTopology(
            f"the attention '{self.where}' cannot have separate q/k/v inputs: {why}. Use a topology that "
            "reads one value, or register a pattern whose `qkv` names the projections that its forward calls."
        )


def kind_by_use(flow: Flow, site: Site, found: Iterable[Pattern], add: Add) -> str:
    """The kind of a branch, corrected if its use says more than its name.

    An ``attention`` whose keys and values do not come from the stream is a ``cross-attention``. One without a softmax
    and without projections by name is a ``linear-attention``, which reads one value. A ``branch`` with a softmax and
    projections is an ``attention``.
    """
    if site.kind not in ("attention", "branch") or any(op.name == MULTIHEAD for op in add.region):
        return site.kind
    own = [[value in add.region for value in values] for _, values in attentions(flow, add)]
    if site.kind == "attention" and own:
        return "cross-attention" if all(values == [True, False, False] for values in own) else "attention"
    if site.kind == "branch" and not own:
        return "branch"
    try:
        find_projections(flow, site, found, add)
    except UnsupportedTopology:
        return "linear-attention" if site.kind == "attention" else "branch"
    return "attention"


def find_projections(flow: Flow, site: Site, found: Iterable[Pattern], add: Add) -> Projections:
    """The projections of one attention: as patterns declare them, else by their usual names, else by their use.

    Args:
        flow, site: the flow, and the attention's residual add.
        found: patterns of the model, the most specific first.
        add: the same residual add in the flow.

    Raises:
        UnsupportedTopology: they were not found; the message says what a pattern would have to name.
    """
    model = flow.model
    found = list(found)
    known = projections_in(flow, add)
    if len(known) > 1:
        raise UnsupportedTopology(
            f"the attention '{site.name}' cannot have separate q/k/v inputs: it is {len(known)} attentions side by "
            "side, each with projections of its own. Use a topology that reads one value."
        )
    by_use, others = known[0] if known else ((), {})
    called = {scope.path for op in add.region for scope in op.scope.outward() if not scope.helper}
    called |= {weight_of(op) for op in add.region}
    used = [by_use] if by_use and (by_use[0] in called or module_at(model, by_use[0]) is not None) else []
    usual = [paths for paths in _usual_paths(model, site) if not used or {*paths} != {*used[0]}]  # names may mislead
    candidates = [*_declared(model, site, found), *((paths, None) for paths in (*usual, *used))]
    # In a joint attention of two streams, modules with usual names may read the other stream.
    for paths, declared in sorted(candidates, key=lambda candidate: not called.issuperset(candidate[0])):
        fused = _layout(flow, site, add, paths, declared)
        if fused is not None or not _needs_layout(model, paths):
            beside = _beside(model, site, found)
            if not beside and by_use == paths:
                beside = others
            return Projections(site.name, paths, fused, beside)
    use = "It was traced without inputs: pass example_inputs. Or use" if add.op.node is not None else "Use"
    below = [name for name, child in _below(model, site).items() if name and isinstance(child, nn.Linear)]
    why = shared_in(flow, add) or "its queries, keys and values were not found, by names or by use"
    raise UnsupportedTopology(
        f"the attention '{site.name}' cannot have separate q/k/v inputs: {why} "
        f"(linear maps of '{site.block}': {', '.join(below) or 'none'}). "
        f"{use} a topology that reads one value, or register a pattern with `qkv` set to the paths of the three below "
        "the block (or of a fused one, and `fused` to the layout of its output)."
    )


def _layout(flow: Flow, site: Site, add: Add, paths: tuple[str, ...], declared: Fused | None) -> Fused | None:
    """The layout of a fused projection's output: as the forward uses it, else as a pattern declares it.

    Raises:
        UnsupportedTopology: the forward uses it in another order than q, k, v, or in parts of several sizes; or the
            projection returns more than a tensor.
    """
    if not _needs_layout(flow.model, paths):
        return None
    path = paths[-1]
    if any(call.returns_more for call in flow.calls if call.path == path and not call.helper):
        raise UnsupportedTopology(
            f"the attention '{site.name}' cannot have separate q/k/v inputs: '{path}' makes all three, and returns "
            "more than one tensor. Let it return its features alone, or use a topology that reads one value."
        )
    features = features_in(flow, add, path, out_features(module_at(flow.model, path)) or 0, site.width or 0)
    fused = as_fused(features)
    if len({*features}) + len(paths) != 4:  # it makes all three, or two if another projection makes the third
        return declared
    if fused is not None:
        return fused
    order = [*dict.fromkeys(features)]
    if order != [way for way in "qkv" if way in order]:
        how = f"in the order {', '.join(order)}. Let it make queries, keys and values in this order"
    else:
        how = "in parts of several sizes. Let it make all queries, then all keys, then all values"
    raise UnsupportedTopology(
        f"the attention '{site.name}' cannot have separate q/k/v inputs: '{path}' makes them {how}, or use a "
        "topology that reads one value."
    )


def _declared(model: nn.Module, site: Site, found: Iterable[Pattern]) -> Iterator[_Candidate]:
    """Paths that patterns name and the model has; for a fused one, with the layout that the pattern gives."""
    for pattern in found:
        paths = _named(model, site, pattern.qkv)
        if paths is None:
            continue
        fused = None
        if pattern.fused and len(paths) == 1:
            holder = model.get_submodule(paths[0].rpartition(".")[0])
            fused = pattern.fused(model.get_submodule(paths[0]), holder)
        yield paths, fused


def _beside(model: nn.Module, site: Site, found: Iterable[Pattern]) -> dict[str, str]:
    """Other maps of the attention that a pattern names and the model has -> the input that they read."""
    for pattern in found:
        paths = _named(model, site, tuple(pattern.beside))
        if paths is not None:
            return dict(zip(paths, pattern.beside.values(), strict=True))
    return {}


def _named(model: nn.Module, site: Site, names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Paths, from the model's root, of modules that a pattern names; None if the model does not have all of them."""
    for block in _blocks(site) if names else ():
        branch = site.name.removeprefix(block).lstrip(".")
        paths = tuple(_join(block, name.format(branch=branch)) for name in names)
        if all(module_at(model, path) is not None for path in paths):
            return paths
    return None


def _blocks(site: Site) -> Iterator[str]:
    """The block of a residual add, and the modules around it."""
    path = site.block
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _usual_paths(model: nn.Module, site: Site) -> list[tuple[str, ...]]:
    """Paths of modules with the usual names, those in the branch first."""
    modules = _below(model, site)
    linear = [path for path, child in modules.items() if getattr(child, "weight", None) is not None]
    weighted = [path for path, child in modules.items() if next(child.parameters(), None) is not None]  # LoRA by hand
    parents = [path for path in modules if path == site.branch or path.startswith(f"{site.branch}.")]
    parents.append(site.branch.rpartition(".")[0])  # if the branch itself is a projection
    found: list[tuple[str, ...]] = [(path,) for path in parents if is_joint_attention(modules.get(path))]
    for parent in parents:
        prefix = f"{parent}." if parent else ""
        for names in QKV:
            paths = tuple(prefix + name for name in names)
            if set(paths).issubset(weighted):
                found.append(paths)
        children = [path for path in linear if path.startswith(prefix) and "." not in path[len(prefix) :]]
        found += [(path,) for path in children if FUSED_QKV.search(path[len(prefix) :])]
    return [tuple(_join(site.block, path) for path in paths) for paths in found]


def _below(model: nn.Module, site: Site) -> dict[str, nn.Module]:
    """The modules of a block by their paths below it; empty for a flat graph."""
    block = module_at(model, site.block)
    return {} if block is None else dict(block.named_modules())


def _join(*paths: str) -> str:
    return ".".join(filter(None, paths))


def _needs_layout(model: nn.Module, paths: tuple[str, ...]) -> bool:
    """Whether ``paths`` name one fused projection, which can be fed only if the layout of its output is known."""
    return len(paths) != 3 and not is_joint_attention(module_at(model, paths[0]))
