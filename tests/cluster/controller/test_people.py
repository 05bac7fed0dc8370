"""Changes of jobs by owners and administrators during a transition; selasticd accepts them.

Each test runs several jobs at once, each on its own node, and checks what became of them.
"""

import time

import pytest

from tests.support.container_cluster.selasticd import (
    Daemon,
    gpus,
    held,
    run_concurrently,
    shown,
)
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

pytestmark = pytest.mark.usefixtures("no_trace")

FIRST = 4_000_000_000
#: After a requeue, unless it is told otherwise.
SLURMS_OWN_WAIT_S = 120
NODES = ("g01", "g02", "g03", "g04", "g05", "g06")


def submit(cluster: SlurmCluster, node: str, *options: str, directive: str = "1-4") -> int:
    """Submit a job that begins on one GPU of a node whose other three are free."""
    options = (f"--elastic={directive}", "-o/dev/null", f"-w{node}", *options)
    return cluster.sbatch("exec sleep 600", *options)


def ended(daemon: Daemon, job: int) -> str:
    """Wait for the line with the end of the job's transition, and return it."""
    return daemon.wait_for(rf"JobId={job} Transition=\d+ State=(DONE|UNDONE|ENDED) .*").group(0)


def is_itself_again(cluster: SlurmCluster, job: int, node: str) -> None:
    """Check that a pending job has its submitted shape, but for its time limit."""
    found = shown(cluster, job)
    assert found["required_nodes"] == node
    assert found["resv_name"] == ""
    assert found["priority"]["number"] < FIRST
    assert found["node_count"]["number"] == 1
    assert "gres/gpu=1" in found["tres_req_str"]


