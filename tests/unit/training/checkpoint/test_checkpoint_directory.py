"""The directory of checkpoints: the newest complete one is found after any failure."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from slurm_elastic.training.checkpoint import checkpoint_directory as module
from slurm_elastic.training.checkpoint.checkpoint_directory import (
    CheckpointDirectory,
    CheckpointError,
    parts,
    verify,
)
from tests.support.trainings.training_runs import PROCESSES, wait

TENSORS = {
    "model.w": torch.arange(6.0).reshape(2, 3),
    "model.n": torch.tensor([1, 2**40]),
    "optim.step.w": torch.tensor(3.0),
    "model.h": torch.tensor([float("nan"), -0.0], dtype=torch.bfloat16),
    "model.b": torch.tensor([True, False]),
    "model.empty": torch.empty(0),
    "model.part": torch.arange(100.0)[10:20:3],
}


@pytest.fixture
def log_lines() -> list[str]:
    return []


@pytest.fixture
def checkpoints(tmp_path: Path, log_lines: list[str]) -> CheckpointDirectory:
    return CheckpointDirectory(tmp_path, keep=2, log=log_lines.append)


def test_tensors_are_read_as_they_were_written(checkpoints: CheckpointDirectory) -> None:
    checkpoints.save(7, TENSORS, {"epoch": 1})
    checkpoint = checkpoints.newest()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.meta) == (7, {"epoch": 1})
    with checkpoint.open(cold=True) as tensors:
        cold = dict(tensors)
    for read in (checkpoint.read(), cold):
        assert read.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name].nan_to_num(9), tensor.nan_to_num(9)), name


def test_torchs_own_tools_read_a_checkpoint(checkpoints: CheckpointDirectory) -> None:
    checkpoint = checkpoints.save(7, TENSORS, {})
    dcp_to_torch_save(checkpoint.path, checkpoints.root / "all.pt")
    assert torch.equal(torch.load(checkpoints.root / "all.pt")["model.w"], TENSORS["model.w"])
    metadata = dcp.FileSystemReader(checkpoint.path).read_metadata()
    assert metadata.state_dict_metadata.keys() == TENSORS.keys()


def test_two_checkpoints_are_kept_and_latest_names_the_newest(
    checkpoints: CheckpointDirectory,
) -> None:
    for step in (3, 5, 9):
        checkpoints.save(step, TENSORS, {})
    assert sorted(p.name for p in checkpoints.root.iterdir()) == [
        "latest",
        "step_00000005",
        "step_00000009",
    ]
    assert (checkpoints.root / "latest").read_text() == "step_00000009\n"


def test_latest_edited_by_hand_selects_an_older_checkpoint(
    checkpoints: CheckpointDirectory, log_lines: list[str]
) -> None:
    checkpoints.save(5, TENSORS, {})
    checkpoints.save(9, TENSORS, {})
    time.sleep(0.01)
    (checkpoints.root / "latest").write_text("step_00000005")
    assert checkpoints.newest().step == 5  # type: ignore[union-attr]
    checkpoints.save(6, TENSORS, {})
    assert checkpoints.newest().step == 6  # type: ignore[union-attr]
    # The abandoned one is left alone until it is written again.
    assert (checkpoints.root / "step_00000009").is_dir()
    checkpoints.save(9, TENSORS, {"again": True})
    assert checkpoints.newest().meta == {"again": True}  # type: ignore[union-attr]
    assert log_lines == []


def test_a_rescue_writes_only_what_is_newer(checkpoints: CheckpointDirectory) -> None:
    checkpoints.save(5, TENSORS, {})
    assert checkpoints.rescue(5, parts(TENSORS), {}) is None
    assert checkpoints.rescue(4, parts(TENSORS), {}) is None
    assert checkpoints.rescue(7, parts(TENSORS), {"epoch": 1}) is not None
    newest = checkpoints.newest()
    assert newest is not None
    assert (newest.step, newest.meta) == (7, {"epoch": 1})
    assert newest.read().keys() == TENSORS.keys()
    assert (checkpoints.root / "latest").read_text() == "step_00000005\n"


def test_of_several_ranks_one_rescues(checkpoints: CheckpointDirectory) -> None:
    checkpoints.root.mkdir(exist_ok=True)
    (checkpoints.root / ".tmp.step_00000007.rescue").mkdir()  # another rank writes there
    assert checkpoints.rescue(7, parts(TENSORS), {}) is None
    checkpoints.clean()  # that of a rank that was killed meanwhile
    assert checkpoints.rescue(7, parts(TENSORS), {}) is not None


def test_a_kill_between_rename_and_latest_costs_nothing(checkpoints: CheckpointDirectory) -> None:
    checkpoints.save(5, TENSORS, {})
    before = (checkpoints.root / "latest").read_text()
    pointer = (checkpoints.root / "latest").stat()
    checkpoints.save(9, TENSORS, {})
    (checkpoints.root / "latest").write_text(before)
    os.utime(checkpoints.root / "latest", ns=(pointer.st_atime_ns, pointer.st_mtime_ns))
    assert checkpoints.newest().step == 9  # type: ignore[union-attr]


def _tear(path: Path) -> None:
    (path / "manifest.json").unlink()


def _cut(path: Path) -> None:
    with (path / "__0_0.distcp").open("r+b") as file:
        file.truncate(100)


def _flip(path: Path) -> None:
    with (path / "__0_0.distcp").open("r+b") as file:
        file.seek(200)
        byte = file.read(1)
        file.seek(200)
        file.write(bytes([byte[0] ^ 1]))


def _lose(path: Path) -> None:
    (path / ".metadata").unlink()


def _edit(**fields: object):
    def edit(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps(manifest | fields))

    return edit


def _garble(path: Path) -> None:
    (path / "manifest.json").write_bytes(b'{"kind": \xff')


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_tear, "not complete (no manifest)"),
        (_cut, "not complete (__0_0.distcp has 100 bytes of"),
        (_flip, "damaged (__0_0.distcp has another checksum)"),
        (_lose, "not complete (.metadata is missing)"),
        (_edit(format=2), "format 2 is invalid: expected 1; "),
        (_edit(kind="another"), "not written by slurm-elastic"),
        (_edit(files=3), "its manifest is damaged"),
        (_garble, "its manifest cannot be read"),
    ],
)
def test_an_invalid_checkpoint_is_skipped_with_one_line(
    checkpoints: CheckpointDirectory, log_lines: list[str], damage, reason: str
) -> None:
    checkpoints.save(5, TENSORS, {})
    checkpoints.save(9, TENSORS, {})
    damage(checkpoints.root / "step_00000009")
    checkpoint = checkpoints.newest()
    assert checkpoint is not None
    assert checkpoint.step == 5
    verify(checkpoint)
    assert len(log_lines) == 1
    assert log_lines[0].startswith(f"skipped step_00000009: {reason}")


def test_foreign_and_newer_checkpoints_are_never_deleted(checkpoints: CheckpointDirectory) -> None:
    (checkpoints.root / "step_00000001").mkdir()
    (checkpoints.root / "step_00000001" / "weights").write_text("somebody's")
    checkpoints.save(2, TENSORS, {})
    _edit(format=2)(checkpoints.root / "step_00000002")
    for step in (3, 4, 5):
        checkpoints.save(step, TENSORS, {})
    names = {p.name for p in checkpoints.root.iterdir()}
    assert {"step_00000001", "step_00000002", "step_00000004", "step_00000005"} < names


def test_an_absent_directory_has_no_checkpoint(tmp_path: Path) -> None:
    assert CheckpointDirectory(tmp_path / "absent", keep=2, log=print).newest() is None


def _save_and_hang(root: Path, where: str) -> None:
    def hang(*_: object) -> None:
        (root / "hangs").touch()
        time.sleep(600)

    if where == "data":
        os.fsync = hang  # type: ignore[assignment]
    elif where == "manifest":
        module._write_text = hang  # type: ignore[assignment]
    else:
        module._sync = hang  # type: ignore[assignment]
    CheckpointDirectory(root, keep=2, log=print).save(9, TENSORS, {})


@pytest.mark.parametrize("where", ["data", "manifest", "rename"])
def test_sigkill_during_a_save_leaves_the_previous_checkpoint(
    checkpoints: CheckpointDirectory, log_lines: list[str], where: str
) -> None:
    checkpoints.save(5, TENSORS, {})
    victim = PROCESSES.Process(target=_save_and_hang, args=(checkpoints.root, where))
    victim.start()
    wait((checkpoints.root / "hangs").exists, "the save")
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    assert checkpoints.newest().step == 5  # type: ignore[union-attr]
    assert (checkpoints.root / ".tmp.step_00000009").is_dir()
    checkpoints.clean()
    checkpoints.save(9, TENSORS, {})
    assert checkpoints.newest().step == 9  # type: ignore[union-attr]
    assert not list(checkpoints.root.glob(".tmp*"))
    assert log_lines == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if (
        shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True, check=False).returncode
    ):
        pytest.skip("no right to mount a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("guarded", [True, False])
def test_a_full_disk_keeps_earlier_checkpoints(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    checkpoints = CheckpointDirectory(small_disk, keep=2, log=print)
    checkpoints.save(5, TENSORS, {})
    if not guarded:  # as with a quota, which the free space does not show
        monkeypatch.setattr(CheckpointDirectory, "_check_space", lambda *_: None)
    with pytest.raises(CheckpointError, match=f"No space left on device .{small_disk}"):
        checkpoints.save(9, TENSORS | {"model.big": torch.zeros(2**20)}, {})
    assert checkpoints.newest().step == 5  # type: ignore[union-attr]
    assert not list(small_disk.glob(".tmp*"))
    checkpoints.save(10, TENSORS, {})
    assert checkpoints.newest().step == 10  # type: ignore[union-attr]
