"""What benchmarks.policies.mixed_cluster computes from steps, changes and reasons."""

import doctest

import pytest

from benchmarks.policies import promised_goodput
from benchmarks.policies.promised_goodput import compared, losses, median_error


def promise(times, gpus, gpu_type):
    parameters = {"gpus": gpus, "gpu_type": gpu_type, "times": times}
    change = {"code": "goodput-change", "parameters": parameters}
    return {"code": "several", "parameters": {"reasons": [{"code": "work-left"}, change]}}


def change(time, old, new, reason, outcome="done"):
    ends = {"from": old, "to": new, "kind": "requeue"}
    return {"time": time, **ends, "reason": reason, "outcome": outcome}


def steps(run, ranks, begin, step_s, count=20):
    return [{"run": run, "ranks": ranks, "end": begin + i * step_s} for i in range(count)]


def test_the_modules_examples() -> None:
    assert doctest.testmod(promised_goodput).failed == 0


def test_promised_goodput_and_speeds_are_compared() -> None:
    rows = steps(0, 1, 0.0, 1.0) + steps(1, 2, 30.0, 0.5)
    changes = [change(20.0, "1 a100 on g01", "2 a100 on g01", promise(1.9, 1, "a100"))]
    (row,) = compared(changes, rows)
    assert row["promised"] == 1.9
    assert row["delivered"] == pytest.approx(2.0)
    assert row["still_s"] == pytest.approx(11.0)
    assert median_error([{"changes": [row]}]) == pytest.approx(2.0 / 1.9 - 1)


def test_a_change_for_another_job_promises_nothing_and_a_failed_one_is_left_out() -> None:
    room = {"code": "makes-room", "parameters": {"job": "9"}}
    changes = [
        change(20.0, "2 a100 on g01", "1 a100 on g01", room),
        change(60.0, "1 a100 on g01", "2 a100 on g01", room, outcome="undone"),
        change(0.0, "the queue", "1 a100 on g01", room),
    ]
    (row,) = compared(changes, steps(0, 2, 0.0, 1.0) + steps(1, 1, 30.0, 2.0))
    assert (row["promised"], row["delivered"]) == (None, pytest.approx(0.5))
    assert median_error([{"changes": [row]}]) is None


def test_losses_are_compared_step_by_step() -> None:
    reference = [{"step": i, "loss": 1.0 - 0.1 * i} for i in range(1, 6)]
    own = [{**row, "frozen": 0} for row in reference[:4]]
    own[1]["loss"] *= 1.01
    own[3]["loss"] += 0.03
    found = losses([*own[:2], own[1], own[3]], reference)
    assert found["steps"] == 4
    assert (found["repeated"], found["missing"]) == (1, 1)
    assert found["largest"] == found["last"] == pytest.approx(0.05)
    assert found["missed_descent"] == pytest.approx(0.1)
