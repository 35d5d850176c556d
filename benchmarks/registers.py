"""Registers, spills and CTAs per SM of kernels, compiled to machine code: no GPU is needed.

    python benchmarks/registers.py [--json benchmarks/results/registers.json]

prints the tables of docs/kernels.md, and writes what tests/kernels/test_machine_code.py holds kernels to.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import traffic
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

import passes
from rewire.kernels import MixSpec
from rewire.kernels.kernel import Launch
from rewire.topologies.registry import make_topology

BF16, F32 = torch.bfloat16, torch.float32
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
#: Single mixes, and their width.
SPECS = {
    "scalar": (MixSpec(16, added=1), 4096),
    "channel + scores": (MixSpec(16, "channel", True), 4096),
    "q, k, v": (MixSpec(15, "channel", True, outputs=3), 2048),
    "scores + layer norm": (MixSpec(16, "none", True, added=1, norm="layer", keep_mix=True), 4096),
    "scalar + scores + rms norm": (MixSpec(16, "scalar", True, added=1, norm="rms"), 8192),
    "probe": (MixSpec(16, "channel", probe=True), 4096),
    "2 outputs, scores": (MixSpec(16, "none", True, outputs=2), 4096),
    "4 outputs": (MixSpec(16, outputs=4), 4096),
    "8 outputs": (MixSpec(16, outputs=8), 8192),
    "4 probes": (MixSpec(16, outputs=4, probe=True, accumulate=True), 4096),
    "4 probes, channel": (MixSpec(4, "channel", outputs=4, probe=True, accumulate=True), 8192),
    "hyper-connections, n = 4": (MixSpec(5, "none", True, outputs=5), 4096),
    "hyper-connections, constant": (MixSpec(5, outputs=5), 4096),
    "4 added + layer norm": (MixSpec(0, "none", added=4, norm="layer", keep_mix=True), 8192),
    "64 sources": (MixSpec(64, added=1), 4096),
    "64 sources, 4 outputs": (MixSpec(64, outputs=4), 4096),
    "48 scores, carried": (MixSpec(48, "none", True, carried=True), 2048),
    "4 outputs, 64 scores": (MixSpec(64, "none", True, outputs=4), 4096),
    "4 probes, scores": (MixSpec(16, "none", True, outputs=4, probe=True, accumulate=True), 4096),
    "4 probes, attended": (MixSpec(16, "none", True, outputs=4, probe=True, accumulate=True, attended=True), 4096),
    "4 outputs, channel + scores": (MixSpec(32, "channel", True, added=1, outputs=4), 2048),
    "4 probes alone": (MixSpec(16, "channel", outputs=4, probe=True, dots_only=True), 4096),
    "4 probes alone, scores": (MixSpec(16, "channel", True, outputs=4, probe=True, dots_only=True), 4096),
    "8 probes alone, attended": (MixSpec(8, "none", True, outputs=8, probe=True, attended=True, dots_only=True), 4096),
}


class Case(NamedTuple):
    """A mix of `SPECS`, and a GPU."""

    target: str
    mix: str
    width: int
    dtype: torch.dtype


MORE = [
    *((name, 4096, F32) for name in ("scalar", "channel + scores", "scores + layer norm")),
    *((name, width, BF16) for name in ("channel + scores", "scores + layer norm") for width in (64, 1000)),
]
CASES = [
    *(Case(target, name, width, BF16) for name, (_, width) in SPECS.items() for target in TARGETS),
    *(Case("sm_90", *case) for case in MORE),
]


class Usage(NamedTuple):
    """Of a thread, what the compiler reports, spills in bytes; and how many of its programs fit on an SM at once."""

    registers: int
    spilled: int
    programs: int

    def __str__(self) -> str:
        return f"{self.registers}, {self.programs}" + (f" ({self.spilled} B spilled)" if self.spilled else "")

    @property
    def worse(self) -> tuple[int, int, int]:
        """Each is worse where it is more."""
        return self.registers, self.spilled, -self.programs


def worst(found: Iterable[Usage]) -> Usage:
    registers, spilled, programs = zip(*found, strict=True)
    return Usage(max(registers), max(spilled), min(programs))


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
    backend, options, bound, specialization = _bound(kernel, arguments, target)
    options, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, options)
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target, dataclasses.asdict(options))


def _bound(kernel: Any, arguments: dict[str, Any], target: Any) -> tuple[Any, Any, Any, Any]:
    backend = make_backend(target)
    bound, specialization, options = create_function_from_signature(kernel.signature, kernel.params, backend)(
        **arguments
    )
    return backend, options, bound, specialization


def variant(call: Launch) -> tuple[str, str, str]:
    """What Triton compiles a kernel for; equal ones are compiled once. Of generated ones the text is part of it."""
    kernel = call.code.jit()
    _, options, _, specialization = _bound(kernel, call.arguments | dict(call.code.constants), TARGETS["sm_90"])
    return f"{kernel.__name__} {hash(kernel.src)}", str(specialization), str(options)


def usage(kernel: Any, target: Any) -> Usage:
    shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
    if target.backend == "hip":
        found = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)", kernel.asm["amdgcn"])}
        registers = found["vgpr_count"]
        spilled = found["private_segment_fixed_size"] + 4 * found["vgpr_spill_count"]
        waves = 4 * min(8, 512 // max(8, -(-registers // 8) * 8))  # of four SIMDs
        return Usage(registers, spilled, min(waves // warps, (64 << 10) // max(1, shared)))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    registers = found["REG"]
    resident = 4 * (16384 // (-(-registers // 8) * 8 * 32))  # warps, of four partitions with 16384 registers each
    memory = (164 if target.arch == 80 else 228) << 10
    programs = min(min(64, resident) // warps, 32, memory // (shared + 1024))
    return Usage(registers, found["STACK"] + found["LOCAL"], programs)


def of_mix(case: Case) -> Iterator[tuple[str, str, Usage]]:
    """Each of its kernels: direction and sources, tile and warps, and what it uses."""
    spec, _ = SPECS[case.mix]
    for call in launches(spec, case.width, case.dtype):
        grid = made_for(call)
        kernel = f"{'backward' if grid.backward else 'forward'}, {grid.spec.sources} sources"
        tile = f"{grid.block_rows} x {grid.block_cols}, {grid.warps}"
        yield kernel, tile, usage(compiled(call, TARGETS[case.target]), TARGETS[case.target])


def of_trunk(case: str, blocks: int = 24) -> list[Launch]:
    """The different kernels that a trunk of `passes.CASES` starts, forward and backward."""
    name, options, depth = passes.CASES[case]
    found = passes.measure(make_topology(name, options), depth * blocks // 24)["kernels"]
    return list({variant(one): one for one in found}.values())


def name_of(call: Launch) -> str:
    kernel = call.code.jit()
    return str(kernel.__name__)


def measure() -> dict[str, Any]:
    mixes: dict[tuple[str, ...], dict[str, Usage]] = {}
    for case in CASES:
        for kernel, tile, used in of_mix(case):
            row = case.mix, str(case.width), str(case.dtype)[6:], kernel, tile
            mixes.setdefault(row, {})[case.target] = used
    trunks: dict[str, Any] = {}
    for trunk in passes.CASES:
        by_name: dict[str, list[Usage]] = {}
        for call in of_trunk(trunk):
            by_name.setdefault(name_of(call), []).append(usage(compiled(call, TARGETS["sm_90"]), TARGETS["sm_90"]))
        trunks[trunk] = {"kernels of 32 blocks": len(of_trunk(trunk, 32)), "worst": {}}
        trunks[trunk]["worst"] = {name: worst(found) for name, found in by_name.items()}
    rows = [dict(zip(("mix", "D", "states", "kernel", "tile"), row, strict=True)) | of for row, of in mixes.items()]
    return {"triton": triton.__version__, "mixes": rows, "trunks": trunks}


def tables(found: dict[str, Any]) -> str:
    """As docs/kernels.md shows them."""
    lines = [
        f"| mix | D | states | kernel | tile, warps | {' | '.join(TARGETS)} |",
        "|---|--:|---|---|---|" + "--:|" * len(TARGETS),
    ]
    for row in found["mixes"]:
        cells = [row[key] for key in ("mix", "D", "states", "kernel", "tile")]
        cells += [str(Usage(*row[target])) if target in row else "" for target in TARGETS]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| topology | kernels of 32 blocks | of 24 blocks |", "|---|--:|---|"]
    for trunk, kernels in found["trunks"].items():
        each = (f"`{name}` {Usage(*used)}" for name, used in kernels["worst"].items())
        lines.append(f"| {trunk} | {kernels['kernels of 32 blocks']} | {'; '.join(each)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure()
    print(tables(found))
    if arguments.json:
        text = json.dumps(found, indent=1)
        arguments.json.write_text(re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", text) + "\n")


if __name__ == "__main__":
    main()
