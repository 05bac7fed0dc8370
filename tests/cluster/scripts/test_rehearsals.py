"""Rehearsals by a real selasticd: scripts that resume, start anew, or fail when restarted."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.container_cluster.selasticd import PYTHON, Daemon, gpus, running, shown
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

SCRATCH = "/shared/scratch/rehearsal"
#: A directory on a disk of each node.
LOCAL, NODES = "/srv/local", tuple(f"g0{number}" for number in range(1, 7))
FULL_DISK = Path(__file__).parents[1] / "drivers" / "full_disk.py"

#: Trains without the library: counts, and saves each second in its own manner. Options: `resume`,
#: `rename` (else in place), `fussy` (refuses an output folder that exists), `until=N` steps.
SCRIPT = """
import json, os, sys, time
rank, last = int(os.environ["RANK"]), 24
for word in sys.argv:
    last = int(word[6:]) if word.startswith("until=") else last
step = 0
if "resume" in sys.argv:
    step = json.load(open("out/ckpt.json"))["step"]
elif rank == 0:
    os.makedirs("out", exist_ok="fussy" not in sys.argv)
while step < last:
    time.sleep(0.5)
    step += 1
    if rank == 0 and step % 4 == 0:
        name = "out/new.tmp" if "rename" in sys.argv else "out/ckpt.json"
        with open(name, "w") as file:
            json.dump({"step": step, "attempt": os.environ["SLURM_ELASTIC_RESTART"]}, file)
        if "rename" in sys.argv:
            os.rename(name, "out/ckpt.json")
        print("saved", step, flush=True)
