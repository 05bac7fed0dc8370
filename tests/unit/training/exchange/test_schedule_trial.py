"""The choice of the schedule of exchange."""

from __future__ import annotations

import pytest

from slurm_elastic.training.exchange.exchange_schedule import candidates, check_overlap, overlap_on
from slurm_elastic.training.exchange.schedule_trial import ScheduleTrial

#: Seconds without the exchange, and of the exchange alone.
ALONE_S, EXCHANGE_S = 1.0, 0.5


def run(trial: ScheduleTrial, exposed: dict[int, float], steps: int = 60) -> list[int]:
    """Return the numbers of the schedules of the steps; a request counts from the next step on."""
    number, numbers = 0, []
    for _ in range(steps):
        requested = trial.requested
        waited = EXCHANGE_S * exposed[number]
        trial.observe(number, pass_s=ALONE_S + waited, waited_s=waited)
        numbers.append(number)
        if requested != number and trial.exchange_s is None:
            trial.exchange_s = EXCHANGE_S
        number = requested
    return numbers


def test_the_fastest_schedule_is_kept_after_each_was_used_twice() -> None:
    trial = ScheduleTrial((0, 1, 2), warm_up=4, turn=2)
    numbers = run(trial, {0: 1.2, 1: 0.6, 2: 0.3})
    changes = [b for a, b in zip([None, *numbers], numbers, strict=False) if a != b]
    assert changes == [0, 1, 2, 1, 0, 2]
    assert trial.exposed == pytest.approx(0.3)
    assert trial.gain == pytest.approx(1.15 / 1.6)
    assert not trial.running


def test_a_schedule_that_saves_less_than_two_percent_is_not_kept() -> None:
    trial = ScheduleTrial((0, 1, 2))
    assert run(trial, {0: 1.0, 1: 0.97, 2: 1.3}, steps=90)[-1] == 0
    assert trial.exposed == pytest.approx(1.0)


def test_without_a_choice_the_only_other_schedule_is_used() -> None:
    trial = ScheduleTrial((0, 2), warm_up=3)
    assert set(run(trial, {0: 1.0, 2: 5.0})[5:]) == {2}
    assert trial.exposed == pytest.approx(5.0)
    alone = ScheduleTrial((0,))
    assert set(run(alone, {0: 1.0})) == {0}
    assert alone.exposed is None, "the exchange alone was never measured"


def test_a_short_exchange_is_not_worth_a_trial() -> None:
    trial = ScheduleTrial((0, 1, 2), warm_up=2)
    trial.exchange_s = 0.01
    for _ in range(20):
        trial.observe(trial.requested, pass_s=1.0, waited_s=0.01)
    assert (trial.requested, trial.running) == (0, False)


def test_a_stopped_trial_stays_with_the_flat_schedule() -> None:
    trial = ScheduleTrial((0, 2), warm_up=1)
    run(trial, {0: 1.0, 2: 0.5}, steps=9)
    trial.stop()
    assert run(trial, {0: 1.0, 2: 0.5})[-1] == 0


def test_buckets_as_large_as_all_gradients_are_not_tried() -> None:
    assert candidates("none", 1 << 40) == (0,)
    assert candidates("auto", 100_000) == (0,)
    assert candidates("auto", 1 << 40) == (0, 1, 2, 3, 4)
    assert candidates("buckets", 1 << 20) == (0,)
    assert candidates("buckets", 1 << 21) == (0, 2)


def test_on_gpus_buckets_have_to_be_asked_for() -> None:
    assert candidates(overlap_on("cuda", "auto"), 1 << 40) == (0,)
    assert candidates(overlap_on("cuda", "buckets"), 1 << 40) == (0, 2)
    assert overlap_on("cpu", "auto") == "auto"


def test_an_unknown_value_of_overlap_is_refused() -> None:
    with pytest.raises(ValueError, match="overlap: 'yes' is invalid: expected one of none, b"):
        check_overlap("yes")
