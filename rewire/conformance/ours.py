"""rewire's own topologies as implementations, for the checker."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rewire.conformance.running import Branch, Implementation
from rewire.conformance.schemes import Options, reference
from rewire.topologies import Topology
from rewire.topologies.base import Dims, QKVInputs, materialize
from rewire.topologies.registry import make_topology, name_and_options

Weights = Mapping[str, Tensor]
#: Converts the weights of a reference to those of a topology, by name.
Packing = Callable[[Weights, Dims, Options], dict[str, Tensor]]


def ours(scheme: str, **options: object) -> Implementation:
    """The topology of this name with the reference's options, as an implementation."""
    known, topology = reference(scheme), topology_of(scheme, options)
    chosen = known.with_options(options)

    def implementation(x: Tensor, weights: Weights, branches: Sequence[Branch]) -> Tensor:
        dims = dims_of(x, branches)
        return trunk(topology, packed(known.file, weights, dims, chosen), x, branches, dims)

    return implementation


def topology_of(scheme: str, options: Options) -> Topology:
    """The topology with the reference's options, whose defaults are the paper's.

    Raises:
        ValueError: an option that is a constant of the topology, such as the epsilon of most norms.
    """
    known = reference(scheme)
    chosen = {name: value for name, value in known.with_options(options).items() if name not in known.fixed}
    accepted = name_and_options(make_topology(scheme, {}))[1]
    renamed = {"eps": "start"} if scheme == "layerscale" else {}
    found = {name: chosen[renamed.get(name, name)] for name in accepted if renamed.get(name, name) in chosen}
    left = options.keys() - {renamed.get(name, name) for name in found}
    if left:
        raise ValueError(f"the topology '{scheme}' has no option for {', '.join(sorted(left))}.")
    return make_topology(scheme, found)


def dims_of(x: Tensor, branches: Sequence[Branch]) -> Dims:
    attention = frozenset(t for t, branch in enumerate(branches, start=1) if branch.attention)
    return Dims(len(branches), x.shape[-1], attention)


def trunk(
    topology: Topology, parameters: dict[str, Tensor], x: Tensor, branches: Sequence[Branch], dims: Dims
) -> Tensor:
    """Run a trunk as a stream does, unit by unit."""
    weights = topology.weights(parameters, dims)
    states = topology.start(x, weights)
    for t, branch in enumerate(branches, start=1):
        read, states = topology.read(states, weights, t)
        ways = 4 if branch.attention else 1  # unit 1 of Attention Residuals has one source, which it reads as it is
        inputs = (read.q, read.k, read.v, read.residual) if isinstance(read, QKVInputs) else (materialize(read),) * ways
        states = topology.write(states, weights, t, branch(*inputs))
    return topology.finish(states, weights, dims)


def packed(file: str, weights: Weights, dims: Dims, options: Options) -> dict[str, Tensor]:
    """The weights of a reference in the topology's layout."""
    return _PACKINGS[file](weights, dims, options)


def _renamed(**names: str) -> Packing:
    """Packing that only renames weights: ``ours="theirs"``."""

    def packing(weights: Weights, dims: Dims, options: Options) -> dict[str, Tensor]:
        return {ours: weights[theirs] for ours, theirs in names.items() if theirs in weights}

    return packing


def _states_read(t: int, block: int | None) -> list[int]:
    """The indices i of the sources ``x_i`` of read t."""
    return [i for i in range(t) if i % (block or 1) == 0 or i == t - 1]


def _stack_read(t: int, options: Options) -> int:
    """The number of vectors in the stack of read t."""
    last, block = options.get("last"), options["block"] or 1
    return min(t, last + 2) if last else 1 - (1 - t) // block


def _ancre(weights: Weights, dims: Dims, options: Options) -> dict[str, Tensor]:
    rows = [weights["c"][t - 1, _states_read(t, options["block"])] for t in range(1, dims.depth + 1)]
    return {"logits": torch.cat(rows)}


def _denseformer(weights: Weights, dims: Dims, options: Options) -> dict[str, Tensor]:
    dilation, period, block = options["dilation"], options["period"], options["block"]
    rows = []
    for t in range(period, dims.depth + 1, period):
        averaged = _states_read(t + 1, block) if block else range(t % dilation, t + 1, dilation)
        rows.append(weights["alpha"][t - 1, list(averaged)])
    return {"alpha": torch.cat(rows)}


def _grn(weights: Weights, dims: Dims, options: Options) -> dict[str, Tensor]:
    b, w = list[Tensor](), list[Tensor]()
    for t in range(1, dims.depth + 2):
        size, row = _stack_read(t, options), weights["b"][t - 1]
        ways = 3 if t in dims.attention else 1
        b += [row[way, :size] for way in range(ways)] if options["qkv"] else [row[:size]]
        if options["dependent"]:
            w.append(weights["w"][t - 1][:ways] if options["qkv"] else weights["w"][t - 1][None])
    return {"b": torch.cat(b)} | ({"w": torch.cat(w)} if w else {})


def _attnres(weights: Weights, dims: Dims, options: Options) -> dict[str, Tensor]:
    rows = []
    for t in range(2, dims.depth + (1 if options["additive"] else 2)):
        row = weights["w"][t - 2]
        rows.append(row[: 3 if t in dims.attention else 1] if options["qkv"] else row[None])
    return {"queries": torch.cat(rows) if rows else weights["w"].new_zeros(0, weights["w"].shape[-1])}


