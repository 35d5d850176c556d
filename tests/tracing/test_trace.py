"""Tracing one forward: what is recorded, what branches, what stays opaque, and printing it back."""

import functools
import inspect
import linecache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rewire.errors import TraceError, UnsupportedCall
from rewire.passes.install import generated_class, install
from rewire.tracing import print_forward, trace
from rewire.tracing.printer import body_of, globals_for


def reprinted(module):
    """`module` with its own forward traced, printed and installed: it has to compute the same."""
    traced = trace(module)
    graphs = [path.graph for path in traced.paths if path.graph is not None]
    table = globals_for(traced.signature, graphs)
    bodies = [body_of(p.graph, p.tests, p.nones, table, p.error) for p in traced.paths]
    source = print_forward(traced.signature, traced.tested, bodies, table)
    install(module, source, table)
    return module, source


class Block(nn.Module):
    """Children, parameters and buffers, an optional argument that is branched on, one that is handed on, flags."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.fc = nn.Linear(8, 8)
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.register_buffer("offset", torch.full((8,), 0.25))
        self.rate = 0.5

    def forward(this, x, context=None, scale=1.0, *, flip: bool = False, **kwargs):  # noqa: N805
        h = this.norm(x)
        if context is not None:
            h = h + context.mean(dim=1, keepdim=True)
        if flip:
            h = h.flip(-1)
        shape = (*x.shape[:-1], 2, -1)
        h = this.fc(h).view(shape).transpose(-1, -2).reshape(x.shape)
        h = F.dropout(h * this.gamma.reshape(1, 1, -1) + this.offset, p=this.rate, training=this.training)
        return x - h * scale, {"h": h, "last": h[:, -1:, ...]}


def call(module, *args, **kwargs):
    torch.manual_seed(3)
    return module(*args, **kwargs)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_printed_forward_computes_the_same(training, flip, given):
    torch.manual_seed(0)
    original, copy = Block().train(training), Block().train(training)
    copy.load_state_dict(original.state_dict())
    copy, _ = reprinted(copy)
    x, context = torch.randn(2, 3, 8), torch.randn(2, 5, 8) if given else None
    expected = call(original, x, context, scale=0.5, flip=flip)
    actual = call(copy, x, context, scale=0.5, flip=flip)
    assert torch.equal(expected[0], actual[0])
    assert list(actual[1]) == ["h", "last"]
    assert torch.equal(expected[1]["last"], actual[1]["last"])


def test_signature_is_kept_and_source_can_be_read():
    module, source = reprinted(Block())
    parameters = inspect.signature(type(module).forward).parameters
    expected = inspect.signature(Block.forward).parameters
    assert [(p.name, p.kind, p.default) for p in parameters.values()][1:] == [
        (p.name, p.kind, p.default) for p in expected.values()
    ][1:]
    assert inspect.getsource(type(module).forward).strip() == source.strip()
    assert "if context is not None:" in source and "if flip:" in source
    assert "training=self.training" in source


def test_the_module_is_not_changed_by_tracing():
    block = Block()
    attributes, call_method, arange = dict(vars(block)), nn.Module.__call__, torch.arange
    trace(block)
    assert vars(block) == attributes and type(block) is Block
    assert nn.Module.__call__ is call_method and torch.arange is arange


def test_an_argument_that_is_only_handed_on_makes_no_branch():
    class HandsOn(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Block()

        def forward(self, x, context=None, **kwargs):
            return x + self.inner(x, context=context, **kwargs)[0]

    traced = trace(HandsOn())
    assert traced.tested == () and len(traced.paths) == 1
    _, source = reprinted(HandsOn())
    assert "self.inner(x, context=context, **kwargs)" in source


def test_kwargs_reach_the_child():
    class Inner(nn.Module):
        def forward(self, x, *args, extra=0):
            return x + extra + sum(args)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x, *args, **kwargs):
            return self.inner(x, *args, **kwargs) * 2

    module, source = reprinted(Outer())
    assert "self.inner(x, *args, **kwargs)" in source
    assert module(torch.zeros(1), 3, extra=2).item() == 10


def test_a_forward_that_reads_its_kwargs_is_refused():
    class Reads(nn.Module):
        def forward(self, x, **kwargs):
            return x + kwargs.get("bias", 0)

    with pytest.raises(TraceError, match="kwargs"):
        trace(Reads())


class Stateful(nn.Module):
    """A method that changes an attribute, which a later line reads; a method that needs real numbers."""

    def __init__(self):
        super().__init__()
        self.window = 4
        self.chunk = None

    def shrink(self, size):
        if size < self.window:
            self.window = size

    def set_chunk(self, chunk):
        self.chunk = chunk

    def crop(self, x):
        return x[: max(range(self.window)) + 1]

    def forward(self, x):
        self.shrink(x.shape[0])
        if self.chunk is not None:
            x = x * self.chunk
        return self.crop(x) * self.window


def test_attributes_that_calls_change_are_read_when_called():
    module, source = reprinted(Stateful())
    assert module(torch.ones(8)).tolist() == [4.0] * 4
    assert module(torch.ones(2)).tolist() == [2.0] * 2
    assert "self.shrink(" in source and "self.crop(" in source


def test_an_attribute_that_was_none_may_not_be_set_afterwards():
    module, _ = reprinted(Stateful())
    module.set_chunk(2.0)
    with pytest.raises(UnsupportedCall, match="'chunk' was set after the rewrite"):
        module(torch.ones(8))


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        x = self.fc(x)
        if x.dtype == torch.float16 and torch.isinf(x).any():
            x = torch.clamp(x, max=60000)
        return x


def test_float16_is_refused_where_the_block_treats_it_differently():
    module, source = reprinted(Half())
    assert source.count("self.fc(") == 1, "no second copy of the code for float16"
    x = torch.randn(2, 4)
    assert torch.equal(module(x), Half.forward(module, x))
    with pytest.raises(UnsupportedCall, match="float16"):
        module.half()(x.half())


class Asserts(nn.Module):
    def forward(self, x, mask=None):
        assert x.dim() == 3, "three dimensions"
        if mask is not None and mask.dtype == torch.bool:
            x = x.masked_fill(mask, 0.0)
        return x.unbind()[0]


def test_a_path_that_raises_becomes_a_refusal():
    module, _ = reprinted(Asserts())
    x = torch.randn(2, 3, 4)
    assert torch.equal(module(x), x[0])
    mask = torch.ones(2, 3, 4, dtype=torch.bool)
    assert not module(x, mask).any()
    assert torch.equal(module(x, mask.float()), x[0])
    with pytest.raises(UnsupportedCall, match="three dimensions"):
        module(x[0])


def test_loops_over_traced_values_are_refused():
    class Loops(nn.Module):
        def forward(self, xs):
            total = 0
            for x in xs:
                total = total + x
            return total

    with pytest.raises(TraceError, match="loop"):
        trace(Loops())


def test_too_many_branches_are_refused():
    class Many(nn.Module):
        def forward(self, x):
            for n in range(8):
                if x.shape[n] > 1:
                    x = x + n
            return x

    with pytest.raises(TraceError, match="32 paths"):
        trace(Many())


def test_constant_tensors_are_refused():
    class Constant(nn.Module):
        def forward(self, x):
            return x + torch.ones(3).cumsum(0)

    with pytest.raises(TraceError, match="constant tensor"):
        trace(Constant())


def test_decorated_forwards_are_unwrapped():
    def decorate(function):
        @functools.wraps(function)
        def wrapper(self, *args, **kwargs):
            return function(self, *args, **kwargs)

        return wrapper

    def bare(forward):
        return lambda self, *args: forward(self, *args)

    class Decorated(nn.Module):
        @decorate
        def forward(self, x, y=2):
            return x * y

    class Bare(nn.Module):
        @bare
        def forward(self, x, y=2):
            return x * y

    for cls in (Decorated, Bare):
        assert list(trace(cls()).signature.parameters) == ["self", "x", "y"]


def test_names_that_python_or_the_printer_use():
    class Inner(nn.Module):
        def forward(self, x):
            return x + 1

    class Names(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("self", Inner())
            self.add_module("torch", Inner())
            self.table = nn.ModuleDict({"stream": Inner(), "with-dash": Inner()})

        def forward(self, input, stream=None):
            x = self._modules["self"](input)
            x = torch.relu(self._modules["torch"](x)) + helper(x)
            helped = self.table["stream"](x)
            return self.table["with-dash"](helped) + helper(helped)

    module, _ = reprinted(Names())
    x = torch.randn(3)
    assert torch.equal(module(x), Names.forward(module, x))


def helper(x):
    return x * 2 if x.shape[0] > 2 else x


class Counting(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_a_forward_that_assigns_attributes_is_refused():
    module = Counting()
    with pytest.raises(TraceError, match=r"assigns self\.calls"):
        reprinted(module)
    assert type(module.calls) is torch.Tensor and module.calls == 0


def test_the_class_keeps_its_name():
    one, _ = reprinted(Block())
    two, _ = reprinted(Block())
    assert Block not in (type(one), type(two))
    assert isinstance(one, Block) and type(one).__name__ == "Block"
    assert len({line for line in linecache.cache if "rewire" in line and "Block" in line}) >= 1


def test_hostile_text_never_becomes_code():
    class Hostile(nn.Module):
        def __init__(self):
            super().__init__()
            self.mode = "x'); raise SystemExit('ran'); ('"
            self.inner = nn.ModuleDict({"a') or exit('ran') or ('": nn.Identity()})

        def forward(self, x):
            y = next(iter(self.inner.values()))(x)
            return F.interpolate(y, scale_factor=1.0, mode=self.mode)

    module = Hostile()
    module, source = reprinted(module)
    assert repr(module.mode) in source
    with pytest.raises(NotImplementedError):
        module(torch.randn(1, 1, 4))


def test_generated_class_is_cached():
    source = "def forward(self, x):\n    return x\n"
    assert generated_class(nn.Identity, source, ()) is generated_class(nn.Identity, source, ())
