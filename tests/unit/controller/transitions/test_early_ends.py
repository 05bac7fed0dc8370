"""Jobs that end by a change: their batch script fails at once, or a requeue is forgotten."""

import pytest

from slurm_elastic.controller.transitions.transition_records import last_change
from slurm_elastic.core.cluster import JobState
from slurm_elastic.slurm.scontrol import ScontrolError
from tests.support.controller.simulated_script import SimulatedScript
from tests.support.controller.simulated_slurm import SimulatedSite, SimulatedSlurm, short_trials
from tests.unit.controller.transitions.test_failed_changes import (
    outcomes,
    play,
    sizes,
)


@pytest.fixture
def site(monkeypatch):
    site = SimulatedSite(monkeypatch, {"n1": 4}, short_trials())
    yield site
    site.close()


@pytest.mark.parametrize("tick", [0.5, 5.0])
def test_it_goes_back_to_where_it_worked_and_completes(site, tick):
    site.slurm.submit(7, elastic="1-4,sizes=1:2:4", gpus=1)
    script = SimulatedScript(site, 7, {4: "early"}, most=60)
    play(site, [script], 1200, tick=tick)
    assert script.saved == 60
    started = sizes(site)
    assert started[:3] == [1, 4, 1], "first back to where it worked"
    assert started.count(4) == 1
    codes = [code for _, _, code in site.slurm.ends]
    assert codes == [3, 0]
    failed = site.slurm.ends[0][1]
    at = {run: time for time, _, run, _ in site.slurm.starts}
    assert at[failed + 1] - at[failed] < 60, "it does not wait for Slurm's two minutes"
    assert ("grow", "4", "failed") in outcomes(site)


def test_a_start_and_an_end_between_two_looks_of_one_round_count_too(site, monkeypatch):
    site.slurm.submit(7, elastic="1-4,sizes=1:2:4", gpus=1)
    script = SimulatedScript(site, 7, most=60)
    engine = site.controller.engine
    step = engine.step

    def step_and_end(*arguments, **options):
        step(*arguments, **options)
        if sizes(site) == [1] and engine.live:
            site.slurm.pass_time(0.5)
            if sizes(site) == [1, 4]:
                site.slurm.end(7, 3)
                site.controller.schedule.at_once()

    monkeypatch.setattr(engine, "step", step_and_end)
    play(site, [script], 1200)
    assert script.saved == 60
    assert [code for _, _, code in site.slurm.ends] == [3, 0]
    assert sizes(site)[:3] == [1, 4, 1]


def test_where_it_fails_everywhere_it_is_held(site):
    site.slurm.submit(7, elastic="1-4,sizes=1:4", gpus=1)
    script = SimulatedScript(site, 7, {4: "early"})
    while not site.slurm.ends:
        play(site, [script], 0.5)
    script.fails = {1: "early", 4: "early"}
    play(site, [script], 400)
    job = site.slurm.listed[7]
    assert (job.state, job.reason) == (JobState.PENDING, "JobHeldUser")
    assert site.controller.view.records[7].stopped.code == "trials-failed"
    assert [code for _, _, code in site.slurm.ends] == [3, 3]


@pytest.mark.parametrize(
    "how", ["never trained", "no change", "late", "cancelled", "reported", "observes"]
)
def test_any_other_end_is_the_end(site, how):
    site.slurm.submit(7, elastic="1-4,sizes=1:4", gpus=1)
    script = SimulatedScript(site, 7, {4: "hang"} if how in ("late", "reported") else {})
    if how == "never trained":
        site.slurm.pass_time(1)
        site.look()
        site.slurm.end(7, 3)
    elif how == "no change":
        play(site, [script], 12)
        assert sizes(site) == [1]
        site.slurm.end(7, 3)
    else:
        script.told = lambda: how == "reported" or len(sizes(site)) < 2
        while sizes(site) != [1, 4]:
            play(site, [script], 0.5)
        play(site, [script] if how == "reported" else [], 130 if how == "late" else 4)
        if how == "observes":
            site.controller.retire()
        if how == "reported":
            site.restart()  # the new controller knows of the report from the ledger
        site.slurm.end(7, 3)
        if how == "cancelled":
            site.slurm._set(site.slurm.listed[7], end_state="CANCELLED")
    play(site, [], 60)
    if how == "observes":
        site.restart()
        play(site, [], 60)
    assert site.slurm.listed[7].state is JobState.ENDED


