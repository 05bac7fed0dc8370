"""Two kinds of trainings that contend for a link: known from reports, before a pair has met."""

import itertools

import pytest

from slurm_elastic.cli.decisions.explain import explained
from slurm_elastic.config import schema
from slurm_elastic.controller.neighbours.neighbour_learning import NeighbourLearning
from slurm_elastic.controller.queries import dispatch
from slurm_elastic.controller.queries.view import View, Viewer
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.core.report import Report
from slurm_elastic.models.colocation.shared_speeds import MeasuredUse, SharedSpeeds
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.round import decide_round
from tests.support.decisions.synthetic_clusters import Cluster, node

ROUND_S = 30.0
#: Job, and the part of the link that its exchange takes while it is alone. All keep as many CPUs
#: busy, so these do not tell them apart.
HEAVY, LIGHT = {1: 0.9, 3: 0.8}, {5: 0.05, 7: 0.1}
NEW_HEAVY, NEW_LIGHT = {9: 0.85}, {11: 0.08}
PARTS = HEAVY | LIGHT | NEW_HEAVY | NEW_LIGHT
LINK_BYTES_S = 1.25e9


class Site:
    """Nodes of four GPUs behind links that two exchanges at once fill, and a controller."""

    def __init__(self, *, reports_bytes=True):
        self.config = schema.parse('[neighbours]\nmode = "act"\n[controller]\nqueue = "controller"')
        self.learning = NeighbourLearning(self.config, Ledger(":memory:"))
        self.cluster = Cluster([node(f"g{i}") for i in range(1, 5)])
        self.reports_bytes = reports_bytes

    def place(self, **jobs):
        """Set the jobs: names of their first of two nodes, "" for a pending one, by `jID`."""
        self.cluster.jobs, self.cluster.records = [], {}
        for name, first in jobs.items():
            nodes = {first: 2, f"g{int(first[1:]) + 1}": 2} if first else None
            self.cluster.add(int(name[1:]), elastic="4-4", on=nodes, gpus=4)

    def step_s(self, job_id):
        """Return the time of a step; all jobs are on the same nodes and share their link."""
        total = sum(PARTS[job.job_id] for job in self.cluster.jobs)
        return 1.0 + 0.8 * PARTS[job_id] * max(0.0, total - 1.0)

    def run(self, rounds=8):
        for _ in range(rounds):
            self.learning.follow(self.cluster.snapshot())
            for at, job in itertools.product((10.0, 20.0, 29.0), self.cluster.jobs):
                sent = int(PARTS[job.job_id] * LINK_BYTES_S) if self.reports_bytes else None
                report = Report(
                    job_id=job.job_id, run=0, phase="training", gpus=4, gpu_type="a100", nodes=2,
                    global_batch=32, step_time_s=self.step_s(job.job_id), steps_measured=9,
                    busy_cpus=1.0, application=f"net{job.job_id}", exchange_bytes=sent,
                )  # fmt: skip
                self.learning.report(report, job, self.cluster.time + at)
            self.cluster.time += ROUND_S
        self.learning.follow(self.cluster.snapshot())

    def learn(self):
        for job_id in PARTS:
            self.place(**{f"j{job_id}": "g1"})
            self.run()
        for pair in itertools.combinations(HEAVY | LIGHT, 2):
            self.place(**{f"j{job_id}": "g1" for job_id in pair})
            self.run()

    def start(self, job_id):
        """Return where a pending job starts."""
        snapshot = self.cluster.snapshot()
        self.learning.follow(snapshot)
        for job in snapshot.jobs:  # each states its application
            stated = Report(
                job_id=job.job_id, run=0, phase="starting", application=f"net{job.job_id}"
            )
            self.learning.report(stated, job, snapshot.time)
        plan, _ = decide_round(
            snapshot, self.cluster.records, config=self.config, policy=FairShare(self.config),
            state={}, neighbours=self.learning.table(snapshot),
        )  # fmt: skip
        return plan.decision[job_id].target.nodes


@pytest.fixture(scope="module")
def site():
    site = Site()
    site.learn()
    return site


@pytest.mark.parametrize(("new", "place"), [(9, ("g3", "g4")), (11, ("g1", "g2"))])
def test_a_training_that_fills_the_link_starts_apart_from_those_that_do(site, new, place):
    site.place(j1="g1", j5="g3", **{f"j{new}": ""})
    assert site.start(new) == place


def test_without_bytes_in_the_reports_the_pair_would_have_to_meet_first():
    site = Site(reports_bytes=False)
    site.learn()
    site.place(j1="g1", j5="g3", j9="")
    assert site.start(9) == ("g1", "g2")


def test_explain_names_the_network(site):
    site.place(j9="g1", j1="g1")
    site.start(9)
    snapshot = site.cluster.snapshot()
    view = View(
        snapshot=snapshot,
        records=site.cluster.records,
        neighbours=site.learning.neighbours(snapshot),
    )
    answer = dispatch.answer("explain", view, Viewer(), {"job_ids": (9,)}, history=[], segments=[])
    (row,) = answer["neighbours"]
    assert (row["resource"], row["measured"]) == ("network", 0)
    text = next(text for text in explained(answer) if "Neighbours" in text)
    assert "slower (predicted, " in text
    assert text.endswith("; they contend for the network.")
    # An answer of an older controller has no resource.
    old = {**answer, "neighbours": [{k: v for k, v in row.items() if k != "resource"}]}
    assert "contend" not in "\n".join(explained(old))


@pytest.mark.parametrize(
    ("bytes_", "step_s"), [(2**50, 1e-300), (2**50, 1e6), (0, 1.0), (None, 1.0)]
)
def test_reports_that_claim_anything_teach_nothing_that_breaks(bytes_, step_s):
    site = Site()
    site.place(j1="g1")
    for at in range(12):
        site.learning.follow(site.cluster.snapshot())
        report = Report(
            job_id=1, run=0, phase="training", gpus=4, gpu_type="a100", nodes=2, global_batch=32,
            step_time_s=step_s, steps_measured=9, busy_cpus=2.0**16, read_bytes_s=1e12,
            exchange_bytes=bytes_,
        )  # fmt: skip
        job = site.cluster.jobs[0]
        site.learning.report(Report.from_wire(report.to_wire()), job, site.cluster.time + 15)
        site.cluster.time += ROUND_S * (at + 1)
    site.learning.follow(site.cluster.snapshot())
    learned = site.learning.learner.speeds.to_json()
    assert SharedSpeeds.of_json(learned).to_json() == learned
    assert all(0 <= row[1] <= 1e12 for row in learned["sent"])


def test_what_a_profile_shows_counts_until_the_job_is_measured_alone():
    site = Site()
    site.place(j1="g1")
    (job,) = site.cluster.jobs
    site.learning.teach(job, "net1", MeasuredUse(cpus=3.0, memory_bytes_s=2e9))
    assert site.learning.learner.speeds.to_json()["use"] == []
    site.learning.follow(site.cluster.snapshot())
    known = site.learning.learner.speeds.to_json()
    name = f"{job.user}/net1"
    assert (known["use"], known["memory"]) == ([[name, 3.0, False]], [[name, 2e9, False]])
    site.run()
    known = site.learning.learner.speeds.to_json()
    assert (known["use"], known["memory"]) == ([[name, 1.0, True]], [[name, 2e9, False]])


def test_what_jobs_send_is_kept_by_application(site):
    sent = {row[0]: row[1] for row in site.learning.learner.speeds.to_json()["sent"]}
    assert sent["bob/net1"] == pytest.approx(0.9 * LINK_BYTES_S, rel=0.01)
    assert len(sent) == len(PARTS)
