"""What the structure of an architecture does not show, as data."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from torch import nn

from rewire.conventions import out_features
from rewire.copies import Inputs
from rewire.errors import check_type
from rewire.mixes.fused_qkv import Fused
from rewire.registry import Registry
from rewire.trunk import Site


@dataclasses.dataclass(frozen=True)
class Pattern:
    """One architecture, or a family that shares its names.

    Attributes:
        description: one line, for `rewire.list_patterns`.
        matches: whether a model is of this architecture.
        model_types: in place of ``matches``: the model is, or contains, one whose Hugging Face config is of one of
            these types.
        attention: regular expression for the branch names (`Site.branch`) that are self-attention.
        ffn: the same for feed-forward branches.
        qkv: paths of the query, key and value projections below the attention branch's block (one path if they are
            fused), with ``{branch}`` for the branch's own name.
        beside: other maps in the attention that read what the queries, keys or values are projected from: path, as in
            ``qkv`` -> ``"q"``, ``"k"`` or ``"v"``. Maps that are not named read as the queries do.
        fused: makes the layout of a fused projection's output, from the projection and the module that holds it.
        example_inputs: makes small inputs for a model of this architecture: (args, kwargs). They have to reach every
            block.
        twin: makes a small model of the same classes, with random weights on the CPU, which is validated in place of a
            model on the meta device.
        forwards: module class -> function that is edited in place of its forward, for forwards that hide their
            residual adds behind a hand-written fast path. It has to compute the same.
        prepare: changes a model's copy before it is rewritten (for example, to switch off a fast path).
        learned: set if models of this architecture have learned depth connections of their own: what they are.

    Example:
        >>> pattern = rewire.Pattern("my decoder", lambda model: type(model).__name__ == "MyDecoder", attention="mixer")
    """

    description: str
    matches: Callable[[nn.Module], bool] = lambda _model: False
    model_types: frozenset[str] = frozenset()
    attention: str = ""
    ffn: str = ""
    qkv: tuple[str, ...] = ()
    beside: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fused: Callable[[Any, Any], Fused] | None = None
    example_inputs: Callable[[nn.Module], Inputs] | None = None
    twin: Callable[[nn.Module], nn.Module] | None = None
    forwards: Mapping[type[nn.Module], FunctionType] = dataclasses.field(default_factory=dict)
    prepare: Callable[[nn.Module], None] | None = None
    learned: str = ""

    def kind(self, site: Site) -> str:
        """Kind of a residual add: by this architecture's names, else by its structure."""
        if site.kind == "parallel":  # attention and feed-forward in one: the branch has the name of one of them
            return site.kind
        if self.attention and re.fullmatch(self.attention, site.branch):
            return "attention"
        if self.ffn and re.fullmatch(self.ffn, site.branch):
            return "ffn"
        return site.kind


def thirds(projection: Any, _holder: object = None) -> Fused:
    """Layout of a fused projection with all queries, then all keys, then all values, each of the same size."""
    size = out_features(projection)
    assert size is not None, f"{projection} does not say how many outputs it has"
    return Fused(1, (size // 3,) * 3)


_REGISTRY: Registry[Pattern] = Registry("pattern", "patterns", entry_points="rewire.patterns")


def register_pattern(name: str, pattern: Pattern) -> Pattern:
    """Make ``pattern`` known under ``name``.

    Installed packages add theirs through the entry point group ``rewire.patterns``: each entry point names a module
    that calls this function. Of several patterns that match a model, the one registered last counts first.

    Example:
        >>> mine = rewire.Pattern("my decoder", lambda model: type(model).__name__ == "MyDecoder", attention="mixer")
        >>> registered = rewire.register_pattern("my-decoder", mine)
    """
    check_type("pattern", pattern, Pattern)
    _REGISTRY.add(name, pattern)
    return pattern


def list_patterns() -> dict[str, str]:
    """Name of every architecture in the registry -> a one-line description.

    Example:
        >>> "llama" in rewire.list_patterns()
        True
    """
    left_alone = " (left alone: it has learned depth connections of its own)"
    return {name: p.description + (left_alone if p.learned else "") for name, p in _REGISTRY.items()}


def patterns_for(model: nn.Module) -> list[Pattern]:
    """Patterns that match ``model``, the most specific (registered last) first."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    types = {part.config.model_type for part in model.modules() if is_pretrained(part)}  # type: ignore[union-attr]
    registered = reversed(_REGISTRY.in_order())
    return [pattern for pattern in registered if types & pattern.model_types or pattern.matches(model)]


def is_pretrained(module: nn.Module) -> bool:
    """Whether ``module`` is a Hugging Face model."""
    library = sys.modules.get("transformers.modeling_utils")  # without it there is no such model
    return library is not None and isinstance(module, library.PreTrainedModel)


def first_given(found: list[Pattern], attribute: str) -> Any:
    """``attribute`` of the first pattern that sets it; None if none does."""
    return next((value for value in (getattr(pattern, attribute) for pattern in found) if value), None)
