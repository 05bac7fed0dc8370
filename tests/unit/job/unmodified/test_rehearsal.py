"""Rehearsals of unmodified scripts: nothing that a script has written is lost."""

import json
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.core.report import Report
from slurm_elastic.job.unmodified import kept_checkpoint, rehearsal
from slurm_elastic.job.unmodified.resume_state import ResumeState
from tests.support.job.script_job import ScriptJob

KEPT = "memory/kept/r-7/before-rehearsal"
AFTER = "memory/kept/r-7/after-rehearsal"

Saver = Callable[[ScriptJob, str], None]


def in_place(job: ScriptJob, text: str) -> None:
    (job.home / "ckpt.pt").write_text(text)


def by_rename(job: ScriptJob, text: str) -> None:
    (job.home / "x.tmp").write_text(text)
    (job.home / "x.tmp").rename(job.home / "ckpt.pt")


def as_directory(job: ScriptJob, text: str) -> None:
    folder = job.home / "ckpt.pt"
    folder.mkdir(exist_ok=True)
    for name in ("model", "optimizer"):
        (folder / name).write_text(text)


SAVERS = (in_place, by_rename, as_directory)


def content(path: Path) -> str:
    return (path / "model").read_text() if path.is_dir() else path.read_text()


def save(job: ScriptJob, saver: Saver, text: str) -> Report:
    job.now += 100
    saver(job, text)
    path = job.home / "ckpt.pt"
    for file in (*path.rglob("*"), path) if path.is_dir() else (path,):
        os.utime(file, (job.now, job.now))
    job.settle()
    return job.finish_copies()


def rehearsed(home: Path, saver: Saver, texts: tuple[str, ...] = ("old",)) -> ScriptJob:
    """Return a job that has answered the notice of a rehearsal, and is requeued."""
    job = ScriptJob(home)
    for text in texts:
        assert save(job, saver, text).rehearsal == "able"
    job.order("notice", 5, rehearsal=True)
    report = job.finish_copies()
    assert (report.phase, report.notice) == ("saved", 5)
    job.watch.end_attempt(None)
    return job


@pytest.mark.parametrize("saver", SAVERS)
def test_a_script_that_resumes_is_proven_and_the_copy_removed(
    tmp_path: Path, saver: Saver, capfd: pytest.CaptureFixture[str]
) -> None:
    first = rehearsed(tmp_path, saver)
    assert first.guard.calls == ["guard", "arm"]
    assert content(tmp_path / KEPT / "ckpt.pt") == "old"
    second = ScriptJob(tmp_path, run=1)
    content(tmp_path / "ckpt.pt")
    report = save(second, saver, "newer")
    assert (report.proven, report.rehearsal, report.resumed_from) == (True, "", 1)
    assert not (tmp_path / "memory" / "kept").exists()
    state = second.memory.load()
    assert [row.pause_s for row in state.learned] == [0.0]
    assert state == ResumeState(
        count=2,
        proven=True,
        kept_saves=1,
        saves=1,
        start_world=1,
        learned=state.learned,
        pattern=state.pattern,
    )
    assert f"ckpt.pt is kept in {tmp_path / KEPT}" in capfd.readouterr().err


@pytest.mark.parametrize("saver", SAVERS)
def test_a_script_that_starts_anew_loses_nothing(
    tmp_path: Path, saver: Saver, capfd: pytest.CaptureFixture[str]
) -> None:
    rehearsed(tmp_path, saver)
    second = ScriptJob(tmp_path, run=1)
    report = save(second, saver, "anew")
    assert (report.proven, report.rehearsal) == (False, "refuted")
    assert report.kept_in == str(tmp_path / KEPT)
    save(second, saver, "anew 2")
    second.watch.end_attempt(0)
    assert content(tmp_path / "ckpt.pt") == "anew 2"
    assert content(tmp_path / KEPT / "ckpt.pt") == "old"
    lines = [x for x in capfd.readouterr().err.splitlines() if "does not resume" in x]
    assert len(lines) == 1
    assert str(tmp_path / KEPT) in lines[0]
    assert "option to resume" in lines[0]


