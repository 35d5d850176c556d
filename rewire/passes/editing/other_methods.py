"""Pass: find methods that make a block's residual adds in another way (`forward_streaming`), and stay plain."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

from torch import nn

from rewire.conventions import is_norm
from rewire.logs import rewrite as log
from rewire.passes.editing.edits import FunctionPlan, Plans
from rewire.passes.find import Found
from rewire.torch_internals import children_of


def warn_of_other_methods(found: Found, plans: Plans) -> None:
    """Warn of methods of rewired blocks that make the block's adds, too, but did not run."""
    ran, told = {call.code for finding in found.findings for call in finding.flow.calls}, set[CodeType]()
    for plan in plans.values():
        adds = plan.method and any(kind == "sum" for kind, *_ in plan.edits)
        for method in _others(found.evaluation.flow.model.get_submodule(plan.path), plan) if adds else ():
            code = method.__code__
            if code not in ran and code not in told:
                told.add(code)
                log.warning(
                    "'%s' (%s:%d) makes the residual adds of %s in another way, and did not run with the example "
                    "inputs. It stays as it is, without connections, and computes what the plain model does",
                    *(method.__qualname__, code.co_filename, code.co_firstlineno),
                    f"'{plan.path}'" if plan.path else "the model",
                )


def _others(module: nn.Module, plan: FunctionPlan) -> Iterator[FunctionType]:
    """The methods of a module that call all branches of the planned one, and add something."""
    assert plan.decorated.code is not None
    children = {name for name, child in children_of(module).items() if child is not None and not is_norm(child)}
    branches = children.intersection(plan.decorated.code.co_names)
    own: dict[str, object] = {}
    for cls in type(module).__mro__:
        if branches and not cls.__module__.startswith("torch."):
            own = {**vars(cls), **own}
    for name, method in own.items():
        if isinstance(method, FunctionType) and name not in (plan.name, "__init__") and _adds(method, branches):
            yield method


def _adds(method: FunctionType, branches: set[str]) -> bool:
    """Whether a method takes an argument, names all branches, and adds."""
    code = method.__code__
    takes = len(inspect.signature(method).parameters) > 1
    steps = [*dis.get_instructions(code)] if takes and branches.issubset(code.co_names) else []
    sums = (n for n, step in enumerate(steps) if step.opname == "BINARY_OP" and step.argrepr in ("+", "+="))
    return any(steps[n - 1].opname != "LOAD_CONST" for n in sums)  # not `depth + 1`
