"""From reports of jobs on one node to placement and `explain`."""

import dataclasses

import pytest

from slurm_elastic.cli.decisions.explain import explained
from slurm_elastic.config import schema
from slurm_elastic.controller.neighbours.neighbour_learning import NeighbourLearning
from slurm_elastic.controller.queries import dispatch
from slurm_elastic.controller.queries.view import View, Viewer
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.core.report import Report
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.round import decide_round
from slurm_elastic.rpc.decision_answers import ExplainAnswer
from tests.support.controller.typed_answers import mismatches
from tests.support.decisions.synthetic_clusters import Cluster, node

ROUND_S = 30.0


class Site:
    """Two jobs whose steps take twice as long beside each other, and a controller."""

    def __init__(self, mode="act", ledger=None):
        self.config = schema.parse(f'[neighbours]\nmode = "{mode}"')
        self.ledger = ledger or Ledger(":memory:")
        self.learning = NeighbourLearning(self.config, self.ledger)
        self.cluster = Cluster([node("g1"), node("g2")])
        self.cluster.add(1, elastic="2-2", on={"g1": 2})
        self.cluster.add(2, elastic="2-2", on={"g2": 2})
        self.cluster.add(3, on={"g2": 2})

    def move(self, job_id, node_name):
        jobs = self.cluster.jobs
        held = dataclasses.replace(jobs[job_id - 1].allocation, shares=((node_name, 2),))
        jobs[job_id - 1] = dataclasses.replace(jobs[job_id - 1], allocation=held)

    def run(self, rounds=8):
        for _ in range(rounds):
            self.learning.follow(self.cluster.snapshot())
            for at in (10.0, 20.0, 29.0):
                for job in self.cluster.jobs[:2]:
                    both = self.cluster.jobs[0].allocation == self.cluster.jobs[1].allocation
                    report = Report(
                        job_id=job.job_id, run=0, phase="training", gpus=2, gpu_type="a100",
                        global_batch=32, step_time_s=2.0 if both else 1.0, steps_measured=9,
                        busy_cpus=4.0, application=f"training{job.job_id}",
                    )  # fmt: skip
                    self.learning.report(report, job, self.cluster.time + at)
            self.cluster.time += ROUND_S
        self.learning.follow(self.cluster.snapshot())

    def plan(self):
        snapshot = self.cluster.snapshot()
        plan, _ = decide_round(
            snapshot, self.cluster.records, config=self.config, policy=FairShare(self.config),
            state={}, neighbours=self.learning.table(snapshot),
        )  # fmt: skip
        return plan

    def answer(self, viewer=None):
        snapshot = self.cluster.snapshot()
        view = View(
            snapshot=snapshot, records=self.cluster.records,
            neighbours=self.learning.neighbours(snapshot),
        )  # fmt: skip
        answer = dispatch.answer(
            "explain", view, viewer or Viewer(), {"job_ids": (1,)}, history=[], segments=[]
        )
        assert not mismatches(answer, ExplainAnswer)
        return answer


@pytest.fixture
def site():
    site = Site()
    site.cluster.jobs[2:] = []
    site.run()  # job 1 alone, and job 2
    site.move(2, "g1")
    site.run()
    return site


def line(answer):
    return next(text for text in explained(answer) if "Neighbours" in text)


def test_explain_names_the_neighbour_and_the_slowdown(site):
    answer = site.answer()
    (row,) = answer["neighbours"]
    assert (row["display_id"], row["user"], row["nodes"]) == ("2", "alice", ["g1"])
    assert 0.5 < row["speed"] < 0.65
    assert "shares node g1 with job 2 of alice: 4" in line(answer)


def test_where_owners_are_private_the_neighbour_has_none(site):
    bob = Viewer(uid=1001, operator=False, private=True)
    (row,) = site.answer(bob)["neighbours"]
    assert (row["display_id"], row["user"]) == ("2", None)
    assert "alice" not in "\n".join(explained(site.answer(bob)))


def test_the_pair_is_separated_and_stays_apart(site):
    (change,) = site.plan().changes
    assert change.reason.code == "leaves-neighbour"
    site.cluster.carry_out(site.plan())
    assert not site.plan().changes
    site.run()
    assert not site.plan().changes


def test_a_new_controller_knows_it_from_the_ledger(site):
    again = Site(ledger=site.ledger)
    again.cluster = site.cluster
    again.run(1)  # jobs state their applications
    assert [c.reason.code for c in again.plan().changes] == ["leaves-neighbour"]


@pytest.mark.parametrize(("mode", "rows"), [("observe", 1), ("off", 0)])
def test_other_modes_change_nothing(site, mode, rows):
    other = Site(mode, ledger=site.ledger)
    other.cluster = site.cluster
    other.run(1)
    assert not other.plan().changes
    assert len(other.answer()["neighbours"]) == rows


def test_without_measurements_explain_says_so():
    site = Site()
    site.move(2, "g1")
    site.run(1)
    assert "is not known yet" in line(site.answer())
    assert not site.plan().changes


def test_memory_that_jobs_with_one_gpu_report_is_known_to_the_next_controller():
    ledger = Ledger(":memory:")
    learning = NeighbourLearning(schema.parse(""), ledger)
    cluster = Cluster([node("g1"), node("g2")])
    cluster.add(1, elastic="1-2", on={"g1": 1})
    cluster.add(2, elastic="1-2", on={"g2": 2})
    learning.follow(cluster.snapshot())
    for job, peak in zip(cluster.jobs, (30, 10), strict=True):
        report = Report(
            job_id=job.job_id, run=0, phase="training", gpus=job.gpus, gpu_type="a100",
            global_batch=32, step_time_s=1.0, steps_measured=9, application=f"training{job.job_id}",
            peak_memory_bytes=peak, gpu_bytes=40,
        )  # fmt: skip
        learning.report(report, job, cluster.time)
    cluster.time += 600.0
    learning.follow(cluster.snapshot())
    later = NeighbourLearning(learning.config, ledger).memory
    names = [name for name, *_ in later.to_json()]
    assert [name.rpartition("training")[2] for name in names] == ["1"]
    assert not later.fits("a100", names[0], names[0])
