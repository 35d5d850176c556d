"""rewire.freeze: the same function with constants, fewer edges and states, and an honest report."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from every_topology import EVERY, mixed
from mixing import shaken
from models import ConvNet, NanoGPT, PreNorm, Shared, Stack, images, token_ids, vectors
from slow_cases import one_in
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rewire
from rewire.freezing import FreezeReport
from rewire.mixes.history import History
from rewire.patterns.tiny import timm_model, tiny_model
from rewire.runtime.stream import Stream
from rewire.saving import checkpoint as saved
from rewire.topologies.base import Dims, Start, States, materialize

STATIC = [
    *("residual", "ancre-ingoing", "ancre-outgoing", "ancre-none", "ancre-keep", "ancre-constant", "ancre-cascaded"),
    *("denseformer", "denseformer-2x2", "grn-v1", "grn-v2", "grn-v1-last", "grn-v2-last"),
    *("rezero", "skipinit", "layerscale", "laurel-rw", "laurel-rw-softmax"),
    *("hc-static", "hc-static-sum", "hc-static-learned"),
    *("x0-lambdas", "x0-lambdas-state", "unet", "residual-scale", "residual-scale-branch", "variance-gate"),
    *("fixed-scale", "fixed-scale-deepnorm"),
]


def error(expected: Tensor, actual: Tensor) -> float:
    return float((expected - actual).detach().norm() / expected.detach().norm())


def own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if "depth_connections" not in name}


def outputs_and_gradients(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    out, parameters = run(model), own_parameters(model)
    torch.manual_seed(1)
    gradients = torch.autograd.grad((out * torch.randn_like(out)).sum(), list(parameters.values()), allow_unused=True)
    return out.detach(), {n: g for n, g in zip(parameters, gradients, strict=True) if g is not None}


def assert_same_function(
    learned: nn.Module, constant: nn.Module, run: Callable[[nn.Module], Tensor], tolerance: float = 1e-6
) -> None:
    """Outputs, and gradients of the model's own parameters."""
    out, gradients = outputs_and_gradients(learned, run)
    other, others = outputs_and_gradients(constant, run)
    assert error(out, other) <= tolerance
    assert gradients.keys() == others.keys() and gradients
    largest = max(float(g.norm()) for g in gradients.values())
    for name, gradient in gradients.items():
        assert float((gradient - others[name]).norm()) <= tolerance * max(float(gradient.norm()), 1e-2 * largest), name


def stack_with(rows: list[float], depth: int = 4, topology: str = "ancre-none") -> nn.Module:
    """A rewired stack of pre-norm blocks whose shortcuts have the weights ``rows``."""
    model = rewire.compile(Stack(PreNorm, depth), topology, start="paper", validate=False)
    connection = rewire.connections(model)["layers"]
    connection.set_values({connection.learned_names[0]: torch.tensor(rows)})
    return model


# -- the same function -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", one_in(2, STATIC))
def test_threshold_zero_changes_nothing(key: str) -> None:
    model = NanoGPT(depth=4).double().eval()
    learned = mixed(model, key)
    before = {name: value.clone() for name, value in learned.state_dict().items()}
    constant, report = rewire.freeze(learned, 0.0, (token_ids(),))
    assert_same_function(learned, constant, lambda m: m(token_ids(), token_ids())[0])
    assert report.change is not None and report.change <= 1e-6
    matrix = rewire.coefficients(constant)["transformer.h"]
    torch.testing.assert_close(matrix, rewire.coefficients(learned)["transformer.h"])
    # no connection weights are left, the others are shared, and the learned model is as it was
    own = own_parameters(learned)
    assert dict(constant.named_parameters()).keys() == own.keys()
    assert all(parameter is own[name] for name, parameter in constant.named_parameters())
    assert type(constant).__name__ == "NanoGPT" and not constant.training
    assert learned.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in learned.state_dict().items())


