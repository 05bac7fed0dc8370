"""Attempts from rows of sacct, and changes between consecutive attempts."""

import pytest

from contrib.demo import sacct
from tests.support.sacct_rows import ROWS


@pytest.fixture
def jobs():
    return sacct.parse(ROWS)


def test_a_job_has_its_attempts_in_order(jobs):
    assert [a.gpus for a in jobs["gpt"]] == [4, 8, 4, 4]
    assert jobs["gpt"][1].nodes == ("g01", "g02")
    assert jobs["vit"][1].state == "CANCELLED"
    assert not jobs["never"][0].ran


def test_changes_are_told_apart(jobs):
    kinds = [(c.name, c.kind) for c in sacct.changes(jobs)]
    assert kinds == [("gpt", "grow"), ("vit", "move"), ("gpt", "shrink"), ("gpt", "preempt")]


def test_a_preemption_names_who_ran_meanwhile(jobs):
    (change,) = [c for c in sacct.changes(jobs) if c.kind == "preempt"]
    assert (change.preempted_by, change.waited_s) == ("urgent", 17.0)


def test_a_slow_shrink_is_no_preemption():
    """The job that it gave way to runs on."""
    slow = ROWS.replace("|160|164|180|", "|160|175|180|")
    kinds = [c.kind for c in sacct.changes(sacct.parse(slow)) if c.name == "gpt"]
    assert kinds == ["grow", "shrink", "preempt"]


def test_a_wait_without_anybody_else_is_no_preemption():
    alone = "".join(line + "\n" for line in ROWS.splitlines() if "urgent" not in line)
    kinds = [c.kind for c in sacct.changes(sacct.parse(alone)) if c.name == "gpt"]
    assert kinds == ["grow", "shrink", "restart"]


def test_another_type_of_gpu_is_a_move():
    other = ROWS.replace("gres/gpu:v100=2,gres/gpu=2,node=1|g03", "gres/gpu:a100=4,gres/gpu=4|g04")
    kinds = [c.kind for c in sacct.changes(sacct.parse(other)) if c.name == "vit"]
    assert kinds == ["move"]


def test_a_suspended_job_is_seen():
    rows = ROWS.replace(
        "|g01|00:00:00\n5|gpt|alice|REQUEUED|0:0|135", "|g01|00:00:07\n5|gpt|a|X|0:0|135"
    )
    assert sacct.parse(rows)["gpt"][0].suspended


#: A job that held 4 GPUs on g01, and from 130 to 160 companions on two other nodes.
IN_PLACE = """\
5|gpt|alice|REQUEUED|0:0|95|100|200|cpu=4,gres/gpu:a100=4,gres/gpu=4|g01|00:00:00
7|gpt+1|alice|COMPLETED|0:0|128|130|160|cpu=4,gres/gpu:a100=4,gres/gpu=4|g02|00:00:00
8|gpt+1|alice|COMPLETED|0:0|128|131|161|cpu=2,gres/gpu:a100=2,gres/gpu=2|g04|00:00:00
5|gpt|alice|COMPLETED|0:0|200|204|240|cpu=8,gres/gpu:a100=8,gres/gpu=8|g01,g02|00:00:00
"""


def test_changes_in_place_are_those_of_companions():
    jobs = sacct.with_companions(sacct.parse(IN_PLACE), ["gpt", "never"])
    parts = [(a.gpus, a.nodes, a.start, a.end, a.run) for a in jobs["gpt"]]
    assert parts == [
        (4, ("g01",), 100.0, 130.0, 0),
        (10, ("g01", "g02", "g04"), 130.0, 160.0, 0),
        (4, ("g01",), 160.0, 200.0, 0),
        (8, ("g01", "g02"), 204.0, 240.0, 1),
    ]
    changes = [(c.kind, c.in_place) for c in sacct.changes(jobs)]
    assert changes == [("grow", True), ("shrink", True), ("grow", False)]
