"""Checkpoints of `torch.distributed.checkpoint`: plain ones load into rewired models, other topologies' do not."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from rewire.attributes import CONNECTIONS
from rewire.errors import RewireError
from rewire.runtime.connection import NO_COPIES
from rewire.saving.recipes import EXTRA_STATE, difference, is_recipe

logger = logging.getLogger("rewire.saving")


class LoadPlanner(DefaultLoadPlanner):
    """Loads a distributed checkpoint into a rewired model; that of a plain model leaves connections at their start.

    Then the connections, with their optimizer state and parameter groups, stay as they are, and a warning is logged.
    All else has to be in the checkpoint, as with torch's own planner. A checkpoint of a model that was rewired in
    another way is refused before any weight is read, with the difference; torch's planner would only complain about a
    size.

    Raises:
        torch.distributed.checkpoint.CheckpointException: around a `RewireError`, from ``load``.

    Example:
        >>> state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        >>> torch.distributed.checkpoint.load(state, checkpoint_id="plain", planner=LoadPlanner())
        >>> model.load_state_dict(state["model"])
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        saved = metadata.state_dict_metadata
        if any(map(_names_connection, saved)):
            _check_same(self.state_dict, saved)
            return
        added = _of_connections(self.state_dict)
        _check_no_copies(added)
        self.state_dict = {key: value for key, value in self.state_dict.items() if key not in added}
        if added:
            logger.warning("The checkpoint is one of a plain model: connection weights stay as they are.")


def _names_connection(key: str) -> bool:
    return CONNECTIONS in key.split(".")


def _of_connections(state: Mapping[str, object]) -> set[str]:
    """Keys of a flat state dict that a plain model's lacks."""
    named = {key for key in state if _names_connection(key)}
    groups = [  # an optimizer's, by number: "optim.param_groups.1."
        key.removesuffix("params")
        for key, value in state.items()
        if key.endswith(".params") and isinstance(value, list) and value and all(map(_names_connection, value))
    ]
    return named | {key for key in state if key.startswith(tuple(groups))}


def _check_no_copies(keys: set[str]) -> None:
    """Raise RewireError if copies of norms would keep their values while the norms themselves are loaded."""
    connections = tuple(key.removesuffix(EXTRA_STATE) + "." for key in keys if is_recipe(key))
    norms = [k for k in sorted(keys) if k.partition(f".{CONNECTIONS}.")[2].startswith(("k.", "v."))]
    left = next((key for key in norms if not key.startswith(connections)), None)
    if left is not None:
        raise RewireError(f"'{left}': {NO_COPIES}")


def _check_same(state: Mapping[str, object], saved: Mapping[str, object]) -> None:
    """Raise RewireError if connections would be loaded into other ones: of other trunks, or with other weights."""
    roots = {key.split(CONNECTIONS)[0] for key in state if _names_connection(key) and key.endswith(EXTRA_STATE)}
    for root in roots:  # prefixes of the model's own names, like "model."
        prefix = f"{root}{CONNECTIONS}."
        there, here = _shapes(saved, prefix), _shapes(state, prefix)
        if there != here:
            raise RewireError(
                "the checkpoint is one of a model that was rewired in another way; connections differ (- saved, + "
                f"here):{difference(there, here)}\nRewire this model in the same way, then load. If only recipes "
                "differ, an earlier version may have written it: "
                "torch.distributed.checkpoint.format_utils.dcp_to_torch_save turns it into a state dict, which "
                "load_state_dict converts."
            )


def _shapes(entries: Mapping[str, object], prefix: str) -> list[str]:
    sizes = {
        key.removeprefix(prefix): entry.shape if isinstance(entry, Tensor) else getattr(entry, "size", ())
        for key, entry in entries.items()
        if key.startswith(prefix)
    }
    return sorted(f"{name.replace(EXTRA_STATE, ': recipe, bytes')} {list(size)}" for name, size in sizes.items())