def _muddformer(weights: Weights, dims: Dims, options: Options) -> dict[str, Tensor]:
    static, w1, w2 = list[Tensor](), list[Tensor](), list[Tensor]()
    for t in range(2, dims.depth + 2):
        n, ways = len(_states_read(t, options["block"])), 4 if t in dims.attention else 1
        static.append(weights["a"][t - 2, :ways, :n].flatten())
        w1.append(weights["W1"][t - 2, :, :ways, :n].flatten(1).T)
        w2.append(weights["W2"][t - 2, :ways, :n, :ways, :n].flatten())
    found = {"static": torch.cat(static), "w1": torch.cat(w1), "w2": torch.cat(w2)}
    return found | ({"before": weights["g"], "after": weights["h"]} if options["norms"] else {})


def _hc(weights: Weights, dims: Dims, options: Options) -> dict[str, Tensor]:
    found = {"static": _beside(weights["A_m"], weights["A_r"], weights["B"], dims)}
    if "W_m" in weights:
        found["dynamic"] = _beside(weights["W_m"], weights["W_r"], weights["W_b"], dims)
        found["scale"] = torch.stack([weights["s_a"], weights["s_b"]], -1)
    if "last_A_m" in weights:
        found["last_static"] = weights["last_A_m"][:, None]
        if "last_W_m" in weights:
            found |= {"last_dynamic": weights["last_W_m"][:, None], "last_scale": weights["last_s_a"]}
    return found


def _beside(read: Tensor, carry: Tensor, write: Tensor, dims: Dims) -> Tensor:
    """Columns ``A_m | A_r | B`` of [T, rows], [T, rows, n] and [T, rows]; of fractions A_m is [T, rows, m]."""
    return torch.cat([read if read.dim() == 3 else read[..., None], carry, write[..., None]], -1)


def _mhc(weights: Weights, dims: Dims, options: Options) -> dict[str, Tensor]:
    kinds = ["pre", "post"] + ["res"] * ("b_res" in weights)
    static = [weights[f"b_{kind}"].flatten(1) for kind in kinds]
    dynamic = [weights[f"phi_{kind}"].flatten(2) for kind in kinds]
    if options["residual"] == "permutations":
        order = _orders(options["streams"])
        static[-1], dynamic[-1] = static[-1][:, order], dynamic[-1][..., order]
    found = {
        "static": torch.cat(static, -1),
        "dynamic": torch.cat(dynamic, -1),
        "scale": torch.stack([weights[f"alpha_{kind}"] for kind in kinds], -1),
    }
    if "s" in weights:
        found["entry"] = weights["s"]
    if "last_b" in weights:
        names = (("last_static", "last_b"), ("last_dynamic", "last_phi"), ("last_scale", "last_alpha"))
        found |= {ours: weights[theirs] for ours, theirs in names}
    return found


def _orders(n: int) -> list[int]:
    """For each permutation in rewire's order, its number in lexicographic order."""
    from rewire.topologies.manifolds import permutations

    eye, places = torch.eye(n), dict[tuple[float, ...], int]()
    for number, order in enumerate(itertools.permutations(range(n))):
        places[tuple(eye[list(order)].flatten().tolist())] = number
    return [places[tuple(row.tolist())] for row in permutations(n, torch.device("cpu"))]


def _laurel(weights: Weights, dims: Dims, options: Options) -> dict[str, Tensor]:
    found = {"logits": weights["c"]} if "c" in weights else {}
    if "A" in weights:
        found |= {"down": weights["A"].mT, "up": weights["B"].mT}
    if "g" in weights:
        last = options["last"]
        found["gains"] = torch.cat([weights["g"][t - 1, last - min(t, last) :] for t in range(1, dims.depth + 1)])
    return found


def _review(weights: Weights, dims: Dims, options: Options) -> dict[str, Tensor]:
    state, update = weights["W"].mT.chunk(2, dim=-2)
    return {"state": state, "update": update, "bias": weights["b"]}


def _lanes(weights: Weights, dims: Dims, options: Options) -> dict[str, Tensor]:
    before = max(0, dims.depth - options["last"])
    found = {"decay": weights["d"], "write": weights["w"][before:]}
    return found | ({"single": weights["w"][:before, 0]} if before else {})


_PACKINGS: Mapping[str, Packing] = {
    "ancre": _ancre,
    "ancre_cascaded": _renamed(scales="a"),
    "ancre_constant": _renamed(),
    "attnres": _attnres,
    "branch_scale": _renamed(scales="alpha"),
    "ddl": _renamed(gate="w", gate_bias="s", value="u", value_bias="c"),
    "denseformer": _denseformer,
    "fixed_scale": _renamed(),
    "frac_hc": _hc,
    "gpas": _renamed(gates="a"),
    "grn": _grn,
    "hc": _hc,
    "hc_gated": _renamed(norm="norm", down="down", up="up", inject="inject"),
    "lanes": _lanes,
    "laurel": _laurel,
    "mhc": _mhc,
    "muddformer": _muddformer,
    "multi_gate": _renamed(queries="w", gates="v", bias="c"),
    "orthogonal": _renamed(gates="c"),
    "residual": _renamed(),
    "residual_scale": _renamed(shortcut="a", branch="b", shortcut_bias="u", branch_bias="v"),
    "review": _review,
    "unet": _renamed(skip_weights="l"),
    "variance_gate": _renamed(gates="w"),
    "x0_lambdas": _renamed(resid_lambdas="l", x0_lambdas="m"),
}
