"""Rewired models with kernels against the same models in plain torch, in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from every_topology import FAMILIES, QUICK, WITH_ATTENTION, learned, mixed
from interpreter import INTERPRETED, interpret, starts_interpreter
from mixing import assert_same, ids, llama, nodes_behind
from models import Mlp, PostNorm, Stack, vectors
from torch import Tensor, nn

import rewire
from rewire.kernels import operators, switch
from rewire.mixes import again
from rewire.passes.editing.fusions import fusions
from rewire.patterns.tiny import tiny_model
from rewire.runtime.held import Unsummed

OPERATORS = (
    "mix",
    "mix_norm",
    "mix_backward",
    "mix_norm_backward",
    "gather_attended",
    "mixes",
    "mixes_backward",
    "write_and_project",
    "write_and_project_backward",
)
TOLERANCE = 1e-5


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter(tmp_path: Path) -> None:
    interpret(f"{__file__}::TestWiring", tmp_path)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.RMSNorm(width, eps=1e-5)
        self.mix, self.mlp = nn.Linear(width, width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Net(nn.Module):
    """Its trunk begins with its input, and ends with its output."""

    def __init__(self, depth: int = 3, width: int = 33) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def states(width: int = 33) -> Tensor:
    return torch.randn(2, 5, width, generator=torch.Generator().manual_seed(4)).requires_grad_()


def results(model: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Output and all gradients, of the inputs too."""
    output = model(*args, **kwargs)
    output = output.logits if hasattr(output, "logits") else output
    leaves = {f"input {n}": x for n, x in enumerate(args) if x.requires_grad}
    leaves |= {name: p for name, p in model.named_parameters() if p.requires_grad}  # type: ignore[attr-defined]
    up = torch.randn(output.shape, generator=torch.Generator().manual_seed(6))
    found = torch.autograd.grad(output, list(leaves.values()), up, allow_unused=True)
    gradients = {name: g for name, g in zip(leaves, found, strict=True) if g is not None}
    assert any("depth_connections" in name for name in gradients) or not learned(model)  # type: ignore[arg-type]
    return {"output": output.detach()} | gradients


@dataclasses.dataclass
class Launched:
    """How often each operator ran, `mixes` by what they are for; ``largest`` is the most states whose gradients were
    gathered at once.
    """

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    largest: int = 0


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    found = Launched()

    def counted(name: str, operator: Any) -> Any:
        def run(*args: Any) -> Any:
            probes = args[4] if name == "mixes" else args[1] if name == "gather_attended" else ()
            stacks = name == "mixes" and args[6:7] == (True,)
            found.counts["gather" if probes else "of streams" if stacks else name] += 1
            found.largest = max(found.largest, len(probes))
            return operator(*args)

        return run

    for name in OPERATORS:
        monkeypatch.setattr(operators, name, counted(name, getattr(operators, name)))
    return found


