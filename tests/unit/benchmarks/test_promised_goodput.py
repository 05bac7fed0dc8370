"""What benchmarks.mixed_cluster computes from steps, changes and reasons."""

import doctest

import pytest

from benchmarks import promised_goodput
from benchmarks.promised_goodput import compared, losses, median_error


def chosen(gpus, gpu_type, times):
    parameters = {"gpus": gpus, "gpu_type": gpu_type, "times": times}
    base = {"base_gpus": 1, "base_type": "v100"}
    return {"code": "goodput-chosen", "parameters": parameters | base}


def answer(time, gpus, gpu_type, reason):
    job = {"job_id": 7, "gpus": gpus, "gpu_type": gpu_type}
    return {"time": time, "job": job, "decision": {"reason": reason}}


def change(time, old, new, reason, outcome="done"):
    ends = {"from": old, "to": new, "kind": "requeue"}
    return {"time": time, **ends, "reason": reason, "outcome": outcome}


def steps(run, ranks, begin, step_s, count=20):
    return [{"run": run, "ranks": ranks, "end": begin + i * step_s} for i in range(count)]


def test_the_modules_examples() -> None:
    assert doctest.testmod(promised_goodput).failed == 0


def test_the_promise_is_new_over_old_goodput_and_the_speeds_are_compared() -> None:
    rows = steps(0, 1, 0.0, 1.0) + steps(1, 2, 30.0, 0.5)
    several = {"code": "several", "parameters": {"reasons": [chosen(2, "a100", 5.7)]}}
    changes = [change(20.0, "1 a100 on g01", "2 a100 on g01", several)]
    (row,) = compared(changes, rows, [answer(18.0, 1, "a100", chosen(1, "a100", 3.0))])
    assert row["promised"] == pytest.approx(1.9)
    assert row["delivered"] == pytest.approx(2.0)
    assert row["still_s"] == pytest.approx(11.0)
    assert median_error([{"changes": [row]}]) == pytest.approx(2.0 / 1.9 - 1)


def test_the_smallest_size_needs_no_earlier_answer() -> None:
    changes = [change(20.0, "1 v100 on g03", "2 a100 on g01", chosen(2, "a100", 3.5))]
    (row,) = compared(changes, steps(0, 1, 0.0, 1.0), [])
    assert row["promised"] == 3.5
    assert row["delivered"] is None


def test_a_change_for_another_job_promises_nothing_and_a_failed_one_is_left_out() -> None:
    room = {"code": "makes-room", "parameters": {"job": "9"}}
    changes = [
        change(20.0, "2 a100 on g01", "1 a100 on g01", room),
        change(60.0, "1 a100 on g01", "2 a100 on g01", room, outcome="undone"),
        change(0.0, "the queue", "1 a100 on g01", room),
    ]
    (row,) = compared(changes, steps(0, 2, 0.0, 1.0) + steps(1, 1, 30.0, 2.0), [])
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
