"""Detection of complete checkpoints."""

import os
from pathlib import Path

import pytest

from slurm_elastic.job.unmodified.checkpoint_scanner import SETTLE_S, CheckpointScanner


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def scanner(tmp_path: Path, clock: Clock) -> CheckpointScanner:
    return CheckpointScanner(f"{tmp_path}/*", clock=clock)


def names(scanner: CheckpointScanner) -> list[str]:
    return [Path(checkpoint.path).name for checkpoint in scanner.scan()]


def later(clock: Clock, seconds: float = SETTLE_S) -> None:
    clock.now += seconds


def test_a_file_counts_when_it_has_been_still(
    tmp_path: Path, scanner: CheckpointScanner, clock: Clock
) -> None:
    file = tmp_path / "a.pt"
    file.write_text("1")
    assert names(scanner) == []
    assert scanner.unsettled
    later(clock, SETTLE_S / 2)
    file.write_text("12")
    assert names(scanner) == []
    later(clock, SETTLE_S * 0.9)
    assert names(scanner) == []
    later(clock)
    assert names(scanner) == ["a.pt"]
    later(clock)
    assert names(scanner) == [], "once"
    assert not scanner.unsettled


def test_a_file_that_is_replaced_counts_again(
    tmp_path: Path, scanner: CheckpointScanner, clock: Clock
) -> None:
    (tmp_path / "last.pt").write_text("1")
    scanner.accept_existing()
    assert [c.path for c in scanner.complete] == [str(tmp_path / "last.pt")]
    (tmp_path / "last.pt").write_text("2")
    os.utime(tmp_path / "last.pt", (2000, 2000))
    assert names(scanner) == []
    later(clock)
    assert names(scanner) == ["last.pt"]


@pytest.mark.parametrize("directory", [False, True])
def test_what_is_renamed_into_place_can_be_complete_at_once(
    tmp_path: Path, scanner: CheckpointScanner, clock: Clock, directory: bool
) -> None:
    (tmp_path / "first.pt").write_text("1")
    scanner.accept_existing()
    scanner.trust_renames = True
    source = tmp_path / "next.tmp"
    if directory:
        source.mkdir()
        (source / "shard").write_text("2")
    else:
        source.write_text("2")
    assert names(scanner) == []
    source.rename(tmp_path / "next.pt")
    assert names(scanner) == ["next.pt"]
    later(clock)
    assert names(scanner) == []


@pytest.mark.parametrize(
    "name", ["a.tmp", "A.PART", ".hidden", "tmp-7", "x.pt.incomplete", "a.lock", "b~"]
)
def test_names_that_say_not_yet(
    tmp_path: Path, scanner: CheckpointScanner, clock: Clock, name: str
) -> None:
    (tmp_path / name).write_text("1")
    scanner.scan()
    later(clock)
    assert names(scanner) == []


def test_an_empty_file_or_directory_is_nothing(
    tmp_path: Path, scanner: CheckpointScanner, clock: Clock
) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "b").mkdir()
    scanner.scan()
    later(clock)
    assert names(scanner) == []


def test_a_directory_counts_when_all_in_it_is_still(
    tmp_path: Path, scanner: CheckpointScanner, clock: Clock
) -> None:
    deep = tmp_path / "step-1" / "shards"
    deep.mkdir(parents=True)
    (deep / "0").write_text("1")
    assert names(scanner) == []
    later(clock, SETTLE_S * 0.9)
    (deep / "0").write_text("12")
    assert names(scanner) == []
    later(clock, SETTLE_S * 0.9)
    (deep / "1").write_text("")
    assert names(scanner) == []
    later(clock)
    assert names(scanner) == ["step-1"]


def test_a_link_is_what_it_names(tmp_path: Path, scanner: CheckpointScanner, clock: Clock) -> None:
    (tmp_path / "step-1.pt").write_text("1")
    (tmp_path / "latest").symlink_to("step-1.pt")
    (tmp_path / "broken").symlink_to("nowhere")
    scanner.scan()
    later(clock)
    assert names(scanner) == ["step-1.pt"]


def test_the_newest_comes_first(tmp_path: Path, scanner: CheckpointScanner) -> None:
    for age, name in enumerate("abcdefg"):
        (tmp_path / name).write_text("1")
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    scanner.accept_existing()
    assert [Path(c.path).name for c in scanner.complete] == list("abcdefg")


def test_what_is_deleted_is_forgotten(
    tmp_path: Path, scanner: CheckpointScanner, clock: Clock
) -> None:
    (tmp_path / "a").write_text("1")
    scanner.accept_existing()
    (tmp_path / "a").unlink()
    assert names(scanner) == []
    assert scanner.complete == []


def test_subdirectories_by_two_stars(tmp_path: Path, clock: Clock) -> None:
    scanner = CheckpointScanner(f"{tmp_path}/**/*.pt", clock=clock)
    (tmp_path / "run" / "a").mkdir(parents=True)
    (tmp_path / "run" / "a" / "x.pt").write_text("1")
    scanner.scan()
    later(clock)
    assert names(scanner) == ["x.pt"]
