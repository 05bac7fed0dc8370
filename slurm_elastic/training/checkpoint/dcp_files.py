"""Tensors on disk, as torch's distributed checkpoint has them, written and read without it.

The files are those of `torch.distributed.checkpoint`, so its own tools can
read them: one file per writer with its pieces one after the other, each as
`torch.save` writes it, and `.metadata` that says what lies where. Only making
the latter needs that package, on one rank. Importing it takes longer than all
the rest of a restore, so what lies where is also told in the manifest, and
`TensorReader` needs no more than that and `torch.load`.
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

#: Name of a tensor → [file, offset, length]; or, if it lies in several pieces, a list of
#: [file, offset, length, where the piece begins in each dimension].
Index: TypeAlias = dict[str, list[Any]]
#: What a writer holds: [name, type, shape of the whole, where the piece begins, its shape].
Plan: TypeAlias = list[list[Any]]


@dataclass(frozen=True)
class TensorShard:
    """What one rank holds of a tensor.

    Attributes:
        name: of the whole tensor.
        shape: of the whole tensor.
        first: where the piece begins in each dimension, in elements.
        tensor: the piece, a plain tensor.
    """

    name: str
    shape: tuple[int, ...]
    first: tuple[int, ...]
    tensor: torch.Tensor

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The same piece of another tensor of that shape; all of one of another shape."""
        if whole.shape == self.shape:
            for dim, (start, count) in enumerate(zip(self.first, self.tensor.shape, strict=True)):
                whole = whole.narrow(dim, start, count)
        return whole

    @property
    def bytes(self) -> int:
        """Its size."""
        return int(self.tensor.numel() * self.tensor.element_size())


def pieces(tensors: Mapping[str, torch.Tensor]) -> list[TensorShard]:
    """This rank's piece of each tensor, not copied; nothing for one of which it has no element.

    Raises:
        ShardError: see `shards.held`.
    """
    found = []
    for name, tensor in tensors.items():
        first, part = shards.held(tensor)
        if part.numel() or not tensor.numel():
            found.append(TensorShard(name, tuple(tensor.shape), first, part))
    return found


def copied(found: Iterable[TensorShard]) -> list[TensorShard]:
    """The pieces as they are now, on the CPU, whatever happens to the live ones.

    Raises:
        RuntimeError: torch's, where there is no memory for them.
    """
    copies = []
    on_device = False
    for piece in found:
        live = piece.tensor
        on_device = on_device or live.is_cuda
        # Page-locked memory is filled several times as fast; torch keeps it for the next time.
        copy = torch.empty(live.shape, dtype=live.dtype, device="cpu", pin_memory=live.is_cuda)
        copies.append(replace(piece, tensor=copy.copy_(live, non_blocking=live.is_cuda)))
    if on_device:
        torch.cuda.synchronize()
    return copies


def plan(found: Iterable[TensorShard]) -> Plan:
    """What the pieces are, as JSON values."""
    return [
        [p.name, str(p.tensor.dtype), list(p.shape), list(p.first), list(p.tensor.shape)]
        for p in found
    ]


def divide(plans: Sequence[Plan]) -> tuple[list[list[int]], Any]:
    """Who writes what: a piece that several hold is written once, by the lowest of them.

    Returns:
        For each plan the positions of the pieces to be written; and torch's metadata.

    Raises:
        ValueError: some part of a tensor is held by nobody, or parts overlap.
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
                    # How a nested dictionary was flattened; ours never is.
                    planner_data={name: (name,) for name, *_ in entries},
                )
                for entries in plans
            ]
        )
    except AssertionError as error:
        raise ValueError(f"torch cannot plan it: {error}") from error
    shares = []
    for entries, own in zip(plans, divided, strict=True):
        kept = {(item.index.fqn, tuple(item.index.offset)) for item in own.items}
        shares.append([i for i, e in enumerate(entries) if (e[0], tuple(e[3])) in kept])
    return shares, metadata


def write(path: Path, found: Iterable[TensorShard]) -> list[list[int]]:
    """Write and sync the pieces into one file.

    Returns:
        (offset, length) of each, in bytes.

    Raises:
        OSError: the system refused, e.g. for lack of space.
    """
    where = []
    try:
        with path.open("wb") as file:
            for piece in found:
                begun = file.tell()
                tensor = piece.tensor.detach().cpu()
                if tensor.untyped_storage().nbytes() != piece.bytes or not tensor.is_contiguous():
                    # Of a view, torch.save would write all that lies behind it.
                    tensor = tensor.contiguous().clone()
                torch.save(tensor, file)
                where.append([begun, file.tell() - begun])
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:
        raise _cause(error) from error
    return where


def describe(
    directory: Path, metadata: Any, written: Iterable[tuple[str, list[Any], Sequence[int]]]
) -> Index:
    """Write torch's `.metadata`.

    Args:
        directory: of the checkpoint.
        metadata: of `divide`.
        written: (file, the piece's entry in the plan, its offset and length in the file).

    Returns:
        Where each tensor lies.

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
        raise _cause(error) from error
    return index


def prepare() -> None:
    """Import what `divide` needs, in the background, so that the first save does not wait."""
    name = "torch.distributed.checkpoint"
    threading.Thread(target=importlib.import_module, args=(name,), daemon=True).start()


class TensorReader(Mapping[str, torch.Tensor]):
    """Tensors of an index by name, each read when it is asked for; whole, on the CPU.

    So a rank that keeps only a part of each never has all of them in memory. Close it, or use it in
    a `with` block.

    Args:
        directory: of the checkpoint.
        index: where they lie.
        shapes: of those that lie in pieces, which are put together.
        names: those that it shows; None: all.
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
        whole: torch.Tensor | None = None
        for file, offset, length, first in entry:
            part = self._load(file, offset, length)
            if whole is None:
                whole = torch.empty(shape, dtype=part.dtype)
            TensorShard(name, shape, tuple(first), part).of(whole).copy_(part)
        return whole

    def _load(self, file: str, offset: int, length: int) -> torch.Tensor:
        if file not in self._files:
            self._files[file] = (self._directory / file).open("rb")
        self._files[file].seek(offset)
        data = io.BytesIO(self._files[file].read(length))
        # weights_only: a checkpoint is data and may never run code.
        return torch.load(data, weights_only=True, map_location="cpu")

    def close(self) -> None:
        """No more is read."""
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
    whole = list(count) == list(shape)
    return WriteItem(
        index=MetadataIndex(name, first),
        type=WriteItemType.TENSOR if whole else WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(first), torch.Size(count)),
            properties=TensorProperties(dtype=getattr(torch, dtype.removeprefix("torch."))),
            size=torch.Size(shape),
        ),
    )


def _cause(error: BaseException) -> OSError:
    """The operating system's complaint inside torch's exception."""
    for candidate in (error.__cause__, error.__context__):
        if isinstance(candidate, OSError):
            return candidate
    return OSError(f"torch cannot write it: {str(error).splitlines()[0]}")
