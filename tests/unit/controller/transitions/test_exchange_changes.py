"""Two trainings exchange their GPUs: a whole controller on a simulated Slurm."""

from dataclasses import replace

import pytest

from slurm_elastic.core.cluster import JobState
from slurm_elastic.core.reason import Reason
from slurm_elastic.slurm.scontrol import ScontrolError
from tests.support.controller.simulated_slurm import SimulatedSite, short_trials
from tests.support.controller.simulated_training import SimulatedTraining
from tests.unit.controller.transitions.test_failed_changes import play
from tests.unit.placement.test_binding_proposals import Told

GPU_TYPES = {"n1": "a100", "n2": "v100"}
TEXT = short_trials(queue="slurm") + 'in_place = "auto"\n'


class Pair:
    """Job 1 on two a100, job 2 on two v100, and a policy with wishes of both."""

    def __init__(self, monkeypatch, text=TEXT):
        self.policy = Told()
        self.site = SimulatedSite(
            monkeypatch, {"n1": 2, "n2": 2}, text, gpu_types=GPU_TYPES, policy=self.policy
        )
        self.slurm = self.site.slurm
        self.silent = set()
        self.trainings = {}
        for job_id, kind in ((1, "a100"), (2, "v100")):
            self.slurm.submit(job_id, elastic="1-2", gpus=2, gpu_type=kind)
            told = lambda job_id=job_id: job_id not in self.silent  # noqa: E731
            self.trainings[job_id] = SimulatedTraining(self.site, job_id, told=told)
        self.until(lambda: all(t.saved for t in self.trainings.values()))
        assert self.nodes == ("n1", "n2")

    @property
    def nodes(self):
        """Node of each job, None while it does not run."""
        held = (self.slurm.listed[i].allocation for i in (1, 2))
        return tuple(a.nodes[0] if a else None for a in held)

    @property
    def runs(self):
        return tuple(self.slurm.listed[i].run for i in (1, 2))

    def exchange(self):
        """Let the policy want each job on the GPUs of the other."""
        self.policy.wishes = {1: [("v100", 2)], 2: [("a100", 2)]}

    def stay(self):
        self.policy.wishes = {}

    def play(self, seconds):
        play(self.site, list(self.trainings.values()), seconds, tick=0.5)

    def until(self, condition, seconds=300):
        for _ in range(2 * seconds):
            self.play(0.5)
            if condition():
                return
        raise AssertionError([str(line) for line in self.site.log.lines[-20:]])

    def without_controller(self, seconds):
        for _ in range(2 * seconds):
            self.slurm.pass_time(0.5)
            for training in self.trainings.values():
                training.told = lambda: False
                training.step()

    def states(self, job_id):
        """Return the states of the last transition of a job that were entered, and its end."""
        (row, *_) = self.site.ledger.ended_transitions(job_id, self.slurm.listed[job_id].key)
        return row["state"], row["problem"]


@pytest.fixture
def pair(monkeypatch):
    pair = Pair(monkeypatch)
    yield pair
    pair.site.close()


def test_both_are_requeued_once_and_go_on_from_their_checkpoints(pair):
    pair.exchange()
    pair.until(lambda: pair.nodes == ("n2", "n1"))
    pair.play(60)
    assert pair.nodes == ("n2", "n1")
    assert pair.runs == (1, 1)
    for training in pair.trainings.values():
        assert training.trained[0][0] == training.base + 1, "no step is lost"
    rows = pair.site.ledger.transitions()
    assert {row["state"] for row in rows} == {"DONE"}
    assert [r["reason"]["code"] for r in rows] == ["exchanges-gpus"] * 2


def test_a_job_that_does_not_save_costs_the_other_no_requeue(pair):
    pair.silent.add(2)
    pair.exchange()
    pair.until(lambda: pair.site.controller.engine.live)
    pair.until(lambda: not pair.site.controller.engine.live)
    pair.play(10)
    assert pair.runs == (0, 0)
    assert pair.nodes == ("n1", "n2")
    ends = [pair.states(i) for i in (1, 2)]
    assert [state for state, _ in ends] == ["UNDONE", "UNDONE"]
    assert Reason.from_json(ends[0][1]) == Reason("exchange-given-up")
    assert pair.trainings[1].orders.action == "resume"


