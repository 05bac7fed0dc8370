"""One checkpoint: its manifest, the check that it is complete, and its tensors."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slurm_elastic.training.checkpoint import dcp_files
from slurm_elastic.training.checkpoint.checkpoint_coordinator import CheckpointError
from slurm_elastic.training.checkpoint.dcp_files import TensorReader

FORMAT = 1
KIND = "slurm-elastic checkpoint"
MANIFEST = "manifest.json"
_BLOCK = 1 << 20


@dataclass(frozen=True)
class CompleteCheckpoint:
    """A complete checkpoint.

    Attributes:
        path: its directory.
        step: optimisation steps done.
        meta: plain values.
        index: position of each tensor in the files.
        shapes: of the tensors, by name; empty in checkpoints that are older than this field.
    """

    path: Path
    step: int
    meta: dict[str, Any]
    index: dcp_files.Index
    shapes: dict[str, list[int]] = field(default_factory=dict)

    @property
    def kept(self) -> dict[str, Any]:
        """Values of the parts of a job besides its tensors, by name."""
        kept = dict(self.meta.get("kept", {}))
        if "freezing" in self.meta:  # its place before `kept` existed
            kept.setdefault("freezing", self.meta["freezing"])
        return kept

    def open(self, names: Iterable[str] | None = None, *, cold: bool = False) -> TensorReader:
        """Return a reader of the tensors, which reads each one when it is accessed.

        Args:
            names: of the tensors; None: all.
            cold: read from the disk rather than from memory, where the system allows that.
        """
        if cold:
            for path in files_of(self.path):
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return TensorReader(self.path, self.index, self.shapes, names)

    def read(self, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """Return the tensors of these names, or all; whole, on the CPU."""
        with self.open(names) as tensors:
            return dict(tensors)

    def written_by(self, rank: int) -> set[str]:
        """Return the names of the tensors of which that rank wrote a piece or the whole."""
        file = file_of(rank)
        return {
            name
            for name, entry in self.index.items()
            if file in (entry if isinstance(entry[0], str) else [piece[0] for piece in entry])
        }


def open_checkpoint(path: Path) -> CompleteCheckpoint:
    """Read the manifest and compare the files' sizes.

    Raises:
        CheckpointError: incomplete, foreign, or of a newer format.
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
            f"format {manifest.get('format')} is invalid: expected {FORMAT}; read it with the"
            " slurm-elastic that wrote it"
        )
    try:
        checkpoint = CompleteCheckpoint(
            path,
            int(manifest["step"]),
            dict(manifest["meta"]),
            dict(manifest["index"]),
            dict(manifest.get("shapes", {})),
        )
        sizes = {name: int(size) for name, (size, _) in manifest["files"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"its manifest is damaged ({error!r})") from None
    for name, size in sizes.items():
        try:
            actual_size = (path / name).stat().st_size
        except OSError:
            raise CheckpointError(f"not complete ({name} is missing)") from None
        if actual_size != size:
            raise CheckpointError(f"not complete ({name} has {actual_size} bytes of {size})")
    return checkpoint


def verify(checkpoint: CompleteCheckpoint) -> None:
    """Compare every file's checksum with the manifest.

    Raises:
        CheckpointError: a byte differs.
    """
    manifest = json.loads((checkpoint.path / MANIFEST).read_text(encoding="utf-8"))
    for name, (_, expected) in manifest["files"].items():
        try:
            actual = checksum(checkpoint.path / name)
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read ({error.strerror})") from None
        if actual != expected:
            raise CheckpointError(f"damaged ({name} has another checksum)")


def file_of(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"__{rank}_0.distcp"


def files_of(directory: Path) -> list[Path]:
    """Return all files of a checkpoint, the manifest included."""
    return sorted(p for p in directory.iterdir() if p.is_file())


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value
