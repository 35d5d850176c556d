"""Pass: carry out the plans on a copy of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from rewire.attributes import NORMS
from rewire.code.edited import Edited, is_edited
from rewire.errors import EditError
from rewire.mixes.norms import copy_mark, unmark
from rewire.passes.editing.backward_hooks import check_hooks
from rewire.passes.editing.connect import place
from rewire.passes.editing.edits import FunctionPlan
from rewire.passes.editing.helper_gate import HelperGate
from rewire.passes.editing.install import install, uninstall
from rewire.runtime.connection import Connection
from rewire.runtime.gate import Gate
from rewire.runtime.live import Entry
from rewire.trunk import Trunk


def apply(
    model: nn.Module,
    looked_at: nn.Module,
    plans: Iterable[tuple[FunctionPlan, str]],
    connections: Mapping[str, Connection],
    advice: str = "",
) -> None:
    """Give the modules of ``model`` their edited functions, and the gates that these call.

    Args:
        model: changed in place.
        looked_at: the copy from which the plans were made.
        plans: the plan of each function, and its new text.
        connections, advice: see `Gate`.

    Raises:
        EditError: a module has an attribute of the name that rewire needs, its class cannot be derived from, or it has
            backward hooks.
    """
    by_module: dict[str, list[tuple[FunctionPlan, str]]] = {}
    for plan, source in plans:
        by_module.setdefault(plan.path, []).append((plan, source))
    for path, of_module in by_module.items():
        module, methods = model.get_submodule(path), dict[str, Edited]()
        for plan, source in of_module:
            if hasattr(module, plan.gate):
                raise EditError(f"'{path}' already has an attribute '{plan.gate}', a name that rewire uses")
            if plan.method:
                definition = plan.decorated.function if plan.substituted else None
                methods[plan.name] = Edited(plan.name, source, definition)
            module.__dict__[plan.gate] = _gate(model, plan, source, connections, advice)
        helpers = {plan.gate: module.__dict__[plan.gate] for plan, _ in of_module if not plan.method}
        for gate in helpers.values():
            gate.helpers = helpers
        if methods:
            install(module, methods, shared=not any(plan.adds for plan, _ in of_module))
        check_hooks(module)
        _mark_norms(module, looked_at.get_submodule(path), [plan for plan, _ in of_module])


def show_between(model: nn.Module, trunk: Trunk) -> None:
    """Let hooks get tensors, too, on modules that only pass the trunk's stream on to their blocks (nn.Sequential)."""
    blocks = [site.block for site in trunk.sites]
    around = {path for block in blocks for path in above(block)}
    for path in sorted(around):
        module = model.get_submodule(path)
        holds_all = all(path in above(block) for block in blocks)
        if not (holds_all or is_edited(module) or isinstance(module, (nn.ModuleList, nn.ModuleDict))):
            install(module, {}, shared=True)


def above(path: str) -> list[str]:
    """The paths of the modules around one, from the root on."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))] if path else []


def _gate(
    model: nn.Module, plan: FunctionPlan, source: str, connections: Mapping[str, Connection], advice: str
) -> Gate:
    def entry(name: str, adds: dict[int, int]) -> Entry:
        connection, begins = connections[name], name in plan.begins
        trunk = connection.trunk
        held = (model.get_submodule(trunk.owner), place(trunk).rpartition(".")[2]) if trunk and begins else None
        outside, read_below = plan.outside.get(name, False), name in plan.read_below
        given, runs_blocks = name in plan.branch_given, plan.runs_blocks
        iterations, calls = plan.iterations(name), plan.calls.get(name, {})
        owner = model.get_submodule(plan.path)
        told_apart = {path: owner.get_submodule(path) for path in (*iterations, *calls)}
        facts = adds, plan.ordered, outside, read_below, given, runs_blocks, iterations, calls, told_apart
        return Entry(name, connection, begins, *facts, held=held)

    entries = [entry(name, adds) for name, adds in plan.adds.items()]
    if plan.method:
        return Gate(plan.path, plan.text.where(), entries, advice=advice)
    assert plan.decorated.function is not None
    return HelperGate(plan.path, plan.text.where(), entries, plan.decorated.function, source, advice)


def _mark_norms(module: nn.Module, looked_at: nn.Module, plans: Iterable[FunctionPlan]) -> None:
    norms: dict[str, str | None] = {}
    for plan in plans:
        norms |= plan.norms
    for path, obstacle in norms.items():
        if obstacle is None:
            copy_mark(looked_at.get_submodule(path), module.get_submodule(path))
    module.__dict__[NORMS] = norms


def is_opened(module: nn.Module) -> bool:
    """Whether the stream is read or added to in the module, rather than only passed on."""
    gates = [value for value in vars(module).values() if isinstance(value, Gate)]
    return any(entry.adds for gate in gates for entry in gate.entries) or any(not gate.entries for gate in gates)


def undo(module: nn.Module) -> None:
    """Restore a rewritten module."""
    if is_edited(module):
        uninstall(module)
    for path in module.__dict__.pop(NORMS, {}):
        unmark(module.get_submodule(path))
    for name in [name for name, value in vars(module).items() if isinstance(value, Gate)]:
        del module.__dict__[name]