def test_a_batch_script_that_deletes_its_checkpoints_first_starts_anew(tmp_path: Path) -> None:
    rehearsed(tmp_path, by_rename)
    (tmp_path / "ckpt.pt").unlink()
    second = ScriptJob(tmp_path, run=1)
    assert not second.watch.has_lost_checkpoints, "it was never shown to resume"
    report = save(second, by_rename, "anew")
    assert (report.proven, report.rehearsal) == (False, "refuted")
    assert content(tmp_path / KEPT / "ckpt.pt") == "old"


def test_checkpoints_in_a_temporary_directory_of_the_node_are_not_rehearsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rehearsal, "temporary_directory", lambda *_: "/tmp")
    job = ScriptJob(tmp_path)
    for text in ("old", "new"):
        report = save(job, by_rename, text)
        assert (report.rehearsal, report.kept_in) == ("node-local", "/tmp")
    lines = [x for x in capfd.readouterr().err.splitlines() if "which each node has" in x]
    assert len(lines) == 1
    assert "write them to a file system that all nodes share" in lines[0]


def test_an_answer_that_the_controller_does_not_use_is_given_again_for_the_next_save(
    tmp_path: Path,
) -> None:
    job = ScriptJob(tmp_path)
    save(job, by_rename, "old")
    job.order("notice", 5, rehearsal=True)
    assert job.finish_copies().phase == "saved"
    job.now += 120
    job.order("notice", 5, rehearsal=True)  # the controller still answers
    for _ in range(3):
        job.watch.check()
        assert job.finish_copies().phase == "saving"
        assert not job.guard.is_frozen
        job.now += 1
    assert save(job, by_rename, "new").phase == "saved"
    assert content(tmp_path / KEPT / "ckpt.pt") == "new"


def test_a_save_in_place_that_pauses_is_no_read(tmp_path: Path) -> None:
    rehearsed(tmp_path, in_place)
    second = ScriptJob(tmp_path, run=1)
    with (tmp_path / "ckpt.pt").open("w") as file:
        second.settle()
        second.now += 20
        file.write("anew")
    second.settle()
    second.now += 200
    assert (second.settle().proven, second.finish_copies().rehearsal) == (False, "refuted")


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("code", [1, None])
def test_the_file_with_most_progress_has_the_name_when_a_new_start_is_cut_short(
    tmp_path: Path, saver: Saver, code: int | None
) -> None:
    rehearsed(tmp_path, saver, ("1", "2", "3"))
    second = ScriptJob(tmp_path, run=1)
    save(second, saver, "anew")
    second.watch.end_attempt(code)
    assert content(tmp_path / "ckpt.pt") == "3"
    assert content(tmp_path / AFTER / "ckpt.pt") == "anew"
    third = ScriptJob(tmp_path, run=2)
    assert third.state.report().rehearsal == "refuted"
    save(third, saver, "anew again")
    assert content(tmp_path / KEPT / "ckpt.pt") == "3", "what was put back is kept still"
    save(third, saver, "anew again 2")
    save(third, saver, "anew again 3")
    third.watch.end_attempt(1)
    assert content(tmp_path / "ckpt.pt") == "anew again 3", "it has as much progress"


@pytest.mark.parametrize("saver", SAVERS)
def test_what_a_failed_restart_has_damaged_is_put_back(
    tmp_path: Path, saver: Saver, capfd: pytest.CaptureFixture[str]
) -> None:
    rehearsed(tmp_path, saver)
    second = ScriptJob(tmp_path, run=1)
    saver(second, "torn")
    second.watch.end_attempt(1)
    assert second.state.report().rehearsal == "failed"
    assert content(tmp_path / "ckpt.pt") == "old"
    assert content(tmp_path / AFTER / "ckpt.pt") == "torn"
    assert f"{tmp_path}/ckpt.pt is put back" in capfd.readouterr().err
    third = ScriptJob(tmp_path, run=2)
    content(tmp_path / "ckpt.pt")
    assert save(third, saver, "resumed").proven


