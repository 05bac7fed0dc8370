"""A job grows in place into GPUs that another one leaves: a controller on a simulated Slurm."""

import pytest

from slurm_elastic.core.cluster import JobState
from tests.support.controller.simulated_slurm import SimulatedSite, short_trials
from tests.support.controller.simulated_training import SimulatedTraining
from tests.unit.controller.transitions.test_failed_changes import play
from tests.unit.placement.test_binding_proposals import Told

TEXT = short_trials(queue="slurm") + 'in_place = "auto"\n'


class Pair:
    """Jobs 1 and 2 with a GPU each of n1; job 1 has both of n2 as well."""

    def __init__(self, monkeypatch):
        self.policy = Told()
        self.site = SimulatedSite(monkeypatch, {"n1": 2, "n2": 2}, TEXT, policy=self.policy)
        self.slurm = self.site.slurm
        self.trainings = {}
        for job_id in (1, 2):
            self.slurm.submit(job_id, elastic="1-3,sizes=1:3", gpus=1, required_nodes=("n1",))
            self.trainings[job_id] = SimulatedTraining(self.site, job_id)
        self.policy.wishes = {1: [("a100", 3)]}
        self.until(lambda: self.gpus == (3, 1))
        self.until(lambda: not self.live)
        self.play(6)

    @property
    def gpus(self):
        return tuple(t.gpus for t in self.trainings.values())

    @property
    def live(self):
        return {i: t.state.value for i, t in self.site.controller.engine.live.items()}

    def hand_over(self):
        self.policy.wishes = {1: [("a100", 1)], 2: [("a100", 3)]}

    def companions(self, base, *states):
        listed = self.slurm.listed.values()
        mine = [j for j in listed if j.companion is not None and j.companion.base == base]
        return [j for j in mine if j.state in (states or (JobState.PENDING, JobState.RUNNING))]

    def play(self, seconds):
        play(self.site, list(self.trainings.values()), seconds, tick=0.5)

    def until(self, condition, seconds=300):
        for _ in range(2 * seconds):
            self.play(0.5)
            if condition():
                return
        raise AssertionError([str(line) for line in self.site.log.lines[-20:]])

    def ends(self):
        """Return state and problem of the newest change of each job."""
        rows = {}
        for row in self.site.ledger.transitions():
            rows[row["job_id"]] = (row["state"], (row["problem"] or {}).get("code"))
        return rows

    def trained_on(self):
        """Check that neither job was requeued, stopped or lost a step."""
        for job_id, training in self.trainings.items():
            assert self.slurm.listed[job_id].run == 0
            steps = [step for step, _ in training.trained]
            assert steps == list(range(1, len(steps) + 1))


@pytest.fixture
def pair(monkeypatch):
    pair = Pair(monkeypatch)
    yield pair
    pair.site.close()


def test_the_taker_is_first_in_the_queue_before_the_giver_leaves(pair):
    pair.hand_over()
    pair.until(lambda: pair.companions(2))
    assert pair.gpus == (3, 1), "the giver trains on until then"
    pair.until(lambda: pair.live.get(1) == "LEAVE")
    (taker,) = pair.companions(2)
    assert taker.state is JobState.PENDING
    assert taker.priority > 10
    assert taker.reservation
    pair.until(lambda: not pair.companions(1))
    pair.play(0.5)
    assert pair.companions(2, JobState.RUNNING), "it starts as soon as the GPUs are free"
    pair.until(lambda: pair.gpus == (1, 3))
    pair.until(lambda: not pair.live)
    pair.trained_on()
    (taker,) = pair.companions(2)
    assert (taker.priority, taker.reservation) == (10, "")
    assert set(pair.ends().values()) == {("DONE", None)}


def test_a_giver_that_does_not_leave_is_cancelled(pair):
    pair.trainings[1].fault = "stays"
    pair.hand_over()
    pair.until(lambda: pair.gpus == (1, 3))
    pair.until(lambda: not pair.live)
    pair.trained_on()
    assert set(pair.ends().values()) == {("DONE", None)}


@pytest.mark.parametrize("fault", ["refused", "silent"])
def test_a_taker_that_fails_holds_the_giver_up_for_a_short_time(pair, fault):
    pair.trainings[2].fault = fault
    pair.hand_over()
    pair.until(lambda: pair.gpus[0] == 1, seconds=60)
    pair.trained_on()


def test_a_limit_that_counts_the_givers_gpus_is_no_obstacle(pair):
    """Slurm starts the companion of the taker only once the other has left."""
    pair.slurm.companions_wait_for = "QOSMaxGRESPerUser"
    pair.hand_over()
    pair.until(lambda: pair.live.get(1) == "LEAVE")
    pair.trainings[1].fault = "stays"
    pair.play(20)
    assert pair.live[2] == "START"
    pair.slurm.companions_wait_for = ""
    pair.trainings[1].fault = ""
    pair.until(lambda: pair.gpus == (1, 3))


def test_where_the_gpus_go_to_another_job_the_taker_gives_up(pair):
    pair.hand_over()
    pair.until(lambda: pair.live.get(1) == "LEAVE")
    pair.slurm.companions_wait_for = "Resources"
    pair.policy.wishes = {}
    pair.until(lambda: not pair.companions(1))
    pair.slurm.submit(8, gpus=2)
    pair.until(lambda: not pair.live)
    assert pair.ends()[2] == ("UNDONE", "gpus-taken")
    assert not pair.companions(2)
    pair.play(10)
    assert pair.site.controller.view.records[2].in_place, "others have taken them: not barred"
    pair.trained_on()


@pytest.mark.parametrize(
    ("job_id", "state"),
    [(1, "RESERVE"), (2, "ASK"), (2, "PIN"), (2, "START"), (1, "LEAVE"), (2, "JOIN"), (1, "FREE")],
)
def test_a_controller_that_dies_in_any_state_leaves_two_trainings(pair, job_id, state):
    """The states of the taker and of the giver, as the ledger keeps them."""
    enter = pair.site.controller.engine._enter

    def die(transition, entered):
        enter(transition, entered)
        if (transition.job_id, entered.value) == (job_id, state):
            raise SystemExit

    pair.site.controller.engine._enter = die
    pair.hand_over()
    if state == "RESERVE":
        pair.until(lambda: pair.live)
    else:
        with pytest.raises(SystemExit):
            pair.play(120)
    pair.site.restart()
    pair.until(lambda: pair.gpus == (1, 3))
    pair.until(lambda: not pair.live)
    pair.trained_on()
    assert len(pair.companions(2)) == 1
    assert not pair.companions(1)


def test_a_giver_that_is_cancelled_by_its_user_leaves_the_taker_its_gpus(pair):
    pair.hand_over()
    pair.until(lambda: pair.live.get(2) == "START")
    pair.slurm.end(1)
    del pair.trainings[1]
    pair.until(lambda: pair.gpus == (3,))
    pair.until(lambda: not pair.live)
