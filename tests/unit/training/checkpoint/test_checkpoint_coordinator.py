"""Checkpoints that several ranks write and any layout reads."""

import errno
import json
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from slurm_elastic.training.checkpoint import checkpoint_directory as module
from slurm_elastic.training.checkpoint import dcp_files
from slurm_elastic.training.checkpoint.checkpoint_directory import (
    CheckpointDirectory,
    CheckpointError,
)
from slurm_elastic.training.checkpoint.checkpoint_manager import CheckpointManager
from slurm_elastic.training.checkpoint.dcp_files import TensorReader
from slurm_elastic.training.checkpoint.training_state import TrainingState
from slurm_elastic.training.sampler import Cursor
from tests.support.trainings.checkpoint_ranks import (
    NAMES,
    CheckpointRanks,
    FakeRankGroup,
    MessageStore,
    differences,
    run_concurrently,
    state,
    step,
)
from tests.support.trainings.training_runs import PROCESSES, wait

FRONT, BACK = NAMES[:2], NAMES[2:]


def two(root: Path, **options: Any) -> CheckpointRanks:
    return CheckpointRanks(root, [state(FRONT), state(BACK, part=1)], **options)


def trained(steps: int, **options: Any) -> TrainingState:
    """Return the state of the whole network after uninterrupted steps."""
    whole_state = state(**options)
    for seed in range(steps):
        step(whole_state, seed)
    return whole_state


def moments(of: TrainingState) -> dict[str, torch.Tensor]:
    return {k: v for k, v in of.gather().items() if not k.startswith("blob.")}


def rates(of: TrainingState) -> list[float]:
    return [group["lr"] for group in of.optimizer.param_groups]


@pytest.mark.parametrize("tie", [False, True])
def test_a_sequence_of_layouts_keeps_every_tensor(tmp_path: Path, tie: bool) -> None:
    layouts = [
        [NAMES],
        [NAMES[:1], NAMES[1:4], NAMES[4:]],
        [NAMES[1:4], NAMES[:1] + NAMES[4:]],
        [FRONT, BACK],
        [NAMES],
    ]
    for done, layout in enumerate(layouts):
        parts = [state(held, part=rank, tie=tie) for rank, held in enumerate(layout)]
        ranks = CheckpointRanks(tmp_path, parts)
        cursors = ranks.restore()
        assert [c.step if c else 0 for c in cursors] == [done] * len(layout)
        ranks.step(done)
        assert ranks.save(done + 1) == [True] * len(layout)
        assert [k.proven for k in ranks.managers] == [True] * len(layout)
        assert ranks.log_lines == []
        alone = trained(done + 1, tie=tie)
        for part in parts:
            expected = moments(alone)
            assert differences({k: expected[k] for k in moments(part)}, moments(part)) == []
            assert rates(part) == rates(alone)


def test_torchs_own_tools_read_what_several_wrote(tmp_path: Path) -> None:
    ranks = two(tmp_path / "c")
    ranks.step(0)
    ranks.save(3)
    assert {p.name for p in (tmp_path / "c" / "step_00000003").iterdir()} == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "manifest.json",
    }
    dcp_to_torch_save(tmp_path / "c" / "step_00000003", tmp_path / "all.pt")
    read = torch.load(tmp_path / "all.pt")
    for part in ranks.states:
        for name, tensor in moments(part).items():
            assert torch.equal(read[name], tensor), name


def test_a_tensor_of_several_ranks_is_written_by_the_lowest(tmp_path: Path) -> None:
    states = [state(), state(part=1)]
    states[1].model.norm.running_mean += 1
    ranks = CheckpointRanks(tmp_path, states)
    assert ranks.save(3) == [True, True]
    assert [k.proven for k in ranks.managers] == [True, True]
    checkpoint = CheckpointDirectory(tmp_path, keep=1, log=print).newest()
    assert checkpoint is not None
    assert checkpoint.written_by(1) == {"blob.optim.1"}
    assert torch.equal(
        checkpoint.read(["model.norm.running_mean"])["model.norm.running_mean"], torch.zeros(4)
    )


def test_one_rank_that_reads_back_differently_leaves_all_unproven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TensorReader.__getitem__

    def modified(tensors: TensorReader, name: str) -> torch.Tensor:
        read = original(tensors, name)
        return read + 1 if name == "model.head.weight" else read

    ranks = two(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(TensorReader, "__getitem__", modified)
        assert ranks.save(3) == [True, True]
    assert [k.proven for k in ranks.managers] == [False, False]
    assert ranks.log_lines == [
        (
            "checkpoint of step 3 differs when read back: model.head.weight; "
            "the job is not resized until one does not"
        )
    ]
    assert ranks.save(4) == [True, True]
    assert [k.proven for k in ranks.managers] == [True, True]


def test_two_checkpoints_of_several_writers_are_kept(tmp_path: Path) -> None:
    ranks = two(tmp_path)
    for number in (3, 5, 9):
        ranks.save(number)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "latest",
        "step_00000005",
        "step_00000009",
    ]
    assert (tmp_path / "latest").read_text() == "step_00000009\n"


