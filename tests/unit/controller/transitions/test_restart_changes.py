"""A program that cannot regroup gets other companions: a whole controller on a simulated Slurm."""

import pytest

from slurm_elastic.core.cluster import JobState
from tests.support.controller.simulated_slurm import SimulatedSite, short_trials
from tests.support.controller.simulated_training import SimulatedTraining
from tests.unit.controller.transitions.test_in_place_changes import (
    kinds,
    play,
    running_companions,
    until,
)

AUTO = short_trials() + 'in_place = "auto"\nmin_gain = 0.01\n'


class RestartedProgram(SimulatedTraining):
    """One job's esrun, which starts its ranks again at each change; fault `deaf`: saves nothing."""

    restarts = True
    failed_in_companions = False

    def __init__(self, site, job_id, **more):
        super().__init__(site, job_id, able=False, **more)
        #: Number of GPUs of each start.
        self.started_on = []

    def attempt_begins(self):
        super().attempt_begins()
        self.restarted = None

    def _follow_companions(self, now):
        members = self.orders.members if self.orders else None
        begun = members is not None and members.change == self.change
        ready = {i for i, (s, _) in self.companions.items() if s == "running"}
        due = begun and members.restart == "now" and self.restarted != self.change
        for job_id in ready:  # they wait until the ranks have saved
            if not due:
                self._enter(job_id, "running")
        if due and not self.jobs_of_change("submitted"):
            self.restarted = self.change
            for job_id in ready:
                self._enter(job_id, "joined")
            for job_id in members.leave:
                self._end(job_id)
            self.step_count, self.began, self.startup_s = self.saved, now, None
            self.change_state, self.failed_gpus = "done", None
            self.starts += 1
            self.started_on.append(self.gpus)
        elif self.started_on:
            self.startup_s = 3.0 if now > self.began + 3.0 else None
        joined = set(self.jobs_of("joined"))
        super()._follow_companions(now)
        if joined - set(self.jobs_of("joined")):  # lost: from the last checkpoint
            self.step_count, self.began = self.saved, now

    def _carry_out(self, now):
        members, change = self.orders.members if self.orders else None, self.change
        if members is not None and not members.join and members.change != change:
            self.change, self.change_state = members.change, "leaving"
        elif members is not None and members.join:
            super()._carry_out(now)

    def _fail(self, job, now):
        self.failed_gpus = 0
        self._wait_for_answer(job, now)

    def _wait_for_answer(self, job, now):
        """Wait, with the companions, until the controller orders others."""
        self._follow_companions(now)
        self._carry_out(now)
        if self.failed_gpus is not None:
            more = {"failed_in_companions": self.failed_in_companions}
            self._report(job, now, phase="ended", exit_code=3, failed_start=self.starts, **more)

    def _report(self, job, now, **ended):
        if self.fault == "deaf" and self.orders and self.orders.action == "notice":
            self.answered = self.orders.notice
        super()._report(job, now, **ended)


class CopyingProgram(RestartedProgram):
    """One whose batch script copies what the ranks read to its own nodes, so companions lack it."""

    def __init__(self, site, job_id, **more):
        super().__init__(site, job_id, **more)
        self.fails_anyway, self.fails_on = self.fails_on, self

    def __contains__(self, gpus):
        """Return whether it fails on these GPUs now."""
        in_companions = bool(self.jobs_of("joined"))
        self.failed_in_companions = in_companions
        return in_companions or gpus in self.fails_anyway


@pytest.fixture
def site(monkeypatch):
    site = SimulatedSite(monkeypatch, {"n1": 2, "n2": 2}, AUTO)
    yield site
    site.close()


def started(site, **fields):
    site.slurm.submit(7, elastic="2-4", gpus=2)
    return RestartedProgram(site, 7, **fields)


def grown(site, program):
    until(site, [program], lambda: program.gpus == 4)
    until(site, [program], lambda: not site.controller.engine.live)


def test_it_grows_and_shrinks_without_a_requeue(site):
    program = started(site)
    grown(site, program)
    assert program.started_on == [4]
    steps = [step for step, _ in program.trained]
    assert steps == list(range(1, len(steps) + 1)), "it has saved before"
    play(site, [program], 20)
    site.slurm.submit(8, gpus=2)
    until(site, [program], lambda: site.slurm.listed[8].state is JobState.RUNNING)
    until(site, [program], lambda: not site.controller.engine.live)
    assert program.started_on == [4, 2]
    assert not running_companions(site)
    assert site.slurm.listed[7].run == 0
    rows = [("restart", "grow", "DONE"), ("restart", "shrink", "DONE")]
    assert kinds(site) == rows


