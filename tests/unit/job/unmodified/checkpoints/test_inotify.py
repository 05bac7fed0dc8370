"""Detection of reads; writes and stats do not count."""

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_elastic.job.unmodified.checkpoints import inotify
from slurm_elastic.job.unmodified.checkpoints.inotify import DirectoryWatch, ReadWatch


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.pt"
    path.write_bytes(b"x" * 10_000)
    return path


@pytest.fixture
def watch(file: Path) -> Iterator[ReadWatch]:
    watch = ReadWatch([str(file)])
    assert watch.is_active
    yield watch
    watch.close()


def by_mapping(path: Path) -> None:
    with path.open("rb") as file:
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)[:10]


@pytest.mark.parametrize("read", [Path.read_bytes, by_mapping])
def test_reading_is_seen(file: Path, watch: ReadWatch, read: Callable[[Path], object]) -> None:
    assert watch.paths_read() == set()
    read(file)
    assert watch.paths_read(1.0) == {str(file)}


def test_looking_is_not_reading(file: Path, watch: ReadWatch) -> None:
    file.stat()
    os.listdir(file.parent)  # noqa: PTH208 - as scripts do
    file.exists()
    assert watch.paths_read() == set()


def test_overwriting_is_not_reading(file: Path, watch: ReadWatch) -> None:
    file.write_bytes(b"y")
    assert watch.paths_read() == set()
    with file.open("ab") as opened:
        opened.write(b"z")
    assert watch.paths_read() == set()


def test_replacing_is_not_reading(file: Path, watch: ReadWatch) -> None:
    other = file.with_suffix(".new")
    other.write_bytes(b"y")
    other.replace(file)
    assert watch.paths_read() == set()


def test_any_file_of_a_directory_counts(tmp_path: Path) -> None:
    deep = tmp_path / "step-1" / "shards"
    deep.mkdir(parents=True)
    (deep / "0").write_text("1")
    watch = ReadWatch([str(tmp_path / "step-1")])
    (deep / "0").read_text()
    assert watch.paths_read(1.0) == {str(tmp_path / "step-1")}
    watch.close()


def test_reading_a_description_is_not_loading(tmp_path: Path) -> None:
    step = tmp_path / "step-1"
    step.mkdir()
    description, state = step / "_CHECKPOINT_METADATA", step / "model.safetensors"
    description.write_text('{"item_handlers": null}')
    state.write_bytes(b"{\0\0\0\0\0\0\0" + b"{" * 10)
    watch = ReadWatch([str(tmp_path), str(step)])
    description.read_text()
    assert watch.paths_read() == set()
    state.read_bytes()
    assert watch.paths_read(1.0) == {str(step)}
    watch.close()


def test_a_checkpoint_of_descriptions_only(tmp_path: Path) -> None:
    step = tmp_path / "step-1"
    step.mkdir()
    (step / "model.json").write_text("[1, 2]")
    watch = ReadWatch([str(step)])
    (step / "model.json").read_text()
    assert watch.paths_read(1.0) == {str(step)}
    watch.close()


def test_nothing_to_watch() -> None:
    watch = ReadWatch(["/nowhere"])
    assert not watch.is_active
    watch.close()


def test_events_in_a_directory_end_the_wait(tmp_path: Path) -> None:
    watch = DirectoryWatch()
    watch.watch([str(tmp_path)])
    began = time.monotonic()
    for wake in ((tmp_path / "a").touch, watch.wake):
        timer = threading.Timer(0.05, wake)
        timer.start()
        watch.wait(20)
        timer.join()
        watch.wait(0)
    assert time.monotonic() - began < 10
    assert watch.renamed() == set()
    (tmp_path / "a").rename(tmp_path / "b")
    watch.wait(0)
    assert watch.renamed() == {str(tmp_path / "b")}
    assert watch.renamed() == set()
    watch.close()


@pytest.mark.parametrize(
    ("call", "error", "remedy"),
    [
        ("inotify_init1", errno.EMFILE, "raise fs.inotify.max_user_instances"),
        ("inotify_add_watch", errno.ENOSPC, "raise fs.inotify.max_user_watches"),
        ("inotify_add_watch", errno.EACCES, "Permission denied"),
    ],
)
def test_what_the_kernel_refuses_is_named(
    monkeypatch: pytest.MonkeyPatch, file: Path, call: str, error: int, remedy: str
) -> None:
    """The two limits of inotify(7): of instances and of watches."""

    def refuse(*_: object) -> int:
        ctypes.set_errno(error)
        return -1

    library = ctypes.CDLL(None, use_errno=True)
    monkeypatch.setattr(library, call, refuse)
    monkeypatch.setattr(inotify.ctypes, "CDLL", lambda *_, **__: library)
    watch = ReadWatch([str(file)])
    watch.close()
    assert not watch.is_active
    assert remedy in watch.remedy
