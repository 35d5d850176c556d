"""Pass: compare the rewritten model with the original: outputs, gradients and graphs.

Both run on the same inputs with the same random numbers: in evaluation mode; with perturbed weights, since branches
that are zero at the start would hide everything behind them; and in training mode. Copies are compared (`copies`), so
that neither model changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from rewire.connection import connections
from rewire.console import progress
from rewire.errors import BadExampleInputs, OutOfOrder, RewireError, ValidationMismatch
from rewire.logs import validate as log
from rewire.passes.connect import drop_copies
from rewire.passes.copies import ByPlace, own_inputs, private, seeded, shared
from rewire.passes.flow import Flow
from rewire.passes.same_graph import compare_graphs
from rewire.patterns.pattern import Inputs
from rewire.runtime.layout import Layout
from rewire.stream import Stream
from rewire.topologies.base import Start
from rewire.topologies.residual import Residual

#: Relative tolerance (norm of the difference over norm of the original) by dtype.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
#: Gradients pass through more roundings than outputs.
_GRADIENT_SLACK = 5.0
#: Models with more parameters have only those perturbed that are constant: a second set would not fit everywhere.
_ALL_PERTURBED = 200_000_000
_DEPTH = 6  # of objects inside objects that are looked into for tensors


@dataclasses.dataclass(frozen=True)
class Setting:
    """How both models are run.

    Attributes:
        name: in words.
        training: in training mode.
        perturbed: with weights that are not the model's own.
        strided: with inputs that are not contiguous, if the original takes such.
        rounding: outputs may differ by rounding; then gradients may differ by what a ReLU makes of that, and are not
            compared.
    """

    name: str
    training: bool = False
    perturbed: bool = False
    strided: bool = False
    rounding: bool = False


#: Where the same rewrite with plain connections in it has to be the original.
SETTINGS = (
    Setting("evaluation mode"),
    Setting("evaluation mode, perturbed weights, strided inputs", perturbed=True, strided=True),
    Setting("training mode, perturbed weights", training=True, perturbed=True),
)


#: And where the learned ones have to be, at a preserving start.
STARTS = (
    Setting("evaluation mode, at the start of the topology", rounding=True),
    Setting("evaluation mode, at the start of the topology, perturbed weights", perturbed=True, rounding=True),
)


@dataclasses.dataclass
class Comparison:
    """What was compared.

    Attributes:
        settings: names of those in which both models ran.
        outputs, gradients: numbers of tensors that were compared in them.
        error: the largest relative difference of an output.
    """

    settings: list[str] = dataclasses.field(default_factory=list)
    outputs: int = 0
    gradients: int = 0
    error: float = 0.0

    def __str__(self) -> str:
        runs = "; ".join(self.settings)
        return f"{self.outputs} outputs and {self.gradients} gradients agree (within {self.error:.1e}) in: {runs}"


def check(model: nn.Module, rewired: nn.Module, found: Sequence[Flow], inputs: Inputs | None, start: Start) -> None:
    """Compare the same rewrite with plain connections in it; and at a preserving start the learned ones, too.

    Args:
        model, rewired: the original, and what was made of it; neither changes.
        found: what runs of the original showed, in evaluation and in training mode.
        inputs: what to run them on; None if there is nothing.
        start: of the learned connections.

    Raises:
        ValidationMismatch, BadExampleInputs, OutOfOrder: see `compare` and `compare_graphs`.
    """
    name = type(model).__name__
    if inputs is None:
        log.warning("%s was rewired but not validated: there are no inputs to run it on; pass example_inputs.", name)
        return
    rewired = shared(rewired)
    drop_copies(rewired)  # of norms: at their start they are the norm, and it is that one's gradient that is known
    starts = STARTS if start == "preserve" else ()
    plain = with_plain_connections(rewired)
    with progress(f"validating {name}", len(SETTINGS) + len(starts) + 1) as step:
        compare(model, plain, inputs, step=step)
        same = compare_graphs(found, plain, inputs)
        log.info("%s: the graphs agree in %d operations with weights", name, same)
        step()
        if starts:
            compare(model, rewired, inputs, starts, step)


def with_plain_connections(rewired: nn.Module) -> nn.Module:
    """A copy of a rewired model with plain residual connections for the learned ones; separate q/k/v inputs stay."""
    plain = shared(rewired)
    for connection in connections(plain).values():
        old, sites = connection.layout, range(len(connection.layout.units))
        separate = [site + 1 for site in sites if old.reads_qkv(site)]
        units = [site + 1 for site in sites]
        connection.become(Layout(old.trunk, Residual(), units, old.dims.width, separate, old.channel_dim, old.posts))
    return plain


def compare(
    original: nn.Module,
    rewired: nn.Module,
    inputs: Inputs,
    settings: Sequence[Setting] = SETTINGS,
    step: Callable[[], None] = lambda: None,
) -> Comparison:
    """Run both models in all settings, forward and backward, and compare; call ``step`` after each.

    Returns:
        What was compared.

    Raises:
        BadExampleInputs: the original does not run on the inputs.
        ValidationMismatch: outputs or gradients differ, or nothing could be compared.
        OutOfOrder: in training mode other residual adds run than were found.
    """
    done = Comparison()
    for setting in settings:
        _compare_in(setting, original, rewired, inputs, done)
        step()
    if not done.outputs:
        raise ValidationMismatch(
            f"nothing could be compared: on the example inputs {type(original).__name__} returns no finite numbers "
            "(empty tensors, NaN, integers only, or objects that are not looked into). Pass others, or validate=False."
        )
    log.info("%s: %s", type(original).__name__, done)
    return done


def _compare_in(setting: Setting, original: nn.Module, rewired: nn.Module, inputs: Inputs, done: Comparison) -> None:
    noise = _noise(original) if setting.perturbed else {}
    given, expected = _original_run(setting, original, inputs, noise)
    if expected is None or not any(_finite(output) for output in expected.outputs):
        return  # perturbed weights, or this mode, make nothing that could be compared
    try:
        actual = _run(setting, rewired, given, noise, expected.gradients)
    except RewireError:
        raise
    except Exception as error:
        raise ValidationMismatch(
            f"the rewritten {type(original).__name__} fails where the original runs ({setting.name}): "
            f"{type(error).__name__}: {error}"
        ) from error
    problem = _difference(setting, expected, actual, done)
    if problem and not _is_noise(setting, original, rewired, given, noise):
        raise _mismatch(problem, setting, original, rewired, given, noise)
    if problem:
        done.outputs += sum(map(_finite, expected.outputs))
        log.info("%s: %s, in %s: no more than the original by itself", type(original).__name__, problem, setting.name)
    log.info("%s: %d outputs, %d gradients agree", setting.name, len(expected.outputs), actual.compared)
    done.settings.append(setting.name)
    done.gradients += actual.compared


def outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Floating-point tensors in what ``model`` returns for ``inputs``, in evaluation mode and without gradients."""
    bench = private(model).eval()
    with torch.no_grad(), seeded(0, bench):
        args, kwargs = own_inputs(inputs)
        return [t for t in tensors_in(bench(*args, **kwargs)) if t.is_floating_point()]


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Run:
    """Outputs of a model, and gradients: all of them, or the first that differ from those expected."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    wrong: list[str] = dataclasses.field(default_factory=list)
    compared: int = 0


def _original_run(
    setting: Setting, original: nn.Module, inputs: Inputs, noise: dict[str, Tensor]
) -> tuple[Inputs, _Run | None]:
    """The inputs that were used, and the run; None if only the model's own weights and mode work."""
    if setting.strided:
        given = _strided(inputs)
        try:
            return given, _run(setting, original, given, noise)
        except Exception as error:  # not every model takes them
            log.debug("%s does not run on strided inputs: %s", type(original).__name__, error)
    try:
        return inputs, _run(setting, original, inputs, noise)
    except Exception as error:
        if setting.perturbed or setting.training:
            log.info("%s does not run in %s: %s", type(original).__name__, setting.name, error)
            return inputs, None
        raise BadExampleInputs(
            f"{type(original).__name__} does not run on the example inputs: {type(error).__name__}: {error}"
        ) from error


