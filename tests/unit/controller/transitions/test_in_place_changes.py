"""A training grows and shrinks in place: a whole controller on a simulated Slurm."""

import dataclasses

import pytest

from slurm_elastic.controller.server.request_handler import RequestHandler
from slurm_elastic.core.cluster import JobState
from slurm_elastic.core.reason import Reason
from tests.support.controller.job_records import Log
from tests.support.controller.simulated_slurm import SimulatedSite, short_trials
from tests.support.controller.simulated_training import SimulatedTraining
from tests.unit.controller.transitions.test_failed_changes import play

IN_PLACE = short_trials() + 'in_place = "auto"\nmin_gain = 0.01\n'


@pytest.fixture
def site(monkeypatch):
    site = SimulatedSite(monkeypatch, {"n1": 2, "n2": 2}, IN_PLACE)
    yield site
    site.close()


def started(site, **fields):
    """Return a training of 2-4 GPUs that starts on two."""
    site.slurm.submit(7, elastic="2-4", gpus=2)
    return SimulatedTraining(site, 7, **fields)


def until(site, trainings, condition, *, seconds=600, tick=0.5):
    for _ in range(int(seconds / tick)):
        play(site, trainings, tick, tick=tick)
        if condition():
            return
    raise AssertionError([str(line) for line in site.log.lines[-20:]])


def grown(site, **fields):
    """Return a training that has grown in place to four GPUs, with no change under way."""
    training = started(site, **fields)
    until(site, [training], lambda: training.gpus == 4)
    until(site, [training], lambda: not site.controller.engine.live)
    return training


def running_companions(site):
    listed = site.slurm.listed.values()
    return [j for j in listed if j.job_id >= 1000 and j.state is JobState.RUNNING]


def kinds(site):
    rows = site.ledger.transitions()
    return [(row["kind"], row["action"], row["state"]) for row in rows]


def test_a_job_grows_without_a_requeue(site):
    training = grown(site)
    (companion,) = running_companions(site)
    assert companion.allocation.gpus == 2
    assert (companion.priority, companion.reservation) == (10, ""), "given back"
    assert site.slurm.listed[7].run == 0
    assert [step for step, _ in training.trained] == list(range(1, len(training.trained) + 1))
    play(site, [training], 10)
    job = site.controller.view.snapshot.job[7]
    assert job.allocation.gpus == 4
    assert companion.job_id not in site.controller.view.snapshot.job
    assert kinds(site) == [("in-place", "grow", "DONE")]


def test_it_shrinks_in_place_for_another_job(site):
    training = grown(site)
    play(site, [training], 20)
    site.slurm.submit(8, gpus=2)
    until(site, [training], lambda: site.slurm.listed[8].state is JobState.RUNNING)
    assert site.slurm.listed[7].run == 0
    assert training.gpus == 2
    assert not running_companions(site)
    assert kinds(site)[-1] == ("in-place", "shrink", "DONE")


@pytest.mark.parametrize("fault", ["refused", "silent", "dies"])
def test_where_companions_fail_the_job_is_requeued(site, fault):
    training = started(site, fault=fault)
    until(site, [training], lambda: site.slurm.listed[7].run == 1 and training.run == 1)
    until(site, [training], lambda: training.gpus == 4)
    until(site, [training], lambda: not site.controller.engine.live)
    assert [row[0] for row in kinds(site)] == ["in-place", "requeue"]
    assert not running_companions(site)
    assert all(j.state is JobState.ENDED for i, j in site.slurm.listed.items() if i >= 1000)


def test_a_limit_on_jobs_leads_to_a_requeue_with_the_reason(site):
    site.slurm.companions_wait_for = "QOSMaxJobsPerUserLimit"
    training = started(site)
    until(site, [training], lambda: training.gpus == 4)
    first = site.ledger.transitions()[0]
    assert first["problem"]["code"] == "companion-waits"
    assert "QOSMaxJobsPerUserLimit" in str(first["problem"])
    assert site.slurm.listed[7].run == 1


def test_a_training_that_cannot_is_requeued_at_once(site):
    training = started(site, able=False)
    until(site, [training], lambda: training.gpus == 4)
    assert kinds(site)[0][0] == "requeue"
    assert site.slurm.listed[7].run == 1


