"""Costs of changes without a requeue."""

import pytest

from slurm_elastic.simulator.truth.resize_costs import ResizeCosts

COSTS = ResizeCosts(parameters={"small": 1e6, "net": 30e6})


@pytest.mark.parametrize(
    ("application", "seconds"),
    [("small", 0.011), ("net", 0.185), ("net#4711", 0.185), ("?", 0.605)],
)
def test_the_pause_grows_with_the_parameters(application, seconds):
    assert COSTS.pause_s(application) == pytest.approx(seconds)


def test_the_built_in_applications_have_their_parameters():
    assert ResizeCosts().pause_s("bertbase") == pytest.approx(0.005 + 6e-9 * 110e6)


def test_new_ranks_start_as_slowly_as_the_application_unless_stated():
    assert COSTS.joined_after_s(60.0) == 60.0
    assert COSTS.joined_after_s(1.0) == 4.3
    assert ResizeCosts(join_s=2.5).joined_after_s(60.0) == 2.5


def test_a_restart_of_the_ranks_saves_slurms_part():
    assert COSTS.ranks_restart_s(60.0) == 56.5
    assert COSTS.ranks_restart_s(5.0) == 3.0
    assert COSTS.ranks_restart_s(2.0) == 2.0
