"""Pass: choose the topology of each trunk, and which of its residual adds form a unit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rewire.errors import UnknownName, UnsupportedTopology, WidthMismatch
from rewire.logs import rewrite as log
from rewire.runtime.layout import Layout
from rewire.topologies import Topology, make_topology
from rewire.topologies.base import Dims, Recurrence, Start
from rewire.topologies.registry import placed_topology
from rewire.trunk import Trunk

#: Why a topology does not fit a trunk.
_NO_WIDTH = (
    "the topology has weights per channel, and the width of the trunk is not known, as no module next to its residual "
    "adds has a weight that determines it"
)


def choose(trunks: Sequence[Trunk], topologies: Mapping[str, Topology], granularity: str) -> list[Layout]:
    """The layout of each trunk that a key of ``topologies`` names.

    The empty key leaves out trunks of unknown width where the topology needs that, such as sums of attention scores.

    Raises:
        UnknownName: a key names no trunk.
        UnsupportedTopology, WidthMismatch: a topology does not fit its trunk.
    """
    check_names(topologies, trunks)
    pairs = assigned(trunks, topologies)
    left = [trunk for trunk, key in pairs if not key and topologies[key].needs_width and not trunk.widths]
    if len(left) == len(pairs):
        left = []  # all are refused, with the reason
    for trunk in left:
        log.warning("trunk '%s' was left as it is: %s", trunk.name, _NO_WIDTH)
    return [layout_of(trunk, topologies[key], granularity) for trunk, key in pairs if trunk not in left]


def chosen_topologies(
    topology: str | Topology | Mapping[str, str | Topology],
    options: dict[str, Any],
    names: Sequence[str] | None,
    start: Start,
) -> dict[str, Topology]:
    """Topologies by name of a trunk, or part of one; the empty key stands for all trunks."""
    if names is not None and not (isinstance(names, Collection) and all(isinstance(name, str) for name in names)):
        raise TypeError("trunks has to hold the names of trunks: rewire.inspect(model) shows them.")
    if not isinstance(topology, Mapping):
        if names is not None and len(names) == 0:
            raise ValueError("trunks is empty: it names no trunk. Leave it out to rewire all of them.")
        chosen = make_topology(topology, options, start)
        return dict.fromkeys([names] if isinstance(names, str) else names or ("",), chosen)
    if options or names is not None:
        given = "trunks" if names is not None else f"options {sorted(options)}"
        raise TypeError(
            f"{given} cannot be combined with a dict of topologies: its keys name the trunks, and options go into "
            'Topology objects, as in {"encoder": rewire.ANCRe(temperature=0.1)}.'
        )
    if not topology:
        raise ValueError("the dict of topologies is empty: it names no trunk.")
    return {name: make_topology(value, {}, start) for name, value in topology.items()}


def named_by(key: str, trunks: Sequence[Trunk]) -> list[Trunk]:
    """The trunks that ``key`` names: the one with this name, else those with names that contain it."""
    return [trunk for trunk in trunks if trunk.name == key] or [t for t in trunks if has_part(t.name, key)]


def assigned(trunks: Sequence[Trunk], keys: Collection[str]) -> list[tuple[Trunk, str]]:
    """Each trunk that a key names, with that key."""
    pairs = []
    for trunk in trunks:
        own = [key for key in keys if trunk in named_by(key, trunks)]
        if len(own) > 1:
            raise ValueError(f"trunk '{trunk.name}' is named by several keys: {', '.join(map(repr, own))}.")
        pairs += [(trunk, key) for key in own]
    return pairs


def check_names(keys: Collection[str], trunks: Sequence[Trunk]) -> None:
    """Refuse keys that name none of ``trunks``.

    Raises:
        UnknownName: with the names of the trunks.
    """
    for key in keys:
        if key and not named_by(key, trunks):
            known = ", ".join(trunk.name for trunk in trunks) or "none"
            raise UnknownName(f"the model has no trunk '{key}'; its trunks are {known}.")


def has_part(name: str, key: str) -> bool:
    """Whether ``key`` is a sequence of parts of the dotted ``name``. Every name contains the empty key."""
    return not key or f".{key}." in f".{name}."


def layout_of(trunk: Trunk, topology: Topology, granularity: str) -> Layout:
    """Assign each residual add of a trunk to a unit of the topology."""
    widths = trunk.widths
    if len(widths) > 1:
        raise WidthMismatch(
            f"the residual adds of trunk '{trunk.name}' have different widths ({', '.join(map(str, sorted(widths)))}), "
            "and states of one trunk are mixed: pass trunks=[...] to leave it out."
        )
    if topology.needs_width and not widths:
        raise UnsupportedTopology(
            f"topology '{topology.registered_name}' does not fit trunk '{trunk.name}': {_NO_WIDTH}. Use a topology "
            "with one weight per state."
        )
    other = next((site for site in trunk.sites if site.width and site.channel_dim != trunk.channel_dim), None)
    if topology.needs_width and other is not None:
        raise UnsupportedTopology(
            f"topology '{topology.registered_name}' has weights per channel, and the hidden states of trunk "
            f"'{trunk.name}' have their channels in dimension {trunk.channel_dim} at '{trunk.sites[0].name}' and in "
            f"{other.channel_dim} at '{other.name}'. Use a topology with one weight per state ('ancre-ingoing', "
            "'denseformer'), or write the blocks so that channels keep their place between the residual adds."
        )
    if topology.by_token and trunk.turned:
        raise UnsupportedTopology(
            f"topology '{topology.registered_name}' has values per token, which cannot follow where, between residual "
            f"adds of trunk '{trunk.name}', the channels leave their dimension, {trunk.channel_dim}: use a topology "
            "with one weight per state ('ancre-ingoing', 'denseformer'), or keep channels in their place."
        )
    if trunk.post_norm and not isinstance(topology, Recurrence):
        site = next(site for site in trunk.sites if site.post and not site.affine)
        raise UnsupportedTopology(
            f"trunk '{trunk.name}' is post-norm (in '{site.block}' {site.post[-1]} makes the next state of the "
            f"residual add's sum), and topology '{topology.registered_name}' connects the branch outputs of pre-norm "
            "blocks only. Topologies that connect states take such trunks: 'ancre-ingoing', 'denseformer' or "
            "'muddformer'."
        )
    one_add_each = trunk.blocks == len(trunk.sites)
    if granularity == "block" and trunk.post_norm and not one_add_each:
        raise UnsupportedTopology(
            f"trunk '{trunk.name}' is post-norm: inside a block the state passes a norm, so that the block has no "
            "branch output of its own. Use granularity='sublayer'."
        )
    if granularity == "block" and trunk.blocks == 1:
        raise UnsupportedTopology(
            f"trunk '{trunk.name}' is one block: there is nothing to connect it with. Use granularity='sublayer', "
            f"which connects its {len(trunk.sites)} residual adds."
        )
    resolved = topology.granularity if granularity == "auto" else granularity
    separate = resolved == "sublayer" or trunk.post_norm or trunk.blocks == 1
    separate |= any(site.in_place for site in trunk.sites)  # it would write to what a unit has read
    units = tuple(range(1, len(trunk.sites) + 1)) if separate else trunk.units
    topology = placed_topology(topology, [trunk.sites[n].kind for n in _opening(units)])
    attention = _attention_units(trunk, topology, units)
    return Layout(trunk.name, topology, units, trunk.width, attention, **trunk.facts)


def _opening(units: Sequence[int]) -> list[int]:
    """The new text of each function. Errors in an attention, which has no trunk, name the trunk planned before it."""
    return [n for n in range(len(units)) if n == 0 or units[n] != units[n - 1]]


def _attention_units(trunk: Trunk, topology: Topology, units: Sequence[int]) -> Collection[int]:
    """Units that begin with an attention, if the topology gives attentions separate q/k/v inputs."""
    if not topology.reads_qkv:
        return []
    found = [units[n] for n in _opening(units) if trunk.sites[n].kind in ("attention", "parallel")]
    others = [trunk.sites[n].name for n in _opening(units) if trunk.sites[n].kind == "linear-attention"]
    if others:
        log.warning(
            "'%s'%s: one read for queries, keys and values, as no softmax attention was found there",
            others[0],
            f" and {len(others) - 1} more" if len(others) > 1 else "",
        )
    return topology.attention_units(Dims(units[-1], trunk.width, frozenset(found)))
