"""A training on changing numbers of ranks equals an uninterrupted one."""

import signal
from collections import Counter
from pathlib import Path

import pytest

from slurm_elastic.training.signals import STOPPED
from tests.support.trainings.training_runs import EPOCHS, SAMPLES, STEPS, FakeLauncher, TrainingRuns


def move(
    runs: TrainingRuns, launcher: FakeLauncher, *, size: int, until: int, notice: int, **options
) -> None:
    """Run with `size` ranks; from step `until` on request a save, then end it as Slurm does."""
    launcher.begin_attempt()
    launcher.order("run")
    runs.start(size, launcher=launcher, step_s=0.1, **options)
    runs.wait_for_step(until)
    launcher.order("notice", notice=notice)
    launcher.wait_for("saved", notice=notice)
    runs.signal(signal.SIGTERM)
    assert runs.join() == [STOPPED] * size, runs.log()


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("adamw", {"micro_batch": 3}), ("sgd", {"workers": 1})],
)
def test_a_sequence_of_rank_counts_equals_an_uninterrupted_run(
    tmp_path: Path, launcher: FakeLauncher, optimizer: str, options: dict
) -> None:
    plain = TrainingRuns(tmp_path / "plain")
    plain.run(1, optimizer=optimizer)
    moved = TrainingRuns(tmp_path / "moved")
    for notice, (size, until) in enumerate([(1, 2), (2, 5), (4, 8), (3, 12)], start=1):
        move(moved, launcher, size=size, until=until, notice=notice, optimizer=optimizer, **options)
    moved.run(1, optimizer=optimizer, **options)
    assert moved.sizes() == [1, 2, 4, 3, 1]
    assert moved.samples() == [Counter(range(SAMPLES))] * EPOCHS
    assert sorted(moved.losses()) == list(range(1, STEPS + 1))
    assert moved.losses() == pytest.approx(plain.losses(), abs=1e-6)


def test_a_start_after_the_end_trains_no_step(runs: TrainingRuns) -> None:
    runs.run(1)
    before = (runs.out / "losses.jsonl").read_text()
    runs.run(2)
    assert (runs.out / "losses.jsonl").read_text() == before
    assert runs.saved_steps() == [STEPS]


def test_dropout_continues_with_the_same_random_numbers(
    tmp_path: Path, launcher: FakeLauncher
) -> None:
    plain = TrainingRuns(tmp_path / "plain")
    plain.run(2, dropout=0.5)
    moved = TrainingRuns(tmp_path / "moved")
    move(moved, launcher, size=2, until=7, notice=1, dropout=0.5)
    moved.run(2, dropout=0.5)
    assert moved.losses() == pytest.approx(plain.losses(), abs=1e-6)


def test_a_kill_costs_the_steps_since_the_last_checkpoint(runs: TrainingRuns) -> None:
    runs.start(2, step_s=0.05, every_s=0.2)
    runs.wait_for_step(11)
    runs.kill()
    kept = max(runs.saved_steps())
    assert kept > 0
    runs.run(3)
    assert f"resumed from step {kept} with 3 rank(s)" in runs.log()
    assert sorted(runs.losses()) == list(range(1, STEPS + 1))
