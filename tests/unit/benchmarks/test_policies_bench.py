"""Rows and table of `benchmarks.policies`."""

from importlib.metadata import entry_points

import pytest

from benchmarks.policies.__main__ import FIGURES, figures, table, table_by_policy
from benchmarks.policies.drawn_workloads import draw
from benchmarks.policies.policy_rows import OTHER_ROWS, ROWS, WrongLengths, different_jobs
from benchmarks.sia_tables import reference
from slurm_elastic.policies.policy_protocol import Question
from slurm_elastic.simulator.workloads.workload import SubmittedJob, Workload
from tests.support.decisions.synthetic_applications import synthetic_application
from tests.support.decisions.synthetic_clusters import Cluster, node

REFERENCE = """name,submission_s,completion_s,jct_s,restarts,gpu_seconds,mean_contention
net-0,0,3600,3600,2,7200,1
net-1,0,7200,7200,4,14400,1
"""


@pytest.fixture
def data(tmp_path):
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "sia-philly-1.csv").write_text(REFERENCE)
    return tmp_path


def totals(jct):
    return dict.fromkeys((name for name, _, _ in FIGURES), 1.0) | {"avg_jct_h": jct}


def test_each_row_has_its_difference_to_the_artifact(data):
    line = figures(ROWS[0], "philly", [(1, totals(1.2))], [reference(data, "sia", "philly", 1)])
    assert line["avg_jct_h_artifact"] == 1.5
    assert line["avg_jct_h_difference"] == pytest.approx(-0.2)
    text = table([line])
    assert "| philly 1 | *Sia's artifact* | 1.500 | 2.00 | 3.00 | 3.00 |  |  |  |  |  |" in text
    assert f"| philly 1 | {ROWS[0].label} | 1.200 (-20.0%) |" in text


def test_without_the_artifacts_figures_rows_have_ours_alone(data):
    references = [reference(data, "sia", "philly", i) for i in (1, 2)]
    assert references[0]
    assert references[1] is None
    line = figures(ROWS[0], "philly", [(1, totals(1.0)), (2, totals(2.0))], references)
    assert "avg_jct_h_difference" not in line
    assert "artifact" not in table([line])
    assert "| philly 1, 2 |" in table([line])


def test_policies_are_ordered_by_their_average_on_the_first_trace(data):
    lines = [
        figures(row, trace, [(1, totals(jct)), (2, totals(jct) | {"rho_max": 3.0})], [None, None])
        for trace, first, second in (("philly", 2.0, 1.0), ("saturn", 1.0, 2.0))
        for row, jct in ((ROWS[0], first), (ROWS[1], second))
    ]
    assert [line["rho_max"] for line in lines] == [3.0] * 4
    head, _, *rows = table_by_policy(lines).splitlines()
    assert head.startswith("| policy | philly 1, 2: avg JCT h |")
    assert [row.split(" | ")[0] for row in rows] == [f"| {ROWS[1].label}", f"| {ROWS[0].label}"]
    assert rows[0].split(" | ")[4] == "2.000"


def test_rows_name_each_policy_and_differ(data):
    rows = (*ROWS, *OTHER_ROWS)
    assert len({row.label for row in rows}) == len(rows)
    assert len({repr((row.config, row.job_class, row.length_error)) for row in rows}) == len(rows)


def test_together_they_have_all_policies_of_the_project():
    known = {entry.name for entry in entry_points(group="slurm_elastic.policies")}
    assert {row.policy for row in (*ROWS, *OTHER_ROWS)} == known


def test_jobs_made_to_differ_have_profiles_of_their_own():
    profiles = {"net": synthetic_application("net", seconds=600.0)}
    jobs = Workload.of(
        "w",
        [
            SubmittedJob(name=f"net-{i}", time_s=0.0, application="net", gpus=1, batch=16)
            for i in range(2)
        ],
    )
    changed, own = different_jobs(jobs, profiles, 0.4, seed=1)
    assert [job.application for job in changed.jobs] == ["net#net-0", "net#net-1"]
    times = [
        curve.step_s[0]
        for profile in own.values()
        for curve in list(profile.types["t4"].curves.values())[:1]
    ]
    assert len(set(times)) == 2


def test_drawn_workloads_have_jobs_of_the_published_ones_at_their_hours():
    published = [
        Workload.of(
            f"w{k}",
            [
                SubmittedJob(name=f"{a}-{i}", time_s=3600.0 * i + k, application=a, gpus=k, batch=1)
                for i, a in enumerate(("net", "gan", "lm"))
            ],
        )
        for k in (1, 2)
    ]
    drawn = [draw("t", published, seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    for one in drawn:
        assert [int(job.time_s // 3600) for job in one.jobs] == [0, 1, 2]
        assert len({job.name for job in one.jobs}) == 3
        assert {(job.application, job.gpus) for job in one.jobs} <= {
            (a, k) for a in ("net", "gan", "lm") for k in (1, 2)
        }


def test_wrong_lengths_change_the_progress_that_a_policy_sees():
    cluster = Cluster([node("n1")])
    for job_id in (1, 2):
        cluster.add(job_id, elastic="1-4", record={"progress": 0.5})
    cluster.add(3, elastic="1-4")
    seen = []

    class Listener:
        def decide(self, question, state):
            seen.append({i: record.progress for i, record in question.records.items()})
            return (), state

    asked = Question(
        snapshot=cluster.snapshot(), records=cluster.records, models={}, jobs=(1, 2, 3), capacity={}
    )
    for _ in range(2):
        WrongLengths(Listener(), 0.5, seed=1).decide(asked, {})
    assert len({0.5, seen[0][1], seen[0][2]}) == 3
    assert seen[0][3] is None
    assert seen[0] == seen[1]
