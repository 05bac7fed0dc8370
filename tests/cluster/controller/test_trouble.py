"""Invalid input and faults of the host: selasticd logs one line and stays up."""

import json
import re
import time
from collections.abc import Iterator
from functools import partial

import pytest

from tests.support.container_cluster import forgotten_seconds, light_trainings
from tests.support.container_cluster.selasticd import (
    PYTHON,
    Daemon,
    eager_config,
    gpus,
    leaves_no_trace,
    shown,
    submit_running,
)
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

#: Its jobs only sleep.
pytestmark = pytest.mark.sleeping

SHM = "/dev/shm/selastic"
LIGHT = "/shared/home/alice/forgotten"
FILL = "cat /dev/zero >/dev/shm/fill 2>/dev/null || true"
#: What a job named `late` waits for before it saves, see drivers/reporter.py.
SAVE = "/tmp/save-{}"

NEWER = "import sqlite3; sqlite3.connect('{}').execute('PRAGMA user_version = 9')"
#: Sends the reports on its standard input, one JSON object a line; prints what became of each.
REPORTER = """
import sys
from slurm_elastic.rpc import frames
for line in sys.stdin:
    try:
        report = eval(line)
        reply = frames.call("ctld:7321", {"v": 1, "op": "report", "report": report}, timeout_s=5)
        print(reply["orders"]["action"])
    except frames.ChannelError as error:
        print("refused:", error)
"""


@pytest.fixture(autouse=True)
def _clean(daemon: Daemon) -> Iterator[None]:
    """Make sure that selasticd runs before and after each test."""
    if not daemon.runs():
        daemon.start()
    with leaves_no_trace(daemon):
        yield
        if not daemon.runs():
            daemon.start()


def lines(log: str, pattern: str) -> list[str]:
    return [line for line in log.splitlines() if re.search(pattern, line)]


# --- the configuration ---


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[controller]\npolicy = "genius"\n', 'broken.toml:2: policy "genius" is unknown; known: '),
        (
            "[controller]\nintervall_s = 3\n",
            "broken.toml:2: intervall_s is unknown in [controller]",
        ),
        (
            "[controller]\ninterval_s = 0\n",
            "broken.toml:2: interval_s = 0 is invalid: expected 1",
        ),
        ("[controler]\n", "broken.toml:1: section [controler] is unknown; known: controller"),
        ("[controller]\nmode = act\n", "broken.toml"),
        (None, "/tmp/broken.toml: No such file or directory; name another file with --config"),
    ],
    ids=["policy", "key", "value", "section", "toml", "missing"],
)
def test_a_broken_configuration_is_one_line(
    cluster: SlurmCluster, text: str | None, said: str
) -> None:
    cluster.exec("rm -f /tmp/broken.toml", user="selastic")
    if text is not None:
        cluster.exec("cat >/tmp/broken.toml", stdin=text, user="selastic")
    done = cluster.exec("selasticd --config /tmp/broken.toml", user="selastic", check=False)
    assert done.returncode == 1
    assert len((done.stdout + done.stderr).splitlines()) == 1
    assert done.stderr.startswith(f"selasticd: {said}")
    if "policy" not in said and "unknown" in said:
        checked = cluster.exec("selastic --config /tmp/broken.toml ping", user="alice", check=False)
        assert said in checked.stderr


def test_a_second_selasticd_says_who_is_in_the_way(cluster: SlurmCluster, daemon: Daemon) -> None:
    command = f"selasticd --config {daemon.home}/elastic.toml"
    done = cluster.exec(command, user="selastic", check=False)
    assert done.returncode == 1
    assert f"{daemon.home}: another selasticd has its ledger there" in done.stderr
    elsewhere = "sed 's,^state_dir.*,state_dir = \"/tmp/elsewhere\",'"
    write = f"mkdir -p /tmp/elsewhere; {elsewhere} {daemon.home}/elastic.toml >/tmp/second.toml"
    cluster.exec(write, user="selastic")
    done = cluster.exec("selasticd --config /tmp/second.toml", user="selastic", check=False)
    assert done.returncode == 1
    assert "Address already in use" in done.stderr


# --- Slurm and munge ---


