"""Removal of files from the page cache; those that cannot be removed are skipped."""

import os
from pathlib import Path

import pytest

from slurm_elastic.job import page_cache


def cached(path: Path) -> bool:
    """Return whether the first page of a file is in memory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
        return bool(os.preadv(handle, [bytearray(1)], 0, os.RWF_NOWAIT))
    except BlockingIOError:
        return False
    except OSError as error:
        pytest.skip(f"this file system does not tell what is cached: {error}")
    finally:
        os.close(handle)


def test_files_are_dropped_and_the_rest_is_passed_over(tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "data").write_bytes(b"x" * 8192)
    (tmp_path / "one").write_bytes(b"y" * 100)
    os.mkfifo(inner / "pipe")  # opening it would wait for ever
    (inner / "dangling").symlink_to("nowhere")
    paths = [str(tmp_path / "a"), str(tmp_path / "one"), str(tmp_path / "absent")]
    assert page_cache.drop(paths) == (2, 8292)


def test_what_is_dropped_is_read_from_storage(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"x" * 8192)
    path.read_bytes()
    assert cached(path)
    page_cache.drop([path])
    if cached(path):
        pytest.skip("this file system lives in memory")
    assert path.read_bytes() == b"x" * 8192
    assert cached(path)
