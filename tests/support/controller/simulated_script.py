"""A program under esrun in a `SimulatedSlurm`, which works or fails by its shape."""

from slurm_elastic.core.cluster import JobState
from slurm_elastic.core.report import Report

#: Seconds from the start of an attempt to the program's own start, and between two checkpoints.
_START_S, _SAVE_S = 3.0, 10.0


class SimulatedScript:
    """One job's program and its esrun.

    Args:
        site: where it runs.
        job_id: the job.
        fails: how it behaves by number of GPUs: `crash`, `hang`, `idle` (exit code 0 and
            nothing done), or `early` (the batch script fails before it reaches esrun); it works on
            any other number.
        most: checkpoints after which it is complete.
        kind: `script`, unmodified, or `library`, which reports the checkpoint that it
            resumed from.
        told: returns whether reports arrive now.
    """

    def __init__(self, site, job_id, fails=(), *, most=10**9, told=lambda: True, kind="script"):
        self.kind = kind
        self.site, self.job_id, self.fails, self.most = site, job_id, dict(fails), most
        self.told = told
        self.saved, self.run, self.base = 0, -1, 0
        self.began = self.reported = 0.0
        self.answered = None
        self.orders = None
        #: Shapes (GPUs) in which checkpoints were completed, in order.
        self.progress = []

    def step(self):
        """Carry out the events that are due now."""
        job = self.site.slurm.listed[self.job_id]
        if job.state is not JobState.RUNNING:
            return
        now = self.site.slurm.now
        if job.run != self.run:
            self.run, self.base, self.began, self.reported = job.run, self.saved, now, 0.0
            self.answered, self.orders = None, None
        how = self.fails.get(job.allocation.gpus, "works")
        waited = now - self.began - _START_S
        if how == "early":
            self.site.slurm.end(self.job_id, 3)
        elif waited < 0 or how == "hang":
            self._report(job, "starting", now)
        elif how == "works":
            self._work(job, waited, now)
        elif self.saved == 0 or self.saved > self.base or (how == "idle" and self._library):
            self.site.slurm.end(self.job_id, 1 if how == "crash" else 0)
        else:
            self._wait(job, 1 if how == "crash" else 0, now)

    def _work(self, job, waited, now):
        while self.saved < self.most and self.saved - self.base < waited // _SAVE_S:
            self.saved += 1
            self.progress.append(job.allocation.gpus)
            notice = self.orders.notice if self.orders else None
            if self.orders and self.orders.action == "notice" and notice != self.answered:
                self.answered = notice
                self._report(job, "saved", now, notice=notice, at_once=True)
            else:
                self._report(job, "training", now, at_once=True)
        if self.saved >= self.most:
            if self.saved > self.base or self.saved == 0 or self._library:
                self.site.slurm.end(self.job_id)
            else:
                self._wait(job, 0, now)
            return
        fresh = self.saved > self.base
        if self.answered is None or not self.orders or self.orders.action != "notice":
            self._report(job, "training" if fresh else "starting", now)

    def _wait(self, job, code, now):
        """Wait for the controller after the program's end, as esrun does."""
        self._report(job, "ended", now, exit_code=code, failed_start=1)
        if self.orders and (self.orders.failed_start, self.orders.on_failure) == (1, "end"):
            self.site.slurm.end(self.job_id, code)

    @property
    def _library(self):
        return self.kind == "library"

    def _checkpoints(self, phase):
        """Return the checkpoint fields of a report; the library has none before a step."""
        if not self._library:
            return {"step": self.saved, "checkpoint_step": self.saved or None}
        if phase in ("starting", "ended") and self.saved == self.base:
            return {}
        return {
            "step": self.saved,
            "checkpoint_step": self.saved or None,
            "resumed_from": self.base or None,
        }

    def _report(self, job, phase, now, *, at_once=False, **fields):
        if not self.told() or (now < self.reported + 2.0 and not at_once):
            return
        self.reported = now
        self.orders = self.site.report(
            Report(
                job_id=self.job_id, run=job.run, phase=phase, kind=self.kind,
                gpus=job.allocation.gpus, gpu_type=job.allocation.gpu_type,
                proven=True, **self._checkpoints(phase), **fields,
            )
        )  # fmt: skip