def _run(
    setting: Setting,
    model: nn.Module,
    inputs: Inputs,
    noise: dict[str, Tensor],
    expected: dict[str, Tensor] | None = None,
) -> _Run:
    """One forward and backward pass of a copy of ``model``.

    Args:
        setting: how.
        model: it is not changed.
        inputs: they are not changed.
        noise: added to the parameters of these names.
        expected: gradients that those of this run are compared with as they arrive; None: they are kept.
    """
    bench = private(model).train(setting.training)
    parameters = dict(bench.named_parameters())
    for name, difference in noise.items():
        parameters[name].data = parameters[name].data + difference
    run = _Run([], {})
    largest = max((float(g.float().norm()) for g in (expected or {}).values()), default=0.0)

    def arrived(name: str) -> Any:
        def hook(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            if expected is None:
                run.gradients[name] = gradient.detach()
            elif name in expected:
                run.compared += 1
                reference = expected.pop(name)
                error = _gradient_error(reference, gradient, largest)
                if error:
                    run.wrong.append(f"the gradient of '{name}' differs from the original's by {error:.1e} (relative)")
            elif float(gradient.float().norm()) > 0 and name not in _added(bench):
                run.wrong.append(f"parameter '{name}' has a gradient in the rewritten model only")

        return hook

    handles = [
        parameter.register_post_accumulate_grad_hook(arrived(name))
        for name, parameter in parameters.items()
        if parameter.requires_grad and not parameter.is_meta
    ]
    try:
        with torch.enable_grad(), seeded(0, bench):
            args, kwargs = own_inputs(inputs)
            outputs = [t for t in tensors_in(bench(*args, **kwargs)) if t.is_floating_point() or t.is_complex()]
            differentiable = [t for t in outputs if t.requires_grad and t.numel()]
            if differentiable and handles:
                torch.default_generator.manual_seed(1)
                # weights that differ per element: a plain sum would hide what a final norm cancels
                loss = sum((_weights(t) * _real(t)).sum() / t.numel() for t in differentiable)
                loss.backward()  # type: ignore[union-attr]
    finally:
        for handle in handles:
            handle.remove()
    run.outputs = [t.detach() for t in outputs]
    for name in expected or ():
        run.wrong.append(f"parameter '{name}' has a gradient in the original only")
    return run


def _added(bench: nn.Module) -> set[str]:
    """Names of connection weights."""
    return {name for name, _ in bench.named_parameters() if "depth_connections" in name}


def _real(output: Tensor) -> Tensor:
    real = torch.view_as_real(output) if output.is_complex() else output
    return real.to(torch.promote_types(real.dtype, torch.float32))


def _weights(output: Tensor) -> Tensor:
    """Random weights of the shape of ``output``. Not by `rand_like`, whose values depend on strides, too."""
    shape = (*output.shape, 2) if output.is_complex() else output.shape
    return torch.rand(shape).to(output.device)


def _noise(model: nn.Module) -> dict[str, Tensor]:
    """What to add to each parameter, so that no branch is zero."""
    generator = torch.Generator().manual_seed(2)
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.is_floating_point() and not p.is_meta}
    if sum(p.numel() for p in parameters.values()) > _ALL_PERTURBED:
        parameters = {name: p for name, p in parameters.items() if p.numel() and bool((p == p.flatten()[0]).all())}
    return {
        name: (0.02 * torch.randn(p.shape, generator=generator)).to(p)
        for name, p in parameters.items()
        if type(p) is Tensor and p.numel()
    }