@pytest.mark.parametrize("state", ["NOTIFY", "REQUEUE"])
def test_a_job_that_is_suspended_after_it_has_saved_goes_on_once_it_is_resumed(
    pair, monkeypatch, state
):
    listed = pair.slurm.listed

    def suspend(job_id):
        listed[job_id] = replace(listed[job_id], state=JobState.SUSPENDED)

    if state == "NOTIFY":
        pair.silent.add(2)
    else:  # Slurm suspends it at the moment of the requeue, which it refuses

        def refused(job):
            suspend(job.job_id)
            raise ScontrolError("requeue: timed out")

        monkeypatch.setattr(pair.slurm, "requeue", refused)
    pair.exchange()
    live = lambda: pair.site.controller.engine.live  # noqa: E731
    pair.until(lambda: 1 in live() and "saved" in live()[1].entered)
    if state == "NOTIFY":
        suspend(1)
    pair.until(lambda: not live(), seconds=20)
    assert not pair.site.controller.engine.reservations
    assert Reason.from_json(pair.states(1)[1]) == Reason("job-suspended")
    pair.stay()
    for job_id in (1, 2):
        listed[job_id] = replace(listed[job_id], state=JobState.RUNNING)
    pair.play(10)
    assert pair.trainings[1].orders.action == "resume"
    assert pair.runs == (0, 0)


@pytest.mark.parametrize("refused", [1, 2])
def test_where_one_job_cannot_be_requeued_the_other_starts_where_it_was(pair, monkeypatch, refused):
    requeue = pair.slurm.requeue

    def no(job):
        if job.job_id == refused:
            raise ScontrolError("requeue: no")
        requeue(job)

    monkeypatch.setattr(pair.slurm, "requeue", no)
    pair.exchange()
    pair.until(lambda: pair.site.controller.engine.live)
    pair.stay()
    pair.until(lambda: not pair.site.controller.engine.live)
    pair.play(10)
    assert pair.nodes == ("n1", "n2")
    assert pair.runs[refused - 1] == 0
    assert [pair.slurm.listed[i].gpus for i in (1, 2)] == [2, 2]


@pytest.mark.parametrize("back", [True, False])
def test_a_controller_that_dies_between_the_halves_leaves_two_running_jobs(pair, monkeypatch, back):
    requeue = pair.slurm.requeue

    def only_first(job):
        if job.job_id == 2:
            raise ScontrolError("requeue: not yet")
        requeue(job)

    monkeypatch.setattr(pair.slurm, "requeue", only_first)
    pair.exchange()
    pair.until(lambda: pair.runs == (1, 0))
    pair.play(1.0)
    if back:
        monkeypatch.setattr(pair.slurm, "requeue", requeue)
        pair.stay()
        pair.site.restart()
        pair.until(lambda: not pair.site.controller.engine.live)
    else:
        pair.without_controller(300)
    assert pair.nodes == ("n1", "n2")
    assert [pair.slurm.listed[i].gpus for i in (1, 2)] == [2, 2]


def test_where_one_job_does_not_leave_its_gpus_in_time_both_go_back(pair, monkeypatch):
    requeue, slurm = pair.slurm.requeue, pair.slurm

    def slowly(job):
        if job.job_id == 2:  # an epilog of minutes
            slurm.listed[2] = replace(slurm.listed[2], state=JobState.COMPLETING)
        else:
            requeue(job)

    monkeypatch.setattr(slurm, "requeue", slowly)
    pair.exchange()
    pair.until(lambda: slurm.listed[2].state is JobState.COMPLETING)
    pair.stay()
    pair.until(lambda: pair.nodes == ("n1", "n2") and slurm.listed[1].state is JobState.RUNNING)
    slurm.send_back(2)
    pair.until(lambda: not pair.site.controller.engine.live)
    pair.play(10)
    assert pair.nodes == ("n1", "n2")
    assert [slurm.listed[i].gpus for i in (1, 2)] == [2, 2]


@pytest.mark.parametrize("state", ["RESERVE", "NOTIFY", "REQUEUE", "DRAIN", "COOL", "VERIFY"])
def test_another_controller_ends_what_was_begun(pair, state):
    pair.exchange()
    live = pair.site.controller.engine.live
    for _ in range(600):
        pair.play(0.5)
        live = pair.site.controller.engine.live
        if any(state in t.entered for t in live.values()):
            break
    assert live
    pair.site.restart()
    pair.until(lambda: pair.nodes == ("n2", "n1"), seconds=900)
    pair.play(60)
    assert pair.nodes == ("n2", "n1")
    assert not pair.site.controller.engine.live


def test_a_job_that_ends_meanwhile_leaves_its_gpus_to_the_other(pair):
    pair.exchange()
    pair.until(lambda: pair.site.controller.engine.live)
    pair.slurm.end(2)
    pair.until(lambda: pair.slurm.listed[1].allocation and pair.nodes[0] == "n2")
    assert pair.slurm.listed[1].state is JobState.RUNNING


def test_neither_begins_where_only_one_change_may_be_under_way(monkeypatch):
    pair = Pair(monkeypatch, TEXT + "max_in_flight = 1\n")
    pair.exchange()
    pair.play(60)
    assert pair.runs == (0, 0)
    assert not pair.site.ledger.transitions()
    pair.site.close()
