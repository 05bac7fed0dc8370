"""Simulations of gangs: the published runs repeated, and invalid files."""

import csv
import json
import math
from pathlib import Path

import pytest

from slurm_elastic.cli import main
from slurm_elastic.cli.simulate.simulation_answer import (
    GangFigures,
    SimulationAnswer,
    gang_figures,
)
from slurm_elastic.placement.delay.timers import Timers
from slurm_elastic.simulator.gangs.gandiva import Gandiva
from slurm_elastic.simulator.gangs.gang_files import read_sites, read_slowdowns, read_workload
from slurm_elastic.simulator.gangs.gang_results import nearest_rank
from slurm_elastic.simulator.gangs.gang_simulation import simulate_gangs
from slurm_elastic.simulator.gangs.own_dally import OwnDally
from slurm_elastic.simulator.gangs.published_dally import PublishedDally
from slurm_elastic.simulator.gangs.tiresias import Tiresias
from slurm_elastic.simulator.workloads.cluster_text import ClusterError
from slurm_elastic.simulator.workloads.workload import WorkloadError
from tests.support import published_data

WORKLOAD = "job_id,arrival_time,model,total_iterations,time_per_iteration,max_parallelism\n"
TABLE = "model,gpus,racks,machines,slots,s\n"
LEASE = 3600.0


@pytest.fixture
def write(tmp_path):
    def to(name, text):
        path = tmp_path / name
        path.write_text(text)
        return path

    return to


@pytest.fixture
def small(write):
    """Three gangs on two racks of one node of two GPUs."""
    rows = "1,0,VGG,2000000,0.01,2\n2,0,VGG,1000000,0.01,1\n3,5,VGG,2000000,0.01,2\n"
    table = "VGG,2,1,1,1,0.8\nVGG,2,2,2,2,0.1\n"
    return write("w.csv", WORKLOAD + rows), write("t.csv", TABLE + table)


def simulated(small, policy, **more):
    workload, table = small
    return simulate_gangs(
        read_workload(workload), read_sites("2x1x2", slots=1), read_slowdowns(table), policy,
        name="x", **more,
    )  # fmt: skip


def own(small):
    return OwnDally(read_slowdowns(small[1]), lease_s=LEASE)


def test_work_and_times_add_up(small):
    for policy in (
        own(small),
        PublishedDally(Timers.parse("full", lease_s=LEASE)),
        Tiresias(),
        Gandiva(),
    ):
        result = simulated(small, policy)
        assert [round(j.compute_s) for j in result.jobs] == [10_000, 10_000, 10_000]
        for job in result.jobs:
            assert math.isclose(job.jct_s, job.queue_s + job.run_s + job.restart_s)
            assert math.isclose(sum(job.tier_s), job.run_s)
        assert result.summary()["jobs"] == 3


def test_who_waits_for_a_node_runs_faster_than_who_spreads(small, write):
    rows = "1,0,VGG,9000000,0.01,1\n2,0,VGG,900000,0.01,1\n3,5,VGG,900000,0.01,2\n"
    small = write("w.csv", WORKLOAD + rows), small[1]
    jobs = {
        mode: simulate_gangs(
            read_workload(small[0]), read_sites("3x1x2", slots=1), read_slowdowns(small[1]),
            PublishedDally(Timers.parse(mode, lease_s=LEASE)), name=mode,
        ).jobs[2]
        for mode in ("full", "nowait")
    }  # fmt: skip
    assert jobs["full"].grants == (0, 2, 0, 0)
    assert jobs["full"].run_s <= jobs["nowait"].run_s


def test_the_same_run_again_is_the_same(small):
    one, other = (simulated(small, own(small)) for _ in range(2))
    assert one.jobs == other.jobs


def test_a_gang_that_is_too_large_is_named(small, write):
    path = write("w.csv", WORKLOAD + "7,0,VGG,1000,0.01,9\n")
    with pytest.raises(WorkloadError, match=r"w\.csv:2: job 7 requests 9 GPUs, the cluster has 4"):
        simulated((path, small[1]), own(small))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("1,0,VGG,1000,0.01", "5 cells under 6 columns"),
        ("1,x,VGG,1000,0.01,1", "arrival_time 'x'"),
        ("1,0,VGG,0,0.01,1", "total_iterations '0'"),
        ("1,0,VGG,1000,0.01,1.5", "max_parallelism '1.5'"),
        ("1,0,VGG,1000,nan,1", "time_per_iteration 'nan'"),
        ("", "has no job"),
    ],
)
def test_bad_workloads(write, row, words):
    with pytest.raises(WorkloadError, match=words):
        read_workload(write("w.csv", WORKLOAD + row + "\n"))


def test_bad_tables(write):
    for row, arguments in (
        ("VGG,2,1,1,1,2.0", "at most 1"),
        ("VGG,2,1,1,1,", "compute_us and exposed_comm_us, or s, is missing"),
        (
            "VGG,2,1,1,1,0.5\nVGG,2,1,1,1,0.6",
            "occurs also in an earlier|has another s in an earlier",
        ),
        ("", "has no row"),
    ):
        with pytest.raises(WorkloadError, match=arguments):
            read_slowdowns(write("t.csv", TABLE + row + "\n"))
    with pytest.raises(WorkloadError, match="column racks is missing"):
        read_slowdowns(write("t.csv", "model,gpus\nVGG,2\n"))
    with pytest.raises(WorkloadError, match="No such file"):
        read_slowdowns(Path("nowhere.csv"))


