"""Recognition of files that were cut off: each format is cut at every byte."""

import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest

from slurm_elastic.job.unmodified.checkpoints.whole_files import is_whole


def zipped(entries: int = 3, comment: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number in range(entries):
            archive.writestr(f"data/{number}", os.urandom(50))
        archive.comment = comment
    return buffer.getvalue()


def safetensors() -> bytes:
    header = json.dumps({
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "U8", "shape": [40], "data_offsets": [0, 40]},
        "b": {"dtype": "U8", "shape": [10], "data_offsets": [40, 50]},
    }).encode()  # fmt: skip
    return struct.pack("<Q", len(header)) + header + bytes(50)


def npy() -> bytes:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (3, 4), }".ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(96)


def hdf5(version: int) -> bytes:
    if version < 2:
        head = b"\x89HDF\r\n\x1a\n" + bytes([version, 0, 0, 0, 0, 8, 8, 0]) + bytes(8)
        head += bytes(4) if version else b""
        head += struct.pack("<QQQQ", 0, 2**64 - 1, 400, 2**64 - 1)
    else:
        head = b"\x89HDF\r\n\x1a\n" + bytes([version, 8, 8, 0])
        head += struct.pack("<QQQQ", 0, 2**64 - 1, 400, 0)
    return head.ljust(400, b"x")


@pytest.mark.parametrize(
    ("name", "data", "whole"),
    [
        ("a.pt", zipped(), True),
        ("a.npz", zipped(comment=b"PK\x05\x06 a comment"), True),
        ("a.json", json.dumps({"step": 3, "deep": [1, {"b": 2}]}, indent=2).encode(), True),
        ("a.safetensors", safetensors(), None),
        ("a.npy", npy(), None),
        ("a.h5", hdf5(0), None),
        ("b.h5", hdf5(1), None),
        ("c.h5", hdf5(3), None),
    ],
)
def test_a_cut_is_seen_at_every_byte(
    tmp_path: Path, name: str, data: bytes, whole: bool | None
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    assert is_whole(str(path)) is whole
    known_from = {".npy": 118, ".h5": 64}.get(path.suffix, 4)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert is_whole(str(path)) is not True, length
        if length >= known_from:
            assert is_whole(str(path)) is False, length


def test_a_zip64_file(tmp_path: Path) -> None:
    """The layout that torch.save writes for large files."""
    plain = zipped(1)
    at = plain.rindex(b"PK\x05\x06")
    size, offset = struct.unpack_from("<II", plain, at + 12)
    record = b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 1, 1, size, offset)
    locator = b"PK\x06\x07" + struct.pack("<IQI", 0, at, 1)
    end = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 0xFFFF, 0xFFFF, 2**32 - 1, 2**32 - 1, 0)
    data = plain[:at] + record + locator + end
    path = tmp_path / "a.pt"
    path.write_bytes(data)
    assert is_whole(str(path)) is True
    for length in range(4, len(data)):
        path.write_bytes(data[:length])
        assert is_whole(str(path)) is False, length


def test_an_old_tail_does_not_complete_a_new_head(tmp_path: Path) -> None:
    """A file that is overwritten without being truncated keeps the end of the old one."""
    old, new = zipped(5), zipped(2)
    path = tmp_path / "a.pt"
    path.write_bytes(new[: len(new) // 2] + old)
    assert is_whole(str(path)) is False


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"a": 1}),
        b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.",  # torch.save before 1.6
        b"PK",
        b"\x89HDF\r\n\x1a\n\xff" + b"\xff" * 60,
        b"\x93NUMPY\x01\x00" + b"\xff" * 100,
    ],
)
def test_of_others_nothing_is_claimed(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(data)
    assert is_whole(str(path)) is None


def test_hostile_files(tmp_path: Path) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    assert is_whole(str(deep)) is not True
    header = tmp_path / "a.safetensors"
    header.write_bytes(struct.pack("<Q", 2**63) + b"x")
    assert is_whole(str(header)) is None
    header.write_bytes(struct.pack("<Q", 2) + b"[]")
    assert is_whole(str(header)) is not True
    fifo = tmp_path / "fifo.pt"
    os.mkfifo(fifo)
    assert is_whole(str(fifo)) is None
    assert is_whole(str(tmp_path)) is None
    assert is_whole(str(tmp_path / "missing")) is None


def test_an_empty_file_of_a_known_suffix_is_cut(tmp_path: Path) -> None:
    for name, whole in (("a.pt", False), ("DONE", None), ("user_content.pt", None)):
        (tmp_path / name).touch()
        assert is_whole(str(tmp_path / name)) is whole


def test_torch_save(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "model.pt"
    torch.save({"w": torch.randn(100, 30), "step": 3}, path)
    assert is_whole(str(path)) is True
    data = path.read_bytes()
    for length in range(4, len(data), 97):
        path.write_bytes(data[:length])
        assert is_whole(str(path)) is False, length


def test_a_part_of_a_distributed_checkpoint_may_be_several_zip_files(tmp_path):
    """torch writes each tensor as a zip file of its own, one after the other."""
    part = tmp_path / "__0_0.distcp"
    part.write_bytes(zipped() + zipped())
    assert is_whole(str(part)) is None, "its .metadata shows that it is complete"
    part.write_bytes(b"")
    assert is_whole(str(part)) is False