@pytest.mark.parametrize("saver", SAVERS)
def test_the_next_attempt_puts_back_what_a_killed_esrun_could_not(
    tmp_path: Path, saver: Saver
) -> None:
    rehearsed(tmp_path, saver)
    second = ScriptJob(tmp_path, run=1)
    saver(second, "torn")
    ScriptJob(tmp_path, run=2)
    assert content(tmp_path / "ckpt.pt") == "old"
    assert content(tmp_path / AFTER / "ckpt.pt") == "torn"


def as_json(job: ScriptJob, text: str) -> None:
    (job.home / "ckpt.json").write_text(text)


@pytest.mark.parametrize(
    ("saver", "texts", "pattern"),
    [(by_rename, ("1", "2"), "ckpt.pt"), (as_json, ("[1]",), "ckpt.json")],
)
def test_a_newer_checkpoint_of_a_start_that_resumed_stays_if_slurm_ends_it(
    tmp_path: Path, saver: Saver, texts: tuple[str, ...], pattern: str
) -> None:
    """The end of the save was not shown before: it is the script's newest all the same."""
    first = ScriptJob(tmp_path, pattern=pattern)
    for text in texts:
        first.now += 100
        saver(first, text)
        first.settle()
        first.finish_copies()
    first.order("notice", 5, rehearsal=True)
    assert first.finish_copies().phase == "saved"
    first.watch.end_attempt(None)
    second = ScriptJob(tmp_path, run=1, pattern=pattern)
    assert (tmp_path / pattern).read_text() == texts[-1]
    saver(second, "[9]")
    second.watch.end_attempt(None)
    ScriptJob(tmp_path, run=2, pattern=pattern)
    assert (tmp_path / pattern).read_text() == "[9]"
    assert not (tmp_path / AFTER).exists()


def test_a_checkpoint_that_is_cut_off_is_put_back_although_the_start_resumed(
    tmp_path: Path,
) -> None:
    first = ScriptJob(tmp_path, pattern="ckpt.json")
    as_json(first, "[1]")
    first.settle()
    first.finish_copies()
    first.order("notice", 5, rehearsal=True)
    assert first.finish_copies().phase == "saved"
    first.watch.end_attempt(None)
    second = ScriptJob(tmp_path, run=1, pattern="ckpt.json")
    assert (tmp_path / "ckpt.json").read_text() == "[1]"
    as_json(second, "[9")
    second.watch.end_attempt(None)
    assert (tmp_path / "ckpt.json").read_text() == "[1]"


def test_a_deleted_checkpoint_is_put_back(tmp_path: Path) -> None:
    rehearsed(tmp_path, in_place)
    second = ScriptJob(tmp_path, run=1)
    (tmp_path / "ckpt.pt").unlink()
    second.watch.end_attempt(1)
    assert content(tmp_path / "ckpt.pt") == "old"
    assert not (tmp_path / AFTER).exists()


def test_a_restart_that_fails_with_everything_in_place_moves_nothing(tmp_path: Path) -> None:
    rehearsed(tmp_path, in_place)
    inode = (tmp_path / "ckpt.pt").stat().st_ino
    second = ScriptJob(tmp_path, run=1)
    second.watch.end_attempt(1)
    assert second.state.report().rehearsal == "failed"
    assert (tmp_path / "ckpt.pt").stat().st_ino == inode
    assert content(tmp_path / KEPT / "ckpt.pt") == "old", "for the next attempt"


def test_a_save_that_was_cut_by_the_requeue_is_replaced_once_the_restart_fails(
    tmp_path: Path,
) -> None:
    rehearsed(tmp_path, in_place)
    (tmp_path / "ckpt.pt").write_text("ne")
    second = ScriptJob(tmp_path, run=1)
    assert content(tmp_path / "ckpt.pt") == "ne", "it is newer, and may be complete"
    second.watch.end_attempt(1)
    assert content(tmp_path / "ckpt.pt") == "old"


def test_a_restart_that_had_only_to_finish_leaves_no_copy(tmp_path: Path) -> None:
    rehearsed(tmp_path, in_place)
    second = ScriptJob(tmp_path, run=1)
    content(tmp_path / "ckpt.pt")
    second.watch.end_attempt(0)
    second.finish_copies()
    assert not (tmp_path / "memory" / "kept").exists()


