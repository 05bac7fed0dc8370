"""What is done to a job in each state, and who wins when somebody interferes."""

import dataclasses
import math
import time

import pytest

from slurm_elastic.controller.state.time_limits import ExtensionTerms, TimeBudget, fresh
from slurm_elastic.controller.state.transition import TransitionState
from slurm_elastic.controller.transitions.steps.step_inputs import StepInputs, present_job
from slurm_elastic.controller.transitions.steps.transition_steps import TransitionSteps
from slurm_elastic.core.cluster import Allocation, JobState, UnusableNodes
from slurm_elastic.core.reason import Reason
from slurm_elastic.slurm.scontrol import ScontrolError
from tests.support.controller.job_records import FakeScontrol, Log, job, transition
from tests.support.decisions.reasons import words

PENDING = {"run": 1, "gpus": 4, "gpu_type": "a100", "min_nodes": 1}


class Stage:
    """One transition and its job."""

    def __init__(self, t, *others, down=(), lost=()):
        self.scontrol, self.log, self.t, self.others = FakeScontrol(), Log(), t, others
        self.steps = TransitionSteps(self.scontrol, self.log)
        self.opened, self.beside = [], ()
        self.unusable = UnusableNodes(frozenset((*down, *lost)), frozenset(lost))
        self.answering_s = math.inf
        self.shards = {}

    def advance(self, seen, admitted=(1,)):
        """Look at the job once; the state afterwards."""
        jobs = {j.job_id: j for j in ((seen,) if seen else ()) + self.others}
        site = StepInputs(
            jobs=jobs,
            sizes={"n1": 4, "n2": 4},
            unusable=self.unusable,
            admitted=frozenset(admitted),
            live=(self.t, *self.beside),
            open=self.opened.append,
            per_node={"gpu": {"a100": 4}},
            lease_s=300,
            answering_s=self.answering_s,
            shards=self.shards,
        )
        self.steps.advance(self.t, present_job(self.t, site.jobs), site, self.enter)
        return self.t.state

    def enter(self, t, state):
        t.state, t.tries, t.refused = state, 0, 0
        t.entered[state.value] = 0.0


def moving(state, **fields):
    return Stage(transition({"n2": 4}, {"n1": 1}, state, limit_s=600, **fields))


@pytest.mark.parametrize("state", [TransitionState.RESERVE, TransitionState.NOTIFY])
def test_a_new_directive_ends_a_change_that_has_not_touched_its_job(state):
    stage = moving(state)
    stage.t.entered |= {"revised": 0.0, "saved": 0.0}
    assert stage.advance(job({"n1": 1})) is TransitionState.UNDONE
    assert words(stage.t.problem) == "its new directive rules the change out"
    assert stage.scontrol.calls == []


def test_a_job_is_not_requeued_onto_a_node_that_was_drained_while_it_saved():
    stage = moving(TransitionState.NOTIFY)
    stage.t.entered["saved"] = 0.0
    stage.unusable = UnusableNodes(frozenset({"n2"}))
    assert stage.advance(job({"n1": 1})) is TransitionState.UNDONE
    assert stage.t.problem.code == "node-down"
    assert stage.scontrol.calls == []


def test_a_new_directive_lets_a_job_that_was_requeued_start_first():
    stage = moving(TransitionState.RESHAPE)
    stage.t.entered["revised"] = 0.0
    assert stage.advance(job(**PENDING)) is TransitionState.COOL