def _strided(inputs: Inputs) -> Inputs:
    """The inputs in memory with gaps."""

    def spread(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or type(value) is not Tensor:
            return value
        wide = value.new_zeros((*value.shape[:-1], 2 * value.shape[-1]))
        wide[..., ::2] = value.detach()
        return wide[..., ::2].requires_grad_(value.requires_grad)

    args, kwargs = tree_map(spread, inputs)
    return args, kwargs


# -- differences -------------------------------------------------------------------------------------------------------


def _difference(setting: Setting, expected: _Run, actual: _Run, done: Comparison) -> str:
    """What differs first, in words; empty if nothing does."""
    equal = True
    if len(expected.outputs) != len(actual.outputs):
        return f"the rewritten model returns {len(actual.outputs)} tensors, not {len(expected.outputs)}"
    for number, (a, b) in enumerate(zip(expected.outputs, actual.outputs, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {number} is {_described(b)} in the rewritten model, and {_described(a)} in the original"
        error = relative_error(a, b)
        if error > TOLERANCES.get(_real(a).dtype if a.is_complex() else a.dtype, 1e-5):
            return f"output {number} of the rewritten model differs from the original's by {error:.1e} (relative)"
        equal = equal and error == 0
        done.outputs += _finite(a)
        done.error = max(done.error, error)
    return "" if setting.rounding and not equal else next(iter(actual.wrong), "")


def _is_noise(
    setting: Setting, original: nn.Module, rewired: nn.Module, inputs: Inputs, noise: dict[str, Tensor]
) -> bool:
    """Whether the models are the same after all, where that can be seen more clearly.

    With random numbers that do not depend on how activations lie in memory; and in float64, if rounding alone makes as
    much of a difference in the original (batch norms over few values amplify it).
    """
    strict = dataclasses.replace(setting, rounding=False)
    original64, rewired64 = private(original).double(), private(rewired).double()
    inputs64, noise64 = tree_map(_exact, inputs), tree_map(_exact, noise)
    try:
        with ByPlace():
            expected = _run(setting, original, inputs, noise)
            if not _problem(setting, expected, rewired, inputs, noise):
                return True
            if not _problem(strict, expected, original64, inputs64, noise64):
                return False
            return not _problem(setting, _run(setting, original64, inputs64, noise64), rewired64, inputs64, noise64)
    except Exception as error:  # not every model runs in float64
        log.debug("%s in float64: %s", type(original).__name__, error)
        return False


def _problem(setting: Setting, expected: _Run, model: nn.Module, inputs: Inputs, noise: dict[str, Tensor]) -> str:
    """What differs first in a run of ``model``, in the precision of what is expected; empty if nothing does."""
    run = _run(setting, model, inputs, noise, dict(expected.gradients))
    if len(run.outputs) == len(expected.outputs):
        run.outputs = [b.to(a.dtype) for a, b in zip(expected.outputs, run.outputs, strict=True)]
    return _difference(setting, expected, run, Comparison())


def _exact(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _gradient_error(reference: Tensor, gradient: Tensor, largest: float) -> float:
    """Relative error of a gradient if it is too large, else 0.

    A gradient that is zero in exact arithmetic (a key bias, say) is rounding noise in both.
    """
    tolerance = _GRADIENT_SLACK * TOLERANCES.get(reference.dtype, 1e-5)
    difference = float((reference.float() - gradient.float()).norm())
    if difference > tolerance * max(float(reference.float().norm()), 1e-3 * largest):
        return relative_error(reference, gradient)
    return 0.0


def _finite(output: Tensor) -> bool:
    return output.numel() > 0 and bool(torch.isfinite(output).any())


def _mismatch(
    problem: str,
    setting: Setting,
    original: nn.Module,
    rewired: nn.Module,
    inputs: Inputs,
    noise: dict[str, Tensor],
) -> RewireError:
    """The error, with the first block that differs; another one if the original differs from itself."""
    expected, again, actual = (_blocks(setting, m, inputs, noise) for m in (original, original, rewired))
    unsteady = _first(expected, again)
    if unsteady:
        return BadExampleInputs(
            f"{type(original).__name__} does not compute the same twice with the same random numbers (module "
            f"'{unsteady}', {setting.name}): it cannot be validated. Pass validate=False if that is meant to be."
        )
    first = _first(expected, actual)
    where = f"the first block that differs is '{first}'" if first else "no single block differs by that much"
    return ValidationMismatch(f"{problem}, in {setting.name}; {where}.")


def _blocks(setting: Setting, model: nn.Module, inputs: Inputs, noise: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """What modules with children return, in order; streams as what the next block would read."""
    bench = private(model).train(setting.training)
    parameters = dict(bench.named_parameters())
    for name, difference in noise.items():
        parameters[name].data = parameters[name].data + difference
    blocks: list[tuple[str, Tensor]] = []

    def record(path: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) and output else output
            if isinstance(value, Stream):
                value = value.value()
            if isinstance(value, Tensor) and value.is_floating_point():
                blocks.append((path, value.detach().clone()))

        return hook

    for path, module in bench.named_modules():
        if len(module._modules):
            module.register_forward_hook(record(path))
    with torch.enable_grad(), seeded(0, bench):
        args, kwargs = own_inputs(inputs)
        bench(*args, **kwargs)
    return blocks


def _first(expected: Iterable[tuple[str, Tensor]], actual: Iterable[tuple[str, Tensor]]) -> str:
    """Path of the first module that returns something else; empty if none does."""
    known = dict[str, list[Tensor]]()
    for path, value in expected:
        known.setdefault(path, []).append(value)
    for path, value in actual:
        calls = known.get(path)
        if not calls:
            continue
        reference = calls.pop(0)
        if reference.shape != value.shape or relative_error(reference, value) > TOLERANCES.get(value.dtype, 1e-5):
            return path
    return ""


def relative_error(reference: Tensor, other: Tensor) -> float:
    """Norm of the difference over the norm of ``reference``, in float32 or better."""
    a, b = _real(reference), _real(other)
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return float("inf")
    a, b = a[finite], b[finite]
    return float((a - b).norm() / a.norm().clamp_min(torch.finfo(a.dtype).tiny))


def tensors_in(value: Any, depth: int = 0) -> list[Tensor]:
    """All tensors in a model's output, in order: in containers, dataclasses and plain objects."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Stream):
        raise OutOfOrder(
            f"the model returns the residual stream of trunk '{value.layout.trunk}' itself: a block of it was not "
            "called, or something keeps hidden states between the blocks."
        )
    if depth > _DEPTH:
        return []
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_in(item, depth + 1)]
    if isinstance(value, (tuple, list, set, frozenset)):
        return [t for item in value for t in tensors_in(item, depth + 1)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [t for field in dataclasses.fields(value) for t in tensors_in(getattr(value, field.name), depth + 1)]
    if hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        return [t for item in vars(value).values() for t in tensors_in(item, depth + 1)]
    return []
