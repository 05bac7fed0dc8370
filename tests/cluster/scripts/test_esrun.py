"""esrun on the real cluster, with a stand-in for the controller."""

import time
from collections.abc import Iterator

import pytest

from tests.support.container_cluster.esrun_stand_in import ADDRESS, StandIn, running_stand_in
from tests.support.container_cluster.slow_links import cut
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

DIRECTORY = "/shared/scratch/esrun"

#: Saves its own checkpoints and loads them, and knows nothing of us.
SCRIPT = """
import glob, json, os, signal, sys, time
rank, resumes = int(os.environ["RANK"]), "forgetful" not in sys.argv
log = open(f"log-{rank}", "a", buffering=1)
step, asked = 0, []
old = sorted(glob.glob("ckpt/*.json"), key=lambda p: int(p.split("-")[-1][:-5]))
if old and resumes:
    step = json.load(open(old[-1]))["step"]
    print("resumed from", step, file=log)
def on_signal(number, frame):
    asked.append(number)
    print("asked", os.getpid(), file=log)
if "signal" in sys.argv:
    signal.signal(signal.SIGUSR2, on_signal)
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "worker" in sys.argv and os.fork() == 0:
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    time.sleep(1000)
every = 100000 if "signal" in sys.argv else 6
while True:
    time.sleep(0.25)
    step += 1
    if rank == 0 and (step % every == 0 or asked or step == 4):
        asked.clear()
        os.makedirs("ckpt", exist_ok=True)
        with open("ckpt/x.tmp", "w") as file:
            json.dump({"step": step}, file)
        os.rename("ckpt/x.tmp", f"ckpt/s-{step}.json")
        print("saved", step, file=log)
"""


NEXT = f"""#!/bin/bash
#SBATCH --gpus=1 --requeue --output={DIRECTORY}/job/next.out
exec esrun sh -c 'echo =next $RANK/$WORLD_SIZE run $SLURM_ELASTIC_RESTART restarts \
    ${{SLURM_RESTART_COUNT-unset}}'
"""


@pytest.fixture
def directory(cluster: SlurmCluster) -> Iterator[str]:
    cluster.exec(f"install -d -o alice -g alice {DIRECTORY}")
    yield DIRECTORY
    cluster.exec(f"rm -rf {DIRECTORY}")


@pytest.fixture
def controller(cluster: SlurmCluster, directory: str) -> Iterator[StandIn]:
    with running_stand_in(cluster, directory) as stand_in:
        yield stand_in


def submit(cluster: SlurmCluster, script: str, *options: str, name: str = "job") -> int:
    """Submit from a directory of its own, with the stand-in as its controller.

    Not by `--export=NAME=…`: slurmd would fetch the user's environment with clone(2), which
    unprivileged containers refuse and slurmd does not survive.
    """
    home = f"{DIRECTORY}/{name}"
    cluster.exec(f"mkdir -p {home}; cat >{home}/script.py", user="alice", stdin=SCRIPT)
    return cluster.sbatch(
        f"export SLURM_ELASTIC_CONTROLLER={ADDRESS}\n{script}",
        f"--chdir={home}",
        "--output=out",
        "--open-mode=append",
        "--requeue",
        *options,
    )


def output(cluster: SlurmCluster, name: str = "job", file: str = "out") -> str:
    return cluster.exec(f"cat {DIRECTORY}/{name}/{file} 2>/dev/null || true").stdout


def wait_output(
    cluster: SlurmCluster, text: str, *, name: str = "job", file: str = "out", times: int = 1
) -> str:
    end = time.monotonic() + 60
    while (found := output(cluster, name, file)).count(text) < times:
        assert time.monotonic() < end, f"{text!r} is not in {file}:\n{found}"
        time.sleep(0.2)
    return found


