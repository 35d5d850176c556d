"""Routines: made once for tensors of given layouts, and started directly from then on."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rewire.kernels import arguments, operators
from rewire.kernels.handwritten import gates, projection, writes
from rewire.kernels.kernel import launcher
from rewire.kernels.sums import grid, launch
from rewire.kernels.sums.spec import MixSpec

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def no_routines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_routines", {})


class Compiled:
    """What Triton returns of a kernel: a launcher for each grid."""

    def __init__(self, calls: list[tuple[str, Any]]) -> None:
        self.calls = calls

    def __getitem__(self, programs: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.calls.append(("directly", args))


class Function:
    """A kernel before it is compiled."""

    def __init__(self, names: list[str], calls: list[tuple[str, Any]]) -> None:
        self.arg_names, self.calls = names, calls

    def __getitem__(self, programs: tuple[int, ...]) -> Callable[..., Compiled]:
        def start(**arguments: Any) -> Compiled:
            self.calls.append(("by Triton", arguments))
            return Compiled(self.calls)

        return start


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """How kernels were started, and with what."""
    found: list[tuple[str, Any]] = []
    names = ["sources", "source_strides", "weights", "added", "added_strides", "mixes", "mix_strides", "rows", "COLS"]
    function = Function([*names, "BLOCK_ROWS", "BLOCK_COLS"], found)
    monkeypatch.setattr(grid, "kernel", lambda spec, backward: function)
    return found


def mixed(xs: list[Tensor], f: Tensor) -> Tensor:
    (result,) = launch.mix_forward(
        MixSpec(len(xs), added=1), launch.MixInputs(xs, torch.ones(len(xs)), added=[f])
    ).mixes
    return result


def states(count: int, *shape: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    return [torch.zeros(*shape, dtype=dtype) for _ in range(count)]


def test_the_second_launch_goes_without_triton(calls: list[tuple[str, Any]]) -> None:
    """With the pointers of its own tensors, in the order of the parameters."""
    for _ in range(3):
        *xs, f = states(3, 2, 5, 32)
        weights = torch.ones(2)
        (result,) = launch.mix_forward(MixSpec(2, added=1), launch.MixInputs(xs, weights, added=[f])).mixes
    assert [way for way, _ in calls] == ["by Triton", "directly", "directly"]
    pointers = [x.data_ptr() for x in (*xs, weights, f, result)]
    first, arguments = calls[0][1], calls[-1][1]
    assert arguments[:7] == (
        (pointers[0], pointers[1]), (32, 32), pointers[2], (pointers[3],), (32,), (pointers[4],), (32,),
    )  # fmt: skip
    assert arguments[7:] == (10, 32, first["BLOCK_ROWS"], first["BLOCK_COLS"])


class Loaded(Compiled):
    """Of a kernel that is loaded, with the function below Triton's hooks."""

    function, packed_metadata = "function", "metadata"

    def run(
        self, gridX: Any, gridY: Any, gridZ: Any, stream: Any, function: Any, kernel_metadata: Any,  # noqa: N803
        launch_metadata: Any, launch_enter_hook: Any, launch_exit_hook: Any, *args: Any,
    ) -> None:  # fmt: skip
        hooks = (launch_metadata, launch_enter_hook, launch_exit_hook)
        self.calls.append(("below hooks", (gridX, gridY, gridZ, stream, function, kernel_metadata, *hooks, *args)))


