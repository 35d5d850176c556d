from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Keyed, PreNorm, Stack, vectors
from torch import Tensor, nn

import rewire
from rewire.runtime.nested import along, attributes, is_container, mapped, parts_by_name, with_item
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


class Carrier:
    def __init__(self, x: Any, notes: Any = None) -> None:
        self.x, self.notes = x, notes


class Locked(Carrier):
    def __setattr__(self, name: str, value: object) -> None:
        vars(self)[name] = value


def test_what_is_held_by_key_changes_by_key() -> None:
    made = Keyed(x=ONE, name="text")
    assert mapped(made, doubled) is made and made.held == {"x": TWO, "name": "text"} and [*vars(made)] == ["held"]


def test_objects_change_in_place_unless_they_have_to_be_fresh() -> None:
    for made in (Carrier(ONE, [ONE]), types.SimpleNamespace(x=ONE, notes=[ONE])):
        copied = mapped(made, doubled, fresh=True)
        assert copied is not made and made.x is ONE and copied.x == TWO and copied.notes is made.notes
        assert mapped(made, doubled) is made and made.x == TWO and made.notes[0] is ONE  # what lies deeper is not read


@pytest.mark.parametrize(
    "value",
    [None, 1, 0.5, "text", True, ONE, nn.Linear(2, 2), Locked(ONE), nn.Linear, doubled, torch.Size([2]), object()],
)
def test_other_values_have_no_parts(value: Any) -> None:
    assert parts_by_name(value) == {}


def test_a_stream_is_no_container() -> None:
    seen: list[Any] = []
    rewired = rewire.compile(Stack(PreNorm), "denseformer", validate=False)
    hook = lambda module, args: seen.append(args[0])  # noqa: E731
    hook.takes_streams = True  # type: ignore[attr-defined]
    rewired.layers[1].register_forward_pre_hook(hook)
    rewired(vectors())
    assert type(seen[0]).__name__ == "Stream" and parts_by_name(seen[0]) == {} and not is_container(seen[0])


@pytest.mark.parametrize("beside", [None, 3, "text", ONE, (ONE, None)])
def test_dynamo_follows_objects_and_what_is_beside_streams(beside: Any) -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def changed(x: Tensor) -> Any:
        carrier = mapped(Carrier(x, beside), doubled)
        return carrier.x, along((STREAM, beside), (x, beside), lambda _, y: y + 1)[0]

    assert changed(ONE) == (TWO, TWO)
