"""Tensors on disk: written by torch's distributed checkpoint, read without it.

The files are those of `torch.distributed.checkpoint`, so its own tools can
read them. But importing that package takes longer than all the rest of a
restore. So `write` also tells where each tensor's bytes are, and `read` needs
no more than that and `torch.load`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

#: Name of a tensor → [file, offset, length].
Index: TypeAlias = dict[str, list[Any]]


def write(directory: Path, tensors: Mapping[str, torch.Tensor]) -> Index:
    """Write and sync the tensors of this process, without asking any other rank.

    Raises:
        OSError: the system refused, e.g. for lack of space.
    """
    from torch.distributed import checkpoint as dcp  # noqa: PLC0415 - slow, not for the start

    # What dcp.save does, less its collectives: before torch 2.9 it cannot be told to leave them.
    planner = dcp.DefaultSavePlanner()
    writer = dcp.FileSystemWriter(directory, single_file_per_rank=True, sync_files=True)
    try:
        with warnings.catch_warnings():
            # torch 2.6's own writer calls what torch 2.6 deprecates.
            warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
            planner.set_up_planner(dict(tensors), is_coordinator=True)
            writer.set_up_storage_writer(True)
            local = writer.prepare_local_plan(planner.create_local_plan())
            plans, metadata = planner.create_global_plan([local])
            (plan,) = writer.prepare_global_plan(plans)
            writing = writer.write_data(planner.finish_plan(plan), planner)
            writing.wait()
            writer.finish(metadata, [writing.value()])
    except RuntimeError as error:
        raise _cause(error) from error
    return {
        where.fqn: [info.relative_path, info.offset, info.length]
        for where, info in metadata.storage_data.items()
    }


def prepare() -> None:
    """Import what `write` needs, in the background, so that the first save does not wait for it."""
    name = "torch.distributed.checkpoint"
    threading.Thread(target=importlib.import_module, args=(name,), daemon=True).start()


def read(directory: Path, index: Index) -> dict[str, torch.Tensor]:
    """All tensors of the index, on the CPU."""
    tensors = {}
    with contextlib.ExitStack() as stack:
        files: dict[str, io.BufferedReader] = {}
        for name, (file, offset, length) in index.items():
            if file not in files:
                files[file] = stack.enter_context((directory / file).open("rb"))
            files[file].seek(offset)
            data = io.BytesIO(files[file].read(length))
            # weights_only: a checkpoint is data and may never run code.
            tensors[name] = torch.load(data, weights_only=True, map_location="cpu")
    return tensors


def _cause(error: BaseException) -> OSError:
    """The operating system's complaint inside torch's exception."""
    for candidate in (error.__cause__, error.__context__):
        if isinstance(candidate, OSError):
            return candidate
    return OSError(f"torch cannot write it: {str(error).splitlines()[0]}")