def test_a_move_goes_through_all_states():
    stage = moving(TransitionState.RESERVE)
    running = job({"n1": 1})
    assert stage.advance(running) is TransitionState.NOTIFY
    stage.t.entered["saved"] = 1.0
    assert stage.advance(running) is TransitionState.REQUEUE
    assert stage.advance(running) is TransitionState.DRAIN
    assert stage.scontrol.calls == [("requeue", "7")]
    assert stage.advance(job({"n1": 1}, state=JobState.COMPLETING, run=1)) is TransitionState.DRAIN
    assert stage.advance(job(run=1, gpus=1)) is TransitionState.RESHAPE
    assert stage.advance(job(run=1, gpus=1)) is TransitionState.COOL
    assert stage.scontrol.fields()["TresPerNode"] == "gres/gpu:a100:4"
    assert "ReqNodeList" not in stage.scontrol.fields()  # pinned only when it may start
    assert (
        stage.advance(job(**PENDING)) is TransitionState.COOL
    )  # Slurm's old credential is still alive
    stage.t.entered["drained"] = 0.0
    assert stage.advance(job(**PENDING)) is TransitionState.RELEASE
    assert stage.advance(job(**PENDING)) is TransitionState.VERIFY
    assert stage.opened == [stage.t]
    assert stage.scontrol.fields()["ReqNodeList"] == "n2"
    assert stage.advance(job({"n2": 4}, run=1)) is TransitionState.CLEAR
    assert stage.advance(job({"n2": 4}, run=1, reservation="selastic_1")) is TransitionState.DONE
    assert stage.scontrol.calls[-2:] == [("release", "7"), ("update", "7", {"ReservationName": ""})]


def test_a_job_that_starts_without_gpus_is_requeued_and_then_queued():
    stage = moving(TransitionState.VERIFY)
    gpuless = job(state=JobState.RUNNING, run=1)
    assert stage.advance(gpuless) is TransitionState.REQUEUE
    assert stage.advance(gpuless) is TransitionState.DRAIN
    assert stage.scontrol.calls == [("requeue", "7")]
    assert stage.advance(job(run=2)) is TransitionState.RESHAPE
    assert stage.advance(job(run=2)) is TransitionState.COOL
    stage.enter(stage.t, TransitionState.VERIFY)
    again = job(state=JobState.RUNNING, run=2)
    assert stage.advance(again) is TransitionState.REQUEUE
    assert stage.advance(again) is TransitionState.DRAIN
    assert stage.advance(job(run=3)) is TransitionState.RESHAPE
    assert stage.advance(job(run=3)) is TransitionState.UNDONE
    assert stage.t.problem == Reason("no-gpus-held")
    assert stage.scontrol.fields()["StartTime"] == "now"
    assert stage.scontrol.fields()["ReqNodeList"] == ""


STARTED_AND_SUSPENDED = job({"n2": 4}, run=1, state=JobState.SUSPENDED)


@pytest.mark.parametrize(
    ("state", "seen", "ends"),
    [
        (TransitionState.RESERVE, job(run=1), TransitionState.UNDONE),
        (TransitionState.NOTIFY, job(run=1), TransitionState.UNDONE),
        (TransitionState.NOTIFY, job({"n1": 1}, state=JobState.SUSPENDED), TransitionState.UNDONE),
        (TransitionState.NOTIFY, job({"n1": 1}, reason="JobHeldUser"), TransitionState.UNDONE),
        (TransitionState.REQUEUE, job({"n1": 1}, state=JobState.SUSPENDED), TransitionState.UNDONE),
        (TransitionState.DRAIN, job({"n1": 1}, state=JobState.SUSPENDED), TransitionState.UNDONE),
        (TransitionState.VERIFY, STARTED_AND_SUSPENDED, TransitionState.CLEAR),
        (TransitionState.COOL, STARTED_AND_SUSPENDED, TransitionState.VERIFY),
        (TransitionState.DRAIN, job({"n2": 1}, run=1), TransitionState.CLEAR),
        (TransitionState.RESHAPE, job(run=1, reason="JobHeldAdmin"), TransitionState.UNDONE),
        (TransitionState.COOL, job({"n1": 1}, run=1), TransitionState.VERIFY),
        (TransitionState.RELEASE, job(run=1, reason="JobHeldUser"), TransitionState.RESHAPE),
        (TransitionState.VERIFY, job(run=1, reason="JobHeldUser"), TransitionState.RESHAPE),
        (TransitionState.VERIFY, None, TransitionState.ENDED),
        (TransitionState.VERIFY, job({"n2": 4}, state=JobState.ENDED), TransitionState.ENDED),
    ],
)
def test_what_people_do_meanwhile_wins(state, seen, ends):
    assert moving(state).advance(seen) is ends