@pytest.mark.parametrize("ends", ["before the restart", "after the restart"])
@pytest.mark.parametrize("seen", ["started", "released"])
def test_a_controller_started_meanwhile_sends_it_back_too(site, seen, ends):
    site.slurm.submit(7, elastic="1-4,sizes=1:2:4", gpus=1)
    script = SimulatedScript(site, 7, most=60)
    while sizes(site) != [1, 4]:
        site.slurm.pass_time(0.5)
        if sizes(site) != [1, 4]:
            script.step()
            site.look()
    if seen == "started":
        site.look()
    if ends == "before the restart":
        site.slurm.pass_time(5)
        site.slurm.end(7, 3)
        site.slurm.pass_time(30)
        site.restart()
    else:
        site.restart()
        play(site, [], 5)
        site.slurm.end(7, 3)
    play(site, [script], 1200)
    assert [code for _, _, code in site.slurm.ends] == [3, 0]
    assert sizes(site)[:3] == [1, 4, 1], "first back to where it worked"
    assert script.saved == 60


def test_a_controller_that_dies_while_it_sends_a_job_back(site, monkeypatch):
    def die(job):
        raise KeyboardInterrupt

    site.slurm.submit(7, elastic="1-4,sizes=1:2:4", gpus=1)
    script = SimulatedScript(site, 7, {4: "early"}, most=60)
    with monkeypatch.context() as context:
        context.setattr(site.slurm, "requeue_ended", die)
        with pytest.raises(KeyboardInterrupt):
            play(site, [script], 100)
    site.restart()
    play(site, [script], 1200)
    assert [code for _, _, code in site.slurm.ends] == [3, 0]
    assert sizes(site)[:3] == [1, 4, 1], "first back to where it worked"


def test_slurm_may_refuse_it(site, monkeypatch):
    def refuse(job):
        raise ScontrolError("Requested operation is presently disabled")

    monkeypatch.setattr(site.slurm, "requeue_ended", refuse)
    site.slurm.submit(7, elastic="1-4,sizes=1:4", gpus=1)
    play(site, [SimulatedScript(site, 7, {4: "early"})], 100)
    assert site.slurm.listed[7].state is JobState.ENDED
    assert len([x for x in site.log.lines if "presently disabled" in x]) == 1


# --- Slurm cannot launch a job ---


@pytest.mark.parametrize("restarts", [False, True])
def test_a_job_that_is_not_launched_where_a_change_sent_it_is_not_left_on_hold(
    monkeypatch, restarts
):
    site = SimulatedSite(monkeypatch, {"n1": 1, "n2": 4}, short_trials())
    site.slurm.submit(7, elastic="1-4,sizes=1:4", gpus=1)
    script = SimulatedScript(site, 7, most=60)
    while sizes(site) != [1, 4]:
        play(site, [script], 0.5)
    while site.controller.engine.live:
        play(site, [], 0.5)
    site.slurm.fail_launch(7)
    failed_at = site.slurm.now
    if restarts:
        site.restart()
    while len(sizes(site)) == 2:
        assert site.slurm.now < failed_at + 30, "it does not wait for Slurm's two minutes"
        play(site, [script], 0.5)
    assert site.slurm.starts[-1][3].nodes == ("n1",)
    play(site, [script], 900)
    assert script.saved == 60
    site.close()


@pytest.mark.parametrize("how", ["first start", "second start", "observes"])
def test_holds_of_other_starts_are_left_to_their_owner(site, how):
    site.slurm.submit(7, elastic="1-4,sizes=1:4", gpus=1)
    script = SimulatedScript(site, 7, most=600)
    if how == "first start":
        play(site, [script], 2)
    else:
        while sizes(site) != [1, 4] or site.controller.engine.live:
            play(site, [script], 0.5)
        play(site, [script], 20)
    if how == "second start":  # the one after the change was Slurm's
        site.slurm.send_back(7)
        site.slurm.pass_time(200)
    if how == "observes":
        site.controller.retire()
    site.slurm.fail_launch(7)
    site.slurm.lost.clear()
    play(site, [], 60)
    assert site.slurm.listed[7].reason == "launch_failed_requeued_held"


# --- slurmctld is killed and has forgotten a requeue, which has ended the attempt ---


