"""What has to hold for every net: it is right or refused, and nothing of the caller's has changed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from comparing import operations, tensors_in
from mixing import autograd_alone, learned
from torch import Tensor, nn

import rewire
from fuzz.nets import WIDTH, Net
from rewire.copies import ByPlace
from rewire.kernels.cpu import plain

#: A learned topology for each net, which starts as the original network.
TOPOLOGIES = ("denseformer", "grn-v2", "layerscale", "ancre-none")
#: One for each net that has gradients written by hand, with options that change how these are arranged.
BY_HAND: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ancre-ingoing", {}),
    ("ancre-ingoing", {"block": 2}),
    ("denseformer", {"period": 2}),
    ("grn-v3", {}),
    ("grn-v3", {"block": 2}),
    ("attnres", {}),
    ("attnres", {"block": 2}),
    ("muddformer", {}),
    ("hc-static", {}),
    ("hc-dynamic", {}),
    ("frac-hc", {}),
    ("mhc", {}),
)
#: One for each net and its twin.
TWINNED: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in ("ancre-ingoing", "dca", "denseformer", "grn-v3", "muddformer", "hc-dynamic")),
    *((name, {}) for name in ("attnres", "mhc")),
    ("ancre-ingoing", {"sources": ["x0", -2]}),
    ("grn-v3", {"sources": [-2]}),
    ("muddformer", {"units": [-1, "output"], "sources": ["x0"], "channels": ["v", "shortcut"]}),
    ("attnres", {"sources": ["x0", -1]}),
)


def check(net: Net, folder: Path, validate: bool = True) -> str:
    """Rewire a net with plain connections, and with learned ones, and compare.

    Args:
        net: the net.
        folder: for its file.
        validate: whether rewire compares it, too.

    Returns:
        ``"right"``; or why it was refused; or ``"invalid"``: the net does not run by itself.

    Raises:
        AssertionError: it is wrong.
    """
    torch.manual_seed(0)
    model = net.build(folder)
    x, mask = torch.randn(2, 4, WIDTH), torch.tensor([1.0, 1, 0, 1]).view(1, 4, 1)
    try:
        for training in (False, True):
            with mock.patch("torch.utils.checkpoint.checkpoint", _uncheckpointed):
                _run(model.train(training), (x, mask))
            _run(model.train(training), (x, mask))
        _run(model, (x,))
    except RuntimeError:
        return "invalid"  # an in-place operation on what a gradient needs, say; checkpoints do not look for these
    model = net.build(folder)
    refusal = _rewired_right(model, "residual", (x, mask), True, validate)
    if refusal:
        return refusal
    topology = TOPOLOGIES[len(net.source) % len(TOPOLOGIES)]
    refusal = _rewired_right(model, topology, (x, mask), False, validate)
    if refusal:
        return refusal
    modes = (False,) if net.repeats_effects else (False, True)
    name, options = BY_HAND[len(net.source) % len(BY_HAND)]
    refusal = _as_autograd_has_it(model, name, options, (x, mask), modes)
    if refusal:
        return refusal
    name, options = TWINNED[len(net.source) % len(TWINNED)]
    twin = dataclasses.replace(net, twin=True).build(folder)
    twin.load_state_dict(model.state_dict())
    told, its = (_run(each.eval(), (x, mask))[0] for each in (model, twin))
    if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(told, its, strict=True)):
        return "right"  # it is none: what holds a state by another name sees what the net writes to it in place
    buffers = not net.counts_the_start
    refusals = [_as_its_twin(model, twin, name, options, (x, mask), modes, buffers, by) for by in (True, False)]
    return next(filter(None, refusals), "right")


def _uncheckpointed(function: Any, *args: Any, **options: Any) -> Any:
    named = ("use_reentrant", "context_fn", "determinism_check", "preserve_rng_state", "debug", "early_stop")
    return function(*args, **{name: value for name, value in options.items() if name not in named})


def _rewired_right(model: nn.Module, topology: str, inputs: tuple[Tensor, ...], exact: bool, validate: bool) -> str:
    """Empty, or why it was refused."""
    before, world = _state(model), _world()
    try:
        rewired = rewire.compile(model, topology, example_inputs=inputs, validate=validate)
    except rewire.RewireError as error:
        if not exact and isinstance(error, rewire.UnsupportedTopology):
            return ""  # a post-norm trunk, say
        return f"{type(error).__name__}: {error}"
    finally:
        _assert_same(before, _state(model))
        _assert_same(world, _world())
    try:
        for training in (False, True) if exact else ():
            assert operations(rewired, inputs, {}, training) == operations(model, inputs, {}, training)
        for training in (False, True):
            for length in (4, 3):
                given = tuple(t[:, :length].contiguous() for t in inputs)
                _assert_equal(model.train(training), rewired.train(training), given, exact)
        with torch.no_grad():
            for parameter in model.parameters():  # which both have
                parameter.add_(0.05 * torch.randn_like(parameter))
        _assert_equal(model, rewired, inputs[:1], exact)
    except (rewire.OutOfOrder, rewire.UnsupportedCall) as error:  # without a mask, or by a draw, it takes another way
        return f"{type(error).__name__} when called: {error}"
    return ""


def _as_autograd_has_it(
    model: nn.Module, topology: str, options: dict[str, Any], inputs: tuple[Tensor, ...], modes: tuple[bool, ...]
) -> str:
    """Empty, or why it was refused: weights that mix give what they give with gradients left to autograd."""
    try:
        rewired = rewire.compile(model, topology, example_inputs=inputs, **options)
    except rewire.RewireError as error:
        return "" if isinstance(error, rewire.UnsupportedTopology) else f"{type(error).__name__}: {error}"
    with torch.no_grad():
        for weight in learned(rewired).values():
            weight.add_(0.3 * torch.randn_like(weight))
    try:
        for training in modes:
            rewired.train(training)
            with mock.patch.object(plain, "WORTHWHILE", 0), ByPlace():  # states have other strides
                by_hand = _run(rewired, inputs)
            with autograd_alone(), ByPlace():
                _assert_close(by_hand, _run(rewired, inputs))
    except rewire.OutOfOrder as error:  # by the luck of a draw, it takes another way
        return f"OutOfOrder when called: {error}"
    return ""


def _as_its_twin(
    model: nn.Module,
    twin: nn.Module,
    topology: str,
    options: dict[str, Any],
    inputs: tuple[Tensor, ...],
    modes: tuple[bool, ...],
    buffers: bool,
    validate: bool,
) -> str:
    """Empty, or why it was refused: with connection weights that mix, it is what its twin is, ``buffers`` too.

    In calls like the example's, and in shorter ones without a mask.
    """
    try:
        rewired = rewire.compile(model, topology, example_inputs=inputs, validate=validate, **options)
        plain = rewire.compile(twin, topology, example_inputs=inputs, validate=False, **options)
    except rewire.RewireError as error:
        return "" if isinstance(error, rewire.UnsupportedTopology) else f"{type(error).__name__}: {error}"
    weights = learned(rewired)
    if _adds(rewired) != _adds(plain) or weights.keys() != learned(plain).keys():
        return ""  # not all of it was found in this form, and `rewire.inspect` says so
    with torch.no_grad():
        for name, weight in weights.items():
            weight.add_(0.3 * torch.randn_like(weight))
            learned(plain)[name].copy_(weight)
    try:
        for training, given in itertools.product(modes, (inputs, (inputs[0][:, :3].contiguous(),))):
            with ByPlace():
                expected, actual = _run(plain.train(training), given), _run(rewired.train(training), given)
            told = {name: x for name, x in expected[1].items() if buffers or not name.startswith("buffer ")}
            _assert_close(actual, (expected[0], told))
    except (rewire.OutOfOrder, rewire.UnsupportedCall) as error:  # it may take another way
        return f"{type(error).__name__} when called: {error}"
    return ""


def _adds(model: nn.Module) -> dict[str, list[tuple[str, bool]]]:
    """Of each trunk the block of each add, and whether something makes the next state of its sum."""
    trunks = rewire.inspect(model).trunks
    return {trunk.name: [(site.block, bool(site.post)) for site in trunk.sites] for trunk in trunks}


def _assert_equal(model: nn.Module, rewired: nn.Module, inputs: tuple[Tensor, ...], exact: bool) -> None:
    # learned topologies have states of other strides, in whose order random numbers are drawn
    with contextlib.nullcontext() if exact else ByPlace():
        expected, actual = _run(model, inputs), _run(rewired, inputs)
    _assert_close(actual, expected)
    if exact:
        assert expected[1].keys() == actual[1].keys()


_Run = tuple[list[Tensor], dict[str, Tensor]]  # as `_run` returns it


def _assert_close(actual: _Run, expected: _Run) -> None:
    """To the precision of the largest output: states may double in each block."""
    assert len(expected[0]) == len(actual[0])
    for a, b in zip(expected[0], actual[0], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5 * max(1.0, float(a.abs().max())))
    largest = max((float(gradient.abs().max()) for gradient in expected[1].values()), default=0.0)
    for name, gradient in expected[1].items():
        # biases of keys have none but for rounding: that of the others
        scale = max(float(gradient.abs().max()), 1e-2, 1e-3 * largest)
        torch.testing.assert_close(actual[1][name], gradient, rtol=1e-3, atol=1e-4 * scale, msg=name)


def _run(model: nn.Module, inputs: tuple[Tensor, ...]) -> _Run:
    """Outputs, and gradients and new values of buffers by name; buffers and other state of the model as before."""
    kept = copy.deepcopy(dict(model.named_buffers()))
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model.zero_grad()
    outputs = [t for t in tensors_in(model(*inputs)) if t.is_floating_point()]
    torch.manual_seed(2)
    loss = torch.stack([(torch.rand(t.shape) * t).sum() for t in outputs]).sum()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for name, value in model.named_buffers():
            gradients[f"buffer {name}"] = value.clone()
            value.copy_(kept[name])
    return [t.detach() for t in outputs], gradients


def _state(model: nn.Module) -> dict[str, Any]:
    """All that a caller can see of the model."""
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        state[path] = (type(module), module.training, sorted(vars(module)), len(module._forward_hooks))
        state[f"{path} attributes"] = repr([getattr(module, "calls", 0), getattr(module, "log", [])])
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        state[f"{name} id"], state[f"{name} value"] = id(value), value.detach().clone()
        state[f"{name} gradient"] = None if value.grad is None else value.grad.clone()
    return state


def _world() -> dict[str, Any]:
    """Global state that rewiring could change."""
    return {
        "torch's random state": torch.get_rng_state(),
        "random's": random.getstate(),
        "numpy's": repr(np.random.get_state()),
        "call": nn.Module.__call__,
        "functions": [torch.arange, torch.zeros, torch.rand, torch.nn.functional.dropout, torch.Tensor.add],
        "gradients": torch.is_grad_enabled(),
    }


def _assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        same = torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name]
        assert same, f"{name} has changed"
