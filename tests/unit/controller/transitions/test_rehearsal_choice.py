"""Which jobs are rehearsed now."""

import dataclasses

import pytest

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.state.rehearsal_record import RehearsalRecord
from slurm_elastic.controller.transitions import rehearsal_choice
from slurm_elastic.core.cluster import JobState, Snapshot
from slurm_elastic.core.plan import Action, JobRecord
from slurm_elastic.core.report import Report
from tests.support.controller.job_records import job

NOW = 10_000.0
REPORT = {
    "run": 0, "phase": "training", "kind": "script", "rehearsal": "able", "step": 1,
    "checkpoint_step": 1, "checkpoint_age_s": 2.0,
}  # fmt: skip


def running(number=7, **fields):
    values = {"job_id": number, "display_id": str(number), "start_time": 100.0 + number}
    return job({"n1": 4}, **(values | fields))


def due(*jobs, report=(), record=(), rehearsal=None, config=None, live=(), busy=(), spent=()):
    rehearsal = rehearsal or RehearsalRecord(reported="able", saved=NOW - 3)
    decisions = rehearsal_choice.due(
        Snapshot(time=NOW, nodes=(), jobs=jobs),
        records={
            j.job_id: JobRecord(**({"job_id": j.job_id, "reporting": True} | dict(record)))
            for j in jobs
        },
        rehearsals=dict.fromkeys((j.job_id for j in jobs), rehearsal),
        reports={j.job_id: Report(job_id=j.job_id, **(REPORT | dict(report))) for j in jobs},
        config=config or Config(),
        live=live,
        busy=busy,
        spent=dict(spent),
    )
    return [d.job_id for d in decisions]


def with_settings(section, **values):
    config = Config()
    return dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **values)}
    )


def test_an_unproven_script_with_a_fresh_checkpoint_is_requeued_where_it_is():
    (decision,) = rehearsal_choice.due(
        Snapshot(time=NOW, nodes=(), jobs=(running(),)),
        records={7: JobRecord(job_id=7, reporting=True)},
        rehearsals={7: RehearsalRecord(reported="able", saved=NOW)},
        reports={7: Report(job_id=7, **REPORT)},
        config=Config(),
        live=(),
        busy=(),
        spent={},
    )
    assert decision.action is Action.REHEARSE
    assert decision.target == decision.current == running().allocation
    assert decision.reason.code == "resume-rehearsal"


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "library"},
        {"run": 1},
        {"proven": True},
        {"phase": "saving"},
        {"checkpoint_age_s": None},
    ],
)
def test_reports_that_call_for_none(fields):
    assert due(running()) == [7]
    assert due(running(), report=fields) == []


@pytest.mark.parametrize(
    "record",
    [
        {"proven": True},
        {"held": True},
        {"reporting": False},
        {"in_transition": True},
        {"changes": (NOW - 5,) * 6},
    ],
)
def test_records_that_call_for_none(record):
    assert due(running(), record=record) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"directive": "4"},
        {"requeueable": False},
        {"state": JobState.SUSPENDED},
        {"start_time": NOW - 600, "time_limit_s": 660},
    ],
)
def test_jobs_that_could_not_be_resized_anyway_are_left_alone(fields):
    assert due(running(**fields)) == []


def test_a_job_of_one_gpu_that_may_share_it_is_rehearsed_where_gpus_are_shared():
    shares, config = running(directive="1,share=yes"), with_settings("neighbours", share_gpus="act")
    assert due(shares, config=config) == [7]
    assert due(shares) == []
    assert due(running(directive="2,share=yes"), config=config) == []


def test_only_soon_after_a_checkpoint():
    old = RehearsalRecord(reported="able", saved=NOW - 50)
    assert due(running(), rehearsal=old) == []


def test_a_launcher_that_cannot_keep_checkpoints_is_left_alone():
    assert due(running(), rehearsal=RehearsalRecord()) == []


def test_partitions_that_are_not_managed_and_changes_that_are_forbidden():
    assert due(running(), config=with_settings("controller", partitions=("other",))) == []
    assert due(running(), config=with_settings("resize", per_hour=0)) == []


def test_only_so_many_at_once_and_the_oldest_jobs_first():
    jobs = [running(n) for n in range(20, 0, -1)]
    config = with_settings("resize", max_in_flight=8)
    assert due(*jobs, config=config) == [1, 2]
    assert due(*jobs, config=config, live=(Action.REHEARSE, Action.GROW)) == [1]
    assert due(*jobs, config=config, live=(Action.GROW,) * 8) == []
    assert due(*jobs, config=config, busy=(1, 2)) == [3, 4]


def test_they_count_as_resizes():
    jobs = [running(1), running(2), running(3, user="bob")]
    config = with_settings("limits", resizes_per_user=2)
    assert due(*jobs, config=config, spent={"alice": (NOW - 9,)}) == [1, 3]
    config = with_settings("limits", resizes=2)
    assert due(*jobs, config=config, spent={"carol": (NOW - 9,)}) == [1]