def test_bad_clusters():
    for text in ("2x4", "axbxc", "0x1x1", "2x4x8x1"):
        with pytest.raises(ClusterError, match="RACKSxNODESxGPUS"):
            read_sites(text, slots=1)
    with pytest.raises(ClusterError, match="--slots 3"):
        read_sites("2x4x8", slots=3)


def test_nearest_rank():
    assert nearest_rank([1.0, 2.0, 3.0], 0.75) == 3.0
    assert nearest_rank(list(range(500)), 0.99) == 494
    assert nearest_rank([1.0], 0.99) == 1.0


def test_from_the_command_line(small, capsys, tmp_path):
    workload, table = map(str, small)
    arguments = ["simulate", workload, "--format", "dally", "--cluster", "2x1x2", "--slots", "1"]
    assert main.run([*arguments, "--slowdown", table, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == list(SimulationAnswer.__annotations__)
    assert (answer["policy"], answer["cluster"], answer["jobs"]) == ("dally", "2x1x2", 3)
    assert answer["gangs"]["comm_gpu_h"] > 0
    assert list(answer["gangs"]) == list(GangFigures.__annotations__)
    assert answer["each"] == [{k: v for k, v in answer.items() if k not in ("each", "notes")}]
    rows = tmp_path / "rows.csv"
    for policy in ("dally", "tiresias", "tiresias-condfix", "gandiva"):
        more = ["--policy", policy, "--jobs-csv", str(rows)]
        assert main.run([*arguments, "--slowdown", table, *more]) == 0
        assert f"policy {policy}" in capsys.readouterr().out
        assert len(rows.read_text().splitlines()) == 4


def test_figures_of_two_workloads_are_over_all_gangs_but_makespans_are_means(small, write):
    alone = write("one.csv", WORKLOAD + "1,0,VGG,2000000,0.01,2\n")
    runs = [simulated(small, Gandiva()), simulated((alone, small[1]), Gandiva())]
    both, (one, other) = gang_figures(runs, "2x1x2"), [gang_figures([r], "2x1x2") for r in runs]
    assert (both["jobs"], one["jobs"], other["jobs"]) == (4, 3, 1)
    assert both["avg_jct_h"] == pytest.approx((3 * one["avg_jct_h"] + other["avg_jct_h"]) / 4)
    assert both["makespan_h"] == pytest.approx((one["makespan_h"] + other["makespan_h"]) / 2)
    assert both["gangs"]["grants"]["node"] == sum(
        f["gangs"]["grants"]["node"] for f in (one, other)
    )
    assert both["rounds"] is None


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (["--policy", "sia"], "is unknown for gangs"),
        (["--timers", "3,1"], '--timers: "3,1" is invalid'),
        (["--policy", "tiresias", "--timers", "full"], "does not apply to --policy tiresias"),
        (["--plot", "x.png"], "--plot does not apply to --format dally"),
        (["--format", "jobs"], "--slowdown needs --format dally"),
    ],
)
def test_what_the_command_line_refuses(small, capsys, more, error):
    workload, table = map(str, small)
    arguments = ["simulate", workload, "--format", "dally", "--cluster", "2x1x2", "--slots", "1"]
    assert main.run([*arguments, "--slowdown", table, *more]) == 2
    err = capsys.readouterr().err
    assert error in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["dally-12-24", "dally-auto24", "tiresias"])
def test_published_runs_are_met_job_by_job(name):
    data = published_data.require("dally", "workloads", "reference")
    policy = (
        Tiresias(published=True)
        if name == "tiresias"
        else PublishedDally(Timers.parse("auto" if "auto" in name else "12,24", lease_s=LEASE))
    )
    result = simulate_gangs(
        read_workload(data / "workloads" / "p75g8.csv"), read_sites("2x4x8", slots=2),
        read_slowdowns(data / "reference" / "slowdown.csv"), policy, name=name,
    )  # fmt: skip
    with (data / "reference" / f"p75g8-{name}.csv").open(newline="") as lines:
        theirs = {row["job_id"]: row for row in csv.DictReader(lines)}
    for job in result.jobs:
        row = theirs[job.name]
        assert job.finish_s == float(row["finish"])
        assert job.run_s == float(row["run_s"])
        assert job.compute_s == pytest.approx(float(row["comp_s"]), rel=1e-9)
        tiers = ("n_single", "n_machine", "n_rack", "n_network")
        assert job.grants == tuple(int(row[t]) for t in tiers)


def test_ours_beats_both_columns():
    data = published_data.require("dally", "workloads", "reference")
    table = read_slowdowns(data / "reference" / "slowdown.csv")
    figures = simulate_gangs(
        read_workload(data / "workloads" / "p75g8.csv"), read_sites("2x4x8", slots=2), table,
        OwnDally(table, lease_s=LEASE), name="own",
    ).summary()  # fmt: skip
    assert figures["avg_jct_h"] < 0.95 * 18.71
    assert figures["comm_gpu_h"] < 811
