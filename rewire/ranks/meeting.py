"""Comparison of ranks' recipes before they train one model together.

It uses the store of the process group, and never a collective. A collective in a forward would deadlock correct
programs: rank 0 alone may evaluate, ranks may run different numbers of forwards, or hold different models on purpose.
Writing to the store waits for nobody. Reading waits only if ranks are known to continue together (under DDP or FSDP, on
a declared mesh, in a call that all of them make), once for each model, and no longer than `PATIENCE`. Then the rank
continues, and reads later what comes later. All ranks that wait read the same, so that a difference is the same error
on each. A rank sends a few messages, whatever the number of ranks.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist

from rewire.errors import RewireError
from rewire.torch_internals import default_store
from rewire.version import __version__

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

#: The description of a rank's model, as plain data by name.
Facts: TypeAlias = Mapping[str, Any]
#: Seconds for which a rank waits for others.
PATIENCE = 30.0
#: Seconds for which a rank waits for late ranks once two differ, to name these as well.
GRACE = 1.0

#: Meetings so far, by kind and ranks.
_NUMBERS: Counter[str] = Counter()

_LONGEST = 80  # characters of a value in a message


def alone() -> bool:
    """Whether there are no other ranks, they are simulated (torch's "fake" backend), or have no store (MPI)."""
    world = dist.group.WORLD if dist.is_available() else None
    return world is None or world.size() < 2 or dist.get_backend(world) in ("fake", "mpi")


def store_of(name: str) -> Store:
    """The store of the default process group, with a prefix of this name."""
    from torch.distributed.distributed_c10d import PrefixStore

    return PrefixStore(f"rewire/{name}", default_store())


def facts_of(trunks: Mapping[str, Facts]) -> dict[str, Any]:
    """The facts that must agree, as plain data: the version of rewire, and for each trunk its recipe."""
    facts = {"rewire": __version__, "trunks": trunks}
    return json.loads(json.dumps(facts, sort_keys=True, default=lambda value: type(value).__name__))


class Meeting:
    """One question to some ranks: whether all of them have the same facts.

    The first rank to come posts its facts, others post theirs if they differ, and each is counted.

    Args:
        kind: the purpose; ranks have to come to all meetings of a kind in the same order.
        ranks: of the default group.
        facts: of this rank.
    """

    def __init__(self, kind: str, ranks: Sequence[int], facts: Facts) -> None:
        name = f"{kind}/{','.join(map(str, sorted(ranks)))}"
        _NUMBERS[name] += 1
        self.store, self.size = store_of(f"{name}/{_NUMBERS[name]}"), len(ranks)
        mine = json.dumps({"rank": dist.get_rank(), "facts": facts}, sort_keys=True)
        first = json.loads(self.store.compare_set("first", "", mine))
        if first["facts"] != facts:
            self.store.set(f"other/{self.store.add('others', 1)}", mine)
        self.store.add("came", 1)

    def wait(self, seconds: float = PATIENCE) -> bool:
        """Wait for all ranks; return whether they have come.

        Raises:
            RewireError: they differ.
        """
        end, pause, differ = time.monotonic() + seconds, 0.001, False
        while True:
            came = self.store.add("came", 0) >= self.size
            if not differ and self.store.add("others", 0):
                differ, end = True, time.monotonic() + GRACE
            if came or time.monotonic() >= end:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        if differ:
            raise RewireError(self._difference())
        return came

    def _difference(self) -> str:
        others = [f"other/{number + 1}" for number in range(self.store.add("others", 0))]
        return difference([json.loads(self.store.get(key)) for key in ("first", *others)])


def agree(kind: str, ranks: Sequence[int], facts: Facts) -> None:
    """Compare facts in a call that all of ``ranks`` make.

    Raises:
        RewireError: they differ.
    """
    if len(ranks) > 1 and not alone():
        Meeting(kind, ranks, facts).wait()


def check_alike(posts: Sequence[Facts]) -> None:
    """Compare the gathered facts of all ranks, ``{"rank": .., "facts": ..}`` with one trunk each, by the trunk's name.

    Raises:
        RewireError: they differ.
    """
    for name in dict.fromkeys(name for post in posts for name in post["facts"]["trunks"]):
        same = [post for post in posts if name in post["facts"]["trunks"]]
        if any(post["facts"] != same[0]["facts"] for post in same):
            raise RewireError(difference(same))


def difference(posts: Sequence[Facts]) -> str:
    """A message about ranks that differ; ``posts`` are ``{"rank": .., "facts": ..}`` from some of them."""
    reference, *others = sorted(posts, key=lambda post: post["rank"])
    told: dict[str, dict[int, None]] = {}
    for post in others:
        for text in _differing(post["facts"], reference["facts"], reference["rank"]):
            told.setdefault(text, {})[post["rank"]] = None
    lines = [f"{_named(list(ranks))} {text}" for text, ranks in told.items()]
    return (
        "ranks that train one model have rewired it differently, so their connection weights do not mean the same: "
        f"{'; '.join(lines)}. Rewire with the same topology, options and version of rewire on every rank."
    )


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"


def _differing(facts: Facts, reference: Facts, rank: int) -> Iterator[str]:
    """The differences from ``reference``, the facts of ``rank``: as in "topology A where rank 0 has B"."""
    for key in reference.keys() & facts.keys() - {"trunks"}:
        if facts[key] != reference[key]:
            yield f"{key} {facts[key]} where rank {rank} has {reference[key]}"
    for name in dict.fromkeys([*reference["trunks"], *facts["trunks"]]):
        here, there = facts["trunks"].get(name), reference["trunks"].get(name)
        if here is None or there is None:
            no, one = ("no ", "one") if here is None else ("", "none")
            yield f"{no}trunk '{name}' where rank {rank} has {one}"
            continue
        same = here.get("topology") == there.get("topology")
        for key in dict.fromkeys([*there, *here]):
            if key == "options" and same:
                mine, its = here["options"], there["options"]
                yield from (
                    _told(option, mine.get(option), its.get(option), name, rank) for option in _unequal(mine, its)
                )
            elif key != "options" and here.get(key) != there.get(key):
                yield _told(key, here.get(key), there.get(key), name, rank)


def _unequal(one: Facts, two: Facts) -> list[str]:
    return [key for key in dict.fromkeys([*two, *one]) if one.get(key) != two.get(key)]


def _told(key: str, here: object, there: object, trunk: str, rank: int) -> str:
    return f"{key} {_short(here)} where rank {rank} has {_short(there)} (trunk '{trunk}')"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}.."
