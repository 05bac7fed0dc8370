"""The record of one resize: its times, and rubbish in its place."""

import pytest

from slurm_elastic.controller.state.transition import Transition, TransitionState
from tests.support.controller.job_records import transition


def test_seconds_are_told_as_far_as_they_are_known():
    t = transition({"n2": 4}, {"n1": 1}, TransitionState.CLEAR)
    t.entered = {"NOTIFY": 10.0, "saved": 10.5, "REQUEUE": 10.6, "running": 13.6}
    assert t.seconds_text() == "checkpoint:0.50,slurm:3.00"
    t.entered["first_step"] = 18.0
    t.startup_s, t.restore_s = 4.0, 1.5
    told = t.seconds()
    assert (told["startup"], told["restore"], told["total"]) == (2.5, 1.5, 8.0)


def test_a_notice_alone_moves_nothing():
    t = transition({"n2": 4}, {"n1": 1}, TransitionState.NOTIFY)
    assert not t.moved
    t.entered["REQUEUE"] = 1.0
    assert t.moved
    start = transition({"n2": 4}, None, TransitionState.RESHAPE)
    assert start.moved


@pytest.mark.parametrize(
    "spoilt",
    [
        {"action": "fly"},
        {"state": "LIMBO"},
        {"old": 5},
        {"target": {"shares": {}}},
        {"job_id": None, "unknown": 1},
    ],
)
def test_rubbish_is_one_kind_of_error(spoilt):
    body = transition({"n2": 4}, {"n1": 1}).to_body() | spoilt
    if spoilt.get("job_id", 0) is None:
        del body["job_id"]
    with pytest.raises(ValueError):
        Transition.from_body(body)


def test_a_newer_field_is_ignored():
    body = transition({"n2": 4}, {"n1": 1}).to_body() | {"colour": "red"}
    assert Transition.from_body(body) == transition({"n2": 4}, {"n1": 1})
