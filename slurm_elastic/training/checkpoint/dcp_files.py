"""Files of torch's distributed checkpoint, written and read without that package.

The files are those of `torch.distributed.checkpoint`, so its own tools can
read them: one file per writer with its pieces one after the other, each as
`torch.save` writes it, and `.metadata` with the position of each piece. Only
writing the latter needs that package, on one rank. Importing it takes longer
than all the rest of a restore, so the positions are in the manifest as well, and
`TensorReader` needs only these and `torch.load`.
"""

from __future__ import annotations

import importlib
import io
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from slurm_elastic.training.checkpoint import shards

#: Name of a tensor → [file, offset, length]; or, if it consists of several pieces, a list of
#: [file, offset, length, begin of the piece in each dimension].
Index: TypeAlias = dict[str, list[Any]]
#: Pieces of a writer: [name, type, shape of the whole, begin of the piece, its shape].
Plan: TypeAlias = list[list[Any]]


@dataclass(frozen=True)
class TensorShard:
    """Part of a tensor that one rank holds.

    Attributes:
        name: of the whole tensor.
        shape: of the whole tensor.
        first: begin of the piece in each dimension, in elements.
        tensor: the piece, a plain tensor.
    """

    name: str
    shape: tuple[int, ...]
    first: tuple[int, ...]
    tensor: torch.Tensor

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same piece of another tensor of that shape; all of one of another shape."""
        if tensor.shape == self.shape:
            for dim, (start, count) in enumerate(zip(self.first, self.tensor.shape, strict=True)):
                tensor = tensor.narrow(dim, start, count)
        return tensor

    @property
    def bytes(self) -> int:
        """Size of the piece."""
        return int(self.tensor.numel() * self.tensor.element_size())


def pieces(tensors: Mapping[str, torch.Tensor]) -> list[TensorShard]:
    """Return this rank's piece of each tensor of which it holds an element, not copied.

    Raises:
        ShardError: see `shards.local_part`.
    """
    held_pieces = []
    for name, tensor in tensors.items():
        first, part = shards.local_part(tensor)
        if part.numel() or not tensor.numel():
            held_pieces.append(TensorShard(name, tuple(tensor.shape), first, part))
    return held_pieces


def copied(live_pieces: Iterable[TensorShard]) -> list[TensorShard]:
    """Return copies of the pieces on the CPU.

    Raises:
        RuntimeError: torch's, where there is no memory for them.
    """
    copies = []
    on_device = False
    for piece in live_pieces:
        live = piece.tensor
        on_device = on_device or live.is_cuda
        # Page-locked memory is filled several times as fast; torch keeps it for the next time.
        copy = torch.empty(live.shape, dtype=live.dtype, device="cpu", pin_memory=live.is_cuda)
        copies.append(replace(piece, tensor=copy.copy_(live, non_blocking=live.is_cuda)))
    if on_device:
        torch.cuda.synchronize()
    return copies


def plan(held_pieces: Iterable[TensorShard]) -> Plan:
    """Return a description of the pieces as JSON values."""
    return [
        [p.name, str(p.tensor.dtype), list(p.shape), list(p.first), list(p.tensor.shape)]
        for p in held_pieces
    ]


def divide(plans: Sequence[Plan]) -> tuple[list[list[int]], Any]:
    """Divide the pieces among the writers: the lowest that holds a piece writes it.

    Returns:
        For each plan the indices of the pieces to be written; and torch's metadata.

    Raises:
        ValueError: no writer holds some part of a tensor, or parts overlap.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan  # noqa: PLC0415 - slow

    # Lowest: ranks may differ in what is not reduced, such as running statistics.
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    planner.set_up_planner({}, is_coordinator=True)
    try:
        divided, metadata = planner.create_global_plan(
            [
                SavePlan(
                    [_item(entry) for entry in entries],
                    # Paths of a nested dictionary; this one is flat.
                    planner_data={name: (name,) for name, *_ in entries},
                )
                for entries in plans
            ]
        )
    except AssertionError as error:
        raise ValueError(f"the pieces make no whole tensors: {error}") from error
    shares = []
    for entries, own in zip(plans, divided, strict=True):
        keys = {(item.index.fqn, tuple(item.index.offset)) for item in own.items}
        shares.append([i for i, e in enumerate(entries) if (e[0], tuple(e[3])) in keys])
    return shares, metadata


