"""A directory of checkpoints of which the newest complete one can always be told.

    checkpoint_dir/
        latest                   text: the name of the newest
        step_00000120/           written as .tmp.step_00000120, synced, then renamed
            __0_0.distcp .metadata   torch.distributed.checkpoint's own files
            manifest.json        last: sizes, checksums, where each tensor lies, and `meta`

A directory without a manifest that fits its files is no checkpoint, so a kill
at any moment leaves the one before.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slurm_elastic.training import tensorfile

FORMAT = 1
KIND = "slurm-elastic checkpoint"
MANIFEST = "manifest.json"
LATEST = "latest"
_NAME = re.compile(r"step_(\d{8,})")
_BLOCK = 1 << 20
#: A checkpoint just written on another node appears this late at worst (NFS caches directories).
_APPEARS_S = 60.0


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is not of this training run."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    meta: dict[str, Any]
    index: tensorfile.Index

    def read(self) -> dict[str, torch.Tensor]:
        """All tensors, on the CPU."""
        return tensorfile.read(self.path, self.index)

    def read_cold(self) -> dict[str, torch.Tensor]:
        """As `read`, but from the disk rather than from memory, where the system allows that."""
        for path in _files(self.path):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return self.read()


class Checkpoints:
    """The checkpoints of one training run.

    Args:
        root: the directory, on a file system that all nodes share.
        keep: how many complete ones stay.
        say: takes one line for the job's log.
    """

    def __init__(self, root: Path, *, keep: int, say: Callable[[str], None]) -> None:
        self.root = root
        self._keep = max(1, keep)
        self._say = say

    def newest(self) -> Checkpoint | None:
        """The newest that is whole; says of each other why it was passed over."""
        for path in self._candidates():
            try:
                found = open_checkpoint(path)
                verify(found)
            except CheckpointError as error:
                self._say(f"skipped {path.name}: {error}")
            else:
                return found
        return None

    def named(self, name: str) -> Checkpoint:
        """The one of this name, which another node has verified."""
        end = time.monotonic() + _APPEARS_S
        while True:
            try:
                return open_checkpoint(self.root / name)
            except CheckpointError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)

    def clean(self) -> None:
        """Remove what killed saves left behind."""
        for path in self.root.glob(".tmp.step_*"):
            shutil.rmtree(path, ignore_errors=True)

    def save(
        self, step: int, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]
    ) -> Checkpoint:
        """Write a checkpoint, then make it the latest and forget the oldest.

        Raises:
            CheckpointError: not written, e.g. for lack of space; the others are untouched.
        """
        name = f"step_{step:08d}"
        work = self.root / f".tmp.{name}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(work, ignore_errors=True)
            self._check_space(tensors)
            work.mkdir()
            index = tensorfile.write(work, tensors)
            manifest = {
                "kind": KIND,
                "format": FORMAT,
                "step": step,
                "meta": dict(meta),
                "files": {p.name: [p.stat().st_size, _checksum(p)] for p in _files(work)},
                "index": index,
            }
            _write_text(work / MANIFEST, json.dumps(manifest))
            _sync(work)
            self._commit(work, name)
        except OSError as error:
            shutil.rmtree(work, ignore_errors=True)
            reason = error.strerror or str(error)
            raise CheckpointError(f"{reason} ({self.root})") from error
        self._forget(step)
        return Checkpoint(self.root / name, step, dict(meta), index)

    def _check_space(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Do not fill a file system that others use, too, for nothing."""
        need = sum(t.numel() * t.element_size() for t in tensors.values())
        if shutil.disk_usage(self.root).free < need:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _commit(self, work: Path, name: str) -> None:
        target = self.root / name
        if target.exists():
            # Left by a run that went on from an older checkpoint, or torn.
            old = self.root / f".tmp.{name}.old"
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
            shutil.rmtree(old, ignore_errors=True)
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
            shutil.rmtree(old.path, ignore_errors=True)

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


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the manifest and compare the files' sizes.

    Raises:
        CheckpointError: torn, foreign, or of a newer format.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError("not complete (no manifest)") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"its manifest cannot be read ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise CheckpointError("not written by slurm-elastic")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"of format {manifest.get('format')}, this slurm-elastic reads {FORMAT}; it stays"
        )
    try:
        checkpoint = Checkpoint(
            path, int(manifest["step"]), dict(manifest["meta"]), dict(manifest["index"])
        )
        sizes = {name: int(size) for name, (size, _) in manifest["files"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"its manifest is damaged ({error!r})") from None
    for name, size in sizes.items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            raise CheckpointError(f"not complete ({name} is missing)") from None
        if found != size:
            raise CheckpointError(f"torn ({name} has {found} bytes of {size})")
    return checkpoint


def verify(checkpoint: Checkpoint) -> None:
    """Compare every file's checksum with the manifest.

    Raises:
        CheckpointError: a byte differs.
    """
    manifest = json.loads((checkpoint.path / MANIFEST).read_text(encoding="utf-8"))
    for name, (_, checksum) in manifest["files"].items():
        try:
            found = _checksum(checkpoint.path / name)
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read ({error.strerror})") from None
        if found != checksum:
            raise CheckpointError(f"damaged ({name} has another checksum)")


def _files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.iterdir() if p.is_file())


def _written(path: Path) -> int:
    """When a checkpoint became complete; 0 if it never did."""
    try:
        return (path / MANIFEST).stat().st_mtime_ns
    except OSError:
        return 0


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


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