def test_a_held_job_is_never_given_a_priority():
    """It would lift the hold."""
    for state in (TransitionState.RESHAPE, TransitionState.RELEASE, TransitionState.VERIFY):
        stage = moving(state)
        for _ in range(3):
            if stage.t.state.live:
                stage.advance(job(run=1, reason="JobHeldUser"))
        assert stage.t.state is TransitionState.UNDONE
        assert all("Priority" not in c[2] for c in stage.scontrol.calls if c[0] == "update")


def test_another_job_with_the_same_id_is_let_alone():
    stage = moving(TransitionState.VERIFY)
    other = job({"n1": 4}, run=1)
    stage.t.key = "7@99"
    assert stage.advance(other) is TransitionState.ENDED
    assert stage.scontrol.calls == []


def test_taken_gpus_send_it_back_and_at_last_into_the_queue_at_min():
    taken = job({"n2": 4}, job_id=8, display_id="8")
    stage = Stage(transition({"n2": 4}, {"n1": 1}, TransitionState.COOL, limit_s=600), taken)
    stage.t.entered["drained"] = 0.0
    assert stage.advance(job(**PENDING)) is TransitionState.RESHAPE
    assert stage.t.target == stage.t.old
    stage.others = (taken, job({"n1": 4}, job_id=9, display_id="9"))
    stage.t.state = TransitionState.COOL
    assert stage.advance(job(run=1, gpus=1, gpu_type="a100")) is TransitionState.RESHAPE
    assert stage.t.target is None
    assert stage.advance(job(run=1)) is TransitionState.UNDONE
    assert stage.scontrol.fields()["StartTime"] == "now"
    assert stage.scontrol.fields()["TimeLimit"] == "00:10:00"


def test_a_drained_target_is_not_waited_for():
    stage = Stage(transition({"n2": 4}, {"n1": 1}, TransitionState.VERIFY), down=["n2"])
    assert stage.advance(job(**PENDING)) is TransitionState.RESHAPE
    assert stage.t.target == stage.t.old


def test_a_running_job_is_not_requeued_for_a_node_that_was_drained_meanwhile():
    stage = Stage(transition({"n1": 2}, {"n1": 4}, TransitionState.RESERVE), down=["n1"])
    assert stage.advance(job({"n1": 4})) is TransitionState.UNDONE
    assert stage.t.problem == Reason("node-down")
    assert not stage.scontrol.calls


@pytest.mark.parametrize(
    ("run", "lost", "start"),
    [(1, ["n1"], "now+120"), (1, ["n2"], "now"), (2, ["n2"], "now+120"), (2, [], "now")],
)
def test_a_job_whose_node_is_lost_waits_in_the_queue_as_long_as_slurm_would_let_it(
    run, lost, start
):
    entered = {"RELEASE": 0.0}
    stage = Stage(
        transition({"n2": 4}, {"n1": 1}, TransitionState.COOL, limit_s=600, entered=entered),
        job({"n1": 4, "n2": 4}, job_id=8, display_id="8"),
        lost=lost,
    )
    stage.t.entered["drained"] = 0.0
    while stage.t.state.live:
        stage.advance(
            job(**PENDING | {"run": run, "gpus": stage.t.target.gpus if stage.t.target else 1})
        )
    assert stage.scontrol.fields()["StartTime"] == start


def test_what_slurm_refuses_for_ever_ends():
    for state, ends in (
        (TransitionState.REQUEUE, TransitionState.UNDONE),
        (TransitionState.RESHAPE, TransitionState.UNDONE),
    ):
        stage = moving(state)
        stage.scontrol.refuse = "no"
        seen = job({"n1": 1}) if state is TransitionState.REQUEUE else job(run=1)
        for _ in range(100):
            try:
                stage.advance(seen)
            except ScontrolError:
                continue
            if not stage.t.state.live:
                break
        assert stage.t.state is ends
        assert "no" in words(stage.t.problem)


