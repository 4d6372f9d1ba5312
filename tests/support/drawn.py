"""Properties that hypothesis draws examples for: few in the default suite, many in the slow one."""

import pytest
from hypothesis import given, settings

from support.sweeps import SWEEP_STRIDE


def drawn(*strategies, few, many):
    """Make a test of a property: with ``few`` examples and, marked slow, with ``many`` divided by SWEEP_STRIDE."""
    numbers = [few, pytest.param(max(few, many // SWEEP_STRIDE), marks=pytest.mark.slow)]

    def made(holds):
        @pytest.mark.parametrize("n_examples", numbers, ids=["few", "many"])
        def test(n_examples):
            settings(max_examples=n_examples)(given(*strategies)(holds))()

        test.__doc__ = holds.__doc__
        return test

    return made
