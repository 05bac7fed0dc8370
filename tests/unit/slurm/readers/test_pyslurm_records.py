"""Jobs from records of pyslurm: a record is parsed again when any of its fields has changed."""

from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from slurm_elastic.core.cluster import Allocation, JobState
from slurm_elastic.slurm.readers import json_records, pyslurm_records
from slurm_elastic.slurm.readers.job_parser import JobParser


def tres(gpus: int, nodes: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        gres={"gpu": SimpleNamespace(count=gpus)}, node=SimpleNamespace(count=nodes)
    )


class Raw:
    """A record that keeps which of its fields were read."""

    def __init__(self, **fields: Any) -> None:
        self.seen: set[str] = set()
        known = dict.fromkeys(pyslurm_records.COMPARED) | {
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
        gpus = {"gpu:a100": {"count": 2, "indexes": "0-1"}}
        return {"g1": {"gres": self.fields.get("held", gpus), "memory": 100}}


@pytest.fixture
def parser() -> JobParser:
    return JobParser()


#: Not in `COMPARED`: names belong to the uid; resources are in the mark where they can change.
BESIDES = {"user_name", "requested_tres"}


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETED", "CONFIGURING"])
@pytest.mark.parametrize("comment", ["", '{"slurm-elastic":1}', "elastic:1-4"])
def test_nothing_that_a_job_is_made_from_is_missing_in_its_mark(state, comment):
    raw = Raw(state=state, comment=comment, memory_per_cpu=100, array_id=7)
    assert JobParser().job(raw).job_id == 7
    assert raw.seen - BESIDES <= set(pyslurm_records.COMPARED)


def test_a_record_that_says_the_same_is_the_same_job(parser):
    assert parser.job(Raw()) is parser.job(Raw())
    assert parser.job(Raw(state="RUNNING")) is parser.job(Raw(state="RUNNING"))


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
def test_one_that_says_something_else_is_read_anew(parser, change):
    before = parser.job(Raw())
    after = parser.job(Raw(**change))
    assert after is not before
    assert after == JobParser().job(Raw(**change))


def test_a_running_job_that_lost_nodes_is_read_anew(parser):
    fields = {"state": "RUNNING", "allocated_nodes": "g[1-2]"}
    assert parser.job(Raw(**fields)) is not parser.job(Raw(**fields | {"allocated_nodes": "g1"}))


def test_a_begin_time_passes_without_the_record_changing(parser, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 500.0)
    assert parser.job(Raw(eligible_time=600)).begin_time == 600
    monkeypatch.setattr("time.time", lambda: 700.0)
    assert parser.job(Raw(eligible_time=600)).begin_time is None


def test_what_makes_no_sense_is_never_taken_from_memory(parser):
    good = parser.job(Raw())
    assert good.managed
    bad = parser.job(Raw(state="RUNNING", submit_time="?"))
    assert (bad.state, bad.managed) == (JobState.RUNNING, False)
    assert parser.job(Raw()) is good
    assert parser.job(Raw(state="RUNNING")).managed


@pytest.mark.parametrize(
    ("state", "fields", "code"),
    [
        ("COMPLETED", {"exit_code": 0}, 0),
        ("FAILED", {"exit_code": 3}, 3),
        ("FAILED", {"exit_code": 0, "exit_code_signal": 9}, 137),
        ("TIMEOUT", {}, 0),
        ("NODE_FAIL", {"exit_code": 1}, 1),
    ],
)
def test_how_a_job_ended(parser, state, fields, code):
    job = parser.job(Raw(state=state, end_time=200, **fields))
    assert (job.state, job.end_state, job.exit_code) == (JobState.ENDED, state, code)
    assert job.end_time == 200.0


def test_a_job_that_has_not_ended_has_no_end(parser):
    assert parser.job(Raw(state="RUNNING")).end_state == ""


@pytest.mark.parametrize(
    ("counted", "per_node", "expected"),
    [
        ({"gpu": 4, "gpu:a100": 4}, {"gres/gpu:a100": 2}, (4, "a100")),
        # AccountingStorageTRES=gres/gpu: Slurm counts GPUs without their types.
        ({"gpu": 4}, {"gres/gpu:a100": 2}, (4, "a100")),
        ({"gpu": 4}, {"gres/gpu": 2}, (4, "")),
        ({"gpu": 4}, {}, (4, "")),
        ({"gpu": 4}, {"gres/gpu:a100": 1, "gres/gpu:v100": 1}, (4, "")),
        # No accounting.
        ({}, {"gres/gpu:a100": 2}, (2, "a100")),
    ],
)
def test_type_of_the_requested_gpus(counted, per_node, expected):
    gres = {name: SimpleNamespace(count=count) for name, count in counted.items()}
    raw = Raw(gres_per_node=per_node)
    assert pyslurm_records.requested_gpus(raw, SimpleNamespace(gres=gres)) == expected


@pytest.mark.parametrize(
    ("reason", "gpus"),
    [("Resources", (2, "a100")), ("Priority", (0, "")), ("JobHeldUser", (0, ""))],
)
def test_a_job_that_waits_for_parts_of_gpus_waits_for_whole_ones(parser, reason, gpus):
    wants = SimpleNamespace(gres={"shard": SimpleNamespace(count=2)}, node=SimpleNamespace(count=2))
    fields = {"gres_per_node": {"gres/shard:a100": 1}, "state_reason": reason}
    job = parser.job(Raw(requested_tres=wants, **fields))
    assert (job.gpus, job.gpu_type) == gpus


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        ("launch failed requeued held", "launch_failed_requeued_held"),
        ("user env retrieval failed requeued held", "launch_failed_requeued_held"),
        ("job requeued in held state", "JobHeldUser"),
        ("launch failure limit exceeded requeued held",) * 2,
    ],
)
def test_what_slurm_writes_in_place_of_the_reason_of_a_hold(parser, described, reason):
    assert parser.job(Raw(state_reason=described)).reason == reason


