"""Topologies by name: with options, near names, and as classes."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import models
import pytest
from torch import nn

import rewire
from rewire import topologies
from rewire.registry import said
from rewire.topologies.registry import _FACTORIES, make_topology


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("mhc", "mhc", {}),
        ("ancre-ingoing:block=2,cascade=keep", "ancre-ingoing", {"block": 2, "cascade": "keep"}),
        ("ancre-ingoing:start=paper:temperature=0.5", "ancre-ingoing", {"start": "paper", "temperature": 0.5}),
        ("x:units=[1, 2],channels=('v', 'k'),on=True", "x", {"units": [1, 2], "channels": ("v", "k"), "on": True}),
    ],
)
def test_options_in_a_name(text: str, name: str, options: dict[str, Any]) -> None:
    assert said(text) == (name, options)


@pytest.mark.parametrize("text", ["mhc:streams", "mhc:", "mhc:=2", "mhc:streams="])
def test_options_without_a_value(text: str) -> None:
    if text == "mhc:":
        assert said(text) == ("mhc", {})
    else:
        with pytest.raises(ValueError, match=f"'{text}': an option is written name=value"):
            said(text)


@pytest.mark.parametrize("text", ["hc-static:streams=2,streams=3", "ancre-ingoing:block=2:block=2"])
def test_options_that_are_given_twice(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}': (streams|block) is given twice"):
        said(text)


#: What people pass by mistake.
WRONG = ("nonsense", 2.5, -1, None, [], {}, float("nan"), object(), [1, "x"], {"a": 1})


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name, factory in _FACTORIES.items() for option in inspect.signature(factory).parameters],
)
def test_what_options_cannot_be(name: str, option: str) -> None:
    for wrong in WRONG:
        if wrong in (None, 2.5, -1):  # some options take them
            with contextlib.suppress(TypeError, ValueError):
                make_topology(name, {option: wrong})
        else:
            with pytest.raises((TypeError, ValueError), match=rf"\b{option}\b"):
                make_topology(name, {option: wrong})


def test_options_that_are_true_or_false() -> None:
    """A word is true in Python, whatever it says."""
    assert said("mhc:delayed=true,scaled=False") == ("mhc", {"delayed": True, "scaled": False})
    with pytest.raises(ValueError, match="separate_norms='no': it has to be True or False"):
        make_topology("dca:separate_norms=no", {})


def test_options_in_a_name_are_those_of_the_call() -> None:
    model, x = models.Stack(models.PreNorm), models.vectors()

    def weights(*topology: Any, **options: Any) -> dict[str, Any]:
        rewired: nn.Module = rewire.compile(model, *topology, example_inputs=(x,), validate=False, **options)
        return {name: c.recipe() | {"start": c.start} for name, c in rewire.connections(rewired).items()}

    want = weights("ancre-ingoing", block=2, temperature=0.5, start="paper")
    assert weights("ancre-ingoing:block=2,temperature=0.5,start=paper") == want
    assert weights("ancre-ingoing:block=2,start=paper", temperature=0.5) == want
    assert weights({"layers": "ancre-ingoing:block=2"}) == weights("ancre-ingoing", block=2)
    assert weights("hc-static:streams=2", start="paper") == weights(
        topologies.HyperConnections(streams=2), start="paper"
    )
    for topology in ("ancre-ingoing:block=2", {"layers": "ancre-ingoing:start=paper"}):
        with pytest.raises(TypeError, match=r"given twice|has no option 'start'|cannot be combined"):
            rewire.compile(model, topology, example_inputs=(x,), block=3)


@pytest.mark.parametrize(
    ("said_name", "meant"),
    [
        ("hyper-connections", "hc-static"),
        ("HyperConnections", "hc-dynamic"),
        ("hc", "hc-gated"),
        ("manifold-hyper-connections", "mhc"),
        ("deepcrossattention", "dca"),
        ("attention residuals", "attnres"),
        ("deep-delta-learning", "ddl"),
        ("anrce", "ancre-ingoing"),
        ("grn", "grn-v3"),
        ("muddformr", "muddformer"),
    ],
)
def test_near_names(said_name: str, meant: str) -> None:
    with pytest.raises(rewire.UnknownName, match=f"Did you mean .*'{meant}'"):
        make_topology(said_name, {})


def test_names_by_a_pattern() -> None:
    assert list(rewire.list_topologies("hc-*")) == ["hc-dynamic", "hc-gated", "hc-static"]
    assert rewire.list_topologies("nothing*") == {}
    assert rewire.list_topologies("*") == rewire.list_topologies()


def test_every_topology_is_a_public_class() -> None:
    """What code completion shows under rewire.topologies."""
    made = {name: type(make_topology(name, {})) for name, f in _FACTORIES.items() if f.__module__.startswith("rewire.")}
    for name, cls in made.items():
        assert getattr(topologies, cls.__name__) is cls and inspect.getdoc(cls), name


def test_a_class_has_typed_options() -> None:
    assert topologies.HyperConnections(streams=2) == make_topology("hc-static:streams=2", {})
    with pytest.raises(TypeError, match="unexpected keyword argument 'steams'"):
        topologies.HyperConnections(steams=2)  # type: ignore[call-arg]
