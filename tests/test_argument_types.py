"""Public functions that are given things of other types say so: nothing raw comes out of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from written_nets import written_input, written_net

import rewire

#: What people pass by mistake.
WRONG = (
    None,
    3,
    -1,
    2.5,
    "nonsense",
    "",
    b"x",
    [],
    [1],
    (),
    {},
    {"a": 1},
    {1: 2},
    object(),
    nn.Linear,
    nn.Linear(2, 2),
)
#: Errors that say what is wrong with an argument.
SAID = (rewire.RewireError, TypeError, ValueError, OSError)
#: Others build their arguments' classes, or take time (a study), or need ranks.
LEFT_OUT = {"study", "parallelize"}
#: Of all, `eject` alone takes long: it ejects a model for each value of a flag.
FUNCTIONS = sorted(
    name for name in rewire.__all__ if inspect.isfunction(getattr(rewire, name)) and name not in LEFT_OUT
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "eject" else ()) for name in FUNCTIONS]
)
def test_arguments_of_other_types(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some are names of files
    plain = written_net()
    rewired = rewire.compile(plain, "residual", validate=False)
    rewire.save(rewired, "saved")
    right = {"model": plain if name in ("compile", "inspect", "load") else rewired, "stage": rewired, "folder": "saved"}
    right |= {"topology": "denseformer", "init": "idinit", "path": "report.html", "parts": [], "name": "of a test"}
    function = getattr(rewire, name)
    parameters = inspect.signature(function).parameters.values()
    known = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = {p.name: right.get(p.name, "nonsense") for p in known if p.default is p.empty}
    for parameter in known:
        for wrong in WRONG:
            try:
                function(**{**needed, parameter.name: wrong})
            except SAID:
                pass
            except Exception as error:
                raise AssertionError(f"{name}({parameter.name}={wrong!r})") from error


NUMBERS: tuple[tuple[Callable[..., object], str], ...] = (
    (rewire.freeze, "threshold"),
    (rewire.sparsity_penalty, "q"),
    (lambda model, probes: rewire.diagnose(model, written_input(), probes=probes), "probes"),
    (lambda model, at_most: rewire.ablate(model, [written_input()], at_most=at_most), "at_most"),
    (lambda model, at_once: rewire.ablate(model, [written_input()], at_once=at_once), "at_once"),
    (lambda model, of: rewire.ablate(model, [written_input()], of=of), "of"),
    (lambda model, max_shard_bytes: rewire.save(model, "saved", max_shard_bytes=max_shard_bytes), "max_shard_bytes"),
)


@pytest.mark.parametrize("wrong", ["many", -1, 0.5j, object()])
@pytest.mark.parametrize(("function", "option"), NUMBERS)
def test_what_is_no_number(function: Callable[..., object], option: str, wrong: object) -> None:
    rewired = rewire.compile(written_net(), "denseformer", example_inputs=written_input(), validate=False)
    with pytest.raises(ValueError, match=f"{option}={re.escape(repr(wrong))}: it has to "):
        function(rewired, **{option: wrong})


def test_the_errors_name_the_argument() -> None:
    with pytest.raises(TypeError, match="pattern must be a Pattern, not str"):
        rewire.register_pattern("a pattern of a test", "llama")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="stage must be a Module, not list"):
        rewire.pipeline_stage([])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="generator must be a Generator, not int"):
        rewire.initialize(written_net(), "idinit", generator=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="trunks has to hold the names of trunks"):
        rewire.compile(written_net(), trunks=3, example_inputs=written_input())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="path must be a str, not int"):
        rewire.source(rewire.compile(written_net(), validate=False), 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="trunks has to hold the names of trunks"):
        rewire.compile(written_net(), trunks=torch.zeros(3), example_inputs=written_input())  # type: ignore[arg-type]