def plain(function: Callable[[], Any]) -> Any:
    """What it returns without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(switch, "ON", False)
        return function()


def check(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    assert_same(plain(lambda: results(model, *args, **kwargs)), results(model, *args, **kwargs), TOLERANCE)


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x

    checkpointed = True


def saved_by_mixes(result: Tensor) -> list[Tensor]:
    """All that the functions of `mix` and `history` keep for backward."""
    by_hand = [n for n in nodes_behind(result) if type(n).__name__ in ("_SumBackward", "_ClaimsBackward")]
    return [x for node in by_hand for x in node.saved_tensors if x is not None]


class TestWiring:
    __test__ = INTERPRETED

    @pytest.mark.parametrize(
        "key", [*FAMILIES, "dca", "ddl", "review", "multi-gate", "two-lanes", "grn-v2-last", "attnres-qkv"]
    )
    def test_topologies(self, key: str, launched: Launched) -> None:
        check(mixed(llama(), key), ids(1, 5))
        assert sum(launched.counts.values()) >= 6 or key == "review"  # by torch alone

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("key", ["laurel-rw", "laurel-pa", "hc-gated", "multi-gate", "review", "ddl"])
    def test_what_backward_makes_again(self, key: str, dtype: torch.dtype) -> None:
        """Is bitwise what was there, sums inside units that the kernel of a norm has made, too."""
        options = {"total": 2.0} if key == "laurel-pa" else {}
        model = rewire.compile(Net(), key, start="paper", validate=False, **options)
        connections = {p for c in rewire.connections(model).values() for p in c.parameters()}
        for parameter in model.parameters():
            with torch.no_grad():
                parameter.data = (parameter + 0.02 * torch.randn_like(parameter)).to(
                    torch.float32 if parameter in connections else dtype
                )

        def gradients() -> list[Tensor]:
            x = states().detach().to(dtype).requires_grad_()
            return [*torch.autograd.grad(model(x).float().square().sum(), [x, *model.parameters()])]

        with mock.patch.object(again, "saved_tensor_hooks", return_value=(None, None)):
            want = gradients()
        with mock.patch.object(again, "_unpacked", side_effect=again._unpacked) as asked:
            got = gradients()
        assert any(call.args[0].recompute is not None for call in asked.call_args_list)
        assert all(map(torch.equal, got, want))

    @pytest.mark.parametrize("model_type", ["gpt2", "gemma", "falcon"])
    def test_norms_of_other_models(self, model_type: str, launched: Launched) -> None:
        model = mixed(tiny_model(model_type).eval(), "ancre-ingoing", granularity="sublayer")
        fused = sum(fusion.obstacle is None for fusion in fusions(model))
        check(model, ids(1, 5))
        # What the first norm of a trunk reads is no sum.
        assert launched.counts["mix_norm"] == launched.counts["mix_norm_backward"] == fused - 1

    @pytest.mark.parametrize("key", ["residual", "ancre-ingoing", "ancre-keep", "denseformer", "laurel-pa", "rezero"])
    def test_post_norm(self, key: str, launched: Launched) -> None:
        check(mixed(Stack(PostNorm), key), vectors())
        assert not launched.counts["mix_norm"]

    @pytest.mark.parametrize(
        ("key", "granularity"),
        [
            *((key, "sublayer") for key in QUICK if key not in WITH_ATTENTION),
            *((key, "block") for key in ("residual", "ancre-ingoing", "grn-v1", "hc-dynamic", "mhc")),
        ],
    )
    def test_odd_widths_and_strided_states(self, key: str, granularity: str) -> None:
        width = 36 if key.startswith("frac") else 33
        model = mixed(Net(width=width), key, granularity=granularity)
        wide = torch.randn(5, 2, 40, generator=torch.Generator().manual_seed(4)).requires_grad_()
        strided = wide[..., 3 : 3 + width].transpose(0, 1)
        assert not strided.is_contiguous()
        check(model, strided)

    @pytest.mark.parametrize(
        ("key", "depth"),
        [*zip(["ancre-ingoing", "denseformer", "grn-v1", "grn-v2", "grn-v3", "attnres"], [5, 7] * 3, strict=True)],
    )
    def test_blocks_of_depth(self, key: str, depth: int, launched: Launched) -> None:
        """They begin and end in the middle of the trunk."""
        check(mixed(Net(depth), key, granularity="sublayer"), states())
        assert launched.counts["mixes"] > 1 and 1 < launched.largest < depth

    @pytest.mark.parametrize("key", ["ancre-groups", "grn-v1-groups", "attnres-groups"])
    def test_groups(self, key: str, launched: Launched) -> None:
        """The states of a group come together; there are no blocks, whose sums begin early."""
        check(mixed(Net(5), key, granularity="sublayer"), states())
        assert launched.counts["mixes"] == 0 and launched.largest > 2

    def test_hyper_connections_write_and_read_at_once(self, launched: Launched) -> None:
        model = mixed(Net(4), "hc-static", granularity="sublayer")
        check(model, states())
        assert launched.counts["mixes_backward"] == 8 + 1  # the first read
        # Backward makes all reads but that of the output again, and all streams but those in front of the last 6 units
        # and the last ones.
        assert launched.counts["of streams"] == 8 + 1 + 8 + 6

    @pytest.mark.parametrize(("key", "together"), [("hc-dynamic", 8 - 1), ("mhc", 0)])
    def test_a_write_reads_what_the_next_gates_are_made_of(self, key: str, together: int, launched: Launched) -> None:
        """Where each stream has gates of its own."""
        model = mixed(Net(4), key, granularity="sublayer")
        check(model, states())
        counts = launched.counts
        assert counts["write_and_project"] == counts["write_and_project_backward"] == together

    @pytest.mark.parametrize("key", ["ancre-ingoing", "grn-v2"])
    def test_states_of_other_shapes_and_no_tokens(self, key: str) -> None:
        model = mixed(Net(), key)
        for x in (torch.randn(33), torch.randn(0, 5, 33), torch.randn(2, 1, 3, 33)):
            got, want = model(x), plain(lambda x=x: model(x))
            torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)

    @pytest.mark.parametrize("key", ["ancre-ingoing", "denseformer", "residual", "hc-static"])
    def test_activation_checkpointing(self, key: str) -> None:
        """Nothing waits between checkpointed blocks: what waits would be kept beside the state that it makes."""
        model, waiting = mixed(Checkpointed(), key, granularity="sublayer"), []
        for layer in model.layers[1:]:
            nn.Module.register_forward_pre_hook(
                layer, lambda _, args: waiting.append(isinstance(args[0].held, Unsummed))
            )
        check(model, states())
        assert len(waiting) == 8 and not any(waiting)  # twice each, with kernels and without
        want = results(model, states())
        waiting.clear()
        model.checkpointed = False
        assert_same(want, results(model, states()), TOLERANCE)
        assert any(waiting) == (key in ("ancre-ingoing", "residual"))

    @pytest.mark.parametrize("model_type", ["llama", "gpt2"])
    def test_the_library_s_checkpointing(self, model_type: str) -> None:
        model = mixed(tiny_model(model_type), "ancre-ingoing").train()
        want = results(model, ids(1, 5), use_cache=False)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert_same(want, results(model, ids(1, 5), use_cache=False), TOLERANCE)

    @pytest.mark.parametrize("key", ["ancre-ingoing", "grn-v2", "dca", "hc-dynamic", "hc-static"])
    def test_hidden_states(self, key: str) -> None:
        model = mixed(llama(), key)
        got, want = model(ids(), output_hidden_states=True), plain(lambda: model(ids(), output_hidden_states=True))
        assert len(got.hidden_states) == 4
        for a, b in zip((*got.hidden_states, got.logits), (*want.hidden_states, want.logits), strict=True):
            torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)
        assert torch.equal(got.logits, model(ids()).logits)  # looking changes nothing

    @pytest.mark.parametrize("key", ["ancre-ingoing", "dca"])
    def test_inference_and_generation(self, key: str, launched: Launched) -> None:
        model = mixed(llama(), key)

        @torch.no_grad()
        def run() -> tuple[Tensor, Tensor]:
            options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True, "pad_token_id": 0}
            return model(ids()).logits, model.generate(ids(), **options)

        (logits, tokens), (want_logits, want_tokens) = run(), plain(run)
        torch.testing.assert_close(logits, want_logits, rtol=TOLERANCE, atol=TOLERANCE)
        assert torch.equal(tokens, want_tokens) and tokens.shape == (2, 17)
        assert launched.counts["mix_norm"] and not launched.counts["mix_norm_backward"]

    @pytest.mark.parametrize("key", ["ancre-ingoing", "grn-v2", "attnres", "hc-static"])
    def test_two_forwards_before_one_backward(self, key: str) -> None:
        model = mixed(Net(), key)
        first, second = states(), (2 * states().flip(0)).detach().requires_grad_()
        leaves = list(model.parameters())
        apart = [torch.autograd.grad(model(x).square().sum(), leaves, allow_unused=True) for x in (first, second)]
        a, b = model(first), model(second)
        together = torch.autograd.grad(a.square().sum() + b.square().sum(), leaves, allow_unused=True)
        names = [name for name, _ in model.named_parameters()]
        want = {n: x + y for n, x, y in zip(names, *apart, strict=True) if x is not None}
        assert_same(want, {n: g for n, g in zip(names, together, strict=True) if g is not None}, TOLERANCE)

    @pytest.mark.parametrize("key", ["ancre-ingoing", "grn-v2", "attnres", "hc-static"])
    def test_a_second_backward_is_bitwise_the_first(self, key: str) -> None:
        model, x = mixed(Net(6), key, granularity="sublayer"), states()
        loss, leaves = model(x).square().sum(), [x, *model.parameters()]
        first, second = (torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True) if a is not None)

    @pytest.mark.parametrize("key", ["ancre-ingoing", "grn-v3", "hc-dynamic", "hc-static"])
    def test_all_parameters_but_connection_weights_are_frozen(self, key: str) -> None:
        model = mixed(Net(), key)
        for name, p in model.named_parameters():
            p.requires_grad_("depth_connections" in name)
        check(model, states().detach())
        for p in learned(model).values():
            p.requires_grad_(False)
        assert not model(states().detach()).requires_grad

    @pytest.mark.parametrize(
        ("key", "trained"),
        [
            ("ancre-ingoing", "mlp.down"),
            *((key, "norm_2") for key in ("ancre-ingoing", "grn-v3", "hc-dynamic", "hc-static")),
        ],
    )
    def test_most_parameters_are_frozen(self, key: str, trained: str) -> None:
        model = mixed(Net(), key)
        for name, p in model.named_parameters():
            p.requires_grad_(trained in name or "depth_connections" in name)
        check(model, states().detach())
        for p in learned(model).values():
            p.requires_grad_(False)
        leaves = [p for p in model.parameters() if p.requires_grad]
        got, want = (
            run(lambda: torch.autograd.grad(model(states()).sin().sum(), leaves)) for run in (lambda f: f(), plain)
        )
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

    def test_hooks_on_norms_are_called(self) -> None:
        model, seen = mixed(llama(), "ancre-ingoing"), []
        for layer in model.model.layers:
            layer.post_attention_layernorm.register_forward_hook(lambda *_: seen.append(None))
        check(model, ids(1, 5))
        assert len(seen) == 6

    def test_a_norm_that_was_replaced_is_called(self) -> None:
        model = mixed(Net(), "ancre-ingoing")
        model.layers[1].norm_2 = nn.Sequential(nn.Linear(33, 33), nn.Tanh())
        check(model, states())

    def test_frozen_topologies(self) -> None:
        model, _ = rewire.freeze(mixed(llama(), "ancre-ingoing"))
        check(model, ids(1, 5))

    @pytest.mark.parametrize("depth", [3, 6])
    def test_what_ancre_keeps_for_backward(self, depth: int) -> None:
        """Each state once, and one number per token and norm; all else is small."""
        model, x = mixed(Net(depth), "ancre-ingoing", granularity="sublayer"), states()
        saved = saved_by_mixes(model(x))
        assert {s.dtype for s in saved} == {torch.float32}
        large = {s.untyped_storage().data_ptr() for s in saved if s.numel() >= x.numel()}
        assert len(large) == 2 * depth  # all but the last, which nobody mixes
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        small = [s for s in saved if s.numel() < x.numel() and s.untyped_storage().data_ptr() not in own]
        rows = [s for s in small if s.numel() == 10]
        assert len(rows) == 2 * depth - 1
        assert all(s.untyped_storage().nbytes() <= 4 * (2 * depth) * (2 * depth + 1) // 2 for s in small)

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which Dynamo itself hides
    @pytest.mark.parametrize("key", ["ancre-ingoing", "grn-v3", "attnres", "muddformer", "hc-dynamic", "mhc"])
    def test_torch_compile(self, key: str) -> None:
        """Some are deep enough for sums that begin in blocks."""
        depth = 2 if key in ("muddformer", "hc-dynamic", "mhc") else 5
        model, called = mixed(Net(depth), key, granularity="sublayer"), []

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            called.extend(str(node.target) for node in graph.graph.nodes)
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        compiled = torch.compile(model, fullgraph=True, backend=backend)
        want = results(model, states())
        got = {name.removeprefix("_orig_mod."): value for name, value in results(compiled, states()).items()}
        assert_same(want, got, TOLERANCE)
        assert sum(target.startswith("rewire.") for target in called) >= 2 * depth
        assert "autograd_function_apply" not in called
