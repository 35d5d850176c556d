"""Pass: compare outputs and gradients of the rewritten model with the original's.

Both run on the same inputs with the same random numbers: in evaluation mode; with perturbed weights, as a branch that
is zero at its start would hide errors; and in training mode. Copies are compared (`copies`), so that neither model
changes.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rewire.code.text import written_at
from rewire.console import progress
from rewire.copies import ByPlace, Inputs, own_inputs, private, seeded, shared
from rewire.errors import BadExampleInputs, OutOfOrder, RewireError, ValidationMismatch
from rewire.logs import validate as log
from rewire.passes.editing.carriers import casts_of
from rewire.passes.editing.connect import drop_copies
from rewire.passes.find import Found
from rewire.passes.validating.runs import Run, Setting, block_outputs, coarsest, run, strided, values_for
from rewire.passes.validating.tensors import described, finite, relative_error, tensors_in, tolerance
from rewire.passes.validating.wired import wired
from rewire.patterns import Pattern
from rewire.runtime.connection import connections
from rewire.topologies.base import Start
from rewire.topologies.residual import Residual
from rewire.trunk import Trunk

#: Settings in which the rewrite with plain connections has to equal the original.
SETTINGS = (
    Setting("evaluation mode"),
    Setting("evaluation mode, perturbed weights, strided inputs", perturbed=True, strided=True),
    Setting("training mode, perturbed weights", training=True, perturbed=True),
)

#: Setting for models that make their adds elsewhere if no gradients are recorded.
INFERENCE = Setting("evaluation mode without gradients, perturbed weights", gradients=False, perturbed=True)

#: Settings in which learned connections have to equal the original, at a preserving start.
STARTS = (
    Setting("evaluation mode, at the start of the topology", rounding=True),
    Setting(
        "evaluation mode, at the start of the topology, perturbed weights, strided inputs",
        perturbed=True,
        strided=True,
        rounding=True,
    ),
)

#: Setting in which learned connections have to follow their formulas, and differ from the plain network.
MOVED = Setting("evaluation mode, perturbed weights, connection weights that have moved", perturbed=True, moved=True)
MOVED_INFERENCE = dataclasses.replace(MOVED, name=f"{MOVED.name}, without gradients", gradients=False)

_LOW = (torch.bfloat16, torch.float16)
_ROUNDED = (torch.float64, torch.float32, *_LOW)


@dataclasses.dataclass
class Comparison:
    """The result of a comparison.

    Attributes:
        settings: names of the settings in which both models ran.
        outputs, gradients: numbers of tensors that were compared.
        error: the largest relative difference of an output.
        failed: why the original did not run in the last setting in which it may fail.
    """

    settings: list[str] = dataclasses.field(default_factory=list)
    outputs: int = 0
    gradients: int = 0
    error: float = 0.0
    failed: str = ""

    def __str__(self) -> str:
        runs = "; ".join(self.settings)
        return f"{self.outputs} outputs and {self.gradients} gradients agree (within {self.error:.1e}) in: {runs}"


def check(
    model: nn.Module,
    rewired: nn.Module,
    found: Found,
    inputs: Inputs | None,
    start: Start,
    patterns: Sequence[Pattern] = (),
) -> None:
    """Compare the rewrite with the original: with plain connections, and at a preserving start with the learned ones.

    With connection weights that have moved, it is compared with the original's branches as the formulas connect them.

    Args:
        model, rewired: the original and the rewritten model; neither changes.
        found, patterns: the search result, and the patterns that know the original.
        inputs: what to run them on; None if there is nothing.
        start: of the learned connections.

    Raises:
        ValidationMismatch, BadExampleInputs, OutOfOrder: see `compare`.
    """
    name = type(model).__name__
    if inputs is None:
        log.warning(
            "%s was rewired but not validated: there are no inputs to run it on. Pass example_inputs=(x,), or give "
            "the command a function that returns model, (x,).",
            name,
        )
        return
    rewired = shared(rewired)
    drop_copies(rewired)  # a copy starts equal to its norm, but the gradient is only known for the norm
    settings = SETTINGS if found.inference is None else (*SETTINGS, INFERENCE)
    compare_both(name, model, rewired, inputs, settings, STARTS if start == "preserve" else ())
    trained = set() if found.training is None else {*found.training.trunks}.intersection(connections(rewired))
    for trunk, site in _run_by_chance(rewired, inputs, trained, found.trunks):
        found.drop([found.trunks[trunk].sites[site]])
    compare_moved(name, found, rewired, inputs, patterns)


def _run_by_chance(
    rewired: nn.Module, inputs: Inputs, trained: set[str], trunks: Mapping[str, Trunk]
) -> list[tuple[str, int]]:
    """Run the rewritten model in training mode with another seed, which may leave out other blocks.

    Returns:
        The residual adds that it left out: trunk, and number of the site.

    Raises:
        OutOfOrder: other residual adds run, and nothing tells which.
        ValidationMismatch: nothing runs of one of the ``trained`` trunks, as the original did with seed 0.
    """
    names = {site.name for name in connections(rewired) for site in trunks[name].sites}
    kinds, ran = set(map(_kind, names)), set[str]()
    seen = _what_happens(rewired, inputs, seed=1, kinds=kinds, ran=ran)
    if seen is None:
        return []
    skipped = {trunks[name].sites[site].name for name, what, site in seen if what == "skip"}
    _check_exchanged(names, names - skipped, ran)
    lost = trained.difference(name for name, _, _ in seen)
    lost = lost and lost.difference(name for name, _, _ in _what_happens(rewired, inputs, seed=0) or ())
    if lost:
        raise ValidationMismatch(
            f"no stream of trunk '{min(lost)}' begins in the rewritten model: it still calls the original's "
            "functions, through something that is not copied with the model (a list of methods, a closure, a global)"
        )
    return [(name, site) for name, what, site in seen if what == "skip"]


def _check_exchanged(names: Collection[str], expected: Collection[str], ran: Collection[str]) -> None:
    """Raise OutOfOrder if blocks without residual adds in the trunks ran in place of some that have them.

    Args:
        names: of the trunks' branches.
        expected: of those that no stream skipped.
        ran: modules of the same `_kind`s that ran.
    """
    known, blocks = set(map(_block, names)), set(map(_block, ran))
    others = {_kind(name): name for name in sorted(ran) if _block(name) not in known}
    for name in sorted(expected):
        if _kind(name) in others and _block(name) not in blocks:
            raise OutOfOrder(
                f"in training mode the model takes another way by chance: '{others[_kind(name)]}' runs in "
                f"place of '{name}', in a loop that adds the outputs of both at one place. Nothing tells which of them "
                "did not run: make the adds in the forwards of blocks, or let all of them run"
            )


def _note(ran: set[str], path: str, _module: nn.Module, _args: object) -> None:
    ran.add(path)


def _block(path: str) -> str:
    """The path of a branch's block: ``layers.0`` of ``layers.0.1``, or of itself."""
    found = re.match(r"(.*\b\d+)\.", path)
    return path if found is None else found[1]