def test_kernels_start_below_hooks_that_nobody_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stream that is current then; through Triton where a profiler listens, or the function is another one."""
    triton = pytest.importorskip("triton")
    streams, calls = iter((7, 8)), list[tuple[str, Any]]()
    driver = SimpleNamespace(get_current_device=lambda: 3, get_current_stream=lambda device: (device, next(streams)))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    start = launcher(Loaded(calls), (4, 2, 1))
    start(10, 20)
    start(30)
    fixed = ("function", "metadata", None, None, None)
    assert calls == [("below hooks", (4, 2, 1, (3, n), *fixed, *args)) for n, args in ((7, (10, 20)), (8, (30,)))]
    calls.clear()
    for hook in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        hook.add(print)
        start(10)
        hook.remove(print)
    monkeypatch.setattr(Loaded, "run", lambda self, stream, *args: None)
    launcher(Loaded(calls), (4, 2, 1))(10)
    assert calls == [("directly", (10,))] * 3


def test_parts_of_stacks_and_tables_are_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of what is given, wherever it begins and however it lies, and those of a result in one tensor."""
    calls: list[tuple[str, Any]] = []
    names = ["sources", "source_strides", "scores", "score_strides", "mixes", "mix_strides", "rows", "COLS"]
    function = Function([*names, "BLOCK_ROWS", "BLOCK_COLS"], calls)
    monkeypatch.setattr(grid, "kernel", lambda spec, backward: function)
    spec = MixSpec(3, "none", True, outputs=2)
    for _ in range(2):
        streams, branch = torch.zeros(2, 5, 4, 32, dtype=BF16)[..., 1:3, :], torch.zeros(2, 5, 32, dtype=BF16)
        table = torch.zeros(7, 2, 5, 8)[1:].unflatten(0, (2, 3)).movedim((0, 1), (-2, -1))[..., 4, :, :]
        done = launch.mix_forward(spec, launch.MixInputs([streams, branch], None, [table], stacks=True), stacked=2)
    assert [way for way, _ in calls] == ["by Triton", "directly"] and done.stacked is not None
    sources, strides, scores, _, mixes, *_ = calls[-1][1]
    assert sources == tuple(x.data_ptr() for x in (*streams.unbind(-2), branch)) and strides == (4 * 32, 4 * 32, 32)
    assert scores == tuple(table[..., m, k].data_ptr() for m in range(2) for k in range(3))
    assert mixes == tuple(x.data_ptr() for x in done.stacked.unbind(-2))


@pytest.mark.parametrize(
    "other",
    [
        lambda: states(3, 2, 6, 32),
        lambda: states(3, 10, 32),
        lambda: states(3, 2, 5, 64),
        lambda: states(4, 2, 5, 32),
        lambda: states(3, 2, 5, 32, dtype=torch.float32),
        lambda: [*states(2, 2, 5, 32), *states(1, 2, 5, 32, dtype=torch.float16)],
        lambda: [x[..., :32] for x in states(3, 2, 5, 64)],
        lambda: [*states(2, 2, 5, 32), torch.zeros(32, dtype=BF16).expand(2, 5, 32)],
    ],
)
def test_another_layout_is_another_routine(other: Callable[[], list[Tensor]], calls: list[tuple[str, Any]]) -> None:
    for make in (lambda: states(3, 2, 5, 32), other, lambda: states(3, 2, 5, 32), other):
        *xs, f = make()
        result = mixed(xs, f)
        assert result.shape == f.shape and result.is_contiguous()
        assert result.dtype == torch.promote_types(xs[0].dtype, f.dtype)
        found = calls[-1][1]
        strides, rows = (found["source_strides"], found["rows"]) if isinstance(found, dict) else (found[1], found[7])
        assert strides == tuple(arguments.row_stride(x.shape, x.stride()) for x in xs)
        assert rows == math.prod(f.shape[:-1])
    assert [way for way, _ in calls] == ["by Triton", "by Triton", "directly", "directly"]


def test_triton_is_asked_again_for_pointers_that_are_aligned_otherwise(calls: list[tuple[str, Any]]) -> None:
    """It compiles 16-byte loads for pointers that are multiples of 16."""
    *xs, f = states(3, 5, 32)
    apart = [torch.zeros(5 * 32 + 1, dtype=BF16)[1:].view(5, 32) for _ in range(2)]
    for sources in (xs, apart, xs, apart, [xs[0], apart[0]], [xs[0], apart[0]]):
        mixed(sources, f)
    assert [way for way, _ in calls] == ["by Triton"] * 2 + ["directly"] * 2 + ["by Triton", "directly"]