def test_a_job_that_holds_parts_of_gpus_holds_no_gpu(parser):
    raw = Raw(state="RUNNING", held={"shard": 1}, requested_tres=None)  # as pyslurm writes them
    job = parser.job(raw)
    assert (job.managed, job.allocation, job.gpus, job.devices) == (True, None, 0, ())
    assert job.parts == (("g1", -1),)


@pytest.mark.parametrize(
    ("gres_used", "used", "shared"),
    [
        ("gpu:a100:0(IDX:N/A),shard:a100:0(0/2,0/2,0/2,0/2)", 0, ()),
        ("gpu:a100:0(IDX:N/A),shard:a100:3(2/2,1/2,0/2,0/2)", 2, (0, 1)),
        ("gpu:a100:2(IDX:0,3),shard:a100:10(0/10,10/10,0/10,0/10)", 3, (1,)),
        ("gpu:a100:2(IDX:0,3),shard:a100:1(-/2,1/2,0/2,-/2)", 3, (1,)),  # 26.05
        ("mps:a100:50(0/100,50/100),gpu:a100:0(IDX:N/A)", 1, (1,)),
    ],
)
def test_gpus_of_which_jobs_hold_parts_are_in_use(gres_used, used, shared):
    held = 2 if "IDX:0,3" in gres_used else 0
    raw = json_records.node_of(
        {"name": "g1", "state": ["IDLE"], "gres": "gpu:a100:4,shard:a100:8", "gres_used": gres_used}
    )
    node = pyslurm_records.node(raw, held, barred=False)
    assert (node.used_gpus, node.shared_gpus, node.free_gpus) == (used, shared, 4 - used)
    assert node.shards == 2


@pytest.mark.parametrize("second", ["gpu:v100:2", "gpu:1g.10gb:2"])
def test_a_node_with_several_gpu_types_has_none_for_elastic_jobs(second):
    gres = f"gpu:a100:2(S:0),{second}(S:0)"
    raw = json_records.node_of({"name": "g1", "state": ["IDLE"], "gres": gres})
    node = pyslurm_records.node(raw, 0, barred=False)
    assert (node.gpu_type, node.gpus, node.unmanaged_gpus, node.free_gpus) == ("", 0, 4, 0)


