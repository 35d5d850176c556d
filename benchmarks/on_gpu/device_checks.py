"""What only a device can show: tensors of more than 2^31 elements, other streams, a second GPU, CUDA graphs.

On a CPU the same runs at tiny sizes, where there is neither of these: it shows that the checks work.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from on_gpu import model_checks
from on_gpu.processes import Skipped
from rewire.kernels.handwritten import gates, projection, writes
from rewire.kernels.sums import launch
from rewire.kernels.sums.launch import GradientInputs, MixInputs
from rewire.kernels.sums.spec import MixSpec
from rewire.mixes.mix import mix

Results = dict[str, Tensor]


def checks() -> dict[str, Callable[[torch.device, bool], None]]:
    """By name, what raises an AssertionError if something is wrong; given the device, and whether sizes are tiny."""
    return {
        **{f"more than 2^31 elements/{name}": _far_beyond(name) for name in _FAR},
        "projections": projections,
        "side stream": side_stream,
        "second device": second_device,
        "CUDA graph": graph,
        **{f"reduce-overhead/{name}": _reduce_overhead(name) for name in ("ancre-ingoing", "grn-v3", "mhc")},
    }


# More than 2^31 elements.


def _mix(xs: Sequence[Tensor], w: Tensor, scores: Tensor) -> Results:
    spec = MixSpec(2, scores=True, added=1)
    by_source = list(scores[:, :2].split(1, -1))
    (total,) = launch.mix_forward(spec, MixInputs(xs[:2], w[:1, :2], by_source, xs[2:3])).mixes
    back = launch.mix_backward(spec, GradientInputs(xs[2:3], xs[:2], w[:1, :2], by_source))
    return {"mix": total, "gradient": back.sources[1], "of scores": back.scores, "sum of weights": back.weights}  # type: ignore[dict-item]


def _channel(xs: Sequence[Tensor], w: Tensor, scores: Tensor) -> Results:
    weights = w[:2, :2].unsqueeze(-1).expand(-1, -1, xs[0].shape[-1]).contiguous()
    spec = MixSpec(2, "channel", outputs=2)
    first, second = launch.mix_forward(spec, MixInputs(xs[:2], weights)).mixes
    back = launch.mix_backward(spec, GradientInputs(xs[1:3], xs[:2], weights))
    return {"first": first, "second": second, "gradient": back.sources[0], "sum of weights": back.weights}  # type: ignore[dict-item]


def _norm(xs: Sequence[Tensor], w: Tensor, scores: Tensor) -> Results:
    spec = MixSpec(2, norm="rms", keep_mix=True)
    gain = torch.ones_like(xs[0][0])
    done = launch.mix_forward(spec, MixInputs(xs[:2], w[:1, :2], norm_weight=gain))
    back = launch.mix_backward(
        spec, GradientInputs(xs[2:3], xs[:2], w[:1, :2], (), done.mixes, done.rstd, xs[1:2], gain)
    )
    found = {"normed": done.normed, "rstd": done.rstd, "gradient": back.sources[1]}
    return found | {"sum of weights": back.weights, "sum of gain": back.norm_weight}  # type: ignore[return-value, dict-item]


def _gather(xs: Sequence[Tensor], w: Tensor, scores: Tensor) -> Results:
    done = launch.mix_forward(MixSpec(2, outputs=2, probe=True), MixInputs(xs[:2], w[:2, :2], probes=xs[1:3]))
    return {"first": done.mixes[0], "second": done.mixes[1], "sum of weights": done.weight_dots}  # type: ignore[dict-item]


def _stacked(xs: Sequence[Tensor], w: Tensor, scores: Tensor) -> Results:
    """States are 2 of each row's 3: strides of three widths."""
    streams = torch.stack(list(xs[:3]), -2)
    done = launch.mix_forward(MixSpec(2, outputs=2), MixInputs(streams.unbind(-2)[1:], w[:2, :2]), stacked=2)
    assert done.stacked is not None
    return {"mixes": done.stacked}


