"""`selastic workload`: what it writes can be simulated."""

import csv
import io
from pathlib import Path

import pytest

from slurm_elastic.simulator.workloads import application_profiles, curve_jobs, workload
from tests.support import published_data

TOP = Path(__file__).parents[3]
WEEK = TOP / "tests" / "data" / "sacct-week.txt"


def test_generate(run, tmp_path):
    arguments = (
        "--jobs", "50", "--hours", "2", "--arrivals", "bursts", "--mix", "bertbase=1,resnet18=3",
        "--sizes", "2=1,4=1", "--classes", "rigid=1,strong-scaling=1", "--seed", "3",
    )  # fmt: skip
    code, out, err = run("workload", "generate", *arguments)
    assert (code, err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 50
    assert {r["application"] for r in rows} == {"bertbase", "resnet18"}
    assert {r["num_replicas"] for r in rows} == {"2", "4"}
    assert {r["category"] for r in rows} == {"rigid", "scale-gpus"}
    path = tmp_path / "w.csv"
    assert run("workload", "generate", *arguments, "-o", path)[0] == 0
    assert path.read_text() == out
    assert len(workload.read(path).jobs) == 50


def test_generate_for_a_foreign_set(run, tmp_path):
    folder = tmp_path / "set"
    assert run("workload", "profiles", folder)[0] == 0
    assert application_profiles.applications(folder) == (
        "bertbase",
        "gptmedium",
        "resnet18",
        "resnet50",
    )
    code, out, _ = run("workload", "generate", "--profiles", folder, "--jobs", "200")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert len({r["application"] for r in rows}) == 4


def test_generate_for_published_profiles(run):
    sia = published_data.require("sia", "traces")
    code, out, err = run("workload", "generate", "--profiles", sia / "traces", "--jobs", "100")
    assert code == 0, err
    assert "cifar10" in out


def test_from_sacct(run, tmp_path):
    path = tmp_path / "week.csv"
    code, out, err = run("workload", "from-sacct", WEEK, "--scaling", "linear", "-o", path)
    assert (code, out) == (0, "")
    assert err.startswith("sacct-week.txt: 78 GPU jobs taken; left out: ")
    assert curve_jobs.has_curves(path)
    name, jobs = curve_jobs.read(path)
    assert (name, len(jobs)) == ("week", 78)
    assert all(j.submitted.most == 4 * j.submitted.gpus for j in jobs)
    code, out, _ = run("workload", "from-sacct", WEEK, "--grow", "1", "--completed-only")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 63
    assert all(r["most"] == r["num_replicas"] for r in rows)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("generate", "--mix", "foo=1"), "--mix: foo has no profile; known: bertbase"),
        (("generate", "--mix", "resnet18=-1"), "expected NAME=NUMBER"),
        (("generate", "--mix", "resnet18=0"), "not all of them 0"),
        (("generate", "--sizes", "two=1"), '--sizes: "two" is invalid: expected GPUs from 1'),
        (("generate", "--classes", "soft=1"), '--classes: "soft" is unknown'),
        (("generate", "--jobs", "0"), "--jobs"),
        (("generate", "--hours", "x"), "--hours"),
        (("generate", "--arrivals", "never"), "--arrivals"),
        (("generate", "--profiles", "/nowhere"), "/nowhere: No such file"),
        (("generate", "-o", "/nowhere/x"), "--output: /nowhere/x: No such file"),
        (("from-sacct", "/nowhere"), "/nowhere: No such file"),
        (("from-sacct", WEEK, "--scaling", "amdahl:2"), "from 0 to 1"),
        (("from-sacct", WEEK, "--scaling", "curves.csv"), "no such file, and no curve"),
        (("from-sacct", WEEK, "--speeds", "a100=fast"), "--speeds"),
        (("profiles", "/proc/nowhere"), "/proc/nowhere"),
    ],
)
def test_bad_input_is_one_line(run, words, expected):
    code, out, err = run("workload", *words)
    assert code == 2
    assert out == ""
    assert err.startswith("selastic: ")
    assert err.count("\n") == 1
    assert expected in err


def test_from_sacct_of_a_part_of_a_trace(run, tmp_path):
    path = tmp_path / "pods.csv"
    path.write_text(
        "name,num_gpu,gpu_milli,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
        "a,8,1000,LS,Succeeded,100,4000,200\n"
        "b,8,1000,BE,Succeeded,100,4000,200\n"
        "c,8,1000,LS,Succeeded,500,4000,600\n"
    )
    code, out, err = run(
        "workload", "from-sacct", path, "-S", "50", "-E", "500", "--partition", "LS"
    )
    assert code == 0, err
    assert [row["name"] for row in csv.DictReader(io.StringIO(out))] == ["a"]
    assert "1 of other partitions, 1 submitted outside of the period" in err
    for options, words in (
        (("--partition", "gpu"), "3 of other partitions); its partitions: BE, LS"),
        (("-S", "500", "-E", "50"), "--end: 50 is not after --start 500"),
        (("-S", "soon"), '--start: "soon" is invalid: expected a time such as'),
    ):
        code, out, err = run("workload", "from-sacct", path, *options, "-o", tmp_path / "none.csv")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err
    assert not (tmp_path / "none.csv").exists()
    week = run("workload", "from-sacct", WEEK, "--partition", "gpu")[2]
    assert "the file names no partitions: add Partition to sacct's -o" in week