def test_a_node_with_slices_of_gpus_has_none_for_elastic_jobs():
    raw = json_records.node_of({"name": "g1", "state": ["IDLE"], "gres": "gpu:1g.10gb:7(S:0)"})
    node = pyslurm_records.node(raw, 2, barred=False)
    assert (node.gpu_type, node.gpus, node.unmanaged_gpus, node.free_gpus) == ("", 0, 7, 0)


def test_a_job_holds_the_type_that_it_got_on_a_node_with_several(parser):
    """Slurm also lists the types of which it holds none."""
    held = json_records.gres_of("gpu:a100:1(IDX:1),gpu:v100:0(IDX:)")
    job = parser.job(Raw(state="RUNNING", held=held))
    assert job.allocation == Allocation.of("a100", {"g1": 1})
    assert job.devices == (("g1", "1"),)


def test_gpus_that_differ_in_their_shards_are_not_divided():
    shards = "shard:a100:0(1/1,0/3)"
    raw = json_records.node_of(
        {"name": "g1", "state": ["IDLE"], "gres": "gpu:a100:2,shard:a100:4", "gres_used": shards}
    )
    assert pyslurm_records.node(raw, 0, barred=False).shards == 0


@pytest.mark.parametrize(("jobs", "used"), [(0, 1), (2, 3), (8, 4)])
def test_where_the_shared_gpus_are_not_known_each_job_has_another_one(jobs, used):
    fields = dict.fromkeys(("real_memory", "allocated_cpus", "allocated_memory"), 0)
    raw = SimpleNamespace(
        name="g1", state="IDLE", partitions=(), active_features=("x",), effective_cpus=1,
        configured_gres={"gpu:a100": 4, "shard:a100": 8}, allocated_gres={"gpu": 1}, **fields,
    )  # fmt: skip
    node = pyslurm_records.node(raw, 1, sharing_jobs=jobs, barred=False)
    assert (node.used_gpus, node.shared_gpus) == (used, ())


def test_a_record_of_which_nothing_can_be_read_is_logged_once(parser):
    with capture_logs() as lines:
        for _ in range(3):
            assert parser.jobs([Raw(state="RUNNING", held=5)]) == {}
    assert len(lines) == 1


RECORD = '{"elastic":"1,share=yes","shape":{"time_limit":10},"v":1}'


@pytest.mark.parametrize(
    ("held", "comment", "half"),
    [
        ("shard:2(0/4,2/4)", RECORD, True),
        ("shard:1(0/4,1/4)", RECORD, False),  # by hand
        ("shard:2(0/4,2/4)", "", False),
        ("shard:2(0/4,2/4)", RECORD.replace("time_limit", "min_nodes"), True),
        ("shard:2(0/4,2/4)", RECORD.replace('"time_limit":10', ""), False),  # not recorded
        (
            "shard:2(0/4,2/4)",
            RECORD.replace('"time_limit":10', '"tres_per_node":"gres/shard:2"'),  # its user's
            False,
        ),
    ],
)
def test_an_elastic_job_holds_half_of_a_gpu(parser, held, comment, half):
    parser.gpu_types = {"g1": "a100"}
    gres = json_records.gres_of(held)
    job = parser.job(Raw(state="RUNNING", held=gres, admin_comment=comment, requested_tres=None))
    expected = Allocation.of("a100", {"g1": 1}, half=True) if half else None
    assert (job.allocation, job.parts) == (expected, (("g1", 1),))
    assert job.gpus == half


def test_an_elastic_job_that_waits_for_half_of_a_gpu_waits_for_one(parser):
    fields = {"gres_per_node": {"shard": 2}, "requested_tres": None, "state_reason": "BeginTime"}
    job = parser.job(Raw(admin_comment=RECORD, **fields))
    assert (job.gpus, job.shards) == (1, 2)
    assert parser.job(Raw(id=8, **fields)).shards == 0