def test_a_companion_that_does_not_leave_is_cancelled(site):
    training = grown(site)
    training.fault = "stays"
    play(site, [training], 20)
    site.slurm.submit(8, gpus=2)
    until(site, [training], lambda: site.slurm.listed[8].state is JobState.RUNNING)
    assert site.slurm.listed[7].run == 0


def test_a_companion_whose_end_slurmctld_has_forgotten_is_cancelled_soon(site):
    training = grown(site)
    training.fault = "forgotten"
    play(site, [training], 20)
    site.slurm.submit(8, gpus=2)
    until(site, [training], lambda: site.slurm.listed[8].state is JobState.RUNNING, seconds=30)
    assert site.slurm.listed[7].run == 0
    assert kinds(site)[-1] == ("in-place", "shrink", "DONE")


def test_a_lost_companion_is_replaced(site):
    training = grown(site)
    (companion,) = running_companions(site)
    site.slurm.cancel(companion)
    until(site, [training], lambda: training.gpus == 2)
    until(site, [training], lambda: training.gpus == 4)
    assert site.slurm.listed[7].run == 0


@pytest.mark.parametrize("recorded", [True, False])
def test_companions_end_with_their_base(site, recorded):
    """Although their own scripts did not notice."""
    grown(site, recorded=recorded)
    site.restart()
    site.look()
    site.slurm.end(7)
    until(site, [], lambda: not running_companions(site), seconds=60)


def test_a_companion_that_slurm_requeues_is_cancelled_at_once(site):
    """Slurm requeues what it could not launch on a lost node, in spite of --no-requeue."""
    grown(site)
    (companion,) = running_companions(site)
    site.slurm.end(7)
    site.slurm.send_back(companion.job_id)
    until(
        site,
        [],
        lambda: site.slurm.listed[companion.job_id].state is JobState.ENDED,
        seconds=10,
    )


@pytest.mark.parametrize("state", ["RESERVE", "ASK", "PIN", "START", "JOIN"])
def test_a_controller_that_dies_goes_on_with_a_growth(site, state):
    training = started(site)

    def reached():
        live = site.controller.engine.live
        return 7 in live and live[7].state.value == state

    try:
        until(site, [training], reached, seconds=120, tick=0.25)
    except AssertionError:
        pytest.skip(f"{state} is left within one look")
    site.restart()
    until(site, [training], lambda: training.gpus == 4)
    until(site, [training], lambda: not site.controller.engine.live)
    assert site.slurm.listed[7].run == 0
    assert len(running_companions(site)) == 1
    play(site, [training], 120)
    assert len(running_companions(site)) == 1


def test_a_directive_that_rules_a_change_out_ends_it(site):
    training = started(site)
    until(site, [training], lambda: site.controller.engine.live)
    handler = RequestHandler(site.controller, check=lambda _: {}, reconfigure=lambda: "", log=Log())
    handler.command(2001, "update", {"job_ids": (7,), "elastic": "2-2"})
    until(site, [training], lambda: not site.controller.engine.live)
    assert [row[2] for row in kinds(site)] == ["UNDONE"]
    assert site.ledger.transitions()[0]["problem"]["code"] == "directive-changed"
    handler.command(2001, "update", {"job_ids": (7,), "elastic": "2-4"})
    until(site, [training], lambda: training.gpus == 4)
    until(site, [training], lambda: not site.controller.engine.live)
    assert kinds(site)[-1] == ("in-place", "grow", "DONE"), "that did not count as a failure"


def outcomes(site):
    """Return kind, action and outcome of each change, as `selastic history` shows them."""
    handler = RequestHandler(site.controller, check=lambda _: {}, reconfigure=lambda: "", log=Log())
    return [(r["kind"], r["action"], r["outcome"]) for r in handler._history({"job_ids": (7,)})]


def test_another_job_that_has_got_the_id_has_no_history(site):
    training = grown(site)
    assert outcomes(site)
    site.slurm.listed[7] = dataclasses.replace(site.slurm.listed[7], submission=None)
    play(site, [training], 5)
    assert not outcomes(site)


