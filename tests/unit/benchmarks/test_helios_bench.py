"""benchmarks.helios: its replay meets the figures of another implementation."""

import pytest

from benchmarks.helios import __main__ as helios
from benchmarks.helios import sleep_replay
from benchmarks.helios.rigid_replay import ReplayedJob, ReplayOrder, RigidReplay
from tests.support import published_data


def job(submitted, seconds, gpus, estimate_s=None):
    return ReplayedJob(
        submitted=submitted, seconds=seconds, gpus=gpus, estimate_s=estimate_s or seconds
    )


def waits(jobs, nodes, **order):
    free = [8] * nodes
    outcomes = RigidReplay(jobs, 8, free, ReplayOrder(**order)).run()
    assert free == [8] * nodes or len(outcomes) == len(jobs)
    return sorted(o.waited_s for o in outcomes)


def test_the_first_without_room_stops_the_queue_unless_there_is_backfill():
    jobs = [job(0.0, 100.0, 6), job(1.0, 50.0, 8), job(2.0, 20.0, 2)]
    published = waits(jobs, 1, key=lambda j: j.submitted)
    assert published == [0.0, 99.0, 148.0]
    filled = waits(jobs, 1, key=lambda j: j.submitted, bound=lambda j, age: j.seconds - age)
    assert filled == [0.0, 0.0, 99.0]


def test_large_jobs_take_whole_nodes():
    jobs = [job(0.0, 100.0, 1), job(1.0, 10.0, 12), job(1.0, 10.0, 16)]
    assert waits(jobs, 2, key=lambda j: j.submitted) == [0.0, 0.0, 99.0]


@pytest.mark.parametrize("order", ["fifo", "qssf"])
def test_philly_at_half_the_nodes(order):
    folder = published_data.require("helios", helios.JOBS, helios.NODES)
    summary = helios.summary(helios.replay(helios.read(folder), order, 2))
    completion_s, waiting_s = helios.REFERENCE[2, order]
    assert summary["avg_completion_s"] == pytest.approx(completion_s, abs=1.0)
    assert summary["avg_waiting_s"] == pytest.approx(waiting_s, abs=1.0)


def test_sleeping_nodes_meet_the_figures_of_another_implementation():
    folder = published_data.require("helios", *sleep_replay.FILES)
    sleep = sleep_replay.figures(sleep_replay.read(folder))
    rows = {(r["days"], r["rule"]): r for r in sleep["rules"]}
    for name, (ratio, lack) in sleep_replay.KNOWN.items():
        row = rows[14, name]
        if ratio:
            assert row["used_per_awake"] == pytest.approx(ratio, abs=0.01)
            assert row["lacking"] == lack
    ours = rows[14, "ours"]
    assert ours["used_per_awake"] >= 92
    assert ours["lacking"] <= 50
    assert sleep["forecast_error"]["ours"] < sleep["known_error"]
