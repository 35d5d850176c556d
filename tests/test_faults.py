"""What has to hold whatever a model does: threads, side effects, tests on arguments, validation, the caller's things.

Where a test allows an error, that is a `rewire.RewireError`: a model is right, or refused, and never silently wrong.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import pickle
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from comparing import Results, assert_close, evaluate
from models import WIDTH, Mlp, NanoGPT, PostNorm, PreNorm, WithDropPath, token_ids, vectors
from test_errors import Wrong, WrongBackward
from torch import Tensor, nn

import rewire
from rewire.errors import OutOfOrder

TOPOLOGIES = ["residual", "ancre-none"]  # the second starts as the original network


class Stack(models.Stack):
    """Blocks in a list: two, which is enough to connect."""

    def __init__(self, block: Callable[[], nn.Module], depth: int = 2) -> None:
        super().__init__(block, depth)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def _results(model: nn.Module, training: bool, *args: Any, **kwargs: Any) -> Results:
    _seed()
    return evaluate(model, args, kwargs, training)


def _seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def assert_same(model: nn.Module, rewired: nn.Module, *args: Any, **kwargs: Any) -> None:
    """In both modes, on the same random numbers: outputs, gradients, and what buffers hold after a call."""
    for training in (False, True):
        assert_close(_results(model, training, *args, **kwargs), _results(rewired, training, *args, **kwargs))


# -- the process around ------------------------------------------------------------------------------------------------


def _globals() -> list[Any]:
    """What tracing once replaced, and what is set for a thread or for the process."""
    return [
        *(nn.Module.__call__, nn.Module._call_impl, nn.Module.__getattr__, nn.Module.__setattr__),
        *(torch.arange, torch.zeros, torch.ones, torch.full, torch.tensor, torch.empty, torch.linspace, torch.rand),
        *(torch.is_tensor, torch.Tensor.add, torch.Tensor.__add__, F.dropout, F.layer_norm, isinstance, len),
        *(torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()),
        *torch.overrides._get_current_function_mode_stack(),
    ]


def _run_together(*works: Callable[[], None]) -> list[BaseException]:
    """Each of the works in a thread of its own; the errors that they raise."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.fixture
def _switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_switching")
@pytest.mark.parametrize("given", [True, False], ids=["recorded", "traced"])
@pytest.mark.parametrize("blocks", [(PreNorm, PostNorm), (WithDropPath, WithDropPath)], ids=["steady", "drawing"])
def test_threads_that_rewire_disturb_nobody(blocks: Sequence[Callable[[], nn.Module]], given: bool) -> None:
    """Two rewire, with inputs to run on or without, while a third one runs another model."""
    before, adds, running = _globals(), list[int](), [len(blocks)]
    other = NanoGPT().eval()
    expected = other(token_ids())[0]

    def rewires(block: Callable[[], nn.Module]) -> None:
        try:
            for _ in range(4):
                inputs = (vectors(),) if given else None
                model = Stack(block).eval()
                rewired = rewire.compile(model, "ancre-none", example_inputs=inputs, validate=given)
                torch.testing.assert_close(rewired(vectors()), model(vectors()))
                adds.extend(len(one.layout.units) for one in rewire.connections(rewired).values())
        finally:
            running[0] -= 1

    def runs() -> None:
        while running[0]:
            logits, _ = other(token_ids())
            assert type(logits) is Tensor and torch.equal(logits, expected)

    assert _run_together(*(lambda block=block: rewires(block) for block in blocks), runs) == []  # type: ignore[misc]
    assert adds == [4] * 8
    assert all(a is b or a == b for a, b in zip(before, _globals(), strict=True))


# -- what a forward does besides ---------------------------------------------------------------------------------------


class PythonsRandom(Block):
    def forward(self, x: Tensor) -> Tensor:
        scale = 2 * random.random() if self.training else 1.0
        return x + scale * self.mlp(self.norm(x))