def test_what_gets_a_gradient_is_no_part_of_a_routine(calls: list[tuple[str, Any]]) -> None:
    for wanted in (False, True):
        *xs, f = (x.requires_grad_(wanted) for x in states(3, 5, 32))
        with torch.no_grad():
            assert not mixed(xs, f).requires_grad
    assert [way for way, _ in calls] == ["by Triton", "directly"]


def test_no_elements_start_nothing(calls: list[tuple[str, Any]]) -> None:
    for _ in range(2):
        assert mixed(states(2, 0, 32), *states(1, 0, 32)).shape == (0, 32)
    assert not calls


def test_what_does_not_fit_is_refused_every_time(calls: list[tuple[str, Any]]) -> None:
    mixed(states(2, 5, 32), *states(1, 5, 32))
    for _ in range(2):
        with pytest.raises(ValueError, match="one device"):
            mixed([*states(1, 5, 32), torch.zeros(5, 32, dtype=BF16, device="meta")], *states(1, 5, 32))
        with pytest.raises(ValueError, match="one shape"):
            mixed(states(2, 5, 32), *states(1, 4, 32))
        with pytest.raises(TypeError, match="float64"):
            mixed(states(2, 5, 32), *states(1, 5, 32, dtype=torch.float64))
    assert len(calls) == 1


def test_the_oldest_routines_are_forgotten(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, Any]]) -> None:
    monkeypatch.setattr(launch, "MOST_KEPT", 4)  # three, and which of them was the last
    for rows in (1, 2, 3, 1, 4, 1, 2):
        mixed(states(2, rows, 32), *states(1, rows, 32))
        assert len(launch._routines) <= 4
    # Those of 1 and 2 rows go when there are four.
    ways = ["by Triton"] * 3 + ["directly", "by Triton", "by Triton", "by Triton"]
    assert [way for way, _ in calls] == ways


def test_tensors_like_the_last_ones_are_not_asked_one_by_one(
    monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, Any]]
) -> None:
    asked: list[Tensor] = []

    def sizes(x: Tensor) -> Any:
        asked.append(x)
        return x.shape, x.dtype, x.device

    monkeypatch.setattr(launch, "_sizes", sizes)
    for _ in range(3):
        mixed(states(2, 5, 32), *states(1, 5, 32))
    assert len(asked) == 4
    x, y = states(2, 5, 32)
    strided = torch.empty(5, 64, dtype=BF16)[:, :32]
    others = [[x, x], [x.clone().requires_grad_(), y], [x, strided], [x, y], [y, x]]  # the last is like the one before
    for sources in others:
        assert mixed(sources, x.clone()).shape == x.shape
    assert len(asked) == 4 * 5
    assert [way for way, _ in calls] == ["by Triton"] + ["directly"] * 4 + ["by Triton", "directly", "directly"]


def test_without_the_guards_of_torch_compile(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, Any]]) -> None:
    monkeypatch.setattr(launch, "tensor_guards", lambda _tensors: None)
    for rows in (5, 5, 6, 5):
        assert mixed(states(2, rows, 32), *states(1, rows, 32)).shape == (rows, 32)
    assert [way for way, _ in calls] == ["by Triton", "directly", "by Triton", "directly"]