def _kind(path: str) -> str:
    """A branch's path without the numbers of its block: ``layers.#.1``."""
    return re.sub(r"\b\d+\b", "#", block := _block(path)) + path.removeprefix(block)


def _what_happens(
    rewired: nn.Module, inputs: Inputs, seed: int, kinds: Collection[str] = (), ran: set[str] | None = None
) -> list[tuple[str, str, int]] | None:
    """The calls of `Layout.observe` in training mode: trunk, what, number of the site; None if it does not train.

    Args:
        kinds: the `_kind`s of modules that are added to ``ran`` when they run.
    """
    bench, seen = private(rewired).train(), list[tuple[str, str, int]]()
    for name, connection in connections(bench).items():
        connection.layout = copy.copy(connection.layout)
        connection.layout.observe = lambda what, site, _, name=name: seen.append((name, what, site))
    for path, module in bench.named_modules():
        if ran is not None and _kind(path) in kinds:
            module.register_forward_pre_hook(functools.partial(_note, ran, path))
    try:
        with seeded(seed, bench), torch.enable_grad():
            args, kwargs = own_inputs(inputs)
            bench(*args, **kwargs)
    except OutOfOrder as error:
        raise OutOfOrder(f"in training mode the model takes another way by chance: {error}") from error
    except RewireError:
        raise
    except Exception as error:  # not every model trains
        log.debug("%s in training mode: %s", type(rewired).__name__, error)
        return None
    return seen


