"""Periodic saves in the background."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.training.checkpoint import dcp_files
from slurm_elastic.training.checkpoint.checkpoint_directory import CheckpointDirectory
from slurm_elastic.training.sampler import Cursor
from tests.support.patience import PATIENCE_S
from tests.support.trainings.checkpoint_ranks import (
    NAMES,
    CheckpointRanks,
    differences,
    run_concurrently,
    state,
)
from tests.support.trainings.training_runs import PROCESSES, wait

FRONT, BACK = NAMES[:2], NAMES[2:]


class Gate:
    """Gate that blocks the threads that write until it opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.came = threading.Semaphore(0)
        self.error: BaseException | None = None
        original = dcp_files.write

        def write(path: Path, pieces: Any) -> Any:
            if threading.current_thread().name == "checkpoint":
                self.came.release()
                assert self.open.wait(60)
                if self.error is not None:
                    raise self.error
            return original(path, pieces)

        monkeypatch.setattr(dcp_files, "write", write)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


def proven(root: Path, *, parts: int = 1, **options: Any) -> CheckpointRanks:
    """Return the ranks of a run with a first checkpoint, after step 1."""
    states = [state(**options)] if parts == 1 else [state(FRONT), state(BACK, part=1)]
    ranks = CheckpointRanks(root, states, background=True)
    ranks.step(1)
    assert ranks.save(1, wait=False) == [True] * parts
    assert [k.proven for k in ranks.managers] == [True] * parts
    return ranks


@pytest.mark.parametrize("parts", [1, 2])
def test_training_during_a_background_save_does_not_change_the_checkpoint(
    tmp_path: Path, gate: Gate, parts: int
) -> None:
    ranks = proven(tmp_path, parts=parts)
    ranks.step(2)
    before = [{k: v.clone() for k, v in s.gather().items()} for s in ranks.states]
    assert ranks.save(2, wait=False) == [True] * parts
    for _ in range(parts):
        assert gate.came.acquire(timeout=60)
    ranks.step(3)
    manager = ranks.managers[0]
    assert manager.report_fields()["checkpoint_step"] == 1
    assert not manager.due()
    manager._due_at = 0.0
    assert not manager.due()
    gate.open.set()
    run_concurrently([k.settle for k in ranks.managers])
    assert manager.report_fields()["checkpoint_step"] == 2
    assert manager.due()
    checkpoint = CheckpointDirectory(tmp_path, keep=2, log=print).newest()
    assert checkpoint is not None
    assert checkpoint.step == 2
    read = checkpoint.read()
    for part in before:
        assert differences(part, {k: read[k] for k in part}) == []
    assert ranks.log_lines == []


def test_a_save_waits_for_the_background_save_before_it(tmp_path: Path, gate: Gate) -> None:
    ranks = proven(tmp_path)
    manager = ranks.managers[0]
    cost = manager.report_fields()["checkpoint_s"]
    manager.save(Cursor(2, 0, 2), wait=False)
    assert gate.came.acquire(timeout=60)
    threading.Timer(0.05, gate.open.set).start()
    assert manager.save(Cursor(3, 0, 3))
    assert manager.report_fields()["checkpoint_step"] == 3
    assert manager.report_fields()["checkpoint_s"] != cost
    assert [p.name for p in sorted(tmp_path.glob("step_*"))] == ["step_00000002", "step_00000003"]


def test_a_step_saved_in_the_background_is_not_saved_again(tmp_path: Path) -> None:
    ranks = proven(tmp_path)
    manager = ranks.managers[0]
    manager.save(Cursor(2, 0, 2), wait=False)
    assert manager.save(Cursor(2, 0, 2))
    assert manager.report_fields()["checkpoint_step"] == 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (KeyError("a bug"), "KeyError('a bug')"),
    ],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_a_failed_background_save_is_logged_at_a_later_step(
    tmp_path: Path, gate: Gate, parts: int, error: Exception, reason: str
) -> None:
    ranks = proven(tmp_path, parts=parts)
    gate.error = error
    gate.open.set()
    assert ranks.save(2, wait=False) == [True] * parts
    wait(lambda: ranks.managers[0].due() or ranks.log_lines, "the failure")
    (line,) = ranks.log_lines
    assert line.startswith("checkpoint of step 2 failed: ")
    assert reason in line
    assert line.endswith("; that of step 1 stays, training continues")
    run_concurrently([k.settle for k in ranks.managers])
    assert ranks.managers[0].report_fields()["checkpoint_step"] == 1
    assert not list(tmp_path.glob(".tmp*"))
    gate.error = None
    assert ranks.save(3) == [True] * parts
    assert len(ranks.log_lines) == 1


