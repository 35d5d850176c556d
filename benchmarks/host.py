"""Host time of connections in eager mode: what Python, autograd and launchers cost, without a GPU.

    python benchmarks/host.py [--json FILE] [--units N] [--rounds N] [topology ..]

Kernels are compiled for a GPU and started by Triton's own launcher, on a driver that does nothing (a small library in
place of libcuda, built with `cc`). Tensors are tiny and on the CPU, so that the operations of torch cost what calling
them costs. A unit is one block of a trunk, with a branch that costs next to nothing, or two sublayers of a topology
that reads at each; beside it, in the same rounds, run the plain trunk, ``x = x + branch(x)``, and what other libraries
that are installed have for the same topology. What is reported is the processor's time of the fastest of rounds that
take turns, and ratios: other programs on the machine slow both down.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import traffic
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia import driver as nvidia

from passes import CASES, Branch, dims_of, run
from rewire.kernels import MixSpec, operators, switch
from rewire.topologies.registry import make_topology

ROWS, COLS, DTYPE = 4, 128, torch.bfloat16
TARGET = GPUTarget("cuda", 90, 32)

#: What the launcher calls of the driver; all else only has to be there.
STUB = """
#include <stdint.h>
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 1 << 18; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute ? 0 : 1024; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)1; return 0; }
int cuPointerGetAttribute(uint64_t *value, int attribute, uint64_t pointer) { *value = pointer; return 0; }
int64_t launches = 0;
int cuLaunchKernelEx(void *config, void *function, void **parameters, void **extra) { ++launches; return 0; }
"""
REST = (
    "cuGetErrorString cuDeviceGet cuDevicePrimaryCtxRetain cuCtxSetCurrent cuModuleLoadData cuFuncSetCacheConfig "
    "cuFuncSetAttribute cuCtxGetLimit cuCtxSetLimit cuTensorMapEncodeTiled cuTensorMapEncodeIm2col cuDriverGetVersion "
    "cuOccupancyMaxActiveClusters"
)


class Driver(DriverBase):
    """NVIDIA's, of a GPU that is not there."""

    def __init__(self) -> None:
        self.utils, self.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return nvidia.ty_to_cpp(ty)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


@contextlib.contextmanager
def stub_driver() -> Iterator[ctypes.c_int64]:
    """Triton's launcher starts kernels on nothing; how many is counted."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libcuda.so.1")
        text = STUB + "".join(f"int {name}() {{ return 0; }}\n" for name in REST.split())
        build = ["cc", "-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(library)]
        subprocess.run(build, input=text, text=True, check=True)
        Path(folder, "libcuda.so").symlink_to(library)
        loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        nvidia.library_dirs.cache_clear()
        with mock.patch.object(triton.knobs.nvidia, "libcuda_path", folder):
            triton.runtime.driver.set_active(Driver())
        yield ctypes.c_int64.in_dll(loaded, "launches")


def timed_step(forward: Callable[[Tensor], Tensor]) -> Callable[[], tuple[float, float]]:
    """A step of a trunk, which returns seconds of forward and of backward."""
    leaf = torch.zeros(1, ROWS, COLS, dtype=DTYPE, requires_grad=True)
    grad = torch.zeros_like(leaf)

    def run_once() -> tuple[float, float]:
        start = time.thread_time()
        out = forward(leaf)
        middle = time.thread_time()
        out.backward(grad)
        return middle - start, time.thread_time() - middle

    return run_once


def plain_adds(units: int) -> Callable[[Tensor], Tensor]:
    """A trunk of plain adds."""

    def forward(x: Tensor) -> Tensor:
        for _ in range(units):
            x = x + Branch.apply(x)
        return x

    return forward


def trunk(case: str, units: int) -> Callable[[Tensor], Tensor]:
    """A trunk with a topology."""
    name, options, depth = CASES[case]
    topology, depth = make_topology(name, options).for_start("preserve"), units * depth // 24
    dims = dims_of(topology, depth, COLS)
    parameters = {key: value.requires_grad_() for key, value in topology.parameters(dims, "preserve").items()}
    return lambda x: run(topology, topology.weights(parameters, dims), dims, x)


def peers(units: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Trunks of other libraries that are installed, two sublayers for each unit; by the topology that does the same."""
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    if importlib.util.find_spec("hyper_connections"):
        found["hc-dynamic, hyper-connections"] = hyper_connections(2 * units)
    if importlib.util.find_spec("liger_kernel"):
        found |= {"mhc, liger-kernel": liger_mhc(2 * units), "attnres, liger-kernel": liger_attnres(2 * units)}
    return found


def hyper_connections(sublayers: int, streams: int = 4) -> Callable[[Tensor], Tensor]:
    library = importlib.import_module("hyper_connections")
    make, expand, reduce = library.get_init_and_expand_reduce_stream_functions(streams)
    connections = [make(dim=COLS, layer_index=number).to(DTYPE) for number in range(sublayers)]

    def forward(x: Tensor) -> Tensor:
        x = expand(x)
        for connection in connections:
            read, write = connection(x)
            x = write(Branch.apply(read))
        return reduce(x)  # type: ignore[no-any-return]

    return forward


