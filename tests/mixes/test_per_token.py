"""Topologies with weights per token: results and the gradients of everything, against float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import INTERPRETED, interpret, starts_interpreter
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rewire.kernels import operators, switch
from rewire.kernels.cpu import plain
from rewire.mixes.tokens import read_off, read_off_apart, read_off_hidden, rms_norm
from rewire.topologies.base import Dims, QKVInputs, materialize
from rewire.topologies.registry import make_topology

F32, F64, WIDTH = torch.float32, torch.float64, 12
CASES: list[tuple[str, dict[str, Any], int, tuple[int, ...]]] = [  # units; those with an attention
    ("grn-v3", {}, 5, ()),
    ("grn-v3", {}, 19, ()),  # more gradients than one kernel takes
    ("grn-v3", {"last": 2}, 9, ()),
    ("grn-v3", {"block": 2}, 5, ()),
    ("dca", {}, 5, (1, 3)),
    ("dca", {"last": 1}, 4, (2,)),
    ("muddformer", {}, 4, (1, 2, 4)),
    ("muddformer", {"block": 2}, 5, (1, 2)),
    ("attnres", {}, 5, ()),
    ("attnres", {"block": 2}, 5, ()),
    ("attnres", {"heads": 2, "qkv": True}, 4, (1, 3)),
    ("hc-static", {}, 3, ()),
    ("hc-dynamic", {}, 3, ()),
    ("hc-dynamic", {"output": "learned"}, 3, ()),
    ("mhc", {"iterations": 3}, 3, ()),
    ("frac-hc", {}, 3, ()),
]


class Net:
    """A trunk of nonlinear branches, with random weights."""

    def __init__(self, name: str, options: dict[str, Any], depth: int, attention: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        self.dims = Dims(depth, WIDTH, frozenset(attention))
        self.topology = make_topology(name, options).for_start("preserve")
        start = self.topology.parameters(self.dims, "preserve")
        self.parameters = {key: value + 0.1 * torch.randn(value.shape) for key, value in start.items()}
        self.x, self.maps = torch.randn(2, 5, WIDTH), torch.randn(depth, WIDTH, WIDTH) / WIDTH**0.5
        self.upstream = torch.linspace(-1, 1, WIDTH)

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        precise = torch.promote_types(dtype, F32)
        given = [self.x.to(dtype), *(value.to(precise) for value in self.parameters.values())]
        return [x.detach().requires_grad_() for x in given]

    def __call__(self, leaves: list[Tensor], checkpointed: bool = False) -> Tensor:
        x, *values = leaves
        weights = self.topology.weights(dict(zip(self.parameters, values, strict=True)), self.dims)
        states = self.topology.start(x, weights)

        def unit(states: Any, t: int) -> Any:
            value, states = self.topology.read(states, weights, t)
            r = value.q + value.k / 2 - value.v / 3 if isinstance(value, QKVInputs) else materialize(value)
            return self.topology.write(states, weights, t, torch.tanh(r @ self.maps[t - 1].to(r.dtype)))

        for t in range(1, self.dims.depth + 1):
            again = checkpointed and t % 2
            states = checkpoint(unit, states, t, use_reentrant=False) if again else unit(states, t)
        return self.topology.finish(states, weights, self.dims)


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Callable[[Net], list[Tensor]]:
    """The output of a net and the gradients of all leaves; topologies compute weights in float32 otherwise."""

    def run(net: Net) -> list[Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "float", lambda x: x if x.dtype == F64 else x.to(F32))
            return results(net, net.leaves(F64))

    return run


def results(net: Net, leaves: list[Tensor], **options: Any) -> list[Tensor]:
    out = net(leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, net.upstream.to(out.dtype).expand_as(out))]


def close(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for got, want in zip(found, wanted, strict=True):
        assert float((got.double() - want.double()).norm()) <= tolerance * float(want.double().norm())


class Cases:
    """Run as they are, and again by kernels."""

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_results_and_gradients(self, case: Any, in_float64: Callable[[Net], list[Tensor]]) -> None:
        net = Net(*case)
        close(results(net, net.leaves(F32)), in_float64(net), 2e-5)

    @pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[6], CASES[8], CASES[12]], ids=str)
    def test_under_checkpoints(self, case: Any) -> None:
        net = Net(*case)
        close(results(net, net.leaves(F32), checkpointed=True), results(net, net.leaves(F32)), 1e-6)

    @pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[6], CASES[8], CASES[12], CASES[14]], ids=str)
    def test_gradients_of_gradients(self, case: Any) -> None:
        """Against the same by plain torch in float64."""
        net = Net(*case)

        def penalty(leaves: list[Tensor]) -> list[Tensor]:
            first = torch.autograd.grad(
                (net(leaves) * net.upstream.to(leaves[0].dtype)).sum(), leaves, create_graph=True, allow_unused=True
            )
            return list(torch.autograd.grad(sum(g.square().sum() for g in first if g is not None), leaves))

        found = penalty(net.leaves(F32))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(switch, "ON", False)
            patch.setattr(Tensor, "float", lambda x: x if x.dtype == F64 else x.to(F32))
            wanted = penalty(net.leaves(F64))
        close(found, wanted, 1e-5)

    @pytest.mark.parametrize("eps", [None, 1e-2])
    @pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
    @pytest.mark.parametrize("clamped", [False, True])
    @pytest.mark.parametrize("columns", [1, 20])
    def test_read_off(self, eps: float | None, dtype: torch.dtype, columns: int, clamped: bool) -> None:
        """Rows that are strided, weights that are transposed, a gradient that comes another way."""
        x = torch.randn(70, 2, 40).to(dtype)[:, 0].requires_grad_()
        weight = torch.randn(columns, 40).T.requires_grad_()
        exact = [t.detach().double().requires_grad_() for t in (x, weight)]
        scores, again = read_off(x, weight, eps, clamped)
        want = (exact[0] if eps is None else rms_norm(exact[0], eps)) @ exact[1]
        want = want.clamp(min=0) if clamped else want
        up, other = torch.randn(70, columns), torch.randn(70, 40).to(dtype)
        found = torch.autograd.grad((scores, again), (x, weight), (up, other))
        wanted = torch.autograd.grad((want, exact[0]), exact, (up.double(), other.double()))
        close([scores.detach()], [want.detach()], 1e-6)
        close(list(found), list(wanted), 1e-2 if dtype == torch.bfloat16 else 1e-6)

    def test_clamped_scores(self) -> None:
        """Those of zero have a derivative, so that weights which start at zero learn; those below have none."""
        x, none = torch.tensor([[1.0, 2.0], [-1.0, 1.0]]), torch.tensor([[torch.nan, 0.0]])
        weight = torch.tensor([[1.0, -1.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
        scores, _ = read_off(x, weight, None, clamped=True)
        assert (scores == torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])).all()
        (found,) = torch.autograd.grad(scores.sum(), weight)
        assert torch.equal(found, torch.tensor([[1.0, -1.0, 0.0], [2.0, 1.0, 3.0]]))
        assert read_off(none, weight, None, clamped=True)[0].isnan().all()  # nothing hides what is not a number

    @pytest.mark.parametrize("used", [(0, 1, 1), (0, 1, 0), (0, 0, 1), (1, 1, 1), (1, 0, 1), (1, 0, 0)])
    @pytest.mark.parametrize("eps", [None, 1e-2])
    def test_read_off_apart(self, eps: float | None, used: tuple[int, ...]) -> None:
        """Whichever of all scores, the first and the others has a gradient, it is that of the whole."""
        x, weight = torch.randn(2, 3, 24, requires_grad=True), torch.randn(24, 5, requires_grad=True)
        whole, again = read_off(x, weight, eps, clamped=True)
        parts, handed = read_off_apart(x, weight, 2, eps, clamped=True)
        for part, want in zip(parts, (whole, whole[..., :2], whole[..., 2:]), strict=True):
            assert torch.equal(part, want)
        ups, carried = [torch.randn(part.shape) for part in parts], torch.randn(x.shape)
        wanted = used[0] * ups[0] + torch.cat([used[1] * ups[1], used[2] * ups[2]], -1)
        want = torch.autograd.grad((whole, again), (x, weight), (wanted, carried), retain_graph=True)
        taken = [(part, up) for part, up, use in zip(parts, ups, used, strict=True) if use]
        outputs, given = zip(*taken, (handed, carried), strict=True)
        for create_graph in (False, True):
            found = torch.autograd.grad(outputs, (x, weight), given, retain_graph=True, create_graph=create_graph)
            torch.testing.assert_close(found, want)

    @pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
    @pytest.mark.parametrize("columns", [3, 40, 128, 130])
    def test_read_off_hidden(self, dtype: torch.dtype, columns: int) -> None:
        """Up to 128 columns by kernels; gradients of gradients, too."""
        x = torch.randn(70, 2, 24).to(dtype)[:, 0].requires_grad_()
        first, out, static = (
            torch.randn(columns, 24).T,
            torch.randn(columns, columns) / columns**0.5,
            torch.randn(columns),
        )
        given = [x, *(t.requires_grad_() for t in (first, out, static))]
        exact = [t.detach().double().requires_grad_() for t in given]
        scores, again = read_off_hidden(*given, 1e-2)
        hidden = torch.nn.functional.gelu(rms_norm(exact[0], 1e-2) @ exact[1])
        want = hidden @ exact[2] + exact[3]
        up, other = torch.randn(70, columns), torch.randn(70, 24).to(dtype)
        close([scores.detach()], [want.detach()], 1e-6)
        found = torch.autograd.grad((scores, again), given, (up, other), create_graph=dtype == F32, retain_graph=True)
        wanted = torch.autograd.grad((want, exact[0]), exact, (up.double(), other.double()), create_graph=True)
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
        close([g.detach() for g in found], [g.detach() for g in wanted], tolerance)
        only = torch.autograd.grad(scores, given[1:], up, retain_graph=True)  # by hand: as without create_graph
        close(list(only), [g.detach() for g in wanted[1:]], tolerance)
        if dtype == F32:
            twice, exactly = (
                torch.autograd.grad(sum(g.square().sum() for g in of), leaves[:3])  # type: ignore[arg-type]
                for of, leaves in ((found, given), (wanted, exact))
            )
            close(list(twice), list(exactly), 1e-4)

    def test_saved_tensors_that_come_back_with_other_strides(self) -> None:
        """As those of `save_on_cpu` with pinned memory do."""
        x, weight = torch.randn(70, 40, requires_grad=True), torch.randn(40, 20, requires_grad=True)
        up = torch.randn(70, 20)
        want = torch.autograd.grad(read_off(x, weight, 1e-2)[0], (x, weight), up)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.contiguous()):
            found = torch.autograd.grad(read_off(x, weight, 1e-2)[0], (x, weight), up)
        close(list(found), list(want), 1e-6)


class TestPlain(Cases):
    __test__ = not INTERPRETED

    def test_each_state_is_projected_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[Tensor] = []
        project = plain.project
        monkeypatch.setattr(plain, "project", lambda x, *given: calls.append(x) or project(x, *given))
        results(net := Net(*CASES[0]), net.leaves(F32))
        assert len(calls) == 6


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter(tmp_path: Path) -> None:
    interpret(f"{__file__}::TestByKernels", tmp_path)


class TestByKernels(Cases):
    __test__ = INTERPRETED

    @pytest.mark.parametrize("eps", [None, 1e-2])
    def test_more_columns_than_one_kernel_takes(self, eps: float | None) -> None:
        """As of the first state of a deep trunk with separate queries, keys and values."""
        x, weight, grad, other = torch.randn(7, 20), torch.randn(20, 130), torch.randn(7, 130), torch.randn(7, 20)
        exact = [t.double().requires_grad_() for t in (x, weight)]
        want = (exact[0] if eps is None else rms_norm(exact[0], eps)) @ exact[1]
        scores, inverse = operators.project(x, weight, eps)
        close([scores], [want.detach()], 1e-6)
        of_x, of_weight = operators.project_backward([grad], x, weight, scores, inverse, other)
        wanted = torch.autograd.grad((want, exact[0]), exact, (grad.double(), other.double()))
        close([of_x, of_weight.T], list(wanted), 1e-6)