def test_slurmctld_is_down_at_the_start(cluster: SlurmCluster, daemon: Daemon) -> None:
    daemon.stop()
    job = submit_running(cluster)
    time.sleep(6)  # slurmctld forgets what is younger
    cluster.exec("pkill -9 slurmctld")
    begun = len(daemon.log())
    try:
        daemon.start()
        daemon.wait_for("error: .*nothing is changed until it answers", after=begun)
        assert re.match("note: (slurmctld|squeue)", daemon.selastic("status"))  # pyslurm, JSON
        time.sleep(5)
    finally:
        cluster.exec("cluster-start slurmctld")
    daemon.wait_for("slurmctld answers again", after=begun)
    until(lambda: gpus(cluster, job) == 4, what=daemon.log)
    assert len(lines(daemon.log()[begun:], "error")) == 1


@pytest.mark.parametrize("state", ["COOL", "DONE"])
def test_slurmctld_dies_in_a_change(cluster: SlurmCluster, daemon: Daemon, state: str) -> None:
    """It may have forgotten the start, but not the whole change: docs/slurm-versions.md."""
    job = submit_running(cluster, "-Jraw", "--nice=7")
    time.sleep(6)  # slurmctld forgets what is younger
    begun = len(daemon.log())
    moment = forgotten_seconds.SAVED if state == "DONE" else "sleep 0.2"
    die = f"{moment}; pkill -9 slurmctld; sleep 3; cluster-start slurmctld"
    daemon.when(job, state, die, first=f"scontrol update jobid={job} JobName=now")
    # A start that is forgotten is a requeue of Slurm's: the job waits for two minutes.
    until(lambda: gpus(cluster, job) == 4, seconds=120, what=daemon.log)
    until(lambda: shown(cluster, job)["nice"] == 7, seconds=60, what=daemon.log)
    assert len(lines(daemon.log()[begun:], "nothing is changed until it answers")) <= 1


def test_slurmctld_forgets_a_requeue_that_has_ended_the_job(
    cluster: SlurmCluster, daemon: Daemon
) -> None:
    """It is killed while the script ends; the new one takes the job for a failed one.

    selasticd is stopped until then: else the change might repeat its requeue before.
    """
    told, killed = "/shared/scratch/told", "/shared/scratch/killed"
    handles = "/shared/scratch/handles-term"
    cluster.exec(["rm", "-f", told, killed, handles])
    ending = f"touch {told}; until [ -e {killed} ]; do sleep 0.1; done; exit 143"
    script = f"trap '{ending}' TERM; touch {handles}; sleep 600 & wait"
    options = ("--elastic=1-4", "-o/dev/null", "-Ca100&rack2", "-Jraw", "--nice=7")
    job = cluster.sbatch(script, *options)
    until(lambda: cluster.exec(["test", "-e", handles], check=False).returncode == 0)
    time.sleep(6)  # slurmctld forgets what is younger
    begun = len(daemon.log())
    first = f"{forgotten_seconds.KEEP}; scontrol update jobid={job} JobName=now"
    failed = f"scontrol show job {job} | grep -q JobState=FAILED"
    within = "for _ in $(seq 1000); do {} && break; sleep 0.2; done"
    forget = (
        f"{within.format(f'[ -e {told} ]')}; kill -STOP {daemon.pid}; "
        f"pkill -9 slurmctld; touch {killed}; {forgotten_seconds.FORGET}; "
        f"{within.format(failed)}; kill -CONT {daemon.pid}"
    )
    daemon.when(job, "DRAIN", forget, first=first)
    daemon.wait_for(f"JobId={job} .*Requeue=forgotten .*Action=requeue", after=begun)
    until(lambda: gpus(cluster, job) == 4, seconds=60, what=daemon.log)
    until(lambda: shown(cluster, job)["nice"] == 7, seconds=60, what=daemon.log)
    assert shown(cluster, job)["restart_cnt"] == 1


