"""The role of every parameter, from the graphs of a network, or else from the module that owns it."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from rewire.attributes import CONNECTIONS
from rewire.code.functions import forward_of
from rewire.conventions import EMBEDDING_TABLE, EXPERTS, FUSED_GATE, MODULATION, QKV, ROUTER, is_adaptive_norm, is_norm
from rewire.init.last_layers import matrix_of
from rewire.init.layout import StorageLayout
from rewire.init.network import Branch, Network
from rewire.init.table import Roles, Weight
from rewire.passes.finding.flow import Op
from rewire.passes.rewrite import restore
from rewire.runtime.connection import connections


def roles(model: nn.Module) -> Roles:
    """The role of every parameter of ``model``: first layer, inside a branch, last of a branch, q, k, v, and so on.

    Roles come from the graphs of the forwards. Only norms are run, each by itself, and parameters may be on the meta
    device. Compute roles before the model is sharded or compiled, and pass them to `rewire.initialize`.

    Args:
        model: any module, rewired or not.

    Returns:
        A table with at least one row for each parameter, tied ones once; printing it shows it.

    Example:
        >>> {weight.name: weight.role for weight in rewire.roles(model)}["blocks.0.mlp.down.weight"]
        'last'
    """
    plain = restore(model) if connections(model) else model
    network = Network(plain)
    rows = [row for name in network.parameters for row in _rows(network, name)]
    rows += [
        Weight(name, "connection", "a weight of the topology", tuple(parameter.shape))
        for name, parameter in model.named_parameters()
        if CONNECTIONS in name.split(".")
    ]
    return Roles(tuple(rows), network.adds, network.relu())


def _rows(network: Network, name: str) -> Iterator[Weight]:
    """The row of one parameter, or the rows of its parts."""
    parameter, owner = network.parameters[name], network.owner(name)
    layout, branch = network.layout(name), network.of_branch.get(name)
    facts: dict[str, Any] = {}
    if branch is not None:
        site = branch.site
        facts = {"branch": site.name, "block": site.block, "depth": branch.depth, "width": site.width}
    tied = _tied_embedding(network, name)
    if layout is None or tied:
        role, because = ("embedding", tied) if tied else _role_of_vector(network, name)
        offset = _gain_offset(owner) if role in ("norm", "last norm") else 0.0
        yield Weight(name, role, because, tuple(parameter.shape), **facts, offset=offset)
        return
    for role, because, part in _roles_of_matrix(network, name, layout):
        groups = getattr(owner, "groups", 1)
        yield Weight(name, role, because, part.shape(parameter), part, **facts, groups=groups)


def _tied_embedding(network: Network, name: str) -> str:
    """Why a parameter that is used in several places counts as an embedding; empty if it does not."""
    names = network.aliases[name]
    tables = [alias for alias in names if isinstance(network.owner(alias), nn.Embedding)]
    others = [alias for alias in names if alias not in tables]
    return f"tied with {', '.join(others)}" if tables and others else ""


def _role_of_vector(network: Network, name: str) -> tuple[str, str]:
    """The role of a parameter that is no matrix, and how it is known."""
    path, _, leaf = name.rpartition(".")
    owner, parameter = network.owner(name), network.parameters[name]
    kind = type(owner).__name__
    branch = network.of_branch.get(name)
    if ".parametrizations." in f".{name}":
        return "other", "parametrised: its values are not the weight"
    if not parameter.is_floating_point():
        return "other", f"of dtype {parameter.dtype}"
    if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding", f"of {kind}"
    if is_norm(owner):
        if branch is not None and path in branch.norms and leaf != "bias":
            return "last norm", f"{kind} at the end of {branch.site.name}"
        return "norm", f"of {kind}"
    if leaf.endswith("bias") or leaf.startswith("bias"):
        modulator = _modulator(network, name)
        return ("modulation", f"inside {modulator}") if modulator else ("bias", f"of {kind}")
    if branch is not None and name in branch.scales:
        return "scale", f"multiplies the branch {branch.site.name}"
    if EMBEDDING_TABLE.search(leaf):
        return "embedding", "by its name"
    if parameter.ndim < 2:
        return "other", f"a vector of {kind} that is no bias, gain or scale"
    return "other", f"a parameter of {kind}: which dimension is its input is not known"


def _roles_of_matrix(network: Network, name: str, layout: StorageLayout) -> Iterator[tuple[str, str, StorageLayout]]:
    """The role of each part of a matrix, how it is known, and the layout of the part."""
    branch = network.of_branch.get(name)
    site = branch.site.name if branch is not None else ""
    if name in network.projections:
        for role, part in network.projections[name]:
            yield role, f"projection of {site}", dataclasses.replace(layout, rows=part.rows)
    elif modulator := _modulator(network, name):
        yield "modulation", f"inside {modulator}", layout
    elif branch is not None and name in branch.last:
        yield "attention output" if _ends_attention(network, branch, name) else "last", f"ends {site}", layout
    elif name in network.shortcuts:
        yield "shortcut", "projects the shortcut", layout
    elif branch is not None and _is_router(network, name):
        yield "router", f"scores the experts of {site}", layout
    elif which := _q_k_or_v(network, name):
        yield which, "by its name", layout
    elif branch is not None and (halves := _gate_and_gated(network, name, layout)):
        for half in halves:
            yield "branch", f"in {site}, one half of a gate", dataclasses.replace(layout, rows=half)
    elif branch is not None:
        yield "branch", f"in {site}", layout
    elif name == network.classifier:
        yield "classifier", "the network's output", layout
    elif name in network.first:
        yield "first", "comes first", layout
    else:
        yield "layer", "outside of the branches", layout


def _ends_attention(network: Network, branch: Branch, name: str) -> bool:
    site = branch.site
    if site.kind == "parallel":
        return name.startswith(f"{site.name}.")
    return "attention" in site.kind or not branch.inside.isdisjoint(network.projections)


def _modulator(network: Network, name: str) -> str:
    """The adaptive norm, or other modulation, that a parameter belongs to; empty if there is none."""
    parts = name.split(".")[:-1]
    for end in range(len(parts), 0, -1):
        path = ".".join(parts[:end])
        module = network.model.get_submodule(path)
        if is_adaptive_norm(module) or MODULATION.search(parts[end - 1]):
            return f"{type(module).__name__} '{path}'"
    return ""


def _is_router(network: Network, name: str) -> bool:
    parent = name.removesuffix(".weight").rpartition(".")[0]
    below = (path for path, _ in network.model.get_submodule(parent).named_modules())
    return bool(ROUTER.search(name)) and any(map(EXPERTS.search, below))


def _q_k_or_v(network: Network, name: str) -> str:
    """q, k or v, for one of three siblings with such names; otherwise empty."""
    parent, _, own = name.removesuffix(".weight").rpartition(".")
    siblings = {child for child, _ in network.model.get_submodule(parent).named_children()}
    return next(("qkv"[names.index(own)] for names in QKV if own in names and siblings.issuperset(names)), "")


def _gate_and_gated(network: Network, name: str, layout: StorageLayout) -> list[tuple[int, int, int]]:
    """The rows of the gate and of the gated values, if one weight computes both; otherwise empty."""
    owner = network.owner(name)
    if layout.stacked:
        gated, apart = bool(FUSED_GATE.search(name)), getattr(owner, "is_concatenated", True)
    else:
        made = [op for op in network.flow if name in (matrix_of(op), f"{op.scope.path}.weight")]
        gated, apart = any(_takes_halves(user) for op in made for user in network.flow.users[op]), True
    rows = layout.shape(network.parameters[name])[1 if layout.stacked else 0]
    if not gated or rows % 2:
        return []
    half = rows // 2
    return [(1, 0, half), (1, half, half)] if apart else [(half, 0, 1), (half, 1, 1)]


def _takes_halves(op: Op) -> bool:
    return op.name == "chunk" and op.sizes[:1] == (2,)


def _gain_offset(norm: nn.Module) -> float:
    """1 for a norm that multiplies by one plus its weight (as in Gemma), else 0."""
    try:
        text = inspect.getsource(forward_of(norm).function or type(norm))
    except (OSError, TypeError):
        return 0.0
    return float(bool(re.search(r"\b1(\.0)? \+ self\.weight", text)))