def test_a_job_that_does_not_answer_is_left_where_it_is():
    stage = moving(TransitionState.NOTIFY, notice_s=5.0)
    stage.t.entered["NOTIFY"] = time.time() - 6
    assert stage.advance(job({"n1": 1})) is TransitionState.UNDONE
    assert "no checkpoint within 5 s" in words(stage.t.problem)
    assert stage.scontrol.calls == []


def test_its_time_limit_is_what_is_left_to_the_second():
    stage = moving(TransitionState.NOTIFY, spare_s=30)
    stage.t.entered |= {"saved": 0.0}
    seen = job({"n1": 1}, time_limit_s=600, start_time=time.time() - 100)
    stage.advance(seen)
    assert stage.t.limit_s in (529, 530)


def test_a_job_that_is_preempted_waits_with_a_lease_in_its_own_shape():
    stage = Stage(transition(None, {"n1": 4}, TransitionState.RESHAPE, reservation=""))
    seen = job(run=1, directive="2-8", shape={"req_nodes": "n[1-2]"}, priority=4_000_000_000)
    assert stage.advance(seen) is TransitionState.DONE
    fields = stage.scontrol.calls[0][2]
    assert (fields["TresPerNode"], fields["ReqNodeList"]) == ("gres/gpu:a100:2", "n[1-2]")
    assert fields["StartTime"] == "now+300"
    assert stage.scontrol.calls[1] == ("release", "7")


def test_no_wait_lasts_longer_because_the_clock_was_set_back():
    stage = moving(TransitionState.VERIFY)
    ahead = time.time() + 3600
    stage.t.entered["VERIFY"] = ahead
    assert stage.advance(job(**PENDING)) is TransitionState.VERIFY
    assert stage.t.entered["VERIFY"] < ahead - 3000  # it begins anew
    stage = moving(TransitionState.COOL)
    stage.t.entered |= {"COOL": ahead, "drained": ahead}
    assert stage.advance(job(**PENDING)) is TransitionState.COOL
    for mark in ("drained", "COOL"):  # three seconds later, each
        assert stage.advance(job(**PENDING)) is TransitionState.COOL
        stage.t.entered[mark] -= 3
    assert stage.advance(job(**PENDING)) is TransitionState.RELEASE


def test_a_node_that_its_owner_excludes_meanwhile_is_not_waited_for():
    for state in (TransitionState.COOL, TransitionState.VERIFY):
        stage = moving(state)
        stage.t.entered["drained"] = 0.0
        assert stage.advance(job(**PENDING, excluded_nodes=("n2",))) is TransitionState.RESHAPE
        assert stage.t.target == stage.t.old
        assert "excluded" in words(stage.t.problem)
        both = moving(state)
        both.t.entered["drained"] = 0.0
        both.advance(job(**PENDING, excluded_nodes=("n1", "n2")))
        assert both.t.target is None


def test_a_job_that_slurm_could_not_launch_goes_back_and_is_not_left_held():
    failed = {"run": 2, "priority": 0, "reason": "launch_failed_requeued_held"}
    stage = moving(TransitionState.VERIFY)
    assert stage.advance(job(**failed)) is TransitionState.RESHAPE
    assert stage.t.target == stage.t.old
    assert stage.advance(job(**failed)) is TransitionState.COOL
    assert (
        stage.advance(job(**failed, gpus=1, gpu_type="a100", min_nodes=1)) is TransitionState.COOL
    )
    stage.t.entered["drained"] -= 3  # its credential is forgotten
    assert (
        stage.advance(job(**failed, gpus=1, gpu_type="a100", min_nodes=1))
        is TransitionState.RELEASE
    )
    assert (
        stage.advance(job(**failed)) is TransitionState.VERIFY
    )  # with a priority, which lifts the hold
    assert stage.advance(job(**failed)) is TransitionState.RESHAPE
    assert stage.advance(job(**failed)) is TransitionState.UNDONE
    assert stage.scontrol.calls[-1] == ("release", "7")