def logits(**inputs: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(**inputs).logits


IDS = token_ids(vocabulary=97)
MODELS: dict[str, tuple[Callable[[], nn.Module], str, Callable[[nn.Module], Tensor]]] = {
    "llama, blocks": (lambda: tiny_model("llama"), "denseformer", logits(input_ids=IDS)),
    "bert, post-norm": (lambda: tiny_model("bert"), "ancre-ingoing", logits(input_ids=IDS)),
    "bert, scaled": (lambda: tiny_model("bert"), "layerscale", logits(input_ids=IDS)),
    "albert, shared": (lambda: tiny_model("albert"), "denseformer", logits(input_ids=IDS)),
    "t5, two trunks": (lambda: tiny_model("t5"), "hc-static", logits(input_ids=IDS, decoder_input_ids=IDS)),
    "resnet, relu after the add": (
        lambda: timm_model("resnet18"), "ancre-outgoing", lambda model: model(images(size=64)),
    ),
    "channels first": (lambda: timm_model("resnet18"), "layerscale", lambda model: model(images(size=64))),
    "a block that stands at three places": (Shared, "grn-v2", lambda model: model(vectors())),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    make, key, run = MODELS[name]
    learned = mixed(make().double().eval(), key)
    wrapped = (lambda m: run(_Cast(m))) if "resnet" in name or "channels" in name or "three" in name else run
    constant, _ = rewire.freeze(learned, 0.0)
    assert_same_function(learned, constant, wrapped, 1e-5 if "resnet" in name else 1e-6)


class _Cast:
    """A double model, called with single-precision inputs."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, x: Tensor) -> Tensor:
        return self.model(x.double())


def test_trunks_with_different_topologies() -> None:
    model = tiny_model("t5").double().eval()
    learned = rewire.compile(model, {"encoder": "denseformer", "decoder": "hc-static"}, validate=False)
    shaken(learned, 0.1)
    constant, report = rewire.freeze(learned, 0.0)
    assert [trunk.topology.partition("(")[0] for trunk in report.trunks] == ["DenseFormer", "HyperConnections"]
    assert_same_function(learned, constant, logits(input_ids=IDS, decoder_input_ids=IDS))


# -- fewer edges and states --------------------------------------------------------------------------------------------

#: Rows of 4 units; 0.001 and -0.002 are to go. x0 is read by unit 2 at last, x1 by unit 3, x3 by none but unit 4.
ROWS = [1.0, 0.5, 1.0, 0.001, 0.7, 0.9, -0.002, 0.001, 0.3, 1.1]
PRUNED = torch.tensor([[1.0, 0, 0, 0], [0.5, 1.0, 0, 0], [0, 0.7, 0.9, 0], [0, 0, 0.3, 1.1]])


def twin(model: nn.Module, table: Tensor, x: Tensor) -> Tensor:
    """The formulas, with the branches of the blocks of a plain stack."""
    states = [model.inp(x)]
    for row, block in zip(table, model.layers, strict=True):
        branch = block(states[-1]) - states[-1]
        states.append(branch + sum(weight * state for weight, state in zip(row, states, strict=False)))
    return model.out(states[-1])


def test_exactly_the_weak_edges_go() -> None:
    learned, x = stack_with(ROWS), vectors()
    constant, report = rewire.freeze(learned, 0.01, (x,))
    (trunk,) = report.trunks
    assert {(edge.destination, edge.source): edge.weight for edge in trunk.dropped} == pytest.approx(
        {("x3", "x0"): 0.001, ("x4", "x0"): -0.002, ("x4", "x1"): 0.001}
    )
    assert (trunk.edges, trunk.states) == ((10, 7), (5, 2))
    torch.testing.assert_close(rewire.coefficients(constant)["layers"], PRUNED)
    plain = rewire.restore(learned)
    full = rewire.coefficients(learned)["layers"]
    torch.testing.assert_close(learned(x), twin(plain, full, x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(constant(x), twin(plain, PRUNED, x), rtol=1e-5, atol=1e-5)
    assert report.change == pytest.approx(error(twin(plain, full, x), twin(plain, PRUNED, x)), rel=1e-2)


def test_states_are_freed_when_they_were_read_last() -> None:
    learned = stack_with(ROWS)
    constant, _ = rewire.freeze(learned, 0.01, (vectors(),))

    def tensors(stream: Stream) -> set[int]:
        histories = [x for state in stream.states if isinstance(state, History) for x in state.states]
        return {id(x) for x in (*stream.states, *histories) if isinstance(x, Tensor)}

    def held(model: nn.Module) -> list[int]:
        counts = []
        hooks = [
            nn.Module.register_forward_hook(layer, lambda _m, _a, out: counts.append(len(tensors(out))))
            for layer in model.layers[:-1]
        ]
        model(vectors())
        for hook in hooks:
            hook.remove()
        return counts

    assert held(learned) == [2, 3, 4]
    assert held(constant) == [2, 2, 2]


def test_streams_that_nobody_reads_are_freed() -> None:
    """Hyper-connections of which all reads, and the output's share, come from one stream."""
    learned = rewire.compile(NanoGPT().eval(), "hc-static", streams=2, validate=False)
    (connection,) = rewire.connections(learned).values()
    with torch.no_grad():
        static = connection.get_parameter("static")  # [T, 2, read | carry carry | write]
        static[:, :, 0] = torch.tensor([1.0, 1e-5])
        static[:, :, 1:3] = torch.eye(2)
        static[-1, :, 1:3] = torch.tensor([[1.0, 1.0], [1e-5, 1e-5]])
    _, report = rewire.freeze(learned, 1e-3, (token_ids(),))
    (trunk,) = report.trunks
    # Both streams and the next read; and both streams at the end, where each has its share of the output.
    assert trunk.states == (3, 2)
    unread = {edge.destination for edge in trunk.dropped if edge.unread}
    assert unread == {f"s{t}_1" for t in range(1, 6)}


def test_the_report_is_a_table() -> None:
    def printed(report: FreezeReport) -> str:
        return " ".join(str(report).split())

    learned = stack_with(ROWS)
    text = printed(rewire.freeze(learned, 0.01, (vectors(),))[1])
    assert "Frozen at threshold 0.01; change of the outputs: " in text and "(relative)" in text
    assert "10 -> 7" in text and "5 -> 2" in text and "3 edges dropped in layers" in text
    assert "x0 x4 -2.0e-03 below the threshold" in text
    _, unmeasured = rewire.freeze(learned, 0.01)
    assert unmeasured.change is None
    assert "not measured: the registry of architectures has no inputs for it; pass example_inputs" in printed(
        unmeasured
    )
    many = printed(rewire.freeze(stack_with([1e-4] * 28, depth=7), 0.01)[1])
    assert "28 edges dropped" in many and "16 more, see .dropped" in many


def test_change_is_measured_on_inputs_of_the_registry() -> None:
    learned = mixed(tiny_model("llama").eval(), "denseformer")
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    constant, report = rewire.freeze(learned.train(), 0.1)
    assert torch.equal(torch.random.get_rng_state(), state) and constant.training and learned.training
    assert report.change is not None and 1e-4 < report.change < 1
    assert report.change == rewire.freeze(learned, 0.1)[1].change


# -- errors ------------------------------------------------------------------------------------------------------------


def test_errors() -> None:
    with pytest.raises(rewire.RewireError, match="Stack was not rewired: there is nothing to freeze"):
        rewire.freeze(Stack(PreNorm))
    learned = stack_with(ROWS)
    for threshold in (-1e-3, float("nan")):
        with pytest.raises(ValueError, match=r"threshold=.*: it has to be 0 or a positive number"):
            rewire.freeze(learned, threshold)
    constant, _ = rewire.freeze(learned)
    with pytest.raises(rewire.UnsupportedTopology, match=r"trunk 'layers' cannot be frozen: Frozen\(ANCRe.* already"):
        rewire.freeze(constant)
    with pytest.raises(rewire.BadExampleInputs, match="Stack does not run on the example inputs"):
        rewire.freeze(learned, example_inputs=(torch.randn(2, 3),))
    with torch.device("meta"):
        empty = rewire.compile(Stack(PreNorm), validate=False)
    with pytest.raises(rewire.RewireError, match="Stack is on the meta device: load its weights"):
        rewire.freeze(empty)
    with pytest.raises(rewire.WrappedModel, match="compiled"):
        rewire.freeze(torch.compile(learned))
    assert not [*rewire.connections(rewire.freeze(nn.Sequential(learned))[0])["layers"].parameters()]  # also inside


@pytest.mark.parametrize("key", ["grn-v3", "hc-dynamic", "mhc", "laurel-lr", "attnres", "muddformer", "frac-hc", "dca"])
def test_weights_that_depend_on_the_input(key: str) -> None:
    learned = rewire.compile(tiny_model("llama"), *EVERY[key][:1], start="paper", validate=False)
    message = f"'model.layers' cannot be frozen: topology '{EVERY[key][0]}' has no constant"
    with pytest.raises(rewire.UnsupportedTopology, match=message):
        rewire.freeze(learned)


# -- what users do with it ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["ancre-ingoing", "grn-v2", "hc-static"])
def frozen_llama(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return rewire.freeze(mixed(tiny_model("llama").eval(), request.param), 0.05)[0]


class Halved(rewire.Residual):
    """Half of each branch: what the class that it is derived from says of its program is not so."""

    def merge(self, states: States, weights: None, t: int, *branches: Tensor) -> Tensor:
        return states[0] + 0.5 * sum(branches)


class Gated(rewire.Dense[Any]):
    """A mix of all states, and something that depends on the newest."""

    def parameters(self, dims: Dims, start: Start) -> dict[str, Tensor]:
        return {"a": torch.cat([torch.eye(n)[-1] for n in self.sizes(dims)])}

    def weights(self, parameters: dict[str, Tensor], dims: Dims) -> Any:
        return self.table(dims, parameters["a"])

    def mix(self, history: Any, weights: Any, t: int) -> Tensor:
        return materialize(history.mix(weights[t])) + history.newest.sin()


@pytest.mark.parametrize("topology", [Halved(), Gated()], ids=["halved", "gated"])
def test_formulas_that_are_not_those_of_the_program(topology: rewire.Topology) -> None:
    net = Stack(PreNorm)
    rewired = rewire.compile(net, topology, example_inputs=(vectors(),), start="paper")
    with pytest.raises(rewire.UnsupportedTopology, match=r"does not compute what its method `program` says"):
        rewire.freeze(rewired)


def test_state_dicts(frozen_llama: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "frozen.pt"
    torch.save(frozen_llama.state_dict(), path)
    (matrix,) = saved.matrices(path).values()
    assert torch.equal(matrix, rewire.coefficients(frozen_llama)["model.layers"])
    other = copy.deepcopy(frozen_llama)
    with torch.no_grad():
        for tensor in other.state_dict(keep_vars=True).values():
            if tensor.is_floating_point():
                tensor.zero_()
    other.load_state_dict(torch.load(path))
    with torch.no_grad():
        assert torch.equal(other(IDS).logits, frozen_llama(IDS).logits)


def test_another_program_is_refused() -> None:
    one, _ = rewire.freeze(stack_with(ROWS), 0.01)
    two, _ = rewire.freeze(stack_with(ROWS), 0.8)
    with pytest.raises(rewire.RewireError, match="belong to another rewiring; options"):
        two.load_state_dict(one.state_dict())


def test_copies(frozen_llama: nn.Module) -> None:
    with torch.no_grad():
        want = frozen_llama(IDS).logits
        for other in (copy.deepcopy(frozen_llama), pickle.loads(pickle.dumps(frozen_llama))):
            assert torch.equal(other(IDS).logits, want)
            assert rewire.source(other, "model.layers.1") == rewire.source(frozen_llama, "model.layers.1")
        plain = rewire.restore(frozen_llama)
        assert torch.equal(plain(IDS).logits, tiny_model("llama").eval()(IDS).logits)


@pytest.mark.slow
def test_torch_compile() -> None:
    model = rewire.freeze(mixed(tiny_model("llama").eval(), "grn-v2"), 0.05)[0]
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(run(IDS).logits, model(IDS).logits)


def test_low_precision(frozen_llama: nn.Module) -> None:
    with torch.no_grad():
        want = frozen_llama(IDS).logits
        with torch.autocast("cpu", torch.bfloat16):
            assert error(want, frozen_llama(IDS).logits.float()) < 0.05
        small = copy.deepcopy(frozen_llama).bfloat16()
        assert error(want, small(IDS).logits.float()) < 0.05
    assert {b.dtype for c in rewire.connections(small).values() for b in c.buffers()} == {torch.float32}


def test_generation_with_a_cache(frozen_llama: nn.Module) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cached = frozen_llama.generate(IDS, use_cache=True, **options)
    assert torch.equal(cached, frozen_llama.generate(IDS, use_cache=False, **options))


def test_hidden_states_come_out_as_tensors(frozen_llama: nn.Module) -> None:
    with torch.no_grad():
        hidden = frozen_llama(IDS, output_hidden_states=True).hidden_states
    assert all(isinstance(h, Tensor) and h.shape == hidden[0].shape for h in hidden) and len(hidden) == 4


def test_activation_checkpointing(frozen_llama: nn.Module) -> None:
    model = copy.deepcopy(frozen_llama).train()
    _, want = outputs_and_gradients(model, logits(input_ids=IDS))
    model.gradient_checkpointing_enable()
    _, got = outputs_and_gradients(model, logits(input_ids=IDS))
    assert want.keys() == got.keys() and all(torch.allclose(want[n], got[n], atol=1e-6) for n in want)


def test_interleaved_forwards() -> None:
    constant, _ = rewire.freeze(stack_with(ROWS), 0.01)
    a, b = vectors(), vectors() + 1
    with torch.no_grad():
        want = constant(a), constant(b)
        one, two = constant.inp(a), constant.inp(b)
        for layer in constant.layers:
            one, two = layer(one), checkpoint(layer, two, use_reentrant=False)
    assert torch.equal(constant.out(one), want[0]) and torch.equal(constant.out(two), want[1])


def test_blocks_out_of_order() -> None:
    constant, _ = rewire.freeze(stack_with(ROWS), 0.01)
    first = constant.layers[0](constant.inp(vectors()))
    assert isinstance(first, Stream) and first.position == 2
    with pytest.raises(rewire.OutOfOrder, match=r"'layers\.0' was called out of order"):
        constant.layers[0](first)


def test_training_goes_on() -> None:
    """What is left to train are the model's own parameters."""
    constant, _ = rewire.freeze(mixed(ConvNet(), "denseformer"), 0.0)
    optimizer = torch.optim.AdamW(constant.parameters(), lr=1e-2, weight_decay=0.0)
    target, losses = torch.randn(2, 5), []
    for _ in range(5):
        loss = F.mse_loss(constant(images()), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