def test_slurmctld_forgets_a_whole_change(cluster: SlurmCluster, daemon: Daemon) -> None:
    """Its job is the attempt before then, on one GPU, while another runs on the same node."""
    cluster.exec(["rm", "-rf", LIGHT])
    light_trainings.install(partial(cluster.exec, user="alice"), LIGHT)
    script = (
        f"cd {LIGHT}; until [ -e go ]; do sleep 0.1; done; export PYTHONPATH=$PWD\n"
        f"exec esrun python3 -m {light_trainings.PROGRAM} --out $PWD/out --checkpoint-every 2"
        " --samples 1024 --epochs 400 --global-batch 32 --rate 40"
    )
    options = ("--nodes=1", "--gres=gpu:1", "-Ca100&rack2", f"-o{LIGHT}/log", "--time=30")
    job = cluster.sbatch(script, "--elastic=1-4,in-place=never", "-Jlight", *options)
    cluster.wait(job, "RUNNING")
    time.sleep(12)
    started = shown(cluster, job)["start_time"]["number"]

    def start_is_saved() -> bool:
        # slurmctld saves what has changed: after the second of the start nothing else would.
        cluster.exec(["scontrol", "update", f"jobid={job}", "JobName=light"])
        return int(cluster.exec(forgotten_seconds.SAVED_AT).stdout) > started

    until(start_is_saved, what="slurmctld has not saved the start")
    first = f"{forgotten_seconds.KEEP}; touch {LIGHT}/go"
    daemon.when(job, "DONE", forgotten_seconds.FORGET, first=first)
    until(lambda: gpus(cluster, job) == 1, seconds=30, what=daemon.log)
    assert shown(cluster, job)["restart_cnt"] == 0
    until(lambda: shown(cluster, job)["restart_cnt"] == 1, what=daemon.log)
    time.sleep(5)
    # Not in two minutes, if Slurm makes it wait.
    cluster.exec(["scontrol", "update", f"jobid={job}", "StartTime=now"], check=False)
    until(lambda: gpus(cluster, job) == 4, seconds=120, what=daemon.log)


def test_munged_is_down(cluster: SlurmCluster, daemon: Daemon) -> None:
    job = submit_running(cluster, "-Jraw")
    begun = len(daemon.log())
    cluster.exec("pkill munged")
    try:
        daemon.wait_for("error: .*(munge|Munge|Protocol authentication)", after=begun)
        time.sleep(5)
    finally:
        cluster.exec("cluster-start munged")
    daemon.wait_for("answers again", after=begun)
    cluster.exec(["scontrol", "update", f"jobid={job}", "JobName=now"])
    until(lambda: gpus(cluster, job) == 4)


# --- the ledger ---


@pytest.fixture
def shm(cluster: SlurmCluster, daemon: Daemon) -> Iterator[str]:
    """Yield a state folder on a small file system."""
    cluster.exec(f"mkdir -p {SHM}", user="selastic")
    daemon.stop()
    daemon.configure(eager_config().replace("{state}", SHM))
    daemon.start()
    yield SHM
    daemon.stop()
    cluster.exec(f"rm -rf /dev/shm/* {SAVE.format('*')}")
    daemon.configure(eager_config())
    daemon.start()


def test_the_disk_is_full(cluster: SlurmCluster, daemon: Daemon, shm: str) -> None:
    """What has begun ends well, who was only asked to save goes on, and nothing new is begun."""
    begun = len(daemon.log())
    daemon.configure(eager_config(mode="advise").replace("{state}", SHM))
    daemon.signal("HUP")
    job = submit_running(cluster)
    asked = cluster.sbatch("exec sleep 600", "--elastic=1-4", "-o/dev/null", "-Jlate", "-wg05")
    for ready in (job, asked):
        daemon.wait_for(f"JobId={ready} Action=grow .* Mode=advise", after=begun)
    # both begin in one round; the disk is full when the second one has saved
    patient = eager_config().replace("{state}", SHM).replace("notice_s = 10", "notice_s = 60")
    daemon.configure(patient)
    daemon.when(job, "COOL", f"{FILL}; touch {SAVE.format(asked)}", first=f"kill -HUP {daemon.pid}")
    until(lambda: gpus(cluster, job) == 4)
    daemon.wait_for(f"JobId={asked} Transition=.* State=UNDONE .*Problem=not-written")
    begun = len(daemon.log())
    other = cluster.sbatch("exec sleep 600", "--elastic=1-4", "-o/dev/null", "-wg06")
    cluster.wait(other, "RUNNING")
    time.sleep(6)
    assert daemon.runs()
    for untouched in (asked, other):
        assert gpus(cluster, untouched) == 1
        assert shown(cluster, untouched)["restart_cnt"] == 0
    complaints = lines(daemon.log(), "error: ledger .*no new change is begun")
    assert 1 <= len(complaints) <= 2, complaints
    assert "ledger" in daemon.selastic("status")
    cluster.exec("rm /dev/shm/fill")
    daemon.wait_for("the ledger can be written again", after=begun)
    until(lambda: gpus(cluster, other) == gpus(cluster, asked) == 4)
    assert "done" in daemon.selastic("history", str(job))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("head -c 5000 /dev/urandom >{}", "file is not a database; move the file away"),
        ("truncate -s 6000 {}", "malformed.*move the file away"),
        ("dd if=/dev/urandom of={} bs=1 seek=4096 count=20000 conv=notrunc", "move the file away"),
        (f'{PYTHON} -c "{NEWER}"', "written by a newer slurm-elastic"),
        ("rm {}; mkdir {}", "unable to open database file"),
    ],
    ids=["noise", "truncated", "damaged", "newer", "directory"],
)
def test_a_ledger_that_cannot_be_used_is_one_line(
    cluster: SlurmCluster, daemon: Daemon, spoil: str, said: str
) -> None:
    state = cluster.exec("mktemp -d /tmp/state.XXXX", user="selastic").stdout.strip()
    whole = f"c('{daemon.home}/ledger.sqlite').backup(c('{state}/ledger.sqlite'))"  # WAL included
    cluster.exec(f'{PYTHON} -c "from sqlite3 import connect as c; {whole}"', user="selastic")
    cluster.exec(spoil.replace("{}", f"{state}/ledger.sqlite"))
    text = eager_config().replace("{state}", state)
    cluster.exec(f"cat >{state}/elastic.toml", stdin=text, user="selastic")
    command = f"timeout 20 selasticd --config {state}/elastic.toml"
    done = cluster.exec(command, user="selastic", check=False)
    assert done.returncode == 1, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert re.search(f"^selasticd: ledger {state}/ledger.sqlite: .*{said}", done.stderr)


