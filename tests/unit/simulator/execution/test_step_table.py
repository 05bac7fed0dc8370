"""Measured step times by plan and placement."""

import csv

import pytest

from slurm_elastic.simulator.execution.plan_jobs import read_plan_jobs, read_step_tables
from slurm_elastic.simulator.execution.step_table import StepTable, published_plan
from slurm_elastic.simulator.workloads.workload import WorkloadError
from tests.support import published_data

TABLE = """exec_plan,placement,iter_time
ga,1,1.0
ga,12,0.5
zero-dp,12,0.3
221,22,0.4
ga,4,0.8
ga,8,0.2
"""
TRACE = """name,submission_time,duration,application,num_gpus,exec_plan,steps,is_sla
a-0,0,100,tiny,1,ga,10,0
b-1,60,100,tiny,4,221,20,1
"""


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "tiny.csv"
    path.write_text(TABLE)
    return StepTable.read(path)


def test_published_look_up(table):
    assert table.step_s(published_plan("zero-dp", 3), (2, 1)) == 0.3
    assert table.step_s(published_plan("gc", 3), (1, 2)) == 0.5
    assert table.step_s(published_plan("gc", 4), (2, 2)) == 0.4
    assert table.step_s(None, (1, 2)) == pytest.approx(0.4)
    assert table.step_s(published_plan("ga", 6), (6,)) == pytest.approx(0.5)
    assert table.measured(published_plan("gc", 3), (1, 2)) is None
    with pytest.raises(WorkloadError, match="nothing was measured near placement 88"):
        table.step_s(published_plan("ga", 16), (8, 8))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("ga,1,1.0", "ga,1,0", "tiny.csv:2: iter_time '0'"),
        ("ga,1,1.0", "ga,10,1", "tiny.csv:2: placement '10'"),
        ("221,22", "221,2", "tiny.csv:5: exec_plan '221' on 2 GPUs"),
        ("ga,1,1.0", "dp,1,1.0", "tiny.csv:2: exec_plan 'dp'"),
    ],
)
def test_invalid_tables_are_refused(tmp_path, old, new, named):
    path = tmp_path / "tiny.csv"
    path.write_text(TABLE.replace(old, new, 1))
    with pytest.raises(WorkloadError) as error:
        StepTable.read(path)
    assert named in str(error.value)


def test_a_trace_is_read_and_its_faults_are_named_with_their_line(tmp_path, table):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    first, second = read_plan_jobs(path, {"tiny": table})
    assert (first.steps, first.guaranteed, str(first.plan)) == (10, False, "1x1")
    assert (second.guaranteed, str(second.plan)) == (True, "1x2+tensor=2")
    path.write_text(TRACE.replace("b-1", "a-0"))
    with pytest.raises(WorkloadError, match=r"trace.csv:3: name a-0 occurs twice"):
        read_plan_jobs(path, {"tiny": table})
    path.write_text(TRACE.replace(",20,1", ",none,1"))
    with pytest.raises(WorkloadError, match=r"trace.csv:3: steps 'none'"):
        read_plan_jobs(path, {"tiny": table})


def test_every_published_row_is_found():
    folder = published_data.require("rubick", "tables") / "tables"
    for model, table in read_step_tables(folder).items():
        with (folder / f"{model}.csv").open(encoding="utf-8-sig", newline="") as stream:
            for row in csv.DictReader(stream):
                placement = tuple(map(int, row["placement"]))
                plan = published_plan(row["exec_plan"], sum(placement))
                assert table.step_s(plan, placement) == float(row["iter_time"])
