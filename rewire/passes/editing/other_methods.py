"""Pass: find methods that make a block's residual adds in another way (`forward_streaming`), and stay plain."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

from torch import nn

from rewire.conventions import is_norm
from rewire.logs import rewrite as log
from rewire.passes.editing.edits import Plans
from rewire.passes.find import Found
from rewire.torch_internals import children_of, module_at


def warn_of_other_methods(found: Found, plans: Plans) -> None:
    """Warn of methods of blocks that make the block's adds, too, but did not run."""
    ran, told = {call.code for finding in found.findings for call in finding.flow.calls}, set[CodeType]()
    for path, made_in, branches in (*_edited(found, plans), *_called_from_elsewhere(found)):
        module = module_at(found.evaluation.flow.model, path)  # None where a site's name is no module's
        for method in () if module is None else _others(module, made_in, branches):
            code = method.__code__
            if code not in ran and code not in told:
                told.add(code)
                log.warning(
                    "'%s' (%s:%d) makes the residual adds of %s in another way, and did not run with the example "
                    "inputs. It stays as it is, without connections, and computes what the plain model does",
                    *(method.__qualname__, code.co_filename, code.co_firstlineno),
                    f"'{path}'" if path else "the model",
                )


def _edited(found: Found, plans: Plans) -> Iterator[tuple[str, str, set[str]]]:
    """Of each method that makes adds: its module's path, its name, and those of the branches that it calls."""
    for plan in plans.values():
        if plan.method and plan.decorated.code is not None and any(kind == "sum" for kind, *_ in plan.edits):
            children = children_of(found.evaluation.flow.model.get_submodule(plan.path))
            branches = {name for name, child in children.items() if child is not None and not is_norm(child)}
            yield plan.path, plan.name, branches.intersection(plan.decorated.code.co_names)


def _called_from_elsewhere(found: Found) -> Iterator[tuple[str, str, set[str]]]:
    """Of each item of a list that holds branches: its path, an empty name, and those of the branches.

    Code elsewhere may add what they return: a function of all layers of two towers, say, where each has a forward.
    """
    items: dict[str, set[str]] = {}
    for name in (site.name for trunk in found.trunks.values() for site in trunk.sites):
        parts = name.split(".")
        for n in (n for n in range(1, len(parts)) if parts[n - 1].isdecimal()):
            items.setdefault(".".join(parts[:n]), set()).add(parts[n])
    yield from ((path, "", branches) for path, branches in items.items())


def _others(module: nn.Module, made_in: str, branches: set[str]) -> Iterator[FunctionType]:
    """The methods of a module, except one, that call all these branches, and add something."""
    own: dict[str, object] = {}
    for cls in type(module).__mro__:
        if branches and not cls.__module__.startswith("torch."):
            own = {**vars(cls), **own}
    for name, method in own.items():
        if isinstance(method, FunctionType) and name not in (made_in, "__init__") and _adds(method, branches):
            yield method


def _adds(method: FunctionType, branches: set[str]) -> bool:
    """Whether a method takes an argument, names all branches, and adds, or calls a function that does."""
    takes = len(inspect.signature(method).parameters) > 1
    if not (takes and branches.issubset(method.__code__.co_names)):
        return False
    called = (method.__globals__.get(name) for name in method.__code__.co_names)
    return any(_has_sum(each.__code__) for each in (method, *called) if isinstance(each, FunctionType))


def _has_sum(code: CodeType) -> bool:
    steps = [*dis.get_instructions(code)]
    sums = (n for n, step in enumerate(steps) if step.opname == "BINARY_OP" and step.argrepr in ("+", "+="))
    return any(steps[n - 1].opname != "LOAD_CONST" for n in sums)  # not `depth + 1`
