"""Pipeline stages: check that they were cut from models that were rewired alike.

Stages cannot wait for each other in a forward, where each needs the result of the one before it, and a stage does not
know which ranks are its pipeline. So each new stage announces its part of each trunk, and checks whether parts with the
same recipe join up from the trunk's start to its end. If a part is missing, and there is a part of another recipe in
its place, all stages whose chain has a gap raise an error. Several pipelines of different models in one process group
have chains without gaps.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from rewire.errors import RewireError
from rewire.ranks.meeting import GRACE, PATIENCE, Facts, alone, difference, store_of

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class Part(NamedTuple):
    """A part of a trunk.

    Attributes:
        facts: of the trunk.
        model: distinguishes the models that this process has rewired.
        first, last: residual adds before the part, and up to its end; None: the trunk's end.
    """

    facts: Facts
    model: int
    first: int = 0
    last: int | None = None

    def fits(self, other: Part) -> bool:
        """Whether a rank may have both parts in one pipeline: of different trunks, or different parts of one."""
        if self.model != other.model:
            return False
        return self.facts != other.facts or self._before(other) or other._before(self)

    def _before(self, other: Part) -> bool:
        return self.last is not None and self.last <= other.first


class _Rounds:
    """The pipelines of this rank, by number: a rank's n-th pipeline is the n-th one of the others.

    Attributes:
        number: of the current one.
        parts: this rank's parts in it; a part that does not fit these begins the next one.
    """

    def __init__(self) -> None:
        self.number = 0
        self.parts: list[Part] = []

    def leave(self, part: Part) -> Store:
        """Announce a part of this rank in its round, at the place shared by all ranks of the round."""
        if not self.number or not all(part.fits(other) for other in self.parts):
            self.number, self.parts = self.number + 1, []
        store = store_of(f"pipeline/{self.number}")
        if part.facts:
            _leave(part, store)
        if not self.parts:
            store.add("came", 1)  # only now: others expect a part from a rank that has come
        self.parts.append(part)
        return store


_ROUNDS = _Rounds()


def check_chains(parts: Sequence[Part]) -> None:
    """Announce this rank's new stage, and wait until the others are known to fit it.

    Raises:
        RewireError: a part is missing, and others have one in its place that was rewired differently.
    """
    if alone():
        return
    stores = [_ROUNDS.leave(part) for part in parts or [Part({}, 0)]]  # a stage without adds counts, too
    for part, store in zip(parts, stores, strict=False):
        _check(part.facts, store)


def _leave(part: Part, store: Store) -> None:
    (trunk,) = part.facts["trunks"]
    post = {"rank": dist.get_rank(), "facts": part.facts, "first": part.first, "last": part.last}
    mine = json.dumps(post, sort_keys=True)
    if store.compare_set(_key(part.facts, part.first), "", mine) == mine.encode():  # replicas announce no parts
        store.set(f"{trunk}/{store.add(trunk, 1)}", mine)


def _key(facts: Facts, first: int) -> str:
    return f"{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()}/{first}"


def _check(facts: Facts, store: Store) -> None:
    end, pause = time.monotonic() + PATIENCE, 0.001
    others: list[dict[str, Any]] = []
    while (gap := _gap(facts, store)) is not None and time.monotonic() < end:
        if not others and store.add("came", 0) >= dist.get_world_size():
            others = _others(facts, gap, store)
            if not others:
                return  # ranks with several stages may come later
            end = time.monotonic() + GRACE
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    if gap is not None and others:
        others = _others(facts, gap, store) or others
        if any(post["facts"] != facts for post in others):  # otherwise a rank is late, or cuts the model elsewhere
            raise RewireError(difference(others))


def _gap(facts: Facts, store: Store) -> int | None:
    """The position at which this recipe's first missing part begins; None if none is missing."""
    place: int | None = 0
    while place is not None:
        if not store.check([_key(facts, place)]):
            return place
        place = json.loads(store.get(_key(facts, place)))["last"]
    return None


def _others(facts: Facts, gap: int, store: Store) -> list[dict[str, Any]]:
    """The parts of others at a gap, with the ranks that have these facts; empty if nobody has a part there."""
    (trunk,) = facts["trunks"]
    posts = [json.loads(store.get(f"{trunk}/{number + 1}")) for number in range(store.add(trunk, 0))]
    others = [post for post in posts if post["first"] <= gap and (post["last"] is None or gap < post["last"])]
    return [*others, *(post for post in posts if post["facts"] == facts)] if others else []
