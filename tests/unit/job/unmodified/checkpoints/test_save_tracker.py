"""Which changes are one save, and when it is over."""

import pytest

from slurm_elastic.job.unmodified.checkpoints.checkpoint_formats import Evidence
from slurm_elastic.job.unmodified.checkpoints.save_tracker import (
    ChangeKind,
    SaveTracker,
    without_numbers,
)
from slurm_elastic.job.unmodified.checkpoints.settle_time import FIRST_S, LEAST_S, SettleTime


class Saves:
    """Tracker with a clock; what each checkpoint shows is set by the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.settle = SettleTime()
        self.tracker = SaveTracker(self.settle)
        self.evidence: dict[str, Evidence] = {}

    def write(
        self,
        path: str,
        kind: ChangeKind = ChangeKind.NEW,
        evidence: Evidence = Evidence.WHOLE,
        *,
        directory: bool = False,
    ) -> list[tuple[str, ...]]:
        self.evidence[path] = evidence
        self.tracker.change(path, kind, self.now, is_directory=directory)
        return self.look()

    def look(self) -> list[tuple[str, ...]]:
        return [save.paths for save in self.tracker.finished(self.now, self.evidence.__getitem__)]

    def wait(self, seconds: float) -> list[tuple[str, ...]]:
        self.now += seconds
        return self.look()


@pytest.fixture
def saves() -> Saves:
    return Saves()


def test_a_first_save_settles(saves: Saves) -> None:
    assert saves.write("a1") == []
    assert saves.wait(FIRST_S - 1) == []
    assert saves.wait(1) == [("a1",)]
    assert saves.wait(1000) == []


@pytest.mark.parametrize(
    "names",
    [
        ("a1", "a2", "a3", "a4"),
        ("epoch=1-loss=0.9", "epoch=2-loss=0.5", "epoch=3-loss=0.7", "epoch=4-loss=0.1"),
        ("loss=9-epoch=1", "loss=5-epoch=2", "loss=7-epoch=3", "loss=1-epoch=4"),
        ("loss=5-epoch=1", "loss=9-epoch=2", "loss=7-epoch=3", "loss=8-epoch=4"),
        ("s09", "s10", "s11", "s12"),
        ("step_000020.pt", "step_000040.pt", "step_000060.pt", "step_000080.pt"),
        ("checkpoint-500", "checkpoint-1000", "checkpoint-1500", "checkpoint-2000"),
        ("global_step5", "global_step10", "global_step15", "global_step20"),
        ("ep1-ba5-rank0.pt", "ep1-ba10-rank0.pt", "ep2-ba15-rank0.pt", "ep2-ba20-rank0.pt"),
        ("ep1-ba998-rank0.pt", "ep1-ba999-rank0.pt", "ep2-ba1000-rank0.pt", "ep2-ba1001-rank0.pt"),
        ("layer_ckpt_1.pt", "layer_ckpt_2.pt", "layer_ckpt_3.pt", "layer_ckpt_4.pt"),
        ("s_1/rank0.step1", "s_1/rank0.step2", "s_1/rank0.step3", "s_1/rank0.step4"),
    ],
)
def test_counting_names_are_saves_of_their_own(saves: Saves, names: tuple[str, ...]) -> None:
    for number, name in enumerate(names[:-1]):
        assert saves.write(name) == ([(names[number - 1],)] if number else [])
        saves.wait(1)
    assert saves.write(names[-1]) == [(names[-2],), (names[-1],)]
    assert not saves.tracker.under_way


@pytest.mark.parametrize(
    "names",
    [
        ("s1-rank0", "s1-rank1", "s1-rank2", "s1-rank3"),
        ("s1-mp_0", "s1-mp_1", "s1-mp_2", "s1-mp_3"),
        ("s1_shard0.pt", "s1_shard1.pt", "s1_shard2.pt"),
        ("model-00001-of-00004", "model-00002-of-00004", "model-00003-of-00004"),
        ("a3", "a2", "a1"),
        ("a", "b", "c", "d"),
    ],
)
def test_parts_are_not_taken_for_saves(saves: Saves, names: tuple[str, ...]) -> None:
    for name in names:
        assert saves.write(name) == []
        saves.wait(5)
    assert saves.wait(FIRST_S) == [names]


def test_counting_names_of_several_ranks(saves: Saves) -> None:
    for step in (10, 20, 30):
        saves.write(f"step_{step}-rank0.pt")
        saves.wait(1)
        saves.write(f"step_{step}-rank1.pt")
        saves.wait(1)
    assert saves.write("step_40-rank0.pt") == [("step_30-rank0.pt", "step_30-rank1.pt")]
    assert saves.write("step_40-rank1.pt") == [("step_40-rank0.pt", "step_40-rank1.pt")]


def test_numbers_that_start_again_are_parts(saves: Saves) -> None:
    for step in (1, 2):
        for part in (1, 2):
            saves.write(f"{step}_{part}")
            saves.wait(1)
    assert saves.tracker.under_way


def test_files_that_are_rewritten_together(saves: Saves) -> None:
    for _ in range(2):
        for name in ("m", "o"):
            assert all(save != ("m", "o") for save in saves.write(name, ChangeKind.REWRITTEN))
            saves.wait(1)
    assert saves.write("m", ChangeKind.REWRITTEN) == [("o",)], "m is written anew"
    assert saves.wait(1) == []
    assert saves.write("o", ChangeKind.REWRITTEN) == [("m", "o")]


@pytest.mark.parametrize("deletes_first", [False, True])
def test_a_script_that_keeps_only_its_newest_checkpoint(saves: Saves, deletes_first: bool) -> None:
    """Lightning's `save_top_k=1`."""
    for number in (1, 2, 3):
        saves.write(f"step={number}")
        saves.wait(0.75)
        if deletes_first:
            saves.tracker.remove(f"step={number}")
            saves.look()
        else:
            saves.tracker.change(
                f"step={number + 1}", ChangeKind.NEW, saves.now, is_directory=False
            )
            saves.tracker.remove(f"step={number}")
    assert saves.write("step=4") == [("step=4",)]