def test_while_a_job_cools_down_its_owner_may_do_anything(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    acts = {
        "held": "scontrol hold {}",
        "released": "scontrol release {}",
        "started": "scontrol update jobid={} StartTime=now",
        "cancelled": "scancel {}",
        "reshaped": "scontrol update jobid={} TresPerNode=gres/gpu:2",
        "least": ":",
    }
    least = ("--time=5", "--time-min=5")
    job = {  # held until the log is watched: on a busy machine that takes as long as a change
        name: submit(cluster, node, "-H", *(least if name == "least" else ()))
        for name, node in zip(acts, NODES, strict=True)
    }
    run_concurrently(
        *(
            lambda name=name, act=act: daemon.when(
                job[name],
                "COOL",
                act.format(job[name]),
                user="alice",
                first=f"scontrol release {job[name]}",
            )
            for name, act in acts.items()
        )
    )
    assert "UNDONE" in ended(daemon, job["held"])
    assert "ENDED" in ended(daemon, job["cancelled"])
    for name in ("released", "started", "reshaped", "least"):
        until(lambda name=name: gpus(cluster, job[name]) == 4, what=name)
        until(lambda name=name: shown(cluster, job[name])["priority"]["number"] < FIRST, what=name)
    assert shown(cluster, job["least"])["time_limit"]["number"] == 4
    assert shown(cluster, job["held"])["state_reason"] == "JobHeldUser"
    is_itself_again(cluster, job["held"], NODES[0])
    cluster.exec(["scontrol", "release", str(job["held"])], user="alice")
    cluster.wait(job["held"], "RUNNING")


def test_before_and_after_a_change(daemon: Daemon, cluster: SlurmCluster) -> None:
    job = {
        "about to start": submit(cluster, "g01", "-Jraw"),
        "hidden": cluster.sbatch(
            "exec sleep 600",
            "--comment=elastic:1-4",
            "-o/dev/null",
            "-wg02",
            "--gres=gpu:1",
            "-Jraw",
        ),
        "not requeueable": submit(cluster, "g03", "-Jraw"),
        "deaf": submit(cluster, "g04", "-Jdeaf", directive="1-4,notice=2"),
        "held": submit(cluster, "g05", "-Jraw"),
        "shell": 0,
    }
    cluster.wait(job["held"], "RUNNING")
    cluster.exec(["scontrol", "hold", str(job["held"])], user="alice")
    cluster.exec(["scontrol", "update", f"jobid={job['held']}", "JobName=now"])
    first, hidden = job["about to start"], job["hidden"]
    hold = f"for i in 1 2 3 4 5 6; do scontrol hold {first}; done"
    hide = (
        f"scontrol update jobid={hidden} Comment=x; scontrol update jobid={hidden} AdminComment=x"
    )
    fixed = job["not requeueable"]
    no = f"scontrol update jobid={fixed} Requeue=0; touch /tmp/save-{fixed}"  # drivers/reporter.py

    def named(job: int, name: str) -> str:
        return f"scontrol update jobid={job} JobName={name}"

    run_concurrently(
        lambda: daemon.when(first, "RELEASE", hold, user="alice", first=named(first, "now")),
        lambda: daemon.when(hidden, "VERIFY", hide, first=named(hidden, "now")),
        lambda: daemon.when(fixed, "NOTIFY", no, user="alice", first=named(fixed, "late")),
    )
    # A hold is never lifted, but the job may have started just before.
    line = ended(daemon, first)
    if "UNDONE" in line:
        assert shown(cluster, first)["state_reason"] == "JobHeldUser"
        is_itself_again(cluster, first, "g01")
    # Without the plugin the directive stands in Comment, which belongs to the owner: whoever
    # hides it keeps neither priority nor reservation.
    until(lambda: shown(cluster, hidden)["priority"]["number"] < FIRST)
    until(lambda: shown(cluster, hidden)["resv_name"] == "")
    # What Slurm refuses for ever is given up.
    assert "presently disabled" in ended(daemon, fixed)
    # Who did not save in time is not asked again at once.
    assert "no-checkpoint notice_s=2" in ended(daemon, job["deaf"])
    time.sleep(3)
    assert daemon.log().count(f"JobId={job['deaf']} Action=") == 1
    assert "it did not save in time" in daemon.selastic("explain", str(job["deaf"]))
    # A job that its owner holds while it runs would land held in the queue.
    assert "held by" in daemon.selastic("show", str(job["held"]))
    for name in ("not requeueable", "deaf", "held"):
        assert shown(cluster, job[name])["restart_cnt"] == 0, name
    cluster.exec(["scontrol", "release", str(job["held"])], user="alice")
    until(lambda: gpus(cluster, job["held"]) == 4)


def test_administrators_may_do_anything_too(daemon: Daemon, cluster: SlurmCluster) -> None:
    """A target is drained on the way, a node under a running job, a reservation is deleted."""
    moving = submit(cluster, "g01", "-Crack1", directive="1-8,types=a100")
    stays = submit(cluster, "g04", directive="1-2")
    robbed = submit(cluster, "g05", "-Jraw")
    try:
        run_concurrently(
            lambda: daemon.when(moving, "COOL", "scontrol update node=g02 state=drain reason=x"),
            lambda: until(lambda: gpus(cluster, stays) == 2),
        )
        begun = time.monotonic()
        assert "UNDONE" in ended(daemon, moving)
        cluster.wait(moving, "RUNNING")
        assert time.monotonic() - begun < SLURMS_OWN_WAIT_S
        until(lambda: set(held(cluster, moving)) == {"g01"}, what=daemon.log)
        cluster.exec("scontrol update node=g04 state=drain reason=x")
        # Another change may be under way, whose reservation is in use and stays.
        names = "$(scontrol show res -o | grep -o 'selastic_[0-9]*')"
        delete = f"for n in {names}; do scontrol delete res=$n && gone=1; done; [ $gone ]"
        rename = f"scontrol update jobid={robbed} JobName=now"
        daemon.when(robbed, "COOL", delete, first=rename)
        assert "DONE" in ended(daemon, robbed)
        until(lambda: gpus(cluster, robbed) == 4)
        assert (gpus(cluster, stays), shown(cluster, stays)["restart_cnt"]) == (2, 1)
    finally:
        for node in ("g02", "g04"):  # which may not have been drained yet
            cluster.exec(f"scontrol update node={node} state=resume", check=False)


def test_requeued_by_its_owner_it_starts_as_submitted(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    job = cluster.sbatch("exec sleep 600", "--elastic=1-4", "-o/dev/null", "-Ca100&rack2")
    assert "DONE" in ended(daemon, job)  # until then it may lift a hold along with its priority
    begun = len(daemon.log())
    cluster.exec(["scontrol", "requeuehold", str(job)], user="alice")
    daemon.wait_for(f"JobId={job} Mended=node list", after=begun)
    is_itself_again(cluster, job, "")
    held_by_user = ("JobHeldUser", "job_requeued_in_held_state")
    until(lambda: shown(cluster, job)["state_reason"] in held_by_user)
    own = f"scontrol update jobid={job} ReqNodeList=g05 Features="
    cluster.exec(own, user="alice")
    time.sleep(3)
    assert shown(cluster, job)["required_nodes"] == "g05"  # theirs, not ours
    go = f"scontrol release {job}; scontrol update jobid={job} StartTime=now"
    cluster.exec(go, user="alice")
    cluster.wait(job, "RUNNING")
    assert "g05" in held(cluster, job)


def test_hold_release_and_update(daemon: Daemon, cluster: SlurmCluster) -> None:
    """Also where a tool of the site writes AdminComment, and selasticd is restarted then.

    A change under way that the new directive rules out is given up.
    """
    late = submit(cluster, "g02", "-Jlate")
    daemon.wait_for(f"JobId={late} Transition=.* State=NOTIFY Action=grow")
    daemon.selastic("update", str(late), "--elastic=1-1")
    assert "Problem=directive-changed" in ended(daemon, late)
    job, noted = submit(cluster, "g04"), submit(cluster, "g05")
    record = shown(cluster, noted)["admin_comment"]
    cluster.exec(["scontrol", "update", f"jobid={noted}", f"AdminComment={record},JS1:x"])
    until(lambda: gpus(cluster, job) == 4)
    until(lambda: gpus(cluster, noted) == 4)
    assert shown(cluster, noted)["admin_comment"].endswith(",JS1:x")
    cluster.exec(["scontrol", "update", f"jobid={job}", "AdminComment=JS1:x"])
    daemon.wait_for(f"JobId={job} AdminComment=replaced Directive=kept")
    daemon.stop()
    daemon.start()
    # Until it has read Slurm's jobs, it answers that one should try again.
    kept = "the directive read before counts"
    until(lambda: kept in daemon.selastic("explain", str(job), check=False))
    assert "AdminComment of an elastic job was replaced" in daemon.selastic("check", check=False)
    daemon.selastic("update", str(job), "--elastic=1-2")
    until(lambda: gpus(cluster, job) == 2)
    daemon.selastic("hold", str(job))
    daemon.selastic("update", str(job), "--elastic=1-4")
    time.sleep(4)
    assert gpus(cluster, job) == 2
    assert "1-4" in daemon.selastic("update", str(job), "--elastic=4-1", check=False)
    assert "held" in daemon.selastic("status")
    daemon.selastic("release", str(job))
    until(lambda: gpus(cluster, job) == 4)
    assert (gpus(cluster, late), shown(cluster, late)["restart_cnt"]) == (1, 0)


def test_tasks_of_one_array_grow_and_give_way(daemon: Daemon, cluster: SlurmCluster) -> None:
    """Neither could give both of the GPUs that the other job needs: the user has named a node."""
    array = submit(cluster, "g03", "--array=0-1", directive="1-2")
    tasks = [f"{array}_{n}" for n in (0, 1)]

    def on_node() -> list[int | None]:
        return [held(cluster, task).get("g03") for task in tasks]

    until(lambda: on_node() == [2, 2], what=daemon.log)
    rigid = cluster.sbatch("exec sleep 600", "-o/dev/null", "--gres=gpu:2", "-wg03", user="bob")
    cluster.wait(rigid, "RUNNING")
    until(lambda: on_node() == [1, 1], what=daemon.log)
    assert [shown(cluster, task)["restart_cnt"] for task in tasks] == [2, 2], daemon.log()


def test_others_are_left_alone_and_selastic_says_why(daemon: Daemon, cluster: SlurmCluster) -> None:
    rigid = cluster.sbatch("exec sleep 600", "-o/dev/null", "--gres=gpu:1")
    stays = submit(cluster, "g02", "--gres=gpu:1")
    cluster.exec(["scontrol", "update", f"jobid={stays}", "Requeue=0"], user="alice")
    salloc = (
        "salloc -J shell --comment=elastic:1-4 --gres=gpu:1 sleep 300 >/tmp/salloc 2>&1 & echo $!"
    )
    pid = cluster.exec(salloc, user="alice").stdout.strip()
    try:
        squeue = "until j=$(squeue -h -n shell -t R -o %i | grep .); do sleep 0.2; done; echo $j"
        shell = cluster.exec(squeue).stdout.strip()
        cluster.jobs.append(int(shell))
        until(lambda: "interactive" in daemon.selastic("show", shell, check=False))
        until(lambda: "--no-requeue" in daemon.selastic("show", str(stays), check=False))
        time.sleep(3)
        for job in (rigid, stays, int(shell)):
            assert shown(cluster, job)["restart_cnt"] == 0
            assert gpus(cluster, job) == 1
    finally:
        cluster.exec(f"kill {pid}", check=False)
    refused = cluster.exec(
        "sbatch --comment=elastic:1-4 --gres=gpu:1 : --gres=gpu:1 <<<'#!/bin/sh'",
        user="alice",
        check=False,
    )
    assert "heterogeneous" in refused.stderr


def test_a_job_that_cannot_be_launched_after_a_change_goes_on_elsewhere(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    """The change is over when the Prolog fails: Slurm drains the node, and holds the job."""
    conf, prolog = "/etc/slurm/slurm.conf", "/etc/slurm/prolog"
    write = (
        f"cat >{prolog}; chmod 755 {prolog}; cp {conf} {conf}.kept; echo Prolog={prolog} >>{conf}"
    )
    cluster.exec(f"{write}; pkill -HUP slurmd", node="g01", stdin="#!/bin/sh\nsleep 1\nexit 1\n")
    try:
        job = submit(cluster, "g02", "-xg04", directive="1-8,types=a100,sizes=1:8")
        daemon.wait_for(f"JobId={job} Run=2 Change=launch-failed NodeList=g01,g02 Action=release")
        cluster.wait(job, "RUNNING")
        assert set(held(cluster, job)) == {"g02"}
    finally:
        cluster.exec(f"mv {conf}.kept {conf}; rm {prolog}; pkill -HUP slurmd", node="g01")
        cluster.exec("scontrol update node=g01 state=resume", check=False)
