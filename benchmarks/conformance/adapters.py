"""Other projects' implementations of the schemes, as the checker takes them.

    python benchmarks/conformance/adapters.py      # checks what is installed: benchmarks/results/conformance.json
    python benchmarks/conformance/adapters.py 3 4  # prints the reports of some
    python benchmarks/conformance/pages.py         # writes the pages of docs/conformance

An adapter only hands weights over. Where a project's formula is spread over a module and the layer that calls it, the
layer's own forward is run, with the branches of the case in place of its attention and feed-forward.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rewire.conformance import Report, check, list_schemes
from rewire.conformance.ours import ours
from rewire.conformance.running import Branch, Implementation
from rewire.version import __version__

RESULTS = Path(__file__).parents[1] / "results" / "conformance.json"
Weights = Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An implementation in another project.

    Attributes:
        project: its distribution.
        what: where it is.
        scheme, options: what it is compared with.
        make: imports it.
        note: what was found by hand where it differs.
        dtypes: those that it takes beside float32 weights.
        interpreted: it is made of Triton kernels, which run here in Triton's interpreter.
    """

    project: str
    what: str
    scheme: str
    make: Callable[[], Implementation]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16)
    interpreted: bool = False

    @property
    def version(self) -> str | None:
        if self.project == "rewire":  # which is installed under another name
            return __version__
        try:
            return importlib.metadata.version(self.project)
        except importlib.metadata.PackageNotFoundError:
            return None

    def report(self) -> Report:
        return check(self.scheme, self.make(), dtypes=self.dtypes, **self.options)


def layer(kind: type, **fields: Any) -> Callable[..., Any]:
    """The forward of a layer's class, on something that has these fields alone."""
    forward = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    return lambda *args, **kwargs: forward(SimpleNamespace(**fields), *args, **kwargs)


def same(x: Tensor, *_: Any) -> Tensor:
    return x


def batched(run: Implementation) -> Implementation:
    """For code that takes [batch, length, D] alone."""

    def implementation(x: Tensor, weights: Weights, branches: Sequence[Branch]) -> Tensor:
        return run(x if x.dim() == 3 else x[None], weights, branches).view(x.shape)

    return implementation


def named(model: str) -> Any:
    return importlib.import_module(f"transformers.models.{model}.modeling_{model}")


# -- manifold hyper-connections ----------------------------------------------------------------------------------------


def _units(weights: Weights, t: int) -> dict[str, Tensor]:
    """The weights of DeepSeek-V4's module, whose H_res goes from stream (row) to stream (column)."""
    kinds = ["pre", "post"] + ["res"] * ("b_res" in weights)
    order = {kind: (lambda w: w.mT.flatten(-2)) if kind == "res" else (lambda w: w) for kind in kinds}
    return {
        "fn": torch.cat([order[kind](weights[f"phi_{kind}"][t]) for kind in kinds], -1).T,
        "base": torch.cat([order[kind](weights[f"b_{kind}"][t]) for kind in kinds]),
        "scale": torch.stack([weights[f"alpha_{kind}"][t] for kind in kinds]),
    }


def manifold(model: str, prefix: str, attends: Callable[[Tensor], Any], **options: Any) -> Implementation:
    """Of DeepSeek-V4 and its kin: two units a layer, and a head."""
    code = named(model)

    @batched
    def implementation(x: Tensor, weights: Weights, branches: Sequence[Branch]) -> Tensor:
        config = SimpleNamespace(hc_mult=4, hc_sinkhorn_iters=20, hidden_size=x.shape[-1], **options)
        unit = getattr(code, f"{prefix}HyperConnection")(config)
        mixes = "b_res" in weights

        def gates(t: int) -> Callable[[Tensor], Any]:
            if t < len(branches):
                return lambda streams: functional_call(unit, _units(weights, t), (streams,))
            none = [x.new_zeros(*x.shape[:-1], 4), torch.eye(4).expand(*x.shape[:-1], 4, 4).to(x)][: 1 + mixes]
            return lambda streams: (*none, streams[..., 0, :])  # a half of the last layer that is not there

        streams = x[:, :, None].expand(-1, -1, 4, -1).contiguous()
        for t in range(0, len(branches), 2):
            second = branches[t + 1] if t + 1 < len(branches) else same
            run = layer(
                getattr(code, f"{prefix}DecoderLayer"),
                **{"attn_hc": gates(t), "ffn_hc": gates(t + 1), "block_type": "linear_attention"},
                **{"input_layernorm": same, "post_attention_layernorm": same},
                self_attn=lambda *args, hidden_states=None, t=t, **_: attends(
                    branches[t](args[0] if hidden_states is None else hidden_states)
                ),
                mlp=lambda x, second=second, **_: second(x),
            )
            out = run(streams)
            streams = out[0] if isinstance(out, tuple) else out
        head = getattr(code, f"{prefix}HyperHead")
        if "last_b" not in weights:
            return head()(streams)  # type: ignore[no-any-return]
        given = {"hc_fn": weights["last_phi"].T, "hc_base": weights["last_b"], "hc_scale": weights["last_alpha"]}
        return functional_call(head(config), given, (streams,))  # type: ignore[no-any-return]

    return implementation