@pytest.mark.parametrize(
    ("state", "admitted", "back"),
    [
        (TransitionState.COOL, (), False),
        (TransitionState.RESERVE, (2,), False),
        (TransitionState.RESERVE, (), True),
    ],
)
def test_the_way_back_takes_no_gpus_that_another_job_is_about_to_get(state, admitted, back):
    """Two nodes go down in a change, and its jobs come back to where another grows meanwhile."""
    stage = moving(TransitionState.VERIFY)
    stage.unusable = UnusableNodes(frozenset({"n2"}))
    grows = transition({"n1": 4}, {"n1": 1}, state, id=2, job_id=8, display_id="8")
    stage.beside = (grows,)
    stage.others = (job({"n1": 1}, job_id=8, display_id="8"),)
    assert stage.advance(job(**PENDING), admitted=admitted) is TransitionState.RESHAPE
    assert stage.t.target == (stage.t.old if back else None)


def test_gpus_that_are_taken_after_all_are_not_waited_for():
    """Whoever gave them has them back: slurmctld died and forgot that it had shrunk."""
    taken = job({"n2": 4}, job_id=8, display_id="8")
    stage = Stage(transition({"n2": 4}, {"n1": 1}, TransitionState.VERIFY), taken)
    stage.t.entered["VERIFY"] = time.time() - 1
    assert stage.advance(job(**PENDING)) is TransitionState.VERIFY  # it may be on its way out
    stage.t.entered["VERIFY"] = time.time() - 7
    assert stage.advance(job(**PENDING)) is TransitionState.RESHAPE
    assert stage.t.target == stage.t.old


@pytest.mark.parametrize(
    "reason", ["QOSMaxGRESPerNode", "AssocGrpGRESMinutes", "MaxGRESRunMinsPerUser"]
)
def test_a_job_that_a_limit_keeps_from_starting_goes_back_after_seconds(reason):
    stage = moving(TransitionState.VERIFY)
    for waited_s, state in ((1, TransitionState.VERIFY), (7, TransitionState.RESHAPE)):
        stage.t.entered["VERIFY"] = time.time() - waited_s
        assert stage.advance(job(**PENDING, reason=reason)) is state
    assert stage.t.target == stage.t.old
    assert stage.t.problem == Reason("not-started", slurm_reason=reason)


def test_a_start_that_a_killed_slurmctld_may_have_forgotten_is_not_repeated_at_once():
    """The job's node runs it, ends it when slurmctld asks, and refuses another start just then."""
    stage = moving(TransitionState.VERIFY)
    stage.t.entered["VERIFY"], stage.answering_s = time.time() - 9, 1.0
    assert stage.advance(job(**PENDING)) is TransitionState.VERIFY
    assert not stage.scontrol.calls
    stage.answering_s = 7.0
    assert stage.advance(job(**PENDING)) is TransitionState.VERIFY
    assert stage.scontrol.fields()["StartTime"] == "now"


def requeued(state, **fields):
    """Return a stage whose job was requeued, which slurmctld then forgets."""
    return moving(state, entered={"REQUEUE": 0.0, "DRAIN": 0.1, state.value: 0.2}, **fields)


def ended(end_state="FAILED", *, run=0, at=2.0, **fields):
    end = {"end_state": end_state, "end_time": at, "exit_code": 143}
    return job(state=JobState.ENDED, run=run, **end, **fields)


@pytest.mark.parametrize("end_state", ["FAILED", "COMPLETED"])
@pytest.mark.parametrize("state", ["DRAIN", "RESHAPE", "COOL", "RELEASE", "VERIFY"])
def test_a_job_that_a_forgotten_requeue_has_ended_is_sent_back(state, end_state):
    stage = requeued(TransitionState(state))
    if state != "DRAIN":
        assert stage.advance(ended(end_state)) is TransitionState.DRAIN
    assert stage.advance(ended(end_state)) is TransitionState.DRAIN
    assert stage.scontrol.calls == [("requeue_ended", "7")]
    assert stage.advance(job(run=1, gpus=1)) is TransitionState.RESHAPE, "the change goes on"


@pytest.mark.parametrize("state", ["RESHAPE", "COOL", "RELEASE", "VERIFY"])
def test_a_forgotten_requeue_is_sent_again(state):
    stage = requeued(TransitionState(state))
    assert stage.advance(job({"n1": 1})) is TransitionState.REQUEUE
    assert stage.advance(job({"n1": 1})) is TransitionState.DRAIN
    assert stage.scontrol.calls == [("requeue", "7")]


