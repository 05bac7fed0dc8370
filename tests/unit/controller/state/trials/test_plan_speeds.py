"""Speeds of plans as reports tell them."""

import doctest

from slurm_elastic.controller.state.trials import plan_speeds
from slurm_elastic.controller.state.trials.plan_speeds import PlanSpeeds


def test_examples() -> None:
    assert doctest.testmod(plan_speeds).failed == 0


def test_the_ledger_keeps_them() -> None:
    speeds = PlanSpeeds()
    speeds.add(("a100", 4, 1), 64, "", 90.0)
    speeds.add(("a100", 4, 1), 64, "2x1+tensor=2", 100.0)
    assert PlanSpeeds.from_rows(speeds.to_rows()) == speeds