print("finished at", step, flush=True)
"""

ESRUN = "esrun --checkpoint 'out/ckpt.json' python3 script.py"
BATCH_IF = f"""
if [ -f out/ckpt.json ]; then more=resume; else more=; fi
{ESRUN} $more"""


@pytest.fixture
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    with running(cluster, reporters=()) as daemon:
        yield daemon
    cluster.exec(f"rm -rf {SCRATCH}")


def submit(cluster: SlurmCluster, name: str, command: str, *, directory: str = "") -> int:
    home = f"{SCRATCH}/{name}"
    cluster.exec(f"install -d -o alice -g alice {SCRATCH}")
    cluster.exec(f"mkdir -p {home}; cat >{home}/script.py", user="alice", stdin=SCRIPT)
    return cluster.sbatch(
        f"export SLURM_ELASTIC_CONTROLLER=ctld:7321\n{command}",
        f"--chdir={home}",
        "--output=log",
        "--open-mode=append",
        "--elastic=1-2",
        "--gpus=1",
        f"-J{name}",
        directory=directory,
    )


def text(cluster: SlurmCluster, name: str, file: str = "log") -> str:
    return cluster.exec(f"cat {SCRATCH}/{name}/{file} 2>/dev/null || true").stdout


def kept_for(job: int) -> str:
    """Return the directory with a job's kept checkpoint.

    It is in alice's home directory, from which jobs are submitted, or from one of root.
    """
    return f"/shared/home/alice/.slurm-elastic/kept/elastic-{job}"


def rows(daemon: Daemon, job: int) -> list[dict[str, Any]]:
    changes = json.loads(daemon.selastic("history", str(job), "--json"))["changes"]
    return [row for row in changes if row["action"] == "rehearsal"]


@pytest.mark.parametrize(("manner", "directory"), [("rename", ""), ("place", "/usr")])
def test_what_the_batch_script_decides_is_rehearsed_and_the_job_grows(
    cluster: SlurmCluster, daemon: Daemon, manner: str, directory: str
) -> None:
    job = submit(cluster, manner, f"{BATCH_IF} {manner} until=60", directory=directory)
    daemon.wait_for(f"JobId={job} .*Action=rehearsal Result=proven", timeout=90)
    (row,) = rows(daemon, job)
    assert (row["outcome"], row["from"], row["reason"]["code"]) == (
        "proven", row["to"], "resume-rehearsal",
    )  # fmt: skip
    daemon.wait_for(f"JobId={job} Action=grow", timeout=60)
    cluster.wait(job, "COMPLETED", timeout=120)
    log = text(cluster, manner)
    assert "ckpt.json is kept in" in log
    steps = [int(line.split()[1]) for line in log.splitlines() if line.startswith("saved")]
    assert steps[0] == 4
    assert all(later <= earlier + 4 for earlier, later in itertools.pairwise(steps))
    assert steps.count(4) == 1, "it never started anew"
    assert kept_for(job) in log
    assert cluster.exec(f"ls -A {kept_for(job)}", check=False).returncode != 0, "it is removed"
    assert len(rows(daemon, job)) == 1


def test_a_disk_that_fills_up_costs_the_copy_and_nothing_else(cluster: SlurmCluster) -> None:
    """On a real file system, of 64 MB: that of shared memory in the container."""
    place = "/dev/shm/full-disk"
    try:
        printed = cluster.exec(f"{PYTHON} - {place}", user="alice", stdin=FULL_DISK.read_text())
    finally:
        cluster.exec(f"rm -rf {place}")
    assert json.loads(printed.stdout) == {
        "problem": "no-room",
        "left": ["model.pt", "optimizer.pt"],
        "kept_again": 24_000_000,
        "free": 0,
        "restored": True,
        "aside": [True],
    }


def test_a_script_that_starts_anew_completes_and_nothing_is_overwritten(
    cluster: SlurmCluster, daemon: Daemon
) -> None:
    job = submit(cluster, "anew", f"{ESRUN} until=40")
    daemon.wait_for(f"JobId={job} .*Action=rehearsal Result=refuted", timeout=90)
    kept = f"{kept_for(job)}/before-rehearsal"
    explained = daemon.selastic("explain", str(job))
    assert "give the script its option to resume" in explained
    assert kept in explained
    (row,) = rows(daemon, job)
    assert (row["outcome"], row["reason"]["code"]) == ("refuted", "resume-refuted")
    cluster.wait(job, "COMPLETED", timeout=120)
    assert shown(cluster, job)["restart_cnt"] == 1, "neither rehearsed again nor resized"
    saved = json.loads(cluster.exec(f"cat {kept}/ckpt.json").stdout)
    assert saved["attempt"] == "0"
    assert json.loads(text(cluster, "anew", "out/ckpt.json")) == {"step": 40, "attempt": "1"}
    assert text(cluster, "anew").count("it does not resume, and will not be resized") == 1


def test_a_script_that_would_resume_at_a_wrong_epoch_keeps_its_size(
    cluster: SlurmCluster, daemon: Daemon
) -> None:
    option = "--gradient_accumulation_steps 4"
    save = "os.mkdir(f'step_{n}'), open(f'step_{n}/random_states_0.pkl', 'w').write('x')"
    code = f"import os, time; [({save}, time.sleep(2)) for n in range(60)]"
    esrun = f"esrun --checkpoint 'step_*' python3 -c \"{code}\" {option}"
    job = submit(cluster, "fixed", f"echo on $SLURM_JOB_NODELIST\n{esrun}")
    until(
        lambda: "esrun --micro-batches 4" in daemon.selastic("explain", str(job), check=False),
        what=lambda: daemon.selastic("explain", str(job), check=False),
    )
    assert "step_0 is named by steps" in text(cluster, "fixed")


def test_a_script_that_fails_when_restarted_keeps_its_checkpoint_and_is_held(
    cluster: SlurmCluster, daemon: Daemon
) -> None:
    job = submit(cluster, "fussy", f"{ESRUN} fussy until=400")
    daemon.wait_for(f"JobId={job} .*Action=rehearsal Result=failed", timeout=90)
    until(
        lambda: shown(cluster, job)["state_reason"] == "JobHeldUser",
        seconds=120,
        what=f"job {job} is not held",
    )
    saved = json.loads(text(cluster, "fussy", "out/ckpt.json"))
    assert saved["attempt"] == "0"
    assert "FileExistsError" in text(cluster, "fussy")
    assert rows(daemon, job)[0]["outcome"] == "failed"
    cluster.exec(f"sed -i 's/fussy/resume/' {SCRATCH}/fussy/script.py", user="alice")
    # Slurm shows the job as running for a moment after it is on hold.
    until(
        lambda: "exit code 1" in daemon.selastic("explain", str(job)),
        what=lambda: daemon.selastic("explain", str(job)),
    )


def test_a_script_does_not_begin_anew_on_a_node_without_its_checkpoints(
    cluster: SlurmCluster, daemon: Daemon
) -> None:
    """They are on a disk of the node that another job takes."""
    for node in NODES:
        cluster.exec(f"install -d -m 1777 {LOCAL}", node=node)
    link = f"mkdir -p {LOCAL}/$SLURM_JOB_ID; ln -sfn {LOCAL}/$SLURM_JOB_ID out"
    job = submit(cluster, "local", f"{link}\n{BATCH_IF} rename until=400")
    daemon.wait_for(f"JobId={job} .*Action=rehearsal Result=proven", timeout=90)
    until(lambda: gpus(cluster, job) == 2, what="it does not grow")
    node = shown(cluster, job)["nodes"]
    rigid = cluster.sbatch("exec sleep 600", f"--nodelist={node}", "--gres=gpu:4", "-o/dev/null")
    daemon.wait_for(f"JobId={job} Action=hold Reason=trials-failed", timeout=90)
    log = text(cluster, "local")
    assert "out/ckpt.json: nothing matches on this node, though the job has completed" in log
    assert f"the last one on {node}; the program is not started" in log
    assert log.splitlines().count("saved 4") == 1, "it never started anew"
    assert "exit code 2" in daemon.selastic("explain", str(job))
    remedy = f"scontrol update jobid={job} ReqNodeList={node}"
    assert f"{remedy}, then selastic release {job}." in log
    cluster.exec(f"{remedy} && scancel {rigid}", user="alice")
    daemon.selastic("release", str(job))
    until(
        lambda: text(cluster, "local").count("saved ") > log.count("saved "),
        what=lambda: f"{shown(cluster, job)['required_nodes']} {text(cluster, 'local')[-900:]}",
    )
