"""A job that gets nowhere is held, says why, and goes on when its owner says so."""

import pytest

from slurm_elastic.config.schema import parse
from slurm_elastic.controller.metrics import metric_definitions
from slurm_elastic.controller.metrics.activity_counts import ActivityCounts
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.state.transition import TransitionState
from slurm_elastic.controller.transitions.crash_loop_guard import CrashLoopGuard
from slurm_elastic.core.cluster import JobState, Node, Snapshot
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Report
from tests.support.controller.job_records import FakeScontrol, Log, job, transition


class Site:
    """One job that is run, fails and comes back."""

    def __init__(self, text=""):
        self.ledger, self.scontrol, self.log = Ledger(":memory:"), FakeScontrol(), Log()
        self.store = JobStore(self.ledger)
        self.counts = ActivityCounts()
        self.guard = CrashLoopGuard(
            self.scontrol, parse(text), self.store, self.ledger, self.log, counts=self.counts
        )
        self.run, self.at = 0, 1000.0

    def look(self, seen, *, live=(), act=True, node=True):
        nodes = (Node(name="n1", gpus=4, available=node),)
        snapshot = Snapshot(time=self.at, nodes=nodes, jobs=(seen,))
        self.store.observe(snapshot)
        self.guard.review(snapshot, dict.fromkeys(live), act=act)

    def waits(self, code=0, *, live=(), act=True, node=True, **fields):
        waiting = job(run=self.run, exit_code=code, submit_time=self.at, **fields)
        self.look(waiting, live=live, act=act, node=node)
        return waiting

    def attempt(self, code, *, step=None, **how):
        """From start to queue; returns the job as it then waits."""
        self.at += 100
        running = job({"n1": 4}, run=self.run, start_time=self.at)
        self.look(running)
        said = {"job_id": 7, "run": self.run, "phase": "training"}
        report = Report(**said, step=step, checkpoint_step=step)
        self.store.record_report(report, running, self.at)
        self.run, self.at = self.run + 1, self.at + 20
        return self.waits(code, **how)

    @property
    def verbs(self):
        return [c[0] for c in self.scontrol.calls]


def test_two_attempts_without_progress_are_enough():
    site = Site()
    site.attempt(1, step=5)
    site.attempt(1, step=5)
    assert site.verbs == []
    site.attempt(1, step=5)
    why = Reason("no-progress", attempts=2, step=5, exit_code=1)
    assert site.scontrol.calls == [
        ("hold", "7"), ("update", "7", {"Comment": f"selastic: held, {why}"})
    ]  # fmt: skip
    assert any(f"JobId=7 Action=hold Reason={why}" in line for line in site.log.lines)
    assert site.counts.values(metric_definitions.HOLDS) == {(): 1}
    (row,) = site.ledger.transitions(7)
    assert (row["action"], row["reason"], row["live"]) == ("hold", why.to_json(), False)
    held = site.waits(1, reason="JobHeldUser")
    assert site.verbs == ["hold", "update"]  # and not once more
    assert site.store.records(Snapshot(time=0, nodes=(), jobs=(held,)), {})[7].stopped == why


@pytest.mark.parametrize(
    "how",
    [{"code": 0}, {"code": 1, "node": False}, {"code": 1, "reason": "launch_failed_requeued_held"},
     {"code": 1, "live": [7]}],
    ids=["requeued", "node", "launch", "ours"],
)  # fmt: skip
def test_what_others_did_to_it_does_not_count(how):
    site = Site()
    site.attempt(1, step=5)
    for _ in range(5):
        site.attempt(**how, step=5)
    assert site.verbs == []


def test_a_change_of_ours_that_was_over_before_anybody_looked_does_not_count():
    site = Site()
    site.attempt(1, step=5)
    for number in range(4):
        ours = transition({"n1": 4}, {"n1": 4}, TransitionState.DONE, id=number + 1, run=site.run)
        running = job({"n1": 4}, run=site.run)
        site.look(running)
        site.store.record_end_of_change(ours, running, site.at)
        site.attempt(1, step=5)
    assert site.verbs == []


def test_whoever_requeues_a_job_that_is_over_means_it():
    site = Site()
    for _ in range(5):
        site.attempt(1, step=5, state=JobState.ENDED)
        site.waits(1)
    assert site.verbs == []


@pytest.mark.parametrize("by", ["selastic", "scontrol"])
def test_its_owner_lets_it_go_on(by):
    site = Site()
    for _ in range(3):
        waiting = site.attempt(1, step=5)
    comment = site.scontrol.fields()["Comment"]
    if by == "selastic":
        assert site.store.let_go(waiting)
        site.waits(1, reason="JobHeldUser", comment=comment)
        assert site.scontrol.calls[2:] == [("release", "7"), ("update", "7", {"Comment": ""})]
    else:
        site.waits(1, comment=comment)
        assert site.scontrol.calls[2:] == [("update", "7", {"Comment": ""})]
    assert not site.store.let_go(waiting)
    site.attempt(1, step=5)
    assert site.verbs.count("hold") == 1
    site.attempt(1, step=5)
    assert site.verbs.count("hold") == 2


def test_a_comment_of_its_users_stays():
    site = Site()
    for _ in range(3):
        site.attempt(1, step=5, comment="mine")
    assert site.verbs == ["hold"]


@pytest.mark.parametrize(
    ("text", "act"), [("", False), ("[limits]\nvain_attempts = 0", True)], ids=["observe", "off"]
)
def test_where_it_may_not_it_does_nothing(text, act):
    site = Site(text)
    for _ in range(5):
        site.attempt(1, step=5, act=act)
    assert site.verbs == []
    assert sum("Mode=advise" in line for line in site.log.lines) == (not act)


def test_what_slurm_refuses_is_tried_again():
    site = Site()
    site.attempt(1, step=5)
    site.attempt(1, step=5)
    site.scontrol.refuse = "no"
    site.attempt(1, step=5)
    site.scontrol.refuse = ""
    site.waits(1)
    assert site.verbs == ["hold", "update"]


def test_it_remembers_over_a_restart():
    site = Site()
    site.attempt(1, step=5)
    site.attempt(1, step=5)
    site.waits(1)
    site.store = JobStore(site.ledger)
    site.guard = CrashLoopGuard(site.scontrol, parse(""), site.store, site.ledger, site.log)
    site.attempt(1, step=5)
    assert "hold" in site.verbs