def forgets(site, monkeypatch, *, ends_after=0.0, dies=False):
    """Let slurmctld forget the first requeue, which ends the attempt with 143 some seconds later.

    Args:
        dies: the controller is killed before it has written that the requeue was sent.
    """
    forgotten = []

    def requeue(slurm, job):
        if forgotten:
            SimulatedSlurm.requeue(slurm, job)
            return
        forgotten.append(slurm.now + ends_after)
        if dies:
            raise KeyboardInterrupt
        end_if_due()

    def end_if_due():
        if forgotten and site.slurm.now >= forgotten[0]:
            forgotten[0] = float("inf")
            job = site.slurm.listed[7]
            if (job.state, job.run) == (JobState.RUNNING, 0):
                site.slurm.end(7, 143)

    monkeypatch.setattr(site.slurm, "requeue", lambda job: requeue(site.slurm, job))
    return end_if_due


def completes(site, script):
    """Play to the end: the job has all its checkpoints and never ends otherwise."""
    play(site, [script], 900)
    assert script.saved == 60
    assert site.slurm.listed[7].end_state == "COMPLETED"


@pytest.mark.parametrize("ends_after", [0.0, 3.0])
def test_the_change_goes_on(site, monkeypatch, ends_after):
    site.slurm.submit(7, elastic="1-4,sizes=1:4", gpus=1)
    script = SimulatedScript(site, 7, most=60)
    end_if_due = forgets(site, monkeypatch, ends_after=ends_after)
    for _ in range(400):
        play(site, [script], 0.5)
        end_if_due()
        if len(site.slurm.starts) == 2:
            break
    assert sizes(site) == [1, 4]
    assert [code for _, _, code in site.slurm.ends] == [143]
    completes(site, script)
    assert [code for _, _, code in site.slurm.ends] == [143, 0]
    assert ("grow", "4", "done") in outcomes(site)


@pytest.mark.parametrize("ends_after", [0.0, 5.0, 30.0])
def test_the_controller_is_killed_with_it(site, monkeypatch, ends_after):
    site.slurm.submit(7, elastic="1-4,sizes=1:4", gpus=1)
    script = SimulatedScript(site, 7, most=60)
    end_if_due = forgets(site, monkeypatch, ends_after=ends_after, dies=True)
    with pytest.raises(KeyboardInterrupt):
        play(site, [script], 200)
    end_if_due()
    site.restart()
    for _ in range(100):
        play(site, [], 0.5)
        end_if_due()
    assert [code for _, _, code in site.slurm.ends] == [143]
    assert site.slurm.listed[7].state is not JobState.ENDED
    completes(site, script)


def test_the_controller_is_killed_while_it_waits(site, monkeypatch):
    site.slurm.submit(7, elastic="1-4,sizes=1:4", gpus=1)
    script = SimulatedScript(site, 7, most=60)
    end_if_due = forgets(site, monkeypatch, ends_after=2.0)
    for _ in range(400):
        play(site, [script], 0.5)
        if any("State=DRAIN" in str(line) for line in site.log.lines):
            break
    site.restart()
    for _ in range(10):
        play(site, [], 0.5)
        end_if_due()
    completes(site, script)
    assert sizes(site)[:2] == [1, 4], "the change goes on"


@pytest.mark.parametrize("how", ["seen at once", "restarted", "another change begins"])
def test_a_change_that_is_over_is_forgotten(site, how):
    site.slurm.submit(7, elastic="1-4,sizes=1:4", gpus=1)
    script = SimulatedScript(site, 7, most=60)
    while sizes(site) != [1, 4]:
        play(site, [script], 0.5)
    play(site, [script], 3)
    assert not site.controller.engine.live
    job = site.slurm.listed[7]
    assert job.run == 1
    site.slurm._set(job, run=0, allocation=site.slurm.starts[0][3], start_time=job.start_time)
    if how == "another change begins":  # as the job seems to run on one GPU
        ledger = site.controller.ledger
        body = last_change(ledger, job).to_body() | {"state": "ENDED", "entered": {"NOTIFY": 1.0}}
        ledger.put_transition(ledger.add_transition(7, job.key, body), "ENDED", body, live=False)
    site.slurm.end(7, 143)
    if how == "restarted":
        site.restart()
    completes(site, script)


def test_a_job_that_fails_by_itself_later_is_not_sent_back(site, monkeypatch):
    """The controller died before it could send the requeue, and the job was told to go on."""
    site.slurm.submit(7, elastic="1-4,sizes=1:4", gpus=1)
    script = SimulatedScript(site, 7, most=60)
    end_if_due = forgets(site, monkeypatch, ends_after=130.0, dies=True)
    with pytest.raises(KeyboardInterrupt):
        play(site, [script], 200)
    site.restart()
    for _ in range(280):
        play(site, [], 0.5)
        end_if_due()
    assert site.slurm.listed[7].state is JobState.ENDED
