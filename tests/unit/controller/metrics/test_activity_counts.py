"""Counters of a controller on a simulated Slurm, and of hostile requests."""

import pytest

from slurm_elastic.controller.metrics import metric_definitions as metrics
from slurm_elastic.controller.metrics.activity_counts import ActivityCounts
from slurm_elastic.core.report import Report
from tests.support.controller.simulated_script import SimulatedScript
from tests.support.controller.simulated_slurm import SimulatedSite, short_trials


@pytest.fixture
def site(monkeypatch):
    site = SimulatedSite(monkeypatch, {"n1": 4}, short_trials())
    site.slurm.submit(7, elastic="1-4", gpus=1)
    yield site
    site.close()


def play(site, script, seconds, until=lambda: False):
    for _ in range(int(seconds / 0.5)):
        site.slurm.pass_time(0.5)
        script.step()
        site.look()
        if until():
            return


def ended(counts):
    return {labels: n for labels, n in counts.values(metrics.TRANSITIONS).items() if n}


def observed(counts, definition=metrics.TRANSITION_SECONDS):
    return {
        labels[0]: histogram.total
        for labels, histogram in counts.histograms(definition).items()
        if histogram.total
    }


def test_a_change_is_counted_once_with_its_parts(site):
    counts = site.controller.counts
    assert ended(counts) == {}
    play(site, SimulatedScript(site, 7), 120)
    assert ended(counts) == {("grow", "done", "requeue"): 1}
    assert observed(counts) == {"notice": 1, "save": 1, "slurm": 1}
    assert counts.histograms(metrics.ROUND_SECONDS)[()].total >= 120 / 10


def test_a_save_is_counted_from_its_own_report(site):
    script, handler = SimulatedScript(site, 7), site.controller.report_handler
    play(site, script, 120, until=lambda: site.controller.engine.live)
    play(site, script, 2)
    (transition,) = site.controller.engine.live.values()
    saving = Report(job_id=7, run=0, phase="saving", kind="script", notice=transition.id)
    handler.handle(saving, site.controller.job(7), act=True)
    play(site, script, 120)
    parts = site.controller.counts.histograms(metrics.TRANSITION_SECONDS)
    notice, save = (parts[(phase,)].sum for phase in ("notice", "save"))
    seen = transition.entered
    assert notice + save == seen["saved"] - seen["NOTIFY"]
    assert notice > 0
    assert save > notice


def test_a_change_resumed_from_the_ledger_is_counted_where_it_ends(site):
    script, first = SimulatedScript(site, 7), site.controller.counts
    play(site, script, 120, until=lambda: site.slurm.listed[7].run == 1)
    assert site.controller.engine.live
    site.restart()
    play(site, script, 120)
    assert ended(first) == {}
    assert ended(site.controller.counts) == {("grow", "done", "requeue"): 1}
    site.restart()
    play(site, script, 60)
    assert ended(site.controller.counts) == {}


def test_a_change_that_fails_on_trial(site):
    counts = site.controller.counts
    play(site, SimulatedScript(site, 7, {4: "crash"}), 120)
    assert counts.values(metrics.CHANGES_FAILED) == {(): 1}
    assert ended(counts)["shrink", "done", "requeue"] == 1, "the way back"


def test_a_job_that_fails_everywhere_is_held_once(site):
    script, counts = SimulatedScript(site, 7), site.controller.counts
    play(site, script, 30)
    script.fails = dict.fromkeys(range(1, 5), "crash")
    play(site, script, 600)
    assert counts.values(metrics.HOLDS) == {(): 1}


@pytest.mark.parametrize("operation", ["x" * 1000, 'evil"\n', None, ["report"], 7])
def test_what_a_caller_writes_is_no_label(operation):
    counts = ActivityCounts()
    counts.request(operation, {"error": "x", "code": "evil"})
    known = set(metrics.REQUESTS.initial)
    new = counts.values(metrics.REQUESTS).keys() - known
    assert new == {(metrics.OTHER_OPERATION, "internal")}


def test_a_value_is_in_the_bucket_whose_bound_it_does_not_exceed():
    counts = ActivityCounts()
    counts.round_done(0.1, cpu_s=0.0)
    bounds = metrics.ROUND_SECONDS.buckets
    histogram = counts.histograms(metrics.ROUND_SECONDS)[()]
    assert histogram.counts[bounds.index(0.1)] == 1