def test_rubbish_within_the_ledger_is_left_out(cluster: SlurmCluster, daemon: Daemon) -> None:
    job = submit_running(cluster)
    until(lambda: gpus(cluster, job) == 4)
    daemon.stop()
    spoil = (
        "import sqlite3; db = sqlite3.connect(argv[1]);"
        "db.execute(\"update jobs set record = '{broken'\");"
        "db.execute(\"update transitions set body = '[1', live = 1\");"
        "db.execute(\"insert or replace into meta values ('policy_state', 'x')\"); db.commit()"
    )
    cluster.exec([PYTHON, "-c", f"from sys import argv; {spoil}", f"{daemon.home}/ledger.sqlite"])
    begun = len(daemon.log())
    daemon.start()
    until(lambda: f"{job} " in daemon.selastic("status"))
    daemon.selastic("history", str(job))
    assert len(lines(daemon.log()[begun:], "unreadable|cannot be read")) >= 1
    assert gpus(cluster, job) == 4


# --- lies ---


def tell(cluster: SlurmCluster, user: str, *reports: dict) -> list[str]:
    text = "".join(f"{report!r}\n".replace("inf", "1e999") for report in reports)
    done = cluster.exec([PYTHON, "-c", REPORTER], user=user, stdin=text)
    return done.stdout.splitlines()


def test_lies_harm_nobody(cluster: SlurmCluster, daemon: Daemon) -> None:
    job = submit_running(cluster)
    until(lambda: f"JobId={job}" in daemon.selastic("show", str(job), check=False))
    fast = {"job_id": job, "run": 0, "phase": "training", "proven": True, "gpus": 1}
    lies = [
        {**fast, "step_time_s": 5e-324, "global_batch": 2**31, "steps_measured": 99},
        {**fast, "step_time_s": 1e6, "global_batch": 1, "steps_measured": 2**31},
        {**fast, "restore_s": 1e6, "checkpoint_s": 1e6, "startup_s": 0.0},
        {**fast, "run": 2**31, "phase": "saved", "notice": 2**62},
        {**fast, "step_time_s": float("inf")},
        {**fast, "progress": 7.0},
        {**fast, "job_id": 2**32 - 1},
        {**fast, "phase": "conquering"},
        {**fast, "kind": "\x1b[31m"},
    ]
    answers = tell(cluster, "alice", *lies)
    assert [a.startswith("refused") for a in answers] == [False] * 4 + [True] * 5
    (answer,) = tell(cluster, "bob", {**fast, "phase": "saved", "notice": 1})
    assert answer == f"refused: job {job} belongs to another user"
    daemon.wait_for(f"JobId={job} Uid=2002 Refused=report: not the owner")
    begun = len(daemon.log())
    honest = cluster.sbatch("exec sleep 600", "--elastic=1-4", "-o/dev/null", user="bob")
    until(lambda: gpus(cluster, honest) == 4, seconds=60)
    assert "error" not in daemon.log()[begun:]
    assert json.loads(daemon.selastic("status", "--json"))["jobs"]
