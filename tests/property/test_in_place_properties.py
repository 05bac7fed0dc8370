"""Properties of changes in place, in any order of faults, deaths and other jobs.

A whole controller runs on a Slurm in memory with a training of the library. Companions are refused,
die, do not leave; the controller is replaced by another one with the same ledger, or with none.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.core.cluster import JobState
from tests.support.controller.simulated_slurm import SimulatedSite, short_trials
from tests.support.controller.simulated_training import SimulatedTraining

IN_PLACE = short_trials() + 'in_place = "auto"\nmin_gain = 0.01\n'
EVENTS = (
    *("", "restart", "restart", "ledger lost", "rival", "rival leaves", "companion lost"),
    *("base requeued", "limit", "no limit"),
)
#: Events in a span of time: seconds, whether reports arrive, what goes wrong, an event before.
SPANS = st.lists(
    st.tuples(
        st.integers(1, 60),
        st.booleans(),
        st.sampled_from(["", "", "refused", "silent", "dies", "stays"]),
        st.sampled_from(EVENTS),
    ),
    max_size=10,
)
TICK_S = 1.0


class Trial:
    """Job 7 on at most so many GPUs, and a rigid job 8 now and then."""

    def __init__(self, site, start, most):
        self.site, self.told, self.most = site, True, most
        site.slurm.submit(7, elastic=f"1-{most}", gpus=start)
        self.training = SimulatedTraining(site, 7, told=lambda: self.told)
        self.alone_s = 0.0

    def pass_time(self, seconds):
        for _ in range(int(seconds / TICK_S)):
            self.site.slurm.pass_time(TICK_S)
            self.training.step()
            self.site.look()
            self.check()

    def check(self):
        listed = self.site.slurm.listed
        # After each tick, in which it trains one step at most.
        steps = [step for step, _ in self.training.trained[-2:]]
        assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True
        base = listed[7]
        assert base.state is not JobState.ENDED
        for job in self.companions():
            assert (job.companion.base, job.uid) == (7, base.uid)
        running = [j for j in (base, *self.companions()) if j.state is JobState.RUNNING]
        assert sum(j.gpus for j in running) <= self.most, "more GPUs than its MAX"
        first = [j for j in self.companions() if j.priority > 10]
        assert len({j.companion.change for j in first}) <= 1, "more than one change at once"

    def companions(self):
        listed = self.site.slurm.listed.values()
        return [j for j in listed if j.job_id >= 1000 and j.state is not JobState.ENDED]

    def apply(self, event):
        slurm, site = self.site.slurm, self.site
        rigid, job = slurm.listed.get(8), slurm.listed[7]
        if event == "ledger lost":
            site.controller.engine.close()
            site.controller, site.ledger = None, Ledger(":memory:")
            site.restart()
        elif event == "restart":
            site.restart()
        elif event == "rival" and (rigid is None or rigid.state is JobState.ENDED):
            slurm.submit(8, gpus=2, priority=100)
        elif event == "rival leaves" and rigid is not None and rigid.state is JobState.RUNNING:
            slurm.end(8)
        elif event == "companion lost" and self.companions():
            slurm.cancel(self.companions()[0])
        elif event == "base requeued" and job.state is JobState.RUNNING and self.training.trained:
            slurm.send_back(7)
        elif event in ("limit", "no limit"):
            slurm.companions_wait_for = "AssocMaxJobsLimit" if event == "limit" else ""


@settings(max_examples=40)
@given(st.sampled_from([1, 2]), st.sampled_from([3, 4, 6]), SPANS)
def test_whatever_happens_the_job_trains_on_and_nothing_is_left(start, most, spans):
    with pytest.MonkeyPatch.context() as monkeypatch:
        site = SimulatedSite(monkeypatch, {"n1": 2, "n2": 2, "n3": 2}, IN_PLACE)
        try:
            trial = Trial(site, start, most)
            for seconds, told, fault, event in spans:
                trial.told, trial.training.fault = told, fault
                trial.apply(event)
                trial.pass_time(seconds)
            trial.told, trial.training.fault, site.slurm.companions_wait_for = True, "", ""
            trial.pass_time(900)
            live = [
                t for t in site.controller.engine.live.values() if t.waited(site.slurm.now) > 300
            ]
            assert not live, live
            joined = set(trial.training.jobs_of("joined", "running", "submitted"))
            assert {j.job_id for j in trial.companions()} <= joined, "a stray companion"
            base = site.slurm.listed[7]
            assert base.state is JobState.RUNNING
            counted = site.controller.job(7)
            assert counted is not None
            if not site.controller.engine.live:
                assert counted.allocation.gpus == trial.training.gpus
            site.slurm.end(7)
            trial.training.step()
            for _ in range(60):
                site.slurm.pass_time(TICK_S)
                site.look()
            assert not trial.companions(), "a companion outlived its base"
        finally:
            site.close()
