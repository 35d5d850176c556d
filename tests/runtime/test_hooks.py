"""Forward hooks where streams pass: a model rewired at a preserving start does with them what the original does."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import assert_close, evaluate
from every_topology import FAMILIES, FEW, PRESERVING, compiled, kinds_first, mixed
from mixing import ids, llama
from models import MaskedStack, PreNorm, Stack, WithMask, vectors
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint

import rewire
from rewire.patterns import first_given, patterns_for
from rewire.patterns.tiny import tiny_model
from rewire.runtime.stream import Stream


class Checkpointed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.training else layer(x)
        return self.out(x)


class Groups(Stack):
    """Blocks in containers that pass the stream on."""

    def __init__(self) -> None:
        super().__init__(PreNorm, depth=4)
        self.layers: Any = nn.Sequential(nn.Sequential(*self.layers[:2]), nn.Sequential(*self.layers[2:]))


def changed(x: Tensor) -> Tensor:
    """What steering does: in any class but that of tensors, it would be left out."""
    return 0.5 * x + x.detach().roll(1, -1) + 0.1 if type(x) is Tensor else x


def by_isinstance(_m: Any, _a: Any, out: Any) -> Any:
    return changed(out) if isinstance(out, Tensor) else None


def by_is_tensor(_m: Any, _a: Any, out: Any) -> Any:
    return changed(out) if torch.is_tensor(out) else None


def ablated(_m: Any, _a: Any, out: Tensor) -> Tensor:
    return torch.zeros_like(out)


def in_place(_m: Any, _a: Any, out: Tensor) -> None:
    out.mul_(0.5).add_(0.1)


def through_a_view(_m: Any, _a: Any, out: Tensor) -> None:
    out[..., 0].zero_()


def through_data(_m: Any, _a: Any, out: Tensor) -> None:
    out.data.mul_(0.5)


def from_the_input(_m: Any, args: Any, out: Tensor) -> Tensor:
    return out + 0.5 * args[0]


def read_only(_m: Any, _a: Any, out: Tensor) -> None:
    assert type(out) is Tensor and out.isfinite().all()


AFTER: list[Callable[..., Any]] = [by_isinstance, by_is_tensor, ablated, in_place, through_a_view, through_data]
AFTER += [from_the_input, read_only]


def before_it(_m: Any, args: Any) -> Any:
    return (changed(args[0]), *args[1:])


def before_it_alone(_m: Any, args: Any) -> Any:
    return changed(args[0])


def before_in_place(_m: Any, args: Any) -> None:
    args[0].mul_(0.5)


BEFORE: list[Callable[..., Any]] = [before_it, before_it_alone, before_in_place]
HOOKS = [hook.__name__ for hook in (*AFTER, *BEFORE)]


def register(model: nn.Module, name: str) -> None:
    """The hook, on the second block and the last."""
    for number in (1, len(model.layers) - 1):
        for hook in (hook for hook in AFTER if hook.__name__ == name):
            model.layers[number].register_forward_hook(hook)
        for hook in (hook for hook in BEFORE if hook.__name__ == name):
            model.layers[number].register_forward_pre_hook(hook)


def compare(model: nn.Module, rewired: nn.Module, train: bool = False, *args: Any) -> None:
    args = args or (vectors(),)
    expected = evaluate(model, args, {}, train)
    assert_close(expected, evaluate(rewired, args, {}, train), 2e-5, 1e-4)


def check_hook(model: nn.Module, hook: str, key: str) -> None:
    rewired = compiled(model, key, validate=False)
    for other in (model, rewired):
        register(other, hook)
    for train in (False, True):
        compare(model, rewired, train)


#: Each hook with some topologies, and each topology with some hooks.
PAIRS = [(hook, key) for n, hook in enumerate(HOOKS) for m, key in enumerate(FAMILIES) if key in FEW or n % 6 == m % 6]


@pytest.mark.parametrize(("hook", "key"), kinds_first(PAIRS, few=HOOKS))
def test_what_hooks_on_blocks_do(hook: str, key: str) -> None:
    check_hook(Stack(PreNorm, depth=3), hook, key)


@pytest.mark.parametrize(
    ("hook", "key"),
    [
        pytest.param(hook, key, marks=() if key == "hc-dynamic" else pytest.mark.slow)
        for hook, key in PAIRS
        if hook != "before_in_place"
    ],
)
def test_what_hooks_on_checkpointed_blocks_do(hook: str, key: str) -> None:
    """But not one that writes in place before: autograd refuses that in the original as well."""
    check_hook(Checkpointed(PreNorm, depth=3), hook, key)


#: A norm that keys and values have copies of shares its gradient with them.
WITHOUT_COPIES = [key for key in PRESERVING if not key.endswith("-norms")]


@pytest.mark.parametrize("key", kinds_first(WITHOUT_COPIES))
def test_every_topology_takes_changes(key: str) -> None:
    model = llama()
    rewired = compiled(model, key, validate=False)
    for other in (model, rewired):
        other.model.layers[0].register_forward_hook(by_isinstance)
        other.model.layers[2].register_forward_pre_hook(before_it)
    compare(model, rewired, False, ids())


def in_a_tuple(_m: Any, _a: Any, out: tuple[Tensor, Tensor]) -> Any:
    return changed(out[0]), out[1]


def in_a_tuple_in_place(_m: Any, _a: Any, out: tuple[Tensor, Tensor]) -> None:
    out[0][..., 1].mul_(0.5)


def with_keywords(_m: Any, args: Any, kwargs: Any) -> Any:
    return (changed(args[0]),), {**kwargs, "mask": None}


def after_with_keywords(_m: Any, args: Any, kwargs: Any, out: Any) -> Any:
    return out[0] + changed(args[0]) + kwargs["mask"].mean(), out[1]


@pytest.mark.each_once
@pytest.mark.parametrize("key", ["ancre-ingoing", "grn-v1", "hc-static", "muddformer"])
@pytest.mark.parametrize("hook", [in_a_tuple, in_a_tuple_in_place, with_keywords, after_with_keywords])
def test_tuples_and_keywords(hook: Callable[..., Any], key: str) -> None:
    model, args = MaskedStack(WithMask), (vectors(), torch.rand(2, 9, 1))
    rewired = compiled(model, key, validate=False)
    for layer in (*model.layers, *rewired.layers):
        if hook is with_keywords:
            layer.register_forward_pre_hook(hook, with_kwargs=True)
        else:
            layer.register_forward_hook(hook, with_kwargs=hook is after_with_keywords)
    compare(model, rewired, True, *args)


@pytest.mark.each_once
@pytest.mark.parametrize("key", ["residual", "denseformer", "hc-dynamic", "dca"])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_hooks_on_all_modules(model_type: str, key: str, before: bool) -> None:
    """In the original there is no connection that they would be called for."""
    model = tiny_model(model_type).eval()
    rewired = compiled(model, key, validate=False)

    def after_it(_m: Any, _args: Any, out: Any) -> Any:
        return 1.01 * out if type(out) is Tensor and out.is_floating_point() else None

    def before_it(_m: Any, args: Any) -> Any:
        return tuple(1.01 * x if type(x) is Tensor and x.is_floating_point() else x for x in args)

    handle = register_module_forward_pre_hook(before_it) if before else register_module_forward_hook(after_it)
    try:
        compare(model, rewired, False, ids())
    finally:
        handle.remove()
    compare(model, rewired, False, ids())


@pytest.mark.parametrize("key", ["dca", "muddformer", "attnres-qkv"])
def test_what_attentions_with_separate_inputs_get(key: str) -> None:
    def steered(_m: Any, args: Any, kwargs: Any) -> Any:
        assert type(kwargs["hidden_states"]) is Tensor
        return args, {**kwargs, "hidden_states": changed(kwargs["hidden_states"])}

    model = llama()
    rewired = compiled(model, key, validate=False)
    for other in (model, rewired):
        for layer in other.model.layers:
            layer.self_attn.register_forward_pre_hook(steered, with_kwargs=True)
    compare(model, rewired, False, ids())


def first_changed(_m: Any, _a: Any, out: Any) -> Any:
    return (changed(out[0]), *out[1:]) if isinstance(out, tuple) else changed(out)


@pytest.mark.parametrize(
    ("model_type", "key"),
    kinds_first(
        [
            *((kind, key) for kind in ("gpt2", "t5", "swin") for key in (*FAMILIES, "dca")),
            *((kind, key) for kind in ("bert", "albert", "convnext") for key in ("ancre-ingoing", "muddformer")),
        ],
        few=["gpt2", "t5", "swin"],
    ),
)
def test_blocks_of_models(model_type: str, key: str) -> None:
    """Post-norm, shared and convolutional blocks, encoders with decoders, several stages."""
    model = tiny_model(model_type).eval()
    args, kwargs = first_given(patterns_for(model), "example_inputs")(model)
    rewired = compiled(model, key, validate=False)
    trunks = [connection.trunk for connection in rewire.connections(rewired).values()]
    for block in sorted({site.block for trunk in trunks for site in trunk.sites}):
        for other in (model, rewired):
            other.get_submodule(block).register_forward_hook(first_changed)
    assert_close(evaluate(model, args, kwargs), evaluate(rewired, args, kwargs), 1e-4, 1e-3)


@pytest.mark.parametrize("key", ["ancre-ingoing", "grn-v1"])
@pytest.mark.parametrize("hook", [by_isinstance, before_it])
def test_containers_that_pass_streams_on(hook: Callable[..., Any], key: str) -> None:
    model = Groups()
    rewired = compiled(model, key, validate=False)
    for other in (model, rewired):
        if hook is before_it:
            other.layers[1].register_forward_pre_hook(hook)
        else:
            other.layers[0].register_forward_hook(hook)
    compare(model, rewired)
    assert type(rewire.restore(rewired).layers[0]) is nn.Sequential


def test_they_stay_with_copies_and_go_back_with_restore() -> None:
    model = Stack(PreNorm)
    model.layers[0].register_forward_hook(by_isinstance)  # before it is rewired
    rewired = rewire.compile(model, example_inputs=(vectors(),))
    rewired.layers[1].register_forward_hook(in_place)
    again = pickle.loads(pickle.dumps(copy.deepcopy(rewired)))
    plain = rewire.restore(again)
    assert list(plain.layers[0]._forward_hooks.values()) == [by_isinstance]
    model.layers[1].register_forward_hook(in_place)
    for other in (rewired, again, plain):
        compare(model, other)


def test_gradients_reach_what_hooks_see() -> None:
    """Attribution patching: as in the original, the hidden state is on the way to the output."""
    model = Stack(PreNorm)
    rewired = compiled(model, "grn-v2", validate=False)
    grads = []
    for other in (model, rewired):
        seen: list[Tensor] = []
        other.layers[1].register_forward_hook(lambda _m, _a, out, seen=seen: (out.retain_grad(), seen.append(out))[1])
        other(vectors()).square().sum().backward()
        grads.append(seen[0].grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (lambda out: out[:1], "a tensor of shape"),
        (lambda out: out.double(), "a tensor of .*float64"),
        (lambda out: "text", "a str"),
    ],
)
def test_what_does_not_fit_is_refused(made: Callable[[Tensor], Any], what: str) -> None:
    rewired = compiled(Stack(PreNorm), "ancre-ingoing", validate=False)

    def steering(_m: Any, _args: Any, out: Tensor) -> Any:
        return made(out)

    rewired.layers[1].register_forward_hook(steering)
    with pytest.raises(
        rewire.UnsupportedCall, match=rf"forward hook .*steering on 'layers.1' returned {what}.*restore"
    ):
        rewired(vectors())


def with_states(key: str) -> tuple[Stack, nn.Module]:
    model = Stack(PreNorm, depth=3)
    return model, mixed(model, key)


def test_a_state_is_replaced() -> None:
    """ANCRe: x_1 becomes what the hook returned, for all that read it."""
    model, rewired = with_states("ancre-none")
    rewired.layers[0].register_forward_hook(by_isinstance)
    p = rewire.coefficients(rewired)["layers"]
    states = [model.inp(vectors())]
    for t, layer in enumerate(model.layers):
        x = layer(states[-1]) - states[-1] + sum(p[t, i] * state for i, state in enumerate(states))
        states.append(changed(x) if t == 0 else x)
    torch.testing.assert_close(rewired(vectors()), model.out(states[-1]), rtol=1e-4, atol=1e-4)


def test_a_mix_is_replaced_for_who_reads_it_and_the_difference_written() -> None:
    """GRN: unit 2 reads what the hook returned, and what it writes has the difference in it."""
    model, rewired = with_states("grn-v1")
    rewired.layers[0].register_forward_hook(by_isinstance)
    b = rewire.coefficients(rewired)["layers"]
    increments = [model.inp(vectors())]
    for t, layer in enumerate(model.layers):
        read = sum(b[t, i] * f for i, f in enumerate(increments))
        seen = changed(read) if t == 1 else read
        increments.append(layer(seen) - seen + (seen - read))
    output = sum(b[3, i] * f for i, f in enumerate(increments))
    torch.testing.assert_close(rewired(vectors()), model.out(output), rtol=1e-4, atol=1e-4)


def test_hooks_of_torch_get_streams() -> None:
    """FSDP2 and checkpointing take them apart."""
    rewired = compiled(Stack(PreNorm), "ancre-ingoing", validate=False)
    seen: list[Any] = []

    def hook(_m: Any, _args: Any, out: Any) -> None:
        seen.append(type(out))

    rewired.layers[0].register_forward_hook(hook)
    hook.__module__ = "torch.distributed.fsdp"
    rewired.layers[0].register_forward_hook(functools.partial(hook))
    rewired(vectors())
    assert seen == [Tensor, Stream]


@pytest.mark.slow
@pytest.mark.parametrize("key", ["ancre-ingoing", "grn-v1", "hc-static"])
def test_hooks_compile_in_one_graph(key: str) -> None:
    model = Stack(PreNorm)
    rewired = compiled(model, key, validate=False)
    for other in (model, rewired):
        other.layers[0].register_forward_hook(by_isinstance)
        other.layers[2].register_forward_pre_hook(before_it)
    with torch.no_grad():
        got = torch.compile(rewired, backend="aot_eager", fullgraph=True)(vectors())
    torch.testing.assert_close(got, model(vectors()), rtol=1e-4, atol=1e-5)
