"""The srun command of a shape inside an allocation."""

import pytest

from slurm_elastic.job.slurm_env import AllocationError
from slurm_elastic.profiler import runners
from slurm_elastic.profiler.profiling_plan import ProfiledShape

ENV = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "g[01-03]",
    "SLURM_JOB_CPUS_PER_NODE": "16(x2),8",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURMD_NODENAME": "g01",
    "SLURM_NTASKS": "12",
    "PATH": "/usr/bin",
}


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Commands and environments of the runs, on nodes with 4, 4 and 2 GPUs."""
    runs = []
    monkeypatch.setattr(runners.RankLaunch, "begin_queries", lambda self: None)

    def settle(self):
        self.tasks, self.gpus = (4, 4, 2), True

    def run(command, env, log, timeout_s, recorder_of):
        runs.append((command, env, recorder_of(0)))
        return runners.FinishedRun(0)

    monkeypatch.setattr(runners, "StepUse", lambda command, env: command)

    monkeypatch.setattr(runners.RankLaunch, "settle", settle)
    monkeypatch.setattr(runners, "_run", run)
    return runs


@pytest.mark.parametrize(
    ("shape", "ranks", "hosts", "cpus"),
    [
        ("1", 1, "g01", 4),
        ("4", 4, "g01,g01,g01,g01", 4),
        ("4@2", 4, "g01,g01,g02,g02", 4),
        ("6@3", 6, "g01,g01,g02,g02,g03,g03", 4),
        ("8@2", 8, "g01,g01,g01,g01,g02,g02,g02,g02", 4),
    ],
)
def test_ranks_run_on_the_first_nodes_with_each_gpus_share_of_processors(
    started, tmp_path, shape, ranks, hosts, cpus
):
    runner = runners.AllocationRunner(ENV)
    log = tmp_path / "log"
    assert runner.gpus == (4, 4, 2)
    for _ in range(2):  # what one shape needs changes nothing for the next
        finished = runner.run(
            ["train"], ProfiledShape.parse(shape), {"EXTRA": "1"}, log=log, timeout_s=1.0
        )
        assert finished.code == 0
    (command, env, helper), (again, other, _) = started
    assert command == again
    assert f"--ntasks={ranks}" in command
    # What they use is measured on the first of their nodes.
    assert {"--nodelist=g01", "--gres=gpu:4", "--overlap"} <= set(helper)
    assert helper[-2:] == [env["SLURM_ELASTIC_STEP"], str(hosts.split(",").count("g01"))]
    assert f"--cpus-per-task={cpus}" in command
    if shape == "6@3":
        assert "--ntasks-per-node=2" in command
    else:
        assert f"--nodelist={hosts}" in command
    assert command[-1] == "train"
    assert env["EXTRA"] == "1"
    assert env["MASTER_PORT"] != other["MASTER_PORT"]
    assert env["SLURM_ELASTIC_SOCKET"] == ""  # no controller hears of it


def test_several_tasks_are_refused(started):
    with pytest.raises(AllocationError, match="several tasks"):
        runners.AllocationRunner(ENV | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"})


def test_the_gpu_type_is_the_name_of_slurm(monkeypatch, tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        '#!/bin/sh\n[ "$1" = show ] && echo "AllocTRES=cpu=2,gres/gpu=8,gres/gpu:a100=8"\n'
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert runners.gpu_type("7") == "a100"
    scontrol.write_text('#!/bin/sh\n[ "$1" = show ] && echo "gres/gpu:a100=4,gres/gpu:v100=4"\n')
    assert runners.gpu_type("7") == ""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert runners.gpu_type("7") == ""