def liger_mhc(sublayers: int, n: int = 4) -> Callable[[Tensor], Tensor]:
    liger = importlib.import_module("liger_kernel.transformers.functional")
    phi = [torch.zeros(n * COLS, n * n + 2 * n, dtype=DTYPE, requires_grad=True) for _ in range(sublayers)]
    bias = [torch.zeros(n * n + 2 * n, requires_grad=True) for _ in range(sublayers)]
    alphas = [[torch.ones((), requires_grad=True) for _ in range(3)] for _ in range(sublayers)]

    def forward(x: Tensor) -> Tensor:
        streams = x.unsqueeze(-2).expand(*x.shape[:-1], n, COLS).contiguous()
        for of_phi, of_bias, of_alphas in zip(phi, bias, alphas, strict=True):
            pre, post, carry = liger.liger_mhc_coeffs(streams, of_phi, of_bias, *of_alphas, tmax=20)
            branch = Branch.apply(liger.liger_mhc_pre(streams, pre).to(DTYPE))
            streams = liger.liger_mhc_post_res(streams, branch, post, carry)
        return streams.sum(-2)

    return forward


def liger_attnres(sublayers: int) -> Callable[[Tensor], Tensor]:
    liger = importlib.import_module("liger_kernel.transformers.functional")
    queries = [torch.zeros(COLS, dtype=DTYPE, requires_grad=True) for _ in range(sublayers + 1)]
    gains = [torch.ones(COLS, dtype=DTYPE, requires_grad=True) for _ in range(sublayers + 1)]

    def forward(x: Tensor) -> Tensor:
        states = [x]
        for query, gain in zip(queries[:-1], gains[:-1], strict=True):
            states.append(Branch.apply(liger.liger_attn_res(torch.stack(states), query, gain)))
        return liger.liger_attn_res(torch.stack(states), queries[-1], gains[-1])  # type: ignore[no-any-return]

    return forward


def trunks(cases: list[str], units: int, rounds: int, launches: ctypes.c_int64) -> list[dict[str, Any]]:
    forwards = {"plain adds": plain_adds(units)} | {case: trunk(case, units) for case in cases}
    forwards |= {name: forward for name, forward in peers(units).items() if name.partition(", ")[0] in cases}
    steps = {name: timed_step(forward) for name, forward in forwards.items()}
    started = {}
    for case, step in steps.items():
        for _ in range(3):
            before = launches.value
            step()
            started[case] = (launches.value - before) / units
    times: dict[str, list[tuple[float, float]]] = {case: [] for case in steps}
    gc.disable()
    for _ in range(rounds):
        for case, step in steps.items():
            times[case] += [step() for _ in range(3)]  # the first finds the caches full of another's code
        gc.collect()
    gc.enable()
    rows = []
    for case, found in times.items():
        forward, backward = (1e6 / units * min(one) for one in zip(*found, strict=True))
        both = 1e6 / units * min(map(sum, found))
        plain = both / (1e6 / units * min(map(sum, times["plain adds"])))
        rows.append(
            {"trunk": case, "forward us": forward, "backward us": backward, "us": both, "over plain adds": plain}
            | {"kernels": started[case]}
        )
    return rows


def mixes(rounds: int) -> list[dict[str, Any]]:
    """Single operators beside Triton's launcher of the kernel that they start, compiled: us of the fastest round."""
    rows = []
    for n in (4, 8, 16):
        sources = [torch.zeros(1, ROWS, COLS, dtype=DTYPE) for _ in range(n)]
        weights, x = torch.ones(n), torch.zeros_like(sources[0])
        cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "mix": (partial(operators.mix, sources, weights, [], [x], None, DTYPE), launcher(MixSpec(n, added=1), x)),
            "mix_backward": (
                partial(operators.mix_backward, x, sources, weights, []),
                launcher(MixSpec(n), x, backward=True),
            ),
            "mixes with a probe": (
                partial(operators.mixes, sources, weights[None], [], [], [x], DTYPE),
                launcher(MixSpec(n, probe=True), x),
            ),
        }
        for name, (call, raw) in cases.items():
            times = [(timed(call), timed(raw)) for _ in range(3 + rounds)][3:]
            ours, theirs = (1e6 * min(one) for one in zip(*times, strict=True))
            rows.append({"operator": name, "sources": n, "us": ours, "launcher us": theirs, "beyond us": ours - theirs})
    return rows


def launcher(spec: MixSpec, x: Tensor, backward: bool = False) -> Callable[[], object]:
    """Triton's launcher of one kernel, compiled, on tensors like ``x``."""
    (launch,) = traffic.launches_of(spec, *x.shape[-2:], x.dtype, backward)
    real = {name: on_cpu(value) for name, value in launch.arguments.items()}
    kernel, programs, constants = launch.code.jit(), launch.code.programs, dict(launch.code.constants)
    compiled = kernel[programs](**real, **constants)
    every = real | constants
    arguments = [every[name] for name in kernel.arg_names]
    runner = compiled[programs]
    return lambda: runner(*arguments)


def on_cpu(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(on_cpu, value))
    return torch.empty_like(value, device="cpu") if isinstance(value, Tensor) else value


def timed(call: Callable[[], object]) -> float:
    start = time.thread_time()
    for _ in range(20):
        call()
    return (time.thread_time() - start) / 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topologies", nargs="*", default=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with stub_driver() as launches, mock.patch.object(switch, "INTERPRETED", True):
        single = mixes(arguments.rounds)
        whole = trunks(arguments.topologies, arguments.units, arguments.rounds, launches)
    for rows in (single, whole):
        table = Table(*rows[0])
        for row in rows:
            table.add_row(*(f"{x:.1f}" if isinstance(x, float) else str(x) for x in row.values()))
        Console(width=120).print(table)
    if arguments.json:
        about = {"torch": torch.__version__, "triton": triton.__version__, "units": arguments.units}
        about |= {"rows": ROWS, "cols": COLS, "dtype": str(DTYPE), "rounds": arguments.rounds}
        arguments.json.write_text(json.dumps(about | {"operators": single, "trunks": whole}, indent=1) + "\n")


if __name__ == "__main__":
    main()
