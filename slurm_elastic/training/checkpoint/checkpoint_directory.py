"""A directory of checkpoints whose newest complete one can always be found.

    checkpoint_dir/
        latest                   text: the name of the newest
        step_00000120/           written as .tmp.step_00000120, synced, then renamed
            __0_0.distcp .metadata   torch.distributed.checkpoint's own files, one per writer
            manifest.json        last: sizes, checksums, position of each tensor, and `meta`

A directory without a manifest that fits its files is no checkpoint, so a kill
at any moment leaves the previous one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slurm_elastic.training.checkpoint import dcp_files
from slurm_elastic.training.checkpoint.checkpoint_coordinator import (
    CheckpointCoordinator,
    CheckpointError,
    failed,
)
from slurm_elastic.training.checkpoint.dcp_files import TensorShard
from slurm_elastic.training.checkpoint.manifest import (
    FORMAT,
    KIND,
    MANIFEST,
    CompleteCheckpoint,
    checksum,
    file_of,
    files_of,
    open_checkpoint,
    verify,
)
from slurm_elastic.training.checkpoint.shards import ShardError

__all__ = [
    "CheckpointDirectory",
    "CheckpointError",
    "CompleteCheckpoint",
    "open_checkpoint",
    "parts",
    "verify",
]

LATEST = "latest"
_NAME = re.compile(r"step_(\d{8,})")
#: A checkpoint just written on another node appears this late at worst (NFS caches directories).
_APPEARS_S = 60.0


class CheckpointDirectory:
    """Checkpoints of one training run.

    Args:
        root: the directory, on a file system that all nodes share.
        keep: number of complete checkpoints that are kept.
        log: takes one line for the job's log.
    """

    def __init__(self, root: Path, *, keep: int, log: Callable[[str], None]) -> None:
        self.root = root
        self._keep = max(1, keep)
        self._log = log

    def newest(self) -> CompleteCheckpoint | None:
        """Return the newest complete checkpoint, or None; log why newer ones are skipped."""
        for path in self._candidates():
            try:
                checkpoint = open_checkpoint(path)
                verify(checkpoint)
            except CheckpointError as error:
                self._log(f"skipped {path.name}: {error}")
            else:
                return checkpoint
        return None

    def named(self, name: str) -> CompleteCheckpoint:
        """Return the checkpoint of this name, which another node has verified.

        Raises:
            CheckpointError: it is not complete on this node, also after a wait.
        """

        def complete() -> bool:
            with contextlib.suppress(CheckpointError):
                open_checkpoint(self.root / name)
                return True
            return False

        _wait_until(complete)
        return open_checkpoint(self.root / name)

    def clean(self) -> None:
        """Remove the partial files of killed saves."""
        for path in self.root.glob(".tmp.step_*"):
            shutil.rmtree(path, ignore_errors=True)

    def save(
        self, step: int, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]
    ) -> CompleteCheckpoint:
        """Write a whole checkpoint from this rank; see `write`."""
        return self.write(step, parts(tensors), meta, CheckpointCoordinator())

    def write(
        self,
        step: int,
        pieces: Sequence[TensorShard],
        meta: Mapping[str, Any],
        coordinator: CheckpointCoordinator,
    ) -> CompleteCheckpoint:
        """Write a checkpoint on rank 0 with the other writers, and remove the oldest ones.

        Args:
            step: optimisation steps done.
            pieces: those that this rank holds.
            meta: plain values for the manifest.
            coordinator: messages to the other writers, which `join`.

        Raises:
            CheckpointError: not written, e.g. for lack of space; other checkpoints stay.
        """
        name = f"step_{step:08d}"
        work = self.root / f".tmp.{name}"
        try:
            plans = coordinator.gather("plan", dcp_files.plan(pieces))
            self.root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(work, ignore_errors=True)
            self._check_space(plans.values())
            work.mkdir()
            written = self._fill(work, coordinator, plans, step=step, pieces=pieces, meta=meta)
            self._commit(work, name)
        except BaseException as error:
            shutil.rmtree(work, ignore_errors=True)
            if isinstance(error, OSError | ValueError):
                raise CheckpointError(self._reason(error)) from error
            raise
        self._remove_old(step)
        return written

    def rescue(
        self, step: int, pieces: Sequence[TensorShard], meta: Mapping[str, Any]
    ) -> CompleteCheckpoint | None:
        """Write a checkpoint from one rank that holds everything, as rank 0 is lost.

        Rank 0 may still live, separated from this rank by the network: what it has written is not
        touched, and `latest` stays. Of several ranks that call this, one writes.

        Returns:
            None: one of this step or a newer one is there, or another rank writes it.

        Raises:
            CheckpointError: not written; other checkpoints stay.
        """
        name = f"step_{step:08d}"
        work = self.root / f".tmp.{name}.rescue"
        coordinator = CheckpointCoordinator()
        newest = self._steps()[:1]
        if newest and int(newest[0].name.removeprefix("step_")) >= step:
            return None
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            work.mkdir()
        except FileExistsError:
            return None
        try:
            plans = coordinator.gather("plan", dcp_files.plan(pieces))
            self._check_space(plans.values())
            written = self._fill(work, coordinator, plans, step=step, pieces=pieces, meta=meta)
            work.rename(self.root / name)  # fails if there is one meanwhile
            _sync(self.root)
        except (OSError, ValueError) as error:
            shutil.rmtree(work, ignore_errors=True)
            raise CheckpointError(self._reason(error)) from error
        return written

    def _fill(
        self,
        work: Path,
        coordinator: CheckpointCoordinator,
        plans: Mapping[int, dcp_files.Plan],
        *,
        step: int,
        pieces: Sequence[TensorShard],
        meta: Mapping[str, Any],
    ) -> CompleteCheckpoint:
        """Write the files of a checkpoint, and its manifest last, with the other writers."""
        shares, metadata = dcp_files.divide(list(plans.values()))
        orders = {
            rank: {"directory": work.name, "pieces": share}
            for rank, share in zip(plans, shares, strict=True)
        }
        coordinator.scatter("share", None, by_rank=orders)
        results = coordinator.gather("result", self._write_share(pieces, orders[0], rank=0))
        written = []
        for rank, share in zip(plans, shares, strict=True):
            self._expect(work, rank, results[rank])
            for i, where in zip(share, results[rank]["where"], strict=True):
                written.append((results[rank]["file"], plans[rank][i], where))
        index = dcp_files.describe(work, metadata, written)
        shapes = {entry[0]: entry[2] for _, entry, _ in written}
        files = {r["file"]: [r["size"], r["checksum"]] for r in results.values() if r["file"]}
        for path in files_of(work):
            files.setdefault(path.name, [path.stat().st_size, checksum(path)])
        manifest = {
            "kind": KIND,
            "format": FORMAT,
            "step": step,
            "meta": dict(meta),
            "files": files,
            "index": index,
            "shapes": shapes,
        }
        _write_text(work / MANIFEST, json.dumps(manifest))
        _sync(work)
        return CompleteCheckpoint(self.root / f"step_{step:08d}", step, dict(meta), index, shapes)

    def join(self, pieces: Sequence[TensorShard], coordinator: CheckpointCoordinator) -> bool:
        """Write, on another rank than 0, the pieces that rank 0 assigns.

        Returns:
            False if this step is saved already. The outcome is still to be received.

        Raises:
            CheckpointError: the pieces cannot be written, or rank 0 failed.
        """
        coordinator.send("plan", dcp_files.plan(pieces))
        share = coordinator.receive("share")
        if share.get("already"):
            return False
        coordinator.send("result", self._write_share(pieces, share, rank=coordinator.rank))
        return True

    def _write_share(
        self, pieces: Sequence[TensorShard], share: Mapping[str, Any], *, rank: int
    ) -> dict[str, Any]:
        """Write this rank's file; return its description, or the message of a failure."""
        if not share["pieces"]:
            return {"file": "", "size": 0, "checksum": 0, "where": []}
        path = self.root / share["directory"] / file_of(rank)
        try:
            if not _wait_until(path.parent.is_dir):
                return failed(
                    f"{path.parent} is missing on this node; put checkpoint_dir on a file system"
                    " that all nodes share"
                )
            where = dcp_files.write(path, [pieces[i] for i in share["pieces"]])
            size, crc = path.stat().st_size, checksum(path)
        except OSError as error:
            return failed(self._reason(error))
        except Exception as error:  # noqa: BLE001 - rank 0 has to know, and tells all
            return failed(repr(error))
        return {"file": path.name, "size": size, "checksum": crc, "where": where}

    def _expect(self, work: Path, rank: int, result: Mapping[str, Any]) -> None:
        """Wait until a file of another node is visible here with its full size."""

        def complete() -> bool:
            try:
                return (work / str(result["file"])).stat().st_size == int(result["size"])
            except OSError:
                return False

        if result["file"] and not _wait_until(complete):
            raise CheckpointError(
                f"rank {rank}: its {result['file']} is incomplete or missing on rank 0's node;"
                f" put {self.root} on a file system that all nodes share"
            )

    def _reason(self, error: Exception) -> str:
        text = error.strerror if isinstance(error, OSError) else None
        return f"{text or error} ({self.root})"

    def _check_space(self, plans: Iterable[dcp_files.Plan]) -> None:
        """Refuse a save that does not fit, before it fills a file system that others use."""
        needed_bytes = {
            (name, *first): _bytes(dtype, count)
            for p in plans
            for name, dtype, _, first, count in p
        }
        if shutil.disk_usage(self.root).free < sum(needed_bytes.values()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _commit(self, work: Path, name: str) -> None:
        target = self.root / name
        if target.exists():
            # Left by a run that continued from an older checkpoint, or incomplete.
            self._remove(target)
        work.rename(target)
        _sync(self.root)
        pointer = self.root / f".tmp.{LATEST}"
        _write_text(pointer, name + "\n")
        pointer.replace(self.root / LATEST)
        _sync(self.root)

    def _remove_old(self, step: int) -> None:
        """Remove old checkpoints, but none that are newer, foreign or of a newer format."""
        checkpoints = []
        for path in self._steps():
            with contextlib.suppress(CheckpointError):
                checkpoints.append(open_checkpoint(path))
        for old in [c for c in checkpoints if c.step <= step][self._keep :]:
            with contextlib.suppress(OSError):
                self._remove(old.path)

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint, renamed first, so that a kill leaves nothing but partial files."""
        old = self.root / f".tmp.{path.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        shutil.rmtree(old, ignore_errors=True)

    def _candidates(self) -> list[Path]:
        """Return all paths, newest first; a `latest` edited by hand since then comes first."""
        steps = self._steps()
        pointer = self.root / LATEST
        with contextlib.suppress(OSError):
            chosen = self.root / pointer.read_text(encoding="utf-8").strip()
            edited = pointer.stat().st_mtime_ns
            if chosen in steps and all(_written(path) <= edited for path in steps):
                steps.remove(chosen)
                steps.insert(0, chosen)
        return steps

    def _steps(self) -> list[Path]:
        """Return all directories with a checkpoint's name, newest first."""
        if not self.root.is_dir():
            return []
        paths = [p for p in self.root.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
        return sorted(paths, key=lambda p: int(p.name.removeprefix("step_")), reverse=True)


def parts(tensors: Mapping[str, torch.Tensor]) -> list[TensorShard]:
    """Return this rank's piece of each tensor.

    Raises:
        CheckpointError: a tensor is sharded in a way that checkpoints do not support.
    """
    try:
        return dcp_files.pieces(tensors)
    except ShardError as error:
        raise CheckpointError(str(error)) from None


def _wait_until(visible: Callable[[], bool]) -> bool:
    """Wait until another node's files are visible here; False after `_APPEARS_S`."""
    end = time.monotonic() + _APPEARS_S
    while not visible():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    each: int = getattr(torch, dtype.removeprefix("torch.")).itemsize
    return each * math.prod(shape)


def _written(path: Path) -> int:
    """Return the time, in ns, at which a checkpoint became complete; 0 if it never did."""
    try:
        return (path / MANIFEST).stat().st_mtime_ns
    except OSError:
        return 0


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """Make names durable, as fsync of a file does for its bytes."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
