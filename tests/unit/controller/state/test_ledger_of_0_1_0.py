"""A ledger that slurm-elastic 0.1.0 wrote on the container cluster, read by this version.

The controller was killed while job 13 grew from 2 to 3 GPUs; job 12 ran on four a100 under the
policy `sia`, and the jobs 5 to 7 had ended.
"""

import sqlite3
from pathlib import Path

import pytest

from slurm_elastic.cli.reason_text import text as reason_text
from slurm_elastic.config import schema
from slurm_elastic.config.schema import Config
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.state.transition import Transition, TransitionState
from slurm_elastic.controller.transitions.transition_engine import TransitionEngine
from slurm_elastic.core.cluster import Allocation, JobState, Node, Snapshot
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.plan import Action
from slurm_elastic.core.submission import Submission
from tests.support.controller.job_records import FakeScontrol, Log, job

SQL = Path(__file__).parents[3] / "data" / "ledger-0.1.0.sql"
SUBMITTED = 1795372238
NOW = SUBMITTED + 90


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with sqlite3.connect(path) as db:
        db.executescript(SQL.read_text("utf-8"))
    return path


@pytest.fixture
def ledger(path):
    opened = Ledger(path)
    yield opened
    opened.close()


@pytest.fixture
def store(ledger):
    return JobStore(ledger, schema.parse('[controller]\npolicy = "sia"'))


def running(job_id, name, directive, shares):
    return job(
        shares,
        job_id=job_id,
        display_id=str(job_id),
        name=name,
        state=JobState.RUNNING,
        submission=Submission(Directive.parse(directive), {}, "", SUBMITTED),
    )


@pytest.fixture
def jobs():
    return {
        12: running(12, "old1", "1-8,batch=64-256", {"g02": 4}),
        13: running(13, "old2", "1-4", {"g01": 2}),
    }


@pytest.fixture
def records(store, jobs):
    nodes = tuple(Node(name=name, gpu_type="a100", gpus=4) for name in ("g01", "g02"))
    return store.records(Snapshot(time=NOW, nodes=nodes, jobs=tuple(jobs.values())), {})


def test_what_a_running_job_has_measured_is_kept(records):
    by_gpus = {m.gpus: m.samples_per_s for m in records[12].measurements}
    assert by_gpus == pytest.approx({2: 1278.894983575906, 4: 2566.2162225445486})
    assert records[12].proven
    assert records[12].progress == pytest.approx(0.145)
    assert records[12].restart_s == pytest.approx(6.488831043243408)


def test_the_model_is_fitted_to_the_same_observations(records):
    learned = records[12].learned
    assert {(o.gpus, o.micro_batch) for o in learned.observations} == {(2, 32), (4, 32), (4, 64)}
    assert learned.application.initial_batch == 64


def test_a_directive_that_was_updated_stays_in_force(store, jobs):
    assert str(store.allowed_directive(jobs[13])) == "3-4"


def test_an_open_transition_goes_on_where_it_was(ledger):
    engine = TransitionEngine(
        ledger=ledger, scontrol=FakeScontrol(), config=Config(), account="selastic", log=Log()
    )
    transition = engine.live[13]
    assert transition.state is TransitionState.RESHAPE
    assert transition.action is Action.GROW
    assert transition.target == Allocation.of("a100", {"g01": 3})


def test_history_and_usage_reach_back(ledger):
    assert [body["action"] for body in ledger.transitions(5)] == [
        "grow", "shrink", "preempt", "start",
    ]  # fmt: skip
    finished = [s for s in ledger.segments() if s["end"] is not None]
    assert sum(s["gpus"] * (s["end"] - s["start"]) for s in finished if s["job_id"] == 5) == 372.0
    assert ledger.since() == 1795371885


def test_its_sentences_are_reasons_of_the_code_text(ledger):
    changes = [Transition.from_body(body) for body in ledger.transitions()]
    assert {t.reason.code for t in changes} == {"text"}
    assert not any(t.given_up for t in changes)
    assert "is its MIN" in reason_text(changes[6].reason.to_json())
