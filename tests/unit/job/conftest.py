"""Fixtures of these tests."""

import pytest

from tests.support.job.simulated_clock import SimulatedClock


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()
