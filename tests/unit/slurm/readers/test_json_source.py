"""Jobs, nodes and reservations from the JSON and text that Slurm's commands print."""

import json
import stat
import textwrap
from pathlib import Path

import pytest

from slurm_elastic.core.cluster import Allocation, JobState
from slurm_elastic.slurm.readers import cluster_reader
from slurm_elastic.slurm.readers.cluster_reader import ClusterReader, ReaderChoice
from slurm_elastic.slurm.readers.json_records import JobJson, gres_of
from slurm_elastic.slurm.readers.json_source import JsonSource
from slurm_elastic.slurm.release_rules import Release
from slurm_elastic.slurm.scontrol import SlurmUnreachableError


def number(value, *, infinite=False):
    return {"set": not infinite, "infinite": infinite, "number": value}


def job(**changed):
    fields = {
        "job_id": 7, "job_state": ["RUNNING"], "name": "net", "user_id": 1000, "user_name": "alice",
        "partition": "gpu", "account": "a", "qos": "normal", "state_reason": "None",
        "memory_per_node": number(200),
        "state_description": "", "priority": number(100), "nice": 0, "batch_flag": True,
        "requeue": True, "restart_cnt": 1, "submit_time": number(100), "start_time": number(200),
        "end_time": number(4_000_000_000), "eligible_time": number(100), "time_limit": number(60),
        "cpus": number(2), "node_count": number(1), "nodes": "g01", "required_nodes": "",
        "excluded_nodes": "", "features": "", "resv_name": "", "dependency": "", "comment": "",
        "admin_comment": "", "extra": "", "tres_per_node": "gres/gpu:a100:2",
        "tres_req_str": "cpu=2,mem=100M,node=1,billing=2,gres/gpu=2,gres/gpu:a100=2",
        "gres_detail": ["gpu:a100:2(IDX:0,3)"], "array_job_id": number(0),
        "array_task_id": number(0, infinite=True), "array_task_string": "", "het_job_id": number(0),
        "exit_code": {"return_code": number(0), "signal": {"id": number(0, infinite=True)}},
        "job_resources": {"nodes": {"allocation": [
            {"name": "g01", "memory": {"allocated": 200}, "cpus": {"count": 2}}]}},
    }  # fmt: skip
    return fields | changed


NODE = {
    "name": "g01", "state": ["MIXED", "PLANNED"], "gres": "gpu:a100:4(S:0)", "cpus": 8,
    "effective_cpus": 8, "real_memory": 8000, "alloc_cpus": 2, "alloc_memory": 200,
    "tres_used": "cpu=2,mem=200M,gres/gpu=2,gres/gpu:a100=2", "partitions": ["gpu"],
    "features": ["x"], "active_features": ["x"],
}  # fmt: skip
PARTITION = (
    "PartitionName=gpu QoS=N/A DefaultTime=NONE ExclusiveUser=YES MaxNodes=2 MaxTime=UNLIMITED "
    "MinNodes=0 MaxCPUsPerNode=8 Nodes=g[01-02] PriorityTier=1 State=UP "
    "JobDefaults=DefCpuPerGPU=3,DefMemPerGPU=2500 MaxMemPerNode=4000\n"
)
RESERVATION = (
    "ReservationName=foreign StartTime=100 EndTime=4000000000 Duration=1-00:00:00 Nodes=g02 "
    "NodeCnt=1 CoreCnt=8 Features=(null) PartitionName=(null) Flags=SPEC_NODES TRES=cpu=8 "
    "Users=bob,carol Groups=(null) Accounts=(null) Licenses=(null) State=ACTIVE "
    "BurstBuffer=(null) MaxStartDelay=(null) Comment=for a b=c\n"
)


