"""Detection of complete checkpoints."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_elastic.job.unmodified.checkpoints.checkpoint_scanner import CheckpointScanner
from slurm_elastic.job.unmodified.checkpoints.settle_time import FIRST_S
from tests.support.job.simulated_clock import SimulatedClock


@pytest.fixture
def scanner(tmp_path: Path, clock: SimulatedClock) -> Iterator[CheckpointScanner]:
    scanner = CheckpointScanner(f"{tmp_path}/*", clock=clock)
    yield scanner
    scanner.close()


def names(scanner: CheckpointScanner) -> list[str]:
    return [Path(checkpoint.path).name for checkpoint in scanner.scan()]


def later(clock: SimulatedClock, seconds: float = FIRST_S) -> None:
    clock.now += seconds


def test_a_file_counts_when_it_has_been_still(
    tmp_path: Path, scanner: CheckpointScanner, clock: SimulatedClock
) -> None:
    file = tmp_path / "a.pt"
    file.write_text("1")
    assert names(scanner) == []
    assert scanner.unsettled
    later(clock, FIRST_S / 2)
    file.write_text("12")
    assert names(scanner) == []
    later(clock, FIRST_S * 0.9)
    assert names(scanner) == []
    later(clock)
    assert names(scanner) == ["a.pt"]
    later(clock)
    assert names(scanner) == [], "once"
    assert not scanner.unsettled


def test_a_file_that_is_replaced_counts_again(
    tmp_path: Path, scanner: CheckpointScanner, clock: SimulatedClock
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
def test_what_is_renamed_into_place_is_complete_at_once_after_a_first_save(
    tmp_path: Path, scanner: CheckpointScanner, clock: SimulatedClock, directory: bool
) -> None:
    def save(name: str) -> list[str]:
        source = tmp_path / f"{name}.tmp"
        if directory:
            source.mkdir()
            (source / "shard").write_text("2")
        else:
            source.write_text("2")
        assert names(scanner) == []
        source.rename(tmp_path / name)
        return names(scanner)

    (tmp_path / "other").write_text("watch this directory")
    scanner.accept_existing()
    assert save("step-1") == []
    later(clock)
    assert names(scanner) == ["step-1"]
    assert save("step-2") == ["step-2"]
    later(clock)
    assert names(scanner) == []


def test_a_renamed_file_that_is_written_to_again_is_not_trusted(
    tmp_path: Path, scanner: CheckpointScanner, clock: SimulatedClock
) -> None:
    (tmp_path / "other").write_text("watch this directory")
    scanner.accept_existing()
    (tmp_path / "a.tmp").write_text("1")
    (tmp_path / "a.tmp").rename(tmp_path / "step-1")
    scanner.scan()
    later(clock)
    assert names(scanner) == ["step-1"]
    (tmp_path / "a.tmp").write_text("1")
    (tmp_path / "a.tmp").rename(tmp_path / "step-2")
    (tmp_path / "step-2").write_text("12")
    assert names(scanner) == []


@pytest.mark.parametrize(
    "name",
    [
        "a.tmp",
        "A.PART",
        ".hidden",
        "tmp-7",
        "x.pt.incomplete",
        "a.lock",
        "b~",
        "7.orbax-checkpoint-tmp-1",
        "latest.weights.h5.bkp",
        "model.pt.BAK",
    ],
)
def test_names_that_say_not_yet(
    tmp_path: Path, scanner: CheckpointScanner, clock: SimulatedClock, name: str
) -> None:
    (tmp_path / name).write_text("1")
    scanner.scan()
    later(clock)
    assert names(scanner) == []


def test_backups_where_the_pattern_names_them(tmp_path: Path, clock: SimulatedClock) -> None:
    scanner = CheckpointScanner(f"{tmp_path}/*.bak", clock=clock)
    (tmp_path / "a.bak").write_text("1")
    scanner.scan()
    later(clock)
    assert names(scanner) == ["a.bak"]
    scanner.close()


@pytest.mark.parametrize("pattern", ["backup", "backup/*"])
def test_saves_that_copy_the_version_of_before(
    tmp_path: Path, clock: SimulatedClock, pattern: str
) -> None:
    scanner = CheckpointScanner(f"{tmp_path}/{pattern}", clock=clock)
    folder = tmp_path / "backup"
    folder.mkdir()
    for save in range(4):
        for name in ("latest.weights.h5", "training_metadata.json"):
            if save:
                (folder / f"{name}.bkp").write_bytes((folder / name).read_bytes())
                scanner.scan()
        for name in ("latest.weights.h5", "training_metadata.json"):
            (folder / name).write_text(f'{{"epoch": {save}}}')
            scanner.scan()
            later(clock, 0.2)
        later(clock, 30)
        scanner.scan()
    assert not scanner.unsettled, "all was quiet for three times the longest pause"
    scanner.close()


def test_an_empty_file_or_directory_is_nothing(
    tmp_path: Path, scanner: CheckpointScanner, clock: SimulatedClock
) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "b").mkdir()
    scanner.scan()
    later(clock)
    assert names(scanner) == []


def test_a_directory_counts_when_all_in_it_is_still(
    tmp_path: Path, scanner: CheckpointScanner, clock: SimulatedClock
) -> None:
    deep = tmp_path / "step-1" / "shards"
    deep.mkdir(parents=True)
    (deep / "0").write_text("1")
    assert names(scanner) == []
    later(clock, FIRST_S * 0.9)
    (deep / "0").write_text("12")
    assert names(scanner) == []
    later(clock, FIRST_S * 0.9)
    (deep / "1").write_text("")
    assert names(scanner) == []
    later(clock)
    assert names(scanner) == ["step-1"]


def test_a_link_is_what_it_names(
    tmp_path: Path, scanner: CheckpointScanner, clock: SimulatedClock
) -> None:
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
    tmp_path: Path, scanner: CheckpointScanner, clock: SimulatedClock
) -> None:
    (tmp_path / "a").write_text("1")
    scanner.accept_existing()
    (tmp_path / "a").unlink()
    assert names(scanner) == []
    assert scanner.complete == []


def test_subdirectories_by_two_stars(tmp_path: Path, clock: SimulatedClock) -> None:
    scanner = CheckpointScanner(f"{tmp_path}/**/*.pt", clock=clock)
    (tmp_path / "run" / "a").mkdir(parents=True)
    (tmp_path / "run" / "a" / "x.pt").write_text("1")
    scanner.scan()
    later(clock)
    assert names(scanner) == ["x.pt"]
