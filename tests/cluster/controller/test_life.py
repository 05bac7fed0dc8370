"""Start, stop, kill and reload of selasticd; jobs are not affected."""

import time
from collections.abc import Iterator

import pytest

from tests.support.container_cluster.selasticd import (
    Daemon,
    eager_config,
    gpus,
    held,
    reservations,
    running,
    shown,
    submit_running,
)
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

pytestmark = pytest.mark.usefixtures("no_trace")

FIRST = 4_000_000_000
SCRATCH = "/shared/scratch/life"


@pytest.fixture(scope="module")
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    with running(cluster, eager_config(mode="observe")) as daemon:
        yield daemon


@pytest.fixture
def act(daemon: Daemon) -> None:
    daemon.configure(eager_config())
    daemon.signal("HUP")


# --- modes, and the configuration read again ---


def test_observe_changes_nothing_advise_only_says_act_acts(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    begun = len(daemon.log())
    daemon.configure(eager_config(mode="observe"))
    daemon.signal("HUP")
    daemon.wait_for("configuration read again: Mode=observe", after=begun)
    begun = len(daemon.log())
    job = submit_running(cluster)
    before = cluster.exec(f"scontrol show job {job} | grep -v RunTime").stdout
    time.sleep(5)
    daemon.configure(eager_config(mode="advise"))
    daemon.signal("HUP")
    daemon.wait_for("configuration read again: Mode=advise", after=begun)
    daemon.wait_for(f"JobId={job} Action=grow .* Mode=advise", after=begun)
    assert cluster.exec(f"scontrol show job {job} | grep -v RunTime").stdout == before
    assert "scontrol words=" not in daemon.log()[begun:]
    daemon.configure(eager_config(mode="act"))
    daemon.signal("HUP")
    until(lambda: gpus(cluster, job) == 4)


def test_a_broken_file_changes_nothing_and_says_so(daemon: Daemon, cluster: SlurmCluster) -> None:
    for text, complaint in (
        ('[controller]\nmode = "ect"\n', 'elastic.toml:2: mode "ect" is unknown'),
        ("[controller\n", "elastic.toml"),
        ('[controller]\npolicy = "none"\n', 'elastic.toml:2: policy "none" is unknown'),
    ):
        daemon.configure(text)
        begun = len(daemon.log())
        daemon.signal("HUP")
        daemon.wait_for(f"error: configuration not changed: {complaint}", after=begun)
        done = cluster.exec(["selastic", "reconfigure"], user="root", check=False)
        assert complaint in done.stdout + done.stderr
    daemon.configure(eager_config())
    daemon.signal("HUP")


# --- stopped and killed ---


@pytest.mark.parametrize("state", ["NOTIFY", "COOL", "VERIFY"])
def test_stopped_in_a_change_and_started_again(
    daemon: Daemon, cluster: SlurmCluster, act: None, state: str
) -> None:
    job = submit_running(cluster, "-Jraw")  # nothing changes before its name does
    stop = f"kill {daemon.pid}; while kill -0 {daemon.pid}; do sleep 0.05; done"
    daemon.when(job, state, stop, first=f"scontrol update jobid={job} JobName=slow")
    assert "selasticd stops" in daemon.log()
    daemon.start()
    until(lambda: gpus(cluster, job) == 4)
    until(lambda: shown(cluster, job)["priority"]["number"] < FIRST)
    until(lambda: not reservations(cluster))


# --- real training ---


@pytest.fixture
def training(cluster: SlurmCluster) -> Iterator[int]:
    """Start a training of about half a minute on one emulated v100, less on more.

    It is changed by requeues: the states of changes in place are those of test_in_place.py.
    """
    cluster.exec(f"install -d -o alice -g alice {SCRATCH}")
    options = ["--samples=2048", "--epochs=2", "--rate=100", "--workers=0"]
    job = cluster.sbatch(
        f"esrun python3 /opt/src/slurm-elastic/docs/examples/train_library.py"
        f" --out {SCRATCH}/out {' '.join(options)}",
        "-Jreal",
        "--elastic=1-2,types=v100,in-place=never",
        "--gres=gpu:v100:1",
        "--open-mode=append",
        f"--output={SCRATCH}/log",
    )
    yield job
    cluster.cancel()
    cluster.exec(f"rm -rf {SCRATCH}")


def every_sample_once(cluster: SlurmCluster) -> str:
    check = "python3 /opt/src/slurm-elastic/docs/examples/check_run.py"
    done = cluster.exec(f"{check} {SCRATCH}/out --samples 2048 --epochs 2", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_controller_and_a_node_die_and_nothing_is_lost(
    daemon: Daemon, cluster: SlurmCluster, act: None, training: int
) -> None:
    """The one in the middle of a resize; the other under a job that was resized to it."""
    unlucky = cluster.sbatch(
        "exec sleep 600", "--elastic=1-4,types=a100", "-o/dev/null", "-x", "g01,g02"
    )
    daemon.when(training, "COOL", daemon.kill_command)
    assert not daemon.runs()
    daemon.start()
    until(lambda: gpus(cluster, training) == 2)
    until(lambda: held(cluster, unlucky) == {"g04": 4})
    begun = len(daemon.log())
    cluster.exec("pkill -9 slurmd", node="g04", check=False)
    try:
        daemon.wait_for(f"JobId={unlucky} Mended=node list", after=begun, timeout=120)
        # Slurm lets it wait for two minutes, unless its owner does not want to.
        changes = ["ExcNodeList=", "StartTime=now"]
        cluster.exec(["scontrol", "update", f"jobid={unlucky}", *changes], user="alice")
        cluster.wait(unlucky, "RUNNING", timeout=20)
        assert "g04" not in held(cluster, unlucky)
        cluster.wait(training, "COMPLETED", timeout=120)
        assert "ranks 1 -> 2" in every_sample_once(cluster)
    finally:
        cluster.exec("cluster-start slurmd", node="g04")
        cluster.wait_until_idle("g04")


def test_without_a_controller_nobody_waits_for_ever(
    daemon: Daemon, cluster: SlurmCluster, training: int
) -> None:
    """One job has a lease: Slurm starts it at its MIN. One has saved and waits: it goes on."""
    begun = len(daemon.log())
    daemon.configure(eager_config(mode="advise"))
    daemon.signal("HUP")
    rigid = cluster.sbatch("exec sleep 600", "-o/dev/null", "-wg04", "--gres=gpu:4", user="bob")
    cluster.wait(rigid, "RUNNING")
    leased = cluster.sbatch("exec sleep 600", "-o/dev/null", "--elastic=2-8", "-Ca100&rack2")
    daemon.wait_for(f"JobId={training} Action=grow .* Mode=advise", after=begun)
    # its rank stands still while the notice comes: it saves when the controller is stopped
    step = cluster.exec(f"squeue -hs -j {training} -o %i | grep -E '[.][0-9]+$'").stdout.strip()
    rank = f"scancel {step} --signal"
    cluster.exec(f"{rank} STOP")
    daemon.configure(eager_config(queue="controller"))
    lease = f"for _ in $(seq 80); do squeue -hj {leased} -o %r | grep -q BeginTime && break; done"
    daemon.when(
        training,
        "NOTIFY",
        f"sleep 1; {lease}; kill -STOP {daemon.pid}; {rank} CONT",
        first=f"kill -HUP {daemon.pid}",
    )
    try:
        assert shown(cluster, leased)["state_reason"] == "BeginTime"
        until(lambda: "waiting to be requeued" in cluster.exec(f"cat {SCRATCH}/log").stdout)
        daemon.kill()
        cluster.exec(["scancel", str(rigid)])
        log = f"grep -q 'continues after step' {SCRATCH}/log"
        until(lambda: cluster.exec(log, check=False).returncode == 0, seconds=60)
        cluster.wait(training, "COMPLETED", timeout=120)
        assert shown(cluster, training)["restart_cnt"] == 0
        every_sample_once(cluster)
        cluster.wait(leased, "RUNNING", timeout=90)
        assert held(cluster, leased) == {"g04": 2}
    finally:
        daemon.kill()
        daemon.configure(eager_config())
        daemon.start()
