"""Jobs whose AdminComment a tool of the site has replaced keep their submission."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from slurm_elastic.core.cluster import Job
from slurm_elastic.slurm.readers.job_parser import JobParser
from slurm_elastic.slurm.readers.kept_submissions import KeptSubmission
from tests.unit.slurm.readers.test_pyslurm_records import Raw

RECORD = '{"at":90,"elastic":"2-4","shape":{"nice":7},"v":1}'


def read(parser: JobParser, **fields: Any) -> Job:
    return parser.jobs([Raw(**fields)])[7]


@pytest.fixture
def parser() -> JobParser:
    """Return a parser that has read the record of job 7."""
    parser = JobParser()
    assert not read(parser, admin_comment=RECORD).record_replaced
    return parser


@pytest.mark.parametrize("text", ["JS1:H4sI", "", None, '{"elastic":"', RECORD.replace("1}", "9}")])
def test_a_job_stays_elastic_whatever_is_written_over_its_record(
    parser: JobParser, text: str | None
) -> None:
    with capture_logs() as log:
        for run, submitted in ((0, 100), (1, 150), (2, 150)):
            job = read(
                parser, admin_comment=text, comment="elastic:1-9", requeue_count=run,
                submit_time=submitted,
            )  # fmt: skip
            assert (job.elastic, job.record_replaced, job.key) == (True, True, "7@90")
            assert str(job.directive) == "2-4", "the owner's comment does not count"
    assert [row["event"] for row in log] == ["JobId=7 AdminComment=replaced Directive=kept"]
    ended = read(parser, admin_comment=text, requeue_count=2, submit_time=150, state="COMPLETED")
    assert ended.key == "7@90"
    assert not read(parser, admin_comment=RECORD, requeue_count=3, submit_time=200).record_replaced


@pytest.mark.parametrize(
    "other",
    [
        {"user_id": 1001},
        {"submit_time": 101},
        {"submit_time": 99, "requeue_count": 1},
        {"user_id": 1001, "requeue_count": 1, "submit_time": 150},
    ],
)
def test_a_job_that_has_got_the_id_of_another_is_not_made_elastic(
    parser: JobParser, other: dict[str, Any]
) -> None:
    job = read(parser, admin_comment="JS1:H4sI", **other)
    assert (job.submission, job.record_replaced) == (None, False)
    later = {**other, "requeue_count": 5, "submit_time": 200, "admin_comment": ""}
    assert read(parser, **later).submission is None, "nor by a requeue of its own"


def test_a_submission_is_forgotten_with_its_job(parser: JobParser) -> None:
    parser.jobs([Raw(id=8)])
    assert read(parser, admin_comment="JS1:H4sI").submission is None


def test_a_job_that_got_the_id_while_no_controller_ran_is_not_made_elastic(
    parser: JobParser,
) -> None:
    """Another one of the same user, requeued as well, after slurmctld has lost its state."""
    kept = KeptSubmission.of(read(parser, admin_comment=RECORD, name="train"))
    assert kept is not None
    later = {"requeue_count": 1, "submit_time": 900, "admin_comment": "JS1:H4sI"}
    for name, elastic in (("other", False), ("train", True)):
        restarted = JobParser()
        restarted.kept = {7: kept}
        assert read(restarted, name=name, **later).elastic is elastic
    assert read(restarted, name="renamed by its owner", **later).elastic


def test_the_ledger_has_what_is_needed(parser: JobParser) -> None:
    kept = KeptSubmission.of(read(parser, admin_comment=RECORD))
    assert kept is not None
    assert KeptSubmission.from_body(kept.to_body()) == kept
    assert KeptSubmission.of(read(parser, comment="elastic:2-4", id=7, submit_time=300)) is None


@pytest.mark.parametrize(
    "damage", [{"record": "x"}, {"record": RECORD[:20]}, {"uid": None}, {"submit_time": "y"}]
)
def test_rubbish_in_the_ledger_is_left_out(damage: dict[str, Any]) -> None:
    body = {"uid": 1000, "run": 0, "submit_time": 100.0, "record": RECORD}
    assert KeptSubmission.from_body(body) is not None
    assert KeptSubmission.from_body(body | damage) is None
    assert KeptSubmission.from_body(None) is None
