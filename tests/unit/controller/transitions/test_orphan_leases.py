"""Jobs that wait by our decision: their start time is put off again before it comes."""

import time
from dataclasses import replace

import pytest

from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.transitions.orphan_cleanup import OrphanCleanup
from slurm_elastic.core.cluster import JobState
from tests.support.controller.job_records import FakeScontrol, Log, job
from tests.support.controller.simulated_slurm import SimulatedSite, short_trials


def test_a_lease_is_renewed_although_the_clock_was_set_back(monkeypatch):
    scontrol, config = FakeScontrol(), Config(controller=ControllerSettings(queue="controller"))
    cleanup = OrphanCleanup(scontrol, config, JobStore(Ledger(":memory:")), Log())
    waiting = job(begin_time=time.time() + 3600, reason="BeginTime")
    cleanup.lease(waiting)
    cleanup.leases([waiting], {}, retired=False)
    assert len(scontrol.calls) == 1  # fresh
    wall, steady = time.time(), time.monotonic()
    monkeypatch.setattr(time, "time", lambda: wall - 3600)
    monkeypatch.setattr(time, "monotonic", lambda: steady + config.slurm.lease_s / 2)
    cleanup.leases([waiting], {}, retired=False)
    assert [c[2] for c in scontrol.calls] == [{"StartTime": f"now+{int(config.slurm.lease_s)}"}] * 2


@pytest.fixture
def site(monkeypatch):
    site = SimulatedSite(monkeypatch, {"n1": 2}, short_trials())
    yield site
    site.close()


def constrain(site, job_id, features):
    job = site.slurm.listed[job_id]
    shape = {**job.submission.shape, "features": features}
    submission = replace(job.submission, shape=shape)
    site.slurm.listed[job_id] = replace(job, submission=submission)


@pytest.mark.parametrize("before", ["", "[a*2&c]"])
def test_a_job_that_only_slurm_can_place_does_not_wait_for_the_controller(site, before):
    site.slurm.submit(8, gpus=2, priority=100)
    site.slurm.submit(7, elastic="1-2")
    constrain(site, 7, before)
    for _ in range(30):
        site.slurm.pass_time(1.0)
        site.look()
    assert (site.slurm.listed[7].begin_time is None) == bool(before)
    constrain(site, 7, "[a*2&c]")  # its owner changes it
    site.slurm.end(8)
    for _ in range(60):
        site.slurm.pass_time(1.0)
        site.look()
    assert site.slurm.listed[7].state is JobState.RUNNING