def requeue(cluster: SlurmCluster, job: int, *shape: str) -> float:
    """Restart a job in a new shape, as the controller does; return seconds until it was PENDING."""
    began = time.monotonic()
    cluster.exec(f"scontrol requeuehold Incomplete {job}")
    busy = f"squeue -h -j {job} -o %T | grep -q PENDING && ! squeue -h -t CG -j {job} | grep -q ."
    cluster.exec(f"until {busy}; do sleep 0.1; done", timeout=60)
    took = time.monotonic() - began
    time.sleep(2)
    if shape:
        cluster.exec(f"scontrol update jobid={job} {' '.join(shape)}")
    cluster.exec(f"scontrol update jobid={job} StartTime=now; scontrol release {job}")
    return took


RANK_LINE = (
    "esrun --gpus one"
    " sh -c 'echo =$SLURMD_NODENAME $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NODE_RANK"
    " gpu=$CUDA_VISIBLE_DEVICES $MASTER_ADDR:$MASTER_PORT $SLURM_ELASTIC_RUN_ID"
    " $SLURM_ELASTIC_RESTART'"
)


def ranks(text: str) -> list[list[str]]:
    lines = [line[1:].split() for line in text.splitlines() if line.startswith("=")]
    return sorted(lines, key=lambda words: int(words[1].split("/")[0]))


def test_a_rank_of_a_restarted_job_submits_the_next_job(
    cluster: SlurmCluster, controller: StandIn
) -> None:
    """Slurm gives that job the rank's SLURM_STEP_NUM_TASKS and SLURM_RESTART_COUNT."""
    home = f"{DIRECTORY}/job"
    cluster.exec(f"mkdir -p {home}; cat >{home}/next.sh", user="alice", stdin=NEXT)
    first = "[ $RANK$SLURM_RESTART_COUNT = 01 ] && sbatch next.sh; sleep 600"
    job = submit(cluster, f"exec esrun sh -c '{first}'", "-N1", "--gpus-per-node=2")
    cluster.wait(job, "RUNNING")
    requeue(cluster, job)
    said = wait_output(cluster, "=next", file="next.out")
    assert "=next 0/1 run 0 restarts unset" in said
    assert "esrun: attempt 1: 1 rank on " in said


def test_ranks_see_all_gpus_of_their_node(cluster: SlurmCluster, directory: str) -> None:
    names = "CUDA_VISIBLE_DEVICES LOCAL_RANK GROUP_RANK SLURM_NTASKS SLURM_PROCID SLURM_LOCALID"
    show = " ".join(f"${name}" for name in names.split())
    job = submit(cluster, f"esrun sh -c 'echo = {show}'", "-N2", "--gpus=a100:6", "-c1", "-n2")
    cluster.wait(job, "COMPLETED")
    lines = [line.split()[1:] for line in output(cluster).splitlines() if line.startswith("=")]
    assert len(lines) == 6
    for gpus, local, group, tasks, _, local_id in lines:
        mine = [words for words in lines if words[2] == group]
        assert gpus == ",".join(map(str, range(len(mine))))
        assert (local, tasks) == (local_id, "6")
    assert sorted(words[4] for words in lines) == [str(rank) for rank in range(6)]


def test_every_rank_finds_its_place_and_one_gpu(cluster: SlurmCluster, directory: str) -> None:
    job = submit(cluster, RANK_LINE, "-N2", "--gres=gpu:a100:2")
    cluster.wait(job, "COMPLETED")
    found = ranks(output(cluster))
    first = found[0][0]
    assert [words[1:5] for words in found] == [
        ["0/4", "0/2", "0", "gpu=0"],
        ["1/4", "1/2", "0", "gpu=1"],
        ["2/4", "0/2", "1", "gpu=0"],
        ["3/4", "1/2", "1", "gpu=1"],
    ]
    assert {words[5].split(":")[0] for words in found} == {first}
    assert {tuple(words[6:]) for words in found} == {(f"elastic-{job}", "0")}