@pytest.mark.parametrize(
    ("state", "tries", "end"),
    [
        ("NOTIFY", 0, ended()),
        ("REQUEUE", 0, ended()),
        ("REQUEUE", 1, ended("COMPLETED")),
        ("DRAIN", 0, ended("COMPLETED", at=0.0)),
        ("DRAIN", 0, ended("CANCELLED")),
        ("DRAIN", 0, ended("TIMEOUT")),
        ("DRAIN", 0, ended(run=1)),
        ("VERIFY", 0, ended(run=1)),
        ("CLEAR", 0, ended()),
    ],
)
def test_any_other_end_is_the_end(state, tries, end):
    stage = requeued(TransitionState(state), tries=tries)
    if state in ("NOTIFY", "REQUEUE"):
        del stage.t.entered["DRAIN"]
    if state == "NOTIFY":
        del stage.t.entered["REQUEUE"]
    assert stage.advance(end) is TransitionState.ENDED
    assert stage.scontrol.calls == []


def test_a_requeue_without_an_answer_may_have_been_carried_out_and_forgotten():
    stage = requeued(TransitionState.REQUEUE, tries=1)
    assert stage.advance(ended()) is TransitionState.DRAIN
    assert stage.advance(ended()) is TransitionState.DRAIN
    assert stage.scontrol.calls == [("requeue_ended", "7")]


def test_an_end_that_slurm_does_not_take_back_is_the_end():
    stage = requeued(TransitionState.DRAIN)
    stage.scontrol.refuse = "Requested operation is presently disabled"
    for _ in range(4):
        with pytest.raises(ScontrolError):
            stage.advance(ended())
    assert stage.advance(ended()) is TransitionState.ENDED


def test_a_job_that_was_waiting_is_not_taken_for_a_requeued_one():
    stage = Stage(transition({"n2": 4}, None, TransitionState.VERIFY))
    assert stage.advance(ended()) is TransitionState.ENDED


def test_a_shrunk_job_gets_a_longer_limit_and_a_limit_set_by_hand_stays(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1_000_600.0)
    terms = ExtensionTerms(paces={"planned": 0.5, "queue": 0.25}, most_s=100_000)
    ran = {"time_limit_s": 3600, "start_time": 1_000_000.0}

    def limit(budget, seen):
        stage = moving(TransitionState.NOTIFY, budget=budget, terms=terms, spare_s=0)
        stage.t.entered["saved"] = 0.0
        assert stage.advance(seen) is TransitionState.REQUEUE
        stage.t.state = TransitionState.RESHAPE
        stage.advance(job(**PENDING))
        return stage, stage.scontrol.fields()["TimeLimit"]

    stage, text = limit(fresh(3600), job({"n1": 1}, **ran))
    assert text == "01:40:00"  # 50 minutes are left, at half the pace
    assert stage.t.budget.extended_s == stage.t.limit_s - 3000 == 3000
    assert any("TimeLimit=6000 Extended=3000" in line for line in stage.log.lines)
    stage.t.state, stage.t.target = TransitionState.RESHAPE, None
    stage.advance(job(**PENDING, shape={}))
    assert stage.scontrol.fields()["TimeLimit"] == "03:20:00"
    half = TimeBudget(work_s=3600, plain_s=3600, pace=0.5, set_s=7200)
    stage, text = limit(half, job({"n1": 1}, **ran))
    assert text == "00:50:00"
    assert any("Reason=limit-set-by-others" in line for line in stage.log.lines)


def test_a_nice_value_that_slurm_ignored_is_given_back_again():
    stage = moving(TransitionState.CLEAR, nice=7)
    there = job({"n2": 4}, run=1)
    assert stage.advance(there) is TransitionState.CLEAR
    assert stage.advance(there) is TransitionState.CLEAR
    assert stage.scontrol.calls.count(("update", "7", {"Nice": "7"})) == 2
    assert stage.advance(job({"n2": 4}, run=1, nice=7)) is TransitionState.DONE


