"""Hostile texts in everything that a user can write: elastic jobs are resized even so.

Nothing is executed, no log line is forged, no control character reaches a terminal, and no other
job is affected.
"""

import base64
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.container_cluster.selasticd import ADDRESS, PYTHON, Daemon, running
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

DRIVER = Path(__file__).parents[1] / "drivers" / "hostile.py"
PLACE = "/shared/scratch/hostile.py"
NODES = ("ctld", "g01", "g02", "g03", "g04", "g05", "g06")
#: A record that only an administrator can write, hostile in every value.
ROOTS = json.dumps(
    {
        "elastic": "1-4",
        "v": 1,
        "shape": {
            "req_nodes": "g06 Priority=4000000000",
            "features": "$(touch /tmp/pwned);\u001b[31m",
            "partition": "--x",
            "tres_per_node": "gres/gpu:1\nUserId=bob",
            "nice": -5,
        },
        "other": "\u001b[31m\n",
    }
)
#: selasticd's lines, and those of the commands it calls (-v).
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\S* (debug|info|warning|error): \S")


@pytest.fixture(scope="module")
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    cluster.exec(f"cat >{PLACE}", stdin=DRIVER.read_text())
    with running(cluster, reporters=()) as daemon:
        yield daemon
    cluster.exec("rm -rf /shared/scratch/hostile*")


def jobs_of(cluster: SlurmCluster) -> dict[int, dict[str, Any]]:
    """Return all jobs as slurmctld shows them, without characters that are not ASCII."""
    text = cluster.exec(r"scontrol show job -d --json | LC_ALL=C tr -d '\200-\377'").stdout
    return {job["job_id"]: job for job in json.loads(text, strict=False)["jobs"]}


def gpus(job: dict[str, Any]) -> int:
    """Return the number of GPUs of a running job."""
    if job["job_state"] != ["RUNNING"]:
        return 0
    return sum(int(g.split("(")[0].split(":")[-1]) for g in job["gres_detail"])


def output(cluster: SlurmCluster, *words: str, user: str) -> str:
    """Return the output of a command, which must be printable."""
    pipe = ["bash", "-c", '"$@" 2>&1 | base64 -w0', "-"]
    done = cluster.exec([*pipe, *words], user=user)
    text = base64.b64decode(done.stdout).decode("utf-8")
    shown = text.replace("\n", "")
    assert shown.isprintable(), f"{words}: {[c for c in shown if not c.isprintable()][:9]}"
    return text


def test_hostile_jobs_are_resized_and_nothing_else_happens(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    rigid = cluster.sbatch(
        "exec sleep 600", "-o/dev/null", "--gres=gpu:1", "-wg05", "--comment=mine", user="bob"
    )
    cluster.wait(rigid, "RUNNING")
    before = jobs_of(cluster)[rigid]
    home = "/shared/scratch/hostile-alice"
    done = cluster.exec([PYTHON, PLACE, "submit", home, ADDRESS], user="alice")
    jobs: dict[str, int] = json.loads(done.stdout)
    cluster.jobs += jobs.values()
    expected = dict.fromkeys(jobs.values(), 4)

    held: dict[int, int] = {}

    def grown() -> bool:
        found = jobs_of(cluster)
        held.update({job: gpus(found[job]) for job in expected})
        return held == expected

    until(grown, seconds=90, what=lambda: held)

    # An administrator's own mistake: the job is left as it is, with a reason.
    strange = cluster.sbatch("exec sleep 600", "-o/dev/null", "--gres=gpu:1", "-wg06", user="bob")
    cluster.exec(["scontrol", "update", f"jobid={strange}", f"AdminComment={ROOTS}"])
    damaged = cluster.sbatch("exec sleep 600", "-o/dev/null", "--gres=gpu:1", "-wg06", user="bob")
    torn = 'AdminComment={"elastic"\n\x1b[31m$(touch /tmp/pwned)'
    cluster.exec(["scontrol", "update", f"jobid={damaged}", torn])
    show = ["selastic", "show", str(damaged)]
    until(lambda: "Unmanaged=AdminComment: is not JSON" in output(cluster, *show, user="root"))
    looks(cluster, [*jobs.values(), strange, damaged])
    attacks(cluster, jobs["name"])

    after = jobs_of(cluster)
    for field in ("restart_cnt", "start_time", "comment", "priority", "gres_detail", "nodes"):
        assert after[rigid][field] == before[field], field
    for job, count in expected.items():
        assert gpus(after[job]) == count
        assert after[job]["restart_cnt"] == 1
        assert after[job]["priority"]["number"] < 4_000_000_000
        assert after[job]["user_name"] == "alice"
    for job in (strange, damaged):
        assert after[job]["restart_cnt"] == 0
    for node in NODES:
        cluster.exec("! ls -d /tmp/pwned* 2>/dev/null", node=node)
    log_is_sound(daemon, cluster)


def looks(cluster: SlurmCluster, jobs: list[int]) -> None:
    """Check that no hostile text reaches a terminal, and that all JSON is valid."""
    for user in ("alice", "root"):
        for words in (["status"], ["plan"], ["history"], ["usage"]):
            output(cluster, "selastic", *words, user=user)
            json.loads(output(cluster, "selastic", *words, "--json", user=user))
    for job in jobs:
        for verb in ("show", "explain"):
            output(cluster, "selastic", verb, str(job), user="alice")
    text = output(cluster, "selastic", "show", str(jobs[0]), "--json", user="alice")
    assert str(jobs[0]) in text


def attacks(cluster: SlurmCluster, job: int) -> None:
    """Check that bob cannot report for alice's job, nor act as its controller."""
    done = cluster.exec([PYTHON, PLACE, "attack", ADDRESS, str(job)], user="bob")
    for request, answer in json.loads(done.stdout).items():
        assert list(answer) == ["refused"], (request, answer)
    pose = f"{PYTHON} {PLACE} pose 7399 >/tmp/pose 2>&1 & echo $!"
    pid = cluster.exec(f"rm -f /tmp/pose; {pose}", user="bob").stdout.strip()
    try:
        until(lambda: "ready" in cluster.exec("cat /tmp/pose", check=False).stdout)
        said = cluster.exec([PYTHON, PLACE, "ask", "ctld:7399"], user="alice").stdout
        assert said.startswith("ControllerUntrustedError "), said
    finally:
        cluster.exec(f"kill {pid}; rm -f /tmp/pose", check=False)


def log_is_sound(daemon: Daemon, cluster: SlurmCluster) -> None:
    """Check that every event is one line without control characters."""
    time.sleep(0)
    text = base64.b64decode(cluster.exec(f"base64 -w0 {daemon.log_path}").stdout).decode("utf-8")
    lines = text.splitlines()
    assert len(lines) > 20
    assert lines == text.split("\n")[:-1], "other line breaks"
    for line in lines:
        assert line.isprintable(), line
        assert LINE.match(line), line
    assert "Traceback" not in text
    assert "internal error" not in text
