"""How often the controller looks and decides."""

import math
import time

import pytest

from slurm_elastic.controller import poll_schedule as module
from slurm_elastic.controller.poll_schedule import PollSchedule


class Clock:
    """Time that only passes when it is told to."""

    def __init__(self) -> None:
        self.now, self.cpu = 1000.0, 50.0

    def work(self, seconds: float) -> None:
        self.now, self.cpu = self.now + seconds, self.cpu + seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    monkeypatch.setattr(time, "process_time", lambda: made.cpu)
    return made


@pytest.mark.parametrize("cost", [0.001, 0.5, 3.0])
def test_rounds_cost_a_tenth_of_a_core_however_much_happens(clock: Clock, cost: float) -> None:
    schedule, rounds, began = PollSchedule(), 0, clock.now
    while rounds < 50:
        if schedule.round_is_due():
            with schedule.measuring_round(every_s=30.0):
                clock.work(cost)
            rounds += 1
        schedule.soon()  # something happens all the time
        clock.now += 0.01
    assert rounds * cost / (clock.now - began) < 0.11
    settled = max(0.3, cost / 0.1)
    assert (clock.now - began) / rounds == pytest.approx(settled, rel=0.1)


def test_a_quiet_cluster_is_decided_about_once_an_interval(clock: Clock) -> None:
    schedule = PollSchedule()
    with schedule.measuring_round(every_s=30.0):
        clock.work(0.2)
    assert schedule.until_round() == pytest.approx(29.8)
    clock.now += 29.9
    assert schedule.round_is_due()


def test_a_round_that_takes_longer_than_the_interval_leaves_room_for_others(clock: Clock) -> None:
    schedule = PollSchedule()
    with schedule.measuring_round(every_s=2.0):
        clock.work(5.0)
    assert schedule.until_round() == pytest.approx(45.0)
    assert len(schedule.rounds) == 1
    assert schedule.rounds[0] == pytest.approx((5.0, 5.0))
    assert schedule.last_round() == "Seconds=5.000 Cpu=5.000"


def test_the_longer_reading_the_jobs_takes_the_rarer_it_is_done(clock: Clock) -> None:
    schedule = PollSchedule()
    assert schedule.pause(poll_s=2.0, live=True) == module._FAST_S
    with schedule.measuring_read():
        clock.work(0.2)
    assert schedule.pause(poll_s=2.0, live=True) == pytest.approx(1.0)
    with schedule.measuring_round(every_s=30.0):
        pass
    with schedule.measuring_pulse():
        clock.work(0.02)
    assert schedule.pause(poll_s=2.0, live=False) == pytest.approx(5.0)


def test_a_round_that_fails_is_not_begun_again_at_once(clock: Clock) -> None:
    schedule = PollSchedule()
    with pytest.raises(ValueError, match="bad"), schedule.measuring_round(every_s=30.0):
        raise ValueError("bad")
    assert schedule.until_round() == pytest.approx(30.0)


def test_slurmctld_is_asked_less_and_less_often_while_it_is_silent(clock: Clock) -> None:
    schedule, waits, news = PollSchedule(), [], []
    for _ in range(6):
        news.append(schedule.note_silence())
        waits.append(schedule.pause(poll_s=2.0, live=True))
    assert waits == [1.0, 2.0, 4.0, 8.0, 15.0, 15.0]
    assert news == [True] + 5 * [False]


def test_a_word_about_an_unknown_job_brings_the_next_look_forward_once(clock: Clock) -> None:
    schedule = PollSchedule()
    with schedule.measuring_round(every_s=30.0), schedule.measuring_read():
        pass
    assert not schedule.note_unknown_job()
    assert schedule.pause(poll_s=20.0, live=False) == 1.0
    clock.now += 2.0
    assert schedule.note_unknown_job()


@pytest.mark.parametrize(("cost", "reads"), [(0.01, 100), (0.85, 5)])
def test_all_jobs_are_read_as_often_as_their_cost_allows(
    clock: Clock, cost: float, reads: int
) -> None:
    schedule, begun, done = PollSchedule(), clock.now, 0
    for look in range(100):
        clock.now = begun + 0.25 * look
        if schedule.full_read_is_due():
            done += 1
            with schedule.measuring_full_read():
                clock.work(cost)
    assert done == reads


def test_how_long_slurm_has_answered_counts_from_its_first_answer(clock: Clock) -> None:
    schedule = PollSchedule()
    assert not schedule.note_answer()
    assert schedule.answering_s() == math.inf
    schedule.note_silence()
    clock.now += 8
    assert schedule.answering_s() == 0.0
    assert schedule.note_answer()
    clock.now += 2
    assert not schedule.note_answer()
    assert schedule.answering_s() == 2.0