def barred(site):
    return site.controller.view.records[7].barred


def test_a_program_that_fails_in_the_grown_shape_goes_on_without_it(site):
    training = started(site, fails_on={4})
    until(site, [training], lambda: training.starts == 2 and training.trained[-1][1] == 2)
    play(site, [training], 120)
    assert site.slurm.listed[7].state is JobState.RUNNING
    assert site.slurm.listed[7].run == 0, "it was started again without a requeue"
    assert training.starts == 2, "nor is it sent there again"
    assert [(kind, gpus) for kind, gpus, _ in barred(site)] == [("a100", 4)]
    assert barred(site)[0][2] == Reason("program-failed", exit_code=139)
    assert outcomes(site)[0] == ("in-place", "grow", "failed")
    assert training.gpus == 3, "but to another size"


def test_a_growth_is_on_trial_until_the_next_checkpoint(site):
    training = started(site)
    until(site, [training], lambda: training.gpus == 4)
    saved = training.saved
    until(site, [training], lambda: not site.controller.engine.live)
    play(site, [training], 2)
    if training.saved == saved:
        assert outcomes(site) == [("in-place", "grow", "trial")]
        assert site.controller.view.records[7].on_trial is not None
    until(site, [training], lambda: training.saved > saved, seconds=60)
    play(site, [training], 12)
    assert outcomes(site) == [("in-place", "grow", "done")]
    assert site.controller.view.records[7].on_trial is None


def test_a_failure_that_is_reported_to_another_controller_bars_the_shape(site):
    """The controller dies with the program, before it has heard of it."""
    told = [True]
    training = started(site, fails_on={4}, told=lambda: told[0])
    until(site, [training], lambda: training.gpus == 4)
    told[0] = False
    until(site, [training], lambda: training.failed_gpus == 4)
    site.restart()
    site.look()
    told[0] = True
    until(site, [training], lambda: training.starts == 2)
    play(site, [training], 20)
    assert [gpus for _, gpus, _ in barred(site)] == [4]
    assert site.slurm.listed[7].run == 0


def test_a_job_that_fails_on_its_own_gpus_then_is_held_not_ended(site):
    training = started(site, fails_on={4})
    until(site, [training], lambda: training.gpus == 4)
    training.fails_on = {2, 4}
    until(site, [training], lambda: site.slurm.listed[7].state is JobState.PENDING)
    play(site, [training], 120)
    assert site.slurm.listed[7].reason == "JobHeldUser"
    assert not site.slurm.ends or all(job_id != 7 for job_id, *_ in site.slurm.ends)


@pytest.mark.parametrize(
    ("fault", "code"), [("fails", "companion-failed"), ("memory", "companion-out-of-memory")]
)
def test_companions_whose_ranks_fail_are_not_started_again_and_again(site, fault, code):
    training = started(site, fault=fault)
    until(site, [training], lambda: training.gpus == 4)
    failed = ("in-place", "grow", "failed")
    until(site, [training], lambda: failed in outcomes(site))
    obstacle = site.controller.view.records[7].not_in_place
    assert obstacle.code == "in-place-failed"
    assert str(obstacle.parameters["reason"]).count(code)
    until(site, [training], lambda: site.slurm.listed[7].run == 1)
    assert kinds(site)[-1][0] == "requeue"


def test_a_lost_node_bars_nothing(site):
    training = started(site, fails_on={4})
    until(site, [training], lambda: training.failed_gpus == 4)
    play(site, [training], 1)
    (node,) = site.slurm.listed[7].allocation.nodes
    site.slurm.lost = {node}
    play(site, [training], 15)
    assert not barred(site)


def test_a_new_attempt_is_told_at_once_that_its_ranks_may_change(site):
    """Its esrun may have asked before the controller knew the job, and waits for an answer."""
    site.look()
    unknown = site.controller.report_handler.orders(7, 0, job=site.controller.job(7))
    assert not unknown.in_place
    site.slurm.submit(7, elastic="2-4", gpus=2)
    site.slurm.pass_time(1)
    site.look()
    assert site.controller.engine.outbox.orders(7, 0).in_place