def compare_moved(
    name: str, found: Found, rewired: nn.Module, inputs: Inputs, patterns: Sequence[Pattern] = ()
) -> None:
    """Compare with the original's branches as the formulas connect them, with connection weights that have moved.

    Raises:
        ValidationMismatch: outputs or gradients differ.
    """
    done, why = Comparison(), ""
    settings = [MOVED] if found.inference is None else [MOVED, MOVED_INFERENCE]
    try:
        original = wired(found, rewired, patterns)
    except Exception as error:  # the models agree at their start, so only warn
        why = f"{type(error).__name__}: {error}"
    else:
        low = any(p.dtype in _LOW for p in original.parameters())  # their rounding hides more
        try:
            for ran, setting in enumerate(settings):
                if low:
                    exact = dataclasses.replace(setting, dtype=torch.float32)
                    _compare_in(exact, _Reference(original, inputs), rewired, done)
                if len(done.settings) == ran:
                    _compare_in(setting, _Reference(original, inputs), rewired, done)
        except ValidationMismatch:
            why = _kept_between(found, rewired) or _misled(found, rewired, inputs, patterns)
            if not why:
                raise
    if why or len(done.settings) < len(settings):
        log.warning(
            "%s was not validated with connection weights that have moved: %s", name, why or done.failed or "not finite"
        )


def _kept_between(found: Found, rewired: nn.Module) -> str:
    """Where a sum is kept that the other mode processes further before the next block; empty if nowhere.

    The rewired model keeps the sum in both modes. The wired original has what the next block reads.
    """
    finding = found.evaluation
    for name, connection in connections(rewired).items():
        chain = finding.chains.get(name)
        if chain is None:
            continue
        for site, (add, behind) in enumerate(itertools.pairwise(chain.adds)):
            own = {*behind.region, *behind.inner, behind.op, *casts_of(behind), *chain.passages[site + 1]}
            if site in connection.layout.posts and not add.post and not own.issuperset(finding.flow.users[add.op]):
                where, _ = written_at(add.op.place)
                return (
                    f"the sum at {where} is kept, or read by others than the next block, and in training mode "
                    "operations follow before that block reads it"
                )
    return ""


def _misled(found: Found, rewired: nn.Module, inputs: Inputs, patterns: Sequence[Pattern]) -> str:
    """Why the wired original proves nothing: with plain connections it is not the original; empty if it is."""
    try:
        plain, flow = wired(found, with_plain_connections(rewired), patterns), found.evaluation.flow
        _compare_in(MOVED, _Reference(flow.before or flow.model, inputs), plain, Comparison())
    except Exception as error:
        return f"wired by plain connections, the original is not itself ({type(error).__name__}: {error})"
    return ""


def compare_both(
    name: str,
    original: nn.Module,
    rewired: nn.Module,
    inputs: Inputs,
    settings: Sequence[Setting],
    starts: Sequence[Setting],
) -> None:
    """`compare` the rewrite with plain connections in ``settings``, and with its own in ``starts``.

    Settings with the same run of the original follow each other, so that it runs once for them.
    """
    plain, reference = with_plain_connections(rewired), _Reference(original, inputs)
    done = {plain: Comparison(), rewired: Comparison()} if starts else {plain: Comparison()}
    pairs = [(setting, plain) for setting in settings] + [(setting, rewired) for setting in starts]
    ways = [*dict.fromkeys(_way(setting) for setting, _ in pairs)]
    with progress(f"validating {name}", len(pairs)) as step:
        for setting, model in sorted(pairs, key=lambda pair: ways.index(_way(pair[0]))):
            _compare_in(setting, reference, model, done[model])
            step()
    for found in done.values():
        _check_compared(found, original)


def _way(setting: Setting) -> Setting:
    """The part of a setting that determines the original's run."""
    return dataclasses.replace(setting, name="", rounding=False)


def with_plain_connections(rewired: nn.Module) -> nn.Module:
    """A copy of a rewired model with plain residual connections. Separate q/k/v inputs stay."""
    plain = shared(rewired)
    for connection in connections(plain).values():
        old, sites = connection.layout, range(len(connection.layout.units))
        separate = [site + 1 for site in sites if old.sites[site].reads_qkv]
        units = [site + 1 for site in sites]
        connection.become(old.of(Residual(), units, separate))
    return plain


def compare(
    original: nn.Module,
    rewired: nn.Module,
    inputs: Inputs,
    settings: Sequence[Setting] = SETTINGS,
) -> Comparison:
    """Run both models in all settings, forward and backward, and compare.

    Returns:
        The result of the comparison.

    Raises:
        BadExampleInputs: the original does not run on the inputs.
        ValidationMismatch: outputs or gradients differ, or nothing could be compared.
        OutOfOrder: in training mode other residual adds run than were found.
    """
    done, reference = Comparison(), _Reference(original, inputs)
    for setting in settings:
        _compare_in(setting, reference, rewired, done)
    _check_compared(done, original)
    return done


