"""Fixtures of the tests of live tables."""

import pytest
from support.devices import DEVICES, on


@pytest.fixture(params=DEVICES)
def device(request):
    """Where the runs of support.live_runs lie during the test."""
    with on(request.param) as device:
        yield device
