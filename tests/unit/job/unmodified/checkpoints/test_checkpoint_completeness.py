"""Saves of known libraries, cut at every write: never complete before their last byte."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.job.complete_marker import CompleteMarker
from slurm_elastic.job.unmodified.checkpoints import checkpoint_scanner
from slurm_elastic.job.unmodified.checkpoints.checkpoint_scanner import (
    CheckpointScanner,
    ScriptCheckpoint,
)
from slurm_elastic.job.unmodified.checkpoints.settle_time import FIRST_S, LACKING_S
from tests.support.job import checkpoint_savers as savers
from tests.support.job.checkpoint_savers import Phases, SaverScript, Write, in_order
from tests.support.job.simulated_clock import SimulatedClock

RANKS = 3
#: Saver → pattern of its checkpoints.
SAVERS: dict[str, tuple[Callable[[int, int], Phases], str]] = {
    "hf": (savers.hf_trainer, "checkpoint-*"),
    "hf-old": (lambda step, ranks: savers.hf_trainer(step, ranks, old=True), "checkpoint-*"),
    "dcp": (savers.dcp, "step-*"),
    "dcp-in-place": (lambda step, ranks: savers.dcp(step, ranks, folder="last"), "last"),
    "lightning": (savers.single_files, "*.ckpt"),
    "lightning-sharded": (savers.lightning_sharded, "*.ckpt"),
    "deepspeed": (savers.deepspeed, "global_step*"),
    "deepspeed-pickle": (
        lambda step, ranks: savers.deepspeed(step, ranks, zipfiles=False),
        "global_step*",
    ),
    "accelerate": (savers.accelerate, "checkpoint_*"),
    "accelerate-fsdp": (savers.accelerate_fsdp, "checkpoint_*"),
    "generic": (savers.generic, "step_*"),
    "two-files": (savers.two_files, "*.pt"),
    "one-file": (savers.one_file, "*.pt"),
}
#: Complete at the last byte, once one save has settled.
AT_ONCE = {
    *("hf", "hf-old", "dcp", "lightning", "lightning-sharded", "deepspeed", "one-file"),
    *("accelerate", "accelerate-fsdp"),
}


class Trial:
    """Scanner that looks every two simulated seconds at what a saver writes."""

    trials: ClassVar[list["Trial"]] = []

    def __init__(
        self, home: Path, pattern: str, *, ranks: int | None = RANKS, complete: str = ""
    ) -> None:
        self.clock = SimulatedClock()
        self.script = SaverScript(home, self.clock)
        self.scanner = CheckpointScanner(
            f"{home}/{pattern}",
            ranks=ranks,
            marker=CompleteMarker(complete) if complete else None,
            clock=self.clock,
        )
        self.trials.append(self)
        self.scanner.accept_existing()

    @classmethod
    def close_all(cls) -> None:
        """Give back the inotify instances: a user has few of them."""
        while cls.trials:
            cls.trials.pop().scanner.close()

    def pause(self, seconds: float) -> list[ScriptCheckpoint]:
        found = []
        while seconds > 0:
            self.clock.now += min(2.0, seconds)
            seconds -= 2.0
            found += self.scanner.scan()
        return found

    def save(
        self, writes: list[Write], pauses: list[float], *, scans: bool = True
    ) -> list[ScriptCheckpoint]:
        """Write all; return what was reported before the last write."""
        early = []
        for number, write in enumerate(writes):
            self.script.write(write)
            last = number == len(writes) - 1
            if not last:
                early += self.scanner.scan() if scans else []
                early += self.pause(pauses[number % len(pauses)])
        return early


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    Trial.close_all()


@pytest.mark.parametrize("name", SAVERS)
@settings(max_examples=12)
@given(
    choices=st.lists(st.integers(0, 5), max_size=40),
    pauses=st.lists(st.sampled_from([0.01, 1.0, 4.0, 19.0, 27.0]), min_size=5, max_size=20),
    ranks=st.sampled_from([1, RANKS]),
    is_known=st.booleans(),
)
def test_never_before_the_last_byte_and_then_once(
    name: str, choices: list[int], pauses: list[float], ranks: int, is_known: bool
) -> None:
    saver, pattern = SAVERS[name]
    with tempfile.TemporaryDirectory() as home:
        Trial.close_all()
        trial = Trial(Path(home), pattern, ranks=ranks if is_known else None)
        for step in range(3):
            before = {c.path: c for c in trial.scanner.complete}
            assert trial.save(in_order(saver(step, ranks), choices), pauses) == []
            assert trial.scanner.unsettled or trial.scanner.complete != list(before.values())
            found = trial.pause(max(3 * FIRST_S, LACKING_S) + 2)
            assert {c.save for c in found} == {found[0].save}
            assert len(found) == (2 if name == "two-files" else 1)
            assert not trial.scanner.unsettled
        Trial.close_all()


@pytest.mark.parametrize("name", sorted(AT_ONCE))
def test_after_one_save_known_formats_are_complete_at_the_last_byte(
    tmp_path: Path, name: str
) -> None:
    saver, pattern = SAVERS[name]
    trial = Trial(tmp_path, pattern)
    trial.save(in_order(saver(0, RANKS), []), [0.5])
    assert len(trial.pause(FIRST_S + 2)) == 1
    for step in (1, 2):
        assert trial.save(in_order(saver(step, RANKS), [1, 2, 0]), [20.0]) == []
        assert len(trial.scanner.scan()) == 1
        trial.pause(100)


def test_a_script_that_saves_all_the_time_and_keeps_one_checkpoint(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "*.ckpt")
    found = []
    for step in range(8):
        for write in in_order(savers.single_files(step, 1), []):
            trial.script.write(write)
        for old in sorted(tmp_path.glob("*.ckpt"))[:-1]:
            old.unlink()
        found += [Path(c.path).name for c in trial.scanner.scan()]
        trial.pause(0.75)
    assert [name[:10] for name in found[-4:]] == [f"epoch=000{step}" for step in range(4, 8)]


def test_directories_that_follow_each_other_closely(tmp_path: Path) -> None:
    """Pauses of 3 s inside a save every 8 s: what earlier directories had tells the end."""

    def writes(step: int) -> list[Write]:
        return [
            *savers.halves(f"step_{step}/model.pt", savers.zipped(f"model {step}")),
            *savers.halves(f"step_{step}/optimizer.pt", savers.zipped(f"optimizer {step}")),
        ]

    trial = Trial(tmp_path, "step_*")
    for step in range(5):
        trial.save(writes(step), [0.1, 3.0, 0.1])
        trial.scanner.scan()
        trial.pause(5)
    for step in range(5, 8):
        assert trial.save(writes(step), [0.1, 3.0, 0.1]) == []
        assert trial.scanner.unsettled
        assert len(trial.scanner.scan()) == 1
        assert not trial.scanner.unsettled
        trial.pause(5)


def test_two_files_are_complete_with_the_second(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "*.pt")
    trial.save(in_order(savers.two_files(0, 1), []), [0.5])
    assert len(trial.pause(FIRST_S + 2)) == 2
    assert trial.save(in_order(savers.two_files(1, 1), []), [40.0]) == []
    assert len(trial.scanner.scan()) == 2


@pytest.mark.parametrize(
    "name", ["lightning", "one-file", "two-files", "accelerate", "accelerate-fsdp"]
)
def test_a_script_that_saves_all_the_time(tmp_path: Path, name: str) -> None:
    """No pause is long enough: after some saves a save is over with its last byte."""
    saver, pattern = SAVERS[name]
    trial = Trial(tmp_path, pattern)
    for step in range(4):
        trial.save(in_order(saver(step, 1), []), [0.05])
        trial.scanner.scan()
        trial.pause(0.75)
    for step in range(4, 8):
        assert trial.save(in_order(saver(step, 1), []), [0.05]) == []
        assert trial.scanner.unsettled
        found = trial.scanner.scan()
        assert len(found) == (2 if name == "two-files" else 1)
        assert not trial.scanner.unsettled
        trial.pause(0.75)


@pytest.mark.parametrize("scans", [True, False])
def test_a_script_whose_main_process_alone_saves(tmp_path: Path, scans: bool) -> None:
    """The files of the other ranks never come: after three saves that shows."""
    trial = Trial(tmp_path, "checkpoint_*")
    for step in range(3):
        trial.save(in_order(savers.accelerate_alone(step, RANKS), []), [0.05], scans=scans)
        assert [*trial.scanner.scan(), *trial.pause(20)] == []
        assert trial.scanner.unsettled
    for step in range(3, 8):
        assert trial.save(in_order(savers.accelerate_alone(step, RANKS), []), [4.0]) == []
        assert trial.scanner.unsettled
        assert [Path(c.path).name for c in trial.scanner.scan()] == [f"checkpoint_{step}"]
        assert not trial.scanner.unsettled
        trial.pause(20)
    known = trial.scanner.known_files
    again = Trial(tmp_path, "checkpoint_*")
    again.scanner.accept_existing(known)
    assert again.save(in_order(savers.accelerate_alone(8, RANKS), []), [1.0]) == []
    assert len(again.scanner.scan()) == 1


def test_after_a_long_quiet_the_last_file_is_not_waited_for_any_more(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "checkpoint_*")
    trial.save(in_order(savers.accelerate_alone(0, RANKS), []), [0.5])
    assert trial.pause(LACKING_S - 4) == []
    assert len(trial.pause(8)) == 1
    assert trial.save(in_order(savers.accelerate_alone(1, RANKS), []), [0.5]) == []
    assert len(trial.scanner.scan()) == 1


def test_files_of_other_ranks_that_come_after_all_are_waited_for(tmp_path: Path) -> None:
    """They are written in the background: each save ends after the next one has begun."""
    trial = Trial(tmp_path, "checkpoint_*")
    late: list[Write] = []
    for step in range(8):
        save = in_order(savers.accelerate_alone(step, RANKS), [])
        rest = [w for w in in_order(savers.accelerate(step, RANKS), []) if w not in save]
        assert trial.save([*save[:1], *late, *save[1:]], [1.0]) == []
        assert trial.pause(20) == []
        late = rest


def test_saves_of_all_ranks_that_follow_each_other_closely(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "checkpoint_*")
    for step in range(12):
        writes = in_order(savers.accelerate(step, RANKS), [2, 0, 1, 2])
        early = trial.save(writes, [2.0], scans=step % 3 > 0)
        assert f"checkpoint_{step}" not in {Path(c.path).name for c in early}
        trial.pause(4)
    assert len(trial.scanner.complete) >= 8


def test_a_failed_save_does_not_show_what_a_script_writes(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "checkpoint_*")
    for step in range(3):
        trial.save(in_order(savers.accelerate(step, RANKS), []), [0.5])
        trial.pause(FIRST_S + 2)
    for step in range(3, 9):
        trial.save(in_order(savers.accelerate_alone(step, RANKS), []), [0.5])
        assert trial.pause(20) == []


def test_shards_in_files_of_their_own_are_one_save(tmp_path: Path) -> None:
    def shards(step: int) -> list[Write]:
        return [
            write
            for rank in range(4)
            for write in savers.halves(f"step{step}-rank{rank}.pt", savers.zipped(f"{step}"))
        ]

    trial = Trial(tmp_path, "*.pt")
    for step in (100, 200, 300):
        assert trial.save(shards(step), [7.0]) == []
        found = [*trial.scanner.scan(), *trial.pause(FIRST_S + 2)]
        assert (len(found), len({c.save for c in found})) == (4, 1)


def test_a_directory_with_a_pause_of_30_seconds_from_the_first_save_on(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "step_*")
    for step in range(3):
        assert trial.save(in_order(savers.generic(step, 2), []), [30.0]) == []
        assert len(trial.pause(3 * 32 + 6)) == 1


def test_a_save_that_lacks_a_usual_file_is_waited_for(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "step_*")
    trial.save(in_order(savers.generic(0, 2), []), [1.0])
    trial.pause(FIRST_S + 2)
    for step in (1, 2):
        assert trial.save(in_order(savers.generic(step, 2), []), [1.0, 1.0, 1.0, 50.0]) == []
        assert len(trial.pause(3 * 52 + 6)) == 1


def test_a_pause_that_is_longer_than_any_before_is_learned(tmp_path: Path) -> None:
    """The third save has a file that the others did not have, after a long pause."""

    def writes(step: int) -> list[Write]:
        late = savers.halves(f"step_{step:06d}/late", f"{step} late".encode())
        return [*in_order(savers.generic(step, 1), []), *late]

    trial = Trial(tmp_path, "step_*")
    trial.save(in_order(savers.generic(0, 1), []), [1.0])
    trial.pause(FIRST_S + 2)
    assert trial.save(writes(1), [1.0, 1.0, 1.0, 30.0, 1.0]), "nothing tells that more follows"
    trial.pause(3 * 34 + 6)
    assert trial.save(writes(2), [1.0, 1.0, 1.0, 30.0, 1.0]) == []
    assert len(trial.pause(3 * 34 + 6)) == 1


@pytest.mark.parametrize("name", ["hf", "hf-old", "dcp", "lightning-sharded"])
def test_without_its_last_file_a_save_is_long_not_complete(tmp_path: Path, name: str) -> None:
    saver, pattern = SAVERS[name]
    writes = in_order(saver(0, RANKS), [])
    for count in range(1, len(writes)):
        if name.startswith("hf") and count < 4:
            continue  # before training_args.bin it may be any directory with a model
        home = tmp_path / str(count)
        trial = Trial(home, pattern)
        trial.save([*writes[:count], ("other", b"")], [0.01])
        assert trial.pause(LACKING_S - 4) == [], writes[count]


def test_what_a_killed_save_has_left_is_not_complete(tmp_path: Path) -> None:
    writes = in_order(savers.dcp(0, RANKS), [])
    script = SaverScript(tmp_path, SimulatedClock())
    for write in writes[:-1]:
        script.write(write)
    trial = Trial(tmp_path, "step-*")
    assert trial.scanner.complete == []
    assert not trial.scanner.unsettled, "nobody writes it any more"
    trial.save(in_order(savers.dcp(1, RANKS), []), [0.5])
    assert len(trial.pause(FIRST_S + 2)) == 1


def test_a_start_does_not_wait_for_thousands_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(600):
        (tmp_path / "step-1").mkdir(exist_ok=True)
        (tmp_path / "step-1" / f"{number}.pt").write_bytes(savers.zipped("x"))
    monkeypatch.setattr(checkpoint_scanner, "is_whole", lambda _: pytest.fail("a file is read"))
    assert len(Trial(tmp_path, "step-*").scanner.complete) == 1


def test_a_failed_save_does_not_block_later_ones_for_ever(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "step-*")
    trial.save(in_order(savers.dcp(0, RANKS), [])[:-1], [0.5])
    for step in range(1, 30):
        trial.save(in_order(savers.dcp(step, RANKS), []), [0.5])
        trial.pause(20)
    trial.pause(100)
    assert not trial.scanner.unsettled
    assert "step-0" not in {Path(c.path).name for c in trial.scanner.complete}


def test_an_empty_directory_is_a_save_that_begins(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "*")
    (tmp_path / "step-1").mkdir()
    trial.scanner.scan()
    assert trial.scanner.unsettled
    trial.pause(FIRST_S + 2)
    assert not trial.scanner.unsettled
    assert trial.scanner.complete == []


def test_deleting_an_old_checkpoint_is_no_save(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "step-*")
    for step in range(2):
        trial.save(in_order(savers.dcp(step, RANKS), []), [0.5])
        trial.pause(FIRST_S + 2)
    (tmp_path / "step-0" / "__0_0.distcp").unlink()
    assert trial.scanner.scan() == []
    assert not trial.scanner.unsettled
    assert [Path(c.path).name for c in trial.scanner.complete] == ["step-1"]


@pytest.mark.parametrize(
    ("complete", "pattern", "marker"),
    [("DONE", "step_*", "step_{step:06d}/DONE"), ("{}.done", "step_*", "step_{step:06d}.done")],
)
def test_a_marker_decides_alone(tmp_path: Path, complete: str, pattern: str, marker: str) -> None:
    trial = Trial(tmp_path, pattern, complete=complete)
    for step in range(3):
        assert trial.save([*in_order(savers.generic(step, 2), []), ("x", b"")], [5.0]) == []
        assert trial.pause(500) == []
        assert trial.scanner.unsettled
        trial.script.write((marker.format(step=step), b""))
        assert len(trial.scanner.scan()) == 1
        assert not trial.scanner.unsettled


def test_the_marker_of_an_earlier_save_does_not_count(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "*.pt", complete="{stem}.ok")
    for step in range(3):
        assert trial.save([*in_order(savers.one_file(step, 1), []), ("x", b"")], [5.0]) == []
        assert trial.pause(500) == []
        trial.script.write(("ckpt.ok", b""))
        assert len(trial.scanner.scan()) == 1


def test_a_truncated_file_is_not_complete_whatever_the_marker_says(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "*.pt", complete="{}.ok")
    trial.script.write(("a.pt", savers.zipped("a")[:-3]))
    trial.script.write(("a.pt.ok", b""))
    assert [*trial.scanner.scan(), *trial.pause(500)] == []