def test_ranks_that_do_not_write_do_not_wait(tmp_path: Path) -> None:
    ranks = CheckpointRanks(
        tmp_path, [state(FRONT), state(BACK, part=1), state(FRONT, part=2)], writers=[0, 1]
    )
    assert ranks.managers[2].save(Cursor(3, 0, 3))
    assert run_concurrently([lambda k=k: k.save(Cursor(3, 0, 3)) for k in ranks.managers[:2]]) == [
        True,
        True,
    ]
    assert ranks.restore() == [Cursor(3, 0, 3)] * 3


def test_a_step_is_saved_once_by_all(tmp_path: Path) -> None:
    ranks = two(tmp_path)
    ranks.save(3)
    before = (tmp_path / "step_00000003" / "manifest.json").stat().st_mtime_ns
    assert ranks.save(3) == [True, True]
    assert (tmp_path / "step_00000003" / "manifest.json").stat().st_mtime_ns == before
    assert ranks.save(4) == [True, True]


def test_messages_are_removed_after_a_save(tmp_path: Path) -> None:
    ranks = two(tmp_path)
    for number in range(3):
        ranks.save(number)
    assert sum(len(v) for v in ranks.store.values.values()) == 0


def _no_space(rank: int) -> Any:
    original = dcp_files.write

    def write(path: Path, pieces: Any) -> Any:
        if path.name == f"__{rank}_0.distcp":
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(path, pieces)

    return write


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_writer_keeps_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    ranks = two(tmp_path)
    ranks.save(3)
    with monkeypatch.context() as patch:
        patch.setattr(dcp_files, "write", _no_space(rank))
        assert ranks.save(5) == [False, False]
    (line,) = ranks.log_lines
    assert line.startswith(f"checkpoint of step 5 failed: rank {rank}: No space left on device (")
    assert line.endswith("; that of step 3 stays, training continues")
    assert not list(tmp_path.glob(".tmp*"))
    assert ranks.managers[0].report_fields()["checkpoint_step"] == 3
    assert ranks.save(6) == [True, True]
    assert [c and c.step for c in two(tmp_path).restore()] == [6, 6]


@pytest.mark.parametrize("silent", [0, 1])
def test_a_writer_that_never_answers_costs_one_checkpoint(tmp_path: Path, silent: int) -> None:
    ranks = two(tmp_path, patience_s=0.5)
    ranks.save(3)
    assert ranks.managers[1 - silent].save(Cursor(5, 0, 5)) is False
    assert [p.name for p in sorted(tmp_path.glob("step_*"))] == ["step_00000003"]
    if silent == 1:
        (line,) = ranks.log_lines
        assert re.match(r"checkpoint of step 5 failed: rank 1: no answer within 0 s; that of", line)


def test_a_state_that_cannot_be_saved_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> Any:
            return {"when": self}

        def load_state_dict(self, state: Any) -> None:
            pass

    ranks = CheckpointRanks(tmp_path, [state(FRONT, extra={"odd": Odd()}), state(BACK, part=1)])
    assert ranks.save(3) == [False, False]
    assert ranks.log_lines[0].startswith("checkpoint of step 3 failed: extra 'odd' cannot be saved")
    assert len(ranks.log_lines) == 1


def test_pieces_that_leave_a_gap_are_not_saved(tmp_path: Path) -> None:
    store = MessageStore()
    coordinators = [
        module.CheckpointCoordinator(
            rank=r, writers=[0, 1], open_channel=lambda: store, patience_s=5
        )
        for r in (0, 1)
    ]
    for coordinator in coordinators:
        coordinator.begin()
    piece = dcp_files.TensorShard("model.w", (4, 2), (0, 0), torch.ones(1, 2))
    other = dcp_files.TensorShard("model.w", (4, 2), (2, 0), torch.ones(2, 2))
    checkpoints = CheckpointDirectory(tmp_path, keep=1, log=print)

    def lead() -> str:
        with pytest.raises(CheckpointError) as caught:
            checkpoints.write(1, [piece], {}, coordinators[0])
        coordinators[0].fail(str(caught.value))
        return str(caught.value)

    def follow() -> str:
        with pytest.raises(CheckpointError) as caught:
            checkpoints.join([other], coordinators[1])
        return str(caught.value)

    on_rank_0, on_rank_1 = run_concurrently([lead, follow])
    assert on_rank_0 == on_rank_1
    assert "model.w" in on_rank_0