def _check_compared(done: Comparison, original: nn.Module) -> None:
    """Refuse models if no numbers could be compared."""
    if not done.outputs:
        _check_weights(original)
        raise ValidationMismatch(
            f"nothing could be compared: on the example inputs {type(original).__name__} returns no finite numbers "
            "(only empty tensors, NaN, integers, or objects that rewire does not look into). Pass other inputs, or "
            "validate=False."
        )
    log.info("%s: %s", type(original).__name__, done)


def _check_weights(model: nn.Module) -> None:
    """Refuse weights that are not finite, as then no output is."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not parameter.float().isfinite().all():
            raise ValidationMismatch(
                f"nothing could be compared: the outputs of {type(model).__name__} are not finite, since '{name}' "
                "holds NaN or infinity. Load other weights, or pass validate=False."
            )


class _Reference:
    """The original, its inputs and its last run, for settings that differ only in the rewritten model."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self.model, self.inputs = model, inputs
        self._last: tuple[Setting, dict[str, Tensor], Inputs, Run | None] | None = None

    def run(
        self, setting: Setting, rewired: nn.Module, done: Comparison
    ) -> tuple[dict[str, Tensor], Inputs, Run | None]:
        """The parameters and inputs that were used, and the run; None if only the model's own weights and mode work."""
        if self._last is None or self._last[0] != _way(setting):
            self._last = None  # frees its memory before new values are made
            values = values_for(setting, self.model, rewired)
            self._last = _way(setting), values, *_original_run(setting, self.model, self.inputs, values, done)
        return self._last[1:]


def _compare_in(setting: Setting, reference: _Reference, rewired: nn.Module, done: Comparison) -> None:
    original = reference.model
    values, given, expected = reference.run(setting, rewired, done)
    if expected is None or not any(finite(output) for output in expected.outputs):
        return  # with perturbed weights, or in this mode, there are no finite outputs
    try:
        actual = run(setting, rewired, given, values, dict(expected.gradients))
    except OutOfOrder as error:
        if setting.gradients and not setting.training:
            raise
        raise OutOfOrder(f"in {setting.name}, the model takes another way: {error}") from error
    except RewireError:
        raise
    except Exception as error:
        raise ValidationMismatch(
            f"the rewritten {type(original).__name__} fails where the original runs ({setting.name}): "
            f"{type(error).__name__}: {error}"
        ) from error
    problem = _difference(setting, expected, actual, done)
    if problem and not _is_noise(setting, original, rewired, given, values):
        raise _mismatch(problem, setting, original, rewired, given, values)
    if problem:
        done.outputs += sum(map(finite, expected.outputs))
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


def _original_run(
    setting: Setting, original: nn.Module, inputs: Inputs, values: dict[str, Tensor], done: Comparison
) -> tuple[Inputs, Run | None]:
    """The inputs that were used, and the run; None if only the model's own weights and mode work."""
    if setting.strided:
        given = strided(inputs)
        try:
            return given, run(setting, original, given, values)
        except Exception as error:  # not every model runs on strided inputs
            log.debug("%s does not run on strided inputs: %s", type(original).__name__, error)
    try:
        return inputs, run(setting, original, inputs, values)
    except Exception as error:
        if setting.perturbed or setting.training:
            log.info("%s does not run in %s: %s", type(original).__name__, setting.name, error)
            done.failed = f"{type(error).__name__}: {error}"
            return inputs, None
        raise BadExampleInputs(
            f"{type(original).__name__} does not run on the example inputs: {type(error).__name__}: {error}"
        ) from error


