"""Jobs on one node in simulations: slowed by the truth, learned from step times, kept apart."""

import dataclasses

import pytest

from slurm_elastic.config.placement_settings import NeighbourSettings
from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.simulator.truth.neighbour_slowdown import (
    NeighbourSlowdown,
    NeighbourSlowdownError,
    read,
)
from tests.support.decisions.synthetic_applications import synthetic_application
from tests.unit.simulator.test_simulation import Scripted, job, run

PROFILES = {
    name: synthetic_application(name, seconds=2000.0, restart_s=20.0) for name in ("net", "vit")
}
LIKE_HURTS = NeighbourSlowdown({("net", "net"): 0.5, ("vit", "vit"): 0.5})
TWO = [(0, "t4", 2)]


def jcts(*jobs, mode="observe", truth=LIKE_HURTS, clock="round", cluster="t4:3x4"):
    """Return the completion time of each job, all of two GPUs."""
    result = run(
        *jobs,
        policy=Scripted(**{j.name: TWO for j in jobs}),
        cluster=cluster,
        profiles=PROFILES,
        neighbours=truth,
        clock=clock,
        config=Config(
            controller=ControllerSettings(policy="scripted"),
            neighbours=NeighbourSettings(mode=mode),
        ),
    )
    return {j.name: j.jct_s for j in result.jobs}


@pytest.mark.parametrize("clock", ["round", "event"])
def test_neighbours_slow_each_other_down(clock):
    jobs = [job("net-1"), job("net-2")]
    alone = jcts(*jobs, truth=NeighbourSlowdown({}), clock=clock)["net-1"]
    shared = jcts(*jobs, clock=clock)["net-1"]
    assert shared == pytest.approx(2 * alone, rel=0.1)
    pair = [job("net-1"), dataclasses.replace(job("vit-1"), application="vit")]
    assert jcts(*pair, clock=clock)["net-1"] == pytest.approx(alone, rel=0.05)


def test_a_pair_that_hurts_is_moved_apart_once_it_is_known():
    jobs = [job("net-1"), job("net-2", time_s=300.0)]  # the first is alone for a while
    together, apart = jcts(*jobs), jcts(*jobs, mode="act")
    assert max(apart.values()) < 0.8 * max(together.values())


def test_a_later_job_starts_beside_the_neighbour_that_does_not_hurt():
    jobs = [
        job("net-1"),
        job("net-2", time_s=300.0),
        dataclasses.replace(job("vit-1", time_s=600.0), application="vit"),
        job("net-3", time_s=700.0),
    ]
    together, apart = jcts(*jobs), jcts(*jobs, mode="act")
    assert apart["net-3"] == pytest.approx(jcts(job("net-3"))["net-3"], rel=0.05)
    assert sum(apart.values()) < sum(together.values())


def test_a_file_of_slowdowns(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("application,other,speed\nnet,vit,0.5\n")
    assert read(path).speed("net", ["vit", "vit", "net"]) == 0.25
    assert read(path).speed("vit", ["net"]) == 1.0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("application,other\n", "column speed is missing"),
        ("application,other,speed\nnet,vit,2\n", "pairs.csv:2: speed '2' is invalid"),
        (
            "application,other,speed\nnet,vit\n",
            "pairs.csv:2: 2 cells under 3 columns; each row needs one cell per column",
        ),
    ],
)
def test_a_file_that_is_wrong(tmp_path, text, problem):
    path = tmp_path / "pairs.csv"
    path.write_text(text)
    with pytest.raises(NeighbourSlowdownError, match=problem):
        read(path)
    with pytest.raises(NeighbourSlowdownError):
        read(tmp_path / "missing.csv")
