"""One checkpoint: its manifest, whether it is whole, and its tensors."""

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
        index: where each tensor lies.
        shapes: of the tensors, by name; of none in checkpoints that are older than this field.
    """

    path: Path
    step: int
    meta: dict[str, Any]
    index: dcp_files.Index
    shapes: dict[str, list[int]] = field(default_factory=dict)

    @property
    def kept(self) -> dict[str, Any]:
        """Values that others than the tensors' owners gave, by name."""
        kept = dict(self.meta.get("kept", {}))
        if "freezing" in self.meta:  # where it was when there was nothing else to keep
            kept.setdefault("freezing", self.meta["freezing"])
        return kept

    def open(self, names: Iterable[str] | None = None, *, cold: bool = False) -> TensorReader:
        """The tensors of these names, or all, read one by one as they are asked for.

        Args:
            names: those that are wanted.
            cold: read from the disk rather than from memory, where the system allows that.
        """
        if cold:
            for path in files_of(self.path):
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return TensorReader(self.path, self.index, self.shapes, names)

    def read(self, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """The tensors of these names, or all; whole, on the CPU."""
        with self.open(names) as tensors:
            return dict(tensors)

    def written_by(self, rank: int) -> set[str]:
        """Names of the tensors of which that rank wrote a piece, or all."""
        file = file_of(rank)
        return {
            name
            for name, entry in self.index.items()
            if file in (entry if isinstance(entry[0], str) else [piece[0] for piece in entry])
        }


def open_checkpoint(path: Path) -> CompleteCheckpoint:
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
            found = (path / name).stat().st_size
        except OSError:
            raise CheckpointError(f"not complete ({name} is missing)") from None
        if found != size:
            raise CheckpointError(f"torn ({name} has {found} bytes of {size})")
    return checkpoint


def verify(checkpoint: CompleteCheckpoint) -> None:
    """Compare every file's checksum with the manifest.

    Raises:
        CheckpointError: a byte differs.
    """
    manifest = json.loads((checkpoint.path / MANIFEST).read_text(encoding="utf-8"))
    for name, (_, expected) in manifest["files"].items():
        try:
            found = checksum(checkpoint.path / name)
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read ({error.strerror})") from None
        if found != expected:
            raise CheckpointError(f"damaged ({name} has another checksum)")


def file_of(rank: int) -> str:
    """The name of what a rank writes."""
    return f"__{rank}_0.distcp"


def files_of(directory: Path) -> list[Path]:
    """Everything in a checkpoint, the manifest included."""
    return sorted(p for p in directory.iterdir() if p.is_file())


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value
