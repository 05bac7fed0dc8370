"""A job whose new attempt slurmctld has forgotten is requeued, once, and grows again."""

import dataclasses

import pytest

from slurm_elastic.core.report import Report
from slurm_elastic.slurm.scontrol import ScontrolError
from tests.support.controller.simulated_script import SimulatedScript
from tests.support.controller.simulated_slurm import SimulatedSite, short_trials
from tests.unit.controller.transitions.test_failed_changes import play, sizes


@pytest.fixture
def site(monkeypatch):
    site = SimulatedSite(monkeypatch, {"n1": 4}, short_trials())
    yield site
    site.close()


class ForgottenScript(SimulatedScript):
    """Program of an attempt that has begun after the one which slurmctld knows."""

    run_reported = None

    def step(self):
        job = self.site.slurm.listed[self.job_id]
        if self.run_reported is not None and job.run < self.run_reported:
            self.site.report(
                Report(job_id=self.job_id, run=self.run_reported, phase="training", kind="script")
            )
        else:
            super().step()


def forget(site, script):
    """Let slurmctld fall back to the state before the job's last start."""
    job = site.slurm.listed[7]
    script.run_reported = job.run
    ((_, _, run, place), _) = site.slurm.starts[-2:]
    site.slurm.listed[7] = dataclasses.replace(job, run=run, allocation=place, gpus=place.gpus)


def grown(site):
    site.slurm.submit(7, elastic="1-4,sizes=1:4", gpus=1)
    script = ForgottenScript(site, 7)
    play(site, [script], 60)
    assert sizes(site) == [1, 4]
    assert not site.controller.engine.live
    forget(site, script)
    return script


def requeues(site):
    return [line for line in site.log.lines if "Start=forgotten" in line]


def test_it_is_requeued_and_grows_again(site):
    script = grown(site)
    play(site, [script], 14)
    assert requeues(site) == []
    play(site, [script], 10)
    assert len(requeues(site)) == 1
    assert "JobId=7 Run=0 ReportedRun=1 Start=forgotten Action=requeue" in requeues(site)[0]
    play(site, [script], 400)
    assert sizes(site)[-1] == 4
    assert len(requeues(site)) == 1


def test_a_single_report_of_a_later_attempt_changes_nothing(site):
    script = grown(site)
    script.step()
    script.told = lambda: False
    play(site, [], 100)
    assert requeues(site) == []


def test_an_attempt_that_no_change_has_started_is_none(site):
    script = grown(site)
    script.run_reported += 1
    play(site, [script], 100)
    assert requeues(site) == []


def test_a_refusal_is_logged_once(site, monkeypatch):
    script = grown(site)

    def refuse(_):
        raise ScontrolError("Requested operation not supported")

    monkeypatch.setattr(site.slurm, "requeue", refuse)
    play(site, [script], 100)
    assert len(requeues(site)) == 1
    assert requeues(site)[0].endswith("Problem=Requested operation not supported")
