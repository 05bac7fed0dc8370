"""A training of the library under esrun in a `SimulatedSlurm`, which is changed in place."""

import dataclasses

from slurm_elastic.core.cluster import JobState
from slurm_elastic.core.member_orders import CompanionComment
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Report

#: Seconds between two reports, between two steps, and until ranks in a companion have joined.
_REPORT_S, _STEP_S, _JOIN_S = 2.0, 1.0, 3.0
#: Faults of companions that have joined.
_FAILING = ("fails", "memory")


class SimulatedTraining:
    """One job's esrun and ranks.

    Attributes:
        restarts: whether esrun can start all ranks again on other companions.
        startup_s: from the start of the ranks to their first step.

    Args:
        site: where it runs.
        job_id: the job.
        able: whether the training can be changed in place.
        fault: what goes wrong with companions: `refused` (they cannot be submitted), `silent`
            (nothing is answered), `dies` (ranks never join and their job ends), `fails` (they
            fail soon after they have joined), `memory` (as they lack it), `stays` (it does not
            leave), `forgotten` (Slurm shows those that have ended as running); "": nothing.
        told: returns whether reports arrive now.
        recorded: whether job_submit.lua records companions.
        fails_on: numbers of GPUs on which a rank of the base fails after some steps.
    """

    restarts = False
    startup_s = None

    def __init__(
        self, site, job_id, *, able=True, fault="", told=lambda: True, recorded=True, fails_on=()
    ):
        self.recorded, self.fails_on = recorded, fails_on
        self.site, self.job_id, self.able, self.fault, self.told = site, job_id, able, fault, told
        self.run, self.step_count, self.saved, self.base = -1, 0, 0, 0
        self.last_step = self.reported = 0.0
        self.next_id = 1000 * job_id
        self.attempt_begins()

    def attempt_begins(self):
        #: State of each companion, and when it got it.
        self.companions = {}
        self.change, self.change_state, self.orders = None, "", None
        self.problem: Reason | None = None
        self.lack: Reason | None = None
        self.answered = None
        #: Starts of the program, and GPUs of the present one if it has failed.
        self.starts, self.failed_gpus = 1, None
        self.changed_at, self.former_gpus = None, None
        self.began = self.site.slurm.now
        #: (step, GPUs) of each step of this attempt.
        self.trained = []

    def jobs_of(self, *states):
        return [i for i, (state, _) in self.companions.items() if state in states]

    @property
    def gpus(self):
        """GPUs on which it trains."""
        listed = self.site.slurm.listed
        own = listed[self.job_id].allocation
        return (own.gpus if own else 0) + sum(listed[i].gpus for i in self.jobs_of("joined"))

    def step(self):
        """Carry out the events that are due now."""
        job, now = self.site.slurm.listed[self.job_id], self.site.slurm.now
        if job.state is not JobState.RUNNING or job.run != self.run:
            for job_id in self.jobs_of("submitted", "running", "joined"):  # their script ends: EOF
                self._end(job_id)
            self.companions = {}
        if job.state is not JobState.RUNNING:
            return
        if job.run != self.run:
            self.run, self.base = job.run, self.saved
            self.step_count = self.saved
            self.attempt_begins()
        if self.failed_gpus is not None:
            self._wait_for_answer(job, now)
            return
        self._follow_companions(now)
        self._carry_out(now)
        self._follow_members()
        if self.gpus in self.fails_on and self.trained and self.trained[-1][1] == self.gpus:
            self._fail(job, now)
            return
        if now >= self.last_step + _STEP_S and now > self.began + _JOIN_S:
            self.last_step = now
            self.step_count += 1
            self.trained.append((self.step_count, self.gpus))
            if self.step_count % 10 == 0:
                self.saved = self.step_count
        self._report(job, now)

    def _follow_members(self):
        if self.former_gpus not in (None, self.gpus):
            self.changed_at = self.step_count
        self.former_gpus = self.gpus

    def _fail(self, job, now):
        """End the program: esrun waits if it was on trial, else the job ends."""
        on_trial = self.changed_at is not None and self.saved <= self.changed_at
        gpus = self.gpus
        for job_id in self.jobs_of("submitted", "running", "joined"):
            self._end(job_id)
        if not on_trial and not self.base:
            self.site.slurm.end(self.job_id, 1)
            return
        self.failed_gpus = gpus if on_trial else 0
        self._wait_for_answer(job, now)

    def _wait_for_answer(self, job, now):
        own = self.site.slurm.listed[self.job_id].allocation.gpus
        gpus = {"failed_gpus": self.failed_gpus} if self.failed_gpus else {}
        self._report(
            job, now, phase="ended", exit_code=139, failed_start=self.starts, gpus=own, **gpus
        )
        if self.orders is None or self.orders.failed_start != self.starts:
            return
        if self.orders.on_failure == "restart":
            self.step_count = self.base = self.saved
            self.starts, self.failed_gpus = self.starts + 1, None
            self.changed_at = self.former_gpus = None
            self.began = now
        elif self.orders.on_failure == "end":
            self.site.slurm.end(self.job_id, 1)

    def _follow_companions(self, now):
        for job_id, (state, since) in list(self.companions.items()):
            job = self.site.slurm.listed[job_id]
            if state != "ended" and job.state is JobState.ENDED:
                self._enter(job_id, "ended")
            elif state == "submitted" and job.state is JobState.RUNNING:
                self._enter(job_id, "running")
            elif state == "running" and now > since + _JOIN_S:
                if self.fault == "dies":
                    self._end(job_id)
                else:
                    self._enter(job_id, "joined")
            elif state == "joined" and self.fault in _FAILING and now > since + _JOIN_S:
                if self.fault == "memory":
                    code = "companion-out-of-memory"
                    self.lack = Reason(code, job=str(job_id), gpus=self.gpus, nodes=1)
                self._end(job_id)
        members = self.orders.members if self.orders else None
        mine = [i for i in self.companions if self._change_of(i) == self.change]
        if members is None or members.change != self.change or self.change_state == "failed":
            return
        if members.join and not self.jobs_of_change("submitted", "running"):
            joined = self.jobs_of_change("joined")
            self.change_state = "done" if joined else "failed"
            self.problem = None if len(joined) == len(mine) else Reason("members-ended")

    def jobs_of_change(self, *states):
        return [i for i in self.jobs_of(*states) if self._change_of(i) == self.change]

    def _change_of(self, job_id):
        return CompanionComment.parse(self.site.slurm.listed[job_id].comment).change

    def _carry_out(self, now):
        members = self.orders.members if self.orders else None
        if members is None or self.fault == "silent":
            return
        if members.change != self.change:
            self.change, self.change_state, self.problem = members.change, "", None
            if members.join and self.fault == "refused":
                self.change_state = "failed"
                self.problem = Reason("sbatch-failed", error="Access denied")
            elif members.join:
                for gpus in members.join:
                    self._submit(gpus)
                self.change_state = "submitted"
        if members.cancel and self.change_state != "done":
            for job_id in self.jobs_of_change("submitted", "running", "joined"):
                self._end(job_id)
            self.change_state = "failed"
        if self.fault == "stays":
            return
        for job_id in members.leave:
            if self.companions.get(job_id, ("ended", 0))[0] != "ended":
                self._end(job_id)
        if not members.join:
            self.change_state = "done"

    def _submit(self, gpus):
        self.next_id += 1
        comment = CompanionComment(base=self.job_id, run=self.run, change=self.change)
        self.site.slurm.submit(
            self.next_id, gpus=gpus, gpu_type=self.orders.members.gpu_type, reason="JobHeldUser",
            priority=0, comment=str(comment), companion=comment,
            companion_recorded=self.recorded,
        )  # fmt: skip
        self.companions[self.next_id] = ("submitted", self.site.slurm.now)

    def _enter(self, job_id, state):
        self.companions[job_id] = (state, self.site.slurm.now)

    def _end(self, job_id):
        is_over = self.site.slurm.listed[job_id].state is JobState.ENDED
        if not is_over and self.fault != "forgotten":
            self.site.slurm.end(job_id)
        self._enter(job_id, "ended")

    def _report(self, job, now, **ended):
        notice = None
        if self.orders and self.orders.action == "notice" and self.answered != self.orders.notice:
            self.answered = notice = self.orders.notice
            self.saved = self.step_count
        if not self.told() or (now < self.reported + _REPORT_S and notice is None):
            return
        self.reported = now
        rows = tuple(
            (i, self.site.slurm.listed[i].gpus, state) for i, (state, _) in self.companions.items()
        )
        report = Report(
            job_id=self.job_id, run=self.run, phase="training" if notice is None else "saved",
            gpus=self.gpus, gpu_type=job.allocation.gpu_type, step=self.step_count,
            step_time_s=1.0 / self.gpus, steps_measured=5, global_batch=64, notice=notice,
            checkpoint_step=self.saved or None, resumed_from=self.base or None, proven=True,
            in_place=self.able, not_in_place="" if self.able else "stages",
            change=self.change, change_state=self.change_state,
            change_reason=self.lack or self.problem,
            restarts=self.restarts, startup_s=self.startup_s,
            companions=rows, pause_s=0.02 if self.change is not None else None,
        )  # fmt: skip
        self.orders = self.site.report(dataclasses.replace(report, **ended))
