"""What all streams of one forward of a trunk share."""

import gc

import pytest
import torch

from rewire.runtime.shared import Shared


def test_a_value_that_was_lent_is_looked_at_once() -> None:
    shared, value = Shared(None), torch.zeros(3)
    assert not shared.changed()
    shared.lend(value)
    value.add_(1)
    assert shared.changed()
    assert not shared.changed()


def test_values_that_are_not_written_to_have_not_changed() -> None:
    shared, value = Shared(None), torch.zeros(3).add_(1)
    shared.lend(value)
    assert not shared.changed()


def test_known_tensors_are_not_kept_alive() -> None:
    shared, value = Shared(None), torch.zeros(3).add_(1)
    assert shared.know(value) == value._version == 1
    ((reference, before),) = shared.known
    assert (reference(), before) == (value, 1)
    del value
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("recorded", [True, False])
def test_whether_gradients_were_recorded(recorded: bool) -> None:
    with torch.set_grad_enabled(recorded):
        shared = Shared(None)
    assert shared.recorded is recorded


def test_the_end_is_noted() -> None:
    shared = Shared(None)
    assert not shared.ended
    shared.end()
    assert shared.ended
    shared.run_again()
    assert not shared.ended
