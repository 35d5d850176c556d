from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rewire.runtime.nested import along, attributes, mapped, with_item
from rewire.topologies.base import QKVInputs

Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Output:
    state: Any
    other: int = 1


def doubled(x: Tensor) -> Tensor:
    return 2 * x


ONE, TWO = torch.ones(1), 2 * torch.ones(1)
STREAM = QKVInputs(ONE, ONE, ONE, ONE)  # stands for one


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (ONE, TWO),
        ([ONE, 3], [TWO, 3]),
        ((ONE, [ONE]), (TWO, [TWO])),
        (Pair(None, ONE), Pair(None, TWO)),
        ({"x": (ONE,)}, {"x": (TWO,)}),
        (Output([ONE]), Output([TWO])),
    ],
)
def test_tensors_in_containers_change(value: Any, want: Any) -> None:
    got = mapped(value, doubled)
    assert type(got) is type(want) and got == want


@pytest.mark.parametrize("value", [[ONE, 3], (ONE,), Pair(ONE, 2), {"x": ONE}, Output(ONE), "text", None])
def test_what_does_not_change_is_the_same_object(value: Any) -> None:
    assert mapped(value, lambda x: x) is value


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: ((x, 1), 2),
        lambda x: [[x]],
        lambda x: {"x": (x,)},
        lambda x: Output((x, 1)),
        lambda x: (Pair(x, None), {"x": [x]}),
    ],
)
def test_dynamo_follows_containers_in_containers(wrap: Callable[[Any], Any]) -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def changed(x: Tensor) -> Any:
        return mapped(wrap(x), lambda x: Output(x)), along(wrap(STREAM), wrap(x), lambda _, x: Output(x))

    assert changed(ONE) == (wrap(Output(ONE)), wrap(Output(ONE)))
    assert torch.compile(lambda x: mapped(wrap(x), lambda x: x), fullgraph=True, backend="eager")(ONE) == wrap(ONE)


def test_one_tensor_of_several_changes() -> None:
    assert with_item(("a", ONE, ONE), 1, doubled) == ("a", ONE, TWO)
    assert with_item(("a", ONE, ONE), (1,), doubled) == ("a", TWO, ONE)
    assert with_item(("a", [ONE, ONE]), (1, 0), doubled) == ("a", [TWO, ONE])
    assert with_item((ONE,), (1,), len) == 1  # what is not there: the caller's function says so
    assert with_item((None,), 1, len) == 1
    assert with_item(Pair(ONE, ONE), 0, doubled) == Pair(TWO, ONE)
    assert with_item(ONE, None, doubled) == with_item(ONE, 3, doubled) == TWO


def test_items_change_where_streams_stand() -> None:
    qkv = QKVInputs(ONE, ONE, ONE, ONE)
    given: dict[str, Any] = {"hidden": [qkv, 2], "other": ONE}
    value = {"hidden": [3, 4], "other": TWO, "new": 5}
    made = along(given, value, lambda passing, item: (passing is qkv, item))
    assert made == {"hidden": [(True, 3), 4], "other": TWO, "new": 5}
    assert value == {"hidden": [3, 4], "other": TWO, "new": 5} and given["hidden"] == [qkv, 2]
    assert along(Pair(qkv, ONE), Pair(3, ONE), lambda _, item: item + 1) == Pair(4, ONE)  # type: ignore[arg-type]
    for other in ("text", (1, 2, 3), None):
        assert along((qkv, ONE), other, lambda *_: "changed") is other


@dataclasses.dataclass(slots=True)
class Slotted:
    hidden: Any
    other: Any = None
    missing: Any = dataclasses.field(init=False)


def test_dataclasses_with_slots() -> None:
    value = Slotted(ONE)
    assert attributes(value) == {"hidden": ONE, "other": None}
    assert mapped(value, lambda item: item + 1).hidden == ONE + 1
    assert mapped(value, lambda item: item) is value
