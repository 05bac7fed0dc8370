"""Ranks that cannot go on are killed between two saves, never within one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic.job.unmodified.checkpoints.settle_time import FIRST_S
from slurm_elastic.job.unmodified.save_end import stop_between_saves
from slurm_elastic.job.unmodified.script_watch import _STUCK_S
from tests.support.job.checkpoint_savers import (
    Phases,
    SaverScript,
    Write,
    dcp,
    deepspeed,
    generic,
    hf_trainer,
    in_order,
    one_file,
    single_files,
    two_files,
)
from tests.support.job.script_job import ScriptJob

SAVERS: dict[str, tuple[Callable[[int, int], Phases], str]] = {
    "directory": (generic, "step_*"),
    "trainer": (hf_trainer, "checkpoint-*"),
    "dcp": (dcp, "step-*"),
    "deepspeed": (deepspeed, "global_step*"),
    "two-files": (two_files, "*.pt"),
    "one-file": (one_file, "*.pt"),
    "single-files": (single_files, "*.ckpt"),
}


class SavingRanks:
    """Ranks that save while they are to be killed; a write is done at every second look."""

    def __init__(self, home: Path, saver: Callable[[int, int], Phases], pattern: str) -> None:
        self.job = ScriptJob(home, pattern=pattern)
        self.saver = saver
        self.script = SaverScript(home, lambda: self.job.now)
        self.pending: list[Write] = []
        self.calls: list[str] = []
        self.slept = 0.0
        self.has_ended = False
        for step in range(3):
            for write in self.writes(step):
                self.script.write(write)
                self.job.now += 1
                self.job.watch.check()
            self.job.now += FIRST_S
            self.job.watch.check()
        assert not self.job.watch.is_saving()

    def writes(self, step: int) -> list[Write]:
        return in_order(self.saver(step, 1), [])

    def write(self) -> None:
        if self.pending:
            self.script.write(self.pending.pop(0))

    def sleep(self, seconds: float) -> None:
        self.job.now += 1.0
        self.slept += 1.0
        if int(self.slept) % 2:
            self.write()

    def stop(self) -> None:
        self.calls.append("stop")

    def kill(self) -> None:
        stop_between_saves(
            self.job.watch.is_saving,
            has_ended=lambda: self.has_ended,
            stop=self.stop,
            resume=lambda: self.calls.append("resume"),
            sleep=self.sleep,
        )


@pytest.mark.parametrize("name", SAVERS)
def test_a_save_that_is_under_way_ends_first_whatever_it_has_written(
    tmp_path: Path, name: str
) -> None:
    saver, pattern = SAVERS[name]
    for done in range(1, len(in_order(saver(0, 1), [])) + 1):
        home = tmp_path / str(done)
        home.mkdir()
        ranks = SavingRanks(home, saver, pattern)
        ranks.pending = ranks.writes(3)
        for _ in range(done):
            ranks.write()
        ranks.kill()
        assert not ranks.pending
        assert ranks.calls == ["stop"]
        ScriptJob.close_all()


def test_ranks_that_do_not_save_are_stopped_at_once(tmp_path: Path) -> None:
    ranks = SavingRanks(tmp_path, one_file, "*.pt")
    ranks.kill()
    assert (ranks.calls, ranks.slept) == (["stop"], 0.0)


def test_a_save_that_begins_in_the_last_moment_ends_too(tmp_path: Path) -> None:
    ranks = SavingRanks(tmp_path, one_file, "*.pt")
    ranks.pending = ranks.writes(3)

    def stop() -> None:
        ranks.calls.append("stop")
        if len(ranks.pending) == len(ranks.writes(3)):
            ranks.write()

    ranks.stop = stop  # type: ignore[method-assign]
    ranks.kill()
    assert ranks.calls == ["stop", "resume", "stop"]
    assert not ranks.pending


def test_a_save_that_waits_for_a_lost_rank_is_not_waited_for_without_end(tmp_path: Path) -> None:
    ranks = SavingRanks(tmp_path, two_files, "*.pt")
    ranks.pending = ranks.writes(3)[:1]
    ranks.write()  # half of the first file
    ranks.kill()
    assert ranks.calls == ["stop"]
    assert _STUCK_S <= ranks.slept <= _STUCK_S + 2


def test_ranks_that_have_ended_are_not_waited_for(tmp_path: Path) -> None:
    ranks = SavingRanks(tmp_path, one_file, "*.pt")
    ranks.pending = ranks.writes(3)
    ranks.write()
    ranks.has_ended = True
    ranks.kill()
    assert (ranks.calls, ranks.slept) == ([], 0.0)


def test_frozen_ranks_have_saved(tmp_path: Path) -> None:
    job = ScriptJob(tmp_path)
    job.save()
    job.order("notice", 1)
    job.save()
    assert job.guard.is_frozen
    job.write()
    assert not job.watch.is_saving()
