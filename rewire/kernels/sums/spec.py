"""The specification of a generated kernel: everything on which its source depends."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

Weights = Literal["none", "scalar", "channel"]
NormKind = Literal["rms", "layer"]

#: Most sources of one kernel, and most pairs of a source and an output, by kind of weight. For more, kernels are
#: chained, which bounds the number of arguments and of different kernels, and the time to compile one.
FAN_IN = 64
MAX_PAIRS = {"none": 256, "scalar": 256, "channel": 128}
#: Most sources of a kernel that takes dot products with them, which stay in registers.
DOTS_FAN_IN = 16
#: Most outputs of one kernel: each holds a float32 tile in registers.
MAX_OUTPUTS = 8
#: Most branch outputs that one kernel adds.
MAX_ADDED = 4
#: Most pairs of an output and a source in a kernel that takes their dot products, by kind of weight: sums per channel
#: hold a tile of registers for each pair, others a number. More would also take long to compile.
MAX_DOTS = {"none": 64, "scalar": 64, "channel": 16}
#: The same for a kernel that computes nothing else.
MAX_DOTS_ALONE = 64
#: Number of bfloat16 states that take as much traffic as a float32 sum that one kernel writes and the next reads.
STATES_OF_SUM = 4
#: Most channels for which a norm can be fused: a row stays in the registers of one program.
MAX_NORM_WIDTH = 8192


@dataclasses.dataclass(frozen=True)
class MixSpec:
    """A family of mixes with the same kernel source.

    For each output o, in one pass over the sources, in float32:

        mix_o = accumulator_o + sum_k (w_ok + s_ok) x_k + sum_j f_oj        normed_o = norm(mix_o)

    Dtypes, sizes and strides are not part of it: Triton specialises the source for them.

    Attributes:
        sources: tensors x_k, [rows, D].
        weights: w_ok is one number ("scalar"), one per channel ("channel"), or absent ("none": 1, or 0 with scores).
        scores: whether there are also weights per row, s_ok.
        added: number of branch outputs f_oj of each output, 0 to 4, [rows, D], with weight 1.
        outputs: 1 to 8 outputs, with separate weights and scores: the reads of queries, keys and values, the sums of
            several later sites, or new streams.
        norm: the norm that reads the mix, for one output.
        keep_mix: with a norm, whether to return the mix itself, too; backward then has a gradient for it.
        probe: whether to compute dot products <x_k, p_o>, with one probe p_o for each output: over all elements for
            "scalar" weights, over rows for "channel", over channels for scores. If sources are gradients of mixes and
            probes are states, the mixes are gradients of the states, and the dot products those of the weights.
        accumulate: whether the sums start from float32 accumulators, the mixes of earlier sources.
        norm_bias: whether a "layer" norm ends with a bias; "rms" has none. Both have a weight.
        dots_only: with probes, whether to compute only dot products, and no mix.
        attended: with probes, whether scores are the weights of a softmax: their dot products then become gradients of
            its logits, ``s_ok (<x_k, p_o> - e_k)``, with a number e_k for each source and row, its mean.
        carried: in backward, whether sources have gradients of other uses, which are added to those of the mixes.

    Raises:
        ValueError: a combination that no kernel is generated for.
    """

    sources: int
    weights: Weights = "scalar"
    scores: bool = False
    added: int = 0
    outputs: int = 1
    norm: NormKind | None = None
    keep_mix: bool = False
    probe: bool = False
    accumulate: bool = False
    norm_bias: bool = True
    carried: bool = False
    attended: bool = False
    dots_only: bool = False

    def __post_init__(self) -> None:
        weighted = self.weights != "none" or self.scores
        rules = {
            f"weights={self.weights!r} is none of 'none', 'scalar', 'channel'": self.weights
            in ("none", "scalar", "channel"),
            f"norm={self.norm!r} is none of None, 'rms', 'layer'": self.norm in (None, "rms", "layer"),
            f"outputs={self.outputs} is not between 1 and {MAX_OUTPUTS}": 1 <= self.outputs <= MAX_OUTPUTS,
            f"added={self.added} is not between 0 and {MAX_ADDED}": 0 <= self.added <= MAX_ADDED,
            f"sources={self.sources} leaves nothing to sum": self.sources >= 0 and self._terms > 0,
            "without sources there is nothing that weights, scores or a probe could belong to": self.sources > 0
            or not (weighted or self.probe),
            "several outputs need weights or scores that differ": self.outputs == 1 or weighted,
            "a norm follows one output": self.outputs == 1 or self.norm is None,
            "keep_mix is for mixes with a norm; without one the mix is the result": not self.keep_mix
            or self.norm is not None,
            "norm_bias is for mixes with a norm": self.norm is not None or self.norm_bias,
            "carried gradients belong to sources, without a norm": not self.carried
            or (self.sources > 0 and self.norm is None),
            "what is attended has scores, probes, and no other weights": not self.attended
            or (self.scores and self.probe and self.weights == "none"),
            "a probe goes with weights or scores, and without a norm": not self.probe
            or (weighted and self.norm is None),
            "dots_only is for probes, and nothing is added": not self.dots_only
            or (self.probe and not self.added and not self.accumulate),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise ValueError(f"No kernel for {self}: {'; '.join(broken)}.")

    @property
    def mixed(self) -> bool:
        """Whether the mix is stored."""
        return not self.dots_only and (self.norm is None or self.keep_mix)

    @property
    def reads_weights(self) -> bool:
        """Whether forward reads weights; dot products alone do not need them."""
        return self.weights != "none" and not self.dots_only

    @property
    def reads_scores(self) -> bool:
        """Whether forward reads scores; those of a softmax multiply its dot products."""
        return self.scores and (self.attended or not self.dots_only)

    @property
    def shifted(self) -> bool:
        """Whether a norm has a bias."""
        return self.norm == "layer" and self.norm_bias

    @property
    def pairs(self) -> int:
        """Number of pairs of an output and a source, each with its own weight and score."""
        return self.outputs * self.sources

    @property
    def has_dots(self) -> bool:
        """Whether backward takes dot products with the sources: gradients of weights or scores."""
        return self.weights != "none" or self.scores

    @property
    def along_rows(self) -> bool:
        """Whether all dot products are sums along rows, which one program may compute over all columns."""
        return self.scores and self.weights != "channel" and self.norm is None

    @property
    def _terms(self) -> int:
        return self.sources + self.added + self.accumulate

    def fan_in(self, dots: bool) -> int:
        """Most sources of one kernel without a norm; fewer with dot products of all pairs."""
        if dots:
            return min(DOTS_FAN_IN, (MAX_DOTS_ALONE if self.dots_only else MAX_DOTS[self.weights]) // self.outputs)
        return min(FAN_IN, MAX_PAIRS[self.weights] // self.outputs)

    def without_norm(self) -> MixSpec:
        return dataclasses.replace(self, norm=None, keep_mix=False, norm_bias=True)

    def chunks(self) -> list[tuple[slice, MixSpec]]:
        """The kernels of the forward pass in order, each with the sources that it reads.

        All but the last write float32 accumulators; the last one adds branches and computes the norm. Dot products have
        separate kernels if accumulators would be larger than the sources, which are then read twice.
        """
        fan_in = self.fan_in(dots=self.probe)
        if self.sources <= fan_in:
            return [(slice(0, self.sources), self)]
        parts = [slice(start, min(start + fan_in, self.sources)) for start in range(0, self.sources, fan_in)]
        if self.dots_only:
            return [(part, dataclasses.replace(self, sources=part.stop - part.start)) for part in parts]
        if self.probe and (len(parts) - 1) * self.outputs * STATES_OF_SUM > self.sources:
            mix = dataclasses.replace(self, probe=False, attended=False)
            dots = dataclasses.replace(self, dots_only=True, added=0, accumulate=False)
            return [*mix.chunks(), *dots.chunks()]
        inner = dataclasses.replace(self.without_norm(), added=0)
        specs = [inner] * (len(parts) - 1) + [self]
        return [
            (part, dataclasses.replace(spec, sources=part.stop - part.start, accumulate=bool(n) or self.accumulate))
            for n, (part, spec) in enumerate(zip(parts, specs, strict=True))
        ]


@functools.lru_cache(4096)
def spec_of(*args: Any, **kwargs: Any) -> MixSpec:
    """A cached `MixSpec`, checked once for the same arguments."""
    return MixSpec(*args, **kwargs)
