"""Workloads from CSV, and errors of invalid rows."""

import doctest

import pytest

from slurm_elastic.core.application import JobClass
from slurm_elastic.simulator.workloads import cluster_text, workload
from slurm_elastic.simulator.workloads.cluster_text import ClusterError
from slurm_elastic.simulator.workloads.workload import WorkloadError

HEAD = "name,time,application,num_replicas,batch_size"


def read(tmp_path, *rows, head=HEAD, applications=None):
    path = tmp_path / "jobs.csv"
    path.write_text("\n".join([head, *rows]) + "\n")
    return workload.read(path, applications=applications)


def test_rows_are_sorted_by_submission(tmp_path):
    parsed = read(tmp_path, "b-1,7.5,b,4,64", "", "a-0,3,a,1,16")
    assert parsed.name == "jobs"
    assert [(j.name, j.time_s, j.gpus, j.batch) for j in parsed.jobs] == [
        ("a-0", 3.0, 1, 16),
        ("b-1", 7.5, 4, 64),
    ]
    assert parsed.jobs[1].source == "jobs.csv:2"
    assert parsed.applications == ("a", "b")


def test_classes(tmp_path):
    kinds = ["", "adaptive", "scale-gpus", "strong-scaling", "rigid"]
    rows = [f"a-{i},0,a,1,8,{kind}" for i, kind in enumerate(kinds)]
    parsed = read(tmp_path, *rows, head=HEAD + ",category")
    fixed = JobClass.STRONG_SCALING
    expected = [JobClass.ADAPTIVE, JobClass.ADAPTIVE, fixed, fixed, JobClass.RIGID]
    assert [j.job_class for j in parsed.jobs] == expected
    assert {j.job_class for j in parsed.forced(JobClass.RIGID).jobs} == {JobClass.RIGID}
    assert parsed.forced(None) is parsed


def test_sizes_that_a_script_can_run_on(tmp_path):
    head = HEAD + ",category,sizes"
    parsed = read(tmp_path, "a-0,0,a,1,8,,4:1:2", "a-1,1,a,1,8,rigid,", head=head)
    assert [j.listed for j in parsed.jobs] == [(1, 2, 4), ()]
    for text, reason in (
        ("1:x", 'sizes "x" is not a number of GPUs; write sizes=1:2:4'),
        ("0", "sizes 0 is outside 1-65536; write a number in between"),
        ("2:2", "sizes: 2 is listed twice; keep one"),
        ("1;notice=3", 'sizes "1;notice=3" is not a number of GPUs'),
    ):
        with pytest.raises(WorkloadError, match=f"jobs.csv:2: {reason}"):
            read(tmp_path, f"a-0,0,a,1,8,,{text}", head=head)
    with pytest.raises(WorkloadError, match=r"jobs.csv:2: sizes '1,notice=3' is invalid"):
        read(tmp_path, 'a-0,0,a,1,8,,"1,notice=3"', head=head)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a-0,-1,a,1,8", r"jobs.csv:2: time '-1' is invalid: expected seconds from 0 on"),
        ("a-0,nan,a,1,8", r"jobs.csv:2: time 'nan' is invalid"),
        ("a-0,soon,a,1,8", r"jobs.csv:2: time 'soon' is invalid"),
        ("a-0,0,a,0,8", r"jobs.csv:2: num_replicas '0' is invalid: expected a whole number from 1"),
        ("a-0,0,a,1.5,8", r"jobs.csv:2: num_replicas '1.5' is invalid"),
        ("a-0,0,a,1,inf", r"jobs.csv:2: batch_size 'inf' is invalid"),
        ("a-0,0,a,1", r"jobs.csv:2: 4 cells under 5 columns"),
        (",0,a,1,8", r"jobs.csv:2: name '' is invalid"),
        ("a-0,0,,1,8", r"jobs.csv:2: application is empty"),
        ("x-0,0,x,1,8", r"jobs.csv:2: application x of x-0 has no profile; known: a, b; add its"),
    ],
)
def test_bad_rows_name_their_line(tmp_path, row, message):
    with pytest.raises(WorkloadError, match=message):
        read(tmp_path, row, applications=("a", "b"))


def test_names_are_unique(tmp_path):
    with pytest.raises(WorkloadError, match=r"jobs.csv:3: name a-0 occurs also in line 2"):
        read(tmp_path, "a-0,0,a,1,8", "a-0,1,a,1,8")


def test_unknown_category(tmp_path):
    with pytest.raises(
        WorkloadError, match=r"jobs.csv:2: category odd is unknown; known: scale-gpus, ad"
    ):
        read(tmp_path, "a-0,0,a,1,8,odd", head=HEAD + ",category")


def test_missing_column_empty_and_absent_files(tmp_path):
    with pytest.raises(WorkloadError, match=r"jobs.csv:1: column batch_size is missing"):
        read(tmp_path, head="name,time,application,num_replicas")
    with pytest.raises(WorkloadError, match=r"jobs.csv: has no job"):
        read(tmp_path)
    with pytest.raises(WorkloadError, match=r"absent.csv: No such file"):
        workload.read(tmp_path / "absent.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkloadError, match=r"binary.csv: is not UTF-8 text"):
        workload.read(tmp_path / "binary.csv")


def test_clusters_in_words():
    cluster = cluster_text.parse("aws:6x4, dgx-ext:2x8")
    assert str(cluster) == "aws:6x4,dgx-ext:2x8"
    assert cluster.gpus == 40
    assert cluster.types == ("aws", "dgx-ext")
    nodes = cluster.nodes()
    assert [n.name for n in nodes[5:7]] == ["aws-0006", "dgx-ext-0001"]
    assert [n.gpus for n in nodes[5:7]] == [4, 8]
    assert not doctest.testmod(cluster_text).failed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an empty part cannot be read; write TYPE:NODESxGPUS"),
        ("aws", "aws cannot be read"),
        ("aws:6x4,", "an empty part cannot be read"),
        ("aws:0x4", "aws:0x4 has no GPU"),
        ("aws:6x-4", "aws:6x-4 cannot be read"),
        ("aws:6x4,aws:2x8", "type aws is given twice"),
        ("aws:999999x4", "aws:999999x4 is beyond 100000 nodes"),
    ],
)
def test_impossible_clusters(text, message):
    with pytest.raises(ClusterError, match=message) as error:
        cluster_text.parse(text)
    assert "\n" not in str(error.value)
