"""Notices and signals: saving, waiting, continuing, ending."""

import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from slurm_elastic.core.report import Report
from slurm_elastic.training.signals import STOPPED
from tests.support.process_state import is_alive
from tests.support.trainings.training_runs import (
    EPOCHS,
    SAMPLES,
    STEPS,
    FakeLauncher,
    TrainingRuns,
    wait,
)

ONCE = [Counter(range(SAMPLES))] * EPOCHS


def test_a_withdrawn_notice_does_not_change_the_training(
    runs: TrainingRuns, launcher: FakeLauncher, tmp_path: Path
) -> None:
    plain = TrainingRuns(tmp_path / "plain")
    plain.run(1)
    runs.start(2, launcher=launcher, step_s=0.02)
    runs.wait_for_step(3)
    for notice in (7, 8):
        launcher.order("notice", notice=notice)
        launcher.wait_for("saving", notice=notice)
        saved = launcher.wait_for("saved", notice=notice)
        assert saved["checkpoint_step"] == saved["step"] == max(runs.losses())
        assert saved["checkpoint_s"] > 0
        launcher.order("resume")
        launcher.wait_for("training", step=saved["step"] + 1)
    assert runs.join() == [0, 0], runs.log()
    assert runs.samples() == ONCE
    assert runs.losses() == pytest.approx(plain.losses(), abs=1e-6)


def test_reports_have_the_fields_that_the_controller_reads(
    runs: TrainingRuns, launcher: FakeLauncher
) -> None:
    runs.start(2, launcher=launcher, step_s=0.02, every_s=0.1)
    assert runs.join() == [0, 0], runs.log()
    reports = [Report.from_wire({"job_id": 1, "run": 0} | r) for r in launcher.reports]
    phases = [r.phase for r in reports]
    assert phases[0] == "starting"
    assert phases[-1] == "ended"
    assert set(phases[1:-1]) == {"training"}
    first, last = reports[0], reports[-1]
    assert first.startup_s is not None
    assert first.startup_s > 0
    assert first.resumed_from is None
    assert first.proven is False
    assert (last.step, last.progress, last.exit_code) == (STEPS, 1.0, 0)
    assert last.proven is True
    assert last.checkpoint_step == STEPS
    assert {(r.kind, r.gpus, r.global_batch) for r in reports} == {("library", 2, 12)}
    measured = [r for r in reports if r.step_time_s is not None]
    assert all(0.01 < r.step_time_s < 10 for r in measured)
    # Not the first two steps, and none that a save interrupted.
    assert sum(r.steps_measured for r in measured) < STEPS - 2


def test_the_action_rehearse_leads_to_a_proven_checkpoint(
    runs: TrainingRuns, launcher: FakeLauncher
) -> None:
    launcher.order("rehearse")
    runs.start(2, launcher=launcher, step_s=0.05)
    proven = launcher.wait_for("training", proven=True)
    assert proven["checkpoint_step"] <= proven["step"] < STEPS


def test_a_restored_run_reports_its_step_and_is_proven(
    runs: TrainingRuns, launcher: FakeLauncher
) -> None:
    runs.start(1, step_s=0.02, signal_at=4, signal=signal.SIGTERM)
    assert runs.join() == [STOPPED], runs.log()
    runs.start(1, launcher=launcher)
    assert runs.join() == [0], runs.log()
    first = launcher.wait_for("starting")
    assert first["resumed_from"] == 5
    assert first["restore_s"] > 0
    assert launcher.wait_for("training")["proven"] is True


def test_sigusr2_acts_as_a_notice(runs: TrainingRuns) -> None:
    runs.start(2, step_s=0.02, signal_at=4, signal=signal.SIGUSR2)
    wait(lambda: "waiting to be requeued" in runs.log(), "the save")
    runs.signal(signal.SIGTERM)
    assert runs.join() == [STOPPED] * 2, runs.log()
    assert runs.saved_steps() == [max(runs.losses())] == [5]
    runs.run(3)
    assert runs.samples() == ONCE


@pytest.mark.parametrize("seed", range(4))
def test_sigterm_at_any_moment_loses_and_repeats_nothing(runs: TrainingRuns, seed: int) -> None:
    chance = random.Random(seed)
    for size in (2, 3):
        runs.start(size, step_s=0.03, workers=seed % 2)
        if size == 2:
            runs.wait_for_step(1)
        wait(lambda: chance.random() < 0.1, "a random moment")
        runs.signal(signal.SIGTERM)
        # Before the first step nothing is to be saved, and SIGTERM may come before its handler;
        # or when all is over.
        assert set(runs.join()) <= {STOPPED, -signal.SIGTERM, 0}, runs.log()
    runs.run(1)
    assert runs.samples() == ONCE
    assert sorted(runs.losses()) == list(range(1, STEPS + 1))


def test_data_loader_workers_survive_a_notice_and_end_with_the_job(runs: TrainingRuns) -> None:
    runs.start(1, step_s=0.02, workers=2)
    runs.wait_for_step(2)
    (rank,) = runs.ranks
    workers = [int(pid) for pid in _children(rank.pid)]
    assert len(workers) == 2
    for pid in [*workers, rank.pid]:
        os.kill(pid, signal.SIGUSR2)
    wait(lambda: "waiting to be requeued" in runs.log(), "the save")
    assert _children(rank.pid) == [str(pid) for pid in workers]
    for pid in [*workers, rank.pid]:
        os.kill(pid, signal.SIGTERM)
    assert runs.join() == [STOPPED]
    wait(lambda: not any(map(is_alive, workers)), "the workers' end")


def test_a_failed_save_leaves_the_notice_unanswered(
    runs: TrainingRuns, launcher: FakeLauncher
) -> None:
    runs.start(2, launcher=launcher, step_s=0.05)
    runs.wait_for_step(2)
    (runs.out / "ckpt").write_text("a file stands where the directory should be")
    launcher.order("notice", notice=1)
    launcher.wait_for("saving", notice=1)
    saving = len(launcher.reports)
    assert runs.join() == [0, 0], runs.log()
    assert "saved" not in [r["phase"] for r in launcher.reports[saving:]]
    assert "checkpoint of step" in runs.log()
    assert runs.samples() == ONCE


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