def test_a_directory_that_is_not_shared_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_APPEARS_S", 0.1)
    ranks = two(tmp_path / "here")
    ranks.managers[1]._checkpoints.root = tmp_path / "there"
    assert ranks.save(3) == [False, False]
    (line,) = ranks.log_lines
    assert line.startswith("checkpoint of step 3 failed: rank 1: ")
    assert "put checkpoint_dir on a file system" in line


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: os.truncate(p, 90), "not complete (__1_0.distcp has 90 bytes of"),
        (Path.unlink, "not complete (__1_0.distcp is missing)"),
        (lambda p: p.write_bytes(p.read_bytes()[:-1] + b"\1"), "damaged (__1_0.distcp has another"),
    ],
)
def test_a_checkpoint_with_one_invalid_file_is_skipped(
    tmp_path: Path, damage: Any, reason: str
) -> None:
    ranks = two(tmp_path)
    ranks.save(3)
    ranks.save(5)
    damage(tmp_path / "step_00000005" / "__1_0.distcp")
    again = two(tmp_path)
    assert [c and c.step for c in again.restore()] == [3, 3]
    (line,) = again.log_lines
    assert line.startswith(f"skipped step_00000005: {reason}")


def _hang_at(root: Path, where: str) -> None:
    def hang(*_: object, **__: object) -> None:
        (root / "hangs").touch()
        time.sleep(600)

    ranks = two(root)
    if where == "plan":
        dcp_files.divide = hang  # type: ignore[assignment]
    elif where == "one writer":
        original = dcp_files.write
        dcp_files.write = lambda p, f: hang() if "__1" in p.name else original(p, f)  # type: ignore[assignment,func-returns-value]
    elif where == "metadata":
        dcp_files.describe = hang  # type: ignore[assignment]
    else:
        module._write_text = hang
    ranks.save(9)


@pytest.mark.parametrize("where", ["plan", "one writer", "metadata", "manifest"])
def test_sigkill_before_publication_leaves_the_previous_checkpoint(
    tmp_path: Path, where: str
) -> None:
    two(tmp_path).save(5)
    victim = PROCESSES.Process(target=_hang_at, args=(tmp_path, where))
    victim.start()
    wait((tmp_path / "hangs").exists, "the save")
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    again = two(tmp_path)
    assert [c and c.step for c in again.restore()] == [5, 5]
    assert again.log_lines == []
    assert again.save(9) == [True, True]
    assert not list(tmp_path.glob(".tmp*"))


def test_a_rank_reads_only_the_tensors_of_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(2)
    CheckpointRanks(tmp_path, [whole]).save(3)
    read: Counter[str] = Counter()
    original = TensorReader.__getitem__

    def watch(tensors: TensorReader, name: str) -> torch.Tensor:
        read[name] += 1
        return original(tensors, name)

    monkeypatch.setattr(TensorReader, "__getitem__", watch)
    ranks = CheckpointRanks(tmp_path, [state(BACK, part=1)])
    ranks.restore()
    assert {n for n in read if not n.startswith("blob.")} == moments(ranks.states[0]).keys()
    assert set(read.values()) == {1}


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    CheckpointRanks(tmp_path, [state()]).save(3)
    wrong = state(FRONT)
    assert wrong.full_shapes is not None
    other = TrainingState(
        model=wrong.model,
        optimizer=wrong.optimizer,
        full_shapes={**wrong.full_shapes, "head.weight": (9, 4)},
    )
    before = {k: v.clone() for k, v in moments(other).items()}
    with pytest.raises(
        CheckpointError, match=r"head\.weight is 7x4 in the checkpoint and 9x4 in the model"
    ):
        CheckpointRanks(tmp_path, [other]).restore()
    assert differences(before, moments(other)) == []


def test_checkpoints_without_shapes_can_be_read(tmp_path: Path) -> None:
    whole = trained(2)
    CheckpointRanks(tmp_path, [whole]).save(3)
    path = tmp_path / "step_00000003" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["shapes"]
    manifest["meta"]["freezing"] = {"frozen": 1}
    del manifest["meta"]["kept"]
    path.write_text(json.dumps(manifest))
    ranks = two(tmp_path)
    ranks.restore()
    assert ranks.managers[1].restored == {"freezing": {"frozen": 1}}
    for part in ranks.states:
        expected = moments(whole)
        assert differences({k: expected[k] for k in moments(part)}, moments(part)) == []


def test_a_broken_connection_fails_the_save(tmp_path: Path) -> None:
    class Broken(MessageStore):
        def wait_for(self, key: str, timeout_s: float) -> str | None:
            raise RuntimeError("Connection reset by peer\nand so on")

    log_lines: list[str] = []
    manager = CheckpointManager(
        CheckpointDirectory(tmp_path, keep=2, log=log_lines.append),
        state(FRONT),
        FakeRankGroup(0, 2, MessageStore()),  # type: ignore[arg-type]
        every_s=100.0,
        identity={},
        log=log_lines.append,
        writers=[0, 1],
        channel=Broken(),
    )
    assert manager.save(Cursor(3, 0, 3)) is False
    (line,) = log_lines
    assert "the connection to the other writers is broken (Connection reset by peer)" in line