def test_uneven_gpus_and_fewer_cpus_than_ranks(cluster: SlurmCluster, directory: str) -> None:
    cluster.wait(submit(cluster, RANK_LINE, "-N2", "--gpus=a100:6", "-c1", "-n2"), "COMPLETED")
    found = ranks(output(cluster))
    counts = {words[0]: words[2].split("/")[1] for words in found}
    assert sorted(counts.values()) == ["2", "4"]
    assert [words[1] for words in found] == [f"{rank}/6" for rank in range(6)]
    for node, count in counts.items():
        mine = [words[4] for words in found if words[0] == node]
        assert mine == [f"gpu={gpu}" for gpu in range(int(count))]


def test_gpus_of_nodes_that_do_not_say_theirs_are_asked_of_slurm(
    cluster: SlurmCluster, directory: str
) -> None:
    silent = """mkdir bin
    srun=$(command -v srun)
    printf '#!/bin/sh\ncase "$*" in *esrun-probe*) exit 1;; esac\nexec %s "$@"' $srun >bin/srun
    chmod +x bin/srun; export PATH=$PWD/bin:$PATH
    """
    job = submit(cluster, silent + RANK_LINE, "-N2", "--gpus=a100:6", "-c1", "-n2")
    cluster.wait(job, "COMPLETED")
    assert [words[1] for words in ranks(output(cluster))] == [f"{rank}/6" for rank in range(6)]


def test_gpus_per_task_is_understood(cluster: SlurmCluster, directory: str) -> None:
    job = submit(cluster, RANK_LINE, "-N2", "-n2", "--gpus-per-task=2", "-c2", "--mem=800")
    cluster.wait(job, "COMPLETED")
    assert [words[1] for words in ranks(output(cluster))] == ["0/4", "1/4", "2/4", "3/4"]


def test_a_job_without_gpus_runs_its_tasks(cluster: SlurmCluster, directory: str) -> None:
    cluster.wait(submit(cluster, RANK_LINE, "-N2", "-n3"), "COMPLETED")
    assert [words[1] for words in ranks(output(cluster))] == ["0/3", "1/3", "2/3"]


FORMS = {
    "gres": ("-N1 --gres=gpu:1", "NumNodes=2-2 NumTasks=2 TresPerNode=gres/gpu:2"),
    "per-node": ("-N1 --gpus-per-node=1", "NumNodes=2-2 NumTasks=2 TresPerNode=gres/gpu:2"),
    "total": ("-N1 --gpus=1", "NumNodes=2-2 NumTasks=2 TresPerJob= TresPerNode=gres/gpu:2"),
    "per-task": (
        "-N1 -n1 --gpus-per-task=1",
        "NumNodes=2-2 NumTasks=2 TresPerTask= TresPerNode=gres/gpu:2",
    ),
    "tasks-per-gpu": (
        "-N1 --gpus=1 --ntasks-per-gpu=1",
        "NumNodes=2-2 NumTasks=2 TresPerJob= TresPerNode=gres/gpu:2",
    ),
    "cpus": (
        "-N1 --gpus-per-node=1 --ntasks-per-node=1 -c2 --mem=500",
        "NumNodes=2-2 NumTasks=2 TresPerNode=gres/gpu:2 CPUsPerTask=2",
    ),
    "by-gpu": (
        "-N1 --gpus=1 --cpus-per-gpu=2 --mem-per-gpu=200",
        "NumNodes=2-2 NumTasks=2 TresPerJob= TresPerNode=gres/gpu:2",
    ),
}