def liger_mhc() -> Implementation:
    from liger_kernel.ops.mhc import LigerMHCCoeffsFunction, LigerMHCPostResFunction, LigerMHCPreFunction

    def implementation(x: Tensor, weights: Weights, branches: Sequence[Branch]) -> Tensor:
        streams = x.unsqueeze(-2).expand(*x.shape[:-1], 4, -1).contiguous()
        for t, branch in enumerate(branches):
            phi = torch.cat([weights[f"phi_{kind}"][t].flatten(1) for kind in ("pre", "post", "res")], -1)
            b = torch.cat([weights[f"b_{kind}"][t].flatten() for kind in ("pre", "post", "res")])
            alpha = [weights[f"alpha_{kind}"][t] for kind in ("pre", "post", "res")]
            gates = LigerMHCCoeffsFunction.apply(streams, phi, b, *alpha, True, 20, 1e-6, 0.0, 0.0, 2.0)
            f = branch(LigerMHCPreFunction.apply(streams, gates[0]))
            streams = LigerMHCPostResFunction.apply(streams, f, gates[1], gates[2])
        return streams.sum(-2)

    return implementation


# -- hyper-connections -------------------------------------------------------------------------------------------------


def lucidrains_hc() -> Implementation:
    from hyper_connections import HyperConnections

    def implementation(x: Tensor, weights: Weights, branches: Sequence[Branch]) -> Tensor:
        expand, reduce = HyperConnections.get_expand_reduce_stream_functions(4)
        streams = expand(x)
        for t, branch in enumerate(branches):
            w = {name: value[t] for name, value in weights.items()}
            unit = HyperConnections(4, dim=x.shape[-1], layer_index=t)
            given = {
                "static_alpha": torch.cat([w["A_m"][:, None], w["A_r"]], -1),
                "static_beta": w["B"],
                "dynamic_alpha_fn": torch.cat([w["W_m"][:, None], w["W_r"]], -1) if "W_m" in w else None,
                "dynamic_beta_fn": w.get("W_b"),
                "dynamic_alpha_scale": w.get("s_a", w["B"].new_zeros(())),
                "dynamic_beta_scale": w.get("s_b", w["B"].new_zeros(())),
            }
            run = Both(unit, branch)
            values = {f"unit.{name}": value for name, value in given.items() if value is not None}
            streams = functional_call(run, values, (streams,))
        return reduce(streams)  # type: ignore[no-any-return]

    return implementation