def test_a_job_that_goes_into_the_queue_instead_keeps_its_nice_value():
    """The start that came to nothing had taken it away."""
    stage = moving(TransitionState.RESHAPE, nice=7, problem=Reason("gpus-taken"))
    stage.t.target = None
    stage.t.entered[TransitionState.RELEASE.value] = 0.0
    there = job(**PENDING)
    assert stage.advance(there) is TransitionState.CLEAR
    assert stage.advance(there) is TransitionState.CLEAR
    assert stage.scontrol.calls[-2:] == [("release", "7"), ("update", "7", {"Nice": "7"})]
    assert stage.advance(job(**PENDING, nice=7)) is TransitionState.UNDONE


def test_a_hold_in_the_last_moment_is_not_lifted():
    stage = moving(TransitionState.CLEAR, nice=7)
    assert stage.advance(job(**PENDING, reason="JobHeldUser")) is TransitionState.UNDONE
    assert stage.scontrol.calls == []


def test_a_job_whose_owner_takes_its_nice_value_back_does_not_stay_in_transition():
    stage = moving(TransitionState.CLEAR, nice=7)
    states = (stage.advance(job({"n2": 4}, run=1)) for _ in range(30))
    assert TransitionState.DONE in states


def test_a_failed_job_is_not_asked_to_save_and_never_goes_back_to_where_it_failed():
    taken = job({"n2": 1}, job_id=8, display_id="8")
    stage = Stage(transition({"n2": 1}, {"n1": 4}, TransitionState.RESERVE, failed=True), taken)
    running = job({"n1": 4}, time_limit_s=3600, start_time=time.time() - 600)
    assert stage.advance(running) is TransitionState.REQUEUE
    assert 2990 <= stage.t.limit_s <= 3000
    stage.t.state = TransitionState.COOL
    stage.t.entered["drained"] = 0.0
    stage.others = (job({"n2": 4}, job_id=8, display_id="8"),)
    waiting = job(run=1, gpus=1, gpu_type="a100", min_nodes=1)
    assert stage.advance(waiting) is TransitionState.RESHAPE
    assert stage.t.target is None
    assert stage.advance(job(run=1)) is TransitionState.UNDONE


HALF = Allocation.of("a100", {"n1": 1}, half=True)
DIVIDED = {"run": 1, "gpus": 1, "min_nodes": 1, "shards": 2}


class DividedStage(Stage):
    """Job 7 is to have half of its GPU of n1, whose other GPUs are in use, or not all of them."""

    def __init__(self, used, *, shards=4):
        super().__init__(
            dataclasses.replace(
                transition({"n1": 1}, {"n1": 1}, TransitionState.RESHAPE),
                target=HALF, planned=HALF,
            ),
            job({"n1": used}, job_id=9),
        )  # fmt: skip
        self.shards = {"n1": shards}


def test_a_job_gets_half_of_its_gpu():
    stage = DividedStage(3)
    assert stage.advance(job(run=1, gpus=1)) is TransitionState.COOL
    assert stage.scontrol.fields()["TresPerNode"] == "gres/shard:2"
    stage.t.entered["drained"] = 0.0
    assert stage.advance(job(**DIVIDED)) is TransitionState.RELEASE
    assert stage.advance(job(**DIVIDED)) is TransitionState.VERIFY
    running = dataclasses.replace(job({"n1": 1}, run=1), allocation=HALF, parts=(("n1", 0),))
    assert stage.advance(running) is TransitionState.CLEAR
    assert stage.t.problem is None


@pytest.mark.parametrize(
    ("used", "shards", "reason"), [(2, 4, "gpu-free-meanwhile"), (3, 0, "gpu-undivided")]
)
def test_a_job_gets_its_whole_gpu_back_where_slurm_could_not_divide_it(used, shards, reason):
    stage = DividedStage(used, shards=shards)
    stage.advance(job(run=1, gpus=1))
    stage.t.entered["drained"] = 0.0
    stage.advance(job(**DIVIDED))
    assert stage.t.problem.code == reason
    assert stage.t.target == HALF.whole
