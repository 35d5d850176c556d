"""Random residual nets are rewired right, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from fuzz.checking import check
from fuzz.nets import Net, nets


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nets")


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(net=nets())
def test_a_random_net_is_right_or_refused(net: Net, folder: Path) -> None:
    check(net, folder)


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(net=nets())
def test_a_random_net_that_is_not_validated_is_right_or_refused(net: Net, folder: Path) -> None:
    check(net, folder, validate=False)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(net=nets())
def test_many_random_nets_are_right_or_refused(net: Net, folder: Path) -> None:
    check(net, folder)
