"""What is done to the companions of a change in each state."""

import pytest

from slurm_elastic.controller.state.transition import PlannedCompanion, TransitionState
from slurm_elastic.controller.transitions.order_outbox import OrderOutbox
from slurm_elastic.controller.transitions.steps.in_place_steps import InPlaceSteps
from slurm_elastic.controller.transitions.steps.step_inputs import StepInputs
from slurm_elastic.core.cluster import JobState, UnusableNodes
from slurm_elastic.core.member_orders import CompanionComment
from slurm_elastic.core.resize_kind import ResizeKind
from tests.support.controller.job_records import FakeScontrol, Log, job, transition

BASE = job({"n2": 2})


class Growth:
    """Job 7 on two GPUs of n2, and its companion on two of n1 that is to be released."""

    def __init__(self, *, released, elapsed_s, monkeypatch):
        self.scontrol = FakeScontrol()
        self.steps = InPlaceSteps(self.scontrol, OrderOutbox(), Log())
        self.t = transition({"n1": 2, "n2": 2}, {"n2": 2}, TransitionState.START)
        self.t.kind, self.t.joins = ResizeKind.IN_PLACE, [PlannedCompanion("n1", 2, 20)]
        self.t.tries = int(released)
        self.t.entered["START"] = 1000.0
        self.mark = CompanionComment(base=7, run=self.t.run, change=self.t.id)
        steps = "slurm_elastic.controller.transitions.steps.in_place_steps.time.time"
        monkeypatch.setattr(steps, lambda: 1000.0 + elapsed_s)

    def advance(self, *others, companion_state=JobState.PENDING):
        """Look at base, companion and other jobs once; the state afterwards."""
        companion = job(
            job_id=20,
            display_id="20",
            gpus=2,
            required_nodes=("n1",),
            state=companion_state,
            reason="JobHeldAdmin" if not self.t.tries else "Resources",
            companion=self.mark,
        )
        site = StepInputs(
            jobs={j.job_id: j for j in (BASE, *others)},
            sizes={"n1": 4, "n2": 4},
            unusable=UnusableNodes(),
            admitted=frozenset(),
            live=(self.t,),
            open=lambda _: None,
            per_node={"gpu": {"a100": 4}},
            lease_s=300,
            companions={20: companion},
        )
        self.steps.advance(self.t, BASE, site, self.enter)
        return self.t.state

    @staticmethod
    def enter(t, state):
        t.state = state


def test_a_new_directive_ends_a_change_before_its_companions_join(monkeypatch):
    growth = Growth(released=True, elapsed_s=4.0, monkeypatch=monkeypatch)
    growth.t.entered["revised"] = 1000.0
    assert growth.advance() is TransitionState.CANCEL
    assert growth.t.problem.code == "directive-changed"
    growth.t.state = TransitionState.JOIN
    growth.t.entered["JOIN"] = 1000.0
    assert growth.advance(companion_state=JobState.RUNNING) is TransitionState.JOIN


@pytest.mark.parametrize(("released", "elapsed_s"), [(False, 0.0), (True, 4.0)])
def test_no_companion_is_promised_gpus_that_another_job_has_got(monkeypatch, released, elapsed_s):
    """As when Slurm starts a job on two nodes with more GPUs on one of them than planned."""
    growth = Growth(released=released, elapsed_s=elapsed_s, monkeypatch=monkeypatch)
    other = job({"n1": 3}, job_id=9, display_id="9")
    assert growth.advance(other) is TransitionState.CANCEL
    assert growth.t.problem.code == "gpus-taken"
    assert growth.scontrol.calls == []


@pytest.mark.parametrize(
    "mark",
    [
        CompanionComment(base=9, run=0, change=2),
        CompanionComment(base=7, run=1, change=1),
        None,
    ],
)
def test_another_job_that_has_got_the_id_is_let_alone(monkeypatch, mark):
    """slurmctld forgets young companions when it is killed, and gives their ids to other jobs."""
    growth = Growth(released=True, elapsed_s=1.0, monkeypatch=monkeypatch)
    growth.mark = mark
    assert growth.advance(companion_state=JobState.RUNNING) is TransitionState.CANCEL
    growth.t.entered["CANCEL"] = 900.0
    assert growth.advance(companion_state=JobState.RUNNING) is TransitionState.UNDONE
    assert growth.scontrol.calls == []


def test_companions_of_a_change_that_is_given_up_are_cancelled(monkeypatch):
    growth = Growth(released=True, elapsed_s=11.0, monkeypatch=monkeypatch)
    growth.t.state, growth.t.entered["CANCEL"] = TransitionState.CANCEL, 1000.0
    assert growth.advance(companion_state=JobState.RUNNING) is TransitionState.CANCEL
    assert growth.scontrol.calls == [("cancel", "20")]


def test_a_companion_with_free_gpus_is_released(monkeypatch):
    growth = Growth(released=False, elapsed_s=0.0, monkeypatch=monkeypatch)
    other = job({"n1": 2}, job_id=9, display_id="9")
    assert growth.advance(other) is TransitionState.START
    assert [call[0] for call in growth.scontrol.calls] == ["release", "update"]