def test_a_requeue_with_a_new_shape_leaves_nothing_stale(
    cluster: SlurmCluster, directory: str
) -> None:
    """Each form of submission, grown from one GPU to two nodes of two."""
    stale = (
        "env | grep -E '^SLURM_(GPUS|GPUS_PER_NODE|NTASKS_PER_NODE|NTASKS_PER_GPU|CPUS_PER_GPU)='"
    )
    script = f'{RANK_LINE}; esrun sh -c "{stale}; true"; [ $SLURM_RESTART_COUNT ] || sleep 60'
    jobs = {
        name: submit(cluster, script, *form.split(), name=name) for name, (form, _) in FORMS.items()
    }
    for name, job in jobs.items():
        wait_output(cluster, "0/1", name=name)
        requeue(cluster, job, FORMS[name][1])
    for name, job in jobs.items():
        cluster.wait(job, "COMPLETED", "FAILED")
        text = output(cluster, name)
        second = text[text.index("attempt 2") :]
        assert [words[1] for words in ranks(second)] == ["0/4", "1/4", "2/4", "3/4"], text
        assert {words[7] for words in ranks(second)} == {"1"}
        lines = {line for line in second.splitlines() if line.startswith("SLURM_")}
        assert lines <= {"SLURM_NTASKS_PER_NODE=2"}, f"{name}: our own srun sets this one"


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("exit 0", 0),
        ("[ $RANK = 2 ] && exit 85; exec sleep 60", 85),
        ("[ $RANK = 1 ] && kill -SEGV $$; exec sleep 60", 139),
    ],
)
def test_the_first_failing_rank_decides(
    cluster: SlurmCluster, directory: str, program: str, code: int
) -> None:
    job = submit(cluster, f"esrun sh -c '{program}'\necho code $?", "-N2", "--gres=gpu:2")
    cluster.wait(job, "COMPLETED")
    assert f"code {code}\n" in output(cluster)


def test_usr1_for_esrun_reaches_the_ranks(cluster: SlurmCluster, directory: str) -> None:
    program = 'trap "echo got it; exit 3" USR1; touch up-$RANK; while :; do sleep 0.1; done'
    script = (
        f"esrun sh -c '{program}' &\nuntil [ -e up-0 ] && [ -e up-1 ]; do sleep 0.1; done\n"
        "kill -USR1 $!; wait $!; echo code $?"
    )
    cluster.wait(submit(cluster, script, "--gres=gpu:2"), "COMPLETED")
    text = output(cluster)
    assert "got it" in text
    assert "code 3\n" in text


def test_sigterm_for_esrun_alone_ends_the_ranks(cluster: SlurmCluster, directory: str) -> None:
    script = (
        "esrun sh -c 'touch up-$RANK; exec sleep 60' & first=$!\n"
        "until [ -e up-0 ] && [ -e up-3 ]; do sleep 0.1; done\n"
        "esrun true; echo second $?\n"
        "kill $first; wait $first; echo code $?; esrun true; echo next $?"
    )
    cluster.wait(submit(cluster, script, "-N2", "--gres=gpu:2"), "COMPLETED")
    text = output(cluster)
    assert "code 143\n" in text
    assert "esrun: the job runs another esrun already (process " in text
    assert "second 2\n" in text
    assert "next 0\n" in text


def test_srun_is_started_again_when_slurmctld_hangs(cluster: SlurmCluster, directory: str) -> None:
    wait = "until [ -e go ]; do sleep 0.1; done"
    job = submit(cluster, f"{wait}; exec esrun sh -c 'echo trained on $WORLD_SIZE'")
    cluster.wait(job, "RUNNING")
    cluster.exec("pkill -STOP slurmctld")
    try:
        cluster.exec(f"touch {directory}/job/go", user="alice")
        wait_output(cluster, "slurmctld does not answer srun, which is started again")
    finally:
        cluster.exec("pkill -CONT slurmctld")
    cluster.wait(job, "COMPLETED")
    assert output(cluster).count("trained on 1") == 1


def test_srun_is_started_again_when_a_node_does_not_answer(
    cluster: SlurmCluster, directory: str
) -> None:
    wait = "until [ -e go ]; do sleep 0.1; done"
    job = submit(cluster, f"{wait}; exec esrun sh -c 'echo trained on $WORLD_SIZE'", "-wg[01-02]")
    cluster.wait(job, "RUNNING")
    with cut(cluster, "g02"):
        cluster.exec(f"touch {directory}/job/go", user="alice")
        wait_output(cluster, "a node does not answer srun, which is started again")
    cluster.wait(job, "COMPLETED")
    _, again = output(cluster).split("esrun: attempt 1 in place: 2 ranks")
    assert again.count("trained on 2") == 2


