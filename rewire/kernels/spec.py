"""What a generated kernel computes: everything that its source text depends on."""

from __future__ import annotations

import dataclasses
from typing import Literal

Weights = Literal["none", "scalar", "channel"]
Norm = Literal["rms", "layer"]

#: Sources of one kernel. `launch` chains kernels for more: registers and arguments stay bounded, and so does the
#: number of different kernels.
FAN_IN = 16
#: Channels up to which a norm can be fused: a row stays in the registers of one program.
MAX_NORM_WIDTH = 8192


@dataclasses.dataclass(frozen=True)
class MixSpec:
    """A family of mixes that share one kernel source.

    For each output o of one pass over the sources, in float32:

        mix_o = accumulator_o + sum_k (w_ok + s_ok) x_k + sum_j f_j        normed_o = norm(mix_o)

    Element types, sizes and strides are not part of it: Triton specialises the source for them.

    Attributes:
        sources: tensors x_k, [rows, D].
        weights: w_ok is one number ("scalar"), one per channel ("channel"), or absent ("none": 1, or 0 beside scores).
        scores: whether there are weights per row s_ok, too.
        added: branch outputs f_j, 0 to 2, [rows, D]; weight 1.
        outputs: 1, or 3 with weights and scores of their own (what queries, keys and values read).
        norm: the consumer's norm, with a learned scale and, for "layer", a bias; outputs share them.
        keep_mix: with a norm, whether the mix itself is wanted, too; backward then has a gradient for it.
        probe: dot products <x_k, probe> as well, of the weights' kind: over all elements for "scalar", over rows for
            "channel"; over channels for scores. With output gradients as the sources and a source as the probe, the
            mix is that source's gradient, and the dot products are the gradients of its weights.
        accumulate: whether the sum starts from a float32 accumulator, the mix of earlier sources.

    Raises:
        ValueError: a combination that no kernel is generated for.
    """

    sources: int
    weights: Weights = "scalar"
    scores: bool = False
    added: int = 0
    outputs: int = 1
    norm: Norm | None = None
    keep_mix: bool = False
    probe: bool = False
    accumulate: bool = False

    def __post_init__(self) -> None:
        weighted = self.weights != "none" or self.scores
        rules = {
            f"weights={self.weights!r} is none of 'none', 'scalar', 'channel'": self.weights
            in ("none", "scalar", "channel"),
            f"norm={self.norm!r} is none of None, 'rms', 'layer'": self.norm in (None, "rms", "layer"),
            f"outputs={self.outputs} is neither 1 nor 3": self.outputs in (1, 3),
            f"added={self.added} is not between 0 and 2": 0 <= self.added <= 2,
            f"sources={self.sources} leaves nothing to sum": self.sources >= 0 and self._terms > 0,
            "without sources there is nothing that weights, scores or a probe could belong to": self.sources > 0
            or not (weighted or self.probe),
            "three outputs need weights or scores that differ, and take no added branches": self.outputs == 1
            or (weighted and not self.added),
            "keep_mix is for mixes with a norm; without one the mix is the result": not self.keep_mix
            or self.norm is not None,
            "a probe goes with one output, no norm, and weights or scores": not self.probe
            or (self.outputs == 1 and self.norm is None and weighted),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise ValueError(f"No kernel for {self}: {'; '.join(broken)}.")

    @property
    def mixed(self) -> bool:
        """Whether the mix is stored."""
        return self.norm is None or self.keep_mix

    @property
    def factors(self) -> int:
        """Pairs of an output and a source, each with a weight and a score of its own."""
        return self.outputs * self.sources

    @property
    def _terms(self) -> int:
        return self.sources + self.added + self.accumulate

    def chunks(self, fan_in: int = FAN_IN) -> list[tuple[slice, MixSpec]]:
        """The kernels of the forward pass in turn, each with the sources that it reads.

        All but the last write a float32 accumulator; added branches and the norm come with the last.
        """
        starts = range(0, max(self.sources, 1), fan_in)
        parts = [slice(start, min(start + fan_in, self.sources)) for start in starts]
        inner = dataclasses.replace(self, added=0, norm=None, keep_mix=False) if len(parts) > 1 else self
        specs = [inner] * (len(parts) - 1) + [self]
        return [
            (part, dataclasses.replace(spec, sources=part.stop - part.start, accumulate=bool(n) or self.accumulate))
            for n, (part, spec) in enumerate(zip(parts, specs, strict=True))
        ]
