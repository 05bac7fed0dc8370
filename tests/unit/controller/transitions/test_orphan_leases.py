"""Jobs that wait by our decision: their start time is put off again before it comes."""

import time

from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.transitions.orphan_cleanup import OrphanCleanup
from tests.support.controller.job_records import FakeScontrol, Log, job


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
