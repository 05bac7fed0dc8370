"""A directory of checkpoints of which the newest complete one can always be told.

    checkpoint_dir/
        latest                   text: the name of the newest
        step_00000120/           written as .tmp.step_00000120, synced, then renamed
            __0_0.distcp .metadata   torch.distributed.checkpoint's own files, one per writer
            manifest.json        last: sizes, checksums, where each tensor lies, and `meta`

A directory without a manifest that fits its files is no checkpoint, so a kill
at any moment leaves the one before.
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
    """The checkpoints of one training run.

    Args:
        root: the directory, on a file system that all nodes share.
        keep: how many complete ones stay.
        log: takes one line for the job's log.
    """

    def __init__(self, root: Path, *, keep: int, log: Callable[[str], None]) -> None:
        self.root = root
        self._keep = max(1, keep)
        self._log = log

    def newest(self) -> CompleteCheckpoint | None:
        """The newest that is whole; says of each other why it was passed over."""
        for path in self._candidates():
            try:
                found = open_checkpoint(path)
                verify(found)
            except CheckpointError as error:
                self._log(f"skipped {path.name}: {error}")
            else:
                return found
        return None

    def named(self, name: str) -> CompleteCheckpoint:
        """The one of this name, which another node has verified.

        Raises:
            CheckpointError: it is not whole here, also after a while.
        """

        def whole() -> bool:
            with contextlib.suppress(CheckpointError):
                open_checkpoint(self.root / name)
                return True
            return False

        _appears(whole)
        return open_checkpoint(self.root / name)

    def clean(self) -> None:
        """Remove what killed saves left behind."""
        for path in self.root.glob(".tmp.step_*"):
            shutil.rmtree(path, ignore_errors=True)

    def save(
        self, step: int, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]
    ) -> CompleteCheckpoint:
        """Write all of a checkpoint from here; see `write`."""
        return self.write(step, parts(tensors), meta, CheckpointCoordinator())

    def write(
        self,
        step: int,
        pieces: Sequence[TensorShard],
        meta: Mapping[str, Any],
        coordinator: CheckpointCoordinator,
    ) -> CompleteCheckpoint:
        """On rank 0: write a checkpoint with the others, make it the latest, forget the oldest.

        Args:
            step: optimisation steps done.
            pieces: what this rank holds.
            meta: plain values for the manifest.
            coordinator: the other writers, which `join`.

        Raises:
            CheckpointError: not written, e.g. for lack of space; the others are untouched.
        """
        name = f"step_{step:08d}"
        work = self.root / f".tmp.{name}"
        try:
            plans = coordinator.gather("plan", dcp_files.plan(pieces))
            shares, metadata = dcp_files.divide(list(plans.values()))
            self.root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(work, ignore_errors=True)
            self._check_space(plans.values())
            work.mkdir()
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
            self._commit(work, name)
        except BaseException as error:
            shutil.rmtree(work, ignore_errors=True)
            if isinstance(error, OSError | ValueError):
                raise CheckpointError(self._reason(error)) from error
            raise
        self._forget(step)
        return CompleteCheckpoint(self.root / name, step, dict(meta), index, shapes)

    def join(self, pieces: Sequence[TensorShard], coordinator: CheckpointCoordinator) -> bool:
        """On another writer than rank 0: write what rank 0 asks for.

        Returns:
            False if this step is saved already. The outcome is still to be received.

        Raises:
            CheckpointError: it cannot be.
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
        """This rank's file; tells what went wrong instead of raising it."""
        if not share["pieces"]:
            return {"file": "", "size": 0, "checksum": 0, "where": []}
        path = self.root / share["directory"] / file_of(rank)
        try:
            if not _appears(path.parent.is_dir):
                return failed(f"does not see {path.parent}; all nodes must share checkpoint_dir")
            where = dcp_files.write(path, [pieces[i] for i in share["pieces"]])
            size, crc = path.stat().st_size, checksum(path)
        except OSError as error:
            return failed(self._reason(error))
        except Exception as error:  # noqa: BLE001 - rank 0 has to learn of it, and tells all
            return failed(repr(error))
        return {"file": path.name, "size": size, "checksum": crc, "where": where}

    def _expect(self, work: Path, rank: int, result: Mapping[str, Any]) -> None:
        """What another node wrote must be seen here, as it was written."""

        def whole() -> bool:
            try:
                return (work / str(result["file"])).stat().st_size == int(result["size"])
            except OSError:
                return False

        if result["file"] and not _appears(whole):
            raise CheckpointError(
                f"rank {rank}: its {result['file']} is torn or not seen from rank 0;"
                f" all nodes must share {self.root}"
            )

    def _reason(self, error: Exception) -> str:
        text = error.strerror if isinstance(error, OSError) else None
        return f"{text or error} ({self.root})"

    def _check_space(self, plans: Iterable[dcp_files.Plan]) -> None:
        """Do not fill a file system that others use, too, for nothing."""
        need = {
            (name, *first): _bytes(dtype, count)
            for p in plans
            for name, dtype, _, first, count in p
        }
        if shutil.disk_usage(self.root).free < sum(need.values()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _commit(self, work: Path, name: str) -> None:
        target = self.root / name
        if target.exists():
            # Left by a run that went on from an older checkpoint, or torn.
            self._remove(target)
        work.rename(target)
        _sync(self.root)
        pointer = self.root / f".tmp.{LATEST}"
        _write_text(pointer, name + "\n")
        pointer.replace(self.root / LATEST)
        _sync(self.root)

    def _forget(self, step: int) -> None:
        """Remove our own old ones; leave what is newer, foreign or of a newer format alone."""
        ours = []
        for path in self._steps():
            with contextlib.suppress(CheckpointError):
                ours.append(open_checkpoint(path))
        for old in [c for c in ours if c.step <= step][self._keep :]:
            with contextlib.suppress(OSError):
                self._remove(old.path)

    def _remove(self, path: Path) -> None:
        """Renamed first: a kill half-way leaves what `clean` removes, not a torn checkpoint."""
        old = self.root / f".tmp.{path.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        shutil.rmtree(old, ignore_errors=True)

    def _candidates(self) -> list[Path]:
        """Newest first; but a `latest` edited by hand since then comes before them."""
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
        """Everything named like a checkpoint, newest first."""
        if not self.root.is_dir():
            return []
        found = [p for p in self.root.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
        return sorted(found, key=lambda p: int(p.name.removeprefix("step_")), reverse=True)


def parts(tensors: Mapping[str, torch.Tensor]) -> list[TensorShard]:
    """What this rank holds of each tensor.

    Raises:
        CheckpointError: one is cut in a way that checkpoints do not know.
    """
    try:
        return dcp_files.pieces(tensors)
    except ShardError as error:
        raise CheckpointError(str(error)) from None


def _appears(there: Callable[[], bool]) -> bool:
    """Wait until another node's work is seen here."""
    end = time.monotonic() + _APPEARS_S
    while not there():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    each: int = getattr(torch, dtype.removeprefix("torch.")).itemsize
    return each * math.prod(shape)


def _written(path: Path) -> int:
    """When a checkpoint became complete; 0 if it never did."""
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