def _difference(setting: Setting, expected: Run, actual: Run, done: Comparison) -> str:
    """The first difference, in words; empty if there is none."""
    equal = True
    if len(expected.outputs) != len(actual.outputs):
        return f"the rewritten model returns {len(actual.outputs)} tensors, not {len(expected.outputs)}"
    for number, (a, b) in enumerate(zip(expected.outputs, actual.outputs, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {number} is {described(b)} in the rewritten model, and {described(a)} in the original"
        error = relative_error(a, b)
        if error > max(tolerance(a), setting.within):
            return f"output {number} of the rewritten model differs from the original's by {error:.1e} (relative)"
        equal = equal and error == 0
        done.outputs += finite(a)
        done.error = max(done.error, error)
    return "" if setting.rounding and not equal else next(iter(actual.wrong), "")


def _is_noise(
    setting: Setting, original: nn.Module, rewired: nn.Module, inputs: Inputs, values: dict[str, Tensor]
) -> bool:
    """Whether a stricter look finds the models equal after all.

    It uses random numbers that do not depend on memory layout; then float64, if rounding alone changes the original as
    much (batch norms over few values amplify it); then the tolerance of the least precise hidden states, as outputs may
    be more precise (a float32 head after bfloat16 blocks).
    """
    strict = dataclasses.replace(setting, rounding=False, dtype=torch.float64)
    exact = dataclasses.replace(setting, dtype=torch.float64)
    with ByPlace():
        expected = run(setting, original, inputs, values)
        if not _problem(setting, expected, rewired, inputs, values):
            return True
        try:
            values64 = values_for(exact, original, rewired)
            if not setting.moved and not _problem(strict, expected, original, inputs, values64):
                return False
            if not _problem(exact, run(exact, original, inputs, values64), rewired, inputs, values64):
                return True
        except Exception as error:  # not every model runs in float64
            log.debug("%s in float64: %s", type(original).__name__, error)
        coarse = dataclasses.replace(setting, within=coarsest(setting, original, inputs, values))
        return not _problem(coarse, expected, rewired, inputs, values)


def _problem(setting: Setting, expected: Run, model: nn.Module, inputs: Inputs, values: dict[str, Tensor]) -> str:
    """The first difference in a run of ``model``, in the precision of ``expected``; empty if there is none."""
    actual = run(setting, model, inputs, values, dict(expected.gradients))
    if len(actual.outputs) == len(expected.outputs):
        actual.outputs = [b.to(a.dtype) for a, b in zip(expected.outputs, actual.outputs, strict=True)]
    return _difference(setting, expected, actual, Comparison())


def _mismatch(
    problem: str,
    setting: Setting,
    original: nn.Module,
    rewired: nn.Module,
    inputs: Inputs,
    values: dict[str, Tensor],
) -> RewireError:
    """The error, with the first block that differs; another error if the original differs from itself."""
    expected, again, actual = (block_outputs(setting, m, inputs, values) for m in (original, original, rewired))
    unsteady = _first(expected, again)
    if unsteady:
        return BadExampleInputs(
            f"{type(original).__name__} does not compute the same twice with the same random numbers (module "
            f"'{unsteady}', {setting.name}), so it cannot be validated. Pass validate=False if that is intended."
        )
    first = _first(expected, actual)
    where = f"the first block that differs is '{first}'" if first else "no single block differs by that much"
    why = _ROUNDING if _amplifies_rounding(setting, original, inputs, values) else ""
    return ValidationMismatch(f"{problem}, in {setting.name}; {where}.{why}")


_ROUNDING = (
    " The original's own results change that visibly if each of its weights is rounded to the next number, so rounding "
    "alone may be the cause, and nothing can be told from these weights. Load trained weights, or run fewer iterations "
    "of the model, in place of untrained ones; or pass validate=False."
)


def _amplifies_rounding(setting: Setting, original: nn.Module, inputs: Inputs, values: dict[str, Tensor]) -> bool:
    """Whether the original differs from itself, by more than the tolerance, with weights that are rounded otherwise."""
    own = {name: values.get(name, p.detach()) for name, p in original.named_parameters()}
    own = {name: value for name, value in own.items() if type(value) is Tensor and value.dtype in _ROUNDED}
    rounded = {name: value * (1 + torch.finfo(value.dtype).eps) for name, value in own.items()}
    with ByPlace():
        return bool(_problem(setting, run(setting, original, inputs, values), original, inputs, values | rounded))


def _first(expected: Iterable[tuple[str, Tensor]], actual: Iterable[tuple[str, Tensor]]) -> str:
    """Path of the first module whose output differs; empty if there is none."""
    known = dict[str, list[Tensor]]()
    for path, value in expected:
        known.setdefault(path, []).append(value)
    for path, value in actual:
        calls = known.get(path)
        if not calls:
            continue
        reference = calls.pop(0)
        if reference.shape != value.shape or relative_error(reference, value) > tolerance(value):
            return path
    return ""