def test_ranks_of_whose_end_srun_is_not_told_are_not_waited_for(
    cluster: SlurmCluster, directory: str
) -> None:
    program = "echo $RANK runs; until [ -e end ]; do sleep 0.1; done; exit $((3*RANK))"
    job = submit(cluster, f"exec esrun sh -c '{program}'", "-wg[01-02]")
    for rank in range(2):
        wait_output(cluster, f"{rank} runs")
    time.sleep(3)  # esrun has seen them
    with cut(cluster, "g02"):
        cluster.exec(f"touch {directory}/job/end", user="alice")
        failed = rf"\[{job}\.0\] error: Failed to send MESSAGE_TASK_EXIT"
        search = ["grep", failed, "/var/log/slurm/slurmd-g02.log"]
        until(
            lambda: cluster.exec(search, node="g02", check=False).stdout,
            what="slurmstepd could tell srun",
        )
    cluster.wait(job, "FAILED", timeout=240)
    text = output(cluster)
    assert f"step {job}.0 has ended, as slurmctld says" in text
    assert "the program ended with exit code 3" in text


def test_a_silent_controller_changes_nothing(cluster: SlurmCluster, directory: str) -> None:
    job = submit(cluster, "esrun sh -c 'sleep 3; echo done'", "--gres=gpu:1")
    cluster.wait(job, "COMPLETED")
    text = output(cluster)
    assert "done\n" in text
    assert text.count("continues without it") == 1


LIBRARY = """
from slurm_elastic.job.rank_socket import RankSocket
import time
link = RankSocket.connect()
link.send({"phase": "training", "step": 3, "step_time_s": 0.5, "steps_measured": 4, "gpus": 99})
while link.orders().action != "notice":
    link.wait(10)
print("noticed", link.orders().notice, round(link.orders().deadline_s), flush=True)
link.send({"phase": "saved", "notice": link.orders().notice, "proven": True})
while link.orders().action == "notice":
    link.wait(10)
print("then", link.orders().action, flush=True)
"""


def test_the_library_reports_and_is_given_orders(
    cluster: SlurmCluster, controller: StandIn
) -> None:
    program = f"{DIRECTORY}/library.py"
    cluster.exec(f"cat >{program}", stdin=LIBRARY, user="alice")
    script = f"esrun sh -c '[ $RANK != 0 ] || /opt/slurm-elastic/bin/python3 {program}'"
    job = submit(cluster, script, "-N2", "--gres=gpu:1")
    report = controller.wait_for(job, kind="library", step=3)
    assert (report["gpus"], report["nodes"], report["run"]) == (2, 2, 0)
    assert report["uid"] == int(cluster.exec("id -u alice").stdout)
    controller.order(job, "notice", notice=17, deadline_s=30)
    controller.wait_for(job, phase="saved", notice=17, proven=True)
    controller.order(job, "resume")
    cluster.wait(job, "COMPLETED")
    text = output(cluster)
    assert "noticed 17 30" in text
    assert "then resume" in text
    assert controller.wait_for(job, phase="ended")["exit_code"] == 0
    measured = [r for r in controller.reports(job) if "step_time_s" in r]
    assert len(measured) <= 2, "a measurement is reported once"


def rehearse(cluster: SlurmCluster, controller: StandIn, job: int) -> None:
    controller.wait_for(job, rehearsal="able")
    controller.order(job, "notice", notice=4, deadline_s=60, rehearsal=True)
    controller.wait_for(job, phase="saved", notice=4)
    requeue(cluster, job)
    controller.order(job, "run")


