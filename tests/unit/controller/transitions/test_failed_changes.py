"""A job whose change fails goes back, trains on, and is not sent there again."""

import dataclasses

import pytest

from slurm_elastic.controller.server.request_handler import RequestHandler
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.state.trials.shape_record import ShapeRecord
from slurm_elastic.controller.state.trials.shape_trials import ShapeTrials
from slurm_elastic.controller.transitions.failed_changes import (
    FailedChanges,
    exhausted,
    way_back,
)
from slurm_elastic.core.cluster import Allocation, JobState, Node, Snapshot
from slurm_elastic.core.reason import Reason
from slurm_elastic.slurm.scontrol import ScontrolError
from tests.support.controller.job_records import Log
from tests.support.controller.job_records import job as record_of_job
from tests.support.controller.simulated_script import SimulatedScript
from tests.support.controller.simulated_slurm import SimulatedSite, short_trials


@pytest.fixture
def site(monkeypatch):
    site = SimulatedSite(monkeypatch, {"n1": 4}, short_trials())
    yield site
    site.close()


def play(site, scripts, seconds, *, tick=0.5):
    for _ in range(int(seconds / tick)):
        site.slurm.pass_time(tick)
        for script in scripts:
            script.step()
        site.look()


def barred(site, job_id=7):
    return site.controller.store.entry(site.slurm.listed[job_id]).trials.shapes.excluded


def outcomes(site, job_id=7):
    """Return action and outcome of each change, oldest first."""
    handler = RequestHandler(site.controller, check=lambda _: {}, reconfigure=lambda: "", log=Log())
    rows = handler._history({"job_ids": (job_id,)})
    return [(r["action"], r["to"].split()[0], r["outcome"]) for r in rows]


def sizes(site, job_id=7):
    return [place.gpus for _, started, _, place in site.slurm.starts if started == job_id]


@pytest.mark.parametrize("how", ["crash", "hang", "idle"])
def test_it_goes_back_and_trains_on(site, how):
    site.slurm.submit(7, elastic="1-4", gpus=1)
    script = SimulatedScript(site, 7, {4: how}, most=120)
    play(site, [script], 1500)
    assert site.slurm.ends == [(7, site.slurm.listed[7].run, 0)]
    assert script.saved == 120
    started = sizes(site)
    assert started.count(4) == 1
    assert started[started.index(4) + 1] == 1, "first back to where it worked"
    assert 3 in started, "then to another size"
    assert ("grow", "4", "failed") in outcomes(site)
    assert outcomes(site)[-1][2] in ("done", "trial")


def test_what_is_shown_meanwhile(site):
    site.slurm.submit(7, elastic="1-4", gpus=1)
    script = SimulatedScript(site, 7, {4: "hang"})
    play(site, [script], 60)
    assert sizes(site) == [1, 4]
    assert outcomes(site)[-1] == ("grow", "4", "trial")
    record = site.controller.view.records[7]
    assert record.on_trial is not None
    assert site.controller.view.plan.decision[7].waiting_for.code == "change-on-trial"
    play(site, [script], 200)
    assert barred(site) == {("a100", 4)}
    (row,) = site.controller.view.records[7].barred
    assert row == ("a100", 4, Reason("no-newer-checkpoint", waited_s=60.0))


def test_where_nothing_works_any_more_it_is_held_and_released(site):
    site.slurm.submit(7, elastic="1-4", gpus=1)
    script = SimulatedScript(site, 7)
    play(site, [script], 30)
    assert script.saved
    script.fails = dict.fromkeys(range(1, 5), "crash")
    play(site, [script], 200)
    job = site.slurm.listed[7]
    assert (job.state, job.reason) == (JobState.PENDING, "JobHeldUser")
    assert site.slurm.ends == []
    assert job.comment.startswith("selastic: held, trials-failed attempts=2")
    stopped = site.controller.view.records[7].stopped
    assert stopped.code == "trials-failed"
    script.fails = {}
    site.controller.store.let_go(job)
    play(site, [script], 100)
    assert site.slurm.listed[7].state is JobState.RUNNING
    assert barred(site) == set()


def test_a_size_that_worked_and_is_taken_is_waited_for(site):
    """It shrank for another job, fails there, and its former GPUs are not free."""
    site.slurm.submit(7, elastic="1-4", gpus=4)
    script = SimulatedScript(site, 7, {1: "crash", 2: "crash"})
    play(site, [script], 30)
    assert sizes(site) == [4]
    site.slurm.submit(8, gpus=2, priority=100)
    play(site, [script], 60)
    assert site.slurm.listed[8].state is JobState.RUNNING
    assert sizes(site) == [4, 2]
    assert site.slurm.listed[7].state is JobState.PENDING
    play(site, [script], 100)
    assert sizes(site) == [4, 2], "no shape that has not worked, nor one that failed"
    site.slurm.end(8)
    play(site, [script], 60)
    assert sizes(site) == [4, 2, 4]
    assert script.progress[-1] == 4


def test_a_controller_that_is_replaced_goes_on(site):
    site.slurm.submit(7, elastic="1-4", gpus=1)
    script = SimulatedScript(site, 7, {4: "crash"})
    while sizes(site) != [1, 4]:
        play(site, [script], 0.5)
    for _ in range(40):
        play(site, [script], 1)
        site.restart()
    play(site, [script], 100)
    assert barred(site) == {("a100", 4)}
    assert site.slurm.ends == []
    assert sizes(site)[2] == 1
    assert script.progress[-1] != 4


