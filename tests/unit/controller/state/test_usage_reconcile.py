"""Segments are as long as Slurm's accounting says, and what nobody saw is filled in."""

import dataclasses
import doctest

import pytest

from slurm_elastic.cli.usage_check import compared
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.state.usage_reconcile import settle
from slurm_elastic.slurm import accounting
from slurm_elastic.slurm.accounting import parse

ADMIN = '{"at":90,"elastic":"1-4","shape":{},"v":1}'
SEEN = {
    "key": "7@90", "job_id": 7, "user": "alice", "name": "n", "run": 0, "gpu_type": "a100",
    "gpus": 2, "nodes": "n1:2", "start": 100.0,
}  # fmt: skip


def row(job=7, run=0, start=100, end=110, seconds=10, gpus=2, admin=ADMIN):
    tres = f"cpu=4,gres/gpu:a100={gpus},gres/gpu={gpus}" if gpus else "cpu=4"
    return f"{job}|{job}|alice|{run}|{start}|{end}|{seconds}|{tres}|{admin}"


def runs(*rows):
    return list(parse("\n".join(rows)))


@pytest.fixture
def ledger():
    ledger = Ledger(":memory:")
    ledger.begin_segment(SEEN)
    ledger.end_segment("7@90", 113.4)
    return ledger


def test_examples():
    assert doctest.testmod(accounting).failed == 0


def test_ends_and_lengths_are_taken_over(ledger):
    assert ledger.unsettled(0.0) == 100.0
    assert settle(ledger, runs(row(seconds=7))) == 1  # suspended for three
    (found,) = ledger.segments()
    assert (found["end"], found["seconds"], found["gpus"]) == (110, 7, 2)
    assert ledger.unsettled(0.0) is None


def test_what_nobody_saw_is_filled_in_once(ledger):
    unseen = runs(row(run=1, start=120, end=150, seconds=30, gpus=4))
    assert settle(ledger, unseen) == 1
    settle(ledger, unseen)
    first, second = ledger.segments()
    assert (second["key"], second["run"], second["gpus"], second["seconds"]) == ("7@90", 1, 4, 30)
    assert first["seconds"] is None


@pytest.mark.parametrize(
    "other",
    [row(job=8, admin=""), row(job=8, gpus=0), row(job=8, end="Unknown"),
     row(job=8, start="None"), "7|forged", row(job=8, admin='{"at":1,"elastic":"9-1","v":1}')],
    ids=["rigid", "no GPUs", "running", "pending", "forged", "damaged"],
)  # fmt: skip
def test_other_rows_change_nothing(ledger, other):
    before = ledger.segments()
    settle(ledger, runs(other))
    assert ledger.segments() == before


def test_a_later_run_is_its_jobs_whatever_sacct_has_forgotten(ledger):
    late = row(run=1, start=120, end=150, seconds=30, admin="")
    settle(ledger, accounting.attributed(runs(row(), late)))
    assert [s["run"] for s in ledger.segments()] == [0, 1]
    ledger.put_job("9@90", 9, {})
    settle(ledger, runs(row(job=9, admin=""), row(job=9, run=1, start=80, end=81, admin="")))
    assert [(s["key"], s["start"]) for s in ledger.segments()][1:] == [("9@90", 100), ("7@90", 120)]


def test_a_rigid_runs_row_does_not_settle_another_run(ledger):
    settle(ledger, runs(row(run=1, start=101, admin="")))
    assert ledger.segments()[0]["seconds"] is None


def unnumbered(*rows):
    """Return runs of a sacct that does not show restarts."""
    return [dataclasses.replace(r, run=None) for r in runs(*rows)]


def test_without_restart_counts_a_run_is_known_by_its_start(ledger):
    late = row(run=5, start=120, end=150, seconds=30, gpus=4)
    assert settle(ledger, unnumbered(row(), late)) == 2
    assert settle(ledger, unnumbered(row(), late)) == 2  # the same two again
    segments = [(s["run"], s["start"], s["seconds"], s["gpus"]) for s in ledger.segments()]
    assert segments == [(0, 100, 10, 2), (1, 120, 30, 4)]


def test_without_restart_counts_runs_are_compared_by_their_start():
    theirs = unnumbered(row(), row(start=120, end=150, seconds=30))
    equal, lines = compared([counted()], theirs, since=60.0)
    assert equal == 1
    assert lines == ["7: 0 GPU s, sacct 60: not recorded by the controller (yet)"]


def counted(**fields):
    known = {
        "job_id": 7, "display_id": "7", "user": "alice", "run": 0, "gpu_type": "a100", "gpus": 2,
        "start": 100.0, "end": 110.0, "seconds": 10.0, "settled": True,
    }  # fmt: skip
    return {**known, **fields}


@pytest.mark.parametrize(
    ("mine", "theirs", "equal", "said"),
    [
        ([counted()], [row()], 1, []),
        ([counted(gpus=1)], [row()], 0, ["7 run 0: 10 GPU s, sacct 20: 1 GPUs for 10 s"]),
        ([counted(seconds=12.0)], [row()], 0, ["7 run 0: 24 GPU s, sacct 20: 2 GPUs for 12 s"]),
        ([counted(settled=False)], [row()], 0, ["7 run 0: not settled yet"]),
        ([counted()], [], 0, ["7 run 0: sacct has no record of it"]),
        ([counted(end=None, settled=False)], [row(end="Unknown")], 0, []),
        ([], [row()], 0, ["7 run 0: 0 GPU s, sacct 20: not recorded by the controller"]),
        ([], [row(admin="")], 0, []),
        (
            [counted()],
            [row(), row(run=1, admin="")],
            1,
            ["7 run 1: 0 GPU s, sacct 20: not recorded"],
        ),
        ([], [row(start=50)], 0, []),
        ([counted()], [row(gpus=0)], 0, ["7 run 0: sacct has no number of GPUs"]),
    ],
)
def test_the_comparison_names_what_differs(mine, theirs, equal, said):
    count, lines = compared(mine, runs(*theirs), since=60.0)
    assert count == equal
    assert len(lines) == len(said)
    assert all(line.startswith(start) for line, start in zip(lines, said, strict=True))