def test_within_its_node_it_grows_by_a_requeue(monkeypatch):
    """Base and companion on one node would have two ranks with LOCAL_RANK=0 there."""
    site = SimulatedSite(monkeypatch, {"n1": 4}, AUTO)
    program = started(site)
    grown(site, program)
    assert kinds(site)[-1] == ("requeue", "grow", "DONE")
    assert not running_companions(site)
    site.close()


def test_what_it_costs_is_measured(site):
    program = started(site)
    grown(site, program)
    play(site, [program], 20)
    (row,) = site.ledger.transitions()
    assert row["seconds"]["total"] >= row["seconds"]["pause"] > 2.5
    record = site.controller.view.records[7]
    assert record.ranks_restart_s == row["seconds"]["total"]
    assert record.restart_s is None


def test_a_job_that_does_not_save_is_left_alone(site):
    program = started(site, fault="deaf")
    until(site, [program], lambda: ("restart", "grow", "UNDONE") in kinds(site))
    (row,) = site.ledger.transitions()
    assert row["problem"]["code"] == "no-checkpoint"
    assert program.started_on == []
    assert not running_companions(site)
    assert site.slurm.listed[7].run == 0


def test_where_companions_are_refused_it_is_requeued(site):
    program = started(site, fault="refused")
    until(site, [program], lambda: site.slurm.listed[7].run == 1)
    until(site, [program], lambda: not site.controller.engine.live)
    assert [row[0] for row in kinds(site)] == ["restart", "requeue"]


def test_a_lost_companion_is_replaced(site):
    program = started(site)
    grown(site, program)
    (companion,) = running_companions(site)
    site.slurm.cancel(companion)
    until(site, [program], lambda: program.gpus == 2)
    until(site, [program], lambda: program.gpus == 4)
    assert site.slurm.listed[7].run == 0


def test_a_program_that_fails_goes_back_without_a_requeue(site):
    program = started(site, fails_on=(4,))
    until(site, [program], lambda: program.started_on == [4, 2], seconds=900)
    until(site, [program], lambda: not site.controller.engine.live)
    play(site, [program], 30)
    assert site.slurm.listed[7].run == 0
    assert [(gpus, str(why.code)) for _, gpus, why in site.controller.view.records[7].barred] == [
        (4, "program-failed")
    ]
    rows = [("restart", "grow", "DONE"), ("restart", "shrink", "DONE")]
    assert kinds(site)[:2] == rows
    assert 4 not in program.started_on[1:], "three are tried next"


def test_a_program_that_fails_in_companions_only_is_requeued_and_its_size_not_barred(site):
    site.slurm.submit(7, elastic="2-4,sizes=2:4", gpus=2)
    program = CopyingProgram(site, 7)
    until(site, [program], lambda: program.started_on == [4, 2], seconds=900)
    assert not site.controller.view.records[7].barred
    until(site, [program], lambda: site.slurm.listed[7].run == 1, seconds=900)
    until(site, [program], lambda: program.gpus == 4 and not running_companions(site))
    site.restart()
    play(site, [program], 60)
    record = site.controller.view.records[7]
    assert [row[0] for row in kinds(site)] == ["restart", "restart", "requeue"]
    assert (record.not_in_place.code, record.restarts, record.barred) == (
        "companions-unsuitable", False, (),
    )  # fmt: skip
    site.controller.store.entry(site.controller.job(7)).clear_failures()  # as `selastic release`
    play(site, [program], 5)
    assert site.controller.view.records[7].restarts


def test_a_size_that_fails_after_the_requeue_as_well_is_barred(site):
    site.slurm.submit(7, elastic="2-4,sizes=2:4", gpus=2)
    program = CopyingProgram(site, 7, fails_on=(4,))
    until(site, [program], lambda: site.slurm.listed[7].run == 1, seconds=900)
    until(site, [program], lambda: site.slurm.listed[7].run == 2, seconds=900)
    play(site, [program], 60)
    record = site.controller.view.records[7]
    assert [(gpus, why.code) for _, gpus, why in record.barred] == [(4, "program-failed")]
    assert record.restarts, "companions were not the cause"


@pytest.mark.parametrize("state", ["RESERVE", "ASK", "PIN", "START", "NOTIFY", "JOIN"])
def test_a_controller_that_dies_leaves_a_job_that_trains(site, state):
    program = started(site)

    def reached():
        live = site.controller.engine.live
        return any(t.state.value == state for t in live.values())

    until(site, [program], reached, tick=0.1)
    site.restart()
    grown(site, program)
    assert site.slurm.listed[7].run == 0
    assert len(running_companions(site)) == 1