def test_threads_share_routines(calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each starts kernels on its own tensors, while others make routines and routines are forgotten."""
    monkeypatch.setattr(launch, "MOST_KEPT", 5)
    wrong: list[BaseException] = []
    started: dict[int, tuple[Any, ...]] = {}

    class Own(Compiled):
        def __getitem__(self, programs: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args: started.__setitem__(threading.get_ident(), args)

    def start(**arguments: Any) -> Compiled:
        found = [arguments[name] for name in ("sources", "added", "mixes")]
        args = tuple(tuple(x.data_ptr() for x in tensors) for tensors in found)
        started[threading.get_ident()] = (args[0], None, None, args[1], None, args[2], None, arguments["rows"])
        return Own([])

    function = grid.kernel(MixSpec(1), False)
    monkeypatch.setattr(type(function), "__getitem__", lambda self, programs: start)

    def work(number: int) -> None:
        try:
            for turn in range(200):
                rows = (number + turn) % 6 + 1
                *xs, f = states(3, rows, 32)
                result = mixed(xs, f)
                args = started[threading.get_ident()]
                assert args[0] == tuple(x.data_ptr() for x in xs)
                assert (args[3], args[5]) == ((f.data_ptr(),), (result.data_ptr(),))
                assert args[7] == rows and result.shape == (rows, 32)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


Started = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[Tensor], Started]]:
    """What runs kernels that are written by hand, forward and backward: how each was started, and with what."""
    calls: list[tuple[str, Any]] = []
    parameters: dict[str, list[list[str]]] = {}
    for module, verb in ((projection, "project"), (gates, "sinkhorn"), (writes, "write")):
        names = [f"{verb}_forward", f"{verb}_backward", *["project_weights"] * (module is projection)]
        parameters[module.__name__] = [getattr(module, name).arg_names for name in names]
        for name in names:
            monkeypatch.setattr(module, name, Function(getattr(module, name).arg_names, calls))
    monkeypatch.setattr(writes, "added_up", lambda partials: [x.sum(0) for x in partials])
    modules = (projection, writes)
    fitted = [getattr(m, f"_fitted_{way}") for m in modules for way in ("forward", "backward")]
    for routine in (*fitted, projection._fitted_weights, gates._fitted):
        routine.cache_clear()

    def named(module: Any) -> Started:
        found = [
            (way, given if isinstance(given, dict) else dict(zip(names, given, strict=True)))
            for (way, given), names in zip(calls, parameters[module.__name__], strict=True)
        ]
        calls.clear()
        return found

    def project(x: Tensor) -> Started:
        weight = torch.zeros(x.shape[-1], 3)
        scores, inverse = projection.forward(x, weight, 1e-6)
        grad, of_weight = projection.backward([torch.zeros_like(scores)], x, weight, scores, inverse, None)
        assert (scores.shape, grad.shape, of_weight.shape) == ((*x.shape[:-1], 3), x.shape, (3, x.shape[-1]))
        return named(projection)

    def gate(x: Tensor) -> Started:
        values = torch.zeros(2, x.shape[-1])
        read, write = gates.forward(x, *values, 2, 3, 0.0, 2.0)
        assert (read.shape, write.shape) == ((*x.shape[:-1], 2, 1), (*x.shape[:-1], 3, 2))
        grad, sums = gates.backward(read, write, x, *values, 3, 0.0, 2.0)
        assert (grad.shape, sums.shape) == (x.shape, values.shape)
        return named(gates)

    def write(streams: Tensor) -> Started:
        (*lead, n, width), f = streams.shape, streams.select(-2, 0)
        table, weight = torch.zeros(*lead, n, n + 1), torch.zeros(n + 2, width).T
        known = writes.forward(streams, [f], table, weight, 1e-6, streams.dtype)
        assert [x.shape for x in known] == [streams.shape, (*lead, n, n + 2), (streams.shape[:-1].numel(),)]
        read = projection.Read(f.unsqueeze(-2), table[..., :1])
        *found, of_table, of_weight = writes.backward(known[1], streams, read, *known, streams, [f], table, weight)
        assert (found[0].shape, of_table.shape, of_weight.shape) == (streams.shape, table.shape, weight.T.shape)
        return named(writes)

    return {"x": project, "products": gate, "streams": write}


@pytest.mark.parametrize(("name", "shape"), [("x", (2, 5, 8)), ("products", (2, 5, 8)), ("streams", (2, 5, 3, 8))])
def test_kernels_written_by_hand_start_directly_too(name: str, shape: tuple[int, ...], by_hand: Any) -> None:
    x, kernels = torch.zeros(shape), 3 if name == "x" else 2
    assert [(way, given[name].data_ptr()) for way, given in by_hand[name](x)] == [("by Triton", x.data_ptr())] * kernels
    for _ in range(2):
        x = torch.zeros(shape)
        assert [(way, given[name]) for way, given in by_hand[name](x)] == [("directly", x.data_ptr())] * kernels


def test_kernels_written_by_hand_take_rows_as_they_lie(by_hand: Any) -> None:
    wide, single, uneven = (
        torch.zeros(2, 5, 16)[..., :8],
        torch.zeros(8).expand(2, 5, 8),
        torch.zeros(5, 2, 8).transpose(0, 1),
    )
    for x, stride in ((wide, 16), (single, 0), (uneven, 8)):
        for _ in range(2):
            found = [given for _, given in by_hand["x"](x)]
            assert [given["x_stride"] for given in found] == [stride] * 3
        assert all((given["x"] == x.data_ptr()) == (x is not uneven) for given in found)
    turned = torch.zeros(3, 2, 5, 8).movedim(0, -2)
    uneven = torch.zeros(5, 2, 3, 8).transpose(0, 1)
    for streams, strides in ((wide[..., None, :].expand(2, 5, 3, 8), (16, 0)), (turned, (8, 80)), (uneven, (24, 8))):
        for given in [given for _, given in by_hand["streams"](streams)]:
            assert given["stream_strides"] == strides
            assert (given["streams"].data_ptr() == streams.data_ptr()) == (streams is not uneven)
    columns_first = torch.zeros(8, 10).T
    found = [given for _, given in by_hand["products"](columns_first)]
    assert [given["strides"] for given in found] == [(1, 10)] * 2


def test_gradients_are_those_of_the_shapes_at_hand() -> None:
    """On tensors without storage: nothing of an earlier routine is left in results."""
    for rows, dtype in ((3, BF16), (7, torch.float32), (3, BF16), (3, torch.float32)):
        x = torch.zeros(rows, 32, dtype=dtype, device="meta")
        weights, scores = torch.zeros(18, 32, device="meta"), [torch.zeros(rows, 1, device="meta")] * 18
        found = launch.mix_backward(MixSpec(18, "channel", True), launch.GradientInputs([x], [x] * 18, weights, scores))
        assert {(y.shape, y.dtype) for y in found.sources} == {((rows, 32), dtype)}
        assert found.weights is not None and found.weights.shape == (1, 18, 32)
        assert found.scores is not None and found.scores.shape == (rows, 1, 18)


@pytest.mark.parametrize("listened", [False, True])
def test_operators_are_seen_where_somebody_listens(
    listened: bool, calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "uses_kernels", lambda x: True)  # as on a GPU
    seen: list[str] = []

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    *xs, f = states(3, 5, 32)
    weights = torch.ones(2)
    if listened:
        with Listener():
            operators.mix(xs, weights, [], [f], None, BF16)
    else:
        operators.mix(xs, weights, [], [f], None, BF16)
    assert ("rewire::mix" in seen) == listened and len(calls) == 1


@pytest.mark.parametrize(
    ("x", "stride"),
    [
        (torch.zeros(2, 3, 8), 8),
        (torch.zeros(2, 3, 16)[..., :8], 16),
        (torch.zeros(8).expand(2, 3, 8), 0),
        (torch.zeros(3, 2, 8).transpose(0, 1), None),
        (torch.zeros(2, 8, 3).transpose(1, 2), None),
        (torch.zeros(3, 1, 8)[:, 0], 8),
        (torch.zeros(3, 300, 8)[:, 0], None),  # depends on the number of tokens
        (torch.zeros(1, 300, 8)[:, 0], 8),
        (torch.zeros(8), 8),
        (torch.zeros(2, 3, 4).unbind(-1)[1].unsqueeze(-1), 4),
        (torch.zeros(0, 3, 8), 8),
    ],
)
def test_rows(x: Tensor, stride: int | None) -> None:
    assert arguments.row_stride(x.shape, x.stride()) == stride