def test_what_others_requeue_ends_with_its_program(site):
    """No change of the controller's: the exit code is the job's."""
    site.slurm.submit(7, elastic="1", gpus=1)
    script = SimulatedScript(site, 7)
    play(site, [script], 30)
    site.slurm.send_back(7)
    script.fails = {1: "crash"}
    play(site, [script], 200)
    assert site.slurm.ends == [(7, 1, 1)]


def test_a_new_directive_allows_the_shape_again(site):
    site.slurm.submit(7, elastic="1-4", gpus=1)
    script = SimulatedScript(site, 7, {4: "crash"})
    play(site, [script], 150)
    assert barred(site) == {("a100", 4)}
    handler = RequestHandler(site.controller, check=lambda _: {}, reconfigure=lambda: "", log=Log())
    handler.command(0, "update", {"job_ids": (7,), "layout": "auto"})
    assert barred(site) == {("a100", 4)}
    assert site.controller.store.entry(site.slurm.listed[7]).override == ""
    handler.command(0, "update", {"job_ids": (7,), "elastic": "1-4"})
    assert barred(site) == set()
    assert JobStore(site.ledger).entry(site.slurm.listed[7]).trials.shapes.barred == []


def test_a_job_on_trial_gives_way_and_the_notice_ends_the_trial(site):
    site.slurm.submit(7, elastic="1-4", gpus=1)
    script = SimulatedScript(site, 7)
    while sizes(site) != [1, 4]:
        play(site, [script], 0.5)
    site.slurm.submit(8, gpus=2, priority=100)
    play(site, [script], 2)
    assert outcomes(site)[0] == ("grow", "4", "trial")
    play(site, [script], 40)
    assert site.slurm.listed[8].state is JobState.RUNNING
    assert outcomes(site)[0] == ("grow", "4", "done")
    assert barred(site) == set()


def test_a_ledger_that_is_lost_costs_no_job(site):
    """Nothing is known of the shapes before: the one that fails is barred."""
    site.slurm.submit(7, elastic="1-4", gpus=1)
    script = SimulatedScript(site, 7, {4: "crash"})
    while sizes(site) != [1, 4]:
        play(site, [script], 0.5)
    site.ledger = Ledger(":memory:")
    site.restart()
    play(site, [script], 300)
    assert site.slurm.ends == []
    assert site.slurm.listed[7].state is JobState.RUNNING
    assert script.progress[-1] != 4
    assert barred(site) == {("a100", 4)}


def test_the_loss_of_a_node_is_no_failed_change(site):
    site.slurm.nodes = {"n1": 4, "n2": 4}
    site.slurm.submit(7, elastic="1-8", gpus=1)
    script = SimulatedScript(site, 7)
    while sizes(site) != [1, 8]:
        play(site, [script], 0.5)
    site.slurm.lost = {"n2"}
    script.fails = {8: "crash"}  # its ranks on n1 lose those on n2
    play(site, [script], 20)
    assert barred(site) == set()
    assert sizes(site) == [1, 8]
    site.slurm.send_back(7)  # as Slurm does
    play(site, [script], 200)
    assert site.slurm.ends == []
    assert sizes(site)[2] <= 4
    assert script.progress[-1] <= 4
    assert barred(site) == set()


def test_where_slurm_refuses_the_way_back_it_waits_in_the_queue(site):
    site.slurm.submit(7, elastic="1-4", gpus=1)
    script = SimulatedScript(site, 7, {4: "crash"})
    while sizes(site) != [1, 4]:
        play(site, [script], 0.5)

    def refuse(*_, **__):
        raise ScontrolError("Requested nodes are busy")

    site.slurm.create_reservation = refuse
    play(site, [script], 100)
    assert site.slurm.ends == []
    assert site.slurm.listed[7].state is JobState.PENDING
    del site.slurm.create_reservation
    play(site, [script], 200)
    assert sizes(site)[2] == 1
    assert script.progress[-1] != 4


@pytest.mark.parametrize("free", [0, 1])
def test_from_half_of_a_gpu_a_job_goes_back_to_a_whole_one_if_one_is_free(free):
    half = Allocation.of("a100", {"n1": 1}, half=True)
    on_half = {"allocation": half, "parts": (("n1", 0),), "state": JobState.RUNNING}
    first, second = (record_of_job(job_id=i, directive="1-2,share=yes", **on_half) for i in (7, 8))
    node = Node(name="n1", gpu_type="a100", gpus=1 + free, used_gpus=1, shared_gpus=(0,))
    snapshot = Snapshot(time=1000.0, nodes=(node,), jobs=(first, second))
    worked = ShapeRecord(last=half.whole, worked=[("a100", 1)])
    trials = ShapeTrials(held=half, shapes=worked, failures=2)
    back = half.whole if free else None
    assert way_back(first, trials, snapshot, ()) == back
    alone = dataclasses.replace(snapshot, jobs=(first,))
    assert way_back(first, trials, alone, ()) == half.whole
    assert not exhausted(trials, 2), "it has not been back on a whole one"


@pytest.mark.parametrize("shards", [0, 1])
def test_a_job_that_left_its_half_for_the_queue_is_not_sent_there_again(shards):
    half = Allocation.of("a100", {"n1": 1}, half=True)
    waits = record_of_job(
        run=2, gpus=1, shards=shards, required_nodes=("n1",), directive="1,share=yes"
    )
    store = JobStore(Ledger(":memory:"))
    store.entry(waits).trials = ShapeTrials(
        run=1, held=half, failure=Reason("program-failed", exit_code=1), failures=1
    )
    changes = FailedChanges(store, None, store.learning.config, None)
    snapshot = Snapshot(time=1000.0, nodes=(), jobs=(waits,))
    assert len(changes.due(snapshot, {})) == shards