def test_a_restart_that_ends_at_once_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that refuses to start twice in a directory may do so with exit code 0."""
    rehearsed(tmp_path, in_place)
    for run in (1, 2):
        job = ScriptJob(tmp_path, run=run)
        job.watch.end_attempt(0)
        assert job.state.report().rehearsal == "failed"
        assert "exit code 0 without having read a checkpoint" in capsys.readouterr().err
    assert content(tmp_path / "ckpt.pt") == "old"
    assert content(tmp_path / KEPT / "ckpt.pt") == "old"


def test_what_is_replaced_by_each_save_is_linked_and_all_else_copied(tmp_path: Path) -> None:
    rehearsed(tmp_path, by_rename, ("1",))
    copied = (tmp_path / KEPT / "ckpt.pt").stat()
    assert copied.st_ino != (tmp_path / "ckpt.pt").stat().st_ino, "not known yet"
    for saver, linked in ((by_rename, True), (in_place, False), (as_directory, False)):
        home = tmp_path / saver.__name__
        home.mkdir()
        rehearsed(home, saver, ("1", "2"))
        files = [home / "ckpt.pt", home / KEPT / "ckpt.pt"]
        if saver is as_directory:
            files = [file / "model" for file in files]
        assert (files[0].stat().st_ino == files[1].stat().st_ino) is linked
        assert files[0].stat().st_mtime_ns == files[1].stat().st_mtime_ns


def test_all_files_of_the_save_are_kept(tmp_path: Path) -> None:
    job = ScriptJob(tmp_path)
    job.write("model.pt")
    job.write("optimizer.pt")
    job.settle()
    job.order("notice", 1, rehearsal=True)
    assert job.finish_copies().phase == "saved"
    assert {p.name for p in (tmp_path / KEPT).iterdir()} == {"model.pt", "optimizer.pt"}


def test_a_checkpoint_of_some_time_ago_is_not_taken(tmp_path: Path) -> None:
    job = ScriptJob(tmp_path)
    save(job, in_place, "1")
    job.now += 200
    job.order("notice", 1, rehearsal=True)
    assert job.finish_copies().phase == "saving"
    assert save(job, in_place, "2").phase == "saved"
    assert content(tmp_path / KEPT / "ckpt.pt") == "2"


def test_with_a_signal_the_checkpoint_that_it_asks_for_is_kept(tmp_path: Path) -> None:
    job = ScriptJob(tmp_path, has_signal=True)
    save(job, in_place, "1")
    job.order("notice", 1, rehearsal=True)
    assert (job.signals, job.finish_copies().phase) == (1, "saving")
    assert save(job, in_place, "2").phase == "saved"


def test_a_notice_that_is_withdrawn_leaves_no_copy(tmp_path: Path) -> None:
    job = ScriptJob(tmp_path)
    save(job, in_place, "1")
    job.order("notice", 1, rehearsal=True)
    assert job.finish_copies().phase == "saved"
    job.order("resume", 1)
    assert save(job, in_place, "2").rehearsal == "able"
    assert not (tmp_path / "memory" / "kept").exists()
    assert job.memory.load().kept is None


def refuse(job: ScriptJob) -> Report:
    job.order("notice", 1, rehearsal=True)
    return job.finish_copies()


def test_no_room_is_reported_and_asked_again_when_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job = ScriptJob(tmp_path)
    save(job, in_place, "x" * 1000)
    with monkeypatch.context() as full:
        room = os.statvfs(tmp_path)
        values = [*room[:4], 0, *room[5:]]
        full.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
        report = refuse(job)
        assert (report.phase, report.notice, report.proven) == ("training", None, False)
        assert report.rehearsal == "no-room"
        assert report.kept_bytes == 1000 + kept_checkpoint.LEAST_FREE_BYTES
        assert report.kept_in.startswith(str(tmp_path))
        assert "free 67.1 MB in" in capfd.readouterr().err
        job.order("resume", 1)
        job.now += 600
        assert save(job, in_place, "x" * 1000).rehearsal == "no-room"
    assert not (tmp_path / KEPT).exists()
    job.now += 600
    assert save(job, in_place, "x" * 1000).rehearsal == "able"


def test_a_copy_that_meets_a_quota_is_removed(tmp_path: Path) -> None:
    job = ScriptJob(tmp_path)
    save(job, in_place, "x" * 100_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        report = refuse(job)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (report.phase, report.rehearsal) == ("training", "no-room")
    assert not (tmp_path / KEPT).exists()
    assert content(tmp_path / "ckpt.pt") == "x" * 100_000


def test_a_copy_of_a_file_that_is_overwritten_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ScriptJob(tmp_path)
    save(job, in_place, "1")
    copy, copies = kept_checkpoint.place, []

    def slow(path: Path, target: Path, **named: object) -> None:
        copies.append(path)
        copy(path, target, **named)  # type: ignore[arg-type]
        if len(copies) == 1:
            path.write_text("22")

    monkeypatch.setattr(kept_checkpoint, "place", slow)
    job.order("notice", 1, rehearsal=True)
    assert job.finish_copies().phase == "saving"
    assert not (tmp_path / KEPT).exists(), "a torn copy is none"
    job.settle()
    assert job.finish_copies().phase == "saved"
    assert content(tmp_path / KEPT / "ckpt.pt") == "22"


def test_a_script_that_saves_faster_than_can_be_copied_is_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ScriptJob(tmp_path)
    save(job, in_place, "1")
    copy = kept_checkpoint.place

    def slow(path: Path, target: Path, **named: object) -> None:
        copy(path, target, **named)  # type: ignore[arg-type]
        path.write_text(path.read_text() + "+")

    monkeypatch.setattr(kept_checkpoint, "place", slow)
    job.order("notice", 1, rehearsal=True)
    for _ in range(3):
        job.finish_copies()
        job.settle()
    report = job.finish_copies()
    assert (report.phase, report.rehearsal) == ("training", "changes")
    assert not (tmp_path / KEPT).exists()


def test_without_a_place_for_the_state_nothing_is_rehearsed(tmp_path: Path) -> None:
    job = ScriptJob(tmp_path)
    (tmp_path / "memory").write_text("a file")
    save(job, in_place, "1")
    assert refuse(job).rehearsal == "not-writable"


def test_a_copy_that_esrun_did_not_finish_is_removed_by_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ScriptJob(tmp_path)
    save(job, in_place, "1")
    monkeypatch.setattr(kept_checkpoint, "remove", lambda _: None)
    monkeypatch.setattr(kept_checkpoint, "sync", lambda _: (_ for _ in ()).throw(OSError(5, "io")))
    assert refuse(job).rehearsal == "not-writable"
    assert (tmp_path / KEPT / "ckpt.pt").exists()
    ScriptJob(tmp_path, run=1)
    assert not (tmp_path / KEPT).exists()


def test_a_checkpoint_on_another_file_system_is_kept_beside_it(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is no other file system")
    folder = shared / f"rehearsal-{os.getpid()}"
    (folder / "out").mkdir(parents=True)
    file = folder / "out" / "a.pt"
    file.write_text("1")
    try:
        kept = kept_checkpoint.keep(
            [str(file)], run_id="r-7", directories=[str(tmp_path / "memory")]
        )
        assert kept.place == str(folder / ".slurm-elastic/kept/r-7/before-rehearsal")
        assert [p.name for p in (folder / "out").iterdir()] == ["a.pt"]
        kept_checkpoint.remove(kept)
    finally:
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()


def test_links_and_times_within_a_directory_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    (folder / "shards").mkdir(parents=True)
    (folder / "shards" / "0").write_text("shard")
    (folder / "latest").symlink_to("shards/0")
    (folder / "shards" / "0").chmod(0o440)
    os.utime(folder / "shards" / "0", ns=(1, 123456789))
    kept = kept_checkpoint.keep([str(folder)], run_id="r", directories=[str(tmp_path / "memory")])
    copy = Path(kept.place, "checkpoint-5")
    assert (copy / "latest").readlink() == Path("shards/0")
    assert (copy / "shards" / "0").stat().st_mtime_ns == 123456789


@pytest.mark.parametrize(
    "body",
    [
        '{"count": 3, "proven": true, "refuted": false}',
        '{"count": 3, "proven": true, "refuted": false, "kept": {"files": 5}, "copying": ""}',
    ],
)
def test_states_of_older_versions_and_invalid_copies_are_read(tmp_path: Path, body: str) -> None:
    job = ScriptJob(tmp_path)
    (tmp_path / "memory").mkdir(exist_ok=True)
    (tmp_path / "memory" / "r-7.json").write_text(body)
    assert job.memory.load() == ResumeState(count=3, proven=True)


def test_an_older_esrun_reads_the_state(tmp_path: Path) -> None:
    rehearsed(tmp_path, in_place)
    body = json.loads((tmp_path / "memory" / "r-7.json").read_text())
    assert {"count", "proven", "refuted"} <= body.keys()
    assert body["count"] == 1


def test_another_step_of_the_batch_script_leaves_the_copy_alone(tmp_path: Path) -> None:
    rehearsed(tmp_path, in_place)
    other = ScriptJob(tmp_path, run=1, pattern="*.json")
    (tmp_path / "prepared.json").write_text("{}")
    other.settle()
    other.watch.end_attempt(0)
    assert content(tmp_path / KEPT / "ckpt.pt") == "old"
    second = ScriptJob(tmp_path, run=1)
    save(second, in_place, "anew")
    second.watch.end_attempt(1)
    assert (content(tmp_path / KEPT / "ckpt.pt"), second.state.report().rehearsal) == (
        "old",
        "refuted",
    )


def test_a_copy_under_way_when_the_program_ends_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ScriptJob(tmp_path)
    save(job, in_place, "1")
    copy, begun = kept_checkpoint.place, threading.Event()

    def slow(path: Path, target: Path, **named: Any) -> None:
        copy(path, target, **named)
        begun.set()
        while not named["stopped"]():
            time.sleep(0.01)

    monkeypatch.setattr(kept_checkpoint, "place", slow)
    job.order("notice", 1, rehearsal=True)
    assert begun.wait(10)
    job.watch.end_attempt(0)
    assert not (tmp_path / KEPT).exists()
    assert job.finish_copies().phase != "saved"


def test_a_new_start_that_loses_its_own_checkpoint_leaves_the_kept_one(tmp_path: Path) -> None:
    rehearsed(tmp_path, in_place)
    second = ScriptJob(tmp_path, run=1)
    save(second, in_place, "anew")
    (tmp_path / "ckpt.pt").unlink()
    second.watch.end_attempt(1)
    assert content(tmp_path / "ckpt.pt") == "old"
    (tmp_path / "ckpt.pt").unlink()
    third = ScriptJob(tmp_path, run=2)
    save(third, in_place, "anew again")
    assert content(tmp_path / KEPT / "ckpt.pt") == "old"


def test_what_is_still_needed_is_not_replaced_by_another_copy(tmp_path: Path) -> None:
    rehearsed(tmp_path, in_place)
    second = ScriptJob(tmp_path, run=1)
    save(second, in_place, "anew")
    second.order("notice", 9, rehearsal=True)
    assert second.finish_copies().phase == "training"
    assert content(tmp_path / KEPT / "ckpt.pt") == "old"


def test_a_copy_that_replaces_an_unused_one_is_not_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ScriptJob(tmp_path)
    save(job, in_place, "1")
    job.order("notice", 1, rehearsal=True)
    assert job.finish_copies().phase == "saved"
    job.order("resume", 1)

    def died(path: Path, target: Path, **_: Any) -> None:
        target.parent.mkdir(parents=True)
        target.write_text("to")
        raise KeyboardInterrupt

    monkeypatch.setattr(kept_checkpoint, "place", died)
    with pytest.raises(KeyboardInterrupt):
        job.watch._rehearsal.keep([str(tmp_path / "ckpt.pt")], lambda: False)
    in_place(job, "22")
    ScriptJob(tmp_path, run=1).watch.end_attempt(1)
    assert content(tmp_path / "ckpt.pt") == "22"
    assert not (tmp_path / KEPT).exists()


def save_marked(job: ScriptJob, text: str) -> Report:
    job.now += 100
    (job.home / "ckpt.pt").write_text(text)
    (job.home / "ckpt.pt.done").write_text(text)
    for name in ("ckpt.pt", "ckpt.pt.done"):
        os.utime(job.home / name, (job.now, job.now))
    job.watch.check()
    return job.finish_copies()


def rehearsed_with_marker(home: Path) -> None:
    job = ScriptJob(home, complete="{}.done")
    save_marked(job, "old")
    job.order("notice", 5, rehearsal=True)
    assert job.finish_copies().phase == "saved"
    job.watch.end_attempt(None)


def test_a_marker_beside_the_checkpoint_is_kept_and_put_back_with_it(tmp_path: Path) -> None:
    rehearsed_with_marker(tmp_path)
    second = ScriptJob(tmp_path, run=1, complete="{}.done")
    (tmp_path / "ckpt.pt.done").unlink()
    (tmp_path / "ckpt.pt").write_text("torn")
    second.watch.end_attempt(1)
    assert content(tmp_path / "ckpt.pt") == content(tmp_path / "ckpt.pt.done") == "old"
    assert content(tmp_path / AFTER / "ckpt.pt") == "torn"
    third = ScriptJob(tmp_path, run=2, complete="{}.done")
    content(tmp_path / "ckpt.pt")
    assert save_marked(third, "resumed").proven


def test_a_script_that_has_read_the_marker_only_has_not_resumed(tmp_path: Path) -> None:
    rehearsed_with_marker(tmp_path)
    second = ScriptJob(tmp_path, run=1, complete="{}.done")
    content(tmp_path / "ckpt.pt.done")
    assert save_marked(second, "anew").rehearsal == "refuted"


def test_an_old_marker_is_not_put_beside_a_newer_checkpoint(tmp_path: Path) -> None:
    rehearsed_with_marker(tmp_path)
    second = ScriptJob(tmp_path, run=1, complete="{}.done")
    save_marked(second, "anew")
    (tmp_path / "ckpt.pt.done").unlink()
    (tmp_path / "ckpt.pt").write_text("torn")
    second.watch.end_attempt(1)
    assert content(tmp_path / "ckpt.pt") == "torn", "it has as much progress"
    assert not (tmp_path / "ckpt.pt.done").exists()
    (tmp_path / "ckpt.pt").unlink()
    second.watch.end_attempt(1)
    assert content(tmp_path / "ckpt.pt") == content(tmp_path / "ckpt.pt.done") == "old"


def test_a_checkpoint_is_not_put_back_from_a_directory_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rehearsed(tmp_path, in_place)
    second = ScriptJob(tmp_path, run=1)
    in_place(second, "torn")
    monkeypatch.setattr(kept_checkpoint, "is_own", lambda _: False)
    second.watch.end_attempt(1)
    assert content(tmp_path / "ckpt.pt") == "torn"
    assert "belongs to another user" in capfd.readouterr().err


def test_a_job_that_cannot_write_where_it_was_submitted_is_proven(tmp_path: Path) -> None:
    (tmp_path / "submit").write_text("no directory can be made below a file")
    directories = [f"{tmp_path}/submit/.slurm-elastic", f"{tmp_path}/.slurm-elastic"]
    first = ScriptJob(tmp_path, directories=directories)
    save(first, in_place, "old")
    first.order("notice", 5, rehearsal=True)
    assert first.finish_copies().phase == "saved"
    kept = tmp_path / ".slurm-elastic/kept/r-7/before-rehearsal/ckpt.pt"
    assert content(kept) == "old"
    first.watch.end_attempt(None)
    second = ScriptJob(tmp_path, run=1, directories=directories)
    content(tmp_path / "ckpt.pt")
    assert save(second, in_place, "newer").proven
    assert not kept.exists()


def test_a_refusal_names_all_places_of_the_state(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    directories = [f"{tmp_path}/file/a", f"{tmp_path}/file/b"]
    job = ScriptJob(tmp_path, directories=directories)
    save(job, in_place, "1")
    report = refuse(job)
    assert report.rehearsal == "not-writable"
    assert report.kept_in == " or ".join(directories)[-200:]