def _project(xs: Sequence[Tensor], w: Tensor, scores: Tensor) -> Results:
    weight = torch.cat([w, -w, w.flip(0)]).repeat(-(-xs[0].shape[-1] // 12), 1)[: xs[0].shape[-1]]
    found, inverse = projection.forward(xs[0], weight, 1e-6)
    back = projection.backward([scores[:, :1], scores[:, 1:]], xs[0], weight, found, inverse, xs[1])
    return {"scores": found, "gradient": back[0], "sum of weights": back[1]}


def _streams(xs: Sequence[Tensor], w: Tensor, scores: Tensor) -> Results:
    """Two streams side by side in each row, and what a read of them sends back."""
    streams, grad = xs[0].unflatten(-1, (2, -1)), xs[1].unflatten(-1, (2, -1))[..., :1, :]
    weight = w.repeat(-(-streams.shape[-1] // 4), 1)[: streams.shape[-1]]
    found, inverse = projection.forward(streams, weight, 1e-6)
    read = projection.Read(grad, scores[:, :2, None])
    back = projection.backward([found], streams, weight, found, inverse, None, read)
    products = projection.products(grad, streams)
    return {"products": products, "gradient": back[0], "sum of weights": back[1]}


def _written(xs: Sequence[Tensor], w: Tensor, scores: Tensor) -> Results:
    """Two streams side by side in each row, a branch, and what the new streams' gates are made of."""
    streams, (branch, grad) = xs[0].unflatten(-1, (2, -1)), xs[1].unflatten(-1, (2, -1)).unbind(-2)
    weight, table = w.repeat(-(-branch.shape[-1] // 4), 1)[: branch.shape[-1]], scores[:, [0, 1, 2, 2, 3, 0]]
    terms = streams, [branch], table.unflatten(-1, (2, 3)), weight
    new, products, inverse = writes.forward(*terms, 1e-6, branch.dtype)
    read = projection.Read(grad[:, None], scores[:, :2, None])
    of_streams, _, of_table, of_weight = writes.backward(products, streams, read, new, products, inverse, *terms)
    return {
        "streams": new,
        "products": products,
        "gradient": of_streams,
        "table": of_table,
        "sum of weights": of_weight,
    }


def _gates(iterations: int) -> Callable[[Sequence[Tensor], Tensor, Tensor], Results]:
    """Of values that are the first numbers of a state."""

    def run(xs: Sequence[Tensor], w: Tensor, scores: Tensor) -> Results:
        n = 4
        products = xs[0][..., :24].float()
        products = products if iterations else products.unflatten(-1, (n, -1))
        static, scale = torch.full_like(products[0], 0.5), torch.full_like(products[0], 0.1).flatten()
        given = products, static, scale[: products.shape[-1]]
        read, write = gates.forward(*given, n, iterations, 0.0, 2.0)
        of_products, sums = gates.backward(read, write, *given, iterations, 0.0, 2.0)
        return {"read": read, "write": write, "gradient": of_products, "sum of values": sums}

    return run


#: By name: what is computed of three states [rows, width], weights [4, 4] and scores [rows, 4]; and the width.
_FAR: dict[str, tuple[Callable[[Sequence[Tensor], Tensor, Tensor], Results], int]] = {
    "mix": (_mix, 2048),
    "channel": (_channel, 2048),
    "norm": (_norm, 2048),
    "gather": (_gather, 2048),
    "stacked": (_stacked, 2048),
    "projection": (_project, 2048),
    "streams": (_streams, 2048),
    "written streams": (_written, 2048),
    "gates": (_gates(0), 64),
    "gates with Sinkhorn-Knopp": (_gates(4), 64),
}


def _far_beyond(name: str) -> Callable[[torch.device, bool], None]:
    """Rows around the start, 2^31 elements and the end have to be those of the same rows by themselves.

    What is summed over rows has to be the sum over parts of the rows that are small enough.
    """
    function, width = _FAR[name]

    def check(device: torch.device, small: bool) -> None:
        limit = 1 << 8 if small else 1 << 31
        width_ = 64 if small else width
        rows = limit // width_ + 5
        # Of the states, their copies in the other layout, results and gradients.
        _needs_memory(device, 2 * 12 * rows * width_)
        xs = [torch.randn(rows, width_, dtype=torch.bfloat16, device=device) for _ in range(3)]
        w, scores = torch.randn(4, 4, device=device), torch.randn(rows, 4, device=device)
        found = function(xs, w, scores)

        def part(start: int, stop: int) -> Results:
            return function([x[start:stop] for x in xs], w, scores[start:stop])

        windows = [slice(0, 3), slice(rows // 2, rows // 2 + 3), slice(rows - 8, rows)]
        parts = [part(window.start, window.stop) for window in windows]
        step = -(-rows // 4)
        quarters = [part(start, min(start + step, rows)) for start in range(0, rows, step)]
        for key, value in found.items():
            if key.startswith("sum of"):
                wanted = torch.stack([quarter[key].double() for quarter in quarters]).sum(0)
                size = float(wanted.abs().max()) + rows**0.5
                assert float((value.double() - wanted).abs().max()) <= 1e-4 * size, f"{key} is wrong"
                continue
            for window, want in zip(windows, parts, strict=True):
                near = torch.allclose(value[window].float(), want[key].float(), rtol=2e-2, atol=2e-2)
                assert near, f"{key}: rows {window.start} to {window.stop} of {rows} are wrong"

    return check


def _needs_memory(device: torch.device, wanted: int) -> None:
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < wanted:
        raise Skipped(f"needs {wanted / 2**30:.0f} GiB of free memory")


# Projections, whose matrix products the interpreter makes in another way.


def projections(device: torch.device, small: bool) -> None:
    """With a norm and without, clamped or not, of few columns and many, forward and backward against float64."""
    rows, width, most = (9, 40, (3, 17)) if small else (1000, 512, (6, 13, 28, 73, 130))
    kinds = itertools.product((torch.float32, torch.bfloat16), most, (1e-6, None), (False, True), (False, True))
    for dtype, columns, eps, clamped, apart in kinds:
        x, carried = (torch.randn(rows, width, device=device).to(dtype) for _ in range(2))
        weight, grad = torch.randn(columns, width, device=device).T, torch.randn(rows, columns, device=device)
        scores, inverse = projection.forward(x, weight, eps, clamped)
        grads = [*grad.split([2, columns - 2], 1)] if apart else [grad]
        of_x, of_weight = projection.backward(grads, x, weight, scores, inverse, carried, None, clamped)
        exact, exact_weight = (t.double().requires_grad_() for t in (x, weight))
        normed = exact if eps is None else exact * (exact.square().mean(1, keepdim=True) + eps).rsqrt()
        wanted = (normed @ exact_weight).relu() if clamped else normed @ exact_weight
        wanted.backward(grad.double())
        found = {"scores": scores, "gradient": of_x, "of the weight": of_weight.T}
        for name, want in zip(found, (wanted, exact.grad + carried.double(), exact_weight.grad), strict=True):  # type: ignore[operator]
            error = float((found[name].double() - want).norm() / want.norm())
            allowed = 5e-3 if name == "gradient" and dtype == torch.bfloat16 else 1e-5
            kind = f"{dtype}, {columns} columns, eps {eps}, clamped {clamped}, apart {apart}"
            assert error < allowed, f"{name} of {kind}: off by {error:.1e}"


# Streams and devices.


def side_stream(device: torch.device, small: bool) -> None:
    """On a stream that still waits, kernels start behind what makes their inputs, first and later times alike."""
    rows, width = (5, 24) if small else (4096, 2048)
    first = [torch.randn(rows, width, device=device) for _ in range(3)]
    weights = torch.randn(3, device=device)
    for number in range(4):  # compiles, then starts directly
        leaves = [torch.full_like(x, torch.nan).requires_grad_() for x in first]
        _wait(device)
        with _side_stream(device):
            if device.type == "cuda":
                torch.cuda._sleep(100_000_000)
            with torch.no_grad():
                for leaf, x in zip(leaves, first, strict=True):
                    leaf.copy_(x)
            out = mix(leaves, weights)
            grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        _wait(device)
        wanted = sum(w * x for w, x in zip(weights, first, strict=True))
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5, msg=f"call {number}")
        for grad, w in zip(grads, weights, strict=True):
            torch.testing.assert_close(grad, w.expand_as(grad), msg=f"gradient of call {number}")


def _side_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext()


def second_device(device: torch.device, small: bool) -> None:
    """While one GPU is current, kernels run on another; tensors of both are refused."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        raise Skipped("needs two GPUs")
    other = torch.device("cuda", 1) if device.type == "cuda" else device
    check = model_checks.ModelCheck("ancre-ingoing", 2, frozenset(["norm"]))
    for _ in range(2):
        model_checks.run(check, other, 0, small)
    x = torch.randn(5, 24, device=device)
    elsewhere = torch.randn(5, 24, device=other if device.type == "cuda" else "meta")
    refused = False
    try:
        launch.mix_forward(MixSpec(2), MixInputs([x, elsewhere], torch.ones(2, device=device)))
    except ValueError as error:
        refused = "on one device" in str(error)
    assert refused, "a mix of tensors on two devices was not refused"


# CUDA graphs.


def graph(device: torch.device, small: bool) -> None:
    """Forward and backward of a small Llama, captured, and replayed for other tokens and weights."""
    for topology in ("ancre-ingoing", "grn-v3", "muddformer", "hc-dynamic", "mhc"):
        model = model_checks.small_llama(topology, 2 if small else 4, 32 if small else 256, seed=1).to(device)
        shape = (1, 6) if small else (2, 128)
        fixed = torch.zeros(shape, dtype=torch.long, device=device)
        replay = _captured(lambda model=model, fixed=fixed: model_checks.step(model, fixed), device)
        for _ in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            fixed.copy_(torch.randint(97, shape, device=device))
            found = {name: value.clone() for name, value in replay().items()}
            _same(found, model_checks.step(copy.deepcopy(model), fixed.clone()), topology)


def _captured(function: Callable[[], Results], device: torch.device) -> Callable[[], Results]:
    """Replays ``function``; on a CPU, calls it."""
    if device.type != "cuda":
        return function
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream(device).wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = function()

    def replay() -> Results:
        captured.replay()
        _wait(device)
        return results

    return replay


def _reduce_overhead(topology: str) -> Callable[[torch.device, bool], None]:
    """Training steps under ``torch.compile(mode="reduce-overhead")`` against eager ones; graphs have to be captured."""

    def check(device: torch.device, small: bool) -> None:
        from torch._dynamo.utils import counters

        shape = (1, 6) if small else (2, 128)
        model = model_checks.small_llama(topology, 2 if small else 4, 32 if small else 256, seed=1).to(device)
        eager = copy.deepcopy(model)
        compiled: nn.Module = torch.compile(model, mode="reduce-overhead", dynamic=False)  # type: ignore[assignment]
        for number in range(5):  # warms up, records, replays
            ids = torch.randint(97, shape, device=device)
            torch.compiler.cudagraph_mark_step_begin()
            found = {name: value.clone() for name, value in model_checks.step(compiled, ids).items()}
            wanted = model_checks.step(eager, ids)
            _same({name.removeprefix("_orig_mod."): x for name, x in found.items()}, wanted, f"step {number}")
            with torch.no_grad():
                for one, other in zip(model.parameters(), eager.parameters(), strict=True):
                    one.mul_(1.02)
                    other.copy_(one)
        skipped = counters["inductor"]["cudagraph_skips"]
        assert not skipped or device.type != "cuda", f"{skipped} graphs were not captured"

    return check


def _same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str) -> None:
    share, worst = model_checks.difference(found, wanted)
    assert share <= 1, f"{what}, {worst}: the difference is {share:.3g} times what is allowed"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
