"""Nice values of rigid jobs: only where the site allows it, and no job has one of its own."""

import dataclasses

import pytest

from slurm_elastic.config.schema import Config, DurationSettings
from slurm_elastic.controller.lengths.rigid_nice import RigidNice
from slurm_elastic.controller.state.ledger import Ledger
from tests.support.controller.job_records import FakeScontrol, Log
from tests.support.decisions.synthetic_clusters import NOW, Cluster, node

MULTIFACTOR = {"PriorityType": "priority/multifactor"}
DAY_S = 86400.0


def without_limit(display_id):
    """Return the id of an array's job without its limit of running tasks."""
    return display_id.replace("%2", "")


class Site:
    """A full cluster with pending rigid jobs, whose nice values follow the writes."""

    def __init__(self, path, *, most=1000, settings=MULTIFACTOR):
        self.cluster = Cluster([node("a1", 4, "a100")])
        self.ledger = Ledger(path / "ledger.sqlite")
        self.lengths = {}
        self.settings = settings
        self.log = Log()
        self.start(most)

    def start(self, most=1000):
        """Begin anew, as after a restart of selasticd."""
        config = dataclasses.replace(
            Config(), durations=DurationSettings(predict=True, rigid_nice=most)
        )
        self.scontrol = FakeScontrol()
        self.nice = RigidNice(
            config, self.scontrol, self.ledger, self.log, read=lambda **_: (self.settings, "")
        )

    def add(self, job_id, *, length=None, **fields):
        values = {"gpus": 4, "priority": 100, "submit_time": NOW, "reason": "Priority"}
        self.cluster.add(job_id, **(values | fields))
        self.lengths[job_id] = length

    def change(self, job_id, **fields):
        jobs = self.cluster.jobs
        at = next(i for i, job in enumerate(jobs) if job.job_id == job_id)
        jobs[at] = dataclasses.replace(jobs[at], **fields)

    def round(self, *, acts=True, slurm_ignores=()):
        """Run a round; return the writes, which Slurm then shows."""
        begun = len(self.scontrol.calls)
        predict = lambda job: self.lengths.get(job.job_id)  # noqa: E731
        self.note = self.nice.round(self.cluster.snapshot(), predict, acts=acts)
        writes = {}
        for verb, shown, fields in self.scontrol.calls[begun:]:
            assert (verb, list(fields)) == ("update", ["Nice"])
            writes[shown] = int(fields["Nice"])
            job = next(j for j in self.cluster.jobs if without_limit(j.display_id) == shown)
            if job.job_id not in slurm_ignores:
                self.change(job.job_id, nice=writes[shown])
        return writes


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


def test_long_jobs_get_more_than_short_ones_and_less_the_longer_they_wait(site):
    site.add(1, length=DAY_S)
    site.add(2, length=600.0)
    site.add(3, length=None)
    assert site.round() == {"1": 650, "2": 100}
    assert site.round() == {}
    assert "JobId=1 Action=nice From=0 To=650 PredictedGpuSeconds=345600" in site.log.lines
    site.change(1, submit_time=NOW - DAY_S / 2)
    assert site.round() == {"1": 300}
    site.change(1, submit_time=NOW - DAY_S)
    assert site.round() == {"1": 0}


@pytest.mark.parametrize(
    "fields",
    [{"reason": "Dependency"}, {"reason": "BeginTime"}, {"priority": 0}, {"gpus": 0},
     {"elastic": "1-4"}, {"on": {"a1": 4}}, {"nice": 7}, {"nice": -7}],
)  # fmt: skip
def test_other_jobs_are_left_alone(site, fields):
    site.add(1, length=DAY_S, **fields)
    assert site.round() == {}


def test_what_others_set_meanwhile_is_left(site):
    site.add(1, length=DAY_S)
    assert site.round() == {"1": 650}
    site.change(1, nice=20)
    assert site.round() == {}
    site.nice.config = Config()
    assert site.round() == {}


def test_after_the_loss_of_the_ledger_no_job_gets_more(tmp_path, site):
    site.add(1, length=DAY_S)
    site.round()
    site.ledger = Ledger(tmp_path / "new.sqlite")
    site.start()
    assert site.round() == {}


@pytest.mark.parametrize("restarted", [False, True])
def test_all_is_given_back_where_the_site_allows_it_no_longer(site, restarted):
    site.add(1, length=DAY_S)
    site.add(2, length=DAY_S)
    site.round()
    site.change(2, nice=30)
    if restarted:
        site.start(most=0)
    else:
        site.nice.config = Config()
    assert site.round(acts=False) == {}
    assert site.round() == {"1": 0}
    assert site.round() == {}


def test_a_job_that_is_requeued_is_known(site):
    site.add(1, length=DAY_S)
    site.round()
    running = dataclasses.replace(site.cluster.jobs[0])
    site.cluster.jobs.clear()
    site.add(1, on={"a1": 4}, nice=running.nice)
    assert site.round() == {}
    site.cluster.jobs.clear()
    site.add(1, length=DAY_S, nice=650, run=1)
    assert site.round() == {}


def test_a_task_has_the_value_of_its_array(site):
    site.add(10, length=DAY_S)
    site.change(10, display_id="9_[0-7%2]")
    assert site.round() == {"9_[0-7]": 650}
    # A task that ran for a moment and was requeued.
    site.add(11, length=DAY_S, nice=650)
    site.change(11, display_id="9_0")
    assert site.round() == {}


def test_a_value_that_slurm_ignores_is_written_twice_at_most(site):
    site.add(1, length=DAY_S)
    assert [bool(site.round(slurm_ignores={1})) for _ in range(4)] == [True, True, False, False]


def test_a_refusal_harms_no_other_job(site):
    site.add(1, length=DAY_S)
    site.scontrol.refuse = "Job/step already completing or completed"
    assert site.round() == {}
    assert any("Error=Job/step already" in line for line in site.log.lines)


def test_without_multifactor_priorities_nothing_is_written(tmp_path):
    site = Site(tmp_path, settings={"PriorityType": "priority/basic"})
    site.add(1, length=DAY_S)
    assert site.round() == {}
    assert (site.note.code, site.note.parameters["error"]) == ("nice-not-counted", "priority/basic")
