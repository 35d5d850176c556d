"""Kernels compiled to machine code, without a GPU: no spilled registers.

As a script it prints the table of docs/kernels.md.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from scripts import script
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from rewire.kernels import MixSpec, operators
from rewire.kernels.handwritten import gates, hidden, projection, softmax, writes
from rewire.kernels.kernel import Kernel, Launch, noted
from rewire.topologies.registry import make_topology

pytestmark = pytest.mark.slow

passes, traffic = script("passes"), script("traffic")

BF16, F32 = torch.bfloat16, torch.float32
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SPECS = {
    "scalar": MixSpec(16, added=1),
    "channel + scores": MixSpec(16, "channel", True),
    "q, k, v": MixSpec(15, "channel", True, outputs=3),
    "scores + layer norm": MixSpec(16, "none", True, added=1, norm="layer", keep_mix=True),
    "scalar + scores + rms norm": MixSpec(16, "scalar", True, added=1, norm="rms"),
    "probe": MixSpec(16, "channel", probe=True),
    "2 outputs, scores": MixSpec(16, "none", True, outputs=2),
    "4 outputs": MixSpec(16, outputs=4),
    "8 outputs": MixSpec(16, outputs=8),
    "4 probes": MixSpec(16, outputs=4, probe=True, accumulate=True),
    "4 probes, channel": MixSpec(4, "channel", outputs=4, probe=True, accumulate=True),
    "hyper-connections, n = 4": MixSpec(5, "none", True, outputs=5),
    "hyper-connections, constant": MixSpec(5, outputs=5),
    "4 added + layer norm": MixSpec(0, "none", added=4, norm="layer", keep_mix=True),
    "64 sources": MixSpec(64, added=1),
    "64 sources, 4 outputs": MixSpec(64, outputs=4),
    "48 scores, carried": MixSpec(48, "none", True, carried=True),
    "4 outputs, 64 scores": MixSpec(64, "none", True, outputs=4),
    "4 probes, scores": MixSpec(16, "none", True, outputs=4, probe=True, accumulate=True),
    "4 probes, attended": MixSpec(16, "none", True, outputs=4, probe=True, accumulate=True, attended=True),
    "4 outputs, channel + scores": MixSpec(32, "channel", True, added=1, outputs=4),
    "4 probes alone": MixSpec(16, "channel", outputs=4, probe=True, dots_only=True),
    "4 probes alone, scores": MixSpec(16, "channel", True, outputs=4, probe=True, dots_only=True),
    "8 probes alone, attended": MixSpec(8, "none", True, outputs=8, probe=True, attended=True, dots_only=True),
}
WIDTHS = (
    4096,
    4096,
    2048,
    4096,
    8192,
    4096,
    4096,
    4096,
    8192,
    4096,
    8192,
    4096,
    4096,
    8192,
    4096,
    4096,
    2048,
    4096,
    4096,
    4096,
    2048,
    4096,
    4096,
    4096,
)
EVERYWHERE = [(name, width, BF16) for name, width in zip(SPECS, WIDTHS, strict=True)]
MORE = [
    *((name, 4096, F32) for name in ("scalar", "channel + scores", "scores + layer norm")),
    *((name, width, BF16) for name in ("channel + scores", "scores + layer norm") for width in (64, 1000)),
]
CASES = [*((target, *case) for target in TARGETS for case in EVERYWHERE), *(("sm_90", *case) for case in MORE)]


class Usage(NamedTuple):
    """What the compiler reports, per thread; bytes of spilled registers."""

    registers: int
    spilled: int


def launches(spec: MixSpec, width: int, dtype: torch.dtype) -> list[Launch]:
    """Forward's and backward's, one for each kernel."""
    found = traffic.launches_of(spec, 8192, width, dtype)
    if not spec.probe:
        found += traffic.launches_of(spec, 8192, width, dtype, backward=True)
    return list({made_for(one): one for one in found if made_for(one)}.values())


def made_for(call: Launch) -> Any:
    """Of a generated kernel, its spec, whether it is backward's, and its grid; None of one written by hand."""
    return call.code.made_for


def compiled(call: Launch, target: Any) -> Any:
    """The kernel as a launch would specialise it on that GPU."""
    return specialised(call.code.jit(), call.arguments | dict(call.code.constants), target)


def specialised(kernel: Any, arguments: dict[str, Any], target: Any) -> Any:
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(**arguments)
    options, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, options)
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target, dataclasses.asdict(options))


