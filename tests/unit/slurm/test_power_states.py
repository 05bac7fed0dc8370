"""Words about a node's power."""

import pytest

from slurm_elastic.slurm import power_states


@pytest.mark.parametrize(
    ("state", "loses", "gains", "lost", "wakes"),
    [
        ("IDLE", False, False, False, False),
        ("IDLE+POWERED_DOWN", True, False, False, True),
        ("IDLE+POWERING_DOWN", True, False, False, True),
        ("IDLE+DRAIN+POWER_DOWN", True, False, False, False),
        ("IDLE+DRAIN+POWERED_DOWN", True, False, False, False),
        ("IDLE+POWER_UP+POWERED_DOWN", False, True, False, True),
        ("IDLE+POWERING_UP", False, True, False, True),
        ("IDLE+NOT_RESPONDING+POWERING_UP", False, True, False, True),
        ("MIXED+DRAIN+POWER_DOWN", True, False, False, False),
        ("ALLOCATED+POWERING_UP", False, True, False, False),
        ("DOWN+POWERED_DOWN", True, False, True, False),
        ("DOWN+POWERING_UP", False, True, True, False),
        ("DOWN", False, False, True, False),
        ("IDLE+FAIL+POWERED_DOWN", True, False, True, False),
        ("IDLE+MAINT+POWERED_DOWN", True, False, False, False),
    ],
)
def test_each_state_of_a_node_says_what_its_power_does(state, loses, gains, lost, wakes):
    assert power_states.loses_power(state) is loses
    assert power_states.gains_power(state) is gains
    assert power_states.is_lost(state) is lost
    assert power_states.can_wake(state) is wakes
