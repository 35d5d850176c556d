"""Pass: edit the forwards of a copy, and give it the connections that they call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from rewire.attributes import CONNECTIONS
from rewire.code.edited import is_edited
from rewire.copies import M, outside_inference_mode, shared
from rewire.errors import EditError, UnsupportedTopology
from rewire.logs import rewrite as log
from rewire.passes.editing.apply import apply, show_between, undo
from rewire.passes.editing.connect import StreamsToTensors, convert_collected, copy_norms, register
from rewire.passes.editing.edits import Key, Plans
from rewire.passes.editing.install import install
from rewire.passes.editing.other_methods import warn_of_other_methods
from rewire.passes.editing.plan import plan
from rewire.passes.editing.refused import check_types
from rewire.passes.editing.write import edited
from rewire.passes.find import NONE_RAN, Found
from rewire.passes.finding.projections import find_projections
from rewire.passes.prepare import Prepared
from rewire.runtime.connection import Connection, learned_connections
from rewire.runtime.layout import Layout
from rewire.topologies.base import Start
from rewire.torch_internals import children_of, forward_hooks

#: Added to errors of calls that take another path, if no run on the caller's inputs has shown that path.
_ADVICE = " It was rewired without example_inputs: pass some that take this way."


def rewrite(
    prepared: Prepared,
    found: Found,
    layouts: Sequence[Layout],
    start: Start,
    all_of_them: bool = True,
) -> nn.Module:
    """Rewire the prepared copy of a model, in place.

    Args:
        prepared, found, layouts: the model, and the trunks to rewire.
        start: of the connections.
        all_of_them: whether a trunk that cannot be edited is an error. Otherwise it is removed from ``found`` with a
            warning, if other trunks can be edited.

    Raises:
        EditError: a trunk cannot be edited.
        UnsupportedTopology: the topology has no such start, or does not fit a trunk.
    """
    rewired, trunks = prepared.model, found.trunks
    plans, texts, chosen = edits(prepared, found, layouts, all_of_them)
    made = {}
    for name, layout in chosen.items():
        trunk = trunks[name]
        device = next((parameter.device for parameter in rewired.get_submodule(trunk.owner).parameters()), None)
        try:
            made[name] = Connection(layout, start, device, trunk)
        except UnsupportedTopology as error:
            advice = " To leave the trunk out: trunks=[...]." * (len(chosen) > 1)
            raise UnsupportedTopology(f"trunk '{name}': {error}{advice}") from None
        register(rewired, trunk, made[name])
        log.info("trunk '%s': %s, %d units, start=%r", name, layout.topology, layout.dims.depth, start)
        convert_collected(rewired, trunk)
    texted = [(function, texts[key]) for key, function in plans.items()]
    apply(rewired, found.evaluation.flow.model, texted, made, "" if prepared.given else _ADVICE)
    warn_of_other_methods(found, plans)
    for each in found.report.left:
        if each.why == NONE_RAN and not all_of_them:
            log.warning("'%s': %s", each.path, each.why)
    for name in chosen:
        if found.training is not None and name not in found.training.trunks:
            why = "it adds out of sight there, in TorchScript or a kernel, or not at all, and may not train the weights"
            log.warning("trunk '%s': training mode makes no such residual stream: %s", name, why)
        show_between(rewired, trunks[name])
    if hasattr(type(rewired), "no_weight_decay") and not is_edited(rewired):
        install(rewired, {}, shared=True)  # so that its repr shows the connection weights, too
    copy_norms(rewired, set().union(*(function.copied for function in plans.values())))
    return rewired


def edits(
    prepared: Prepared, found: Found, layouts: Sequence[Layout], all_of_them: bool = False
) -> tuple[Plans, dict[Key, str], dict[str, Layout]]:
    """The plan of each function, the new texts, and the layouts of the edited trunks. For arguments see `rewrite`.

    Raises:
        EditError: see `rewrite`; ``found`` then loses that trunk, too.
    """
    chosen = {layout.trunk: layout for layout in layouts}
    while True:
        try:
            plans = _plans(prepared, found, chosen)
            return plans, _texts(prepared.model, plans, next(reversed(chosen), "")), chosen
        except _CannotEdit as failed:
            found.leave(failed.trunk, f"it cannot be edited: {failed.why}")
            if all_of_them or len(chosen) == 1:
                raise EditError(f"trunk '{failed.trunk}' cannot be edited: {failed.why}") from failed.why
            log.warning("trunk '%s' was left as it is: %s", failed.trunk, failed.why)
            del chosen[failed.trunk]


class _CannotEdit(Exception):
    """A trunk cannot be edited, but others may be."""

    def __init__(self, trunk: str, why: EditError) -> None:
        super().__init__(trunk, why)
        self.trunk, self.why = trunk, why


@contextlib.contextmanager
def _editing(trunk: str) -> Iterator[None]:
    try:
        yield
    except EditError as error:
        raise _CannotEdit(trunk, error) from error


def _plans(prepared: Prepared, found: Found, chosen: Mapping[str, Layout]) -> Plans:
    """The plans of all functions, for all trunks together."""
    entered: set[Key] = set()
    while True:
        plans: Plans = {}
        handed: set[Key] = set()
        for name, layout in chosen.items():
            layout.repeated = {}
            with _editing(name):
                handed |= _plan(prepared, found, layout, plans, entered)
        missed = {key for key in handed & plans.keys() if plans[key].entered}
        if not missed:
            return plans
        entered |= missed  # one trunk is only passed on there, but another one makes the function hold tensors


def _plan(prepared: Prepared, found: Found, layout: Layout, plans: Plans, entered: set[Key]) -> set[Key]:
    """Plan the edits for a trunk in both modes; return the functions that only pass its stream on."""
    trunk, handed = found.trunks[layout.trunk], set[Key]()
    separate = [number for number in range(len(trunk.sites)) if layout.sites[number].reads_qkv]
    for finding in (finding for finding in found.findings if trunk.name in finding.trunks):
        sites = finding.trunks[trunk.name].sites
        if len(sites) != len(trunk.sites):
            log.info("trunk '%s': %d of %d residual adds run in this mode", trunk.name, len(sites), len(trunk.sites))
            continue
        adds = finding.chains[trunk.name].adds
        projections = {n: find_projections(finding.flow, trunk.sites[n], prepared.patterns, adds[n]) for n in separate}
        norms = layout.topology.separate_norms
        passed_on, repeated = plan(finding, trunk.name, plans, prepared.forwards, projections, entered, norms)
        handed |= passed_on
        layout.repeated |= repeated
    return handed


def _texts(model: nn.Module, plans: Plans, trunk: str) -> dict[Key, str]:
    """The new text of each function. Errors in an attention, which has no trunk, name the trunk planned before it."""
    texts, classes = {}, {type(model.get_submodule(function.path)) for function in plans.values()}
    for key, function in plans.items():
        trunk = function.trunks[-1] if function.trunks else trunk
        with _editing(trunk):
            check_types(function, classes)
            texts[key] = edited(function)
    return texts


@outside_inference_mode
def restore(model: M) -> M:
    """The plain model of a rewired one: original forwards, no connection weights, the same (shared) parameters.

    Raises:
        RewireError: the model was not rewired.

    Example:
        >>> torch.equal(rewire.restore(rewired)(x), model(x))
        True
    """
    learned_connections(model, "there is nothing to restore")
    plain = shared(model)
    for module in plain.modules():
        undo(module)
        children_of(module).pop(CONNECTIONS, None)
        hooks = forward_hooks(module)
        for key in [k for k, hook in hooks.items() if isinstance(hook, StreamsToTensors)]:
            del hooks[key]
    return plain