def test_a_file_that_only_some_saves_have_ends_the_trust(saves: Saves) -> None:
    for number in (1, 2, 3, 4):
        saves.write(f"a{number}")
        saves.wait(1)
    assert not saves.tracker.under_way
    saves.write("best")
    saves.wait(FIRST_S + LEAST_S)
    assert saves.write("a5") == []
    assert saves.tracker.under_way, "best may follow"


def write_late(saves: Saves, *names: str) -> None:
    """Write checkpoints that one scan finds together."""
    for name in names:
        saves.evidence[name] = Evidence.WHOLE
        saves.tracker.change(name, ChangeKind.NEW, saves.now, is_directory=False)
    saves.look()
    saves.wait(1)


def test_saves_that_a_late_scan_finds_together_end_the_trust_for_a_while(saves: Saves) -> None:
    write_late(saves, "a1", "a2")
    for name in ("a3", "a4", "a5"):
        write_late(saves, name)
        assert saves.tracker.under_way
    write_late(saves, "a6")
    assert not saves.tracker.under_way
    write_late(saves, "a7", "a8")
    assert saves.tracker.under_way
    assert saves.write("a9") == [("a7", "a8"), ("a9",)]


def test_saves_of_one_file_or_two_do_not_become_trusted(saves: Saves) -> None:
    for number in range(0, 30, 3):
        write_late(saves, f"a{number}", f"a{number + 1}")
        write_late(saves, f"a{number + 2}")
        assert saves.tracker.under_way


def test_what_follows_the_last_byte_of_a_directory_ends_the_trust(saves: Saves) -> None:
    saves.write("d1", directory=True)
    saves.wait(FIRST_S)
    assert saves.write("d2", directory=True) == [("d2",)]
    saves.now += 20
    assert saves.write("d2", ChangeKind.GROWN, directory=True) == []
    assert saves.tracker.under_way
    assert saves.settle.pause_s == 20
    assert saves.wait(60) == [("d2",)]
    assert saves.write("d3", directory=True) == []


def test_a_new_attempt_may_have_more_files_per_save(saves: Saves) -> None:
    saves.write("s1-rank0")
    saves.wait(FIRST_S)
    saves.tracker.begin_attempt()
    assert saves.write("s2-rank0") == []
    assert saves.write("s2-rank1") == []
    assert saves.wait(LEAST_S) == [("s2-rank0", "s2-rank1")]


@pytest.mark.parametrize("evidence", [Evidence.EMPTY, Evidence.CUT])
def test_what_is_cut_never_settles(saves: Saves, evidence: Evidence) -> None:
    saves.write("a1", evidence=evidence)
    assert saves.wait(10_000) == []


def test_numbers_of_saves_rise(saves: Saves) -> None:
    before = saves.tracker.begun
    saves.write("a1")
    assert saves.tracker.begun == before + 1
    saves.write("b1")
    assert saves.tracker.begun == before + 1, "the same save"


def test_hostile_names(saves: Saves) -> None:
    long = "9" * 5000
    saves.write(f"a{long}")
    saves.write(f"a{long}9")
    saves.write("a\udcff1")
    assert without_numbers("ckpt-3fa9c1d2-7.pt") == "ckpt-#-#.pt"
    assert without_numbers("ckpt-fa9c1d-7.pt") == "ckpt-#-#.pt"
    assert saves.wait(FIRST_S)
