"""The resize protocol on real Slurm, driven by hand-written plans."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

#: Its jobs only sleep.
pytestmark = pytest.mark.sleeping

DRIVER = Path(__file__).parents[1] / "drivers" / "resize.py"
STATES = ["RESERVE", "NOTIFY", "REQUEUE", "DRAIN", "RESHAPE", "COOL", "RELEASE", "VERIFY", "CLEAR"]


def drive(cluster: SlurmCluster, ledger: str, *options: str, rc: int = 0) -> list[dict]:
    cluster.exec("mkdir -p /tmp/drivers && cat >/tmp/drivers/resize.py", stdin=DRIVER.read_text())
    command = ["/opt/slurm-elastic/bin/python", "/tmp/drivers/resize.py", "--ledger", ledger]
    done = cluster.exec([*command, *options], user="selastic", check=False, timeout=200)
    assert done.returncode == rc, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def fresh_ledger(cluster: SlurmCluster) -> str:
    return cluster.exec("mktemp -u /tmp/ledger.XXXX", user="selastic").stdout.strip()


def running(cluster: SlurmCluster, job: int) -> dict[str, int]:
    """Return the GPUs of a job by node."""
    shown = json.loads(cluster.exec(["scontrol", "show", "job", str(job), "-d", "--json"]).stdout)
    (found,) = shown["jobs"]
    if found["job_state"] != ["RUNNING"]:
        return {}
    nodes = cluster.exec(["scontrol", "show", "hostnames", found["nodes"]]).stdout.split()
    counts = [int(g.split("(")[0].split(":")[-1]) for g in found["gres_detail"]]
    return dict(zip(nodes, counts, strict=True))


def field(cluster: SlurmCluster, job: int, name: str):
    shown = json.loads(cluster.exec(["scontrol", "show", "job", str(job), "--json"]).stdout)
    return shown["jobs"][0][name]


def reservations(cluster: SlurmCluster) -> str:
    return cluster.exec("scontrol -o show res | grep -o selastic_[0-9]* || true").stdout.strip()


def elastic(
    cluster: SlurmCluster, *options: str, directive: str = "1-8", seconds: int = 600
) -> int:
    job = cluster.sbatch(f"exec sleep {seconds}", f"--elastic={directive}", "-o/dev/null", *options)
    cluster.wait(job, "RUNNING")
    return job


@pytest.fixture(autouse=True)
def _no_reservation_left(cluster: SlurmCluster) -> Iterator[None]:
    yield
    cluster.cancel()
    for name in reservations(cluster).split():
        cluster.exec(["scontrol", "delete", f"ReservationName={name}"])


@pytest.mark.parametrize(
    "form",
    [
        ["--gres=gpu:v100:1"],
        ["--gpus=v100:1"],
        ["--gpus-per-node=v100:1"],
        ["--gpus-per-task=v100:1", "-n1"],
        ["--gpus=v100:2", "--ntasks-per-gpu=1"],
        ["--gres=gpu:v100:1", "-c2", "--mem=1000"],
        ["--gres=gpu:v100:1", "--cpus-per-gpu=2", "--mem-per-gpu=400"],
    ],
    ids=lambda form: form[0].split("=")[0] + ("+" if len(form) > 2 else ""),
)
def test_every_submit_form_grows_spreads_and_shrinks(
    cluster: SlurmCluster, form: list[str]
) -> None:
    job = elastic(cluster, *form)
    ledger = fresh_ledger(cluster)
    for shares in ({"g05": 4, "g06": 4}, {"g05": 4, "g06": 2}, {"g03": 1}):
        (ended,) = drive(cluster, ledger, "--plan", json.dumps({job: ["v100", shares]}))
        assert (ended["state"], ended["problem"]) == ("DONE", None)
        assert running(cluster, job) == shares
    assert reservations(cluster) == ""
    assert field(cluster, job, "priority")["number"] < 4_000_000_000


def test_cpus_memory_and_time_follow(cluster: SlurmCluster) -> None:
    job = elastic(cluster, "--gres=gpu:v100:1", "-c2", "--mem=1000", "-t10", "--nice=7")
    drive(cluster, fresh_ledger(cluster), "--plan", json.dumps({job: ["v100", {"g05": 4}]}))
    assert field(cluster, job, "cpus")["number"] == 8
    assert field(cluster, job, "memory_per_node")["number"] == 4000
    assert field(cluster, job, "time_limit")["number"] == 9
    assert field(cluster, job, "nice") == 7


def test_jobs_swap_places(cluster: SlurmCluster) -> None:
    one = elastic(cluster, "--gres=gpu:a100:4", "-w", "g01")
    two = elastic(cluster, "--gres=gpu:a100:4", "-w", "g02")
    plan = {one: ["a100", {"g02": 4}], two: ["a100", {"g01": 4}]}
    ended = drive(cluster, fresh_ledger(cluster), "--plan", json.dumps(plan))
    assert [e["state"] for e in ended] == ["DONE", "DONE"]
    assert (running(cluster, one), running(cluster, two)) == ({"g02": 4}, {"g01": 4})


def test_a_job_grows_into_what_another_gives(cluster: SlurmCluster) -> None:
    one = elastic(cluster, "--gres=gpu:a100:4", "-w", "g01", "-N1")
    two = elastic(cluster, "--gres=gpu:a100:2", "-w", "g02")
    plan = {two: ["a100", {"g01": 2, "g02": 2}], one: ["a100", {"g01": 2}]}
    drive(cluster, fresh_ledger(cluster), "--plan", json.dumps(plan))
    assert (running(cluster, one), running(cluster, two)) == ({"g01": 2}, {"g01": 2, "g02": 2})


def test_taken_gpus_are_noticed_before_the_job_is_touched(cluster: SlurmCluster) -> None:
    job = elastic(cluster, "--gres=gpu:a100:1", "-w", "g01")
    rigid = cluster.sbatch("exec sleep 60", "--gres=gpu:a100:4", "-w", "g02", "-o/dev/null")
    cluster.wait(rigid, "RUNNING")
    plan = json.dumps({job: ["a100", {"g02": 4}]})
    (ended,) = drive(cluster, fresh_ledger(cluster), "--plan", plan)
    assert (ended["state"], ended["problem"]["code"]) == ("UNDONE", "gpus-taken")
    assert running(cluster, job) == {"g01": 1}
    assert field(cluster, job, "restart_cnt") == 0
    assert reservations(cluster) == ""


def test_a_preempted_job_starts_by_itself_when_its_lease_ends(cluster: SlurmCluster) -> None:
    job = elastic(cluster, "--gres=gpu:a100:4")
    (ended,) = drive(cluster, fresh_ledger(cluster), "--plan", json.dumps({job: None}))
    assert ended["state"] == "DONE"
    assert field(cluster, job, "state_reason") in ("BeginTime", "None")
    time.sleep(3)  # a node refuses a job that comes back within 2 s; leases are far longer
    cluster.exec(["scontrol", "update", f"jobid={job}", "StartTime=now"])  # as if it had ended
    until(lambda: sum(running(cluster, job).values()) == 1)


def begin_and_die(cluster: SlurmCluster, seconds: int) -> tuple[str, dict[str, int]]:
    """Begin changes of nine jobs, and kill the controller when each is in another state."""
    ledger = fresh_ledger(cluster)
    jobs = {state: elastic(cluster, "--gres=gpu:1", seconds=seconds) for state in STATES}
    used = {state: running(cluster, job) for state, job in jobs.items()}
    room = {f"g0{i}": 4 - sum(u.get(f"g0{i}", 0) for u in used.values()) for i in range(1, 7)}
    types = {"g01": "a100", "g02": "a100", "g03": "v100", "g04": "a100"}
    plan, freeze = {}, []
    for state, job in jobs.items():
        node = max(room, key=lambda n: (n not in used[state], room[n]))
        room[node] -= 1
        plan[job] = [types.get(node, "v100"), {node: 1}]
        freeze.append(f"{job}={state}")
    drive(cluster, ledger, "--plan", json.dumps(plan), "--freeze", *freeze, rc=137)
    return ledger, jobs


def test_killed_in_every_state_and_started_again(cluster: SlurmCluster) -> None:
    ledger, jobs = begin_and_die(cluster, 600)
    drive(cluster, ledger)
    for state, job in jobs.items():
        assert sum(running(cluster, job).values()) == 1, state
        assert field(cluster, job, "priority")["number"] < 4_000_000_000, state
    assert reservations(cluster) == ""


def test_killed_in_every_state_and_never_started_again(cluster: SlurmCluster) -> None:
    """Slurm alone brings every job back and to its end. A later controller clears what is left."""
    _, jobs = begin_and_die(cluster, 40)  # longer than it takes to start them all
    for state, job in jobs.items():
        assert cluster.wait(job, "COMPLETED", timeout=240) == "COMPLETED", state
    drive(cluster, fresh_ledger(cluster))
    assert reservations(cluster) == ""


def test_killed_and_started_with_an_empty_ledger(cluster: SlurmCluster) -> None:
    """What bears our mark is found in Slurm itself; Slurm starts the jobs after its own wait."""
    _, jobs = begin_and_die(cluster, 600)
    drive(cluster, fresh_ledger(cluster))
    assert reservations(cluster) == ""
    for state, job in jobs.items():
        cluster.exec(["scontrol", "update", f"jobid={job}", "StartTime=now"], check=False)
        cluster.wait(job, "RUNNING", timeout=30)
        assert sum(running(cluster, job).values()) == 1, state
        assert field(cluster, job, "priority")["number"] < 4_000_000_000, state
