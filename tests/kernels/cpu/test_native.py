"""The compiled sums: against float64, and what is left to torch."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from rewire.kernels import switch
from rewire.kernels.cpu import native, plain
from rewire.mixes.mix import mix

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
#: Rows and channels; tiles are 4096 elements, and compilers take 16 at a time.
SHAPES = [(1,), (3, 5), (2, 7, 33), (3, 4097), (2, 3, 4096), (1, 9001)]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def draw(count: int, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for _ in range(count)]


def exact(terms: list[Tensor], weights: Tensor, added: list[Tensor]) -> Tensor:
    weighted = [w.double() * g.double() for w, g in zip(weights, terms, strict=True)]
    return torch.stack([*weighted, *(a.double() for a in added)]).sum(0)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    slack = 1e-13 if dtype == torch.float64 else 1e-5
    assert got.dtype == dtype and got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=max(slack, 0.51 * torch.finfo(dtype).eps), atol=slack)


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_sum(shape: tuple[int, ...], channel: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "GRAIN", 8)  # both threads have something to do
    for n, branches in ((1, 0), (1, 2), (4, 1), (5, 0), (13, 3)):
        terms, added = draw(n, dtype, shape), draw(branches, dtype, shape)
        weights = torch.randn(n, *shape[-1:] * channel)
        before = [x.clone() for x in (*terms, *added)]
        found = native.sums(terms, weights, channel, added)
        assert found is not None
        (total,) = found
        close(total, exact(terms, weights, added), dtype)
        assert all(map(torch.equal, (*terms, *added), before))


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_and_products(
    shape: tuple[int, ...], channel: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "GRAIN", 8)
    precision = torch.promote_types(dtype, torch.float32)
    for n, m, branches in ((1, 3, 0), (6, 1, 1), (4, 2, 0)):
        terms, states, added = draw(n, dtype, shape), draw(m, dtype, shape), draw(branches, dtype, shape)
        weights = torch.randn(m, n, *shape[-1:] * channel)
        found = native.sums(terms, weights, channel, added, states)
        assert found is not None
        *totals, dots = found
        for got, row in zip(totals, weights, strict=True):
            close(got, exact(terms, row, added), dtype)
        over = tuple(range(len(shape) - channel))
        products = [[(x.double() * g.double()).sum(over) if over else x.double() * g for g in terms] for x in states]
        want = torch.stack([torch.stack(row) for row in products]).double()
        scale = max(1.0, math.sqrt(math.prod(shape)))
        torch.testing.assert_close(dots.double(), want, rtol=1e-5, atol=1e-6 * scale)
        assert dots.dtype == precision and dots.shape == weights.shape


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", ["", "scalar", "channel"])
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_weights_per_token(
    shape: tuple[int, ...], weighted: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "GRAIN", 8)
    channel, precision = weighted == "channel", torch.promote_types(dtype, torch.float32)
    for n, m, branches in ((1, 3, 0), (6, 1, 1), (4, 2, 2)):
        terms, states, added = draw(n, dtype, shape), draw(m, dtype, shape), draw(branches, dtype, shape)
        weights = torch.randn(m, n, *shape[-1:] * channel) if weighted else None
        scores = torch.randn(*shape[:-1], m, n)
        found = native.sums(terms, weights, channel, added, states, scores)
        assert found is not None and len(found) == m + 1 + channel
        for k, got in enumerate(found[:m]):
            of_tokens = [score.unsqueeze(-1).double() for score in scores[..., k, :].unbind(-1)]
            rows = of_tokens if weights is None else [s + w for s, w in zip(of_tokens, weights[k], strict=True)]
            want = torch.stack(
                [*(w * g.double() for w, g in zip(rows, terms, strict=True)), *map(Tensor.double, added)]
            )
            close(got, want.sum(0), dtype)
        products = torch.stack([torch.stack([x.double() * g.double() for g in terms], -2) for x in states], -3)
        slack = 1e-6 * math.sqrt(math.prod(shape))
        torch.testing.assert_close(found[-1], products.sum(-1).to(precision), rtol=1e-5, atol=slack)
        if channel:
            by_channel = products.flatten(0, -4).sum(0).to(precision)
            torch.testing.assert_close(found[m], by_channel, rtol=1e-5, atol=slack)
        if m == 1:
            alone = native.sums(terms, weights, channel, added, (), scores)
            assert alone is not None and torch.equal(alone[0], found[0])


def test_every_run_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "GRAIN", 8)
    terms, states, weights = draw(7, torch.float32, (9, 1001)), draw(1, torch.float32, (9, 1001)), torch.randn(1, 7)
    first = native.sums(terms, weights, False, (), states)
    assert first is not None
    for _ in range(5):
        again = native.sums(terms, weights, False, (), states)
        assert again is not None and all(map(torch.equal, again, first))


def test_bfloat16_rounds_as_torch_does() -> None:
    x = torch.cat([torch.randn(1 << 12), torch.tensor([math.inf, -math.inf, math.nan, 3.4e38, 1e-40, 0.0, -0.0])])
    f = torch.rand_like(x).bfloat16()
    found = native.sums([x.bfloat16()], torch.tensor([0.5]), False, [f])
    want = (0.5 * x.bfloat16().float() + f.float()).bfloat16()
    assert found is not None
    torch.testing.assert_close(found[0], want, rtol=0, atol=0, equal_nan=True)
    not_a_number = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # rounded up it would be zero
    found = native.sums([torch.ones(3).bfloat16()], not_a_number, False)
    assert found is not None and found[0].isnan().all()


def test_float16_rounds_as_torch_does() -> None:
    """Every float16, and float32 of all sizes, in runs of 16 elements and one by one."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16)
    drawn = torch.randint(-(2**31), 2**31 - 1, (1 << 16,)).to(torch.int32).view(torch.float32)
    ties = torch.tensor([65519.0, 65520.0, 2**-24, 2**-25, 3 * 2**-25, 2**-14 - 2**-26, 1 + 2**-11, 1 + 3 * 2**-11])
    for x in (every, every.view(-1, 8)[:, :7].contiguous()):
        (found,) = native.sums([x], torch.ones(1), False)  # type: ignore[misc]
        torch.testing.assert_close(found, x, rtol=0, atol=0, equal_nan=True)
    for w in (*ties, *drawn[:4096:16]):
        (found,) = native.sums([torch.tensor([1.0, -1.0, 2**-14, 0.5]).half()], w.view(1), False)  # type: ignore[misc]
        want = (torch.tensor([1.0, -1.0, 2**-14, 0.5]) * w).half()
        torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


