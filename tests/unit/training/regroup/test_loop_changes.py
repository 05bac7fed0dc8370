"""Ranks join and leave a training whose loop belongs to the script, between two of its steps."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.job.rank_socket import RESTART_CODE
from slurm_elastic.training.signals import STOPPED
from tests.support.trainings.loop_runs import LoopRuns
from tests.support.trainings.member_faults import MemberFault
from tests.support.trainings.training_runs import FakeLauncher

OPTIONS: dict[str, Any] = {"in_place": True}
LIBRARY = "slurm_elastic.training."


@pytest.fixture
def loops(tmp_path: Path) -> Iterator[LoopRuns]:
    started = LoopRuns(tmp_path / "run")
    yield started
    started.kill()


class Changed:
    """A training of a loop, whose companions come and go until it is stopped."""

    def __init__(self, runs: LoopRuns, launcher: FakeLauncher, **options: Any) -> None:
        self.runs, self.launcher = runs, launcher
        self._options = OPTIONS | options
        self._desired: dict[str, int] = {}
        self._port = 0

    def begin(self, size: int) -> None:
        """Start the base."""
        self.launcher.set_companions({})
        endless = {"step_s": 0.03, "epochs": 10_000, "steps": 10_000}
        self.runs.start(size, launcher=self.launcher, **self._options | endless)
        self._port = int(self.launcher.wait_for_group(can=True)["port"])

    def add(self, job: int, size: int, **options: Any) -> None:
        """Start a companion, and desire it."""
        options |= {"step_s": 0.03, "epochs": 10_000, "steps": 10_000}
        self.runs.start_companion(job, size, port=self._port, **self._options | options)
        self._desired |= {str(job): size}
        self.launcher.set_companions(self._desired)

    def grow(self, job: int, size: int) -> None:
        """Let a companion join, and take some steps with it."""
        self.add(job, size)
        joined = self.launcher.wait_for_group(companions=dict(self._desired))
        assert not joined["lost"]
        self.runs.wait_for_step(joined["step"] + 3)

    def shrink(self, job: int) -> None:
        """Let a companion leave, and take some steps without it."""
        del self._desired[str(job)]
        number = max(line.get("generation", 0) for line in self.launcher.group)
        self.launcher.set_companions(self._desired)
        left = self.launcher.wait_for_group(generation=number + 1)
        assert not left["lost"]
        self.runs.wait_for_step(left["step"] + 3)

    def stop(self) -> list[int | None]:
        """Stop the training at a boundary; return the exit codes."""
        os.kill(self.runs.ranks[0].pid, signal.SIGTERM)
        return self.runs.join()

    def check(self, tmp_path: Path, *, killed_after: int | None = None) -> None:
        """Compare with an undisturbed run of one rank.

        Args:
            tmp_path: for that run.
            killed_after: step of which a rank may have been killed before its record was written.
        """
        steps = max(self.runs.losses())
        plain = LoopRuns(tmp_path / "plain")
        plain.run(1, **self._options | {"epochs": steps // 6 + 1, "steps": steps})
        assert sorted(self.runs.losses()) == list(range(1, steps + 1))
        assert len((self.runs.out / "losses.jsonl").read_text().splitlines()) == steps
        expected = {n: loss for n, loss in plain.losses().items() if n <= steps}
        assert self.runs.losses() == pytest.approx(expected, abs=1e-6)
        samples, expected_samples = self.runs.samples_of_steps(), plain.samples_of_steps()
        for step in set(range(1, steps + 1)) - {killed_after}:
            assert samples[step] == expected_samples[step]


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ([1, 3], {"script": "dataset"}),
        ([2, 4, 2], {"script": "dataset", "workers": 1}),
        ([1, 3, 1], {"script": "steps"}),
        ([2, 3, 2], {"script": "dataset", "stream": True}),
    ],
    ids=["grows", "workers", "steps", "stream"],
)
def test_a_loop_whose_ranks_change_equals_an_undisturbed_one(
    tmp_path: Path,
    launcher: FakeLauncher,
    loops: LoopRuns,
    sizes: list[int],
    options: dict[str, Any],
) -> None:
    """Two optimizers, a schedule, an average of the weights, a scaler, dropout, augmentation."""
    changed = Changed(loops, launcher, **options)
    changed.begin(sizes[0])
    changed.grow(4711, sizes[1] - sizes[0])
    if len(sizes) == 3:
        changed.shrink(4711)
    codes = changed.stop()
    left = [0] * (sizes[1] - sizes[-1])
    assert codes == [STOPPED] * sizes[-1] + left, loops.log()
    assert loops.sizes() == sizes
    changed.check(tmp_path)


def test_a_rank_that_dies_while_it_joins_does_not_stop_the_others(
    tmp_path: Path, launcher: FakeLauncher, loops: LoopRuns
) -> None:
    changed = Changed(loops, launcher)
    changed.begin(2)
    dies = MemberFault(rank=47110, function=LIBRARY + "loop.live_loop:LiveLoop.take_over")
    changed.add(4711, 1, faults=[dies])
    lost = launcher.wait_for_group(lost=["4711"])
    assert lost["companions"] == {}
    loops.wait_for_step(lost["step"] + 3)
    assert changed.stop() == [STOPPED, STOPPED, -signal.SIGKILL], loops.log()
    changed.check(tmp_path)


def test_after_the_loss_of_a_companion_the_ranks_start_again_and_lose_no_step(
    tmp_path: Path, launcher: FakeLauncher, loops: LoopRuns
) -> None:
    changed = Changed(loops, launcher)
    changed.begin(2)
    changed.grow(4711, 2)
    loops.ranks[-1].kill()
    assert loops.join() == [RESTART_CODE, RESTART_CODE, 1, -signal.SIGKILL], loops.log()
    last = max(loops.losses())
    assert loops.saved_steps()[-1] == last
    assert "the ranks of the job start again" in loops.log()
    changed.begin(2)
    loops.wait_for_step(last + 3)
    assert changed.stop() == [STOPPED] * 2, loops.log()
    changed.check(tmp_path, killed_after=last)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"in_place": False}, "own-loop"),
        ({"unwrapped": True}, "unwrapped"),
        ({"unweighed": True}, "loss-weight"),
        ({"own_group": True}, "own-group"),
        ({"comm_hook": True}, "comm-hook"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_loop_that_cannot_follow_says_why(
    launcher: FakeLauncher, loops: LoopRuns, options: dict[str, Any], code: str
) -> None:
    launcher.set_companions({})
    loops.start(1, launcher=launcher, **OPTIONS | options)
    assert launcher.wait_for_group(can=False)["why"] == code
