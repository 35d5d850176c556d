from __future__ import annotations

import decode
import torch
from decode import models_of, ratios, token_of
from mixing import llama

from rewire.bench import harness


def test_each_decodes_the_same_token_again_and_again() -> None:
    models = models_of(llama().eval(), ["ancre-ingoing", "hc-dynamic"])
    assert list(models) == ["plain", "ancre-ingoing", "ancre-ingoing, frozen", "hc-dynamic"]
    steps = {name: token_of(model) for name, model in models.items()}
    assert all(torch.equal(step(), step()) for step in steps.values())
    torch.testing.assert_close(steps["ancre-ingoing"](), steps["ancre-ingoing, frozen"]())
    assert not torch.allclose(steps["plain"](), steps["ancre-ingoing"]())


def test_ratios_are_of_rounds() -> None:
    timings = {"plain": harness.Timing((1.0, 2.0, 9.0), None), "other": harness.Timing((2.0, 4.0, 9.0), None)}
    assert ratios(timings) == {"plain": 1.0, "other": 2.0} and decode.PROMPT > 0