class Both(nn.Module):
    """The two halves of a unit of the package, around a branch."""

    def __init__(self, unit: Any, branch: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.unit, self.branch = unit, branch

    def forward(self, streams: Tensor) -> Tensor:
        read, streams, gates = self.unit.width_connection(streams)
        return self.unit.depth_connection(self.branch(read), streams, **gates)  # type: ignore[no-any-return]


def lucidrains_fractions() -> Implementation:
    from hyper_connections import HyperConnections

    def implementation(x: Tensor, weights: Weights, branches: Sequence[Branch]) -> Tensor:
        m = weights["B"].shape[-1]
        swapped = torch.arange(2 * m).view(2, m).T.flatten()  # theirs: A_m and A_r column by column in turn
        for t, branch in enumerate(branches):
            unit = HyperConnections(1, dim=x.shape[-1], num_fracs=m, layer_index=0)
            given = {
                "unit.static_alpha": torch.cat([weights["A_m"][t], weights["A_r"][t]], -1)[:, swapped],
                "unit.static_beta": weights["B"][t],
                "unit.dynamic_alpha_scale": x.new_zeros((), dtype=torch.float32),
                "unit.dynamic_beta_scale": x.new_zeros((), dtype=torch.float32),
            }
            x = functional_call(Both(unit, branch), given, (x,))
        return x

    return implementation


def qwen4_exp() -> Implementation:
    code = named("qwen4_exp")

    @batched
    def implementation(x: Tensor, weights: Weights, branches: Sequence[Branch]) -> Tensor:
        config = SimpleNamespace(hc_count=4, hidden_size=x.shape[-1], hc_lowrank=16, rms_norm_eps=1e-6)

        def unit(t: int) -> Callable[[Tensor], Any]:
            if t > len(branches):
                return lambda streams: (streams[..., : x.shape[-1]], streams, x.new_zeros(*x.shape[:-1], 4))
            last = t == len(branches)
            given = {
                "hc_norm.weight": weights["norm"][t].flatten(),
                "input_mix_weight_down.weight": weights["down"][t].T,
                "input_mix_weight_up.weight": weights["up"][t].T,
            } | ({} if last else {"block_inject_weight.weight": weights["inject"][t].T})
            module = code.Qwen4ExpTextGatedResidual(config, use_combine=not last).to(x.dtype)
            return lambda streams: functional_call(module, {k: v.to(x.dtype) for k, v in given.items()}, (streams,))

        streams = x.repeat(1, 1, 4)
        for t in range(0, len(branches), 2):
            second = branches[t + 1] if t + 1 < len(branches) else same
            run = layer(
                code.Qwen4ExpTextDecoderLayer,
                **{"ple": None, "layer_type": "full_attention", "mlp": second},
                **{"attn_hyper_connection": unit(t)},
                mlp_hyper_connection=unit(t + 1 if t + 1 < len(branches) else len(branches) + 1),
                self_attn=lambda x, *_, t=t, **__: (branches[t](x), None),
            )
            streams = run(streams, None)
        return unit(len(branches))(streams)  # type: ignore[no-any-return]

    return implementation


# -- reads of all increments -------------------------------------------------------------------------------------------


def reads(read: Callable[[list[Tensor], Tensor], Tensor]) -> Implementation:
    """Attention Residuals, where a project has ``read`` of the sources with one query."""

    def implementation(x: Tensor, weights: Weights, branches: Sequence[Branch]) -> Tensor:
        sources = [x]
        for t, branch in enumerate(branches):
            sources.append(branch(read(sources, weights["w"][t - 1]) if t else x))
        return read(sources, weights["w"][-1])

    return implementation


def liger_attnres() -> Implementation:
    from liger_kernel.ops.attn_res import LigerAttnResFunction

    def read(sources: list[Tensor], w: Tensor) -> Tensor:
        shape = sources[0].shape
        stacked = torch.stack(sources).view(len(sources), 1, -1, shape[-1])
        return LigerAttnResFunction.apply(stacked, w, torch.ones_like(w), 1e-6).view(shape)  # type: ignore[no-any-return]

    return reads(read)


def fla_attnres() -> Implementation:
    from fla.ops.attnres.naive import naive_attnres

    return reads(lambda sources, w: naive_attnres(w, sources, torch.ones_like(w)))  # type: ignore[return-value]


def inkling2() -> Implementation:
    """Layers of two units each; a group of four units is two layers."""
    code = named("inkling2")

    @batched
    def implementation(x: Tensor, weights: Weights, branches: Sequence[Branch]) -> Tensor:
        width, count = x.shape[-1], len(branches)

        def module(t: int) -> Callable[[Tensor, Tensor], Any] | None:
            """Read t, from 1; the first has one source."""
            if t == 1:
                return None
            ways = 3 if t <= count and branches[t - 1].attention else 1
            query = weights["w"][t - 2, :ways] * width**0.5
            made = code.Inkling2BlockAttentionResidual(SimpleNamespace(hidden_size=width), ways)
            return lambda *states: functional_call(made, {"query": query if ways > 1 else query[0]}, states)

        states, groups, x_in = x, x.new_zeros(*x.shape[:-1], 0, width), x
        for t in range(1, count + 1, 2):
            first = branches[t - 1]
            boundary = (t - 1) // 2 % 2 == 0
            second = branches[t] if t < count else lambda x: torch.zeros_like(x)

            def attend(hidden_states: Tensor, key_hidden_states: Tensor, value_hidden_states: Tensor, **_: Any) -> Any:
                q, k, v = hidden_states, key_hidden_states, value_hidden_states
                return first(q, k, v, q), None  # noqa: B023  # called in this turn

            run = layer(
                code.Inkling2FullDecoderLayer,
                **{"attention_input": module(t), "is_block_boundary": boundary, "self_attn": attend},
                mlp_input=module(t + 1) if t < count else lambda _, states: (states,),
                mlp=second,
                **{f"{name}_layernorm": same for name in ("q_input", "k_input", "v_input", "post_attention")},
                post_attention_convolution=lambda x, **_: x,
                post_mlp_convolution=lambda x, **_: x,
            )
            new = run(states, groups)
            if boundary:
                groups = torch.cat([groups, states.unsqueeze(-2)], -2)
            states = new
        del x_in
        return module(count + 1)(groups, states)[0].to(x.dtype)  # type: ignore[misc]

    return implementation


def lucidrains_grn() -> Implementation:
    from deep_cross_attention.dca_gpt import GRN

    @batched
    def implementation(x: Tensor, weights: Weights, branches: Sequence[Branch]) -> Tensor:
        def read(t: int) -> Tensor:
            grn = GRN(x.shape[-1], num_layers=t)
            given = {"bias": weights["b"][t - 1, None, :t], "to_aggregate.1.weight": weights["w"][t - 1, None]}
            assert given.keys() | {"to_aggregate.0.weight"} == dict(grn.named_parameters()).keys()
            given = {name: value.to(x.dtype) for name, value in given.items()}
            return functional_call(grn.to(x.dtype), given, (torch.stack(increments),))  # type: ignore[no-any-return]

        increments = [x]
        for t, branch in enumerate(branches, start=1):
            increments.append(branch(read(t)))
        return read(len(branches) + 1)

    return implementation


# -- scales and gates --------------------------------------------------------------------------------------------------


def adds(add: Callable[[Weights, Tensor, Tensor], Tensor]) -> Implementation:
    """Schemes whose unit adds ``f`` to ``x``, with weights of its own."""

    def implementation(x: Tensor, weights: Weights, branches: Sequence[Branch]) -> Tensor:
        for t, branch in enumerate(branches):
            x = add({name: value[t] for name, value in weights.items()}, x, branch(x)).to(x.dtype)
        return x

    return implementation


def muse_spark() -> Implementation:
    gate = named("muse_spark").MuseSparkResidualGate
    config = SimpleNamespace(hidden_size=1, residual_gate_temperature=0.3)
    return adds(lambda w, x, f: functional_call(gate(config), {"gate": w["w"]}, (x, f)))


def zaya() -> Implementation:
    scaling = named("zaya").ZayaResidualScaling
    names = {"hidden_states_scale": "b", "hidden_states_bias": "v", "residual_scale": "a", "residual_bias": "u"}
    return adds(lambda w, x, f: functional_call(scaling(1), {to: w[name] for to, name in names.items()}, (f, x)))


def doge() -> Implementation:
    code = named("doge")

    def implementation(x: Tensor, weights: Weights, branches: Sequence[Branch]) -> Tensor:
        for t in range(0, len(branches), 2):
            both = t + 1 < len(branches)
            scales = [weights["a"][t], weights["a"][t + 1] if both else torch.ones_like(weights["a"][t])]
            x = layer(
                code.DogeDecoderLayer,
                **{"hidden_dropout": 0.0, "training": False, "config": SimpleNamespace(is_moe=False)},
                **{"input_layernorm": same, "post_attention_layernorm": same},
                **{"input_residual": scales[0].to(x.dtype), "post_attention_residual": scales[1].to(x.dtype)},
                self_attn=lambda hidden_states, t=t, **_: (branches[t](hidden_states), None),
                mlp=branches[t + 1] if both else torch.zeros_like,
            )(x)
        return x

    return implementation


def neomme() -> Implementation:
    """Units are attentions: its feed-forwards have no scalars, and are left out."""
    code = named("neomme")

    def implementation(x: Tensor, weights: Weights, branches: Sequence[Branch]) -> Tensor:
        first = x
        for t, branch in enumerate(branches):
            x = layer(
                code.NeoMMEEncoderLayer,
                **{"lambdas": [weights[name][t].to(x.dtype) for name in "lm"], "residual_multiplier": 1.0},
                **{"input_layernorm": same, "post_attention_layernorm": same, "mlp": torch.zeros_like},
                self_attn=lambda read, branch=branch, **_: (branch(read), None),
            )(x, first)
        return x

    return implementation


def gemma3n() -> Implementation:
    laurel = named("gemma3n").Gemma3nTextLaurelBlock

    def add(w: Weights, x: Tensor, f: Tensor) -> Tensor:
        width, rank = w["B"].shape
        block = laurel(SimpleNamespace(hidden_size=width, laurel_rank=rank, rms_norm_eps=1e-6)).to(x.dtype)
        given = {"linear_left.weight": w["A"].to(x.dtype), "linear_right.weight": w["B"].to(x.dtype)}
        return f + functional_call(block, given, (x,))  # type: ignore[no-any-return]

    return adds(add)


V4 = {"hc_eps": 1e-6, "rms_norm_eps": 1e-6}
TRANSFORMERS = [
    Adapter(
        *("transformers", "DeepseekV4DecoderLayer, DeepseekV4HyperHead", "mhc"),
        lambda: manifold("deepseek_v4", "DeepseekV4", lambda f: (f, None), **V4),
        {"output": "learned", "eps": 1e-6},
    ),
    Adapter(
        *("transformers", "Glm5NextTextDecoderLayer, Glm5NextTextHyperHead", "mhc"),
        lambda: manifold("glm5_next", "Glm5NextText", same, **V4 | {"rms_norm_eps": 1e-5}),
        {"output": "mean", "eps": 1e-6, "norm_eps": 1e-5},
    ),
    Adapter(
        *("transformers", "HYV4DecoderLayer, HYV4HyperHead", "mhc"),
        lambda: manifold(
            "hy_v4", "HYV4", lambda f: (f, None, None), **V4 | {"rms_norm_eps": 1e-5, "hc_magnitude": 2.0}
        ),
        {"residual": "identity", "output": "learned", "eps": 1e-6, "norm_eps": 1e-5},
    ),
    Adapter("transformers", "Qwen4ExpTextDecoderLayer", "hc-gated", qwen4_exp),
    Adapter(
        *("transformers", "Inkling2FullDecoderLayer", "attnres", inkling2), {"block": 4, "qkv": True, "normed": True}
    ),
    Adapter("transformers", "MuseSparkResidualGate", "variance-gate", muse_spark),
    Adapter("transformers", "ZayaResidualScaling", "residual-scale", zaya, {"branch": True, "bias": True}),
    Adapter("transformers", "DogeDecoderLayer", "residual-scale", doge),
    Adapter("transformers", "NeoMMEEncoderLayer", "x0-lambdas", neomme, {"shortcut": "state"}),
    Adapter(
        *("transformers", "Gemma3nTextLaurelBlock", "laurel-lr", gemma3n),
        note="Gemma 3n norms B A x before it is added (`post_laurel_norm`), which the paper does not. That is how the "
        "model was made; AltUp stands around it, too.",
    ),
]
FLOAT = (torch.float32,)
NO_EPS = (
    "Its RMS norm has no epsilon, that of the reference 1e-6: only inputs of about 1e-3 show it. That is a choice, not "
    "a mistake."
)
OTHERS = [
    Adapter("hyper-connections", "HyperConnections", "hc-static", lucidrains_hc, dtypes=FLOAT),
    Adapter("hyper-connections", "HyperConnections", "hc-dynamic", lucidrains_hc, note=NO_EPS, dtypes=FLOAT),
    Adapter(
        *("hyper-connections", "HyperConnections, num_fracs", "frac-hc", lucidrains_fractions, {"dynamic": False}),
        note="Its `depth_connection` sums the fractions of what the branch returned, and writes the sum to each; as we "
        "read the paper, each fraction is written to its own. Reads and the mix agree "
        "(`tests/topologies/test_hyper.py`).",
        dtypes=FLOAT,
    ),
    Adapter(
        *("deep-cross-attention", "GRN", "grn-v3", lucidrains_grn),
        note="It norms the sources before w; the paper's w is applied to them as they are (Section 3.1). Without that "
        "norm it agrees (`tests/topologies/test_dca.py`).",
        dtypes=FLOAT,
    ),
    Adapter(
        *("liger_kernel", "LigerMHC*Function", "mhc", liger_mhc),
        note="Its H_res, [out, in], is normalised by rows and then by columns in each iteration, so that columns sum "
        "to 1 in the end; by columns and then by rows in eq. 9, as we read it, and in DeepSeek-V4's code, whose matrix "
        "is [in, out]. Both converge to the same: after 20 iterations, the first value that differs does so by 1e-3 "
        "where logits are large, and by 4e-4 or less, a gradient, elsewhere.",
        interpreted=True,
    ),
    Adapter("liger_kernel", "LigerAttnResFunction", "attnres", liger_attnres, interpreted=True),
    Adapter("fla-core", "naive_attnres", "attnres", fla_attnres),
]
ADAPTERS = [
    *TRANSFORMERS,
    *OTHERS,
    *(Adapter("rewire", f"topology {name!r}", name, partial(ours, name)) for name in list_schemes()),
]


#: What has other weights than the paper, so that no adapter could hand them over: what its code says.
BY_HAND = [
    (
        *("hyper-connections", "ManifoldConstrainedHyperConnections", "mhc"),
        "Another parametrisation. A stream's logits come from that stream alone, normed by itself, by one projection "
        "that all streams share; the paper norms and projects all n D channels at once (eq. 7). H_pre, H_post and "
        "H_res are made of the logits as in the paper: with streams of equal size and weights that the paper's form "
        "can take, both compute the same (`tests/topologies/test_mhc.py`).",
    ),
    (
        *("x-transformers", "HyperConnection", "mhc"),
        "Another parametrisation, as above, with a layer norm; the dynamic part of H_post passes a sigmoid of its own "
        "before the one of eq. 8, and Sinkhorn's iterations are 5 by default.",
    ),
    (
        *("x-transformers", "AttentionResidual", "attnres"),
        "Another scheme, which its docstring says: the query is not learned, but computed from the newest source.",
    ),
    (
        *("deep-cross-attention", "DCAGPT, past_layers_k", "dca"),
        "Sources are normed before w, as in its GRN; with `past_layers_k`, the middle is another than that of the "
        "paper's k-DCA (`tests/topologies/test_dca.py`).",
    ),
]


def row(adapter: Adapter) -> dict[str, Any]:
    """What was found, as JSON."""
    report = adapter.report()
    return {
        "project": adapter.project,
        "version": adapter.version,
        "what": adapter.what,
        "scheme": adapter.scheme,
        "options": dict(adapter.options),
        "agrees": report.agrees,
        "errors": {str(dtype).removeprefix("torch."): float(f"{e:.1g}") for dtype, e in report.errors.items()},
        "cases": sorted({one.case for one in report.differences}),
        "looks_like": list(report.looks_like),
        "note": adapter.note,
        "interpreted": adapter.interpreted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("which", nargs="*", type=int, help="numbers of adapters, whose reports are printed")
    given = parser.parse_args()
    if given.which:
        for number in given.which:
            print(f"{ADAPTERS[number].project} {ADAPTERS[number].what}\n{ADAPTERS[number].report()}", flush=True)
        return
    kept = {(one["project"], one["what"], one["scheme"]): one for one in json.loads(RESULTS.read_text())}
    for adapter in ADAPTERS:
        if adapter.version and adapter.interpreted == bool(os.environ.get("TRITON_INTERPRET")):
            kept[adapter.project, adapter.what, adapter.scheme] = row(adapter)
            print(adapter.project, adapter.what, adapter.scheme, flush=True)
    order = [(one.project, one.what, one.scheme) for one in ADAPTERS]
    rows = [kept[key] for key in sorted(kept, key=order.index)]
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
