"""Records of pyslurm: what is not read again must not have changed."""

from types import SimpleNamespace
from typing import Any

import pytest

from slurm_elastic.core.cluster import JobState
from slurm_elastic.slurm import pyslurm_records
from slurm_elastic.slurm.pyslurm_reader import Reader


def tres(gpus: int, nodes: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        gres={"gpu": SimpleNamespace(count=gpus)}, node=SimpleNamespace(count=nodes)
    )


class Raw:
    """A record, and which of its fields somebody looked at."""

    def __init__(self, **fields: Any) -> None:
        self.seen: set[str] = set()
        known = dict.fromkeys(pyslurm_records.SAID) | {
            "id": 7,
            "state": "PENDING",
            "user_id": 1000,
            "user_name": "alice",
            "submit_time": 100,
            "num_nodes": 1,
            "is_requeueable": True,
            "is_batch_job": True,
            "requested_tres": tres(2),
        }
        self.fields = known | fields

    def __getattr__(self, name: str) -> Any:
        self.seen.add(name)
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(name) from None

    def get_resource_layout_per_node(self) -> dict[str, Any]:
        return {"g1": {"gres": {"gpu:a100": {"count": 2, "indexes": "0-1"}}, "memory": 100}}


@pytest.fixture
def reader() -> Reader:
    made = Reader.__new__(Reader)  # without a slurmctld
    made._log = SimpleNamespace(error=lambda _: None)
    made._submissions, made._names, made._known, made._unreadable = {}, {}, {}, set()
    return made


#: Besides `SAID`: names are those of the uid, resources are in the mark where they can change.
BESIDES = {"user_name", "requested_tres"}


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETED", "CONFIGURING"])
@pytest.mark.parametrize("comment", ["", '{"slurm-elastic":1}', "elastic:1-4"])
def test_nothing_that_a_job_is_made_from_is_missing_in_its_mark(reader, state, comment):
    raw = Raw(state=state, comment=comment, memory_per_cpu=100, array_id=7)
    assert reader._job(raw).job_id == 7
    assert raw.seen - BESIDES <= set(pyslurm_records.SAID)


def test_a_record_that_says_the_same_is_the_same_job(reader):
    assert reader._read(Raw()) is reader._read(Raw())
    assert reader._read(Raw(state="RUNNING")) is reader._read(Raw(state="RUNNING"))


CHANGES: list[dict[str, Any]] = [
    {"priority": 5},
    {"nice": 3},
    {"comment": "x"},
    {"admin_comment": "x"},
    {"extra": "x"},
    {"required_nodes": "g1"},
    {"excluded_nodes": "g1"},
    {"reservation": "r"},
    {"state_reason": "JobHeldUser"},
    {"requested_tres": tres(4)},
    {"requested_tres": tres(2, nodes=2)},
    {"time_limit": 5},
    {"eligible_time": 4_000_000_000},
    {"requeue_count": 1},
    {"partition": "other"},
    {"state": "RUNNING"},
    {"is_requeueable": False},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_one_that_says_something_else_is_read_anew(reader, change):
    before = reader._read(Raw())
    after = reader._read(Raw(**change))
    assert after is not before
    assert after == reader._job(Raw(**change))


def test_a_running_job_that_lost_nodes_is_read_anew(reader):
    fields = {"state": "RUNNING", "allocated_nodes": "g[1-2]"}
    assert reader._read(Raw(**fields)) is not reader._read(
        Raw(**fields | {"allocated_nodes": "g1"})
    )


def test_a_begin_time_passes_without_the_record_changing(reader, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 500.0)
    assert reader._read(Raw(eligible_time=600)).begin_time == 600
    monkeypatch.setattr("time.time", lambda: 700.0)
    assert reader._read(Raw(eligible_time=600)).begin_time is None


def test_what_makes_no_sense_is_never_taken_from_memory(reader):
    good = reader._read(Raw())
    assert good.managed
    bad = reader._read(Raw(state="RUNNING", submit_time="?"))
    assert (bad.state, bad.managed) == (JobState.RUNNING, False)
    assert reader._known[7][1] is good
    assert reader._read(Raw(state="RUNNING")).managed
