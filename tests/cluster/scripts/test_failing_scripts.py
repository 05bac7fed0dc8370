"""Scripts that fail in some of the shapes that they are given: they go back, and lose nothing."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.support.container_cluster.selasticd import Daemon, eager_config, running
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

#: Its jobs only sleep.
pytestmark = pytest.mark.sleeping

#: A script as people write it: rank 0 saves every eight seconds by rename, and reads the newest.
#: Arguments: what it does on more than two ranks, and how many steps it trains.
SCRIPT = """
import glob, json, os, signal, sys, time
how, last = sys.argv[1], int(sys.argv[2])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
old = sorted(glob.glob("ckpt/*.json"))
step = json.load(open(old[-1]))["step"] if old else 0
print(f"start world={world} step={step}", flush=True) if rank == 0 else None
if world > 2:
    if how == "assert":
        assert world in (1, 2), "accumulation % world"
    elif how == "signal":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "idle":
        sys.exit(0)
    time.sleep(3600)
while step < last:
    time.sleep(0.5)
    step += 1
    if rank == 0 and step % 16 == 0:
        os.makedirs("ckpt", exist_ok=True)
        with open("ckpt/.new", "w") as file:
            json.dump({"step": step, "world": world}, file)
        os.rename("ckpt/.new", f"ckpt/{step:05d}.json")