class Site:
    """Commands of Slurm on PATH that print given files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs([job()])
        self.write("nodes", json.dumps({"nodes": [NODE]}))
        self.write("partitions", PARTITION)
        self.write("reservation", RESERVATION)
        script = f"""\
            #!/bin/sh
            cd {folder}
            case "$0 $*" in
            *--all*--only-job-state*) echo "squeue: fatal: works alone" >&2; exit 1;;
            *squeue*) f=jobs;; *nodes*) f=nodes;; *partitions*) f=partitions;; *) f=reservation;;
            esac
            test -e failure && {{ cat failure >&2; exit 1; }}
            exec cat $f
            """
        for name in ("squeue", "scontrol"):
            path = folder / name
            path.write_text(textwrap.dedent(script))
            path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def write(self, name, content):
        octets = content if isinstance(content, bytes) else content.encode()
        (self.folder / name).write_bytes(octets)

    def jobs(self, rows):
        self.write("jobs", json.dumps({"jobs": rows}))


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Site(tmp_path)


@pytest.fixture
def reader(site):
    return ClusterReader(JsonSource(Release(25, 11, 7)), reservation_prefix="selastic_")


def test_a_snapshot(reader):
    snapshot = reader.snapshot()
    (row,) = snapshot.jobs
    assert (row.job_id, row.display_id, row.user, row.state) == (7, "7", "alice", JobState.RUNNING)
    assert row.allocation == Allocation.of("a100", {"g01": 2})
    assert (row.devices, row.memory_per_gpu_mb) == ((("g01", "0,3"),), 100.0)
    assert (row.time_limit_s, row.run, row.start_time) == (3600, 1, 200.0)
    (node,) = snapshot.nodes
    assert (node.gpu_type, node.gpus, node.used_gpus, node.planned) == ("a100", 4, 2, True)
    (partition,) = snapshot.partitions
    assert (partition.nodes, partition.max_time_s, partition.max_nodes) == (("g01", "g02"), None, 2)
    assert (partition.max_cpus_per_node, partition.max_memory_per_node_mb) == (8, 4000)
    assert (partition.min_nodes, partition.exclusive_user, partition.tier) == (1, True, 1)
    (reservation,) = snapshot.reservations
    assert (reservation.nodes, reservation.users) == (("g02",), ("bob", "carol"))
    assert (reservation.comment, reservation.ours) == ("for a b=c", False)


def test_resources_are_read_in_the_form_of_23_11(reader, site):
    resources = {"nodes": "g01", "allocated_nodes": [{"nodename": "g01", "memory_allocated": 200}]}
    site.jobs([job(job_resources=resources)])
    assert reader.jobs()[7].memory_per_gpu_mb == 100.0


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"array_job_id": number(5), "array_task_id": number(0)}, "5_0"),
        ({"array_job_id": number(5), "array_task_string": "2-5%2"}, "5_[2-5]"),
        ({"array_job_id": 0}, "7"),
    ],
)
def test_tasks_of_arrays_have_the_names_that_users_type(reader, site, fields, shown):
    site.jobs([job(**fields)])
    assert reader.jobs()[7].display_id == shown


@pytest.mark.parametrize(
    ("words", "state"),
    [
        (["PENDING", "COMPLETING"], JobState.COMPLETING),
        (["RUNNING", "CONFIGURING"], JobState.RUNNING),
        (["PENDING", "REQUEUE_HOLD"], JobState.PENDING),
        (["SUSPENDED"], JobState.SUSPENDED),
        (["COMPLETED"], JobState.ENDED),
        (["FAILED", "LAUNCH_FAILED"], JobState.ENDED),
    ],
)
def test_a_flag_comes_before_the_state_of_a_job(reader, site, words, state):
    site.jobs([job(job_state=words)])
    assert reader.jobs()[7].state is state


def test_text_that_is_not_utf_8_reads_as_empty_and_harms_no_other_job(reader, site):
    content = json.dumps({"jobs": [job(name="bad"), job(job_id=8, name="good")]}).encode()
    site.write("jobs", content.replace(b'"bad"', b'"b\xff\xfed"'))
    jobs = reader.jobs()
    assert (jobs[7].name, jobs[8].name) == ("", "good")
    assert jobs[7].allocation == jobs[8].allocation


def test_a_record_that_is_no_job_is_left_out(reader, site):
    site.jobs([{"job_id": "x"}, job()])
    assert set(reader.jobs()) == {7}


@pytest.mark.parametrize(
    ("patch", "reason"), [((25, 11, 6), "licenses-lost"), ((25, 11, 7), None), ((24, 11, 5), None)]
)
def test_jobs_with_licenses_are_left_alone_where_slurm_loses_them(site, patch, reason):
    release = Release(*patch)
    site.jobs([job(licenses="matlab:1", comment="elastic:1-4")])
    choice = ReaderChoice("json", "", release)
    reader = ClusterReader(JsonSource(release), reservation_prefix="selastic_", choice=choice)
    unmanaged = reader.jobs()[7].unmanaged_reason
    assert (unmanaged.code if unmanaged else None) == reason


def test_only_records_that_have_changed_are_read_anew(reader, site):
    site.jobs([job(), job(job_id=8)])
    first = reader.jobs()
    site.jobs([job(comment="x"), job(job_id=8)])
    second = reader.jobs()
    assert second[8] is first[8]
    assert (first[7].comment, second[7].comment) == ("", "x")


def test_a_job_that_slurm_has_forgotten_is_gone(reader, site):
    site.jobs([job(), job(job_id=8)])
    assert set(reader.jobs()) == {7, 8}
    site.jobs([job(job_id=8)])
    assert set(reader.jobs()) == {8}


def test_one_job_that_slurm_has_forgotten_is_no_failure(reader, site):
    assert set(reader.some_jobs([7])) == {7}
    site.write("failure", "slurm_load_jobs error: Invalid job id specified\n")
    assert reader.some_jobs([8]) == {}


def test_the_pulse_differs_when_a_job_has_ended(reader, site):
    before = reader.pulse()
    assert reader.pulse() == before
    site.jobs([job(job_state=["COMPLETED"])])
    assert reader.pulse() != before


@pytest.mark.parametrize("content", [b"", b"{}", b'{"jobs": 3}', b"squeue: something else"])
def test_an_answer_that_is_no_list_of_jobs_is_no_answer(reader, site, content):
    site.write("jobs", content)
    with pytest.raises(SlurmUnreachableError, match="squeue --json: the answer is invalid"):
        reader.jobs()


def test_a_failure_is_one_line(reader, site):
    site.write("failure", "slurm_load_jobs error:\n Unable to contact slurm controller\n")
    with pytest.raises(SlurmUnreachableError) as failure:
        reader.jobs()
    assert str(failure.value) == (
        "squeue --all --states=all: slurm_load_jobs error: Unable to contact slurm controller"
    )


@pytest.mark.parametrize(
    ("text", "resources"),
    [
        ("gpu:a100:4(S:0-1)", {"gpu:a100": 4}),
        ("gpu:2", {"gpu": 2}),
        ("gres:gpu", {"gpu": 1}),
        ("gres/gpu:a100:3,gres/shard:2", {"gpu:a100": 3, "shard": 2}),
        ("gpu:a100:1(IDX:0,2-3),gpu:v100:2(IDX:1)", {"gpu:a100": 1, "gpu:v100": 2}),
        ("(null)", {}),
        ("", {}),
    ],
)
def test_generic_resources(text, resources):
    assert {k: v["count"] for k, v in gres_of(text).items()} == resources


def test_values_that_mean_none():
    record = JobJson(json.dumps(job(memory_per_cpu=number(2**62), time_limit=None)).encode())
    assert (record.memory_per_cpu, record.time_limit) == (None, None)


def test_cpus_by_a_default_of_the_site_and_jobs_without_a_request_of_memory(reader, site):
    rows = [
        job(memory_per_node=number(0), comment="elastic:1-4"),
        job(job_id=8, memory_per_node=number(0), memory_per_tres="gpu:2500"),
        job(job_id=9, comment="elastic:1-4", partition="other"),
    ]
    site.jobs(rows)
    jobs = reader.jobs()
    # The partition has DefCpuPerGPU.
    assert [jobs[i].cpus_follow_gpus for i in (7, 8, 9)] == [True, False, False]
    assert [jobs[i].takes_all_memory for i in (7, 8, 9)] == [True, False, False]
    assert [jobs[i].memory_per_gpu_mb for i in (7, 8)] == [0.0, 100.0]


def test_memory_that_is_kept_for_the_system_is_not_for_jobs(reader, site):
    site.write("nodes", json.dumps({"nodes": [NODE | {"specialized_memory": 3000}]}))
    (node,) = reader.snapshot().nodes
    assert node.memory_mb == 5000


def test_the_wckey_of_a_job_but_not_the_default(reader, site):
    site.jobs([job(wckey="paper"), job(job_id=8, wckey="*thesis"), job(job_id=9)])
    jobs = reader.jobs()
    assert [jobs[i].wckey for i in (7, 8, 9)] == ["paper", "", ""]


def test_the_cluster_is_read_once_at_the_start_and_anew_later(reader, site, monkeypatch):
    monkeypatch.setattr(cluster_reader, "_JUST_NOW_S", 60.0)
    jobs = reader.jobs()
    site.write("partitions", PARTITION.replace("State=UP", "State=DOWN"))
    site.write("nodes", json.dumps({"nodes": [NODE | {"cpus": 16, "effective_cpus": 16}]}))
    for up, cpus in ((True, 8), (False, 16)):
        snapshot = reader.snapshot(jobs)
        assert ([p.up for p in snapshot.partitions], snapshot.node["g01"].cpus) == ([up], cpus)