def test_the_first_save_is_waited_for(tmp_path: Path, gate: Gate) -> None:
    manager = CheckpointRanks(tmp_path, [state()], background=True).managers[0]
    assert manager.save(Cursor(1, 0, 1), wait=False)
    assert manager.report_fields()["checkpoint_step"] == 1
    assert manager.proven


def test_training_waits_for_the_save_without_memory_for_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = proven(tmp_path)

    def full(_: object) -> None:
        raise RuntimeError("can't allocate memory\nand so on")

    monkeypatch.setattr(dcp_files, "copied", full)
    manager = ranks.managers[0]
    assert manager.save(Cursor(2, 0, 2), wait=False)
    assert manager.report_fields()["checkpoint_step"] == 2
    (line,) = ranks.log_lines
    assert line.startswith(
        "training waits for the save of step 2, as copying the state failed (can't alloc"
    )


def test_values_in_the_manifest_are_those_at_the_begin_of_the_save(
    tmp_path: Path, gate: Gate
) -> None:
    ranks = proven(tmp_path)
    manager = ranks.managers[0]
    profile = {"layers": [1.5]}
    manager.kept["profile"] = lambda: profile
    manager.kept["freezing"] = lambda: {"frozen": 2}
    manager.save(Cursor(2, 0, 2), wait=False)
    assert gate.came.acquire(timeout=60)
    profile["layers"].append(2.5)
    gate.open.set()
    manager.settle()
    again = CheckpointRanks(tmp_path, [state()])
    again.restore()
    assert again.managers[0].restored == {"profile": {"layers": [1.5]}, "freezing": {"frozen": 2}}


def test_a_value_that_is_no_json_fails_the_save(tmp_path: Path) -> None:
    ranks = CheckpointRanks(tmp_path, [state()])
    ranks.managers[0].kept["noise"] = lambda: {1, 2}
    assert ranks.save(1) == [False]
    assert ranks.log_lines[0].startswith(
        "checkpoint of step 1 failed: noise cannot be saved in the manifest"
    )


def _script(root: Path, ends: bool) -> None:
    """Run a script whose second save hangs, or ends after the script."""
    os.dup2(os.open(root / "log", os.O_WRONLY | os.O_CREAT), 2)
    ranks = CheckpointRanks(root, [state()], background=True)
    ranks.save(1)
    original = dcp_files.write

    def slow(path: Path, pieces: Any) -> Any:
        (root / "writes").touch()
        while not (root / "go").exists():
            time.sleep(0.01)
        return original(path, pieces)

    dcp_files.write = slow
    ranks.managers[0].save(Cursor(2, 0, 2), wait=False)
    wait((root / "writes").exists, "the save")
    if ends:
        (root / "go").touch()
        sys.exit(3)
    time.sleep(600)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_during_a_background_save_leaves_complete_checkpoints_only(
    tmp_path: Path, number: int
) -> None:
    process = PROCESSES.Process(target=_script, args=(tmp_path, False))
    process.start()
    wait((tmp_path / "writes").exists, "the save")
    os.kill(process.pid, number)
    process.join()
    again = CheckpointRanks(tmp_path, [state()])
    assert [c and c.step for c in again.restore()] == [1]
    assert again.log_lines == []


def test_a_script_that_ends_early_waits_for_its_background_save(tmp_path: Path) -> None:
    process = PROCESSES.Process(target=_script, args=(tmp_path, True))
    process.start()
    process.join()
    assert (process.exitcode, (tmp_path / "log").read_text()) == (3, "")
    assert [c and c.step for c in CheckpointRanks(tmp_path, [state()]).restore()] == [2]


def _leave_alone(root: Path) -> None:
    """Run rank 0 of two; its thread waits for a writer that has ended when the script ends."""
    ranks = CheckpointRanks(
        root, [state(FRONT), state(BACK, part=1)], background=True, patience_s=600.0
    )
    assert ranks.save(1) == [True, True]
    assert ranks.managers[0].save(Cursor(2, 0, 2), wait=False)
    sys.exit(3)


def test_a_thread_that_waits_for_a_dead_writer_ends_with_the_script(tmp_path: Path) -> None:
    process = PROCESSES.Process(target=_leave_alone, args=(tmp_path,))
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 3
    assert [p.name for p in tmp_path.glob("step_*")] == ["step_00000001"]