"""
JOB = """
export SLURM_ELASTIC_CONTROLLER=ctld:7321
d=/shared/scratch/failing-$SLURM_JOB_ID
[ "${{SLURM_RESTART_COUNT:-0}}" != 0 ] || rm -rf $d ~/.slurm-elastic/*-$SLURM_JOB_ID.*
mkdir -p $d; cd $d
if [ {how} = early ] && [ $SLURM_GPUS_ON_NODE -gt 2 ]; then echo "fails before esrun"; exit 3; fi
esrun --checkpoint 'ckpt/*.json' python /shared/scratch/{script} {how} {last}
code=$?
echo "script ends with $code"
exit $code
"""


#: A job that has no newer checkpoint eight seconds after its start in a new shape has failed.
#: Changes are requeues; test_in_place_trials.py and test_rank_restart.py have the other kinds.
CONFIG = (
    eager_config()
    .replace("[resize]", '[resize]\nin_place = "never"\ntrial_s = 8')
    .replace("notice_s = 10", "notice_s = 60")
)


class Case(NamedTuple):
    """A job that fails on more than two GPUs."""

    how: str
    code: str  # of the reason that bars the sizes
    directive: str
    fails: list[int]  # sizes, in the order in which they are tried
    place: str  # nodes for this job, of four GPUs


CASES = (
    Case("assert", "program-failed", "1-4", [4, 3], "a100&rack2"),
    Case("signal", "program-failed", "1-4,sizes=1:2:4", [4], "v100&rack1"),
    Case("idle", "program-ended", "1-4,sizes=1:2:4", [4], "v100&rack2"),
    Case("hang", "no-newer-checkpoint", "1-4,sizes=1:2:4", [4], "v100&rack2"),
)


def steps(case: Case) -> int:
    """Return for how many steps a job trains: some after it has failed everywhere."""
    return 176 + 48 * len(case.fails)


def submit(
    cluster: SlurmCluster,
    how: str,
    last: int,
    directive: str,
    place: str = "a100&rack1",
    script: str = "failing.py",
) -> int:
    cluster.exec(f"cat >/shared/scratch/{script}", user="alice", stdin=SCRIPT)
    shape = ("-Jreal", f"--elastic={directive}", f"-C{place}", "--time=20", "--open-mode=append")
    job = JOB.format(script=script, how=how, last=last)
    return cluster.sbatch(job, *shape, "-o", "/shared/scratch/failing-%j.out")


def written(cluster: SlurmCluster, job: int) -> str:
    return cluster.exec(f"cat /shared/scratch/failing-{job}.out", check=False).stdout


def history(daemon: Daemon, job: int) -> list[dict]:
    return json.loads(daemon.selastic("history", str(job), "--json"))["changes"]


@pytest.fixture(scope="module")
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    with running(cluster, CONFIG, reporters=()) as daemon:
        yield daemon


def barred(daemon: Daemon, job: int) -> dict[int, str]:
    """Return the sizes on which a job may not run, each with the code of the reason."""
    answer = daemon.selastic("explain", str(job), "--json", check=False)
    rows = json.loads(answer)["barred"] if answer.startswith("{") else []
    return {row["gpus"]: row["reason"]["code"] for row in rows}


@pytest.fixture(scope="module")
def jobs(cluster: SlurmCluster, daemon: Daemon) -> Iterator[dict[str, int]]:
    """Submit the jobs of all cases: they fail side by side, as they mostly wait.

    Checks of each, while it runs, which sizes are barred.
    """
    jobs = {c.how: submit(cluster, c.how, steps(c), c.directive, c.place) for c in CASES}
    jobs["early"] = submit(cluster, "early", 224, "1-4,sizes=1:2:4")
    cluster.jobs.clear()  # which the end of a test would cancel
    left = {case.how: case for case in CASES}

    def all_barred() -> bool:
        # The log is cheaper to look at than the answers of `selastic explain`.
        failures = Counter(re.findall(r"JobId=(\d+) Run=\d+ Change=failed", daemon.log()))
        for how, case in list(left.items()):
            if failures[str(jobs[how])] < len(case.fails):
                continue
            shapes = barred(daemon, jobs[how])
            if shapes.keys() == {*case.fails}:
                assert set(shapes.values()) == {case.code}, how
                assert f"`selastic release {jobs[how]}`" in daemon.selastic(
                    "explain", str(jobs[how])
                )
                del left[how]
        return not left

    until(all_barred, seconds=150, what=lambda: f"{left}: {daemon.log()[-5000:]}")
    yield jobs
    cluster.jobs += jobs.values()


def test_a_job_that_fails_everywhere_is_held_not_ended(
    cluster: SlurmCluster, daemon: Daemon
) -> None:
    job = submit(cluster, "assert", 3200, "1-4", script="everywhere.py")
    daemon.wait_for(rf"JobId={job} Transition=\d+ State=NOTIFY Action=grow", timeout=60)
    cluster.exec("echo 'raise SystemExit(9)' >/shared/scratch/everywhere.py", user="alice")
    daemon.wait_for(f"JobId={job} Action=hold Reason=trials-failed", timeout=90)
    assert cluster.state(job) == "PENDING"
    assert "exit code 9" in daemon.selastic("explain", str(job))
    cluster.exec("cat >/shared/scratch/everywhere.py", user="alice", stdin=SCRIPT)
    daemon.selastic("release", str(job))
    cluster.wait(job, "RUNNING", timeout=60)
    count = f"ls /shared/scratch/failing-{job}/ckpt | wc -l"
    before = int(cluster.exec(count).stdout)
    until(lambda: int(cluster.exec(count).stdout) > before, seconds=60)
    daemon.check_log()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.how)
def test_it_goes_back_trains_on_and_completes(
    cluster: SlurmCluster, daemon: Daemon, jobs: dict[str, int], case: Case
) -> None:
    job, fails = jobs[case.how], case.fails
    cluster.wait(job, "COMPLETED", timeout=180)
    out = written(cluster, job)
    # Rank 0 may be killed before it prints a line, as another rank has failed.
    attempts = [int(ranks) for ranks in re.findall(r"\nesrun: attempt \d+: (\d+) rank", "\n" + out)]
    assert [ranks for ranks in attempts if ranks > 2] == fails, out
    begun_at = [
        int(step) for step in re.findall(r"^start world=\d+ step=(\d+)$", out, re.MULTILINE)
    ]
    assert begun_at == sorted(begun_at), "no step is lost: " + out
    newest = cluster.exec(f"ls /shared/scratch/failing-{job}/ckpt | tail -1").stdout
    assert newest.strip() == f"{steps(case):05d}.json"
    rows = history(daemon, job)
    outcomes = {row["to"].split()[0]: row["outcome"] for row in rows if row["action"] == "grow"}
    assert [outcomes[str(gpus)] for gpus in fails] == ["failed"] * len(fails), rows
    assert outcomes["2"] == "done"
    daemon.check_log()


def test_a_selasticd_that_is_down_meanwhile_brings_it_back_later(
    cluster: SlurmCluster, daemon: Daemon
) -> None:
    # Jobs of the other tests need a controller.
    until(lambda: not cluster.exec("squeue -h -u alice").stdout, seconds=180, every_s=2)
    job = submit(cluster, "signal", 224, "1-4,sizes=1:4")
    daemon.when(job, "VERIFY", daemon.kill_command, action="grow")
    until(
        lambda: "waiting for the controller" in written(cluster, job),
        seconds=20,
        what=lambda: written(cluster, job) + daemon.log(),
    )
    assert cluster.state(job) == "RUNNING"
    daemon.start()
    cluster.wait(job, "COMPLETED", timeout=180)
    assert "script ends with 0" in written(cluster, job)


def test_a_batch_script_that_fails_before_esrun_goes_back(
    cluster: SlurmCluster, daemon: Daemon, jobs: dict[str, int]
) -> None:
    job = jobs["early"]
    daemon.wait_for(rf"JobId={job} Run=\d+ Change=failed Action=requeue ExitCode=3", timeout=90)
    until(lambda: barred(daemon, job) == {4: "program-failed"}, seconds=30)
    cluster.wait(job, "COMPLETED", timeout=180)
    out = written(cluster, job)
    assert out.count("fails before esrun") == 1
    begun_at = [
        int(step) for step in re.findall(r"^start world=\d+ step=(\d+)$", out, re.MULTILINE)
    ]
    assert begun_at == sorted(begun_at), "no step is lost: " + out
    newest = cluster.exec(f"ls /shared/scratch/failing-{job}/ckpt | tail -1").stdout
    assert newest.strip() == "00224.json"
    rows = [(row["action"], row["outcome"]) for row in history(daemon, job)]
    assert ("grow", "failed") in rows, rows
    daemon.check_log()
