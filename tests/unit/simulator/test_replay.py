"""The published trace, round by round: under its allocations our jobs reach the same states."""

import csv

from benchmarks.simulator import CLUSTER, replay
from slurm_elastic.simulator.workloads import application_profiles, cluster_text, workload
from tests.support import published_data


def test_the_published_trace_is_followed_exactly():
    data = published_data.require("sia", "traces", "workloads", "reference")
    jobs = workload.read(data / "workloads" / "philly" / "workload-1.csv")
    cluster = cluster_text.parse(CLUSTER)
    tables = application_profiles.read(data / "traces", jobs.applications, cluster.types)
    replayed = replay(jobs, tables, cluster, data / "reference" / "trace-philly-1.jsonl.gz")
    assert replayed["records"] == 5197
    different = replayed["different"]
    assert different["epoch"] == different["progress"] == different["restarts"] == 0
    # Two batches of equal goodput may change places with the last bit of a fit.
    assert different["batch"] <= 5
    with (data / "reference" / "sia-philly-1.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert {r["name"]: float(r["completion_s"]) for r in rows} == replayed["completion_s"]
    assert {r["name"]: float(r["gpu_seconds"]) for r in rows} == replayed["gpu_s"]
    assert {r["name"]: int(r["restarts"]) for r in rows} == replayed["restarts"]