def test_signs_that_torch_has_not_stored() -> None:
    x = torch.randn(5, 1, dtype=torch.complex64).conj().imag
    assert x.is_neg() and native.sums([x, x], torch.ones(2), False) is None
    (total,) = native.mixes([x, x.clone()], torch.ones(1, 2), None, False, 0)
    torch.testing.assert_close(total, 2 * x)


def test_rows_that_lie_apart() -> None:
    wide = torch.randn(4, 5, 3, 6)
    spread = [wide[:, :, 1], wide.mT.contiguous().mT[:, :, 2].contiguous(), torch.randn(6).expand(4, 5, 6)]
    for weights, scores in ((torch.randn(3), None), (None, torch.randn(4, 5, 1, 3))):
        found = native.sums(spread, weights, False, [wide[:, :, 0]], (), scores)
        factors = weights.double() if weights is not None else scores.double().squeeze(-2).unbind(-1)
        factors = [w.unsqueeze(-1) if w.dim() else w for w in factors]
        assert found is not None
        close(found[0], exact(spread, factors, [wide[:, :, 0]]), torch.float32)


def test_what_is_left_to_torch() -> None:
    x, w = torch.randn(4, 6), torch.ones(2)
    zero = torch._efficientzerotensor(4, 6)
    for other in (x.double(), x.half(), x[:, :3], torch.randn(6, 4).mT, zero):
        assert native.sums([x, other], w, False) is None
    assert native.sums([x.int()] * 2, w, False) is None
    assert native.sums([x[:0]] * 2, w, False) is None
    assert native.sums([x.to("meta")] * 2, w, False) is None
    assert native.sums([x, x], torch.ones(2, 1), True) is None  # broadcast
    assert native.sums([x, x], w, False) is not None
    assert native.sums([x, x], None, False, (), (), torch.ones(1, 2)) is None  # broadcast
    assert native.sums([x, x], None, False, (), (), torch.ones(4, 1, 2)) is not None
    assert torch.equal(plain.combine([x, zero], w), x)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_those_who_follow_torch_see_every_operation() -> None:
    x = torch.randn(4, 6)

    weights = torch.ones(2)
    with FlopCounterMode(display=False):
        assert native.sums([x, x], weights, False) is None

    def doubled(x: Tensor) -> Tensor:
        return mix([x, x], weights)

    recorded = make_fx(doubled)(x)
    compiled = torch.compile(doubled, backend="eager", fullgraph=True)
    for function in (torch.jit.trace(doubled, x), recorded, compiled):
        assert torch.equal(function(x + 1), 2 * (x + 1))


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What was compiled is forgotten, before and after."""
    caches = (native.loaded, native._function)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", 'c++ "open'])
def test_without_a_compiler(
    compiler: str,
    forgotten: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("REWIRE_CACHE_DIR", str(tmp_path / "cache"))
    x = torch.randn(4, 6)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(plain.combine([x, x], torch.ones(2)), 2 * x)
    (record,) = caplog.records  # said once
    assert "left to torch" in record.getMessage() and (compiler in record.getMessage() or '"' in compiler)
    assert list((tmp_path / "cache").glob("*")) == []  # nor is there anything half made


def test_switched_off(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "ON", False)
    assert native.sums([torch.randn(3)], torch.ones(1), False) is None


@pytest.mark.slow
def test_is_compiled_once(tmp_path: Path) -> None:
    """By several processes at once: none sees half a file, and later ones find it."""
    script = (
        "import torch\n"
        "from rewire.kernels.cpu import native\n"
        "native.FLAGS = ('-O0', *native.FLAGS[1:])\n"  # compiled in a second instead of ten
        "print(native.sums([torch.ones(3)], torch.ones(1), False))"
    )
    environment = os.environ | {"REWIRE_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", script]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert all("tensor([1., 1., 1.])" in process.communicate()[0] for process in running)
    (library,) = (tmp_path / "cache").iterdir()
    assert library.suffix == ".so"
    made = library.stat().st_mtime_ns
    later = subprocess.run(command, env=environment | {"CXX": "c++"}, stdout=subprocess.PIPE, text=True, check=True)
    assert "tensor([1., 1., 1.])" in later.stdout and library.stat().st_mtime_ns == made


def test_a_damaged_library_is_made_again(forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded, one that is cut off kills the process."""
    small = tmp_path / "small.cpp"
    small.write_text("int one() { return 1; }\n")
    monkeypatch.setenv("REWIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "SOURCES", (small,))
    path = native._compiled()
    whole = path.read_bytes()
    for damaged in (whole[:5000], whole[:-1] + b"x"):
        path.write_bytes(damaged)
        assert native._compiled() == path and path.read_bytes() == whole
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")  # of somebody else, say
    assert native._compiled() == path and not path.is_symlink()


def test_threads_are_those_of_torch() -> None:
    """One OpenMP in the process: two would each keep a pool of threads."""
    code = (
        "import torch\n"
        "from pathlib import Path\n"
        "from rewire.kernels.cpu import native\n"
        "assert native.sums([torch.randn(3)], torch.ones(1), False) is not None\n"
        "maps = Path('/proc/self/maps').read_text().splitlines()\n"
        "print(len({line.split()[-1] for line in maps if 'libgomp' in line}))"
    )
    # In a process of its own: scikit-learn, which other tests import, brings one along.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
