"""Properties of changes that fail, in any order of reports, failures and controllers.

A whole controller runs on a Slurm in memory with scripts that fail in some shapes. Reports are
lost, controllers are replaced by others with the same ledger, nodes are taken by other jobs.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.core.cluster import JobState
from tests.support.controller.simulated_script import SimulatedScript
from tests.support.controller.simulated_slurm import SimulatedSite, short_trials

FAILURES = st.dictionaries(
    st.integers(1, 8), st.sampled_from(["crash", "hang", "idle"]), max_size=6
)
#: Events in a span of time: seconds, whether reports arrive, and an event before.
SPANS = st.lists(
    st.tuples(
        st.integers(1, 60),
        st.booleans(),
        st.sampled_from(["", "restart", "restart", "rival", "leaves", "requeue"]),
    ),
    max_size=8,
)
TICK_S = 1.0


class Trial:
    """Job 7, which works on the GPUs that it starts with, and a rigid job 8 now and then."""

    def __init__(self, site, start, fails, kind="script"):
        self.site, self.told = site, True
        # A program of the library that ends well has completed its training.
        self.fails = {
            gpus: how
            for gpus, how in fails.items()
            if gpus != start and (how, kind) != ("idle", "library")
        }
        site.slurm.submit(7, elastic="1-8", gpus=start)
        self.script = SimulatedScript(site, 7, self.fails, told=lambda: self.told, kind=kind)
        self.checked = 0

    def pass_time(self, seconds):
        for _ in range(int(seconds / TICK_S)):
            self.site.slurm.pass_time(TICK_S)
            self.check_starts()
            self.script.step()
            self.site.look()
            assert self.site.slurm.listed[7].state is not JobState.ENDED, "a change ended it"

    def check_starts(self):
        """Check that no attempt begins in a shape that is barred."""
        for _, job_id, _, place in self.site.slurm.starts[self.checked :]:
            job = self.site.slurm.listed[job_id]
            if job_id == 7:
                barred = self.site.controller.store.entry(job).trials.shapes.excluded
                assert (place.gpu_type, place.gpus) not in barred
        self.checked = len(self.site.slurm.starts)

    def apply(self, event):
        slurm = self.site.slurm
        rigid, job = slurm.listed.get(8), slurm.listed[7]
        if event == "restart":
            self.site.restart()
        elif event == "rival" and (rigid is None or rigid.state is JobState.ENDED):
            slurm.submit(8, gpus=3, priority=100)
        elif event == "leaves" and rigid is not None and rigid.state is JobState.RUNNING:
            slurm.end(8)
        elif event == "requeue" and job.state is JobState.RUNNING and self.worked_here(job):
            slurm.send_back(7)

    def worked_here(self, job):
        return self.script.run == job.run and self.script.saved > self.script.base


@settings(max_examples=30)
@given(
    st.sampled_from([1, 2, 3, 4]), FAILURES, SPANS, st.sampled_from(["script", "library"]),
    st.sampled_from(["controller", "slurm"]),
)  # fmt: skip
def test_no_change_ends_a_job_and_none_is_forgotten(start, fails, spans, kind, queue):
    with pytest.MonkeyPatch.context() as monkeypatch:
        site = SimulatedSite(monkeypatch, {"n1": 4, "n2": 4}, short_trials(queue))
        try:
            trial = Trial(site, start, fails, kind)
            trial.pass_time(40)
            for seconds, told, event in spans:
                trial.apply(event)
                trial.told = told
                trial.pass_time(seconds)
            trial.told = True
            trial.apply("leaves")
            for _ in range(20):
                saved = trial.script.saved
                trial.pass_time(150)
                job = site.slurm.listed[7]
                works = job.allocation is not None and job.allocation.gpus not in trial.fails
                if works and trial.script.saved > saved + 5:
                    break
            assert works, job
            assert trial.script.saved > saved + 5, "it trains"
        finally:
            site.close()
