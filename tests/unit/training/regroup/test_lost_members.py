"""Ranks that are lost while they join or share a training: the others go on."""

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.trainings.member_faults import MemberFault
from tests.support.trainings.training_runs import FakeLauncher, TrainingRuns

EPOCHS, STEPS = 12, 72
OPTIONS = {"epochs": EPOCHS, "step_s": 0.04}
LIBRARY = "slurm_elastic.training."


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of a training that nothing has disturbed."""
    runs = TrainingRuns(tmp_path_factory.mktemp("plain"))
    runs.run(1, epochs=EPOCHS)
    return runs.losses()


class Disturbed:
    """A training of two ranks, whose companions come and go."""

    def __init__(self, runs: TrainingRuns, launcher: FakeLauncher) -> None:
        self.runs, self.launcher = runs, launcher
        self._desired: dict[str, int] = {}
        self._port = 0

    def begin(self, size: int, faults: Sequence[MemberFault] = ()) -> None:
        """Start the base."""
        self.launcher.set_companions({})
        self.runs.start(size, launcher=self.launcher, faults=faults, **OPTIONS)
        self._port = int(self.launcher.wait_for_group(can=True)["port"])

    def add(self, job: int, size: int = 1, faults: Sequence[MemberFault] = ()) -> list:
        """Start a companion, and desire it."""
        ranks = self.runs.start_companion(job, size, port=self._port, faults=faults, **OPTIONS)
        self._desired |= {str(job): size}
        self.launcher.set_companions(self._desired)
        return ranks

    def remove(self, job: int) -> None:
        """No longer desire a companion."""
        del self._desired[str(job)]
        self.launcher.set_companions(self._desired)

    def end(self, codes: Sequence[int], undisturbed: dict[int, float]) -> None:
        """Check that the training ends as if nothing had happened."""
        assert self.runs.join() == list(codes), self.runs.log()
        assert sorted(self.runs.losses()) == list(range(1, STEPS + 1))
        assert self.runs.losses() == pytest.approx(undisturbed, abs=1e-6)


@pytest.fixture
def disturbed(runs: TrainingRuns, launcher: FakeLauncher) -> Disturbed:
    """Return a training that has not begun."""
    return Disturbed(runs, launcher)


@pytest.mark.parametrize(
    "function",
    [
        "regroup.regrouping:GroupMember._form",  # asked to form the group
        "ranks.group_forming:_form",  # while all others form it
        "regroup.regroup_member:RegroupMember._receive_from",  # formed, not ready
        "regroup.regrouping:receive_state",  # ready: in or before the switch
        "regroup.live_training:LiveTraining.take_over",  # after the switch
    ],
)
def test_a_rank_that_dies_while_it_joins_does_not_stop_the_others(
    disturbed: Disturbed, undisturbed: dict[int, float], function: str
) -> None:
    disturbed.begin(2)
    ranks = disturbed.add(4711, 2, [MemberFault(rank=47110, function=LIBRARY + function)])
    for rank in ranks:
        rank.join(PATIENCE_S)
    codes = [rank.exitcode for rank in ranks]
    assert codes == [-signal.SIGKILL, 1], disturbed.runs.dump_stacks()
    disturbed.remove(4711)
    disturbed.add(4712)
    joined = disturbed.launcher.wait_for_group(companions={"4712": 1})
    assert not joined["lost"]
    disturbed.end([0, 0, -signal.SIGKILL, 1, 0], undisturbed)


def test_the_loss_of_a_companion_is_a_shrink(
    disturbed: Disturbed, undisturbed: dict[int, float]
) -> None:
    disturbed.begin(2)
    disturbed.add(4712)
    disturbed.launcher.wait_for_group(companions={"4712": 1})
    disturbed.add(4711, 2, [MemberFault(rank=47110, step=40)])
    disturbed.launcher.wait_for_group(companions={"4711": 2, "4712": 1})
    lost = disturbed.launcher.wait_for_group(lost=["4711"])
    assert lost["companions"] == {"4712": 1}
    assert lost["step"] == 39
    disturbed.end([0, 0, 0, -signal.SIGKILL, 1], undisturbed)


@pytest.mark.parametrize("behind", [0, 1])
def test_a_rank_that_is_one_step_behind_receives_it(
    disturbed: Disturbed, undisturbed: dict[int, float], behind: int
) -> None:
    disturbed.begin(2, [MemberFault(rank=behind, missed=39)])
    disturbed.add(4711, 1, [MemberFault(rank=47110, step=40)])
    disturbed.launcher.wait_for_group(companions={"4711": 1})
    lost = disturbed.launcher.wait_for_group(lost=["4711"])
    assert lost["companions"] == {}
    assert lost["step"] == 39
    disturbed.end([0, 0, -signal.SIGKILL], undisturbed)


def test_a_companion_that_gets_sigterm_leaves_after_a_step(
    disturbed: Disturbed, undisturbed: dict[int, float]
) -> None:
    disturbed.begin(1)
    (rank,) = disturbed.add(4711)
    disturbed.launcher.wait_for_group(companions={"4711": 1})
    disturbed.runs.wait_for_step(20)
    rank.terminate()
    left = disturbed.launcher.wait_for_group(lost=["4711"])
    assert left["companions"] == {}
    disturbed.end([0, 0], undisturbed)


def test_a_notice_while_ranks_join_comes_first(
    disturbed: Disturbed, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    disturbed.begin(2)
    launcher = disturbed.launcher
    launcher.order("notice", notice=1)
    disturbed.add(4711)
    launcher.wait_for("saved", notice=1)
    launcher.order("resume")
    launcher.wait_for_group(companions={"4711": 1})
    launcher.order("notice", notice=2)
    saved = launcher.wait_for("saved", notice=2)
    assert saved["step"] < STEPS
    launcher.order("resume")
    disturbed.end([0, 0, 0], undisturbed)


def test_ranks_of_another_training_cannot_join(
    disturbed: Disturbed, undisturbed: dict[int, float]
) -> None:
    disturbed.begin(1)
    runs, launcher = disturbed.runs, disturbed.launcher
    port = int(launcher.wait_for_group(can=True)["port"])
    (rank,) = runs.start_companion(4711, 1, port=port, model="narrow", **OPTIONS)
    launcher.set_companions({"4711": 1})
    rank.join(PATIENCE_S)
    assert rank.exitcode == 1
    assert "it runs another training than rank 0" in runs.log()
    disturbed.end([0, 1], undisturbed)


def test_the_loss_of_a_rank_of_the_base_ends_the_attempt(disturbed: Disturbed) -> None:
    disturbed.begin(2, [MemberFault(rank=1, step=40)])
    disturbed.add(4711)
    disturbed.launcher.wait_for_group(companions={"4711": 1})
    assert disturbed.runs.join() == [1, -signal.SIGKILL, 1]
    assert "of the base has ended" in disturbed.runs.log()


def test_companions_save_what_the_base_has_lost(
    disturbed: Disturbed, undisturbed: dict[int, float]
) -> None:
    disturbed.begin(1, [MemberFault(rank=0, step=60)])
    disturbed.add(4711, 2)
    disturbed.launcher.wait_for_group(companions={"4711": 2})
    runs = disturbed.runs
    assert runs.join() == [-signal.SIGKILL, 1, 1]
    assert runs.saved_steps()[-1] == max(runs.losses()) == 59
    assert runs.log().count("rank 0 is lost; saved step 59") == 1
    assert not list((runs.out / "ckpt").glob(".tmp.*"))
    runs.run(1, **OPTIONS)
    assert "resumed from step 59" in runs.log()
    disturbed.end([], undisturbed)