class NumpysRandom(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp(self.norm(x))
        if self.training and np.random.rand() < 0.5:
            h = h * 2.0
        return x + h


class DrawnItem(Block):
    def forward(self, x: Tensor) -> Tensor:
        kept = not self.training or torch.rand(1).item() < 0.5
        return x + self.mlp(self.norm(x)) * float(kept)


class Statistics(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.training:
            with torch.no_grad():
                mean = h.mean((0, 1))
                self.mean.mul_(0.9).add_(0.1 * mean)
                self.count += 1
        else:
            mean = self.mean
        return x + self.mlp(h - mean)


class NoGradInTheStream(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm(x))
        if self.training:
            with torch.no_grad():
                scale = x.square().mean().rsqrt()
            x = x * scale
        return x


class WithoutAutocast(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            h = self.mlp(self.norm(x.float()))
        return x + h


class GradMode(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp(self.norm(x))
        if not torch.is_grad_enabled():
            h = h * 0.5
        return x + h


class ChildsFlag(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp(self.norm(x))
        return x + (h * 0.5 if self.mlp.training else h)


class Logs(Block):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(float(x.detach().mean()))
        x = x + self.mlp(self.norm(x))
        self.log.append(float(x.detach().mean()))
        return x


BESIDES = [PythonsRandom, NumpysRandom, DrawnItem, Statistics, NoGradInTheStream, WithoutAutocast, GradMode]
BESIDES += [ChildsFlag, Logs]


def test_a_forward_that_asks_for_a_number_cannot_be_traced() -> None:
    with pytest.raises(rewire.NoResidualAdds, match="its forward cannot be traced"):
        rewire.compile(Stack(Logs), "ancre-none", validate=False)


@pytest.mark.parametrize(
    ("block", "given"), [(b, given) for b in BESIDES for given in (True, False) if given or b != Logs]
)
def test_what_a_forward_does_besides_is_done_as_before(block: type[Block], given: bool) -> None:
    model = Stack(block)
    inputs = (vectors(),) if given else None  # without, nothing is run
    rewired = rewire.compile(model, "ancre-none", example_inputs=inputs, validate=given)
    assert len(rewire.connections(rewired)["layers"].layout.units) == 2
    assert_same(model, rewired, vectors())
    rewired.layers[0].mlp.eval()
    model.layers[0].mlp.eval()
    for training in (True, False):
        for layer in (*model.layers, *rewired.layers):
            layer.training = training
        with torch.no_grad():
            _seed()
            expected = model(vectors())
            _seed()
            torch.testing.assert_close(rewired(vectors()), expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _seed()
            expected = model(vectors())
            _seed()
            torch.testing.assert_close(rewired(vectors()), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("block", [PythonsRandom, NumpysRandom, DrawnItem])
def test_draws_are_drawn_anew_in_each_call(block: type[Block]) -> None:
    model = Stack(block).train()
    rewired = rewire.compile(model, "residual", example_inputs=(vectors(),))
    _seed()
    expected = [model(vectors()) for _ in range(8)]
    _seed()
    actual = [rewired(vectors()) for _ in range(8)]
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    assert any(not torch.equal(actual[0], other) for other in actual[1:])


def test_what_is_logged_is_logged_by_the_module_that_runs() -> None:
    model = Stack(Logs).eval()
    rewired = rewire.compile(model, "ancre-none", example_inputs=(vectors(),))
    assert all(layer.log == [] for layer in (*model.layers, *rewired.layers))
    model(vectors()), rewired(vectors())
    for layer, other in zip(model.layers, rewired.layers, strict=True):
        assert len(layer.log) == len(other.log) == 2 and layer.log == pytest.approx(other.log)


def test_buffers_that_a_forward_counts_in_are_counted_as_before() -> None:
    model = Stack(Statistics).train()
    rewired = rewire.compile(model, "residual", example_inputs=(vectors(),))
    other = rewire.restore(rewired)
    for name, buffer in rewired.named_buffers():
        assert not buffer.any(), name
    rewired(vectors())
    counted = {name: buffer.clone() for name, buffer in rewired.named_buffers()}
    for buffer in other.buffers():
        buffer.zero_()
    other(vectors())
    assert len(counted) == 4
    for name, buffer in other.named_buffers():
        torch.testing.assert_close(buffer, counted[name])


class DropsItself(Block):
    """Stochastic depth by a draw: the whole block is skipped."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.5:
            return x
        return x + self.mlp(self.norm(x))


def test_a_block_that_skips_itself() -> None:
    model = Stack(DropsItself).train()
    rewired = rewire.compile(model, "residual", example_inputs=(vectors(),))
    skipped = []
    for seed in range(12):
        random.seed(seed)
        skipped.append(min(random.random() for _ in model.layers) < 0.5)
        random.seed(seed)
        expected = model(vectors())
        random.seed(seed)
        assert torch.equal(rewired(vectors()), expected)
    assert set(skipped) == {False, True}


# -- operations in place -----------------------------------------------------------------------------------------------


class MasksInput(Block):
    """Writes into what it was given, before a norm reads it."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x.masked_fill_(mask, 0.0)
        return x + self.mlp(self.norm(x))


class MasksSum(Block):
    """Writes into its own sum, before the next norm reads it."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.mlp(self.norm(x))
        if mask is not None:
            x.masked_fill_(mask, 0.0)
        return x + self.mlp(self.norm(x))


class MasksClone(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.mlp(self.norm(x))
        x = x.clone()
        if mask is not None:
            x.masked_fill_(mask, 0.0)
        return x + self.mlp(self.norm(x))


class MasksBranch(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.norm(x)
        if mask is not None:
            h.masked_fill_(mask, 0.0)
        h = self.mlp(h)
        if mask is not None:
            h.masked_fill_(mask, 0.0)
        return x + h


class MaskedStack(Stack):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x, mask)
        return self.out(x)


MASK = torch.tensor([False, True, False, True, True, False, False, False, True])[:, None]


@pytest.mark.each_once
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("block", [MasksInput, MasksSum, MasksClone, MasksBranch])
def test_a_mask_in_place_before_a_norm_is_right_or_refused(block: type[Block], topology: str, masked: bool) -> None:
    """Refused if it was not there when the model was rewired, but in the branch, where nobody else sees it."""
    model = MaskedStack(block).eval()
    example = (vectors(), MASK) if masked else (vectors(),)
    rewired = rewire.compile(model, topology, example_inputs=example)
    for args in ((vectors(), MASK), (vectors(),)):
        if len(args) <= len(example) or block is MasksBranch:
            assert_close(_results(model, True, *args), _results(rewired, True, *args))
        else:
            with pytest.raises(OutOfOrder, match="was written to in place"):
                _results(rewired, True, *args)


def test_a_mask_in_place_in_the_branch_is_right_with_and_without() -> None:
    model = MaskedStack(MasksBranch).eval()
    rewired = rewire.compile(model, "ancre-none", example_inputs=(vectors(), MASK))
    assert_same(model, rewired, vectors(), MASK)
    assert_same(model, rewired, vectors())


# -- tests of type and identity ----------------------------------------------------------------------------------------


class Mode(enum.Enum):
    HALF = "half"
    DOUBLE = "double"


class IsTensor(Block):
    def forward(self, x: Tensor, how: Any = None) -> Tensor:
        h = self.norm(x)
        if torch.is_tensor(how):
            h = h * how
        elif isinstance(how, (int, float)):
            h = h * how * 0.1
        return x + self.mlp(h)


class IsTrue(Block):
    def forward(self, x: Tensor, how: Any = None) -> Tensor:
        h = self.mlp(self.norm(x))
        if how is True:
            h = h * 0.5
        elif how is None:
            h = h * 0.25
        return x + h


class IsMode(Block):
    def forward(self, x: Tensor, how: Any = None) -> Tensor:
        scale = 0.5 if how is Mode.HALF else 2.0 if how == Mode.DOUBLE else 1.0
        return x + scale * self.mlp(self.norm(x))


class InDict(Block):
    scales: ClassVar[dict[Any, float]] = {"half": 0.5, "double": 2.0}

    def forward(self, x: Tensor, how: Any = None) -> Tensor:
        return x + self.scales.get(how, 1.0) * self.mlp(self.norm(x))


class ByType(Block):
    def forward(self, x: Tensor, how: Any = None) -> Tensor:
        h = self.mlp(self.norm(x))
        match how:
            case {"scale": float(scale)}:
                h = h * scale
            case [Tensor() as one, _]:
                h = h * one
            case str():
                h = -h
        return x + h


class HowStack(Stack):
    def forward(self, x: Tensor, how: Any = None) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x, how=how)
        return self.out(x)


VALUES: dict[type[Block], list[Any]] = {
    IsTensor: [None, torch.linspace(0, 1, 9)[:, None], 3, True],
    IsTrue: [None, True, False, 1],
    IsMode: [None, Mode.HALF, Mode.DOUBLE, "half"],
    InDict: [None, "half", "double", 3],
    ByType: [None, {"scale": 0.5}, [torch.tensor(0.5), 1], "negative"],
}


@pytest.mark.parametrize("example", [1, None], ids=["recorded", "traced"])
@pytest.mark.parametrize("block", list(VALUES))
def test_type_and_identity_of_an_argument_are_asked_in_each_call(block: type[Block], example: int | None) -> None:
    """Whichever value the model was rewired with, or if it was only traced."""
    model, values = HowStack(block), VALUES[block]
    inputs = None if example is None else (vectors(), values[example])
    rewired = rewire.compile(model, "residual", example_inputs=inputs, validate=inputs is not None)
    results = [_results(rewired, False, vectors(), how) for how in values]
    for how, actual in zip(values, results, strict=True):
        assert_close(_results(model, False, vectors(), how), actual)
    assert not torch.equal(results[0][0][0], results[1][0][0])


class TwoArguments(Block):
    """Attends to a memory, which may be the stream itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x), memory, memory)[0]
        return x + self.mlp(self.norm(x))


class IsSelf(TwoArguments):
    """Asks by identity whether it is."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        h = self.norm(x)
        h = self.mlp(h) if memory is x else self.attend(h, memory, memory)[0]
        return x + h


class SelfOrCross(Stack):
    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x, x if memory is None else memory)
        return self.out(x)


class MaybeCopies(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = x.contiguous()
        h = self.mlp(self.norm(x))
        return x + (h if y is x else 2 * h)


@pytest.mark.parametrize("block", [TwoArguments, IsSelf])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("memory", [None, torch.linspace(-1, 1, 2 * 4 * WIDTH).reshape(2, 4, WIDTH)])
def test_an_argument_that_is_the_stream_itself(block: type[Block], topology: str, memory: Tensor | None) -> None:
    model = SelfOrCross(block).eval()
    rewired = rewire.compile(model, topology, example_inputs=(vectors(), memory))
    assert_same(model, rewired, vectors(), memory)


@pytest.mark.parametrize("topology", [*TOPOLOGIES, "hc-static"])
def test_a_result_that_is_the_stream_itself(topology: str) -> None:
    model = Stack(MaybeCopies).eval()
    assert_same(model, rewire.compile(model, topology, example_inputs=(vectors(),)), vectors())


# -- validation that compares nothing ----------------------------------------------------------------------------------


class Slotted:
    __slots__ = ("logits",)

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Holder:
    def __init__(self, logits: Any) -> None:
        self.logits = logits


class Returns(Stack):
    def __init__(self, make: Callable[[Tensor], Any], block: Callable[[], nn.Module] = PreNorm) -> None:
        super().__init__(block)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.make(self.out(x))


NOTHING: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda logits: None,
    "number": lambda logits: float(logits.detach().sum()),
    "text": lambda logits: "done",
    "integers": lambda logits: logits.argmax(-1),
    "booleans": lambda logits: [logits > 0, {"all": (logits > 0).all()}],
    "object without tensors": lambda logits: Holder(logits.shape),
    "nan": lambda logits: logits * float("nan"),
    "infinite": lambda logits: {"logits": logits.abs() + float("inf")},
    "cut off": lambda logits: logits[:0],
}


@pytest.mark.parametrize("name", list(NOTHING))
def test_validation_that_compared_nothing_refuses(name: str) -> None:
    with pytest.raises(rewire.RewireError, match="nothing could be compared"):
        rewire.compile(Returns(NOTHING[name]).eval(), "residual", example_inputs=(vectors(),))


def test_an_empty_batch_validates_nothing() -> None:
    with pytest.raises(rewire.RewireError, match="nothing could be compared"):
        rewire.compile(Stack(PreNorm).eval(), "residual", example_inputs=(vectors()[:0],))


@pytest.mark.parametrize(
    "make",
    [
        lambda logits: Holder(logits),
        lambda logits: Holder([{"inner": Holder(logits)}]),
        lambda logits: Slotted(logits),
        lambda logits: types.SimpleNamespace(logits=logits),
        lambda logits: torch.complex(logits, logits),
        lambda logits: (logits.argmax(-1), torch.full_like(logits, float("nan")), logits),
        lambda logits: iter([logits]),
    ],
    ids=["object", "objects", "slots", "namespace", "complex", "partly", "iterator"],
)
def test_a_wrong_rewrite_is_seen_in_unusual_outputs_or_refused(make: Callable[[Tensor], Any]) -> None:
    with pytest.raises(rewire.ValidationMismatch):
        rewire.compile(Returns(make).eval(), Wrong(), example_inputs=(vectors(),))


@pytest.mark.parametrize(
    "make", [lambda logits: Holder(logits), lambda logits: torch.complex(logits, logits)], ids=["object", "complex"]
)
def test_unusual_outputs_are_compared(make: Callable[[Tensor], Any]) -> None:
    rewired = rewire.compile(Returns(make).eval(), "ancre-none", example_inputs=(vectors(),))
    assert len(rewire.connections(rewired)["layers"].layout.units) == 4


class ZeroTwice(PreNorm):
    """Each branch is zero at the start by two factors: a layer scale, and its last map."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma_1, self.gamma_2 = (nn.Parameter(torch.zeros(WIDTH)) for _ in range(2))
        for parameter in (*self.attn.out.parameters(), *self.mlp.down.parameters()):
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma_1 * self.attn(self.ln_1(x))
        return x + self.gamma_2 * self.mlp(self.ln_2(x))


class Drops(rewire.Residual):
    """Plain connections that lose unit 3's branch."""

    def merge(self, states: Any, weights: Any, t: int, *branches: Tensor) -> Tensor:
        return super().merge(states, weights, t, *(0 * f if t == 3 else f for f in branches))


class Repeats(rewire.Residual):
    """Plain connections that add the last branch twice."""

    def merge(self, states: Any, weights: Any, t: int, *branches: Tensor) -> Tensor:
        return super().merge(states, weights, t, *branches, *(branches if t == 4 else ()))


@pytest.mark.parametrize("topology", [Wrong, WrongBackward, Drops, Repeats])
@pytest.mark.parametrize("block", [PreNorm, ZeroTwice])
def test_zero_branches_hide_no_wrong_rewrite(block: Callable[[], nn.Module], topology: type[rewire.Topology]) -> None:
    with pytest.raises(rewire.ValidationMismatch, match=r"output 0|gradient"):
        rewire.compile(Stack(block), topology(), example_inputs=(vectors(),))


# -- streams outside the blocks ----------------------------------------------------------------------------------------


class KeepsLast(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
            self.hidden = x
        return self.out(x) + self.hidden.mean()


class KeepsAll(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        self.hidden = [x]
        for layer in self.layers:
            x = layer(x)
            self.hidden.append(x)
        return self.out(x)


class KeepsBefore(Stack):
    """Keeps the states in the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        self.hidden = {}
        for number, layer in enumerate(self.layers):
            self.hidden[number] = x
            x = layer(x)
        return self.out(x) * sum(self.hidden.values()).mean()


class KeepsInObject(Stack):
    def forward(self, x: Tensor) -> Any:
        cache = Holder([])
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
            cache.logits.append(x)
        cache.last = x
        return self.out(x), cache.logits[0].mean(), list(cache.logits), cache.last


class ReturnsObject(Stack):
    def forward(self, x: Tensor) -> Any:
        x = self.inp(x)
        output = {"states": Holder(None)}
        for layer in self.layers[:-1]:
            x = layer(x)
            output["states"].logits = x
        output["x"] = self.out(self.layers[-1](x))
        output["states"] = vars(output["states"])
        return output


class IfTensorScales(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
            if torch.is_tensor(x):
                x = x * 0.5
        return self.out(x)


class IfInstanceScales(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
            if isinstance(x, (tuple, list)):
                x = x[0]
            if isinstance(x, torch.Tensor):
                x = x * 0.5
        return self.out(x)


class IfTypeScales(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
            x = x * 0.5 if type(x) is Tensor else x
        return self.out(x)


class IfTensorOnce(Stack):
    """Asks in one place only, and of another name."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            state = x
            if number == 1 and isinstance(state, Tensor):
                x = torch.tanh(state)
        return self.out(x)


class AsksByFunction(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = _halved(layer(x))
        return self.out(x)


def _halved(x: Any) -> Any:
    return x / 2 if isinstance(x, Tensor) else x


class KeepsInBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        x = x + self.mlp(self.norm(x))
        self.made = x
        return x


PARENTS = [KeepsLast, KeepsAll, KeepsBefore, KeepsInObject, ReturnsObject]
PARENTS += [IfTensorScales, IfInstanceScales, IfTypeScales, IfTensorOnce, AsksByFunction]


@pytest.mark.parametrize("given", [True, False], ids=["recorded", "traced"])
@pytest.mark.parametrize("parent", PARENTS)
def test_streams_in_a_parent_are_right_or_refused(parent: type[Stack], given: bool) -> None:
    model = parent(PreNorm)
    inputs = (vectors(),) if given else None
    rewired = rewire.compile(model, "ancre-none", example_inputs=inputs, validate=given)
    for training in (False, True):
        if parent is IfTypeScales and not given:  # a trace takes the way of a tensor of another type
            with pytest.raises(OutOfOrder, match="was given a plain tensor"):
                _results(rewired, training, vectors())
        else:
            assert_close(_results(model, training, vectors()), _results(rewired, training, vectors()))
            _assert_kept(getattr(model, "hidden", None), getattr(rewired, "hidden", None))


def _assert_kept(expected: Any, actual: Any) -> None:
    """What a module keeps is tensors, as before."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), "a stream was left in an attribute"
        torch.testing.assert_close(actual, expected)
    elif isinstance(expected, dict):
        _assert_kept(list(expected.values()), list(actual.values()))
    elif isinstance(expected, list):
        for a, b in zip(expected, actual, strict=True):
            _assert_kept(a, b)


def test_states_that_blocks_keep_are_tensors() -> None:
    model = Stack(KeepsInBlock).eval()
    rewired = rewire.compile(model, "ancre-none", example_inputs=(vectors(),))
    with torch.no_grad():
        torch.testing.assert_close(rewired(vectors()), model(vectors()))
    for layer, other in zip(model.layers, rewired.layers, strict=True):
        _assert_kept([layer.seen, layer.made], [other.seen, other.made])


# -- right models ------------------------------------------------------------------------------------------------------


class DropPath(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp(self.norm(x))
        if self.training:
            h = h * (torch.rand(x.shape[0], 1, 1) < 0.5) / 0.5
        return x + h


class Constant(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)) + 0.5


class Broadcast(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)).mean(1, keepdim=True)


class RandLike(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp(self.norm(x))
        return x + (h * (torch.rand_like(h) < 0.5) if self.training else h)


@pytest.mark.parametrize(
    ("block", "topology"),
    [
        *((b, t) for b in (DropPath, Constant, Broadcast, RandLike) for t in ("ancre-none", "skipinit", "rezero")),
        *((b, "layerscale") for b in (DropPath, Constant, Broadcast, RandLike)),
        *((b, "grn-v2") for b in (DropPath, Constant, Broadcast, RandLike)),
    ],
)
def test_right_models_are_accepted_and_right_in_training(block: type[Block], topology: str) -> None:
    model = Stack(block)
    rewired = rewire.compile(model, topology, example_inputs=(vectors(),))
    assert len(rewire.connections(rewired)["layers"].layout.units) == 2
    assert_same(model, rewired, vectors())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("block", [DropPath, Constant, Broadcast, RandLike])
def test_right_models_are_accepted_without_inputs(block: type[Block], training: bool) -> None:
    model = Stack(block).train(training)
    rewired = rewire.compile(model, "residual", validate=False)
    assert len(rewire.connections(rewired)["layers"].layout.units) == 2
    assert_same(model, rewired, vectors())


# -- the caller's things -----------------------------------------------------------------------------------------------


class Belongings(nn.Module):
    """Whatever a model may hold, and change in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm = nn.Linear(8, WIDTH), nn.BatchNorm1d(9)
        self.layers = nn.ModuleList(Logs() for _ in range(3))
        self.drop, self.spare = nn.Dropout(0.2), nn.Linear(2, 2)
        self.order: list[nn.Module] = list(self.layers)
        self.table: dict[str, Any] = {"first": self.layers[0], "calls": [0], "set": {1, 2}}
        self.calls, self.last, self.writes = 0, None, True
        self.register_buffer("steps", torch.zeros(3))
        self.weights = [self.inp.weight]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.table["calls"].append(self.calls)
        self.steps[0] += 1
        self.last = float(x.detach().sum())
        if self.writes:
            x.mul_(2)
        if self.training:
            x = x * random.random() * np.random.rand()
        x = self.norm(self.inp(x))
        for layer in self.order:
            x = self.drop(layer(x))
        return x


def _belongings() -> Belongings:
    model = Belongings().train()
    model.layers[1].eval()
    model.spare.requires_grad_(False)
    for parameter in model.inp.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.layers[0].register_forward_hook(_hook)
    return model


def _hook(*_: Any) -> None:
    pass


def _seen(model: nn.Module) -> dict[str, Any]:
    """All that a caller can see: contents, identities, and what is global."""
    seen: dict[str, Any] = {"pickle": pickle.dumps(model), "globals": [id(one) for one in _globals()[:-3]]}
    for path, module in model.named_modules():
        state = vars(module)
        seen[path] = [id(module), type(module), module.training, *state, *map(id, state.values())]
        for name, value in state.items():
            if isinstance(value, (list, dict)):
                seen[f"{path}.{name}"] = list(map(id, value.values() if isinstance(value, dict) else value))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        seen[f"tensor {name}"] = (id(tensor), tensor._version, tensor.data_ptr(), id(tensor.grad), tensor.is_leaf)
    seen["torch"], seen["random"] = torch.get_rng_state().tolist(), random.getstate()
    seen["numpy"] = repr(np.random.get_state())
    return seen


def _assert_untouched(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert [name for name in {**before, **after} if before.get(name) != after.get(name)] == []


def _unvalidated(model: nn.Module, inputs: Any) -> nn.Module:
    return rewire.compile(model, "ancre-none", example_inputs=inputs, validate=False)


LOOKS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "inspect": lambda model, inputs: rewire.inspect(model),
    "inspect with inputs": lambda model, inputs: rewire.inspect(model, inputs),
    "compile": lambda model, inputs: rewire.compile(model, "ancre-ingoing", example_inputs=inputs),
    "compile unvalidated": lambda model, inputs: _unvalidated(model, inputs),
    "compile and initialise": lambda model, inputs: rewire.compile(
        model, "residual", example_inputs=inputs, init="orthogonal"
    ),
    "roles": lambda model, inputs: rewire.roles(model),
    "diagnose": lambda model, inputs: rewire.diagnose(model, inputs),
    "diagnose as it is": lambda model, inputs: rewire.diagnose(model, inputs, evaluate=False),
    "freeze": lambda model, inputs: rewire.freeze(_unvalidated(model, inputs), example_inputs=inputs),
    "restore": lambda model, inputs: rewire.restore(_unvalidated(model, inputs)),
}


@pytest.mark.parametrize("name", list(LOOKS))
def test_the_callers_model_inputs_and_random_state_stay_as_they_are(name: str) -> None:
    model, x = _belongings(), vectors()
    model.writes = not name.startswith("diagnose")
    before, given = _seen(model), x.clone()
    drawn = torch.get_rng_state()
    result = LOOKS[name](model, (x,))
    if name == "compile and initialise":  # what it is asked to draw, it draws
        torch.set_rng_state(drawn)
    _assert_untouched(before, _seen(model))
    assert torch.equal(x, given) and x._version == 0
    assert result is not None and pickle.loads(before["pickle"]).calls == 0


def test_diagnosing_a_model_that_writes_into_its_input() -> None:
    x = vectors()
    assert len(rewire.diagnose(_belongings(), x).trunks) == 1
    assert torch.equal(x, vectors())


def test_an_input_that_requires_gradients_gets_none() -> None:
    model, x = _belongings().eval(), vectors().requires_grad_()
    model.writes = False
    rewire.compile(model, "residual", example_inputs=(x,))
    rewire.inspect(model, (x,))
    rewire.diagnose(model, x)
    assert x.grad is None and x.requires_grad and x.is_leaf


def test_initialize_changes_values_and_nothing_else() -> None:
    model = _belongings()
    before = _seen(model)
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rewire.initialize(model, "orthogonal", generator=torch.Generator().manual_seed(1))
    assert any(not torch.equal(parameter, values[name]) for name, parameter in model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    after = _seen(model)
    for name in [name for name in before if name.startswith("tensor ")]:
        before[name] = (before[name][0], before[name][3:])
        after[name] = (after[name][0], after[name][3:])
    _assert_untouched(before, after)


def test_a_failure_leaves_the_callers_model_as_it_is() -> None:
    model = _belongings()
    before = _seen(model)
    with pytest.raises(rewire.ValidationMismatch):
        rewire.compile(model, Wrong(), example_inputs=(vectors(),))
    with pytest.raises(rewire.BadExampleInputs):
        rewire.compile(model, "residual", example_inputs=(torch.ones(2, 9, 3),))
    with pytest.raises(rewire.RewireError):
        rewire.compile(model, "residual", example_inputs=(vectors(),), trunks=["none"])
    _assert_untouched(before, _seen(model))


def test_what_runs_afterwards_is_the_callers_model_or_the_rewired_one() -> None:
    """Neither call is seen in the other's lists, counters and buffers."""
    model = _belongings().eval()
    rewired = rewire.compile(model, "ancre-none", example_inputs=(vectors(),))
    before = _seen(model)
    steps = model.steps.clone()
    rewired(vectors())
    model.steps.copy_(steps)  # buffers are shared
    assert [module is other for module, other in zip(rewired.order, rewired.layers, strict=True)] == [True] * 3
    assert rewired.table["first"] is rewired.layers[0] and rewired.calls == 1
    after = _seen(model)
    for seen in (before, after):
        seen.pop("tensor steps")
    _assert_untouched(before, after)


class Lazy(Stack):
    def __init__(self) -> None:
        super().__init__(PreNorm)
        self.out = nn.LazyLinear(5)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("call", [rewire.inspect, rewire.compile, rewire.roles, rewire.diagnose])
def test_lazy_modules_stay_lazy(call: Callable[..., Any], given: bool) -> None:
    model = Lazy()
    state = torch.get_rng_state()
    with pytest.raises(
        rewire.RewireError, match="has lazy modules" if given or call is not rewire.diagnose else "inputs"
    ):
        call(model, **_inputs_of(call, (vectors(),)) if given else {})
    assert isinstance(model.out.weight, nn.UninitializedParameter) and torch.equal(torch.get_rng_state(), state)
    model(vectors())
    rewired = rewire.compile(model, "residual", example_inputs=(vectors(),))
    assert torch.equal(rewired(vectors()), model(vectors()))


def _inputs_of(call: Callable[..., Any], inputs: Any) -> dict[str, Any]:
    name = {rewire.inspect: "example_inputs", rewire.compile: "example_inputs", rewire.diagnose: "batch"}.get(call)
    return {} if name is None else {name: inputs}


# -- crashes -----------------------------------------------------------------------------------------------------------


class HelperAsks(Block):
    def scaled(self, x: Tensor) -> Tensor:
        if x.abs().max() > 1e6:
            return x / 2
        return self.mlp(x)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scaled(self.norm(x))


class HelperAsksAndAdds(Block):
    def joined(self, x: Tensor, h: Tensor) -> Tensor:
        if h.abs().max() > 1e6:
            h = h / 2
        return x + h

    def forward(self, x: Tensor) -> Tensor:
        return self.joined(x, self.mlp(self.norm(x)))


class PreThenPost(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return self.ln_2(x + self.mlp(x))


class PostThenPre(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = self.ln_1(x + self.attn(x))
        return x + self.mlp(self.ln_2(x))


class Doubles(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = x + self.mlp(self.norm(x))
        return h + h


class DoublesInPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm(x))
        x += x
        return x


class CountsArguments(Block):
    def forward(self, *args: Any) -> Tensor:
        x = args[0]
        if len(args) > 1:
            x = x * args[1]
        return x + self.mlp(self.norm(x))


class Registered(nn.Module):
    """Its subclasses have to say what they are called."""

    def __init_subclass__(cls, *, kind: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.kind = kind


class OfKind(Registered, kind="mlp"):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Meta(type):
    """A metaclass that looks at what classes are made of."""

    def __new__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any], **kwargs: Any) -> Meta:
        if bases and "forward" not in members:
            raise TypeError(f"{name} has no forward")
        return super().__new__(cls, name, bases, members, **kwargs)


class OfMeta(nn.Module, metaclass=Meta):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


BLOCKS: list[tuple[Callable[[], nn.Module], int]] = [
    *((HelperAsks, 2), (HelperAsksAndAdds, 2), (PreThenPost, 4), (PostThenPre, 4)),
    *((Doubles, 2), (DoublesInPlace, 2), (CountsArguments, 2)),
]


@pytest.mark.parametrize(("block", "adds"), BLOCKS)
def test_blocks_that_once_crashed_are_connected(block: Callable[[], nn.Module], adds: int) -> None:
    model = Stack(block)
    rewired = rewire.compile(model, "ancre-none", example_inputs=(vectors(),), granularity="sublayer")
    assert len(rewire.connections(rewired)["layers"].layout.units) == adds
    assert_same(model, rewired, vectors())


@pytest.mark.each_once
@pytest.mark.parametrize("topology", ["ancre-ingoing", "grn-v2", "hc-static", "layerscale"])
@pytest.mark.parametrize("block", [block for block, _ in BLOCKS])
def test_blocks_that_once_crashed_are_right_or_refused(block: Callable[[], nn.Module], topology: str) -> None:
    """Traced alone, and with topologies that do not take those in which an operation follows an add."""
    model = Stack(block).eval()
    if topology in ("grn-v2", "hc-static") and block in (PreThenPost, PostThenPre):
        with pytest.raises(rewire.UnsupportedTopology, match="is post-norm"):
            rewire.compile(model, topology, validate=False)
    else:
        actual = rewire.compile(model, topology, validate=False)(vectors())
        torch.testing.assert_close(actual, model(vectors()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("given", [True, False], ids=["recorded", "traced"])
@pytest.mark.parametrize("block", [OfKind, OfMeta])
def test_classes_that_cannot_be_derived_from_are_refused_by_name(block: type[nn.Module], given: bool) -> None:
    model = Stack(block).eval()
    inputs = (vectors(),) if given else None
    rewire.inspect(model)
    with pytest.raises(rewire.EditError, match=f"{block.__name__} cannot be derived from"):
        rewire.compile(model, "residual", example_inputs=inputs, validate=given)


def test_a_list_as_the_root() -> None:
    row = nn.ModuleList(PreNorm() for _ in range(3)).eval()
    with pytest.raises(rewire.RewireError, match="ModuleList"):
        rewire.compile(row, "residual", example_inputs=(torch.ones(2, 9, WIDTH),))
    expected = actual = torch.ones(2, 9, WIDTH)
    for layer, other in zip(row, rewire.compile(row, "residual"), strict=True):  # type: ignore[call-overload]
        expected, actual = layer(expected), other(actual)
    torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_torchscript_is_refused(whole: bool, given: bool) -> None:
    inputs = (vectors(),) if given else None
    model: Any = Stack(Block).eval()
    if whole:
        model = torch.jit.trace(model, vectors())
    else:
        model.layers[1] = torch.jit.trace(model.layers[1], torch.ones(2, 9, WIDTH))
    rewire.inspect(model)
    with pytest.raises(rewire.WrappedModel, match="'layers.1' is TorchScript" if not whole else "model is TorchScript"):
        rewire.compile(model, "residual", example_inputs=inputs)


NO_MODULES = [None, 3, {"layers": nn.Linear(2, 2)}, [nn.Linear(2, 2)], nn.Linear]
CALLS: dict[str, Callable[[Any, Path], Any]] = {
    "inspect": lambda model, path: rewire.inspect(model),
    "compile": lambda model, path: rewire.compile(model),
    "restore": lambda model, path: rewire.restore(model),
    "source": lambda model, path: rewire.source(model, "layers.0"),
    "coefficients": lambda model, path: rewire.coefficients(model),
    "connections": lambda model, path: rewire.connections(model),
    "freeze": lambda model, path: rewire.freeze(model),
    "diagnose": lambda model, path: rewire.diagnose(model, vectors()),
    "roles": lambda model, path: rewire.roles(model),
    "initialize": lambda model, path: rewire.initialize(model, "orthogonal"),
    "fusions": lambda model, path: rewire.fusions(model),
    "sparsity_penalty": lambda model, path: rewire.sparsity_penalty(model),
    "parameter_groups": lambda model, path: rewire.parameter_groups(model, lr=1e-3, weight_decay=0.1),
    "monitor": lambda model, path: rewire.Monitor(model, lambda values, step: None),
    "save": lambda model, path: rewire.save(model, path / "folder"),
    "load": lambda model, path: rewire.load(path, model),
    "plot": lambda model, path: rewire.plot(model, path / "picture.png"),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_what_is_no_module_is_refused_by_its_type(name: str, tmp_path: Path) -> None:
    if name == "load":
        rewire.save(rewire.compile(Stack(Block), "residual", validate=False), tmp_path)
    files = sorted(tmp_path.iterdir())
    for model in NO_MODULES:
        with pytest.raises((TypeError, rewire.RewireError), match=r"\b(NoneType|int|dict|list|type|class)\b"):
            CALLS[name](model, tmp_path)
    assert sorted(tmp_path.iterdir()) == files


@pytest.mark.parametrize("batch", [vectors()[:0], vectors()[:, :0], ()], ids=["no items", "no tokens", "no arguments"])
@pytest.mark.parametrize("block", [Block, PostNorm])
def test_diagnosing_an_empty_batch_is_refused(block: Callable[[], nn.Module], batch: Any) -> None:
    with pytest.raises(rewire.RewireError, match=r"empty|no numbers|no finite|does not run"):
        rewire.diagnose(Stack(block), batch)


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


class Interrupting(Logs):
    """Raises KeyboardInterrupt in its call number `at`, counted over all of them."""

    calls: ClassVar[int] = 0
    at: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        Interrupting.calls += 1
        if Interrupting.calls == Interrupting.at:
            raise KeyboardInterrupt
        torch.rand(())
        return x + self.mlp(self.norm(x))


@pytest.fixture
def _counting() -> Iterator[None]:
    Interrupting.calls = Interrupting.at = 0
    yield
    Interrupting.calls = Interrupting.at = 0


@pytest.mark.usefixtures("_counting")
def test_an_interrupt_in_the_models_forward_leaves_everything_as_it_was() -> None:
    model = _belongings()
    model.layers[2] = Interrupting()
    model.order = list(model.layers)

    def work() -> nn.Module:
        return rewire.compile(model, "ancre-none", example_inputs=(vectors(),))

    work()
    total, before, globals_before = Interrupting.calls, _seen(model), _globals()
    assert total > 5  # in finding, and in each of the runs that are compared
    for at in range(1, total + 1):
        Interrupting.calls, Interrupting.at = 0, at
        with pytest.raises(KeyboardInterrupt):
            work()
        Interrupting.at = 0
        _assert_untouched(before, _seen(model))
        assert _globals() == globals_before
    assert work() is not None


@contextlib.contextmanager
def _interrupted(at: int, counted: list[str]) -> Iterator[None]:
    """KeyboardInterrupt where call number ``at`` of a function of rewire's passes begins; the files of all calls."""
    folders = tuple(str(Path(rewire.__file__).parent / name) for name in ("passes", "code", "copies.py"))

    def trace(frame: types.FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folders) and not code.co_flags & inspect.CO_GENERATOR:
            counted.append(Path(code.co_filename).stem)
            if len(counted) == at:
                raise KeyboardInterrupt

    known = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(known)


@pytest.mark.parametrize("given", [True, False], ids=["recorded", "traced"])
def test_an_interrupt_in_any_pass_leaves_everything_as_it_was(given: bool) -> None:
    """At the first call of a function of each file, and at one in the middle of those."""
    model = Stack(DropPath).eval()
    model.layers[1].train(given)

    def work() -> nn.Module:
        inputs = (vectors(),) if given else None
        return rewire.compile(model, "ancre-none", example_inputs=inputs, validate=given)

    work()
    calls: list[str] = []
    with _interrupted(0, calls):
        work()
    places: set[int] = set()
    for name in dict.fromkeys(calls):
        own = [number for number, file in enumerate(calls, start=1) if file == name]
        places |= {own[0], own[len(own) // 2]}
    before, globals_before = _seen(model), _globals()
    expected = {
        "find",
        "plan",
        "write",
        "apply",
        "install",
        "copies",
        "text",
        *(("record", "validate") if given else ("follow",)),
    }
    assert expected <= set(calls)
    for at in sorted(places):
        with pytest.raises(KeyboardInterrupt), _interrupted(at, []):
            work()
        _assert_untouched(before, _seen(model))
        assert _globals() == globals_before, calls[at - 1]
    assert work() is not None


def test_an_interrupt_while_weights_are_initialised_leaves_the_callers_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _belongings()
    before = _seen(model)
    state = torch.get_rng_state()

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(nn.init, "orthogonal_", interrupt)
    monkeypatch.setattr(torch.Tensor, "normal_", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rewire.compile(model, "residual", example_inputs=(vectors(),), init="orthogonal")
    monkeypatch.undo()
    torch.set_rng_state(state)
    _assert_untouched(before, _seen(model))