def test_a_script_proves_itself_in_a_rehearsal_and_is_moved(
    cluster: SlurmCluster, controller: StandIn
) -> None:
    job = submit(cluster, "esrun --checkpoint 'ckpt/*.json' python3 script.py", "-N2", "--gpus=2")
    assert not controller.wait_for(job, kind="script", step=1)["proven"]
    rehearse(cluster, controller, job)
    assert controller.wait_for(job, proven=True)["run"] == 1
    wait_output(cluster, "resumed from", file="log-0")
    assert "is kept in" in output(cluster)
    controller.order(job, "notice", notice=5, deadline_s=60, reason="room for job 9")
    controller.wait_for(job, phase="saved", notice=5)
    took = requeue(cluster, job, "NumNodes=1-1 NumTasks=1 TresPerJob= TresPerNode=gres/gpu:1")
    assert took < 10, "nobody waited for KillWait"
    controller.order(job, "run")
    report = controller.wait_for(job, run=2, gpus=1, nodes=1)
    assert report["proven"], "the proof survives the requeue"
    wait_output(cluster, "resumed from", file="log-0", times=2)
    wait_output(cluster, "resumed: the script has read")
    assert "room for job 9" in output(cluster)


def test_a_script_that_starts_afresh_is_found_out(
    cluster: SlurmCluster, controller: StandIn
) -> None:
    job = submit(
        cluster, "esrun --checkpoint 'ckpt/*.json' python3 script.py forgetful", "--gpus=1"
    )
    rehearse(cluster, controller, job)
    controller.wait_for(job, rehearsal="refuted")
    wait_output(cluster, "it does not resume")
    assert not any(report["proven"] for report in controller.reports(job))
    kept = f"/shared/home/alice/.slurm-elastic/kept/elastic-{job}/before-rehearsal"
    assert cluster.exec(f"ls {kept}").stdout.startswith("s-")


def test_the_signal_asks_the_ranks_and_not_their_workers(
    cluster: SlurmCluster, controller: StandIn
) -> None:
    command = "esrun --checkpoint 'ckpt/*.json' --signal USR2 python3 script.py signal worker"
    job = submit(cluster, command, "-N2", "--gres=gpu:2")
    # It saves once and then not until it is asked: nothing but time shows the end of that save.
    controller.wait_for(job, timeout=120, step=1)
    controller.order(job, "notice", notice=1, deadline_s=60)
    controller.wait_for(job, phase="saved", notice=1)
    logs = [output(cluster, file=f"log-{rank}") for rank in range(4)]
    assert [log.count("asked") for log in logs] == [1, 1, 1, 1]
    processes = "ps -eo args | grep -c '^python3 script.py signal worker'"
    for node in cluster.exec(
        f"squeue -h -j {job} -o %N | xargs scontrol show hostnames"
    ).stdout.split():
        assert cluster.exec(processes, node=node).stdout.strip() == "4", "two ranks, two workers"
    controller.order(job, "resume")
    controller.wait_for(job, phase="training", step=2)


def test_a_parked_rank_that_ignores_sigterm_costs_no_killwait(
    cluster: SlurmCluster, controller: StandIn
) -> None:
    command = "esrun --checkpoint 'ckpt/*.json' python3 script.py stubborn"
    job = submit(cluster, command, "--gres=gpu:2")
    controller.wait_for(job, step=1)
    controller.order(job, "notice", notice=1, deadline_s=60)
    controller.wait_for(job, phase="saved", notice=1)
    assert requeue(cluster, job) < 10


def test_another_user_cannot_play_the_controller(
    cluster: SlurmCluster, controller: StandIn
) -> None:
    own = 's/7391/7392/; s#^here = .*#here = pathlib.Path("/tmp/bob")#'
    bob = cluster.exec(
        f"mkdir -p /tmp/bob; sed '{own}' {DIRECTORY}/stand_in.py >/tmp/bob/stand_in.py; "
        "python3 /tmp/bob/stand_in.py </dev/null >/tmp/bob/log 2>&1 & echo $!",
        user="bob",
    ).stdout.strip()
    script = "export SLURM_ELASTIC_CONTROLLER=ctld:7392; esrun sh -c 'sleep 4; echo done'"
    try:
        cluster.wait(submit(cluster, script, "--gres=gpu:1"), "COMPLETED")
    finally:
        cluster.exec(f"kill {bob}; rm -r /tmp/bob")
    assert "which is not its account" in output(cluster)
