"""Recognition of files that were cut off while they were written, from their own structure.

Shown to be whole: zip (torch.save, `.npz`), whose index is written last, and JSON. Shown to be cut
off: these, safetensors, `.npy` and HDF5, whose headers have their length. Only head and tail of a
file are read, and nothing is ever unpickled: the files are a user's, and may contain anything.
"""

from __future__ import annotations

import json
import os
import re
import struct

from slurm_elastic.job.environment.regular_file import regular_file

_HEAD = 128
#: The end record of a zip file with the longest possible comment.
_ZIP_TAIL = 22 + 65535
#: Larger JSON and safetensors headers are not parsed.
_MAX_JSON = 8 * 1024 * 1024
#: `torch.save` of these names never makes an empty file.
_NEVER_EMPTY = (".pt", ".pth", ".bin", ".ckpt", ".npz", ".npy", ".safetensors", ".distcp", ".json")
#: Parts of torch's distributed checkpoint: one zip file after the other, and perhaps other bytes.
_SHARD = ".distcp"
_EMPTY_ON_PURPOSE = ("user_content.pt",)  # Trainer.save_model under SageMaker
_NPY_SHAPE = re.compile(rb"'descr': '[<>|=]?[a-zA-Z](\d+)'.*'shape': \(([\d, ]*)\)")


def is_whole(path: str) -> bool | None:
    """Return whether a file is whole: True if that is shown, False if it is cut off, else None.

    A file that is not regular, cannot be read, or is of an unknown format gives None.
    """
    name = os.path.basename(path)  # noqa: PTH119 - slow
    try:
        with regular_file(path) as descriptor:
            return _judge(descriptor, name, os.fstat(descriptor).st_size)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    except struct.error:
        return None


def _judge(descriptor: int, name: str, size: int) -> bool | None:
    if size == 0:
        cut = name.endswith(_NEVER_EMPTY) and name not in _EMPTY_ON_PURPOSE
        return False if cut else None
    if name.endswith(_SHARD):
        return None
    head = os.pread(descriptor, _HEAD, 0)
    if head.startswith(b"PK\x03\x04"):
        return _zip(descriptor, size)
    if name.endswith(".safetensors"):
        return _safetensors(descriptor, head, size)
    if name.endswith(".json"):
        return _json(descriptor, size)
    if head.startswith(b"\x93NUMPY"):
        return False if size < _npy_size(head) else None
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return False if size < _hdf5_size(head) else None
    return None


def _zip(descriptor: int, size: int) -> bool:
    """Return whether a zip file ends with an end record that fits its length."""
    length = min(size, _ZIP_TAIL)
    tail = os.pread(descriptor, length, size - length)
    at = tail.rfind(b"PK\x05\x06")
    while at >= 0:
        if len(tail) - at >= 22:
            entries, cd_size, cd_offset, comment = struct.unpack_from("<HIIH", tail, at + 10)
            position = size - length + at
            if at + 22 + comment == len(tail) and _directory_fits(
                descriptor, position, entries, cd_size, cd_offset
            ):
                return True
        at = tail.rfind(b"PK\x05\x06", 0, at)
    return False


def _directory_fits(
    descriptor: int, position: int, entries: int, cd_size: int, cd_offset: int
) -> bool:
    """Return whether the central directory lies where the end record at `position` says."""
    end = position
    if entries == 0xFFFF or 0xFFFFFFFF in (cd_size, cd_offset):  # zip64
        locator = os.pread(descriptor, 20, max(0, position - 20))
        if not locator.startswith(b"PK\x06\x07"):
            return False
        (end,) = struct.unpack_from("<Q", locator, 8)
        record = os.pread(descriptor, 56, end) if end < position else b""
        if len(record) < 56 or not record.startswith(b"PK\x06\x06"):
            return False
        entries, cd_size, cd_offset = struct.unpack_from("<QQQ", record, 32)
    if cd_offset + cd_size > end:
        return False
    return not entries or os.pread(descriptor, 4, cd_offset) == b"PK\x01\x02"


def _safetensors(descriptor: int, head: bytes, size: int) -> bool | None:
    """Compare the length with the one in the header (huggingface/safetensors, "Format")."""
    if len(head) < 8:
        return False
    (length,) = struct.unpack_from("<Q", head)
    if size < 8 + length:
        # No header is longer than 100 MB by its definition: something else then.
        return False if length <= 100_000_000 else None
    if length > _MAX_JSON:
        return None
    header = json.loads(os.pread(descriptor, length, 8))
    ends = [
        int(entry["data_offsets"][1])
        for name, entry in header.items()
        if name != "__metadata__" and isinstance(entry, dict) and "data_offsets" in entry
    ]
    # Whole is not shown by the length: some versions of the library set it before they write.
    return False if size < 8 + length + max(ends, default=0) else None


def _json(descriptor: int, size: int) -> bool | None:
    if size > _MAX_JSON:
        # `TrainerState.save_to_json` indents: only its last line begins with a brace.
        tail = os.pread(descriptor, 3, size - 3)
        return True if tail.endswith((b"\n}\n", b"\n}")) else None
    try:
        value = json.loads(os.pread(descriptor, size, 0))
    except ValueError:
        return False
    return True if isinstance(value, (dict, list)) else None


def _npy_size(head: bytes) -> int:
    """Return the least size of a `.npy` file, 0 if its head does not tell."""
    found = _NPY_SHAPE.search(head)
    if found is None:
        return 0
    size = int(found[1])
    for number in found[2].replace(b" ", b"").split(b","):
        if number:
            size *= int(number)
    # Versions 2 and 3 have four bytes for the length of the header; they are longer than this.
    return size + 10 + int.from_bytes(head[8:10], "little")


def _hdf5_size(head: bytes) -> int:
    """Return the length of an HDF5 file by its superblock (its specification, II.A)."""
    version = head[8]
    width, first = (head[13], 24) if version < 2 else (head[9], 12)
    first += 4 if version == 1 else 0
    if version > 3 or width not in (2, 4, 8):
        return 0
    end = int.from_bytes(head[first + 2 * width : first + 3 * width], "little")
    return 0 if end == 2 ** (8 * width) - 1 else end
