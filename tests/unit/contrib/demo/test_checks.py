"""All checks hold for a good run, and each fails for the fault that it looks for."""

import dataclasses
import math

import pytest

from contrib.demo import checks, sacct
from contrib.demo.training_logs import TrainingLog
from tests.support.sacct_rows import ROWS

GOOD = "".join(line + "\n" for line in ROWS.splitlines() if "never" not in line).replace(
    "CANCELLED by 2001|0:15", "COMPLETED|0:0"
)
LOSSES = {1: 2.3, 2: 2.1}


def evidence(sacct_text: str = GOOD, **changed) -> checks.Evidence:
    attempts = sacct.parse(sacct_text)
    worlds = {
        "gpt": {0: frozenset({4}), 1: frozenset({8}), 3: frozenset({4})},
        "vit": {0: frozenset({2}), 1: frozenset({2})},
    }
    good = checks.Evidence(
        elastic=("gpt", "vit"),
        rigid=("train", "urgent"),
        library=("gpt", "vit"),
        attempts=attempts,
        changes=sacct.changes(attempts),
        logs={name: TrainingLog(losses=LOSSES, worlds=worlds[name]) for name in worlds},
        references=dict.fromkeys(worlds, TrainingLog(losses=LOSSES)),
        expected_changes=("grow", "shrink", "move", "preempt"),
    )
    return dataclasses.replace(good, **changed)


def failing(of: checks.Evidence) -> list[str]:
    return [check.name for check in checks.evaluate(of) if not check.holds]


def faults(of: checks.Evidence) -> str:
    return "; ".join(fault for check in checks.evaluate(of) for fault in check.faults)


def test_all_checks_of_a_good_run_hold():
    assert failing(evidence()) == []


def test_a_job_that_was_cancelled():
    bad = evidence(GOOD.replace("6|vit|alice|COMPLETED|0:0", "6|vit|alice|CANCELLED by 0|0:15"))
    assert failing(bad) == ["all jobs completed"]
    assert "vit ended CANCELLED" in faults(bad)


def test_a_job_that_was_never_submitted():
    bad = evidence(rigid=("train", "urgent", "eval"))
    assert failing(bad) == ["all jobs completed"]


def test_a_run_that_was_lost_with_its_node():
    bad = evidence(GOOD.replace("5|gpt|alice|REQUEUED", "5|gpt|alice|NODE_FAIL", 1))
    assert "a run of gpt ended NODE_FAIL" in faults(bad)


@pytest.mark.parametrize(
    ("kind", "title"),
    [
        ("grow", "a job grew"),
        ("shrink", "a job shrank"),
        ("move", "a job moved"),
        ("preempt", "a job was preempted and resumed"),
    ],
)
def test_a_change_that_never_happened(kind, title):
    changes = [c for c in evidence().changes if c.kind != kind]
    assert failing(evidence(changes=changes)) == [title]


def test_a_sample_that_was_lost():
    log = TrainingLog(losses=LOSSES, faults=("epoch 1: 1 samples never seen, 1 more than once",))
    bad = evidence(logs=evidence().logs | {"vit": log})
    assert failing(bad) == ["vit: every sample exactly once per epoch, no step twice"]


@pytest.mark.parametrize("loss", [2.1 + 2e-4, math.nan])
def test_losses_that_differ(loss):
    log = TrainingLog(losses=LOSSES | {2: loss})
    bad = evidence(logs=evidence().logs | {"gpt": log})
    assert failing(bad) == ["gpt: losses equal an uninterrupted run's"]


def test_steps_that_are_missing():
    log = TrainingLog(losses={1: 2.3})
    bad = evidence(logs=evidence().logs | {"gpt": log})
    assert "1 steps, the uninterrupted run has 2" in faults(bad)


def test_without_a_reference_nothing_is_proven():
    assert "gpt: losses equal an uninterrupted run's" in failing(evidence(references={}))


def test_without_logs_nothing_is_proven():
    bad = failing(evidence(logs={}))
    assert "logs and sacct agree on the GPUs of each run" in bad
    assert "vit: losses equal an uninterrupted run's" in bad
    assert "vit: every sample exactly once per epoch, no step twice" in bad


def test_ranks_that_sacct_knows_nothing_of():
    log = TrainingLog(losses=LOSSES, worlds={0: frozenset({2}), 1: frozenset({4})})
    bad = evidence(logs=evidence().logs | {"vit": log})
    assert "run 1 of vit had 2 GPUs and trained with 4 ranks" in faults(bad)


def test_a_rigid_job_that_was_disturbed():
    again = "9|train|bob|REQUEUED|0:0|150|151|155|cpu=1,gres/gpu:a100=4,gres/gpu=4|g01|00:00:00\n"
    bad = evidence(again + GOOD)
    assert failing(bad) == ["rigid jobs ran exactly once, undisturbed"]
    paused = evidence(
        GOOD.replace(
            "|300|billing=1,cpu=1,gres/gpu:a100=4,gres/gpu=4,mem=500M,node=1|g01|00:00:00",
            "|300|gres/gpu=4|g01|00:00:03",
        )
    )
    assert failing(paused) == ["rigid jobs ran exactly once, undisturbed"]


def test_the_summary_has_a_line_for_each_job():
    lines = checks.summary(evidence())
    assert len(lines) == 4
    assert "4 a100 g01 → 8 a100 g01,g02 → 4 a100 g02" in lines[0]


COMPANION = "9|gpt+1|alice|COMPLETED|0:0|90|110|150|cpu=4,gres/gpu:a100=4,gres/gpu=4|g05|0:0:0\n"


def with_companion(row: str, worlds: set[int]) -> checks.Evidence:
    attempts = sacct.parse(GOOD + row)
    held = sacct.with_companions(attempts, ["gpt", "vit", "train", "urgent"])
    good = evidence()
    logs = dict(good.logs)
    logs["gpt"] = dataclasses.replace(
        logs["gpt"], worlds={**logs["gpt"].worlds, 0: frozenset(worlds)}
    )
    expected = (*good.expected_changes, "in-place")
    return evidence(
        attempts=attempts, changes=sacct.changes(held), logs=logs, expected_changes=expected
    )


def test_a_job_that_grew_in_place():
    row = COMPANION.replace("|110|150|", "|105|118|")
    assert failing(with_companion(row, {4, 8})) == []
    assert failing(with_companion(row, {4})) == ["logs and sacct agree on the GPUs of each run"]


def test_no_job_grew_in_place():
    expected = (*evidence().expected_changes, "in-place")
    assert failing(evidence(expected_changes=expected)) == [
        "a job grew or shrank in place, in one run"
    ]


def test_a_companion_that_outlived_its_job():
    row = COMPANION.replace("|110|150|", "|105|2000|")
    assert "no companion outlived its job" in failing(with_companion(row, {4, 8}))