def usage(kernel: Any, target: Any) -> Usage:
    if target.backend == "hip":
        found = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)", kernel.asm["amdgcn"])}
        return Usage(found["vgpr_count"], found["private_segment_fixed_size"] + 4 * found["vgpr_spill_count"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return Usage(found["REG"], found["STACK"] + found["LOCAL"])


@pytest.fixture(scope="module", autouse=True)
def own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("REWIRE_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


@pytest.mark.parametrize(("target", "name", "width", "dtype"), CASES)
def test_nothing_is_spilled(target: str, name: str, width: int, dtype: torch.dtype) -> None:
    allowed = 16 if (target, name) == ("sm_90", "48 scores, carried") else 0
    for call in launches(SPECS[name], width, dtype):
        found = usage(compiled(call, TARGETS[target]), TARGETS[target])
        assert found.spilled <= allowed, f"{found} for {made_for(call)}"


def test_loads_are_vectors() -> None:
    """16 bytes per thread and load in bfloat16: 8 elements."""
    forward = launches(SPECS["scalar"], 4096, BF16)[0]
    assert compiled(forward, TARGETS["sm_90"]).asm["ptx"].count("ld.global.v4.b32") == 17


@pytest.mark.parametrize(
    "spec",
    [
        MixSpec(8, "channel"),
        MixSpec(16, "channel", True),
        MixSpec(15, "channel", True, outputs=3),
        MixSpec(64, added=1),
        MixSpec(48, "none", True),
    ],
    ids=str,
)
def test_sums_have_no_barriers(spec: MixSpec) -> None:
    """16 bytes per load, of weights per channel, too: no tile passes through shared memory."""
    (forward,) = (one for one in launches(spec, 4096, BF16) if not made_for(one).backward)
    text = compiled(forward, TARGETS["sm_90"]).asm["ptx"]
    assert "bar.sync" not in text
    grid = made_for(forward)
    elements = grid.block_rows * grid.block_cols // 128  # of a thread
    per_channel = elements // 4 * spec.pairs * (spec.weights == "channel")
    of_states = text.count("ld.global.v4") - per_channel if elements == 8 else text.count("ld.global.v2")
    assert of_states == spec.sources + spec.added


def barriers_in_loops(text: str) -> int:
    """Of the loop over tiles that has most."""
    lines = text.splitlines()
    places = {line.split(":")[0]: number for number, line in enumerate(lines) if line.startswith("$L")}
    jumps = [(number, re.search(r"bra(?:\.uni)?\s+(\$L\w+)", line)) for number, line in enumerate(lines)]
    loops = [lines[places[to[1]] : number] for number, to in jumps if to and places.get(to[1], number) < number]
    assert loops
    return max(sum("bar.sync" in line for line in loop) for loop in loops)


@pytest.mark.parametrize("spec", [MixSpec(16), MixSpec(16, "channel"), MixSpec(16, outputs=4)], ids=str)
def test_gradients_have_barriers_only_at_the_end(spec: MixSpec) -> None:
    """Where each program adds up its rows, once: not in the loop over tiles."""
    (backward,) = (one for one in launches(spec, 4096, BF16) if made_for(one).backward)
    assert barriers_in_loops(compiled(backward, TARGETS["sm_90"]).asm["ptx"]) == 0


@pytest.mark.parametrize(
    "spec",
    [MixSpec(16, "none", True), MixSpec(5, "none", True, outputs=4, carried=True), SPECS["4 probes, scores"]],
    ids=str,
)
def test_gradients_of_scores_leave_a_tile_together(spec: MixSpec) -> None:
    """One passage through shared memory for each mix: not one for each of its sources."""
    call = launches(spec, 4096, BF16)[-1]
    assert barriers_in_loops(compiled(call, TARGETS["sm_90"]).asm["ptx"]) == 2 * spec.outputs


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """Kernels that are written by hand, with their arguments, in place of running them."""
    calls: list[tuple[Any, dict[str, Any]]] = []

    def note(kernel: Kernel, used: Sequence[Tensor]) -> None:
        calls.append((kernel.code.jit(), kernel.launch(used).arguments | dict(kernel.code.constants)))

    monkeypatch.setattr(Kernel, "start", note)
    return calls


#: Bytes that backward of more than 64 columns spills.
SPILLED = {"sm_80": 248, "gfx942": 596}


#: Of a state, [D, K]: dynamic hyper-connections, mHC (4 streams), GRN-v3 and DCA (24 blocks, 3 ways).
@pytest.mark.parametrize(("width", "columns"), [(2048, 6), (8192, 24), (2048, 25), (2048, 50), (2048, 73)])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_projections(target: str, width: int, columns: int, started: list[tuple[Any, dict[str, Any]]]) -> None:
    allowed = SPILLED.get(target, 0) if columns > 64 else 0
    exact = {"PRECISION": "ieee"} if target == "gfx942" else {}
    x, weight = torch.empty(256, width, dtype=BF16), torch.empty(columns, width).T
    scores, inverse = projection.forward(x, weight, 1e-6)
    projection.backward([torch.empty(256, columns)], x, weight, scores, inverse, x)
    if target != "gfx942":  # there, gradients are one tensor
        projection.backward(torch.empty(256, columns).split([4, columns - 4], 1), x, weight, scores, inverse, x)
    if columns in (6, 24):
        streams = x.view(-1, 4, 2048)
        read = projection.Read(streams[:, :1], torch.empty(len(streams), 4, 1))
        projection.backward([torch.empty(256, columns)], x, weight, scores, inverse, x, read)
        projection.products(read.grad, streams)
    for kernel, arguments in started:
        known = {name: value for name, value in exact.items() if name in arguments}
        done = specialised(kernel, arguments | known, TARGETS[target])
        two_gradients = 8 if target == "sm_80" and arguments.get("APART") else 0
        assert usage(done, TARGETS[target]).spilled <= max(allowed, two_gradients)
        assert done.metadata.shared <= (64 << 10 if target == "gfx942" else 99 << 10)
        assert target == "gfx942" or re.search(r"ld\.global\.v4|cp\.async\.cg", done.asm["ptx"])


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("target", TARGETS)
def test_writes_that_are_projected(
    target: str, n: int, dtype: torch.dtype, started: list[tuple[Any, dict[str, Any]]]
) -> None:
    """Of dynamic hyper-connections: float32 of 4 streams spills in backward, nothing else. Loops of forward have
    barriers only where tiles are loaded ahead; backward has 33 for its 48 factors, once 72 with 20 stores of sums.
    Shared memory is what AMD's GPUs have, and NVIDIA's consumer GPUs.
    """
    streams, branch = torch.empty(256, n, 2048, dtype=dtype), torch.empty(256, 2048, dtype=dtype)
    table, weight = torch.empty(256, n, n + 1), torch.empty(n + 2, 2048).T
    written, products, inverse = writes.forward(streams, [branch], table, weight, 1e-6, dtype)
    read = projection.Read(branch[:, None], torch.empty(256, n, 1))
    writes.backward(products, streams, read, written, products, inverse, streams, [branch], table, weight)
    assert [kernel for kernel, _ in started[:2]] == [writes.write_forward, writes.write_backward]
    for kernel, arguments in started[:2]:
        done = specialised(kernel, arguments, TARGETS[target])
        back = kernel is writes.write_backward
        assert usage(done, TARGETS[target]).spilled <= (56 if back and n == 4 and dtype == F32 else 0)
        assert done.metadata.shared <= (64 << 10 if target == "gfx942" else 99 << 10)
        if target != "gfx942":
            assert barriers_in_loops(done.asm["ptx"]) <= (33 if back else 2)
            assert re.search(r"ld\.global\.v4|cp\.async\.c[ag]", done.asm["ptx"])


#: Of MUDDFormer: units of one read, and of four of 6, 15 and 32 states.
@pytest.mark.parametrize("columns", [12, 24, 60, 128])
@pytest.mark.parametrize("target", TARGETS)
def test_hidden_layers(target: str, columns: int, started: list[tuple[Any, dict[str, Any]]]) -> None:
    read, x = torch.empty(columns, 2048).T, torch.empty(256, 2048, dtype=BF16)
    layer, weight, static = torch.empty(columns, 256).T, torch.empty(columns, columns), torch.empty(columns)
    scores = hidden.forward(layer, weight, static)
    hidden.backward(scores, x, read, weight, layer, torch.empty(256), None)
    names = [kernel.__name__ for kernel, _ in started]
    assert names == ["hidden_forward", "hidden_backward", "project_backward", "project_weights", "add_up"]
    for kernel, arguments in started:
        exact = {"PRECISION": "ieee"} if target == "gfx942" and "PRECISION" in arguments else {}
        found = usage(specialised(kernel, arguments | exact, TARGETS[target]), TARGETS[target])
        assert kernel.__name__.startswith("project_") or found.spilled == 0


@pytest.mark.parametrize("iterations", [0, 20])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_gates_are_in_registers(n: int, iterations: int, started: list[tuple[Any, dict[str, Any]]]) -> None:
    """What goes through shared memory are products that arrive, results, and sums over tokens; no iterations."""
    rows, columns = ((), 2 * n + n * n) if iterations else ((n,), n + 2)
    products = torch.empty(columns, 256, *rows).movedim(0, -1)
    static, scale = torch.empty(*rows, columns), torch.empty(columns)
    read, write = gates.forward(products, static, scale, n, iterations, 1e-6, 2.0)
    gates.backward(read, write, products, static, scale, iterations, 1e-6, 2.0)
    for kernel, arguments in started:
        done = specialised(kernel, arguments, TARGETS["sm_90"])
        found = usage(done, TARGETS["sm_90"])
        assert found.spilled == 0 and found.registers <= 128
        assert not iterations or barriers_in_loops(done.asm["ptx"]) == 0


def test_sums_that_begin_in_float32() -> None:
    """Of bfloat16 states: each of them is loaded as without."""
    state, begun = torch.empty(8192, 4096, dtype=BF16, device="meta"), torch.empty(8192, 4096, device="meta")
    with noted() as launches:
        operators.mix([begun, state, state], None, [torch.empty(8192, 1, device="meta")] * 3, [], None, BF16)
    text = compiled(launches[0], TARGETS["sm_90"]).asm["ptx"]
    assert text.count("ld.global.v4") == 4 and "bar.sync" not in text


@pytest.mark.parametrize("case", passes.CASES)
def test_every_kernel_of_a_trunk(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 blocks, whose reads have up to 49 states; width 2048, bfloat16. Those that are written by hand spill nothing,
    but for projections to more than 64 columns.

    Gathers of 13 or 16 gradients with weights of both kinds, and some that add up along rows, spill 2 or 4 numbers,
    others none. States are loaded as vectors. Sums have barriers only where their float32 results, of loads in
    bfloat16, pass through shared memory: 2 for each, at the end. Loops over tiles have them only where they add up
    scores' gradients: 2 for each mix, and 2 for the means of what is attended.
    """
    name, options, depth = passes.CASES[case]
    by_hand: dict[Any, tuple[Any, dict[str, Any]]] = {}
    launch = Kernel.launch

    def note(kernel: Kernel, used: Sequence[Tensor]) -> Launch:
        one, code = launch(kernel, used), kernel.code
        if code.made_for is None:
            shapes = {key: x.shape if isinstance(x, Tensor) else str(x) for key, x in one.arguments.items()}
            by_hand[code.jit().__name__, str(shapes)] = code.jit(), one.arguments | dict(code.constants)
        return one

    monkeypatch.setattr(Kernel, "launch", note)
    found = passes.measure(make_topology(name, options), depth)["kernels"]
    grids = [(made_for(one), one) for one in found if made_for(one)]  # the others below
    kernels = {(g.spec, g.backward, g.block_rows, g.block_cols, g.warps): one for g, one in grids}
    for (spec, backward, *_), call in kernels.items():
        kernel = compiled(call, TARGETS["sm_90"])
        text, about = kernel.asm["ptx"], f"{'backward' if backward else 'forward'} of {spec}"
        channel = spec.probe and spec.weights == "channel"
        both = channel and spec.scores and spec.sources in (13, 16)
        assert usage(kernel, TARGETS["sm_90"]).spilled <= (16 if both or spec.along_rows else 0), about
        assert not re.search(r"ld\.global\.[bu]16", text), about
        if backward or spec.probe:
            assert barriers_in_loops(text) <= 2 * (spec.outputs + spec.attended) * spec.scores, about
        else:
            assert text.count("bar.sync") <= 2 * spec.outputs * (call.arguments["mixes"][0].dtype == F32), about
    for kernel, arguments in by_hand.values():
        spilled = usage(specialised(kernel, arguments, TARGETS["sm_90"]), TARGETS["sm_90"]).spilled
        assert spilled <= (64 if kernel.__name__.startswith("project_") else 0), kernel.__name__


@pytest.mark.parametrize("target", TARGETS)
def test_softmax_is_in_registers(target: str, started: list[tuple[Any, dict[str, Any]]]) -> None:
    scores, state = list(torch.empty(49, 8192)), torch.empty(8192, 4096, dtype=BF16)
    _, statistics = softmax.forward(scores, None, 0)  # of a block that begins
    softmax.forward([], statistics, 49)
    softmax.forward(scores[:3], statistics, 49)
    softmax.tally(state, state, statistics, 49)
    tallies = list(torch.empty(45, 3, 8192))
    softmax.shares([torch.empty(45, 8192).T] * 4, tallies)
    assert len(started) == 5
    for kernel, arguments in started:
        assert usage(specialised(kernel, arguments, TARGETS[target]), TARGETS[target]).spilled == 0


def main() -> None:
    print("| mix | D | states | kernel | tile, warps |", " | ".join(TARGETS), "|")
    print("|---|--:|---|---|---|" + "--:|" * len(TARGETS))
    for name, width, dtype in EVERYWHERE + MORE:
        for call in launches(SPECS[name], width, dtype):
            cells = [usage(compiled(call, target), target) for target in TARGETS.values()]
            grid = made_for(call)
            kernel = f"{'backward' if grid.backward else 'forward'}, {grid.spec.sources} sources"
            tile = f"{grid.block_rows} x {grid.block_cols}, {grid.warps}"
            numbers = " | ".join(f"{x.registers}" + (f" ({x.spilled} B spilled)" if x.spilled else "") for x in cells)
            print(f"| {name} | {width} | {str(dtype)[6:]} | {kernel} | {tile} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