def write(path: Path, assigned_pieces: Iterable[TensorShard]) -> list[list[int]]:
    """Write and sync the pieces into one file.

    Returns:
        (offset, length) of each, in bytes.

    Raises:
        OSError: the system refused, e.g. for lack of space.
    """
    positions = []
    try:
        with path.open("wb") as file:
            for piece in assigned_pieces:
                offset = file.tell()
                tensor = piece.tensor.detach().cpu()
                if tensor.untyped_storage().nbytes() != piece.bytes or not tensor.is_contiguous():
                    # Of a view, torch.save would write the whole storage.
                    tensor = tensor.contiguous().clone()
                torch.save(tensor, file)
                positions.append([offset, file.tell() - offset])
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:
        raise _os_error(error) from error
    return positions


def describe(
    directory: Path, metadata: Any, written: Iterable[tuple[str, list[Any], Sequence[int]]]
) -> Index:
    """Write torch's `.metadata`.

    Args:
        directory: of the checkpoint.
        metadata: of `divide`.
        written: (file, the piece's entry in the plan, its offset and length in the file).

    Returns:
        The position of each tensor.

    Raises:
        OSError: the system refused.
    """
    from torch.distributed.checkpoint import FileSystemWriter  # noqa: PLC0415 - slow
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: PLC0415
    from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: PLC0415
    from torch.distributed.checkpoint.storage import WriteResult  # noqa: PLC0415

    index: Index = {}
    results = []
    for file, (name, _, shape, first, count), (offset, length) in written:
        # Private, but its name is part of the file format: it is what `.metadata` holds.
        info = _StorageInfo(file, offset, length)
        results.append(WriteResult(MetadataIndex(name, first), length, info))
        if list(count) == list(shape):
            index[name] = [file, offset, length]
        else:
            index.setdefault(name, []).append([file, offset, length, list(first)])
    writer = FileSystemWriter(directory, single_file_per_rank=True, sync_files=True)
    writer.set_up_storage_writer(True)
    try:
        writer.finish(metadata, [results])
    except RuntimeError as error:
        raise _os_error(error) from error
    return index


def prepare() -> None:
    """Import what `divide` needs, in the background, so that the first save does not wait."""
    name = "torch.distributed.checkpoint"
    threading.Thread(target=importlib.import_module, args=(name,), daemon=True).start()


class TensorReader(Mapping[str, torch.Tensor]):
    """Tensors of an index by name, each read when it is accessed; whole, on the CPU.

    So a rank that keeps only a part of each never has all of them in memory. Close it, or use it in
    a `with` block.

    Args:
        directory: of the checkpoint.
        index: positions of the tensors.
        shapes: of those that consist of several pieces.
        names: of the tensors to include; None: all.
    """

    def __init__(
        self,
        directory: Path,
        index: Index,
        shapes: Mapping[str, Sequence[int]],
        names: Iterable[str] | None = None,
    ) -> None:
        self._directory = directory
        self._index = index if names is None else {name: index[name] for name in names}
        self._shapes = shapes
        self._files: dict[str, io.BufferedReader] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self._index[name]
        if not isinstance(entry[0], list):
            return self._load(*entry)
        shape = tuple(self._shapes[name])
        tensor: torch.Tensor | None = None
        for file, offset, length, first in entry:
            part = self._load(file, offset, length)
            if tensor is None:
                tensor = torch.empty(shape, dtype=part.dtype)
            TensorShard(name, shape, tuple(first), part).of(tensor).copy_(part)
        return tensor

    def _load(self, file: str, offset: int, length: int) -> torch.Tensor:
        if file not in self._files:
            self._files[file] = (self._directory / file).open("rb")
        self._files[file].seek(offset)
        data = io.BytesIO(self._files[file].read(length))
        # weights_only: a checkpoint is data and may never run code.
        return torch.load(data, weights_only=True, map_location="cpu")

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _item(entry: Sequence[Any]) -> Any:
    from torch.distributed.checkpoint.metadata import (  # noqa: PLC0415
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (  # noqa: PLC0415
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    name, dtype, shape, first, count = entry
    is_full = list(count) == list(shape)
    return WriteItem(
        index=MetadataIndex(name, first),
        type=WriteItemType.TENSOR if is_full else WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(first), torch.Size(count)),
            properties=TensorProperties(dtype=getattr(torch, dtype.removeprefix("torch."))),
            size=torch.Size(shape),
        ),
    )


def _os_error(error: BaseException) -> OSError:
    """Return the operating system's error inside torch's exception."""
    for candidate in (error.__cause__, error.__context__):
        if isinstance(candidate, OSError):
            return candidate
    return OSError(f"torch cannot write the file: {str(error).splitlines()[0]}")
